"""Forward and backward of a linear layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jfp8
from jfp8.scaling.sink import init_sink
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.products import flax_op
from on_gpu.records import Record
from on_gpu.shapes import Shape, name_of, shapes
from on_gpu.timing import chained, copies, random

NN = (((1,), (0,)), ((), ()))  # y[i, j] = sum_k x[i, k] w[k, j]

# Bytes of memory traffic for each element of x, w and the gradient, at least: what one pass over
# them takes to quantize them in both directions, and a pass before it for their amax.
QUANTIZE_BYTES = {"delayed": 4.0, "current": 6.0, "rowwise": 6.0, "block": 4.06, "mxfp8": 4.06}


# Tokens, features of the output and of the input of layers that FP8 may slow down.
NARROW = ((8192, 768, 768), (32768, 1024, 1024), (49152, 3072, 768), (8192, 1024, 4096))


def linear(settings: Settings) -> Iterator[Group]:
    """Section: ``y = x w``, dx and dw from x, w and dy, all in bf16."""
    large = shapes(settings)
    small = [] if settings.smoke else [*((n, n, n) for n in (1024, 2048)), *NARROW]
    for shape in (*large, *small):
        compared = _RECIPES + (_IMPLEMENTATIONS if shape == large[0] else [])
        yield Group(name_of(shape), list(_linear_cases(shape, compared, settings)), "bf16")
    # The slowest last: they heat the device.
    for shape in large[:1]:
        yield Group(name_of(shape), list(_linear_cases(shape, _OTHERS, settings)), "bf16")


def _linear_cases(
    shape: Shape, compared: list[tuple[str, str | None]], settings: Settings
) -> Iterator[Case]:
    m, n, k = shape
    flops, elements = 6 * m * n * k, m * k + k * n + m * n

    def make(seed: int) -> tuple[jax.Array, ...]:
        sizes = ((m, k), (k, n), (m, n))
        return tuple(random(s, jnp.bfloat16, seed=3 * seed + i) for i, s in enumerate(sizes))

    inputs = copies(make, settings)

    def case(
        name: str,
        function: Callable[..., Any],
        extra: Callable[[], tuple[Any, ...]],
        work: Record,
        kernels: tuple[str, ...] = (),
    ) -> Case:
        def prepare() -> Timed:
            arguments = [(*i, *extra()) for i in inputs()]
            label = f"linear-{name_of(shape)}-{name}"
            calls = 12 if m * n * k <= 4096**3 else 6
            return chained(function, arguments, settings, calls=calls, name=label, **work)

        return Case(name, prepare, kernels)

    yield case("bf16", _bf16_linear, tuple, {"flops_bf16": flops})
    for recipe, implementation in compared:
        bytes_per_element = QUANTIZE_BYTES.get(recipe, QUANTIZE_BYTES["delayed"])
        work = {"flops_f8": flops, "bytes": int(bytes_per_element * elements)}
        if recipe.startswith("Flax"):
            op = recipe.removeprefix("Flax ")
            function = functools.partial(_flax_linear, op=op)
            yield case(recipe, function, functools.partial(_flax_state_of, op), work)
        else:
            name = f"{recipe} {implementation or ''}".strip()
            options = {"recipe": recipe, "implementation": implementation}
            function = functools.partial(_fp8_linear, **options)
            kernels = () if implementation == "xla" else KERNELS.get(recipe, ())
            yield case(name, function, functools.partial(_state_of, recipe), work, kernels)


# Recipe, or Flax's operation, and implementation: None is what whoever does not ask gets.
_RECIPES: list[tuple[str, str | None]] = [
    ("delayed", None),
    ("current", None),
    ("block", None),
    ("rowwise", None),
]
_IMPLEMENTATIONS: list[tuple[str, str | None]] = [
    ("delayed", "xla"),
    ("delayed", "mosaic_gpu"),
    ("current", "xla"),
    ("current", "mosaic_gpu"),
]
_OTHERS: list[tuple[str, str | None]] = [
    ("Flax Fp8DirectDotGeneralOp", None),
    ("mxfp8", None),
    ("Flax Fp8DotGeneralOp", None),
]
# Kernels of the default implementation of a recipe on Hopper.
KERNELS = {
    "delayed": ("quantize_tensor", "tensor_amax", "matmul"),
    "current": ("quantize_tensor", "matmul"),
    "rowwise": ("quantize_lines", "row_and_column_amax", "matmul"),
    "block": ("quantize_rows_in_blocks", "quantize_tiles", "block_matmul"),
}


def _bf16_linear(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    def product(x, w):
        return jax.lax.dot_general(x, w, NN, preferred_element_type=jnp.bfloat16)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def _state_of(recipe: str) -> tuple[Any, Any]:
    """The state in the middle of training: histories of data as in `linear`, and a sink."""
    state = jfp8.recipes.get(recipe).init_state()
    return jax.tree.map(lambda history: history + 5.0, state), init_sink()


def _fp8_linear(
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    state: Any,
    sink: jax.Array,
    *,
    recipe: str,
    implementation: Any,
) -> Any:
    def product(x, w, sink):
        return jfp8.scaled_dot_general(
            x,
            w,
            NN,
            recipe=jfp8.recipes.get(recipe),
            state=state,
            sink=None if state is None else sink,
            implementation=implementation,
        )

    y, vjp = jax.vjp(product, x, w, sink)
    return y, *vjp(dy)


def _flax_state_of(op: str) -> tuple[Any]:
    x = jnp.ones((16, 16), jnp.bfloat16)
    return (flax_op(op).init(jax.random.key(0), x, x, NN),)


def _flax_linear(x: jax.Array, w: jax.Array, dy: jax.Array, state: Any, *, op: str) -> Any:
    module = flax_op(op)
    y, vjp = jax.vjp(lambda x, w, state: module.apply(state, x, w, NN), x, w, state)
    return y, *vjp(dy)
