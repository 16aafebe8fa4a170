"""The rotation held to its matrix, built from Kronecker products in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8 import E4M3FN, scaled_dot_general
from jfp8.quantizers.quantizer import Current
from jfp8.quantizers.rotations import Hadamard, RandomHadamard, Rotation
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.product import Product
from support.arrays import normal

UNIT = 2.0**-24  # unit roundoff of f32
DEFAULT = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SIGNS = {1: (-1,), 2: (1, -1), 4: (1, 1, -1, 1), 16: DEFAULT, 32: DEFAULT + DEFAULT[::-1]}


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


def assert_close(actual, expected, x, n):
    """An f32 sum of n products with rounded factors: within (n + 2) u of the sum of magnitudes,
    which is at most sqrt(n) max|x|."""
    assert actual.dtype == jnp.float32
    assert actual.shape == expected.shape
    bound = (n + 2) * UNIT * np.sqrt(n) * np.max(np.abs(np.asarray(x, np.float64)), initial=0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.mark.representative(2)
@pytest.mark.parametrize("n", [16, 1, 2, 4, 32])
@pytest.mark.parametrize("axis", [2, 0, -2])
def test_any_axis_of_any_size(n, axis):
    """Also where the last stretch is cut short: the padding is rotated along, and stays."""
    x = normal((3, 40, 33))
    y = jax.jit(Hadamard(SIGNS[n]), static_argnums=1)(x, axis)
    expected = rotated(x, SIGNS[n], axis)
    assert expected.shape[axis] == -(-x.shape[axis] // n) * n
    assert_close(y, expected, x, n)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: np.dtype(d).name)
def test_narrow_arrays_are_rotated_in_f32(dtype):
    x = normal((4, 48)).astype(dtype)
    assert Hadamard().signs == DEFAULT  # Transformer Engine's signs
    assert_close(Hadamard()(x, 1), rotated(x, DEFAULT, 1), x, 16)


def test_trap_rotated_values_exceed_the_amax_of_the_tensor():
    """Up to sqrt(16) times: along the signs everything adds up in one element of the stretch."""
    x, w = np.tile(np.float32(DEFAULT), (4, 2)), normal((32, 5))
    assert np.max(np.abs(Hadamard()(x, 1))) == 4
    plain = Product(Current(E4M3FN), Current(E4M3FN))
    recipe = PerOperand(dataclasses.replace(plain, rotation=Hadamard()), plain, plain)
    dot = partial(scaled_dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=recipe)
    y = jax.jit(dot)(x, w)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert np.linalg.norm(y - exact) < 0.05 * np.linalg.norm(exact)


def test_random_signs():
    """The matrix is that of some signs, which are fair coins; another seed draws others."""
    rotate = jax.jit(jax.vmap(partial(RandomHadamard(64), jnp.eye(64), 1)))
    seeds = jax.random.bits(jax.random.key(0), (64, 2), jnp.uint32)
    drawn = np.asarray(rotate(seeds), np.float64)
    signs = np.sign(drawn[:, :, 0])
    for r, s in zip(drawn, signs, strict=True):
        np.testing.assert_allclose(r, matrix(tuple(s)), rtol=0, atol=4 * 64 * UNIT)
    # 4096 coins, and the 2016 pairs of draws: within 5 standard deviations.
    assert abs(signs.mean()) < 5 / 64
    pairs = signs @ signs.T / 64
    np.fill_diagonal(pairs, 0)
    assert abs(pairs).max() < 5 / 8


def test_fields_are_checked():
    for signs in ((), (1,) * 12, (1, 0), (1.5, 1), ("1", "1")):
        with pytest.raises(ValueError, match=r"1, 2, 4, 8, \.\.\. signs, each 1 or -1; got \("):
            Hadamard(signs)
    for n in (0, 3, 2.0, True):
        with pytest.raises(ValueError, match=r"RandomHadamard\(n=.*\): must be 1, 2, 4, 8"):
            RandomHadamard(n)
    with pytest.raises(NotImplementedError, match="Rotation does not override"):
        Rotation()(jnp.ones((2, 16)), 1)
