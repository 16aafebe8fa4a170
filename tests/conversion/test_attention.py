"""Attention itself in FP8 in a converted Transformer: state, statistics, report, promises."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfp8
from support.models import Model

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 6, 16))
PROJECTIONS = ("query", "key", "value", "out")


class Block(nn.Module):
    """A pre-norm block of a decoder-only Transformer."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(2, dropout_rate=self.dropout, name="attn")
        x = x + attention(nn.LayerNorm()(x), mask=mask, deterministic=not train)
        return x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(nn.LayerNorm()(x))))


def report(model, **how):
    return jfp8.report(model, jax.eval_shape(model.init, KEY, X), X, **how)


@pytest.mark.slow
def test_statistics_show_every_operand_and_nothing_looks_ahead():
    model = jfp8.convert(Block(), exempt=(), attention=True)
    variables = jax.jit(model.init)(KEY, X)
    state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=optax.sgd(0.0))

    def loss_fn(variables, x):
        return jnp.sum(model.apply(variables, x) ** 2)

    @jax.jit
    @jfp8.debug.stats
    def step(state, x):
        _, grads = jfp8.value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads)

    state, seen = step(state, X)
    rows = {
        (row.path.removeprefix("attn/attention/"), row.tensor, row.products): row
        for row in seen.rows()
        if row.path.startswith("attn/attention/")
    }
    # dS is rounded anew for each of two products. So is P: the backward pass computes it again.
    assert set(rows) == {
        ("scores", "lhs", "fprop+wgrad"),
        ("scores", "rhs", "fprop+dgrad"),
        ("scores", "grad", "dgrad"),
        ("scores", "grad", "wgrad"),
        ("context", "lhs", "fprop"),
        ("context", "rhs", "fprop+dgrad"),
        ("context", "grad", "dgrad+wgrad"),
    }
    for row in rows.values():
        assert (row.format, row.nonfinite) == ("E4M3FN", 0), row
        assert 18 < row.sqnr < 45, row
    assert sorted(state.fp8["attn"]) == sorted(PROJECTIONS)  # and of attention itself no histories
    with_histories = {"params": state.params, "fp8": state.fp8}
    found = jfp8.debug.looks_ahead(lambda x: model.apply(with_histories, x), X)
    assert (found.later, found.others) == (0, 0)


@pytest.mark.parametrize(("own", "left"), [(None, set()), ("current", {"current"})])
def test_exempt_layers_of_jfp8_compute_attention_in_high_precision(own, left):
    """Unless the layer has a recipe of its own: a conversion leaves it alone."""
    layer = jfp8.linen.MultiHeadDotProductAttention(2, recipe=own, attention_products=True)
    rows = report(jfp8.convert(layer, "mxfp8", exempt="*")).rows
    assert {row.recipe for row in rows if row.fp8} == left


@pytest.mark.slow
def test_attention_is_chosen_by_its_path_and_refuses_dropout():
    chosen = lambda **how: {
        row.path for row in report(jfp8.convert(Block(), attention=True, **how)).rows if row.fp8
    }
    projections = {f"attn/{name}" for name in PROJECTIONS}
    assert chosen(exempt=["*/attention", "up", "down"]) == projections
    assert chosen(only="*/attention") == {"attn/attention"}
    exempt = jfp8.convert(Block(), exempt="*/attention", attention=True)
    reasons = {row.reason for row in report(exempt).unconverted}
    assert reasons == {"exempt: '*/attention'"}
    with pytest.raises(ValueError, match=r"'\*/attentoin' matches no layer.*attn/attention"):
        report(jfp8.convert(Block(), only="*/attentoin", attention=True))
    with pytest.raises(ValueError, match=r"dropout_rate=0.1 asks for.*exempt="):
        report(jfp8.convert(Block(dropout=0.1), attention=True), train=True)


def own_attention(query, key, value, mask=None, **how):
    return nn.dot_product_attention(query, key, value, mask=mask)


def attends(module, x):
    new = functools.partial(nn.MultiHeadDotProductAttention, 2)
    x = x + new(name="attn")(x, mask=nn.make_causal_mask(x[..., 0]))
    return x + new(attention_fn=own_attention, name="own")(x)


class Attends(nnx.Module):
    def __init__(self):
        new = functools.partial(nnx.MultiHeadAttention, 2, 16, decode=False, rngs=nnx.Rngs(0))
        self.attn, self.own = new(), new(attention_fn=own_attention)

    def __call__(self, x):
        x = x + self.attn(x, is_causal=True)
        return x + self.own(x)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize(("door", "name"), [("linen", "attention"), ("nnx", "attention_fn")])
def test_attention_is_chosen_and_explained(door, name, attention):
    how = {"exempt": (), "attention": attention}
    linen = lambda: report(jfp8.convert(Model(attends), **how))
    found = linen() if door == "linen" else jfp8.report(jfp8.convert(Attends(), **how), X)
    assert found.causal
    inside = [row for row in found.rows if row.path == (f"attn/{name}" if attention else "attn")]
    assert sum(row.times for row in inside) == 6
    assert {row.fp8 for row in inside} == {attention}
    assert {row.flops / row.times for row in inside} == {2 * 2 * 2 * 6 * 6 * 8}
    opt_in = "inside of attention (convert with attention=True)"
    assert {row.reason for row in inside} == {"" if attention else opt_in}
    own = {row.reason for row in found.rows if row.path == "own"}
    assert own == {"the layer was given its own attention_fn"}
    times = {(row.path, row.kind): row.times for row in found.rows if row.fp8}
    assert all(times[f"attn/{n}", kind] == 1 for n in PROJECTIONS for kind in ("fprop", "wgrad"))


def test_attention_by_a_function_and_of_jfp8_are_explained():
    def by_function(module, x):
        q = nn.Dense(16)(x).reshape(2, 6, 2, 8)
        return x + jax.nn.dot_product_attention(q, q, q).reshape(x.shape)

    rows = report(jfp8.convert(Model(by_function), exempt=(), attention=True)).unconverted
    ((reason,),) = ({row.reason for row in rows},)
    assert reason.startswith("attention by a function, which convert does not replace (call jfp8.")
    assert "test_attention.py:" in reason
    ours = report(jfp8.MultiHeadDotProductAttention(num_heads=2))
    assert {row.path for row in ours.rows if row.fp8} == set(PROJECTIONS)
    assert all("attention_products=True" in row.reason for row in ours.unconverted)
