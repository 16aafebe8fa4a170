"""The kernel that quantizes heads for attention, interpreted, to the bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need JAX 0.11.2", allow_module_level=True)

import jfp8
from jfp8.kernels.hopper.quantize_heads import quantize_heads
from support.interpreter import no_races

CASES = {
    "queries of a fused product": (jnp.bfloat16, (2, 128, 2, 4, 64), 0, 2, jfp8.E4M3FN),
    "its values": (jnp.float16, (1, 256, 2, 4, 128), 3, 1, jfp8.E5M2),
    "all heads, each in two parts": (jnp.float32, (1, 128, 1, 2, 256), 0, 2, jfp8.E4M3FN),
}


@pytest.mark.parametrize("name", CASES)
def test_quantize_heads(name):
    dtype, shape, first, count, fmt = CASES[name]
    batch, tokens, groups, _, depth = shape
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x[0, 3, 0, first, 5], x[0, 4, 0, first, 6], x[0, 5, 0, first, 7] = np.inf, np.nan, -0.0
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    inverse = np.exp(rng.normal(size=(batch, groups, count, tokens))).astype(np.float32)
    with no_races():
        found = quantize_heads(jnp.asarray(x, dtype), jnp.asarray(inverse), first=first, fmt=fmt)
    heads = x[:, :, :, first : first + count].transpose(0, 2, 3, 1, 4)
    scaled = np.clip(heads * inverse[..., None], -fmt.max, fmt.max)
    expected = scaled.astype(ml_dtypes.finfo(fmt.dtype).dtype)
    for q, want in zip(found, (expected, expected.swapaxes(-1, -2)), strict=True):
        assert q.dtype == want.dtype
        q = np.asarray(q)
        nan = np.isnan(want.astype(np.float32))
        assert nan.sum() == 1
        np.testing.assert_array_equal(np.isnan(q.astype(np.float32)), nan)
        np.testing.assert_array_equal(q.view(np.uint8)[~nan], want.view(np.uint8)[~nan])
