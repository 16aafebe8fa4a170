"""The f8 products in Pallas, interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jfp8.kernels.hopper import matmul
from jfp8.kernels.hopper.tiles import SHARED_MEMORY, Tiles, candidates, ranked
from support.arrays import along, assert_product, f64, scales
from support.arrays import standard_normal as normal
from support.interpreter import interpreted

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
SMALL = Tiles(tile_n=128, stages=2, group=2)


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch):
    """A device so small that each block takes several tiles of the output."""
    clusters = property(lambda grid: min(2 // grid.tiles.cluster, grid.size))
    monkeypatch.setattr(matmul.Grid, "clusters", clusters)


@pytest.mark.representative(3)
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize(
    ("shape", "row_scales", "column_scales", "formats", "out_dtype"),
    [
        ((256, 384, 640), True, True, (E4M3, E5M2), BF16),  # 6 tiles of 5 steps, ring of 2
        ((130, 200, 300), True, False, (E5M2, E4M3), F32),  # nothing divides; tiles overlap
        ((1, 64, 16), False, True, (E4M3, E4M3), F16),
    ],
)
def test_matmul(promote, shape, row_scales, column_scales, formats, out_dtype):
    m, n, k = shape
    a, b = normal(0, (m, k), formats[0]), normal(1, (n, k), formats[1])
    row, column = scales(2, m if row_scales else ()), scales(3, n if column_scales else ())
    row, column = row / 100, column / 100  # the range of f16
    y = interpreted(matmul.matmul, a, b, row, column, out_dtype, promote=promote, tiles=SMALL)
    scaled_a, scaled_b = f64(a) * f64(row).reshape(-1, 1), f64(b) * f64(column).reshape(-1, 1)
    assert_product(y, scaled_a, scaled_b, out_dtype)


@pytest.mark.parametrize("by_tile", ["b", "a", ""])
@pytest.mark.parametrize(
    ("shape", "tile_n", "out_dtype"),
    [
        ((256, 320, 384), 192, BF16),  # the second tile overlaps the first, both straddle blocks
        ((100, 200, 300), 128, F32),
    ],
)
def test_block_matmul(by_tile, shape, tile_n, out_dtype):
    (m, n, k), tiles = shape, Tiles(tile_n=tile_n, stages=2)
    a, b = normal(0, (m, k)), normal(1, (n, k), E5M2)
    scales_of = lambda name, size: -(-size // 128) if by_tile == name else size
    a_scale = scales(2, (-(-k // 128), scales_of("a", m)))
    b_scale = scales(3, (-(-k // 128), scales_of("b", n)))
    y = interpreted(matmul.block_matmul, a, b, a_scale, b_scale, out_dtype, tiles=tiles)
    each = lambda name, scale, size: along(scale.T, 0, size) if by_tile == name else scale.T
    scaled_a = f64(a) * along(each("a", a_scale, m), 1, k)
    scaled_b = f64(b) * along(each("b", b_scale, n), 1, k)
    assert_product(y, scaled_a, scaled_b, out_dtype)


@pytest.mark.parametrize("kind", ["running", "promoted", "block", "block_columns"])
def test_two_blocks_share_columns(kind):
    """Nothing divides: of two clusters in a column, the last block has only rows of padding."""
    (m, n, k), tiles = (328, 200, 296), Tiles(tile_n=128, stages=2, cluster=2)
    a, b = normal(0, (m, k)), normal(1, (n, k), E5M2)
    if not kind.startswith("block"):
        row, column = scales(2, m), scales(3, n)
        promote = kind == "promoted"
        y = interpreted(matmul.matmul, a, b, row, column, F32, promote=promote, tiles=tiles)
        scaled_a, scaled_b = f64(a) * f64(row)[:, None], f64(b) * f64(column)[:, None]
    else:
        a_scale, b_scale = scales(2, (3, m)), scales(3, (3, 2 if kind == "block" else n))
        y = interpreted(matmul.block_matmul, a, b, a_scale, b_scale, F32, tiles=tiles)
        of_columns = along(b_scale.T, 0, n) if kind == "block" else b_scale.T
        scaled_a, scaled_b = f64(a) * along(a_scale.T, 1, k), f64(b) * along(of_columns, 1, k)
    assert_product(y, scaled_a, scaled_b, F32)


def test_tall_tiles():
    tiles = Tiles(128, 128, 2)
    a, b, row, column = normal(0, (300, 384)), normal(1, (256, 384)), scales(2, 300), scales(3, 256)
    y = interpreted(matmul.matmul, a, b, row, column, F32, promote=False, tiles=tiles)
    assert_product(y, f64(a) * f64(row)[:, None], f64(b) * f64(column)[:, None], F32)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
def test_nan_and_infinity_stay_where_they_belong():
    a, b = f64(normal(0, (128, 256))), f64(normal(1, (192, 256), E5M2))
    a[3, 200], b[5, 7], b[100, 130] = np.nan, np.inf, -np.inf
    a[9, 7] = 0.0  # 0 * inf
    a[:, 130] = np.abs(a[:, 130]) + 1
    with np.errstate(invalid="ignore"):
        expected = a @ b.T
    a, b, one = jnp.asarray(a, E4M3), jnp.asarray(b, E5M2), jnp.ones((), F32)
    ones = jnp.ones((2, 128), F32), jnp.ones((2, 2), F32)
    for found in (
        interpreted(matmul.matmul, a, b, one, one, BF16, promote=True, tiles=SMALL),
        interpreted(matmul.block_matmul, a, b, *ones, BF16, tiles=SMALL),
    ):
        y = f64(found)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(np.isposinf(y), np.isposinf(expected))
        np.testing.assert_array_equal(np.isneginf(y), np.isneginf(expected))
        assert np.isnan(y[3]).all()
        assert np.isposinf(y[:, 5]).any()
        assert np.isfinite(y[0, 0])


def test_a_poisoned_scale_reaches_its_rows_only():
    a, b = normal(0, (128, 256)), normal(1, (128, 256))
    a_scale = jnp.ones((2, 128), F32).at[1, 70].set(jnp.nan)
    y = interpreted(matmul.block_matmul, a, b, a_scale, jnp.ones((2, 1), F32), F32, tiles=SMALL)
    np.testing.assert_array_equal(
        np.isnan(y), np.broadcast_to(np.arange(128)[:, None] == 70, y.shape)
    )


@pytest.mark.parametrize("promote", [False, True])
def test_largest_and_zero_operands(promote):
    """57344 * 57344 * 256 fits f32, not f16."""
    a = jnp.full((128, 256), 57344.0, E5M2).at[1].set(0.0)
    one = jnp.ones((), F32)
    expected = np.full((128, 64), 57344.0**2 * 256)
    expected[1] = 0
    y = interpreted(matmul.matmul, a, a[2:66], one, one, F32, promote=promote, tiles=SMALL)
    np.testing.assert_array_equal(y, expected)
    expected[expected > 0] = np.inf
    y = interpreted(matmul.matmul, a, a[2:66], one, one, F16, promote=promote, tiles=SMALL)
    np.testing.assert_array_equal(y, expected)


def test_empty():
    for m, n, k in ((0, 4, 8), (4, 0, 8), (4, 8, 0)):
        a, b = jnp.zeros((m, k), E4M3), jnp.zeros((n, k), E4M3)
        y = matmul.matmul(a, b, jnp.ones(m, F32), jnp.ones((), F32), BF16, promote=True)
        tiles_of_a, rows_of_b = jnp.ones((-(-k // 128), -(-m // 128))), jnp.ones((-(-k // 128), n))
        of_blocks = matmul.block_matmul(a, b, tiles_of_a, rows_of_b, BF16)
        for each in (y, of_blocks):
            np.testing.assert_array_equal(f64(each), np.zeros((m, n)))
            assert each.dtype == BF16


def test_a_tile_that_does_not_fit_is_refused():
    one, tiles = jnp.ones((), F32), Tiles(tile_n=256, stages=5)
    a = jnp.ones((1024, 1024), E4M3)
    f = jax.jit(lambda a: matmul.matmul(a, a, one, one, BF16, promote=False, tiles=tiles))
    with pytest.raises(ValueError, match="shared memory"):
        f.trace(a).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("kind", ["running", "promoted", "block", "block_columns"])
def test_the_best_tiles_are_candidates(kind):
    allowed = {(t.tile_m, t.tile_n, t.stages) for t in candidates(kind)}
    wide = ranked(kind, 8192, 8192, 8192)[0]
    narrow = ranked(kind, 128, 512, 8192)[0]
    assert {(t.tile_m, t.tile_n, t.stages) for t in (wide, narrow)} <= allowed
    assert narrow.tile_n < wide.tile_n  # rather more blocks than large ones
    for t in candidates(kind):
        assert t.stages * (2 * t.tile_m + t.tile_n) * 128 < SHARED_MEMORY


def test_a_kernel_is_traced_once_for_all_matmuls_of_its_shapes():
    """Python lowers a kernel in 0.2 s, and a dgrad often has the shapes of another's fprop."""
    a, row, block = jnp.zeros((256, 128), E4M3), jnp.ones(256), jnp.ones((1, 256))
    products = {
        "matmul": lambda: matmul.matmul(a, a, row, row, BF16, promote=False),
        "block_matmul": lambda: matmul.block_matmul(a, a, block, block, BF16),
    }
    for name, product in products.items():
        twice = jax.make_jaxpr(lambda f=product: [jax.jit(lambda: f())() for _ in range(2)])()
        inner = [eqn.params["jaxpr"].jaxpr.eqns for eqn in twice.eqns]
        bodies = [e.params["jaxpr"] for eqns in inner for e in eqns if e.params.get("name") == name]
        assert len(bodies) == 2
        assert bodies[0] is bodies[1]
