"""The recipes in 4 bits: what they are made of, and gradients that are right on average."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jfp8 import E2M1FN, recipes, scaled_dot_general
from jfp8.quantizers import Blockwise, TwoLevel
from jfp8.quantizers.rotations import Hadamard, RandomHadamard
from jfp8.recipes.product import Product, Products

NVFP4 = TwoLevel(E2M1FN, (16, 1))
FOUR_OVER_SIX = TwoLevel(E2M1FN, (16, 1), targets=(6.0, 4.0), reach=1536.0)


@pytest.mark.parametrize(
    "options", [(True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize(
    ("cls", "fprop_lhs", "others"),
    [
        (recipes.NVFP4BlockScaling, NVFP4, NVFP4),
        (recipes.NVFP4FourOverSix, FOUR_OVER_SIX, FOUR_OVER_SIX),
        (recipes.NVFP4RowScaling, TwoLevel(E2M1FN, (16, 1), outer="row"), NVFP4),
    ],
)
def test_variants_of_nvfp4(cls, fprop_lhs, others, options):
    """4/6 for every operand; a scale for each row of the activations, forward only."""
    stochastic, hadamard, square = options
    weights = dataclasses.replace(others, block_size=(16, 16 if square else 1))
    grad = dataclasses.replace(others, rounding="stochastic" if stochastic else "nearest_even")
    assert cls(*options).products() == Products(
        fprop=Product(fprop_lhs, weights, fast_accumulation=True),
        dgrad=Product(grad, weights),
        wgrad=Product(others, grad, rotation=Hadamard() if hadamard else None),
    )


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("hadamard", [True, False])
def test_mxfp4(stochastic, hadamard):
    """Both operands of both gradients are rotated and drawn; forward nothing is."""
    x = Blockwise(E2M1FN, (32, 1), "ceil")
    drawn = dataclasses.replace(x, rounding="stochastic" if stochastic else "nearest_even")
    backward = Product(drawn, drawn, rotation=RandomHadamard(64) if hadamard else None)
    products = recipes.MXFP4BlockScaling("ceil", stochastic, hadamard).products()
    assert products == Products(Product(x, x, fast_accumulation=True), backward, backward)
    assert products.stochastic == (stochastic or hadamard)
    assert products.fprop.powers_of_two


M, K, N, KEYS = 96, 80, 160, 64


@partial(jax.jit, static_argnames="recipe")
def products_of_keys(x, w, g, *, recipe):
    """y, dx and dw for each of `KEYS` keys."""

    def one(key):
        dot = partial(scaled_dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
        y, vjp = jax.vjp(partial(dot, recipe=recipe, key=key), x, w)
        return (y, *vjp(g))

    return jax.lax.map(one, jax.random.split(jax.random.key(0), KEYS), batch_size=16)


def test_the_mean_gradient_is_exact():
    """The mean of 64 keys is 8 times as close as one; both rotations are padded."""
    rng, recipe = np.random.default_rng(0), recipes.MXFP4BlockScaling()
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((M, K), (K, N), (M, N)))
    drawn = [np.asarray(y, np.float64) for y in products_of_keys(x, w, g, recipe=recipe)]
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    relative = lambda y, exact: np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert (drawn[0] == drawn[0][0]).all()  # forward nothing is drawn
    for samples, exact in zip(drawn[1:], (g @ w.T, x.T @ g), strict=True):
        single = np.mean([relative(y, exact) for y in samples[:8]])
        assert single == pytest.approx(0.235, rel=0.15)
        # The noise of 7680 elements and more has a norm that is known to 1 %.
        assert relative(samples.mean(0), exact) == pytest.approx(single / 8, rel=0.15)


@pytest.mark.slow
def test_without_a_key_rotations_follow_from_the_data():
    """The same for the same operands, and another for others: an amax is enough."""
    x, w, g = (np.random.default_rng(i).normal(size=(128, 128)) for i in range(3))
    x, w, g = (a.astype(np.float32) for a in (x, w, g))
    dot = partial(scaled_dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    recipe = recipes.MXFP4BlockScaling(stochastic_rounding=False)

    @jax.jit
    def gradients(x, w, g):
        return jax.vjp(partial(dot, recipe=recipe), x, w)[1](g)

    once, again, doubled = gradients(x, w, g), gradients(x, w, g), gradients(2 * x, 2 * w, g)
    for a, b, c in zip(once, again, doubled, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.mean(np.isclose(c, 2 * a, rtol=1e-3)) < 0.5
