"""The contract about looking ahead: what recipes promise, and whether it is so to the bit."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8.linen import EinsumProduct
from jfp8.products.attention import _with_scales_in_lhs
from jfp8.quantizers import Current, Quantizer, Rowwise
from jfp8.recipes import PerOperand, Product
from jfp8.recipes.attention import attention_products
from jfp8.recipes.looking_ahead import LAYERS

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    looking_ahead = importlib.import_module("looking_ahead")

# Which scales reach across positions and sequences, by the definition of each recipe: one scale for
# the tensor does, one for each row or block of a row does not, and 1 and a history do not either.
CROSSES = {
    "delayed": False,
    "current": True,
    "rowwise": False,
    "block": False,
    "mxfp8": False,
    "nvfp4": True,
    "direct_e5m2": False,
    "hybrid": True,
    "unscaled": False,
}


def test_what_recipes_promise():
    assert sorted(CROSSES) == sorted(recipe.name for recipe in jfp8.recipes.RECIPES)
    for name, crosses in CROSSES.items():
        recipe = jfp8.recipes.get(name)
        for promise in (recipe.is_causal, recipe.is_batch_invariant):
            told = {layer: promise(layer, history=True) for layer in LAYERS}
            assert told == {**dict.fromkeys(LAYERS, not crosses), "attention": True}, name
    delayed = jfp8.recipes.DelayedScaling()
    assert not any(delayed.is_causal(layer) for layer in LAYERS), "it may be current scaling"
    assert jfp8.recipes.MXFP8BlockScaling().is_causal()


def test_what_single_operands_promise():
    hybrid, current = jfp8.recipes.Hybrid(), jfp8.recipes.Float8CurrentScaling()
    assert not current.is_causal(operand="lhs")
    assert current.is_causal(operand="rhs"), "a weight"
    assert current.is_causal(operand="output")
    assert not hybrid.is_causal(operand="output")
    assert jfp8.recipes.Hybrid(quantize_outputs=False).is_causal(operand="output")


@dataclass(frozen=True)
class _NobodyKnows(Quantizer):
    def __call__(self, x, context):
        return self.data_for(x, jnp.ones(()), context)


@pytest.mark.parametrize(
    "lhs", [_NobodyKnows(jfp8.E4M3FN), Rowwise(jfp8.E4M3FN, rounding="stochastic")], ids=repr
)
def test_what_is_not_known_is_not_promised(lhs):
    """Bits of stochastic rounding follow from the largest magnitude of the tensor."""
    known = Rowwise(jfp8.E4M3FN)
    recipe = lambda lhs: PerOperand(*(Product(lhs, known), *[Product(known, known)] * 2))
    promises = lambda recipe: (recipe.is_causal(), recipe.is_batch_invariant())
    assert promises(recipe(known)) == (True, True)
    assert promises(recipe(lhs)) == (False, False)


def test_unknown_layers_and_operands_are_refused():
    recipe = jfp8.recipes.MXFP8BlockScaling()
    with pytest.raises(ValueError, match="layer='linear' is unknown. Allowed: 'dense', 'conv'"):
        recipe.is_causal("linear")
    with pytest.raises(ValueError, match="operand='grad' is unknown"):
        recipe.is_batch_invariant(operand="grad")


def test_the_page_has_the_contract():
    """Its figures are measured; its check marks are what recipes say."""
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    without_figures = re.sub(r"\| [^|]* % (?=\|)", "| no ", page)
    assert looking_ahead.table({}) in without_figures


# By perturbation.


def check(name, layers, **how):
    recipe, history = looking_ahead.cases()[name]
    for layer, change in looking_ahead.measure(recipe, history, layers, **how).items():
        kind = looking_ahead.LAYERS[layer][0]
        # Where it is not promised it is not so either: scales that are shared differ by percents.
        for kept, found in (
            (recipe.is_causal(kind, history=history), change.later),
            (recipe.is_batch_invariant(kind, history=history), change.others),
        ):
            assert found == 0 if kept else found > 1e-3, (layer, found)
        if recipe.is_causal(kind, history=history):
            # Decoding sums in another order at most.
            assert change.steps < 1e-5, (layer, change.steps)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("`MXFP8BlockScaling`", ["attention"]), ("`Float8CurrentScaling`", ["Dense", "attention"])],
)
def test_by_perturbation(name, layers):
    check(name, layers, decoding=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", looking_ahead.cases())
def test_every_layer_by_perturbation(name):
    check(name, looking_ahead.LAYERS)


# Attention's own products.

RNG = np.random.default_rng(0)
P = np.tril(RNG.random((2, 3, 5, 5)).astype(np.float32))  # [batch, heads, q, k]
V = (RNG.normal(size=(2, 5, 3, 8)) * 2.0 ** RNG.integers(-9, 9, (2, 5, 3, 1))).astype(np.float32)


def e4m3(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


@functools.cache
def context(recipe):
    einsum = EinsumProduct(recipe=recipe, in_attention="context")
    return jax.jit(lambda p, v: einsum.apply({}, "bhqk,bkhd->bqhd", p, v))


def test_values_are_scaled_for_each_key_and_weights_for_each_query():
    """Against exact arithmetic: s_k = 2^ceil(log2(amax_k / 448)) moves into the weights."""
    s = 2.0 ** np.ceil(np.log2(np.abs(V).max(-1).astype(np.float64) / 448))  # [batch, k, heads]
    v = e4m3(V / s[..., None]).transpose(0, 2, 1, 3)
    p = P * s.transpose(0, 2, 1)[:, :, None]
    rows = (np.abs(p).max(-1, keepdims=True) / 448).astype(np.float32)
    p = e4m3((p / rows).astype(np.float32)) * rows
    expected = np.einsum("bhqk,bhkd->bqhd", p, v)
    y = context("current")(P, V)
    # 1/s by f32 may round a value at the border of two to the other one: 2^-4 of one term of five.
    error = np.abs(y - expected).max() / np.abs(expected).max()
    assert error < 1e-5


def test_no_recipe_is_left_without_values():
    exact = np.einsum("bhqk,bkhd->bqhd", P.astype(np.float64), V)
    y = context("nvfp4")(P, V)  # whose four bits have a scale of the tensor: it takes eight here
    assert 1e-3 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.05


def test_scales_move_into_the_weights_exactly():
    numbers = (((3,), (1,)), ((0, 1), (0, 2)))
    p, v = _with_scales_in_lhs(jnp.asarray(P), jnp.asarray(V), numbers, jfp8.E4M3FN)
    top = np.abs(v).max(-1)
    assert ((top > 224) & (top <= 448)).all()
    before, after = (np.einsum("bhqk,bkhd->bqhd", *map(np.float64, x)) for x in ((P, V), (p, v)))
    np.testing.assert_array_equal(before, after)


def test_gradients_are_those_of_the_product():
    dy = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32)
    d_p, d_v = jax.vjp(context("rowwise"), P, V)[1](dy)
    exact_p = np.einsum("bqhd,bkhd->bhqk", dy.astype(np.float64), V)
    exact_v = np.einsum("bhqk,bqhd->bkhd", P.astype(np.float64), dy)
    # Each operand is rounded by up to 2^-4; a scale that stayed behind is a factor of 2 at least.
    for found, exact in ((d_p, exact_p), (d_v, exact_v)):
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 2**-3


def test_a_quantizer_of_ones_own_gives_way_to_high_precision():
    own, known = _NobodyKnows(jfp8.E4M3FN), Current(jfp8.E4M3FN)
    recipe = PerOperand(Product(own, own), Product(known, known), Product(known, known))
    exact = np.einsum("bhqk,bkhd->bqhd", P.astype(np.float64), V)
    y = context(recipe)(P, V)
    assert np.linalg.norm(y - exact) / np.linalg.norm(exact) < 1e-6


class _Doubled(Current):
    """A user's own way from the data to bytes, made of ours."""


def test_subclasses_are_not_taken_for_what_they_derive_from():
    own, known = _Doubled(jfp8.E4M3FN), Current(jfp8.E4M3FN)
    recipe = PerOperand(Product(own, own), Product(known, known), Product(known, known))
    products, of_values = attention_products(recipe.products(), "context")
    assert (products.fprop.lhs, products.fprop.rhs, of_values) == (None, None, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(bad):
    y = context("current")(P, np.where(np.arange(5)[:, None, None] == 2, np.float32(bad), V))
    assert np.isnan(y[:, 2:]).all()


def test_nnx_attention_looks_at_no_later_key():
    product = jfp8.nnx.DotProductAttention(recipe="current")
    x = jax.random.normal(jax.random.key(0), (2, 6, 2, 8))
    f = jax.jit(lambda x: product(x, x, x, is_causal=True))
    np.testing.assert_array_equal(f(x)[:, :-1], f(x.at[:, -1, :, 0].multiply(100))[:, :-1])
