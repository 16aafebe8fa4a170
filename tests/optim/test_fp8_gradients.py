"""Gradients rounded to FP8, and their mean over devices. The oracles are ml_dtypes and float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jfp8
from jfp8.optim.fp8_gradients import fp8_gradients
from support.amaxes import on_a_grid_of_power_of_two as rounded
from support.arrays import normal

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def apply(tx, grads):
    return jax.jit(lambda g: tx.update(g, tx.init(g))[0])(grads)


@pytest.mark.parametrize(("fmt", "dtype"), [(jfp8.E4M3FN, E4M3), (jfp8.E5M2, E5M2)])
def test_one_scale_for_each_array(fmt, dtype):
    grads = {"a": normal((32, 48)) * np.float32(1e-6), "b": normal((4, 8, 6), 1) * 1000}
    ours = apply(fp8_gradients(fmt), grads)
    for name, g in grads.items():
        np.testing.assert_array_equal(ours[name], rounded(g, dtype))
        assert 1 < len(np.unique(np.abs(ours[name]))) < 128


@pytest.mark.slow
def test_a_scale_for_each_block():
    """Where magnitudes vary by orders along a row, one scale flushes what a block's keeps."""
    g = normal((8, 256)) * np.float32(10.0) ** -np.repeat([0, 7], 128)[None]
    ours = apply(fp8_gradients(granularity=jfp8.Block((128,))), {"g": g})["g"]
    for row in range(8):
        for start in (0, 128):
            block = g[row, start : start + 128]
            np.testing.assert_array_equal(ours[row, start : start + 128], rounded(block))
    assert not np.any(apply(fp8_gradients(), {"g": g})["g"][:, 128:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_trap_the_largest_gradients_do_not_become_infinite(dtype):
    """448 times a power of two may lie beyond the dtype, after the check for finite gradients."""
    largest = jnp.finfo(dtype).max
    ours = apply(fp8_gradients(), {"g": jnp.array([[largest, -largest, largest / 2]], dtype)})["g"]
    np.testing.assert_array_equal(ours[0, :2], jnp.array([largest, -largest]))
    assert 0.9 < ours[0, 2] / (largest / 2) < 1.1


def test_what_is_no_matrix_stays():
    grads = {
        "bias": jnp.asarray(normal(64)),
        "count": jnp.arange(6).reshape(2, 3),
        "frozen": optax.MaskedNode(),
        "none": None,
        "f8": jnp.ones((4, 4), jnp.float8_e4m3fn),
    }
    ours = apply(fp8_gradients(), grads)
    assert jax.tree.structure(ours) == jax.tree.structure(grads)
    jax.tree.map(np.testing.assert_array_equal, ours, grads)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_hold_what_comes_out(dtype):
    """The scale is a power of two: no second rounding."""
    g = jnp.asarray(normal((64, 64)), dtype)
    ours = apply(fp8_gradients(), {"g": g})["g"]
    assert ours.dtype == dtype
    np.testing.assert_array_equal(np.asarray(ours, np.float32), rounded(np.asarray(g, np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("granularity", [jfp8.PerTensor(), jfp8.Block((128,))])
def test_a_saturating_cast_does_not_hide_what_is_not_finite(bad, granularity):
    g = normal((64, 256))
    g[7, 70] = bad
    ours = np.asarray(apply(fp8_gradients(granularity=granularity), {"g": g})["g"])
    assert np.isnan(ours[7, 70])


def test_a_loss_scale_does_not_show():
    """Before or after it, the rounded gradients are the same."""
    g = {"w": jnp.asarray(normal((32, 32)) * 1e-5)}
    scaled = jax.tree.map(lambda g: g * 2.0**15, g)
    expected = rounded(np.asarray(g["w"]))
    scale, round_ = jfp8.loss_scale(), fp8_gradients()
    for tx in (optax.chain(scale, round_), optax.chain(round_, scale)):
        assert jfp8.scale_loss(1.0, tx.init(g)) == 2.0**15
        np.testing.assert_array_equal(apply(tx, scaled)["w"], expected)


def test_errors():
    with pytest.raises(TypeError, match="fmt must be a jfp8.Format"):
        fp8_gradients(8)
    with pytest.raises(ValueError, match="blocks of jfp8.collectives.pmean. Drop one of the two"):
        fp8_gradients(granularity=jfp8.Block((128,)), axis_name="data")
    with pytest.raises(TypeError, match="granularity must be PerTensor"):
        apply(fp8_gradients(granularity=128), {"g": jnp.ones((2, 2))})
    with pytest.raises(NameError, match="data"):
        apply(fp8_gradients(axis_name="data"), {"g": jnp.ones((2, 2))})


def test_a_matrix_in_fp8_is_not_rounded_to_another_format():
    """E4M3, which `fp8_gradients` rounds to, would keep one end of E5M2's range."""
    grads = {"f8": jnp.array([[57344.0, 2.0**-14]], E5M2)}
    ours, _ = fp8_gradients().update(grads, optax.EmptyState())
    assert ours["f8"].dtype == E5M2
    np.testing.assert_array_equal(ours["f8"], grads["f8"])
