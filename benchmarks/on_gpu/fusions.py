"""Fusions against the same computations without them, and kernels cut into different tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jfp8
from jfp8.kernels.hopper.tiles import ranked
from jfp8.scaling.formats import E4M3FN
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.experts import layer_timed
from on_gpu.kernels import product, scales_of
from on_gpu.linear import QUANTIZE_BYTES
from on_gpu.timing import chained, copies, random


def fusions(settings: Settings) -> Iterator[Group]:
    """Section: a gated MLP, projections of one input, forward and backward; tiles of matmuls."""
    tokens, width, hidden = (128, 128, 128) if settings.smoke else (8192, 4096, 11008)
    for recipe in ("delayed", "block"):
        cases = list(_mlp(recipe, tokens, width, hidden, settings))
        yield Group(f"MLP {tokens}x{width}x{hidden}, {recipe}", cases, "separate layers")
    for recipe in ("delayed", "block"):
        cases = list(_projections(recipe, tokens, width, settings))
        yield Group(f"q, k, v {tokens}x{width}, {recipe}", cases, "three layers")
    for size in (128,) if settings.smoke else (8192, 4096):
        for kind in ("running", "promoted", "block", "block_columns", "block_transposed"):
            cases = list(_tiles(kind, size, settings))
            yield Group(f"tiles of {kind}, {size}", cases, cases[0].name)


# Layers.


class SeparateMlp(nn.Module):
    """The computation of `jfp8.LayerNormMLP`, by separate layers."""

    hidden: int
    options: Any  # for both layers, and for the normalization

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"use_bias": False, **self.options}
        dtypes = {name: options[name] for name in ("dtype", "param_dtype")}
        h = jfp8.DenseGeneral((2, self.hidden), **options)(nn.LayerNorm(**dtypes)(x))
        h = jax.nn.silu(h[..., 0, :]) * h[..., 1, :]
        return jfp8.Dense(x.shape[-1], **options)(h)


class Projections(nn.Module):
    """Three projections of an input by three layers, or side by side by one."""

    layers: int
    options: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        width = x.shape[-1] * 3 // self.layers
        dense = functools.partial(jfp8.Dense, width, use_bias=False, **self.options)
        return [dense()(x) for _ in range(self.layers)]


def _options(recipe: str) -> dict[str, Any]:
    return {
        "recipe": jfp8.recipes.get(recipe),
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.bfloat16,
    }


def _mlp(recipe: str, tokens: int, width: int, hidden: int, settings: Settings) -> Iterator[Case]:
    options = _options(recipe)
    fused = functools.partial(
        jfp8.LayerNormMLP, hidden, activation="swiglu", use_bias=False, **options
    )
    layers = {
        "separate layers": SeparateMlp(hidden, nn.FrozenDict(options)),
        # Dropout between the matmuls keeps them apart, even if nothing is dropped.
        "activation apart": fused(intermediate_dropout_rate=0.5, deterministic=True),
        "fused": fused(),
    }
    elements = 3 * width * hidden + tokens * (width + 2 * hidden + hidden + width)
    work = {
        "flops_f8": 6 * tokens * 3 * width * hidden,
        "bytes": int(QUANTIZE_BYTES[recipe] * elements),
    }
    for name, layer in layers.items():
        label = f"mlp-{recipe}-{name}"
        yield Case(
            name, functools.partial(layer_timed, layer, (tokens, width), settings, label, work)
        )
    bf16 = {"flops_bf16": work["flops_f8"]}
    prepare = functools.partial(
        layer_timed, fused(), (tokens, width), settings, "mlp-bf16", bf16, in_fp8=False
    )
    yield Case("bf16", prepare)


def _projections(recipe: str, tokens: int, width: int, settings: Settings) -> Iterator[Case]:
    work = {
        "flops_f8": 6 * tokens * 3 * width**2,
        "bytes": int(QUANTIZE_BYTES[recipe] * (3 * width**2 + 4 * tokens * width)),
    }
    for name, layers in (("three layers", 3), ("one layer", 1)):
        layer = Projections(layers, nn.FrozenDict(_options(recipe)))
        label = f"qkv-{recipe}-{name}"
        yield Case(
            name, functools.partial(layer_timed, layer, (tokens, width), settings, label, work)
        )


# Tiles.


def _tiles(kind: Any, size: int, settings: Settings) -> Iterator[Case]:
    """Yield the best-ranked tiles of each cut, whatever their order; and a stage more."""
    best: dict[str, Any] = {}
    found = ranked(kind.removesuffix("_transposed"), size, size, size)
    if kind == "block_columns":  # the only kind whose best tiles leave room for one
        found.insert(1, dataclasses.replace(found[0], stages=found[0].stages + 1))
    for tiles in found:
        fields = dataclasses.asdict(tiles).items()
        best.setdefault(", ".join(f"{k} {v}" for k, v in fields if k != "group"), tiles)

    def make(seed: int) -> tuple[jax.Array, ...]:
        a, b = (random((size, size), E4M3FN.dtype, seed=2 * seed + i) for i in range(2))
        return a, b, *scales_of(kind, size, size, size)

    inputs = copies(make, settings)

    def timed(tiles: Any) -> Timed:
        work = {"flops_f8": 2 * size**3, "bytes": 4 * size**2}
        return chained(functools.partial(product, kind, tiles), inputs(), settings, **work)

    kernels = ("block_matmul" if kind.startswith("block") else "matmul",)
    for name, tiles in list(best.items())[: 2 if settings.smoke else 6]:
        yield Case(name, functools.partial(timed, tiles), kernels)
