"""Masks of attention as bits, against the masks themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jfp8.kernels.flash.mask_bits import WORD, packed

SIZES = 200, 300  # queries and keys
GROUPS = 2
TILE = 128  # rows


@pytest.mark.parametrize("columns", ["queries", "keys"])
@pytest.mark.parametrize(
    "shape", [(2, 4, *SIZES), (1, 1, 200, 1), (2, 1, 1, 300)], ids=["all", "of-queries", "of-keys"]
)
def test_bits_and_spans(shape, columns):
    width = 64 if columns == "queries" else 128
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., :130, :] &= shape[2] == 1
    mask[..., 270:] &= shape[3] == 1
    pack = jax.jit(packed, static_argnums=(1, 2, 3, 4))
    dimension = ["queries", "keys"].index(columns) + 2
    found = pack(jnp.array(mask), SIZES, dimension, (TILE, width), GROUPS)
    bits, spans = (np.asarray(found[name]) for name in ("bits", "spans"))

    whole = np.broadcast_to(mask, (*shape[:2], *SIZES))
    whole = whole.swapaxes(2, 3) if columns == "queries" else whole  # of rows and columns
    (n_rows, n_columns), (words, rows) = whole.shape[2:], bits.shape[2:]
    row, column = np.arange(n_rows)[:, None], np.arange(n_columns)
    # One tile, or one block, where all are alike.
    row, column = row % rows, column % (words * WORD)
    np.testing.assert_array_equal(bits[:, :, column // WORD, row] >> (column % WORD) & 1, whole)
    of_rows, of_columns = shape[2:] if columns == "keys" else shape[:1:-1]
    assert (rows == TILE) == (of_rows == 1)
    assert (words * WORD == width) == (of_columns == 1)

    heads = GROUPS if shape[1] > 1 else 1
    for b, head, tile in np.ndindex(shape[0], shape[1] // heads, -(-n_rows // TILE)):
        seen = whole[b, head * heads : (head + 1) * heads, tile * TILE : (tile + 1) * TILE]
        blocks = np.flatnonzero(seen.any((0, 1))) // width
        first, end = spans[b, head, :, tile]
        assert (first, end) == ((blocks[0], blocks[-1] + 1) if len(blocks) else (first, 0))
        assert first >= end or len(blocks)
