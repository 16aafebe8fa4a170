"""Tiles of matmuls: ranked as an H100 runs them, and swizzled for the width of their rows."""

import itertools

import jax.numpy as jnp
import pytest

from jfp8.kernels.shared_memory import tile
from support.devices import needs_mosaic, traced_for

# TFLOP/s of an H100, medians of 20 runs in turn, by `tile_n`, `group` and `cluster`.
RATES = {
    ("running", 8192, 8192, 8192): {(256, 16, 1): 1439, (256, 8, 1): 1386},
    ("promoted", 8192, 8192, 8192): {
        (192, 8, 2): 1199,
        (192, 16, 1): 1194,
        (192, 16, 2): 1193,
        (192, 8, 1): 1191,
        (128, 16, 2): 1142,
    },
    ("promoted", 4096, 4096, 4096): {(192, 8, 2): 1237, (192, 16, 1): 1224, (192, 16, 2): 1196},
    ("promoted", 15872, 16384, 4096): {(192, 8, 2): 1225, (192, 16, 2): 1214, (192, 16, 1): 1156},
    ("block", 8192, 8192, 8192): {
        (192, 8, 2): 1132,
        (192, 16, 2): 1121,
        (192, 8, 1): 1047,
        (192, 16, 1): 1045,
        (128, 16, 2): 915,
        (128, 16, 1): 904,
    },
    ("block", 4096, 4096, 4096): {(192, 8, 2): 1078, (192, 16, 2): 1058, (192, 16, 1): 1017},
    ("block", 15872, 16384, 4096): {(192, 16, 2): 1152, (192, 8, 2): 1090, (192, 16, 1): 1052},
    ("block_columns", 8192, 8192, 8192): {
        (128, 8, 2): 794,
        (128, 8, 1): 787,
        (128, 16, 2): 768,
        (128, 16, 1): 752,
    },
    ("block_columns", 4096, 4096, 4096): {(128, 8, 2): 825, (128, 16, 2): 815, (128, 16, 1): 814},
    ("block_columns", 15872, 16384, 4096): {(128, 8, 2): 836, (128, 16, 1): 788, (128, 16, 2): 779},
}
NOISE = 1.03


@needs_mosaic
@pytest.mark.parametrize("case", RATES, ids=str)
def test_the_model_ranks_tiles_as_they_were_measured(case):
    from jfp8.kernels.hopper.tiles import ranked

    rates = RATES[case]
    with traced_for("NVIDIA H100"):
        order = [(t.tile_n, t.group, t.cluster) for t in ranked(*case) if t.tile_m == 64]
    place = {tiles: order.index(tiles) for tiles in rates}
    for fast, slow in itertools.permutations(rates, 2):
        if rates[fast] > NOISE * rates[slow]:
            assert place[fast] < place[slow], (fast, slow)
    assert rates[order[0]] * NOISE > max(rates.values())


@needs_mosaic
def test_a_cluster_has_two_rows_of_tiles():
    from jfp8.kernels.hopper.tiles import ranked

    with traced_for("NVIDIA H100"):
        assert {t.cluster for t in ranked("block", 128, 8192, 8192)} == {1}
        assert {t.cluster for t in ranked("block", 129, 8192, 8192)} == {1, 2}


def test_a_tile_is_swizzled_for_the_width_of_its_rows():
    for shape, swizzle in (((8, 16), 32), ((8, 64), 128), ((3, 64, 32), 64)):
        tiling, bytes_of_swizzle = tile(shape, jnp.bfloat16).transforms
        assert bytes_of_swizzle.swizzle == swizzle
        assert tiling.tiling == (8, swizzle // 2)
