"""`debug.looks_ahead`: what it says of functions of which it is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8.debug import looks_ahead

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 4)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 6)))
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(9, 4)), jnp.float32)


def test_each_position_by_itself():
    found = looks_ahead(jnp.tanh, X)
    assert (found.later, found.others) == (0, 0)
    assert found.is_causal
    assert found.is_batch_invariant
    assert str(found) == "Later positions change nothing.\nOther sequences change nothing."


def test_sums_of_what_came_before_are_causal():
    assert looks_ahead(lambda x: jnp.cumsum(x[..., :2], axis=1), X).is_causal
    assert not looks_ahead(lambda x: jnp.cumsum(x[:, ::-1], axis=1)[:, ::-1], X).is_causal


@pytest.mark.parametrize("x", [X, TOKENS], ids=["features", "tokens"])
def test_it_tells_positions_from_sequences(x):
    values = lambda x: TABLE[x] if x.ndim == 2 else x
    over = lambda axes: lambda x: values(x) / jnp.max(jnp.abs(values(x)), axes, keepdims=True)
    positions, sequences = looks_ahead(over((1, 2)), x), looks_ahead(over((0, 2)), x)
    assert (positions.is_causal, positions.is_batch_invariant) == (False, True)
    assert (sequences.is_causal, sequences.is_batch_invariant) == (True, False)


def test_the_change_is_relative_to_the_largest_result():
    """The last position, times 100, moves the others by a 1000th of the largest of them."""
    x = jnp.array([[[1.0, 4.0]] * 2])
    found = looks_ahead(lambda x: x + x[:, -1:] * jnp.array([[[1.0], [0.0]]]) / 99_000, x)
    assert found.later == pytest.approx(99 / 99_000 / (1 + 1 / 99_000), rel=1e-3)
    assert found.others is None
    assert not found.is_batch_invariant
    assert str(found) == "Later positions change results by 0.1 %."


def test_what_is_not_finite_is_a_change():
    found = looks_ahead(lambda x: jnp.where(jnp.any(x == 0), jnp.inf, x), X)
    assert found.later == found.others == np.inf
    found = looks_ahead(lambda x: jnp.where(jnp.any(x == 0), 1.0, jnp.zeros_like(x)), X)
    assert found.later == np.inf, "zeros that became others"
    found = looks_ahead(lambda x: jnp.where(jnp.any(x == 0), -jnp.inf, x + jnp.inf), X)
    assert found.later == np.inf
    assert looks_ahead(lambda x: x.at[:, 0].set(jnp.nan), X).is_causal, "the same NaN again"


def test_results_without_the_axes_do_not_count():
    assert looks_ahead(lambda x: {"loss": jnp.sum(x), "logits": x}, X).is_causal
    with pytest.raises(ValueError, match=r"No result of f has the axes of x, \(3, 6\)"):
        looks_ahead(jnp.sum, X)


def test_another_axis_of_positions():
    f = lambda x: jnp.cumsum(x, axis=2)
    assert looks_ahead(f, X, sequence_axis=2).is_causal
    with pytest.raises(ValueError, match="at least two positions"):
        looks_ahead(f, X[:, :1])
    with pytest.raises(ValueError, match="sequence_axis=0"):
        looks_ahead(f, X, sequence_axis=0)


def test_functions_that_are_random_are_refused():
    calls = iter(range(100))

    def f(x):
        return x + jax.pure_callback(
            lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), x.dtype)
        )

    with pytest.raises(ValueError, match="another result for the same x"):
        looks_ahead(f, X)
