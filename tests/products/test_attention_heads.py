"""Operands of attention that a kernel quantizes where a projection wrote them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8 import recipes
from jfp8.kernels.attention import cast_heads
from jfp8.layers.transformer_math import projected_attention
from jfp8.products.flash.dot_product import SEPARATE, AttentionOptions, attention_of_projections
from jfp8.products.flash.numerics import for_both, numerics_of
from support.devices import needs_mosaic

SHARED_BY, GROUPS, DEPTH = 2, 2, 64


def projection(tokens=128, batch=1):
    """Queries, keys and values as one product, and alone; no two heads have the same values."""
    shape = (batch, tokens, GROUPS, SHARED_BY + 2, DEPTH)
    qkv = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    heads = lambda x: x.reshape(batch, tokens, -1, DEPTH)
    return qkv, heads(qkv[..., :SHARED_BY, :]), qkv[..., SHARED_BY, :], qkv[..., SHARED_BY + 1, :]


@needs_mosaic
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_the_kernel_quantizes_heads_of_a_projection(which):
    """The bytes, scales and amax of the heads alone, and the same bytes transposed."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    qkv, query, key, value = projection()
    x = {"query": query.reshape(1, 128, GROUPS, SHARED_BY, DEPTH).transpose(0, 2, 3, 1, 4)}
    x |= {"key": key.swapaxes(1, 2), "value": value.swapaxes(1, 2)}
    first = {"query": 0, "key": -2, "value": -1}[which]
    in_projection = partial(cast_heads, projection=qkv, first=first)
    uses = getattr(numerics_of(recipes.Float8CurrentScaling()), which)
    with plgpu.force_gpu_interpret_mode():
        found, _ = for_both(x[which], uses, None, cast_heads=in_projection)
        alone, _ = for_both(x[which], uses, None, cast_heads=cast_heads)
    expected, _ = jax.jit(lambda x: for_both(x, uses, None))(x[which])
    assert expected.transposed is None
    for q in (found, alone):
        for name in ("data", "scale", "amax"):
            a, b = (np.atleast_1d(getattr(each, name)) for each in (q, expected))
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
        transposed = np.asarray(expected.data).swapaxes(-1, -2)
        assert q.transposed.shape == transposed.shape
        np.testing.assert_array_equal(
            np.asarray(q.transposed).astype("f4"), transposed.astype("f4")
        )


@pytest.mark.parametrize("rotary", [None, ((1, 10_000), "consecutive")])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_gets_the_projections_of_its_heads(fused, rotary):
    """The arrays, and the same numbers in the projections, except of what was rotated since."""
    qkv, *alone = projection(tokens=5, batch=2)
    seen = []

    def attention(*arrays, projections):
        seen.extend(zip(arrays[:3], projections, strict=True))
        return arrays[2]

    query, keys_values = jnp.split(qkv, [SHARED_BY], axis=-2)
    given = {"qkv": qkv if fused else None, "rotary": rotary}
    projected_attention(query, keys_values, attention=attention, **given)
    known = [fused and rotary is None, rotary is None, True]
    for (x, found), array, first, expected in zip(seen, alone, (0, -2, -1), known, strict=True):
        assert (found is not None) == expected
        assert np.array_equal(x, array) == (rotary is None or array is alone[2])
        if found is not None:
            first %= found.shape[-2]
            part = found[..., first : first + array.shape[-2] // GROUPS, :]
            np.testing.assert_array_equal(part.reshape(array.shape), array)


def test_projections_change_no_number():
    """Nor the gradients, which are all with respect to the slices."""
    qkv, *alone = projection(tokens=7)
    how = AttentionOptions(None, True, None, recipes.Float8CurrentScaling(), None)

    def run(projections):
        def attend(*x):
            arrays = (*x, None, None, None)
            return attention_of_projections(how, arrays, (None,) * 4, None, None, projections)

        y, back = jax.vjp(attend, *alone)
        return y, *back(y)

    found, expected = jax.jit(lambda: (run((qkv,) * 3), run(SEPARATE)))()
    for a, b in zip(found, expected, strict=True):
        assert float(jnp.abs(b.astype(jnp.float32)).max()) > 0
        np.testing.assert_array_equal(a, b)
