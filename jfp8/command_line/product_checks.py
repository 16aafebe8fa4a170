"""Hold each kernel that multiplies to float64, within what tensor cores may lose.

Products are compared twice: bit for bit on small integers, whose sums are all exact in any order;
and on random data within the error that tensor cores may make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfp8.command_line.exactness import (
    Record,
    as_f32,
    integers,
    kernel,
    normal,
    powers_of_two,
    product_error,
    run,
    same,
    spread,
)
from jfp8.scaling.formats import E4M3FN, E5M2


def check_product(
    ours: Callable[..., Any],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[Any, Any],
    more: tuple[Any, ...],
    parts: Callable[[np.ndarray, np.ndarray], Iterator[tuple[Any, np.ndarray, np.ndarray]]],
    chunk: int | None,
    out: Any,
) -> Record:
    """Hold the result of a kernel, ``ours(a, b, *more)``, to products in float64.

    `parts` gets both operands in f32, and yields, for each part of the result, its index and the
    two matrices, with scales, of which it is ``lhs @ rhs.T``. For `chunk` see `product_error`.
    """
    record: Record = {}
    for make in (integers, normal):
        a, b = make(shapes[0], dtypes[0], 1), make(shapes[1], dtypes[1], 2)
        (got,) = run(ours, a, b, *more)
        for at, lhs, rhs in parts(as_f32(a), as_f32(b)):
            if make is integers or not lhs.shape[1]:
                exact = lhs.astype(np.float64) @ rhs.T.astype(np.float64)
                same([got[at]], [exact.astype(out)])
            else:
                record = product_error(got[at], lhs, rhs, chunk, out)
    return record


def check_matmul(
    m: int,
    n: int,
    k: int,
    dtypes: tuple[Any, Any],
    out: Any,
    promote: bool,
    rows: bool,
    tiles: Any = None,
) -> Record:
    """Check a product with one scale for each operand, or for each row and column."""
    row, column = (powers_of_two((size,) if rows else (), s) for size, s in ((m, 3), (n, 4)))

    def ours(a, b, row, column):
        return kernel("matmul")(a, b, row, column, out, promote=promote, tiles=tiles)

    def whole(a, b):
        yield ..., a * row.reshape(-1, 1), b * column.reshape(-1, 1)

    shapes, chunk = ((m, k), (n, k)), 128 if promote else None
    return check_product(ours, shapes, dtypes, (row, column), whole, chunk, out)


def check_block_matmul(
    m: int, n: int, k: int, dtypes: tuple[Any, Any], out: Any, by_tile: bool, tiles: Any = None
) -> Record:
    """Check a matmul with a scale for each 1x128 of `a`, and 1x128 or 128x128 of `b`."""
    blocks = math.ceil(k / 128)
    a_scale = powers_of_two((blocks, m), 3)
    b_scale = powers_of_two((blocks, math.ceil(n / 128) if by_tile else n), 4)

    def ours(a, b, s, t):
        return kernel("block_matmul")(a, b, s, t, out, tiles=tiles)

    def whole(a, b):
        yield ..., a * spread(a_scale.T, a.shape), b * spread(b_scale.T, b.shape)

    return check_product(ours, ((m, k), (n, k)), dtypes, (a_scale, b_scale), whole, 128, out)


def check_grouped_matmul(groups: int, tiles: int, n: int, k: int, scaled: bool) -> Record:
    """Check products of tiles of 128 rows, each with the matrix of its group."""
    blocks = math.ceil(k / 128)
    group = np.sort(np.random.default_rng(7).integers(0, groups, tiles)).astype(np.int32)
    a_scale = powers_of_two((blocks, tiles * 128), 3)
    b_scale = powers_of_two((groups, blocks, math.ceil(n / 128)), 4)

    def ours(a, b, group, scales):
        return kernel("grouped_matmul")(a, b, group, *scales, jnp.float32)

    def of_tiles(a, b):
        a = a * spread(a_scale.T, a.shape) if scaled else a
        b = b * spread(b_scale.transpose(0, 2, 1), b.shape)
        for t, g in enumerate(group):
            part = slice(t * 128, (t + 1) * 128)
            yield part, a[part], b[g]

    shapes, dtypes = ((tiles * 128, k), (groups, n, k)), (E4M3FN.dtype, E4M3FN.dtype)
    more = group, (a_scale if scaled else None, b_scale)
    return check_product(ours, shapes, dtypes, more, of_tiles, 128, jnp.float32)


def check_grouped_outer(groups: int, tiles: int, m: int, n: int, scaled: bool) -> Record:
    """Check sums over the tiles of each group, one of which has none."""
    count = np.bincount(np.random.default_rng(7).integers(1, groups, tiles), minlength=groups)
    count = count.astype(np.int32)  # none in the first group
    first = (np.cumsum(count) - count).astype(np.int32)
    a_scale, b_scale = powers_of_two((tiles, m), 3), powers_of_two((tiles, n), 4)

    def ours(a, b, first, count, scales):
        return kernel("grouped_outer")(a, b, first, count, *scales, jnp.float32)

    def of_groups(a, b):
        a = a * spread(a_scale.T, a.shape)
        b = b * spread(b_scale.T, b.shape) if scaled else b
        for g in range(groups):
            part = slice(first[g] * 128, (first[g] + count[g]) * 128)
            yield g, a[:, part], b[:, part]

    shapes, dtypes = ((m, tiles * 128), (n, tiles * 128)), (E4M3FN.dtype, E5M2.dtype)
    more = first, count, (a_scale, b_scale if scaled else None)
    return check_product(ours, shapes, dtypes, more, of_groups, 128, jnp.float32)
