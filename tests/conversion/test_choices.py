"""Which layers and parameters become FP8, and with which recipe: `exempt`, `only` and patterns."""

import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.recipes import get
from jfp8.recipes.per_layer import path_matches
from support.doors import DOORS, KEY, NnxModel, Weights, converted, original
from support.models import Model

every_door = pytest.mark.parametrize("door", DOORS)
IMAGES = jnp.ones((2, 6, 6, 3))
LAYERS = ("stem", "body", "last", "head")
SHAPES = {"stem": (3, 3, 3, 8), "body": (3, 3, 8, 8), "last": (3, 3, 8, 8), "own": (8, 8)}
PARAMS = {name: jnp.ones(shape) for name, shape in {**SHAPES, "head": (8, 5)}.items()}
ALL = set(PARAMS)
CONV = {"linen": nn.Conv, "nnx": nnx.Conv}
DENSE = {"linen": nn.Dense, "nnx": nnx.Linear}
HOLDER = {"function": jax.ShapeDtypeStruct, "linen": Model, "nnx": NnxModel}


def net(p, x):
    for name in ("stem", "body", "last"):
        x = jax.nn.relu(p(name, x))
    return p("head", jnp.tanh(x.mean((1, 2)) @ p["own"]))


def chosen(door, recipe="delayed", **options):
    return set(converted(door, net, PARAMS, IMAGES, recipe, layers=LAYERS, **options).states())


@every_door
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"body", "last", "own"}),
        ({"exempt": ()}, ALL),
        ({"exempt": jfp8.Edge.LOGITS}, ALL - {"head"}),
        ({"exempt": jfp8.Edge.IMAGE_INPUT}, ALL - {"stem"}),
        ({"exempt": "body"}, ALL - {"body"}),
        ({"exempt": [*jfp8.EDGES, "body"]}, {"last", "own"}),
        ({"exempt": lambda path, layer: path[0] == "b", "only": "*o*"}, {"own"}),
        ({"only": "*o*"}, {"body", "own"}),
        ({"only": ["stem", "own"]}, {"stem", "own"}),
        ({"only": jfp8.Edge.LOGITS}, {"head"}),
        ({"only": lambda path, layer: path == "stem"}, {"stem"}),
        ({"only": lambda path, layer: False}, set()),
    ],
)
def test_exempt_and_only(options, expected, door):
    assert chosen(door, **options) == expected


@pytest.mark.parametrize("door", ["linen", "nnx"])
def test_types(door):
    conv, dense, holder = CONV[door], DENSE[door], HOLDER[door]
    assert chosen(door, exempt=conv) == {"own", "head"}
    assert chosen(door, only=conv) == {"stem", "body", "last"}
    assert chosen(door, only=[dense, "last"]) == {"head", "last"}
    assert chosen(door, exempt=dense) == ALL - {"head"}
    assert chosen(door, only=holder) == {"own"}
    with pytest.raises(ValueError, match="no layer of type (Einsum|DenseGeneral).*It has: .*Conv"):
        chosen(door, exempt=[nn.DenseGeneral if door == "linen" else nnx.Einsum, "own"])


@every_door
def test_functions_get_the_path_and_the_layer_or_the_module_of_a_parameter(door):
    """Functions of arrays have neither, so they give the shape of a weight."""
    seen = {}
    chosen(door, exempt=lambda path, layer: seen.update({path: layer}))
    assert set(seen) == ALL
    assert isinstance(seen["own"], HOLDER[door])
    assert isinstance(seen["body"], CONV.get(door, jax.ShapeDtypeStruct))
    if door == "function":
        assert {name: layer.shape for name, layer in seen.items()} == {**SHAPES, "head": (8, 5)}


@every_door
def test_reasons_are_in_the_report(door):
    def reasons(**options):
        case = converted(door, net, PARAMS, IMAGES, layers=LAYERS, **options)
        return {row.path: row.reason for row in case.report(IMAGES).rows}

    assert reasons(exempt="body")["body"] == "exempt: 'body'"
    assert reasons(only="body")["last"] == "not among only='body'"
    assert reasons(exempt=lambda path, layer: path == "head")["head"] == "exempt: <lambda>"
    stem = "exempt: the first convolution of an image model (at most 4 input channels)"
    assert reasons()["stem"] == stem
    if door in CONV:
        assert reasons(exempt=CONV[door])["last"] == "exempt: Conv"


@every_door
@pytest.mark.parametrize("name", ["exempt", "only"])
def test_a_pattern_that_matches_nothing(name, door):
    words = r"'encoder/\*' matches no layer of the model. Layers: body, head, last, own, stem"
    with pytest.raises(ValueError, match=words):
        chosen(door, **{name: ["own", "encoder/*"]})


own_derivative = jax.custom_jvp(jnp.dot)
own_derivative.defjvp(lambda xs, ts: (jnp.dot(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))


@every_door
def test_a_conversion_of_nothing_says_what_it_saw_unless_it_was_chosen(door):
    """Its matmuls have a derivative of their own, in which conversion does not look."""
    run = lambda p, x: p("head", own_derivative(x, p["w"]) * p["scale"][None])
    params = {"w": jnp.ones((8, 8)), "scale": jnp.ones((8,)), "head": jnp.ones((8, 3))}
    model, x = original(door, run, params, ["head"]), jnp.ones((4, 8))
    calls = {"function": lambda f: f(params, x), "nnx": lambda model: model(x)}
    init = lambda model: jax.eval_shape(model.init, KEY, x)
    call = calls.get(door, init)
    converted = jfp8.convert(model, "current")
    with pytest.warns(UserWarning, match=r"No product of .* is FP8") as caught:
        call(converted)
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    assert "exempt: a layer whose result the model returns" in text
    assert "exempt=() exempts none" in text
    assert "and why: head: exempt" in text
    assert "Parameters of which it saw no product: w (8, 8). Inside functions" in text
    assert "jfp8.linen.DotGeneral or EinsumProduct, jfp8.nnx.DotGeneral or EinsumOp" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if door == "linen":
            jax.eval_shape(converted.apply, init(model), x)  # was told once
        for options in ({"exempt": "head"}, {"only": lambda path, layer: False}, {"exempt": ()}):
            call(jfp8.convert(model, "current", **options))
        with jfp8.autocast(enabled=False):
            call(jfp8.convert(model, "current"))


# Another recipe for each layer. The oracle: the same model with each matmul's recipe written in it.
X = jax.random.normal(jax.random.key(1), (8, 32))
SQUARES = ("none", "first", "two_up", "two_own", "head")
KEYS = jax.random.split(jax.random.key(2), 5)
WEIGHTS = {name: jax.random.normal(key, (32, 32)) / 6 for name, key in zip(SQUARES, KEYS)}
RECIPES = {"none": None, "two_own": "rowwise", "two_*": "mxfp8", "head": "current"}
IN_WORDS = {"none": "", "first": "", "two_up": "mxfp8", "two_own": "rowwise", "head": "current"}


def chain(p, x):
    for name in SQUARES:
        x = jnp.tanh(p(name, x))
    return x


class Written(Weights):
    def __call__(self, name, x):
        numbers, recipe = (((1,), (0,)), ((), ())), IN_WORDS[name]
        if not recipe:
            return x @ self[name]
        return jfp8.scaled_dot_general(x, self[name], numbers, recipe=get(recipe))


@every_door
def test_each_layer_has_the_recipe_of_the_first_pattern_that_matches(door):
    layers = set(SQUARES) - {"two_own"}
    case = converted(door, chain, WEIGHTS, X, RECIPES, layers=layers, exempt=())
    rows = [row for row in case.report(X).rows if row.kind in ("fprop", "forward")]
    own = "two_own" if door == "function" else ""
    expected = {own if name == "two_own" else name: recipe for name, recipe in IN_WORDS.items()}
    assert {row.path: row.recipe for row in rows} == expected
    reasons = {row.path: row.reason for row in rows if row.reason}
    assert reasons["first"] == "no pattern of the recipes matches it"
    assert set(reasons) == {"none", "first"}
    run = lambda x: (case(x), chain(Written(WEIGHTS), x), case.plain(x))
    found, by_hand, plain = jax.jit(run)(X)
    np.testing.assert_array_equal(found, by_hand)
    assert np.all(found != plain)


@every_door
@pytest.mark.parametrize(
    ("recipes", "error", "words"),
    [
        ({"nothing/*": None, "*": "mxfp8"}, ValueError, "'nothing/\\*' matches no layer"),
        ({"*": "mxfp8", "body": None}, ValueError, "'body' is that of no layer"),
        ({}, ValueError, "says nothing of any layer"),
        ({nn.Dense: "mxfp8"}, TypeError, "is no pattern of paths"),
        ({"*": "mxfp9"}, ValueError, "no recipe called 'mxfp9'"),
    ],
)
def test_mistakes(recipes, error, words, door):
    with pytest.raises(error, match=words):
        chosen(door, recipes)
    with pytest.raises(TypeError, match="recipe must be a recipe object"):
        jfp8.Dense(4, recipe=recipes).init(KEY, X)


@every_door
def test_converting_again_replaces_the_recipe_or_is_refused(door):
    """In NNX the copy holds its histories, so another recipe must begin with the original."""
    model = original(door, net, PARAMS, LAYERS)
    once = jfp8.convert(model, "delayed", exempt=())
    if door == "nnx":
        words = r"'own' has the recipe 'delayed'.*Convert the original.*\(original, 'current"
        with pytest.raises(ValueError, match=words):
            jfp8.convert(once, "current", exempt=())
        jfp8.convert(once, "delayed", exempt=())
        part = jfp8.convert(model, "delayed", only="own")
        with pytest.raises(ValueError, match="'own' has the recipe 'delayed'"):
            jfp8.convert(part, "current", exempt=())
        jfp8.convert(part, "current", exempt="own")
        ours = nnx.Sequential(jfp8.nnx.Linear(8, 8, recipe="delayed", rngs=nnx.Rngs(0)))
        jfp8.convert(ours, "mxfp8", exempt=())  # was given its recipe by hand
        return
    assert jfp8.convert(once, "delayed", exempt=()) == once
    assert jfp8.convert(once, "current") == jfp8.convert(model, "current")
    assert jfp8.convert(once, "current") != once


def linen(module, x):
    """Layers in blocks, as most models have them."""
    x = nn.Dense(32, name="first")(x)
    for i in range(2):
        block = Model(lambda module, x: nn.relu(nn.Dense(32, name="up")(x)), name=f"blocks_{i}")
        x = block(x)
    return nn.Dense(4, name="head")(x)


def test_from_a_file():
    config = {"recipe": {"first": None, "blocks_0": {"name": "delayed", "margin": 1}, "*": "mxfp8"}}
    model, tx = jfp8.initialize(Model(linen), optax.sgd(1.0), json.dumps(config))
    assert model.jfp8_selection.recipe.recipes[1] == ("blocks_0", get("delayed", margin=1))
    variables = jax.eval_shape(model.init, KEY, X)
    assert set(variables["fp8"]) == {"blocks_0"}
    config["recipe"]["blocks_0"] = "hybrid"  # one that needs a loss scale is enough
    _, tx = jfp8.initialize(Model(linen), optax.sgd(1.0), config)
    assert "loss_scale" in repr(jax.eval_shape(tx.init, variables["params"])).lower()
    recipe = {"first": None, "blocks_0": "mxfp8", "*": "current"}
    stored = jax.eval_shape(lambda p: jfp8.quantize_params(p, recipe), variables["params"])
    assert not jfp8.is_scaled_array(stored["first"]["kernel"])
    assert stored["blocks_0"]["up"]["kernel"].scale.shape == (1, 32)
    assert stored["head"]["kernel"].scale.shape in ((), (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "context"])
def test_attention_of_jfp8_has_a_path_and_a_recipe(name):
    """It has no parameters; and without histories no state either."""

    def attends(module, x):
        x = x[:, None, None]
        return jfp8.linen.DotProductAttention(name=name)(x, x, x)

    model = jfp8.convert(Model(attends), {name: "rowwise", "*": "delayed"})
    assert model.init(KEY, X) == {}
    rows = jfp8.report(model, {"params": {}}, X).rows
    assert {row.path: row.recipe for row in rows if row.kind == "fprop"} == {name: "rowwise"}
    with pytest.raises(ValueError, match="'other' matches no layer"):
        jfp8.convert(Model(attends), {"other": "rowwise"}).apply({}, X)


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
