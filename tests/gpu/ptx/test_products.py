"""The compiled kernels for products, executed: integers, exactly."""

import jax.numpy as jnp
import numpy as np
import pytest

from ptx.exact import BLOCK, E4M3, E5M2, Numbers, wide

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def equal(want, out):
    def check(got):
        assert got.dtype == out
        assert np.abs(want).max() > 20
        np.testing.assert_array_equal(np.asarray(got, np.float64), want.astype(out).astype(float))

    return check


# m, n, k; operands; result; scales of rows and columns, else one number; height of a half tile
MATMUL = {
    "one step": ((128, 64, 128), (E4M3, E4M3), F32, False, False, None),
    "ragged": ((250, 333, 300), (E4M3, E5M2), BF16, True, False, None),
    "ring": ((256, 512, 1024), (E5M2, E4M3), F16, False, True, None),
    "several": ((600, 300, 256), (E5M2, E5M2), BF16, True, True, None),
    "cluster": ((300, 320, 640), (E4M3, E5M2), BF16, True, True, (64, 128, 2, 8, 2)),
    "tall": ((512, 384, 768), (E4M3, E4M3), BF16, True, True, (128, 128, 3, 8)),
}


@pytest.mark.parametrize("promote", [False, True], ids=["fast", "promoted"])
@pytest.mark.parametrize("case", MATMUL)
def test_matmul(case, promote, executed):
    from jfp8.kernels.hopper.matmul import matmul
    from jfp8.kernels.hopper.tiles import Tiles

    (m, n, k), dtypes, out, rows, columns, tiles = MATMUL[case]
    if tiles is not None:
        tiles = Tiles(*((64, 192, 3, 8) if promote and case == "tall" else tiles))
    draw = Numbers(m + n + k)
    a, b = draw.matrix(m, k, dtype=dtypes[0]), draw.matrix(n, k, dtype=dtypes[1])
    s, t = draw.scales(*[m] * rows), draw.scales(*[n] * columns)
    want = a.astype(float) @ b.astype(float).T * np.expand_dims(s, -1) * t
    f = lambda *args: matmul(*args, out, promote=promote, tiles=tiles)
    executed(equal(want, out), f, a, b, s, t)


TILES = {"128x128": (1, BLOCK), "1x128": (1, 1), "128x128 of a": (BLOCK, 1)}


@pytest.mark.parametrize("out", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("by", TILES)
@pytest.mark.parametrize("shape", [(256, 448, 640), (130, 200, 130)], ids=["whole", "ragged"])
def test_block_matmul(shape, by, out, executed):
    from jfp8.kernels.hopper.matmul import block_matmul

    m, n, k = shape
    draw = Numbers(m)
    a, b, chunks = draw.matrix(m, k), draw.matrix(n, k, dtype=E5M2), -(-k // BLOCK)
    s, t = (draw.scales(chunks, -(-size // of)) for size, of in zip((m, n), TILES[by]))
    want = (a * wide(s.T, a.shape)) @ (b * wide(t.T, b.shape)).T
    executed(equal(want, out), lambda *args: block_matmul(*args, out), a, b, s, t)


@pytest.mark.parametrize("by", TILES)
def test_block_matmul_with_f32_scales(by, executed):
    """Scales are multiplied first, and each sum of 128 terms is added by one rounding."""
    from jfp8.kernels.hopper.matmul import block_matmul

    m, n, k = 130, 200, 300
    draw, chunks = Numbers(m), -(-k // BLOCK)
    a, b = draw.matrix(m, k), draw.matrix(n, k, dtype=E5M2)
    s, t = (
        draw.rng.uniform(0.5, 2, (chunks, -(-size // of))).astype(np.float32)
        for size, of in zip((m, n), TILES[by])
    )
    want = np.zeros((m, n), np.float32)
    for c in range(chunks):
        part = slice(c * BLOCK, (c + 1) * BLOCK)
        by_row, by_column = (
            np.repeat(x[c], of)[:size] for x, of, size in zip((s, t), TILES[by], (m, n))
        )
        terms = a[:, part].astype(float) @ b[:, part].astype(float).T
        want = (want + terms * (by_row[:, None] * by_column)).astype(np.float32)
    executed(equal(want, F32), lambda *args: block_matmul(*args, F32), a, b, s, t)


@pytest.mark.parametrize("scaled", [True, False], ids=["blocks", "matrices"])
@pytest.mark.parametrize("sizes", [(448, 384), (130, 1000)], ids=["wide", "deep"])
def test_grouped_matmul(sizes, scaled, executed):
    """Of tiles without a group, of a group without tiles, and of more steps than slots."""
    from jfp8.kernels.hopper.grouped import grouped_matmul

    n, k = sizes
    group, chunks = np.array([0, 0, 2, -1, 2], np.int32), -(-k // BLOCK)
    draw = Numbers(n)
    a, b = draw.matrix(len(group) * BLOCK, k), draw.matrix(3, n, k, dtype=E5M2)
    s = draw.scales(chunks, len(a)) if scaled else None
    t = draw.scales(3, chunks, -(-n // BLOCK))
    of_rows = 1 if s is None else wide(s.T, a.shape)
    of_matrix = [(x * wide(y.T, x.shape)).T for x, y in zip(b, t, strict=True)]
    parts = (a * of_rows).reshape(len(group), BLOCK, k)
    want = [x @ of_matrix[g] if g >= 0 else np.zeros((BLOCK, n)) for x, g in zip(parts, group)]
    f = lambda a, b, g, s, t: grouped_matmul(a, b, g, s, t, F32)
    executed(equal(np.concatenate(want), F32), f, a, b, group, s, t)


@pytest.mark.parametrize("scaled", [True, False], ids=["columns", "rows"])
@pytest.mark.parametrize("out", [F32, BF16], ids=["f32", "bf16"])
def test_grouped_outer(out, scaled, executed):
    from jfp8.kernels.hopper.grouped import grouped_outer

    (m, n), first, count = (200, 448), np.array([0, 0, 2], np.int32), np.array([0, 2, 5], np.int32)
    draw = Numbers(m)
    a, b = draw.matrix(m, 7 * BLOCK), draw.matrix(n, 7 * BLOCK, dtype=E5M2)
    s, t = draw.scales(7, m), draw.scales(7, n) if scaled else None
    x, y = a * wide(s.T, a.shape), b * (1 if t is None else wide(t.T, b.shape))
    parts = [slice(i * BLOCK, (i + c) * BLOCK) for i, c in zip(first, count)]
    want = np.stack([x[:, part].astype(float) @ y[:, part].T for part in parts])
    f = lambda *args: grouped_outer(*args, out)
    executed(equal(want, out), f, a, b, first, count, s, t)
