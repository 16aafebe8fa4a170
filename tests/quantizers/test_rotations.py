"""The rotation held to its matrix, built from Kronecker products in float64."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8 import E4M3FN, scaled_dot_general
from jfp8.products.seeds import rotation_seed
from jfp8.quantizers.quantizer import Current
from jfp8.quantizers.rotations import Hadamard, RandomHadamard, Rotation
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.product import Product

KEY = jax.random.key(0)
UNIT = 2.0**-24  # unit roundoff of f32
DEFAULT = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SIGNS = {1: (-1,), 2: (1, -1), 4: (1, 1, -1, 1), 16: DEFAULT, 32: DEFAULT + DEFAULT[::-1]}
lengths = pytest.mark.parametrize("n", SIGNS)


def matrix(signs) -> np.ndarray:
    """``diag(s) H / sqrt(n)`` with ``H_2n = [[1, 1], [1, -1]] (x) H_n``, in float64."""
    h = np.ones((1, 1))
    while len(h) < len(signs):
        h = np.kron([[1.0, 1.0], [1.0, -1.0]], h)
    return np.diag(np.array(signs, np.float64)) @ h / np.sqrt(len(signs))


def rotated(x, signs, axis) -> np.ndarray:
    """Stretches of n along `axis`, zeros behind the last, times the matrix; in float64."""
    n = len(signs)
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % n)])
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // n, n) @ matrix(signs)
    return np.moveaxis(parts.reshape(x.shape), -1, axis)


def sample(*shape) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def assert_close(actual, expected, x, n):
    """An f32 sum of n products with rounded factors: within (n + 2) u of the sum of magnitudes,
    which is at most sqrt(n) max|x|."""
    assert actual.dtype == jnp.float32
    assert actual.shape == expected.shape
    bound = (n + 2) * UNIT * np.sqrt(n) * np.max(np.abs(np.asarray(x, np.float64)), initial=0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


def test_the_signs_are_those_of_transformer_engine():
    assert Hadamard().signs == DEFAULT


@pytest.mark.slow
@lengths
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_any_axis_of_any_size(n, axis):
    """Also where the last stretch is cut short: the padding is rotated along, and stays."""
    x = sample(3, 40, 33)
    y = jax.jit(Hadamard(SIGNS[n]), static_argnums=1)(x, axis)
    expected = rotated(x, SIGNS[n], axis)
    assert expected.shape[axis] == -(-x.shape[axis] // n) * n
    assert_close(y, expected, x, n)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: np.dtype(d).name)
def test_narrow_arrays_are_rotated_in_f32(dtype):
    x = sample(4, 48).astype(dtype)
    assert_close(Hadamard()(x, 1), rotated(x, DEFAULT, 1), x, 16)


def test_an_outlier_is_spread_over_its_stretch():
    x = np.zeros((1, 48), np.float32)
    x[0, 20] = 8
    y = np.asarray(Hadamard()(x, 1))
    np.testing.assert_array_equal(np.abs(y[0, 16:32]), np.full(16, 2.0))
    assert not y[0, :16].any()
    assert not y[0, 32:].any()


@pytest.mark.slow
def test_transformations_agree():
    x = sample(3, 4, 40)
    rotate = lambda x: Hadamard()(x, 1)
    eager = np.stack([rotate(each) for each in x])
    np.testing.assert_allclose(jax.jit(jax.vmap(rotate))(x), eager, rtol=0, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(rotate)(x), eager, rtol=0, atol=1e-6)


# In a recipe.


def rotating(quantizer, **options):
    """A recipe that rotates fprop only, and its product of x and w."""
    plain = Product(quantizer, quantizer)
    recipe = PerOperand(
        fprop=dataclasses.replace(plain, rotation=Hadamard()), dgrad=plain, wgrad=plain
    )
    return lambda x, w: scaled_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, **options)


def test_trap_rotated_values_exceed_the_amax_of_the_tensor():
    """Up to sqrt(16) times: along the signs everything adds up in one element of the stretch."""
    x, w = np.tile(np.float32(DEFAULT), (4, 2)), sample(32, 5)
    assert np.max(np.abs(Hadamard()(x, 1))) == 4
    y = jax.jit(rotating(Current(E4M3FN)))(x, w)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert np.linalg.norm(y - exact) < 0.05 * np.linalg.norm(exact)


# Signs that are drawn.


def seeds(n):
    return jax.random.bits(KEY, (n, 2), jnp.uint32)


def test_random_signs():
    """The matrix is that of some signs, which are fair coins; another seed draws others."""
    rotate = jax.jit(jax.vmap(partial(RandomHadamard(64), jnp.eye(64), 1)))
    drawn = np.asarray(rotate(seeds(64)), np.float64)
    signs = np.sign(drawn[:, :, 0])
    for r, s in zip(drawn, signs, strict=True):
        np.testing.assert_allclose(r, matrix(tuple(s)), rtol=0, atol=4 * 64 * UNIT)
    # 4096 coins, and the 2016 pairs of draws: within 5 standard deviations.
    assert abs(signs.mean()) < 5 / 64
    pairs = signs @ signs.T / 64
    np.fill_diagonal(pairs, 0)
    assert abs(pairs).max() < 5 / 8


# Values and errors.


@pytest.mark.parametrize(
    "signs", [(), (1, 1, 1), (1,) * 12, (1, 0), (1, 2), (1.5, 1), ("1", "1")], ids=str
)
def test_signs_are_checked(signs):
    with pytest.raises(ValueError, match=r"1, 2, 4, 8, \.\.\. signs, each 1 or -1; got \("):
        Hadamard(signs)


@pytest.mark.parametrize("n", [0, 3, -4, 2.0, True], ids=str)
def test_sizes_are_checked(n):
    with pytest.raises(
        ValueError, match=r"RandomHadamard\(n=.*\): must be 1, 2, 4, 8, \.\.\. values"
    ):
        RandomHadamard(n)


def test_the_base_class_does_not_rotate():
    with pytest.raises(NotImplementedError, match="Rotation does not override"):
        Rotation()(jnp.ones((2, 16)), 1)


def test_only_random_signs_have_a_seed():
    for rotation, expected in ((None, False), (Hadamard(), False), (RandomHadamard(16), True)):
        product = Product(Current(E4M3FN), None, rotation=rotation)
        found = rotation_seed(product, "wgrad", jnp.float32(1), None)
        assert (found is not None) == expected
