"""Hold each kernel that multiplies to float64, within what tensor cores may lose.

Products are compared twice: bit for bit on small integers, whose sums are all exact in any order;
and on random data within the error that tensor cores may make.
"""

from __future__ import annotations

import math
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
    """Check a matmul with one scale for each operand, or for each row and column."""

    def ours(a, b, row, column):
        return kernel("matmul")(a, b, row, column, out, promote=promote, tiles=tiles)

    row, column = (powers_of_two((size,) if rows else (), s) for size, s in ((m, 3), (n, 4)))
    record: Record = {}
    for make in (integers, normal):
        a, b = make((m, k), dtypes[0], 1), make((n, k), dtypes[1], 2)
        (got,) = run(ours, a, b, row, column)
        left, right = as_f32(a) * row.reshape(-1, 1), as_f32(b) * column.reshape(-1, 1)
        if make is integers:
            same([got], [(left.astype(np.float64) @ right.T.astype(np.float64)).astype(out)])
        else:
            record = product_error(got, left, right, 128 if promote else None, out)
    return record


def check_block_matmul(
    m: int, n: int, k: int, dtypes: tuple[Any, Any], out: Any, by_tile: bool, tiles: Any = None
) -> Record:
    """Check a matmul with a scale for each 1x128 of `a`, and 1x128 or 128x128 of `b`."""
    blocks = math.ceil(k / 128)
    a_scale = powers_of_two((blocks, m), 3)
    b_scale = powers_of_two((blocks, math.ceil(n / 128) if by_tile else n), 4)

    def ours(a, b, s, t):
        return kernel("block_matmul")(a, b, s, t, out, tiles=tiles)

    record: Record = {}
    for make in (integers, normal):
        a, b = make((m, k), dtypes[0], 1), make((n, k), dtypes[1], 2)
        (got,) = run(ours, a, b, a_scale, b_scale)
        left = as_f32(a) * spread(a_scale.T, (m, k))
        right = as_f32(b) * spread(b_scale.T, (n, k))
        if make is integers:
            same([got], [(left.astype(np.float64) @ right.T.astype(np.float64)).astype(out)])
        else:
            record = product_error(got, left, right, 128, out)
    return record


def check_grouped_matmul(groups: int, tiles: int, n: int, k: int, scaled: bool) -> Record:
    """Check products of tiles of 128 rows, each with the matrix of its group."""
    out, blocks = jnp.float32, math.ceil(k / 128)
    group = np.sort(np.random.default_rng(7).integers(0, groups, tiles)).astype(np.int32)
    a_scale = powers_of_two((blocks, tiles * 128), 3)
    b_scale = powers_of_two((groups, blocks, math.ceil(n / 128)), 4)
    scales = (a_scale if scaled else None, b_scale)

    def ours(a, b, group, scales):
        return kernel("grouped_matmul")(a, b, group, *scales, out)

    record: Record = {}
    for make in (integers, normal):
        a = make((tiles * 128, k), E4M3FN.dtype, 1)
        b = make((groups, n, k), E4M3FN.dtype, 2)
        (got,) = run(ours, a, b, group, scales)
        left, right = as_f32(a), as_f32(b)
        right = right * spread(b_scale.transpose(0, 2, 1), right.shape)
        if scaled:
            left = left * spread(a_scale.T, left.shape)
        for t, g in enumerate(group):
            part = slice(t * 128, (t + 1) * 128)
            if make is integers:
                expected = left[part].astype(np.float64) @ right[g].T.astype(np.float64)
                same([got[part]], [expected.astype(np.float32)])
            else:
                record = product_error(got[part], left[part], right[g], 128, out)
    return record


def check_grouped_outer(groups: int, tiles: int, m: int, n: int, scaled: bool) -> Record:
    """Check sums over the tiles of each group, one of which has none."""
    out = jnp.float32
    count = np.bincount(np.random.default_rng(7).integers(1, groups, tiles), minlength=groups)
    count = count.astype(np.int32)  # none in the first group
    first = (np.cumsum(count) - count).astype(np.int32)
    a_scale, b_scale = powers_of_two((tiles, m), 3), powers_of_two((tiles, n), 4)
    scales = (a_scale, b_scale if scaled else None)

    def ours(a, b, first, count, scales):
        return kernel("grouped_outer")(a, b, first, count, *scales, out)

    record: Record = {}
    for make in (integers, normal):
        a = make((m, tiles * 128), E4M3FN.dtype, 1)
        b = make((n, tiles * 128), E5M2.dtype, 2)
        (got,) = run(ours, a, b, first, count, scales)
        left, right = as_f32(a), as_f32(b)
        left = left * spread(a_scale.T, left.shape)
        if scaled:
            right = right * spread(b_scale.T, right.shape)
        for g in range(groups):
            part = slice(first[g] * 128, (first[g] + count[g]) * 128)
            if make is integers or not count[g]:
                expected = left[:, part].astype(np.float64) @ right[:, part].T.astype(np.float64)
                same([got[g]], [expected.astype(np.float32)])
            else:
                record = product_error(got[g], left[:, part], right[:, part], 128, out)
    return record
