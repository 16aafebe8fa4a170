"""Mixtures of experts, forward and backward: grouped matmuls, and whole layers.

In bf16 they are ``jax.lax.ragged_dot``, for which XLA may mask and multiply far more than the rows
of each group. What such work takes at best, "bf16 batched" shows: dense matmuls of equal groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jfp8
from jfp8.scaling.sink import init_sink
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.linear import QUANTIZE_BYTES
from on_gpu.records import Record
from on_gpu.timing import chained, copies, random

Shape = tuple[int, int, int, int]  # rows, groups, k, n
RECIPES = ("delayed", "block", "current")


def experts(settings: Settings) -> Iterator[Group]:
    """Section: grouped matmuls with equal and unequal groups, and layers."""
    for shape in _shapes(settings):
        m, groups, k, n = shape
        for is_equal in (True, False):
            name = f"{m}x{k}x{n}, {groups} {'equal' if is_equal else 'unequal'}"
            yield Group(name, list(_products(shape, is_equal, settings)), "bf16 batched")
    for tokens, width, hidden in _layers(settings):
        name = f"MoE {tokens}x{width}, 2 of 8 of {hidden}"
        yield Group(name, list(_moe(tokens, width, hidden, settings)), "bf16")


def _shapes(settings: Settings) -> list[Shape]:
    if settings.smoke:
        return [(256, 2, 128, 128)]
    return [(16384, 8, 4096, 4096), (16384, 64, 2048, 1408)]


def _layers(settings: Settings) -> list[tuple[int, int, int]]:
    if settings.smoke:
        return [(128, 128, 128)]
    return [(8192, 4096, 4096), (8192, 2048, 1024)]


# Grouped matmuls.


def _products(shape: Shape, is_equal: bool, settings: Settings) -> Iterator[Case]:
    m, groups, k, n = shape
    flops = 6 * m * k * n
    sizes = _sizes(m, groups, is_equal)

    def make(seed: int) -> tuple[jax.Array, ...]:
        of = ((m, k), (groups, k, n), (m, n))
        x, w, dy = (random(s, jnp.bfloat16, seed=3 * seed + i) for i, s in enumerate(of))
        return x, w, dy, sizes

    inputs = copies(make, settings)

    def case(name: str, function: Callable[..., Any], work: Record, kernels: Any = ()) -> Case:
        def prepare() -> Timed:
            label = f"experts-{groups}-{'equal' if is_equal else 'unequal'}-{name}"
            return chained(function, inputs(), settings, calls=4, name=label, **work)

        return Case(name, prepare, kernels)

    # Its groups are equal, whatever the others' are: the time of dense matmuls of the same work.
    yield case("bf16 batched", functools.partial(_batched, groups), {"flops_bf16": flops})
    for recipe in RECIPES:
        per_element = QUANTIZE_BYTES[recipe]
        work = {"flops_f8": flops, "bytes": int(per_element * (m * k + groups * k * n + m * n))}
        # Weights are scaled by their current amax with every recipe: one pass more.
        work["bytes"] += 2 * groups * k * n if recipe == "delayed" else 0
        kernels = ("grouped_matmul", "grouped_outer")
        yield case(recipe, functools.partial(_fp8, recipe), work, kernels)
    yield case("bf16", _ragged, {"flops_bf16": flops})


def _sizes(rows: int, groups: int, is_equal: bool) -> jax.Array:
    """Return sizes of groups; unequal ones are from a fifth of the mean to nearly twice of it."""
    shares = np.ones(groups) if is_equal else np.linspace(0.2, 1.8, groups)
    found = (rows * shares / shares.sum()).astype(np.int32)
    found[-1] += rows - found.sum()
    return jnp.asarray(found)


def _ragged(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> Any:
    def product(x, w):
        return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.bfloat16)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def _batched(groups: int, x: jax.Array, w: jax.Array, dy: jax.Array, _: jax.Array) -> Any:
    def product(x, w):
        return jnp.einsum("gmk,gkn->gmn", x, w)

    x, dy = (a.reshape(groups, -1, a.shape[-1]) for a in (x, dy))
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def _fp8(recipe: str, x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> Any:
    how = jfp8.recipes.get(recipe)
    state = jax.tree.map(lambda history: history + 5.0, how.init_state())

    def product(x, w, sink):
        sink = None if state is None else sink
        return jfp8.scaled_ragged_dot(x, w, sizes, recipe=how, state=state, sink=sink)

    y, vjp = jax.vjp(product, x, w, init_sink())
    return y, *vjp(dy)


# Layers.


def _moe(tokens: int, width: int, hidden: int, settings: Settings) -> Iterator[Case]:
    flops, weights = 6 * 2 * tokens * 3 * width * hidden, 8 * 3 * width * hidden
    # Inputs and gradients of outputs, of two experts for each token.
    activations = 2 * tokens * (width + 2 * hidden + hidden + width)
    for recipe in ("bf16", "delayed", "block"):
        is_bf16 = recipe == "bf16"
        layer = jfp8.MoE(
            8,
            hidden,
            recipe=None if is_bf16 else jfp8.recipes.get(recipe),
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
        )
        work: Record = {"flops_bf16": flops}
        if not is_bf16:
            per_element = QUANTIZE_BYTES[recipe]
            work = {"flops_f8": flops, "bytes": int(per_element * (weights + activations))}
        kernels = () if is_bf16 else ("grouped_matmul", "grouped_outer")
        prepare = functools.partial(
            layer_timed, layer, (tokens, width), settings, f"moe-{hidden}-{recipe}", work
        )
        yield Case(recipe, functools.partial(prepare, in_fp8=not is_bf16), kernels)


def layer_timed(
    layer: nn.Module,
    shape: tuple[int, int],
    settings: Settings,
    name: str,
    work: Record,
    *,
    in_fp8: bool = True,
) -> Timed:
    """Return a layer of jfp8, forward and backward, in the middle of training.

    Args:
      layer: function from bf16 to bf16.
      shape: shape of its input.
      settings: see `chained`.
      name: name of the program's file.
      work: facts for the record.
      in_fp8: False computes everything in high precision.
    """
    inputs = [random(shape, jnp.bfloat16, seed=2 * i) for i in range(1 if settings.smoke else 4)]
    variables = dict(jax.jit(layer.init)(jax.random.key(0), inputs[0]))
    state = jax.tree.map(lambda history: history + 5.0, variables.pop("fp8", {}))
    result = jax.eval_shape(layer.apply, {**variables, "fp8": state}, inputs[0])
    draw = lambda seed: jax.tree.map(lambda y: random(y.shape, y.dtype, seed=seed), result)
    dys = [draw(2 * i + 1) for i in range(len(inputs))]

    def both(variables, state, x, dy):
        with jfp8.autocast(enabled=in_fp8):
            y, vjp = jax.vjp(lambda v, x: layer.apply({**v, "fp8": state}, x), variables, x)
        return y, *vjp(dy)

    arguments = [(variables, state, x, dy) for x, dy in zip(inputs, dys, strict=True)]
    return chained(both, arguments, settings, calls=4, name=name, **work)
