"""Another recipe for each layer. Oracle: the same model with each layer's recipe written in it."""

import functools
import json

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.recipes import get
from jfp8.recipes.per_layer import path_matches
from support.models import Model as OneCall

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 32))
RECIPES = {"first": None, "blocks_1/*": "rowwise", "blocks_*": "mxfp8", "*": "current"}
IN_WORDS = {
    "first": "",
    "blocks_0/up": "mxfp8",
    "blocks_0/own": "mxfp8",
    "blocks_1/up": "rowwise",
    "blocks_1/own": "rowwise",
    "head": "current",
}


def layer_of(path, given):
    """Flax's layer; or, where it is `given`, that of jfp8 with its recipe."""
    if not given or not given[path]:
        return nn.Dense
    return lambda features, **how: jfp8.Dense(features, recipe=given[path], **how)


class Block(nn.Module):
    place: str
    given: dict | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(layer_of(f"{self.place}/up", self.given)(32, name="up")(x))
        recipe = self.given and self.given[f"{self.place}/own"]
        product = functools.partial(jfp8.linen.DotGeneral, recipe)
        return nn.Dense(32, dot_general_cls=product, name="own")(x)


class Model(nn.Module):
    given: dict | None = None

    @nn.compact
    def __call__(self, x):
        x = layer_of("first", self.given)(32, name="first")(x)
        for i in range(2):
            x = Block(f"blocks_{i}", self.given, name=f"blocks_{i}")(x)
        return layer_of("head", self.given)(4, name="head")(x)


def recipes_of(model, variables):
    rows = jfp8.report(model, variables, X).rows
    return {row.path: row.recipe for row in rows if row.kind in ("fprop", "forward")}


def test_each_layer_has_the_recipe_of_the_first_pattern_that_matches():
    model = jfp8.convert(Model(), RECIPES, exempt=())
    variables = jax.jit(model.init)(KEY, X)
    assert recipes_of(model, variables) == IN_WORDS
    outs = lambda variables, x: [m.apply(variables, x) for m in (model, Model(IN_WORDS), Model())]
    found, expected, plain = jax.jit(outs)(variables, X)
    np.testing.assert_array_equal(found, expected)
    assert np.all(found != plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "context"])
def test_attention_of_jfp8_has_a_path_and_a_recipe(name):
    """It has no parameters; and without histories no state either."""

    def attends(module, x):
        x = x[:, None, None]
        return jfp8.linen.DotProductAttention(name=name)(x, x, x)

    model = jfp8.convert(OneCall(attends), {name: "rowwise", "*": "delayed"})
    assert model.init(KEY, X) == {}
    assert recipes_of(model, {"params": {}}) == {name: "rowwise"}
    with pytest.raises(ValueError, match="'other' matches no layer"):
        jfp8.convert(OneCall(attends), {"other": "rowwise"}).apply({}, X)


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.middle = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.middle:
            x = nnx.relu(layer(self.first(x)))
        return x


def test_nnx():
    model = jfp8.convert(
        Stack(nnx.Rngs(0)), {"middle/1": "mxfp8", "middle/*": "current"}, exempt=()
    )
    assert not hasattr(model.first.dot_general, "recipe")
    made = [layer.dot_general.recipe for layer in model.middle]
    assert made == [get("current"), get("mxfp8")]
    reasons = {row.path: row.reason for row in jfp8.report(model, X).rows}
    assert reasons["first"] == "no pattern of the recipes matches it"


def test_from_a_file():
    config = {"recipe": {"first": None, "blocks_0": {"name": "delayed", "margin": 1}, "*": "mxfp8"}}
    model, tx = jfp8.initialize(Model(), optax.sgd(1.0), json.dumps(config))
    assert model.jfp8_selection.recipe.recipes[1] == ("blocks_0", get("delayed", margin=1))
    variables = jax.jit(model.init)(KEY, X)
    assert set(variables["fp8"]) == {"blocks_0"}
    config["recipe"]["blocks_0"] = "hybrid"  # one that needs a loss scale is enough
    _, tx = jfp8.initialize(Model(), optax.sgd(1.0), config)
    assert "loss_scale" in repr(jax.eval_shape(tx.init, variables["params"])).lower()


@pytest.mark.slow
def test_stored_weights_follow_their_recipes():
    params = jax.jit(Model().init)(KEY, X)["params"]
    stored = jfp8.quantize_params(params, {"first": None, "blocks_0": "mxfp8", "*": "current"})
    assert not jfp8.is_scaled_array(stored["first"]["kernel"])
    assert stored["blocks_0"]["up"]["kernel"].scale.shape == (1, 32)
    assert stored["head"]["kernel"].scale.shape in ((), (1, 1))


@pytest.mark.parametrize(
    ("recipes", "error", "words"),
    [
        ({"nothing/*": None, "*": "mxfp8"}, ValueError, "'nothing/\\*' matches no layer"),
        ({"*": "mxfp8", "first": None}, ValueError, "'first' is that of no layer"),
        ({}, ValueError, "says nothing of any layer"),
        ({nn.Dense: "mxfp8"}, TypeError, "is no pattern of paths"),
        ({"*": "mxfp9"}, ValueError, "no recipe called 'mxfp9'"),
    ],
)
def test_mistakes(recipes, error, words):
    with pytest.raises(error, match=words):
        jax.eval_shape(jfp8.convert(Model(), recipes).init, KEY, X)
    with pytest.raises(TypeError, match="recipe must be a recipe object"):
        jfp8.Dense(4, recipe=recipes).init(KEY, X)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("Dense_0", "Dense_0", True),
        ("Dense_0", "Dense_01", False),
        ("Dense_0", "Encoder_0/Dense_0", False),  # patterns begin at the top
        ("*/Dense_0", "Encoder_0/Dense_0", True),
        ("*Dense_0", "Encoder_0/Dense_0", True),
        ("Encoder_0", "Encoder_0/Block_3/Dense_0", True),  # a module stands for all inside it
        ("Encoder_0/*", "Encoder_0/Block_3/Dense_0", True),
        ("*/Block_3", "Encoder_0/Block_3/Dense_0", True),
        ("Encoder_0", "Encoder_01/Dense_0", False),
        ("Dense_[02]", "Dense_2", True),
        ("Dense_[02]", "Dense_1", False),
        ("Dense_?", "Dense_1", True),
        ("dense_0", "Dense_0", False),
        ("*", "Dense_0", True),
    ],
)
def test_patterns(pattern, path, matches):
    assert path_matches(pattern, path) == matches
