"""Whether a model masks later positions, and what is said where its recipe's scales see them."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
from jfp8.conversion.causal import masks_later_positions

N = 6
TOKENS = jnp.arange(2 * N).reshape(2, N) % 5
QKV = [jnp.ones((2, N, 2, 4))] * 3
KEYS = jax.random.split(jax.random.key(0), 3)
LOWEST = np.full((N, N), -1e9, np.float32)

CAUSAL = {
    "nn.make_causal_mask": lambda t: nn.make_causal_mask(t),
    "with padding": lambda t: nn.combine_masks(
        nn.make_causal_mask(t), nn.make_attention_mask(t > 0, t > 0)
    ),
    "jnp.tril": lambda t: jnp.where(jnp.tril(jnp.ones((N, N))), t[0, 0], -1e9),
    "np.tril": lambda t: jnp.where(np.tril(np.ones((N, N), bool)), t[0, 0], -1e9),
    "a window before": lambda t: jnp.where(np.tri(N, N) - np.tri(N, N, -3), t[0, 0], -1e9),
    "np.arange": lambda t: jnp.asarray(np.arange(N))[:, None] >= np.arange(N)[None],
    "added to scores": lambda t: t[0, 0] + np.triu(LOWEST, 1),
    "jnp.arange": lambda t: jnp.arange(N)[:, None] >= jnp.arange(N)[None],
    "jax.nn": lambda t: jax.nn.dot_product_attention(QKV[0] * t[0, 0], *QKV[1:], is_causal=True),
    "flax.nnx": lambda t: nnx.dot_product_attention(QKV[0] * t[0, 0], *QKV[1:], is_causal=True),
    "remat": jax.checkpoint(lambda t: t[0, 0] * jnp.tril(jnp.ones((N, N)))),
    "scan": lambda t: jax.lax.scan(
        lambda c, _: (c * jnp.tril(jnp.ones((N, N))), None), t[0, 0] * jnp.ones((N, N)), None, 3
    )[0],
}
OTHERS = {
    "attends to all": lambda t: jax.nn.dot_product_attention(QKV[0] * t[0, 0], *QKV[1:]),
    "padding": lambda t: nn.make_attention_mask(t > 0, t > 0),
    "one hot": lambda t: jax.nn.one_hot(t, 5),
    "lengths": lambda t: jnp.arange(N)[None] < t[:, :1],
    "the first few": lambda t: (jnp.arange(N) < 3) & (t[0] > 0),
    "a window": lambda t: jnp.abs(jnp.arange(N)[:, None] - jnp.arange(N)[None]) < 3,
    "a window on both sides": lambda t: t[0, 0] * (np.tri(N, N, 2) - np.tri(N, N, -3)),
    "keys": lambda t: jax.random.uniform(KEYS[t[0, 0]]) >= jnp.arange(N),
    "pixels": lambda t: jnp.asarray(np.arange(N * N).reshape(N, N)) >= jnp.arange(N)[None],
    "itself": lambda t: t[0, 0] * np.eye(N),
    "all may be seen": lambda t: t[0, 0] * np.ones((N, N)),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_masks_are_seen(name):
    assert masks_later_positions(jax.make_jaxpr(CAUSAL[name])(TOKENS))


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_are_not_taken_for_causal(name):
    assert not masks_later_positions(jax.make_jaxpr(OTHERS[name])(TOKENS))


def test_masks_may_be_arguments_and_data_are_none():
    closed = jax.make_jaxpr(lambda x: x)(TOKENS)
    masks = [jnp.tril(jnp.ones((2, 3, N, N))), jnp.ones((2, 3, N, N))]
    seen = []
    look = lambda x: seen.extend(masks_later_positions(closed, (x, {"mask": m})) for m in masks)
    look(TOKENS)
    jax.jit(look)(TOKENS)  # where JAX would trace a part of an array
    assert seen == [True, False] * 2
    by_sign = np.tril(np.full((N, N), 2.0)) + np.arange(N) / N - 0.9  # positive where a mask is 1
    keys = jax.random.split(jax.random.key(0), (N, N))
    shapes = jax.ShapeDtypeStruct((N, N), bool)
    assert not masks_later_positions(closed, (by_sign, keys, shapes, np.zeros((0, N, N))))


def test_models_may_close_over_what_is_traced():
    def f(mask):
        inner = jax.make_jaxpr(lambda x: jnp.where(mask, x, 0.0))(jnp.ones((N, N)))
        assert any(isinstance(c, jax.core.Tracer) for c in inner.consts)
        return masks_later_positions(inner, mask)

    seen = []
    jax.jit(lambda mask: seen.append(f(mask)))(jnp.tril(jnp.ones((N, N), bool)))
    assert seen == [False]


class Model(nn.Module):
    causal: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(5, 8)(tokens)
        mask = nn.make_causal_mask(tokens) if self.causal else None
        x = nn.MultiHeadDotProductAttention(2)(x, mask=mask)
        return nn.Dense(5)(nn.Dense(8)(x))


def traced(model):
    return jax.eval_shape(model.init, jax.random.key(0), TOKENS)


AHEAD = r'under the recipe "current" the scales of MultiHead\w+_0/query, .* and 1 more depend'


def test_converted_models_warn_once():
    model = jfp8.convert(Model(), "current")
    with pytest.warns(UserWarning, match=AHEAD) as caught:
        variables = traced(model)
    assert caught[0].filename == __file__
    assert "jfp8.debug.looks_ahead" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(model.apply, variables, TOKENS)
    with pytest.warns(UserWarning, match="later positions"):
        traced(jfp8.convert(Model(), "nvfp4", exempt=()))
    convolutions = nn.Sequential([nn.Conv(n, (3,), padding="CAUSAL") for n in (8, 4)])
    model = jfp8.convert(convolutions, "current")
    with pytest.warns(UserWarning, match="the scales of layers_0 depend"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, N, 8)))


@pytest.mark.parametrize(
    "model",
    [
        jfp8.convert(Model(), "mxfp8"),
        jfp8.convert(Model()),
        jfp8.convert(Model(causal=False), "current"),
        Model(),
    ],
    ids=["mxfp8", "delayed", "not causal", "not converted"],
)
def test_nothing_is_said_of_models_that_keep_the_promise(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = jfp8.report(model, traced(model), TOKENS)
    assert report.looking_ahead == ()


def test_reports_say_which_products_look_ahead():
    layer = jfp8.TransformerLayer(8, 16, 2, self_attn_mask_type="causal", recipe="current")
    x = jnp.ones((2, N, 8))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    with pytest.warns(UserWarning, match="later positions") as caught:
        report = jfp8.report(layer, variables, x)
    assert caught[0].filename == __file__
    layers = ["mlp/wi", "mlp/wo", "self_attention/out", "self_attention/qkv"]
    assert sorted({row.path for row in report.looking_ahead}) == layers
    assert {row.kind for row in report.looking_ahead} == {"fprop"}
    assert " ".join(str(report).split()).endswith(str(caught[0].message))
    assert report.verbose().splitlines()[-1] == str(report).splitlines()[-1]
    assert "masks later positions" in report._repr_html_()


@pytest.mark.parametrize(("recipe", "ahead"), [("current", True), ("rowwise", False)])
def test_converted_nnx_models_warn(recipe, ahead):
    model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    model = jfp8.convert(model, recipe, exempt=())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(jnp.ones((2, N, 8)), is_causal=True)
    assert ["later positions" in str(each.message) for each in caught] == [True] * ahead


def test_reports_of_nnx_models():
    class Attends(nnx.Module):
        def __init__(self, recipe):
            self.layer = jfp8.nnx.MultiHeadAttention(
                2, 8, recipe=recipe, attention_products=True, decode=False, rngs=nnx.Rngs(0)
            )

        def __call__(self, x):
            return self.layer(x, is_causal=True)

    x = jnp.ones((2, N, 8))
    with pytest.warns(UserWarning, match="the scales of layer/query, layer/key, layer/value"):
        report = jfp8.report(Attends("current"), x)
    assert len(report.looking_ahead) == 4, "attention's own products keep the promise"
    assert jfp8.report(Attends("rowwise"), x).looking_ahead == ()
