"""Layers with f32 parameters that compute in bf16: gradients of kernels are sums in f32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
from support.arrays import keyed_normal as normal

# Parameters alone are enough for a formula.
pytestmark = pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")
BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def linen(make, *inputs):
    """A function of parameters and a cotangent, with parameters in f32."""
    params = make.init(jax.random.key(1), *inputs)["params"]
    return lambda params: make.apply({"params": params}, *inputs), params


def of_nnx(model, x):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params: nnx.merge(graph, params, rest, copy=True)(x), params


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x, sizes):
        from jfp8.layers.linen.moe import ExpertDense

        return ExpertDense(2, 16, dtype=BF16, recipe="current")(x, sizes)


X = normal(0, (32, 48)).astype(BF16)
IMAGE = normal(0, (2, 6, 6, 8)).astype(BF16)
DENSE = {"features": 64, "dtype": BF16}
CASES = {
    "current": lambda: linen(jfp8.Dense(**DENSE, recipe="current"), X),
    "mxfp8": lambda: linen(jfp8.Dense(**DENSE, recipe="mxfp8"), X),
    "Einsum": lambda: linen(jfp8.Einsum((48, 64), "ab,bc->ac", dtype=BF16), X),
    "Conv": lambda: linen(jfp8.Conv(16, (3, 3), dtype=BF16), IMAGE),
    "ConvTranspose": lambda: linen(jfp8.ConvTranspose(16, (3, 3), dtype=BF16), IMAGE),
    "ExpertDense": lambda: linen(Expert(), X, jnp.array([20, 12])),
    "attention": lambda: linen(
        jfp8.MultiHeadDotProductAttention(4, dtype=BF16), normal(0, (2, 8, 32)).astype(BF16)
    ),
    "converted": lambda: linen(jfp8.convert(nn.Dense(**DENSE), exempt=()), X),
    "nnx.Linear": lambda: of_nnx(jfp8.nnx.Linear(48, 64, dtype=BF16, rngs=nnx.Rngs(0)), X),
    "nnx.Einsum": lambda: of_nnx(
        jfp8.nnx.Einsum("ab,bc->ac", (48, 64), dtype=BF16, rngs=nnx.Rngs(0)), X
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_not_rounded(case):
    apply, params = CASES[case]()

    @jax.jit
    def run(params):
        y, back = jax.vjp(apply, params)
        dy = normal(2, y.shape).astype(y.dtype)
        return y, back(dy)[0]

    y, grads = run(params)
    expected, rounded = run(jax.tree.map(lambda p: p.astype(BF16), params))
    assert y.dtype == expected.dtype == BF16
    np.testing.assert_array_equal(y.astype(F32), expected.astype(F32))
    pairs = zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(rounded), strict=True)
    for (path, new), old in pairs:
        assert new.dtype == F32
        assert old.dtype == BF16
        np.testing.assert_array_equal(new.astype(BF16).astype(F32), old.astype(F32))
        if "kernel" in jax.tree_util.keystr(path):
            assert np.mean(new != old.astype(F32)) > 0.5


@pytest.mark.parametrize("case", ["current", "nnx.Linear"])
def test_error_against_exact_sums(case):
    """A hundred times smaller than of gradients that were rounded to bf16."""
    apply, params = CASES[case]()

    @jax.jit
    def gradient(params):
        y, back = jax.vjp(apply, params)
        dy = normal(2, y.shape).astype(BF16)
        return back(dy)[0], dy

    grads, dy = gradient(params)
    (found,) = (g for g in jax.tree.leaves(grads) if g.ndim == 2)

    def quantized(x, dtype):
        x = np.asarray(x, np.float32)
        scale = np.float32(np.abs(x).max()) / np.float32(jnp.finfo(dtype).max)
        return np.asarray((x / scale).astype(dtype), np.float64) * scale

    exact = quantized(X, E4M3).T @ quantized(dy, E5M2)
    error = lambda g: np.linalg.norm(np.asarray(g, np.float64) - exact) / np.linalg.norm(exact)
    assert error(found) < error(found.astype(BF16)) / 100


def test_where_fp8_is_disabled():
    """A layer is then Flax's own, with its kernel cast as ever."""
    x, stock = X, nn.Dense(**DENSE)
    params = stock.init(jax.random.key(1), x)["params"]
    with jfp8.autocast(enabled=False):
        y = jfp8.Dense(**DENSE).apply({"params": params}, x)
        z = jfp8.nnx.Linear(48, 64, dtype=BF16, rngs=nnx.Rngs(0))
        nnx.update(z, nnx.State({k: nnx.Param(v) for k, v in params.items()}))
        z = z(x)
    expected = stock.apply({"params": params}, x)
    np.testing.assert_array_equal(y.astype(F32), expected.astype(F32))
    np.testing.assert_array_equal(z.astype(F32), expected.astype(F32))
