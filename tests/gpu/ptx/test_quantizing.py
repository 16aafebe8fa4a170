"""The compiled kernels that quantize, executed: codes, scales and amaxes, to the bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jfp8 import E4M3FN, E5M2

F32 = np.float32
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": F32}
by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
by_format = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=["e4m3", "e5m2"])


def numbers(shape, dtype, special=(), seed=0):
    """Draw numbers of many magnitudes, zeros of both signs, and `special` ones in some places."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x[shape[0] // 2], x[:, shape[1] // 3] = 0, -0.0
    for value in special:
        x[rng.integers(shape[0]), rng.integers(shape[1])] = value
    return x.astype(dtype)


SPECIAL = (np.inf, -np.inf, np.nan, 3e4, -6e4)


def cast(x, fmt):
    """Round f32 to the nearest code; finite numbers saturate."""
    most = F32(ml_dtypes.finfo(fmt.dtype).max)
    return np.where(np.isinf(x), np.nan, np.clip(x, -most, most)).astype(fmt.dtype)


def amax(x, **axes):
    """Return the largest magnitude, NaN if there is one."""
    return np.max(np.abs(x.astype(F32)), **axes)


def assert_codes(got, want):
    """Equal to the bit, or both NaN; and not all the same."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    nan = np.isnan(want.astype(F32))
    np.testing.assert_array_equal(np.isnan(got.astype(F32)), nan)
    codes = [np.where(nan, 0, x.view(np.uint8)) for x in (got, want)]
    np.testing.assert_array_equal(*codes)
    assert len(np.unique(codes[1])) > 50


def poisonous(x):
    """Return f32 in which Inf is NaN."""
    return np.where(np.isfinite(x), x, np.nan).astype(F32)


@by_dtype
@pytest.mark.parametrize("special", [(), (np.nan, np.inf), (-np.inf,)], ids=["", "nan", "inf"])
def test_tensor_amax(special, dtype, executed):
    from jfp8.kernels.hopper.quantize import tensor_amax

    x = numbers((320, 200), dtype, special)

    def check(found):
        spared, largest = (x.max().view(F32) for x in found)
        np.testing.assert_array_equal(largest, amax(x))
        assert spared == 2.5

    f = lambda x: [tensor_amax(x, jnp.float32([0, value]), entries=2) for value in (2.5, 0)]
    executed(check, f, x)


@by_dtype
def test_row_and_column_amax(dtype, executed):
    from jfp8.kernels.hopper.quantize import row_and_column_amax

    x = numbers((200, 300), dtype, SPECIAL)

    def check(found):
        for axis, got in zip((1, 0), found, strict=True):
            np.testing.assert_array_equal(got, amax(x, axis=axis))

    executed(check, row_and_column_amax, x)


@by_format
@by_dtype
def test_quantize_tensor(dtype, fmt, executed):
    """With a scale of its own, of the larger of two vectors, and its product with another."""
    from jfp8.kernels.hopper.quantize import quantize_tensor
    from jfp8.kernels.hopper.sweep import largest_of
    from jfp8.kernels.scales_in_kernels import scale_and_inverse

    x = numbers((200, 300), dtype, SPECIAL[: 2 if fmt is E5M2 else 0])
    known = np.array([0.25], F32), np.arange(128, dtype=F32) / 20, np.array([3.0], F32)
    most = known[1].max()

    def scale_of(one, many):
        return scale_and_inverse(jnp.maximum(largest_of(many), one[0]), fmt, None)

    def f(x, one, many, other):
        many = many.view(jnp.int32)
        how = {"fmt": fmt, "scale_of": scale_of, "with_amax": True, "meets": 1}
        return quantize_tensor(x, one, many, other, **how)

    def check(found):
        q, q_t, scale, product, amaxes = found
        want = most / F32(fmt.max)
        assert (scale, product) == (want, want * 3)
        np.testing.assert_array_equal(amaxes.max().view(F32), amax(x))
        codes = cast(poisonous(x) * (F32(1) / want), fmt)
        assert_codes(q, codes)
        assert_codes(q_t, codes.T)

    executed(check, f, x, *known)


@by_dtype
def test_quantize_lines(dtype, executed):
    from jfp8.kernels.hopper.quantize import quantize_lines

    x = numbers((200, 300), dtype, SPECIAL)
    rng = np.random.default_rng(1)
    rows, columns = (rng.uniform(0.5, 300, n).astype(F32) for n in x.shape)

    def check(found):
        q, q_t = found
        assert_codes(q, cast(poisonous(x) * rows[:, None], E5M2))
        assert_codes(q_t, cast(poisonous(x) * columns, E5M2).T)

    executed(check, lambda *args: quantize_lines(*args, E5M2), x, rows, columns)


def in_blocks(x, block, fmt, rounding):
    """Return codes and scales along the rows, the scales with blocks first."""
    m, n = x.shape
    x = np.pad(x.astype(F32), [(0, 0), (0, -n % block)]).reshape(m, -1, block)
    largest = amax(x, axis=2)
    finite = np.isfinite(largest)
    scale = np.where(finite, largest, 1).astype(F32) / F32(fmt.max)
    if rounding is not None:
        with np.errstate(divide="ignore"):
            power = np.ceil(np.log2(np.where(finite, largest, 1).astype(np.float64) / fmt.max))
        power = np.clip(power, -127 if rounding == "rceil" else -126, 127)
        scale = np.exp2(np.maximum(power, -127)).astype(F32)
    if rounding != "rceil":
        scale = np.where(largest == 0, F32(1), scale)
    inverse = np.where(finite, F32(1) / scale, np.nan).astype(F32)
    codes = cast(x * inverse[..., None], fmt).reshape(m, -1)[:, :n]
    if rounding == "rceil":
        return codes, np.where(finite, power + 127, 255).astype(np.uint8).T
    return codes, np.where(finite, scale, np.nan).astype(F32).T


@by_dtype
@pytest.mark.parametrize(
    ("block", "rounding"), [(128, None), (128, "power_of_two"), (32, "rceil")], ids=str
)
def test_quantize_rows_in_blocks(block, rounding, dtype, executed):
    from jfp8.kernels.hopper.quantize import quantize_rows_in_blocks

    x = numbers((200, 300), dtype, SPECIAL[:3])

    def check(found):
        for (codes, scales), y in zip((found[:2], found[2:]), (x, x.T), strict=True):
            want, want_scales = in_blocks(y, block, E4M3FN, rounding)
            assert_codes(codes, want)
            np.testing.assert_array_equal(scales, want_scales)

    executed(check, lambda x: quantize_rows_in_blocks(x, E4M3FN, block, rounding), x)


@by_dtype
@pytest.mark.parametrize("rounding", [None, "power_of_two"], ids=["exact", "powers"])
def test_quantize_tiles(rounding, dtype, executed):
    from jfp8.kernels.hopper.quantize import quantize_tiles

    x = numbers((200, 300), dtype, (np.nan,))

    def check(found):
        q, q_t, scales = found
        tiles = np.pad(x, [(0, 56), (0, 84)]).reshape(2, 128, 3, 128).transpose(0, 2, 1, 3)
        want, want_scales = in_blocks(tiles.reshape(6, -1), 128 * 128, E4M3FN, rounding)
        want = want.reshape(2, 3, 128, 128).swapaxes(1, 2).reshape(256, 384)[:200, :300]
        assert_codes(q, want)
        assert_codes(q_t, want.T)
        np.testing.assert_array_equal(scales, want_scales.reshape(2, 3))

    executed(check, lambda x: quantize_tiles(x, E4M3FN, rounding), x)


# Kernels compute activations from approximate exponentials: a code may be the next one.

BASES = {
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}
GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}


def activation(name, x):
    """Return the activation of ``x[m, projections, n]`` in float64."""
    made = BASES[GATED.get(name, name)](x[:, 0])
    return made * x[:, 1] if name in GATED else made


def gradient(name, x, dy, step=1e-5):
    """Return the gradient by all projections, from differences in float64: [m, projections, n]."""
    return np.stack([
        dy * (activation(name, x + step * at) - activation(name, x - step * at)) / (2 * step)
        for at in np.eye(x.shape[1])[:, :, None]
    ], 1)  # fmt: skip


def assert_near_codes(got, want):
    """Return whether nearly all codes agree, and others are the next."""
    place = lambda x: np.where(x & 0x80, -(x & 0x7F).astype(int), x)
    off = np.abs(place(got.view(np.uint8)) - place(want.view(np.uint8)))
    assert got.shape == want.shape
    assert off.max() <= 1
    assert (off > 0).mean() < 0.01
    assert len(np.unique(want.view(np.uint8))) > 50


@pytest.mark.parametrize("back", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("name", [*BASES, *GATED])
@pytest.mark.parametrize("blocks", [False, True], ids=["tensor", "blocks"])
def test_what_kernels_make(blocks, name, back, executed):
    from jfp8.kernels.hopper.quantize import quantize_rows_in_blocks, quantize_tensor, tensor_amax
    from jfp8.kernels.quantize_and_transpose import Gradient
    from jfp8.kernels.scales_in_kernels import scale_and_inverse
    from jfp8.layers.transformer_math import Activation

    bf16, rng = ml_dtypes.bfloat16, np.random.default_rng(2)
    x = rng.normal(size=(128, 2 if name in GATED else 1, 200)).astype(bf16)
    dy = rng.normal(size=(128, 200)).astype(bf16)
    given = (x, dy) if back else (x,)
    make = Gradient(Activation(name)) if back else Activation(name)
    wide = x.astype(np.float64)
    made = gradient(name, wide, dy.astype(float)) if back else activation(name, wide)[:, None]
    made = made.astype(F32).astype(bf16).astype(F32)
    most = F32(amax(made))

    def f(*given):
        if blocks:
            return quantize_rows_in_blocks(given, E4M3FN, 128, "power_of_two", make=make)
        scale_of = lambda known: scale_and_inverse(most, E4M3FN, None)
        how = {"fmt": E4M3FN, "scale_of": scale_of, "with_amax": True, "make": make}
        known = jnp.ones(1)
        found = quantize_tensor(given, known, **how)
        return *found, tensor_amax(given, jnp.zeros(1), make=make)

    def check(found):
        several = made.shape[1] > 1
        q, q_t = found[0], found[2 if blocks else 1]
        for i in range(made.shape[1]):
            straight, turned = (q[:, i], q_t[i]) if several else (q, q_t)
            for got, y in ((straight, made[:, i]), (turned, made[:, i].T)):
                by_block, _ = in_blocks(y, 128, E4M3FN, "power_of_two")
                want = cast(y * (F32(1) / (most / F32(448))), E4M3FN)
                assert_near_codes(got, by_block if blocks else want)
        for bits in found[3:] if not blocks else ():
            np.testing.assert_allclose(bits.max().view(F32), most, rtol=0.01)

    executed(check, f, *given)
