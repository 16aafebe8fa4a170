"""Einsums of two operands as one ``dot_general``: against ``numpy.einsum``, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.products.einsum import as_dot_general, parse


def integers(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def einsum(equation, lhs, rhs):
    """By a single ``dot_general``."""
    calls = []

    def dot_general(lhs, rhs, numbers):
        calls.append(numbers)
        return jax.lax.dot_general(lhs, rhs, numbers)

    terms = parse(equation, lhs.ndim, rhs.ndim)
    y = as_dot_general(terms, jnp.asarray(lhs), jnp.asarray(rhs), dot_general)
    assert len(calls) == 1
    return y


EQUATIONS = [
    ("abc,cd->abd", (2, 3, 4), (4, 5)),
    (" aBc , Bcd -> da ", (2, 3, 4), (3, 4, 5)),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)),
    ("a,b->ba", (2,), (3,)),
    ("ab,ab->", (2, 3), (2, 3)),
    ("ab,ba->ab", (2, 3), (3, 2)),  # nothing is summed
    ("abx,bcy->ac", (2, 3, 4), (3, 5, 6)),  # x and y are summed before
    ("...d,...kd->...k", (2, 3, 4), (5, 4)),
    ("...d,...kd->...k", (3, 4), (2, 3, 5, 4)),
    ("...ab,...bc->...ca", (1, 3, 4, 5), (2, 1, 5, 6)),
    ("ab,bc->ac", (2, 1), (3, 4)),
    ("ab,bc->ac", (2, 3), (1, 4)),
    ("ab,bc->ac", (2, 0), (0, 4)),
]


@pytest.mark.parametrize(("equation", "lhs", "rhs"), EQUATIONS)
def test_it_is_the_einsum(equation, lhs, rhs):
    lhs, rhs = integers(lhs), integers(rhs, 1)
    expected = np.einsum(equation, lhs, rhs)
    y = einsum(equation, lhs, rhs)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("equation", "ndims", "words"),
    [
        ("ab,bc", (2, 2), "two operands and '->'"),
        ("ab,bc,cd->ad", (2, 2), "two operands and '->'"),
        ("ab,bc->ac", (3, 2), "'ab' does not name 3 dimensions"),
        ("...ab,bc->...ac", (1, 2), "'...ab' does not name 1 dimensions"),
        ("aab,bc->ac", (3, 2), "repeats a letter within a term"),
        ("ab,bc->aac", (2, 2), "repeats a letter within a term"),
        ("ab,bc->az", (2, 2), r"\['z'\] of the result are in no operand"),
    ],
)
def test_what_is_no_product(equation, ndims, words):
    with pytest.raises(ValueError, match=words):
        parse(equation, *ndims)
    with pytest.raises((TypeError, ValueError), match="3.*4|4.*3"):
        einsum("ab,bc->ac", integers((2, 3)), integers((4, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("equation", ["ab,bc->ac", "ab,bc->a"])
def test_frozen_operands(equation):
    """A `ScaledArray` goes into the product as it is, unless dimensions of it are summed before."""
    x, q = jnp.asarray(integers((2, 3))), jfp8.quantize(jnp.asarray(integers((3, 4), 1)))
    seen = []

    def dot_general(lhs, rhs, numbers):
        seen.append(isinstance(rhs, jfp8.ScaledArray))
        rhs = rhs.dequantize() if seen[-1] else rhs
        return jax.lax.dot_general(lhs, rhs, numbers)

    y = as_dot_general(parse(equation, 2, 2), x, q, dot_general)
    np.testing.assert_allclose(y, np.einsum(equation, x, q.dequantize()), rtol=1e-5)
    assert seen == [equation == "ab,bc->ac"]


def test_a_dimension_of_one_of_stored_bytes_is_stretched():
    stored = jfp8.quantize(jnp.asarray(integers((1, 5, 6))), granularity=jfp8.PerAxis(2))
    lhs, values = integers((3, 4, 5), 1), np.asarray(stored.dequantize())
    terms = parse("gab,gbc->gac", 3, 3)
    y = as_dot_general(terms, jnp.asarray(lhs), stored, jax.lax.dot_general)
    np.testing.assert_allclose(y, np.einsum("gab,bc->gac", lhs, values[0]), rtol=1e-6, atol=1e-5)
