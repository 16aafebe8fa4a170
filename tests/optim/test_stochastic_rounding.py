"""`jfp8.optim.stochastic_rounding`: 16-bit parameters that are right on average."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jfp8
from jfp8.optim.storage import round_to_16_bits

DROPPED = {jnp.bfloat16: 16, jnp.float16: 13}  # mantissa bits that f32 has more
both = pytest.mark.parametrize("dtype", DROPPED, ids=["bf16", "f16"])


def every_outcome(value, dtype):
    """`value` rounded with each of the words that matter, in float64."""
    bits = jnp.arange(1 << DROPPED[dtype], dtype=jnp.uint32)
    x = jnp.full(bits.shape, value, jnp.float32)
    return np.asarray(round_to_16_bits(x, dtype, bits), np.float64)


@both
@pytest.mark.parametrize("value", [1.2345678, -0.33333, 3.1e-3, -(2.0**-14) * 1.1, 60000.7, 1.0])
def test_the_mean_over_all_words_is_exact_for_normals(dtype, value):
    outcomes = every_outcome(value, dtype)
    assert np.all(outcomes == outcomes.astype(dtype).astype(np.float64))  # on the grid
    assert outcomes.mean() == np.float64(np.float32(value))
    neighbors = np.unique(outcomes)
    assert len(neighbors) == (1 if value == 1.0 else 2)
    # Next to each other: nothing of the format lies between.
    codes = neighbors.astype(dtype).view(np.uint16).astype(int)
    assert abs(codes.max() - codes.min()) <= 1


@pytest.mark.parametrize("value", [6.0e-5, -3.3e-6, 5.9604645e-08 * 0.3])
def test_subnormals_of_f16_are_rounded_on_their_own_grid(value):
    outcomes = every_outcome(value, jnp.float16)
    assert set(np.unique(outcomes / 2.0**-24) % 1) == {0.0}
    # The words resolve a step into 2^13 parts, so that the mean is off by less than one of them.
    assert abs(outcomes.mean() - np.float32(value)) < 2.0**-24 * 2.0**-13


@pytest.mark.slow
@both
def test_what_is_not_finite_stays_and_the_largest_saturates(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    x = jnp.asarray([np.inf, -np.inf, np.nan, largest, -largest, largest * 1.0005, 0.0, -0.0])
    for word in (0, 0xFFFFFFFF):
        y = round_to_16_bits(x, dtype, jnp.full(x.shape, word, jnp.uint32))
        expected = [np.inf, -np.inf, np.nan, largest, -largest, largest, 0.0, -0.0]
        np.testing.assert_array_equal(y, np.float32(expected))
        np.testing.assert_array_equal(np.signbit(y[-2:]), [False, True])


def steps(tx, params, gradient, count):
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, gradient, jnp.float32), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(count):
        params, state = step(params, state)
    return params, state


@both
def test_updates_too_small_for_the_grid_arrive_on_average(dtype):
    """One hundred steps of a sixteenth of an ulp: rounded to nearest, nothing ever moves."""
    ulp = float(ml_dtypes.finfo(dtype).eps)
    params = {"w": jnp.full((40_000,), 1.25, dtype)}
    still, _ = steps(optax.sgd(ulp / 16), params, -1.0, 100)
    assert np.all(np.asarray(still["w"], np.float64) == 1.25)
    moved, _ = steps(jfp8.optim.stochastic_rounding(optax.sgd(ulp / 16)), params, -1.0, 100)
    gained = (np.asarray(moved["w"], np.float64) - 1.25) / ulp
    # A binomial of 100 draws with p = 1/16 each: mean 6.25, variance 5.86.
    assert abs(gained.mean() - 6.25) < 5 * np.sqrt(5.86 / 40_000)
    assert abs(gained.var() / 5.86 - 1) < 0.05


def test_other_parameters_are_left_alone():
    params = {"half": jnp.ones(3, jnp.bfloat16), "full": jnp.ones(3)}
    plain, _ = steps(optax.adam(1e-2), {"full": params["full"]}, 0.5, 3)
    mixed, state = steps(jfp8.optim.stochastic_rounding(optax.adam(1e-2)), params, 0.5, 3)
    np.testing.assert_array_equal(plain["full"], mixed["full"])
    assert mixed["half"].dtype == jnp.bfloat16
    moments = [leaf for leaf in jax.tree.leaves(state.inner_state) if leaf.ndim]
    assert {leaf.dtype for leaf in moments} == {np.dtype(np.float32)}
    assert int(state.count) == 3


@pytest.mark.slow
def test_bits_differ_by_step_leaf_and_seed_and_repeat_with_the_seed():
    params = {name: jnp.full((64,), 1.0, jnp.bfloat16) for name in "ab"}

    def run(seed, count):
        tx = jfp8.optim.stochastic_rounding(optax.sgd(2.0**-9), seed=seed)
        return jax.tree.map(np.asarray, steps(tx, params, -1.0, count)[0])

    first = run(0, 1)
    np.testing.assert_array_equal(first["a"], run(0, 1)["a"])
    assert np.any(first["a"] != first["b"])
    assert np.any(first["a"] != run(1, 1)["a"])
    assert np.any(first["a"] != run(1 << 32, 1)["a"])
    second = run(0, 2)
    assert np.any((second["a"] - first["a"]) != (first["a"] - 1))


def test_errors():
    with pytest.raises(TypeError, match="stochastic_rounding wraps an optax transformation"):
        jfp8.optim.stochastic_rounding(1e-3)
    with pytest.raises(TypeError, match=r"stochastic_rounding\(seed=None\)"):
        jfp8.optim.stochastic_rounding(optax.sgd(1.0), seed=None)
    tx = jfp8.optim.stochastic_rounding(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"tx.update\(grads, state, params\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
