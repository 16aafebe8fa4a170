"""Causal attention, forward and backward, and forward alone: by cuDNN in bf16, and in FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jfp8
from jfp8.scaling.sink import init_sink
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.records import Record
from on_gpu.timing import chained, copies, random

Shape = tuple[int, int, int, int]  # batch, length, heads, depth

# Implementations of FP8 attention: None is what whoever does not ask gets.
_FP8: dict[str, tuple[str | None, bool]] = {
    "FP8": (None, False),
    "FP8, delayed scales": (None, True),
    "FP8 mosaic_gpu": ("mosaic_gpu", False),
}


def attention(settings: Settings) -> Iterator[Group]:
    """Section: q, k, v and dy in bf16; all shapes forward and backward before any forward alone."""
    for backward in (True, False):
        for shape in _shapes(settings):
            batch, length, heads, depth = shape
            what = "forward, backward" if backward else "forward"
            name = f"{batch}x{length}, {heads}x{depth}, {what}"
            yield Group(name, list(_cases(shape, backward, settings)), "bf16")


def _shapes(settings: Settings) -> list[Shape]:
    if settings.smoke:
        return [(1, 128, 1, 64)]
    tokens, heads = 16384, 16
    return [(tokens // n, n, heads, depth) for depth in (128, 64) for n in (8192, 2048)]


def _cases(shape: Shape, backward: bool, settings: Settings) -> Iterator[Case]:
    batch, length, heads, depth = shape
    elements = batch * length * heads * depth
    # Two products, half of them hidden, and five backward, where scores are recomputed.
    flops = 2 * elements * length * (7 if backward else 2) // 2

    def make(seed: int) -> tuple[jax.Array, ...]:
        return tuple(random(shape, jnp.bfloat16, seed=4 * seed + i) for i in range(4))

    inputs = copies(make, settings)

    def case(
        name: str,
        attend: Callable[..., Any],
        work: Record,
        kernels: tuple[str, ...] = (),
        extra: tuple[Any, ...] = (),
    ) -> Case:
        def prepare() -> Timed:
            function = functools.partial(_both if backward else _one, attend)
            arguments = [(*arrays, *extra) for arrays in inputs()]
            what = "both" if backward else "forward"
            label = f"attention-{length}-{depth}-{what}-{name}"
            return chained(function, arguments, settings, calls=6, name=label, **work)

        return Case(name, prepare, kernels)

    by_cudnn = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        implementation="xla" if settings.smoke else "cudnn",
    )
    yield case("bf16", by_cudnn, {"flops_bf16": flops})
    # Each operand is read in bf16, and written in FP8 straight and transposed.
    work = {"flops_f8": flops, "bytes": 4 * elements * (4 if backward else 3)}
    kernels = ("attention_forward", *(["attention_backward"] if backward else []))
    for name, (implementation, delayed) in _FP8.items():
        attend = functools.partial(_fp8, implementation=implementation)
        sink = ({"scores": init_sink(), "context": init_sink()},) if delayed else ()
        yield case(name, attend, work, ("quantize_heads", *kernels), sink)


def _fp8(
    q: jax.Array, k: jax.Array, v: jax.Array, sink: Any = None, *, implementation: str | None
) -> jax.Array:
    """FP8 attention with a scale for each token; with a sink, with delayed ones."""
    recipe = jfp8.recipes.get("delayed")
    state = jax.tree.map(lambda history: history + 5.0, recipe.init_state())
    return jfp8.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        recipe=recipe,
        state=None if sink is None else {"scores": state, "context": state},
        sink=sink,
        implementation=implementation,
    )


def _one(
    attend: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, _: Any, *sink: Any
) -> Any:
    return attend(q, k, v, *sink)


def _both(
    attend: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, dy: Any, *sink: Any
) -> Any:
    y, vjp = jax.vjp(attend, q, k, v, *sink)
    return y, *vjp(dy)
