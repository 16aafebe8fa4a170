"""Grouped products in Pallas, interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(int(v) for v in jax.__version__.split(".")[:3]) < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jfp8.kernels.hopper import grouped
from jfp8.kernels.hopper.tiles import Tiles
from support.arrays import along, assert_product, f64, scales
from support.arrays import standard_normal as normal
from support.interpreter import interpreted

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
TILE = 128


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch):
    """So few that each of them computes several parts of the output."""
    monkeypatch.setattr(grouped, "multiprocessors", lambda: 2)


def grouped_matmul_in_f64(a, b, group, a_scale, b_scale):
    """Operands of one product per tile of rows, with their scales."""
    a, b = f64(a), f64(b)
    if a_scale is not None:
        a = a * along(a_scale, 0, a.shape[1]).T
    b = b * along(along(b_scale, 1, b.shape[2]), 2, b.shape[1]).swapaxes(1, 2)
    return [(a[t * TILE : (t + 1) * TILE], b[g]) for t, g in enumerate(group.tolist())]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "k", "n", "with_scales", "tiles"),
    [
        ((E4M3, E4M3), BF16, 256, 320, True, None),  # 192 columns, and 64 twice
        ((E4M3, E5M2), F32, 200, 136, True, Tiles(tile_n=128, stages=2, group=2)),
        ((E5M2, E4M3), BF16, 384, 72, True, None),
        ((E5M2, E5M2), F32, 16, 448, False, Tiles(tile_n=256, stages=3)),
        ((E4M3, E4M3), F16, 384, 200, False, None),
    ],
    ids=["blocks", "ragged", "narrow", "columns", "columns in f16"],
)
def test_grouped_matmul(dtypes, out_dtype, k, n, with_scales, tiles):
    group = jnp.array([0, 2, 2], jnp.int32)  # group 1 is empty
    a, b = normal(0, (3 * TILE, k), dtypes[0]), normal(1, (3, n, k), dtypes[1])
    a_scale = scales(2, (-(-k // TILE), 3 * TILE)) if with_scales else None
    b_scale = scales(3, (3, -(-k // TILE), -(-n // TILE)))
    y = interpreted(grouped.grouped_matmul, a, b, group, a_scale, b_scale, out_dtype, tiles=tiles)
    for t, (rows, matrix) in enumerate(grouped_matmul_in_f64(a, b, group, a_scale, b_scale)):
        assert_product(y[t * TILE : (t + 1) * TILE], rows, matrix, out_dtype)


def test_grouped_matmul_keeps_what_is_not_finite_where_it_belongs():
    """NaN and Inf of an operand, and a block that is NaN by its scale."""
    a, b = np.ones((2 * TILE, 2 * TILE), E5M2), np.ones((2, 256, 2 * TILE), E5M2)
    a[3, 5], a[TILE + 4, 7], b[0, 9, 0] = np.nan, np.inf, np.nan
    a_scale, b_scale = np.ones((2, 2 * TILE), F32), np.ones((2, 2, 2), F32)
    a_scale[1, 100], b_scale[1, 0, 1] = np.nan, np.nan
    group = jnp.array([0, 1], jnp.int32)
    operands = map(jnp.asarray, (a, b))
    y = interpreted(grouped.grouped_matmul, *operands, group, a_scale, b_scale, F32)
    expected = np.full((2 * TILE, 256), 256.0)
    expected[3], expected[100], expected[:TILE, 9] = np.nan, np.nan, np.nan
    expected[TILE + 4] = np.inf
    expected[TILE:, TILE:] = np.nan  # the second 128 columns of group 1
    np.testing.assert_array_equal(y, expected)


def test_grouped_matmul_skips_tiles_of_no_group():
    a, b = jnp.full((3 * TILE, 200), jnp.nan, E4M3), normal(1, (2, 64, 200))
    a = a.at[TILE : 2 * TILE].set(normal(0, (TILE, 200)))
    group = jnp.array([-1, 1, -1], jnp.int32)
    y = interpreted(grouped.grouped_matmul, a, b, group, None, jnp.ones((2, 2, 1)), F32)
    assert_product(y[TILE : 2 * TILE], f64(a[TILE : 2 * TILE]), f64(b[1]), F32)
    np.testing.assert_array_equal(y[:TILE], np.zeros((TILE, 64)))
    np.testing.assert_array_equal(y[2 * TILE :], np.zeros((TILE, 64)))


def test_grouped_matmul_of_large_and_small_values():
    """The largest codes by scales that are nearly too large, and sums that f16 cannot hold."""
    a = jnp.full((TILE, TILE), 448.0, E4M3)
    b = jnp.full((1, 64, TILE), 57344.0, E5M2)
    group = jnp.zeros(1, jnp.int32)
    a_scale, b_scale = jnp.full((1, TILE), 2.0**100, F32), jnp.full((1, 1, 1), 2.0**-120, F32)
    y = interpreted(grouped.grouped_matmul, a, b, group, a_scale, b_scale, F32)
    np.testing.assert_array_equal(y, np.full((TILE, 64), 128 * 448 * 57344 * 2.0**-20, np.float32))
    y = interpreted(grouped.grouped_matmul, a, b, group, a_scale, jnp.ones((1, 1, 1)), F16)
    np.testing.assert_array_equal(y, np.full((TILE, 64), np.inf, np.float16))


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "m", "n", "with_scales", "tiles"),
    [
        ((E4M3, E4M3), BF16, 256, 192, True, None),
        ((E4M3, E5M2), F32, 136, 200, True, Tiles(tile_n=192, stages=2, group=2)),
        ((E5M2, E4M3), BF16, 72, 320, True, None),
        ((E5M2, E5M2), F32, 128, 448, False, Tiles(tile_n=256, stages=3)),
        ((E4M3, E4M3), F16, 200, 72, False, None),
    ],
    ids=["rows", "ragged", "flat", "only rows", "only rows in f16"],
)
def test_grouped_outer(dtypes, out_dtype, m, n, with_scales, tiles):
    first, count = [0, 0, 4, 4, 5], [0, 4, 0, 1, 0]  # more steps than stages, one, and none
    tiles_of_rows = 6  # the last of which belongs to no group
    k = tiles_of_rows * TILE
    a, b = normal(0, (m, k), dtypes[0]), normal(1, (n, k), dtypes[1])
    a_scale = scales(2, (tiles_of_rows, m))
    b_scale = scales(3, (tiles_of_rows, n)) if with_scales else None
    steps = jnp.array(first, jnp.int32), jnp.array(count, jnp.int32)
    y = interpreted(grouped.grouped_outer, a, b, *steps, a_scale, b_scale, out_dtype, tiles=tiles)
    a = f64(a) * along(a_scale, 0, k).T
    b = f64(b) * (1 if b_scale is None else along(b_scale, 0, k).T)
    for g, (begin, steps) in enumerate(zip(first, count, strict=True)):
        of_group = slice(begin * TILE, (begin + steps) * TILE)
        assert_product(y[g], a[:, of_group], b[:, of_group], out_dtype)


def test_grouped_outer_keeps_what_is_not_finite_where_it_belongs():
    """In its group, row or column; and tiles of no group are not looked at."""
    a, b = np.ones((TILE, 4 * TILE), E5M2), np.ones((64, 4 * TILE), E5M2)
    a[3, 5], b[7, TILE], b[9, 2 * TILE] = np.inf, np.nan, -np.inf
    a[:, 3 * TILE :] = np.nan
    a_scale, b_scale = np.ones((4, TILE), F32), np.ones((4, 64), F32)
    a_scale[2, 11], b_scale[3] = np.nan, np.nan
    first, count = jnp.array([0, 2, 3], jnp.int32), jnp.array([2, 1, 0], jnp.int32)
    operands = map(jnp.asarray, (a, b))
    y = interpreted(grouped.grouped_outer, *operands, first, count, a_scale, b_scale, F32)
    expected = np.empty((3, TILE, 64))
    expected[0], expected[1], expected[2] = 256.0, 128.0, 0.0
    expected[0, 3], expected[0, :, 7] = np.inf, np.nan
    expected[1, :, 9], expected[1, 11] = -np.inf, np.nan
    np.testing.assert_array_equal(y, expected)


def test_blocks_of_a_cluster_are_refused():
    """Only the kernel of plain matmuls is launched in clusters."""
    a, group = jnp.ones((2 * TILE, TILE), E4M3), jnp.zeros(2, jnp.int32)
    one, tiles = jnp.ones((1, 1, 1), F32), Tiles(tile_n=128, stages=2, cluster=2)
    f = lambda *x: grouped.grouped_matmul(*x, BF16, tiles=tiles)
    with pytest.raises(NameError, match="cluster"):
        jax.eval_shape(f, a, a[None, :TILE], group, None, one)


def test_nothing_to_multiply():
    empty = jnp.zeros((0,), jnp.int32)
    for t, n, k, groups in ((0, 64, 64, 2), (1, 0, 64, 2), (1, 64, 0, 2)):
        a, b = jnp.ones((t * TILE, k), E4M3), jnp.ones((groups, n, k), E4M3)
        y = grouped.grouped_matmul(
            a, b, jnp.zeros(t, jnp.int32), None, jnp.ones((groups, 1, 1)), BF16
        )
        np.testing.assert_array_equal(y, np.zeros((t * TILE, n), BF16))
        assert y.dtype == BF16
    for m, n, t, groups in ((0, 64, 1, 2), (64, 0, 1, 2), (64, 64, 0, 2), (64, 64, 1, 0)):
        a, b = jnp.ones((m, t * TILE), E4M3), jnp.ones((n, t * TILE), E4M3)
        of_group = jnp.zeros(groups, jnp.int32) if groups else empty
        y = grouped.grouped_outer(a, b, of_group, of_group, jnp.ones((t, m)), None, F32)
        np.testing.assert_array_equal(y, np.zeros((groups, m, n), F32))
