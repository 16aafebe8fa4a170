"""Hopper's kernels by their names, their operands, and a check at the sizes that are timed."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.command_line.exactness import poisoned_runs
from jfp8.scaling.formats import E4M3FN, Format
from on_gpu.records import Record

MODULES = ("hopper.quantize", "hopper.matmul", "hopper.grouped", "scales_in_kernels")


def kernel(name: str) -> Callable[..., Any]:
    """Return a function of `jfp8.kernels` by its name; JAX before 0.11.2 cannot import them."""
    modules = (importlib.import_module(f"jfp8.kernels.{module}") for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def from_amax(fmt: Format) -> Callable[..., Any]:
    """Return the function by which `quantize_tensor` makes a scale from one amax."""
    make = kernel("scale_and_inverse")
    return lambda known: make(known[0], fmt, None, poison=False)


def scales_of(kind: str, m: int, n: int, k: int) -> list[jax.Array]:
    """Return ones and twos as scales of blocks; for scales of whole operands, 2 and 1/4."""
    blocks = math.ceil(k / 128)
    sizes = {
        "block": ((blocks, m), (blocks, math.ceil(n / 128))),
        "block_columns": ((blocks, m), (blocks, n)),
        "block_transposed": ((blocks, math.ceil(m / 128)), (blocks, n)),
    }.get(kind)
    if sizes is None:
        return [jnp.float32(2), jnp.float32(0.25)]
    return [
        jax.random.randint(jax.random.key(i), size, 1, 3).astype(jnp.float32)
        for i, size in enumerate(sizes)
    ]


def product(
    kind: str, tiles: Any, a: jax.Array, b: jax.Array, row: jax.Array, column: jax.Array
) -> jax.Array:
    """Return a `kind` of matmul by its kernel, as it is timed; in bf16."""
    if kind.startswith("block"):
        return kernel("block_matmul")(a, b, row, column, jnp.bfloat16, tiles=tiles)
    promote = kind == "promoted"
    return kernel("matmul")(a, b, row, column, jnp.bfloat16, promote=promote, tiles=tiles)


def check_large(kind: str, m: int, n: int, k: int) -> Record:
    """Compare a matmul of integers at a size that is timed to XLA's in bf16.

    Both are exact: all sums stay below 2^13.
    """
    keys = jax.random.split(jax.random.key(2))
    a, b = (
        jax.random.randint(key, (size, k), -2, 3).astype(E4M3FN.dtype)
        for key, size in zip(keys, (m, n), strict=True)
    )
    scales = scales_of(kind, m, n, k)

    @jax.jit
    def differ(a, b, row, column, y):
        a, b = (x.astype(jnp.bfloat16) for x in (a, b))
        if row.ndim:
            a = a * jnp.repeat(row.T, 128, 1)[:, :k].astype(jnp.bfloat16)
            column = column.T if kind == "block_columns" else jnp.repeat(column.T, 128, 0)[:n]
            b = b * jnp.repeat(column, 128, 1)[:, :k].astype(jnp.bfloat16)
        scale = 1 if row.ndim else row * column
        expected = jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(~(y == (expected * scale).astype(jnp.bfloat16)))  # NaN too

    for y in poisoned_runs(functools.partial(product, kind, None), a, b, *scales):
        if wrong := int(differ(a, b, *scales, y)):
            raise AssertionError(f"{wrong} of {m * n} differ")
    return {}
