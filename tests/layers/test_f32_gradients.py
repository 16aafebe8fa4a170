"""Layers with f32 parameters that compute in bf16: gradients of kernels are sums in f32.

With ``wgrad_dtype="bfloat16"`` they are these sums, rounded once.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    recipe: Any

    @nn.compact
    def __call__(self, x, sizes):
        from jfp8.layers.linen.moe import ExpertDense

        return ExpertDense(2, 16, dtype=BF16, recipe=self.recipe)(x, sizes)


X = normal(0, (32, 48)).astype(BF16)
IMAGE = normal(0, (2, 6, 6, 8)).astype(BF16)
SEQUENCES = normal(0, (2, 8, 32)).astype(BF16)
DENSE = {"features": 64, "dtype": BF16}
# The recipe's name, and a layer under it, here called `r`.
CASES = {
    "current": ("current", lambda r: linen(jfp8.Dense(**DENSE, recipe=r), X)),
    "mxfp8": ("mxfp8", lambda r: linen(jfp8.Dense(**DENSE, recipe=r), X)),
    "Einsum": (
        "delayed",
        lambda r: linen(jfp8.Einsum((48, 64), "ab,bc->ac", dtype=BF16, recipe=r), X),
    ),
    "Conv": ("delayed", lambda r: linen(jfp8.Conv(16, (3, 3), dtype=BF16, recipe=r), IMAGE)),
    "ConvTranspose": (
        "delayed",
        lambda r: linen(jfp8.ConvTranspose(16, (3, 3), dtype=BF16, recipe=r), IMAGE),
    ),
    "ExpertDense": ("current", lambda r: linen(Expert(r), X, jnp.array([20, 12]))),
    "attention": (
        "delayed",
        lambda r: linen(jfp8.MultiHeadDotProductAttention(4, dtype=BF16, recipe=r), SEQUENCES),
    ),
    "fused MLP": (
        "current",
        lambda r: linen(jfp8.linen.LayerNormMLP(intermediate_dim=64, dtype=BF16, recipe=r), X),
    ),
    "converted": ("delayed", lambda r: linen(jfp8.convert(nn.Dense(**DENSE), r, exempt=()), X)),
    "nnx.Linear": (
        "delayed",
        lambda r: of_nnx(jfp8.nnx.Linear(48, 64, dtype=BF16, rngs=nnx.Rngs(0), recipe=r), X),
    ),
    "nnx.Einsum": (
        "delayed",
        lambda r: of_nnx(
            jfp8.nnx.Einsum("ab,bc->ac", (48, 64), dtype=BF16, rngs=nnx.Rngs(0), recipe=r), X
        ),
    ),
}


def layer(case, wgrad_dtype=None):
    name, make = CASES[case]
    return make(jfp8.recipes.get(name, wgrad_dtype=wgrad_dtype))


def with_gradients(apply):
    """A compiled function of parameters: the result, and the gradients of a random cotangent."""

    @jax.jit
    def run(params):
        y, back = jax.vjp(apply, params)
        dy = normal(2, y.shape).astype(y.dtype)
        return y, back(dy)[0]

    return run


QUICK = ("current", "converted", "nnx.Linear")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_gradients_that_are_rounded_once(case):
    """Of kernels alone: biases and norms have the gradients that they had."""
    apply, params = layer(case)
    y, grads = with_gradients(apply)(params)
    z, rounded = with_gradients(layer(case, "bfloat16")[0])(params)
    np.testing.assert_array_equal(y.astype(F32), z.astype(F32))
    pairs = zip(jax.tree.leaves_with_path(rounded), jax.tree.leaves(grads), strict=True)
    for (path, new), old in pairs:
        assert new.dtype == old.dtype == F32
        expected = old
        if "kernel" in jax.tree_util.keystr(path):
            expected = old.astype(BF16).astype(F32)
            assert np.mean(expected != old) > 0.5
        np.testing.assert_array_equal(new, expected)


def test_micro_batches_add_rounded_gradients_in_f32():
    x = normal(0, (6, 16)).astype(BF16)
    model = jfp8.Dense(8, recipe=jfp8.recipes.Float8CurrentScaling(wgrad_dtype="bfloat16"))
    variables = model.init(jax.random.key(1), x)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))

    def gradient(x, parts):
        loss = lambda v, x: jnp.mean(model.apply(v, x).astype(F32) ** 2)
        return jax.jit(jfp8.value_and_grad(loss, micro_batches=parts))(state, x)[1].params["kernel"]

    parts = [gradient(x[i::3], 1) for i in range(3)]
    whole = gradient(x, 3)
    assert all(bool(jnp.all(g == g.astype(BF16))) for g in parts)
    np.testing.assert_array_equal(whole, ((parts[0] + parts[1]) + parts[2]) / 3)
    assert np.mean(whole != whole.astype(BF16)) > 0.5


def test_a_carrier_receives_a_rounded_gradient():
    """The gradient of a weight that is stored in FP8."""

    def gradient(dtype):
        recipe = jfp8.recipes.Float8CurrentScaling(wgrad_dtype=dtype)
        stored = jfp8.quantize(normal(1, (48, 64)), jfp8.E4M3FN)

        def loss(carrier):
            w = dataclasses.replace(stored, carrier=carrier)
            y = jfp8.scaled_dot_general(X, w, (((1,), (0,)), ((), ())), recipe=recipe)
            return jnp.sum(y.astype(F32) ** 2)

        return jax.jit(jax.grad(loss))(jnp.zeros((48, 64)))

    whole, rounded = gradient(None), gradient("bfloat16")
    np.testing.assert_array_equal(rounded, whole.astype(BF16).astype(F32))
    assert np.mean(rounded != whole) > 0.5


@pytest.mark.parametrize("case", ["current", "nnx.Linear"])
def test_error_against_exact_sums(case):
    """A hundred times smaller than of gradients that were rounded to bf16."""
    apply, params = layer(case)

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
