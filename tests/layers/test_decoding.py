"""Decoding step by step from a cache of keys and values, against the whole sequence."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.layers import kv_cache
from support.decoding import NNX, Linen, difference

BATCH, LENGTH, FEATURES, HEADS = 2, 10, 32, 4
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))
CAUSAL = jnp.tri(LENGTH, dtype=bool)[None, None]
RECIPES = [recipe.name for recipe in jfp8.recipes.RECIPES]
PARTS = {"step by step": [1] * LENGTH, "prefill, then steps": [4, 3, 1, 1, 1]}


TRANSFORMER = {
    "self_attn_mask_type": "causal",
    "enable_rotary_pos_emb": True,
    "enable_relative_embedding": True,
    "num_gqa_groups": 2,
}


def make(kind, recipe, cache_dtype=jnp.float32, *, attention_products=False):
    own = {"recipe": recipe, "attention_products": attention_products}
    if kind == "linen TransformerLayer":
        layer = partial(jfp8.TransformerLayer, FEATURES, 64, HEADS, **TRANSFORMER, **own)
        return Linen(layer(), layer(decode=True, cache_dtype=cache_dtype), X)
    if kind == "linen attention":
        layer = partial(jfp8.MultiHeadDotProductAttention, HEADS, normalize_qk=True, **own)
        return Linen(layer(), layer(decode=True, cache_dtype=cache_dtype), X, mask=CAUSAL)
    if kind == "nnx TransformerLayer":
        layer = partial(jfp8.nnx.TransformerLayer, FEATURES, 64, HEADS, **TRANSFORMER, **own)
        return NNX(layer(rngs=nnx.Rngs(1)), X, cache_dtype)
    layer = jfp8.nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(1), **own)
    return NNX(layer, X, cache_dtype, is_causal=True)


DAILY = ("nnx attention", "delayed")
KINDS = ["linen TransformerLayer", "linen attention", "nnx TransformerLayer", "nnx attention"]


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(kind, recipe, marks=[] if (kind, recipe) == DAILY else pytest.mark.slow)
        for kind in KINDS
        for recipe in RECIPES
    ],
)
def test_decoding_gives_the_whole_sequence_where_the_recipe_is_causal(kind, recipe):
    """Bitwise identical where sums of codes are exact, else up to their order."""
    case = make(kind, recipe)
    whole = case.at_once()
    causal = jfp8.recipes.get(recipe).is_causal(history=True)
    for parts in PARTS.values():
        y, _ = case.in_parts(parts)
        if causal and recipe in ("nvfp4_row", "qat"):  # f32 rounds their terms
            assert difference(y, whole) < 1e-6
        elif causal:
            np.testing.assert_array_equal(y, whole)
        else:
            assert 1e-3 < difference(y, whole) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_in_fp8_does_not_depend_on_how_the_tokens_came(kind):
    case = make(kind, "rowwise", "e4m3")
    y, cache = case.in_parts(PARTS["step by step"])
    again, same = case.in_parts(PARTS["prefill, then steps"])
    np.testing.assert_array_equal(y, again)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    kept = [x for x in jax.tree.leaves(cache) if x.dtype.itemsize == 1]
    assert len(kept) == 2  # keys and values
    assert 1e-4 < difference(y, case.at_once()) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_attention_products_decode_alike(kind):
    case = make(kind, "rowwise", attention_products=True)
    y, _ = case.in_parts(PARTS["step by step"])
    whole = case.at_once()
    # Softmax of one query rounds otherwise than that of all. Behind it, a number that is on the
    # edge between two FP8 values may become the other one, in few tokens.
    assert np.mean(np.any(y != whole, axis=-1)) <= 0.1
    assert difference(y, whole) < 0.1


def fake_quantized(x: np.ndarray) -> np.ndarray:
    """E4M3 with a scale for each row, by ml_dtypes."""
    scale = (np.abs(x).max(-1, keepdims=True) / np.float32(448)).astype(np.float32)
    data = (x * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn)
    return data.astype(np.float32) * scale


def test_each_token_is_quantized_once_by_its_own_size():
    shape = (2, 6, 3, 8)
    keys, values = (np.array(jax.random.normal(jax.random.key(i), shape)) for i in (0, 1))
    keys[:, 4] *= 1000  # a later token, which changes no earlier one
    cache = kv_cache.init_kv_cache(shape, "e4m3")
    for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
        before = cache
        cache = kv_cache.extended(cache, keys[:, part], values[:, part])
        for old, new in zip(before[:2], cache[:2], strict=True):
            for a, b in ((old.data, new.data), (old.scale, new.scale)):
                np.testing.assert_array_equal(a[:, : part.start], b[:, : part.start])
    assert cache.index == 6
    assert cache.key.nbytes == 2 * 6 * 3 * (8 + 4)
    for found, x in zip(kv_cache.keys_and_values(cache, jnp.float32), (keys, values), strict=True):
        np.testing.assert_array_equal(found, fake_quantized(x))


def test_a_cache_keeps_its_sharding(mesh_of):
    """By heads, which the keys of a token are not. The oracle is on one device."""
    empty, x = kv_cache.init_kv_cache((2, 6, 4, 8), jfp8.E4M3FN), X[:, :3].reshape(2, 3, 4, 8)
    expected = kv_cache.extended(empty, x, 2 * x)
    mesh = mesh_of((2, 4), ("data", "model"))
    by_heads = NamedSharding(mesh, P("data", None, "model"))
    place = lambda x: jax.device_put(x, by_heads if x.ndim == 4 else NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        found = jax.jit(kv_cache.extended)(jax.tree.map(place, empty), x, 2 * x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    stored = [x for x in jax.tree.leaves(found) if x.ndim == 4]
    assert [x.sharding.is_equivalent_to(by_heads, 4) for x in stored] == [True] * 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", "float32"])
def test_wide_caches_store_values(dtype):
    cache = kv_cache.init_kv_cache((1, 4, 2, 8), dtype)
    assert cache.key.dtype == cache.value.dtype == jnp.dtype(dtype)
    x = jax.random.normal(jax.random.key(0), (1, 1, 2, 8))
    cache = kv_cache.extended(cache, x, x)
    np.testing.assert_array_equal(cache.key[:, :1], x.astype(dtype))


def test_trap_more_tokens_than_the_cache_has_room_for():
    """Flax writes over the last position, and nobody hears of it."""
    case = make("linen attention", "rowwise")
    y, cache = case.in_parts([1] * (LENGTH + 1), jnp.concatenate([X, X[:, :1]], axis=1))
    assert np.isfinite(y[:, :LENGTH]).all()
    assert np.isnan(y[:, LENGTH]).all()
    assert cache["cache_index"] == LENGTH + 1
    with pytest.raises(ValueError, match="room for 10. Make it with the length of the whole"):
        case.in_parts([2 * LENGTH], jnp.concatenate([X, X], axis=1))


def test_mistakes():
    layer = jfp8.TransformerLayer(FEATURES, 64, HEADS, **TRANSFORMER, decode=True)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    cache = variables.pop("cache")
    apply = functools.partial(layer.apply, mutable=["cache"])
    with pytest.raises(ValueError, match=r"has no cache. Create one .* use decode=False"):
        jax.eval_shape(apply, variables, X)
    with pytest.raises(ValueError, match="make the cache with the batch size that is decoded"):
        jax.eval_shape(apply, {**variables, "cache": cache}, X[:1])
    layer = jfp8.TransformerLayer(FEATURES, 64, HEADS, decode=True)
    with pytest.raises(ValueError, match=r"Pass self_attn_mask_type=\"causal\""):
        jax.eval_shape(layer.init, jax.random.key(0), X)
    with pytest.raises(ValueError, match="cache_dtype='fp7'.*Or a wide dtype such as"):
        kv_cache.init_kv_cache((1, 1, 1, 1), "fp7")
    with pytest.raises(TypeError, match="cache_dtype must be .*Or a wide dtype such as"):
        kv_cache.init_kv_cache((1, 1, 1, 1), jnp.int8)
    attention = jfp8.MultiHeadDotProductAttention(HEADS, decode=True)
    variables = jax.eval_shape(attention.init, jax.random.key(0), X)
    apply = functools.partial(attention.apply, mutable=["cache"])
    with pytest.raises(ValueError, match="self attention, but there are 1 queries and 10 keys"):
        jax.eval_shape(apply, variables, X[:, :1], X)


def test_mistakes_in_nnx():
    layer = jfp8.nnx.TransformerLayer(FEATURES, 64, HEADS, **TRANSFORMER, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="decode=True needs a cache. Make one"):
        layer(X, decode=True)
    with pytest.raises(ValueError, match="self_attn_mask_type"):
        jfp8.nnx.TransformerLayer(FEATURES, 64, HEADS, rngs=nnx.Rngs(0)).init_cache(X.shape)
    attention = jfp8.nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="init_cache"):
        attention(X)


@pytest.mark.slow
def test_a_cross_attending_decoder_and_a_mask_of_the_user():
    encoded = jax.random.normal(jax.random.key(5), (BATCH, 7, FEATURES))
    mask = jax.random.bernoulli(jax.random.key(6), 0.7, (BATCH, 1, LENGTH, LENGTH))
    mask |= jnp.eye(LENGTH, dtype=bool)[None, None]
    layer = partial(
        jfp8.TransformerLayer, FEATURES, 64, HEADS, layer_type="decoder", recipe="rowwise"
    )
    whole, cached = layer(), layer(decode=True)
    variables = jax.jit(cached.init)(jax.random.key(1), X, encoded)
    cache, params = variables["cache"], {"params": variables["params"]}
    expected, results = jax.jit(whole.apply)(params, X, encoded, mask), []
    for t in range(LENGTH):
        step = slice(t, t + 1)
        y, new = cached.apply(
            {**params, "cache": cache}, X[:, step], encoded, mask[:, :, step], mutable=["cache"]
        )
        cache = new["cache"]
        results.append(y)
    np.testing.assert_allclose(jnp.concatenate(results, axis=1), expected, atol=1e-5)
