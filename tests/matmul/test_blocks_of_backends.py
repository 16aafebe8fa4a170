"""Which blocks a backend takes that knows some, and their multiples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jfp8 import E4M3FN
from jfp8.kernels.backend import Backend, Facts

ROWS, SQUARES = (128, 1), (128, 128)  # along the sum, across it
SOME = Backend("some", lambda *_: None, blocks=frozenset({ROWS, SQUARES}))


def is_taken(backend, block):
    wide = np.dtype(np.float32)
    shapes, sizes = ((2, 2), (2, 2)), (256, 256, 256)
    for blocks in ((block, ROWS), (ROWS, block)):
        pair = E4M3FN, E4M3FN
        facts = Facts(pair, (wide, wide), shapes, "blocks", blocks, sizes, "f32")
        reason = backend.why_not(facts, None)
        assert reason is None or "in other blocks than 1x128 and 128x128" in reason
        yield reason is None


@pytest.mark.parametrize("block", [ROWS, SQUARES, (256, 1), (128, 256), (384, 128), (256, 384)])
def test_multiples_that_are_taken(block):
    assert all(is_taken(replace(SOME, multiples=True), block))
    assert set(is_taken(SOME, block)) == {block in (ROWS, SQUARES)}


@pytest.mark.parametrize(
    "block", [None, (64, 1), (192, 1), (64, 128), (192, 128), (128, 2), (128, 64), (128, 192)]
)
def test_what_is_no_multiple(block):
    assert not any(is_taken(replace(SOME, multiples=True), block))
    assert not any(is_taken(SOME, block))
    anything = Backend("anything", lambda *_: None)
    assert all(is_taken(anything, block))
