"""`debug.compare`: errors of single products against ml_dtypes, and of whole models."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.debug import ComparedGradient, ComparedProduct, Comparison, ProductError
from support.amaxes import E4M3, E5M2, fake_quantize
from support.arrays import cosine, normal, relative_error
from support.models import Model

ALL = {"exempt": ()}
TWO = ("current", "mxfp8")


class One(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(24, use_bias=False)(x)


def test_errors_of_the_three_products_against_ml_dtypes():
    """dx is not among them: nothing asks for the gradient by the model's input."""
    x = normal((64, 48)) * np.logspace(-3, 0, 48, dtype=np.float32)
    variables = One().init(jax.random.key(0), x)
    w = np.asarray(variables["params"]["Dense_0"]["kernel"], np.float64)
    x[3] *= 1000
    rowwise = jfp8.recipes.RowwiseScaling(scale_rounding=None)
    found = jfp8.debug.compare(One(), "current", rowwise, x, variables=variables, **ALL)
    fprop, wgrad = found.products
    assert (fprop.layer, fprop.product, wgrad.product) == ("Dense_0", "fprop", "wgrad")
    y = x.astype(np.float64) @ w
    dy = y / y.size
    # Rounding of f32 sums, about 1e-6 of the result, in an error of 3e-2.
    in_range = functools.partial(pytest.approx, rel=1e-3)

    per_tensor = fake_quantize(x, E4M3) @ fake_quantize(w, E4M3)
    assert fprop.a.total == in_range(relative_error(per_tensor, y))
    assert fprop.a.cast == in_range(relative_error(per_tensor, y))
    dw = fake_quantize(x, E4M3).T @ fake_quantize(dy, E5M2)
    assert wgrad.a.total == in_range(relative_error(dw, x.T @ dy))
    assert fprop.a.product < 2e-6
    rows, columns = (np.stack([fake_quantize(row, E4M3) for row in matrix]) for matrix in (x, w.T))
    assert fprop.b.total == in_range(relative_error(rows @ columns.T, y))


def test_representable_operands_have_no_cast_error():
    rng = np.random.default_rng(0)
    x = rng.choice([0.0, 1, -2, 3, 448], (16, 32)).astype(np.float32)
    w = rng.choice([0.0, 1, -1, 2, 448], (32, 24)).astype(np.float32)
    x[0, 0] = w[0, 0] = 448
    variables = {"params": {"Dense_0": {"kernel": jnp.asarray(w)}}}
    found = jfp8.debug.compare(One(), "current", "unscaled", x, variables=variables, **ALL)
    fprop = found.products[0]
    for error in (fprop.a, fprop.b):
        assert error.cast == 0
        assert error.total < 1e-6


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_the_models_themselves():
    x, labels = normal((32, 16)), np.arange(32) % 10
    variables = Net().init(jax.random.key(3), x)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss_fn = lambda logits: cross_entropy(logits, labels).mean()
    found = jfp8.debug.compare(
        Net(), "current", "direct_e5m2", x, variables=variables, loss_fn=loss_fn
    )

    def gradient(model):
        loss = lambda params: loss_fn(model.apply({"params": params}, x))
        value, grads = jax.value_and_grad(loss)(variables["params"])
        return float(value), {k: np.asarray(v["kernel"], np.float64) for k, v in grads.items()}

    value, plain = gradient(Net())
    value_a, grads_a = gradient(jfp8.convert(Net(), jfp8.recipes.get("current")))
    value_b, grads_b = gradient(jfp8.convert(Net(), jfp8.recipes.get("direct_e5m2")))
    assert (found.loss, found.loss_a, found.loss_b) == pytest.approx(
        (value, value_a, value_b), rel=1e-5
    )
    kernels = [g for g in found.gradients if g.path.endswith("kernel")]
    assert [g.path for g in kernels] == [f"Dense_{i}/kernel" for i in range(3)]
    for g in kernels:
        a, b, exact = (grads[g.path.split("/")[0]] for grads in (grads_a, grads_b, plain))
        assert g.error_a == pytest.approx(relative_error(a, exact), rel=1e-2)
        assert g.error_b == pytest.approx(relative_error(b, exact), rel=1e-2)
        assert g.cosine_a == pytest.approx(cosine(a, exact), abs=1e-4)


def test_delayed_scaling_is_current_scaling_here():
    """Without histories, on purpose: nothing warns of that."""
    found = jfp8.debug.compare(Net(), "delayed", "current", normal((8, 16)))
    assert all(p.a == p.b for p in found.products)
    assert [(p.layer, p.product) for p in found.products] == [  # logits stay
        ("Dense_0", "fprop"),
        ("Dense_1", "fprop"),
        ("Dense_1", "dgrad"),
        ("Dense_1", "wgrad"),
        ("Dense_0", "wgrad"),
    ]


@pytest.mark.slow
def test_stacked_layers_have_a_row_each():
    layers = lambda module, x, _: (x + nn.relu(nn.Dense(16)(x)), None)
    block = nn.remat(Model, prevent_cse=False)
    scanned = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=3)
    stack = Model(lambda module, x: scanned(layers, name="blocks")(x, None)[0])
    found = jfp8.debug.compare(stack, "current", "mxfp8", normal((8, 16)), **ALL)
    layers = [(p.layer, p.product) for p in found.products if p.product == "fprop"]
    assert layers == [(f"blocks/Dense_0[{i}]", "fprop") for i in range(3)]
    assert len({p.a.total for p in found.products}) == len(found.products) == 9


@pytest.mark.parametrize(
    "make",
    [
        lambda recipe: jfp8.Dense(8, recipe=recipe),
        lambda recipe: jfp8.nnx.Linear(8, 8, recipe=recipe, rngs=nnx.Rngs(0)),
    ],
    ids=["linen", "nnx"],
)
@pytest.mark.representative(1)
def test_layers_with_a_recipe_of_their_own_take_part(make):
    """They are compared under the two recipes: as the same layer without one is."""
    x = normal((4, 8))
    own = jfp8.debug.compare(make(jfp8.recipes.DelayedScaling(margin=3)), *TWO, x, **ALL)
    without = jfp8.debug.compare(make(None), *TWO, x, **ALL)
    assert [row.product for row in own.products] == ["fprop", "wgrad"]
    assert own == without
    assert [gradient.path for gradient in own.gradients] == ["bias", "kernel"]


@pytest.mark.parametrize("converted", [False, True])
def test_layers_of_nnx_are_named(converted):
    """Layers of jfp8 and converted ones are compared like Flax's, under the names of the model."""
    linear = nnx.Linear if converted else jfp8.nnx.Linear
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(linear(8, 8, rngs=rngs), nnx.relu, linear(8, 4, rngs=rngs))
    model = jfp8.convert(model, "delayed", exempt=()) if converted else model
    before = jfp8.report(model, normal((4, 8)))
    found = jfp8.debug.compare(model, *TWO, normal((4, 8)), **ALL)
    places = {(row.layer, row.product) for row in found.products}
    both = {(f"layers/{i}", product) for i in (0, 2) for product in ("fprop", "wgrad")}
    assert places == both | {("layers/2", "dgrad")}
    assert jfp8.report(model, normal((4, 8))) == before


def test_a_nan_under_either_recipe_is_worst():
    error = lambda total: ProductError(total, total, 0.0)
    pairs = [(0.1, 0.1), (0.1, math.nan), (0.3, 0.2), (math.nan, 0.1)]
    rows = [ComparedProduct(str(i), (), "fprop", *map(error, p)) for i, p in enumerate(pairs)]
    recipe = jfp8.recipes.Float8CurrentScaling()
    found = Comparison(recipe, recipe, tuple(rows), (), 0.0, 0.0, 0.0)
    assert [row.path for row in found.worst(3)] == ["1", "3", "2"]


def test_mistakes_are_explained():
    x = normal((4, 8))
    with pytest.raises(TypeError, match="Flax Linen or NNX module"):
        jfp8.debug.compare(lambda x: x, "current", "mxfp8", x)
    with pytest.raises(ValueError, match="mxfp8"):
        jfp8.debug.compare(Net(), "currant", "mxfp8", x)
    with pytest.raises(TypeError, match="'params' in it"):
        jfp8.debug.compare(Net(), "current", "mxfp8", x, variables={"Dense_0": {}})
    exempt = pytest.warns(UserWarning, match="No product of One is FP8.*final logits")
    with exempt, pytest.raises(ValueError, match="No layer with a product takes part"):
        jfp8.debug.compare(One(), "current", "mxfp8", x)


def test_a_product_of_zeros_has_no_relative_error():
    found = jfp8.debug.compare(One(), "current", "mxfp8", np.zeros((4, 8), np.float32), **ALL)
    assert found.products[0].a.total == 0
    assert all(math.isnan(g.cosine_a) for g in found.gradients)


def test_a_comparison_prints_its_numbers():
    recipes = jfp8.recipes.Float8CurrentScaling(), jfp8.recipes.MXFP8BlockScaling()
    product = ComparedProduct(
        "mlp/wi", (2,), "wgrad", ProductError(0.25, 0.125, 0.0625), ProductError(0.5, 0.375, 0.3)
    )
    gradient = ComparedGradient("mlp/wi/kernel", 0.75, 0.8, 0.5, 0.625)
    found = Comparison(*recipes, (product,), (gradient,), 1.5, 2.5, 3.5)
    parts = [
        *("a = Float8CurrentScaling()", "b = MXFP8BlockScaling()", "mlp/wi[2]", "wgrad"),
        *("25 %", "12.5 %", "6.25 %", "50 %", "37.5 %", "30 %"),
        *("mlp/wi/kernel", "75 %", "80 %", "0.50000", "0.62500"),
        "loss: 1.5 in high precision, a 2.5, b 3.5",
    ]
    for text in (str(found), repr(found), found._repr_html_()):
        places = [text.index(part) for part in parts]
        assert places == sorted(places)
    assert "\n---" in str(found)
