"""The contract about looking ahead: what recipes promise, and whether it is so to the bit."""

import re
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest

import jfp8
from jfp8.quantizers import Quantizer, Rowwise
from jfp8.recipes import PerOperand, Product
from jfp8.recipes.causality import LAYERS
from support.scripts import imported

looking_ahead = imported("looking_ahead", "benchmarks")

# Scales that reach across positions and sequences, by the definition of each recipe: one scale for
# the tensor does, one for each row or block of a row does not, and 1 and a history do not either.
CROSSES = {
    "delayed": False,
    "current": True,
    "rowwise": False,
    "block": False,
    "mxfp8": False,
    "mxfp4": False,
    "nvfp4": True,
    "nvfp4_4over6": True,
    "nvfp4_row": False,
    "qat": False,
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
    told = {layer: delayed.is_causal(layer) for layer in LAYERS}
    assert told == {**dict.fromkeys(LAYERS, False), "attention": True}, "it may be current scaling"
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
    recipes = [recipe for recipe, _ in looking_ahead.cases().values()]
    assert all(r.is_causal("attention") and r.is_batch_invariant("attention") for r in recipes)


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
    [("`DelayedScaling`", ["attention"]), ("`Float8CurrentScaling`", ["Dense", "attention"])],
)
def test_by_perturbation(name, layers):
    check(name, layers, decoding=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", looking_ahead.cases())
def test_every_layer_by_perturbation(name):
    check(name, looking_ahead.LAYERS)
