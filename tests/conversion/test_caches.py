"""``convert(..., cache_dtype=...)``: Flax's own attention decodes from a cache in FP8."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jfp8
from support.decoding import NNX, Linen, difference

BATCH, LENGTH, FEATURES, HEADS = 2, 7, 32, 4
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))
CAUSAL = np.tri(LENGTH, dtype=bool)
NOTHING = {"exempt": lambda path, layer: True}  # no product becomes FP8
PARTS = ([4, 1, 2], [1] * LENGTH)


class Model(nn.Module):
    decode: bool = False
    attention: type[nn.Module] = nn.MultiHeadDotProductAttention

    @nn.compact
    def __call__(self, x, mask=None):
        x = self.attention(HEADS, decode=self.decode, name="attn")(x, mask=mask)
        return x


def linen(recipe="rowwise", make=Model, **options):
    """A converted model that decodes; with `options` the whole one is Flax's."""
    whole = make() if options else jfp8.convert(make(), recipe, exempt=())
    options = options or {"exempt": ()}
    cached = jfp8.convert(make(decode=True), recipe, cache_dtype="e4m3", **options)
    return Linen(whole, cached, X, mask=CAUSAL[None, None])


def of_nnx(recipe="rowwise", **options):
    plain = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(1))
    cached = jfp8.convert(plain, recipe, cache_dtype="e4m3", **options or {"exempt": ()})
    return NNX(cached, X, whole=plain if options else None, is_causal=True)


def rounded(x):
    """Keys or values in E4M3 with a scale for each token and head, by ml_dtypes."""
    scale = np.abs(x).max(-1, keepdims=True) / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def expected(params, rounded):
    """Results by NumPy from `rounded` keys and values, and how far they can be from the exact ones.

    An E4M3 number is within 2**-4 of itself, or half of its smallest one, 2**-9 of a scale: keys
    and values by E(k) and E(v), scores by d = |q| E(k) / sqrt(depth), so that weights change by a
    factor of at most exp(2 max d).
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    project = lambda name: np.einsum("btf,fhd->bthd", X, p[name]["kernel"]) + p[name]["bias"]
    q, k, v = (project(name) for name in ("query", "key", "value"))
    error = lambda x: abs(x) * 2**-4 + abs(x).max(-1, keepdims=True) / 448 * 2**-10
    scores = lambda q, k: np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(FEATURES // HEADS)

    def weights(k):
        exp = np.where(CAUSAL, np.exp(scores(q, k)), 0)
        return exp / exp.sum(-1, keepdims=True)

    mix = lambda w, v: np.einsum("bhqk,bkhd->bqhd", w, v)
    out = lambda o, kernel: np.einsum("bqhd,hdf->bqf", o, kernel)
    y = out(mix(weights(rounded(k)), rounded(v)), p["out"]["kernel"]) + p["out"]["bias"]
    change = np.exp(2 * np.where(CAUSAL, scores(abs(q), error(k)), 0).max(-1)) - 1
    change = np.moveaxis(change, 1, 2)[..., None]
    off = change * mix(weights(k), abs(v) + error(v)) + mix(weights(k), error(v))
    return y, out(off, abs(p["out"]["kernel"]))


@pytest.mark.parametrize("kind", [linen, pytest.param(of_nnx, marks=pytest.mark.slow)])
def test_decoding_from_fp8_keys_and_values_is_as_exact_as_their_format(kind):
    case = kind(**NOTHING)
    y, cache = case.in_parts(PARTS[0])
    is_linen = kind is linen
    params = case.variables["params"]["attn"] if is_linen else nnx.state(case.whole, nnx.Param)
    from_rounded, bound = expected(params if is_linen else nnx.to_pure_dict(params), rounded)
    np.testing.assert_allclose(y, from_rounded, atol=2e-6)
    far = np.abs(y - case.at_once())
    assert (far <= bound).all()
    assert far.max() > 1e-3  # it is not the wide cache
    kept = {x.dtype for x in jax.tree.leaves(cache) if x.ndim > 3 and x.shape[-1] > 1}
    assert kept == {jnp.dtype(jnp.float8_e4m3fn)}


class Stack(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        scanned = nn.scan(
            lambda layer, x, _: (x + layer(x, mask), None),
            variable_axes=dict.fromkeys(("params", "fp8", "fp8_sink", "cache"), 0),
            split_rngs={"params": True},
            length=2,
        )
        return scanned(nn.remat(Model)(self.decode, nn.MultiHeadAttention), x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
@pytest.mark.parametrize("kind", ["linen", "linen, stacked", "nnx"])
def test_products_and_cache_in_fp8_do_not_depend_on_how_the_tokens_came(kind, recipe):
    case = of_nnx(recipe) if kind == "nnx" else linen(recipe, Stack if "stacked" in kind else Model)
    (y, cache), (again, same) = (case.in_parts(parts) for parts in PARTS)
    np.testing.assert_array_equal(y, again)
    jax.tree.map(np.testing.assert_array_equal, cache, same)
    assert 1e-3 < difference(y, case.at_once()) < 0.3


class Own(nn.Module):
    """Keeps a cache by itself, as models of transformers do."""

    with_attention: bool = False

    @nn.compact
    def __call__(self, x):
        if self.with_attention:
            x = nn.MultiHeadDotProductAttention(HEADS, decode=True)(x)
        key = nn.Dense(FEATURES, name="key")(x)
        self.variable("cache", "cached_key", lambda: key)
        return key


def test_caches_out_of_reach_raise():
    init = lambda model, x=X: jax.eval_shape(model.init, jax.random.key(0), x)
    convert = lambda model, **options: jfp8.convert(model, "rowwise", cache_dtype="e4m3", **options)
    with pytest.raises(ValueError, match="cached_key of the model is stored in float32. Make the"):
        init(convert(Own(with_attention=True)))
    with pytest.raises(ValueError, match="and this model has no such layer. Caches that other"):
        init(convert(Own()))
    with pytest.raises(ValueError, match="and this model has no such layer. Caches that other"):
        jax.eval_shape(convert(nn.Dense(4)).apply, init(nn.Dense(4)), X)
    wide = init(Model(decode=True))
    with pytest.raises(ValueError, match="cached_key of attn is stored in float32. Make the cache"):
        jax.eval_shape(
            lambda v: convert(Model(decode=True)).apply(v, X[:, :1], mutable=["cache"]), wide
        )
    with pytest.raises(ValueError, match="cache_dtype='fp7'.*Or a wide dtype such as"):
        jfp8.convert(Model(), cache_dtype="fp7")
    init(convert(Model()))  # without decode=True there is none


def test_caches_out_of_reach_raise_in_nnx():
    convert = lambda model: jfp8.convert(model, "rowwise", cache_dtype="e4m3")
    attention = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0))
    model = nnx.List([attention, nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
    assert isinstance(convert(nnx.Dict(a=attention))["a"], jfp8.nnx.MultiHeadAttention)
    assert type(attention) is nnx.MultiHeadAttention
    model[1].kept = nnx.Cache(jnp.zeros(4))
    with pytest.raises(ValueError, match="does not reach the cache of '1', a Linear, but only"):
        convert(model)
    with pytest.raises(ValueError, match="and this model has no such layer. Caches that other"):
        convert(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    attention.init_cache((1, 3, 4))
    with pytest.raises(ValueError, match="has a cache already.*then call init_cache"):
        convert(attention)

    class Own(nnx.MultiHeadAttention):
        pass

    with pytest.raises(ValueError, match="is a Own, a subclass of nnx.MultiHeadAttention that may"):
        convert(Own(2, 4, rngs=nnx.Rngs(0)))
