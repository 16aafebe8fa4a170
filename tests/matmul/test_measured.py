"""The table of measured tiles."""

import jax
import jax.numpy as jnp
import pytest

from jfp8.kernels.hopper import measured as module
from jfp8.kernels.hopper.measured import measured, shape_class
from jfp8.kernels.shared_memory import tile
from support.devices import traced_for

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic GPU kernels need JAX 0.11.2"
)

TABLE = {
    "NVIDIA H200": {
        "block": {
            "4096x4096x4096": {"tiles": {"tile_m": 64, "tile_n": 128, "stages": 5, "group": 8}}
        }
    }
}


@pytest.fixture(autouse=True)
def _table(monkeypatch):
    monkeypatch.setattr(module, "_table", lambda: TABLE)


def test_by_device_kernel_and_shape():
    assert shape_class((1, 2, 3, 129)) == "1x2x4x256"
    with traced_for("NVIDIA H200"):
        assert measured("block", 4096, 4000, 2049)["tile_n"] == 128
        assert measured("block", 4096, 4097, 4096) is None
        assert measured("running", 4096, 4096, 4096) is None
    with traced_for("NVIDIA H100"):
        assert measured("block", 4096, 4096, 4096) is None
    assert measured("block", 4096, 4096, 4096) is None  # no GPU is known


@needs_mosaic
def test_products_are_cut_as_was_measured():
    from jfp8.kernels.hopper.tiles import Tiles, candidates, default_tiles

    with traced_for("NVIDIA H200"):
        found = default_tiles("block", 4096, 4096, 4096)
        assert found == Tiles(64, 128, stages=5, group=8)
        by_model = default_tiles("block", 8192, 8192, 8192)
    assert by_model in candidates("block")


def test_a_tile_is_swizzled_for_the_width_of_its_rows():
    for shape, swizzle in (((8, 16), 32), ((8, 64), 128), ((3, 64, 32), 64)):
        tiling, bytes_of_swizzle = tile(shape, jnp.bfloat16).transforms
        assert bytes_of_swizzle.swizzle == swizzle
        assert tiling.tiling == (8, swizzle // 2)
