"""ScaledArray: a pytree that survives, and values that are ``data * scale`` to the last bit."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from jfp8 import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, Block, ScaledArray, dequantize, quantize
from support.arrays import assert_same, spread

DATA_FORMATS = (E4M3FN, E5M2, E2M1FN)
SMALLEST_NORMAL = 2.0**-126

data_formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=lambda f: f.name)
jit_dequantize = jax.jit(dequantize, static_argnums=1)


def every_code(fmt) -> np.ndarray:
    return np.arange(2**fmt.bits, dtype=np.uint8).view(fmt.dtype)


def e8m0(codes) -> jax.Array:
    return jnp.asarray(np.asarray(codes, np.uint8).view(E8M0FNU.dtype))


def e3m4_values() -> np.ndarray:
    """The value of each code of E3M4, f64: ``(-1)^s 2^(e-3) (1 + m/16)``; NaN is S.111.1111."""
    code = np.arange(256)
    e, m = (code >> 4) & 7, code & 15
    magnitude = np.where(e > 0, (16 + m) * 2.0 ** (e - 7), m * 2.0**-6)
    return np.where(code & 0x7F == 0x7F, np.nan, np.where(code > 127, -magnitude, magnitude))


def sample_data(fmt, *shape) -> np.ndarray:
    """Finite values of `fmt`, not all alike along any dimension."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return x.astype(fmt.dtype)


def sample_scale(*shape) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.1, 10, size=shape).astype(np.float32)


@pytest.mark.slow
@data_formats
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantize_rounds_once_to_the_dtype(fmt, dtype):
    """Scaling in the narrow dtype would round twice, and overflow float16."""
    data = sample_data(fmt, 64, 32)
    scale = sample_scale(64, 1)
    values = dequantize(ScaledArray(jnp.asarray(data), jnp.asarray(scale)), dtype)
    product = data.astype(np.float32) * scale
    assert_same(values, product.astype(dtype))
    assert np.any(product.astype(dtype) != data.astype(dtype) * scale.astype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "jit", "constant scale"])
@data_formats
def test_trap_extreme_e8m0_scales(fmt, how):
    """Codes 0 and 254 are exact; 2^-127 is a subnormal, which XLA:CPU reads as zero."""
    data, codes = every_code(fmt), np.arange(256)
    q = ScaledArray(jnp.asarray(np.tile(data, (256, 1))), e8m0(codes)[:, None])
    values = {
        "eager": lambda: dequantize(q),
        "jit": lambda: jit_dequantize(q),
        "constant scale": lambda: jax.jit(lambda d: dequantize(ScaledArray(d, q.scale)))(q.data),
    }[how]()
    with np.errstate(all="ignore"):
        exact = data.astype(np.float64) * np.ldexp(1.0, codes - 127)[:, None]
        exact[255] = np.nan
        assert_same(values, exact.astype(np.float32))  # the one rounding, if it is one
    values = np.asarray(values, np.float64)
    subnormal = (np.abs(exact) < SMALLEST_NORMAL) & (exact != 0)
    assert subnormal.any()
    np.testing.assert_array_equal(values[subnormal], exact[subnormal])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@data_formats
def test_trap_subnormals_in_narrow_dtypes(fmt, dtype):
    """Also those of bf16, which start at 2^-126 as well, and of f16, which start at 2^-14."""
    data = every_code(fmt)
    scales = np.array([0, 1, 7, 100, 111, 116])
    values = jit_dequantize(
        ScaledArray(jnp.asarray(np.tile(data, (6, 1))), e8m0(scales)[:, None]), dtype
    )
    with np.errstate(all="ignore"):
        exact = data.astype(np.float64) * np.ldexp(1.0, scales - 127)[:, None]
        expected = exact.astype(np.float32).astype(dtype)
    assert_same(values, expected)
    tiny = np.abs(expected.astype(np.float64)) < np.float64(jnp.finfo(dtype).smallest_normal)
    assert np.any(tiny & (expected != 0))


@pytest.mark.parametrize("code", [0, 100, 254, 255])
def test_e3m4_is_stored_in_bytes(code):
    """The values of all codes, under an f32 and under an E8M0 scale."""
    q = ScaledArray(jnp.arange(256, dtype=jnp.uint8), e8m0(code))
    assert q.format is E3M4
    factor = np.nan if code == 255 else 2.0 ** (code - 127)
    with np.errstate(over="ignore"):
        assert_same(jit_dequantize(q), (e3m4_values() * factor).astype(np.float32))
    plain = ScaledArray(q.data, jnp.float32(0.3))
    assert_same(jit_dequantize(plain), e3m4_values().astype(np.float32) * np.float32(0.3))


ragged = pytest.mark.parametrize(
    ("shape", "scale_shape", "block"),
    [
        # data, scale, block
        ((40,), (2,), (32,)),
        ((5,), (1,), (32,)),
        ((3, 40), (3, 2), (1, 32)),
        ((40, 3), (2, 3), (32, 1)),
        ((17, 33), (2, 3), (16, 16)),
        ((130, 129), (2, 2), (128, 128)),
        ((2, 5, 7), (2, 3, 2), (1, 2, 4)),
        ((2, 0, 7), (2, 0, 2), (1, 2, 4)),
        ((4, 6), (2, 2), (2, 3)),  # whole blocks may be spelled out too
    ],
    ids=str,
)


def test_trap_a_state_dict_says_how_long_blocks_are():
    """Two scales for 200 elements: blocks of 128, the last cut short, or of 100?"""
    q = ScaledArray(jnp.ones((2, 200), E4M3FN.dtype), jnp.ones((2, 2)), block=(1, 128))
    state = serialization.msgpack_restore(serialization.to_bytes(q))
    assert state["block"].tolist() == [1, 128]
    empty = jax.tree.map(jnp.zeros_like, q)
    restored = serialization.from_state_dict(empty, state)
    assert restored.block == (1, 128)
    np.testing.assert_array_equal(restored.dequantize(), np.ones((2, 200)))
    hundreds = dataclasses.replace(empty, block=(1, 100))
    with pytest.raises(ValueError, match=r"blocks of \(1, 128\), the target one in .* \(1, 100\)"):
        serialization.from_state_dict(hundreds, state)
    assert "block" not in serialization.to_state_dict(ScaledArray(q.data, jnp.ones(())))
    del state["block"]  # older states lack it
    assert serialization.from_state_dict(empty, state).block == (1, 128)


@ragged
@pytest.mark.parametrize("kind", ["f32", "e8m0", "two-level"])
def test_the_last_block_may_be_cut_short(shape, scale_shape, block, kind):
    """Element i of a dimension belongs to scale ``i // b``."""
    data = sample_data(E4M3FN, *shape)
    scale = jnp.asarray(sample_scale(*scale_shape))
    if kind == "e8m0":
        scale = e8m0(np.random.default_rng(2).integers(0, 200, scale_shape))
    elif kind == "two-level":
        scale = ScaledArray(scale.astype(E4M3FN.dtype), jnp.float32(0.3))
    plain = jit_dequantize(scale) if kind == "two-level" else scale
    q = ScaledArray(jnp.asarray(data), scale, block)
    expected = data.astype(np.float64) * spread(np.asarray(plain).astype(np.float64), shape, block)
    assert_same(jit_dequantize(q), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "scale_shape", "block"),
    [
        ((40,), (1,), (32,)),
        ((40,), (2, 1), (32,)),
        ((3, 40), (3, 2), (32,)),
        ((3, 40), (2, 3), (1, 32)),
        ((0, 40), (1, 2), (1, 32)),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit(shape, scale_shape, block):
    q = ScaledArray(jnp.ones(shape, E4M3FN.dtype), jnp.ones(scale_shape), block)
    message = f"shape {shape} in blocks of {block} .*scale of shape {scale_shape}: .*ceil"
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        dequantize(q)


def test_errors():
    with pytest.raises(TypeError, match="takes a ScaledArray, got ArrayImpl"):
        dequantize(jnp.ones(3))
    q = ScaledArray(jnp.ones(3, E4M3FN.dtype), jnp.float32(1))
    with pytest.raises(TypeError, match="floating dtype, got int32"):
        dequantize(q, jnp.int32)
    wrong = ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(1))
    for use in (dequantize, lambda q: q.format):
        with pytest.raises(TypeError, match=r"float16 stores none .*float8_e4m3fn \(E4M3FN\)"):
            use(wrong)


def test_values_with_a_carrier_are_those_without():
    """In blocks, and in the dtype that is asked for; the carrier gets the gradient as it is."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    q = quantize(x, granularity=Block((1, 4)))
    carrier = jnp.zeros((3, 8), jnp.float32)

    @jax.jit
    def run(carrier):
        values = lambda c: dataclasses.replace(q, carrier=c).dequantize(jnp.bfloat16)
        y, vjp = jax.vjp(values, carrier)
        return y, *vjp(y)

    y, gradient = run(carrier)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, q.dequantize(jnp.bfloat16))
    np.testing.assert_array_equal(gradient, np.asarray(y, np.float32))
