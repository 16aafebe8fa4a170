"""Normalisation and products as one layer: `LayerNormDense` and `LayerNormMLP`.

The oracle is fake quantization: the layer written out, in float32, with products whose operands
were rounded by ml_dtypes, and whose gradient is straight-through.
"""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.layers.linen.fused import LayerNormDense, LayerNormMLP
from jfp8.recipes.per_tensor import Float8CurrentScaling
from support.arrays import cosine, relative_error
from support.layers import (
    KEY,
    apply,
    exact_product,
    fake_product,
    init,
    normal,
    quantizations,
    random_params,
    shapes_of,
)


def assert_all_close(ours, oracle, unrounded, *args, dy):
    """Values and all gradients of `ours` are the oracle's, and further from those unrounded."""

    @jax.jit
    def run(*args):
        results = [jax.vjp(f, *args) for f in (ours, oracle, unrounded)]
        return [jax.tree.leaves((y, vjp(dy))) for y, vjp in results]

    for y, expected, plain in zip(*run(*args), strict=True):
        assert y.shape == expected.shape
        # Some values lie so close to the middle of two f8 numbers that f32 errors decide.
        assert relative_error(y, expected) < 5e-3
        assert cosine(y, expected) > 1 - 1e-5
        assert relative_error(plain, expected) > 1e-2 or y.ndim == 1, "the oracle tells"


def normalized(x, params, kind, zero_centered, epsilon, axes=(-1,)):
    center = jnp.mean(x, axes, keepdims=True) if kind == "layernorm" else 0.0
    spread = jnp.sqrt(jnp.mean((x - center) ** 2, axes, keepdims=True) + epsilon)
    # The axes of the tests are the last ones, in order.
    pad = (1,) * (x.ndim - len(axes))
    scale = params["scale"].reshape(*pad, *params["scale"].shape)
    y = (x - center) / spread * (1 + scale if zero_centered else scale)
    if kind == "layernorm":
        y = y + params["ln_bias"].reshape(*pad, *scale.shape[len(pad) :])
    return y


# LayerNormDense.

# fields, shape of the input, equation of the product
DENSE_CASES = {
    "layernorm": ({"features": 24}, (8, 16), "ai,ij->aj"),
    "rmsnorm": (
        {"features": (3, 8), "layernorm_type": "rmsnorm", "epsilon": 0.1, "use_bias": False},
        (2, 4, 16),
        "abi,ijk->abjk",
    ),
    "over two axes": (
        {"features": 8, "axis": (-2, -1), "zero_centered_gamma": True},
        (6, 4, 5),
        "aij,ijk->ak",
    ),
}


@pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")
@pytest.mark.representative(1)
@pytest.mark.parametrize("case", DENSE_CASES)
def test_dense_is_normalisation_and_product_of_rounded_operands(case):
    fields, shape, equation = DENSE_CASES[case]
    layer = LayerNormDense(**fields)
    x = normal(shape) + 0.5
    params = random_params(layer, x)
    dy = normal(jax.eval_shape(layer.apply, {"params": params}, x).shape, 9, 2.0**-10)
    axes = fields.get("axis", (-1,))

    def written_out(product, params, x):
        kind, zero_centered = layer.layernorm_type, layer.zero_centered_gamma
        y = product(
            equation,
            normalized(x, params, kind, zero_centered, layer.epsilon, axes),
            params["kernel"],
        )
        bias = params.get("bias", jnp.zeros(()))
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)

    assert_all_close(
        lambda params, x: layer.apply({"params": params}, x),
        functools.partial(written_out, fake_product),
        functools.partial(written_out, exact_product),
        params,
        x,
        dy=dy,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_dense_starts_as_the_layers_of_flax_would(kind, zero_centered):
    """The same values come out of ``nn.LayerNorm`` or ``nn.RMSNorm`` and `jfp8.DenseGeneral`."""
    layer = LayerNormDense(
        (3, 4), layernorm_type=kind, zero_centered_gamma=zero_centered, dtype=jnp.bfloat16
    )
    x = normal((5, 16)) + 1
    params = init(layer, x)["params"]
    shapes = {"scale": (16,), "ln_bias": (16,), "kernel": (16, 3, 4), "bias": (3, 4)}
    if kind == "rmsnorm":
        del shapes["ln_bias"]
    assert shapes_of(params) == shapes
    np.testing.assert_array_equal(params["scale"], 0 if zero_centered else 1)

    norm = (nn.LayerNorm if kind == "layernorm" else nn.RMSNorm)(dtype=jnp.bfloat16)
    dense = jfp8.DenseGeneral((3, 4), dtype=jnp.bfloat16)
    kernel = {"kernel": params["kernel"], "bias": params["bias"]}
    expected = jax.jit(lambda x: dense.apply({"params": kernel}, norm.init_with_output(KEY, x)[0]))(
        x
    )
    y = apply(layer, {"params": params}, x)
    assert y.dtype == jnp.bfloat16
    # The normalised values may differ by an ulp of bf16, which few e4m3 numbers notice.
    assert relative_error(y, expected) < 5e-3


@pytest.mark.slow
def test_dense_can_give_the_normalised_input():
    x = normal((5, 16)) + 1
    layer = LayerNormDense(4, return_layernorm_output=True, ln_bias_init=nn.initializers.ones)
    params = init(layer, x)
    y, given = apply(layer, params, x)
    assert relative_error(given, nn.LayerNorm().init_with_output(KEY, x)[0] + 1) < 1e-6
    np.testing.assert_array_equal(y, apply(layer.clone(return_layernorm_output=False), params, x))


@pytest.mark.slow
def test_a_normalised_activation_is_quantized_once_for_all_that_read_it():
    x = normal((5, 16))
    fused = LayerNormDense((3, 8))
    params = init(fused, x)["params"]
    loss = lambda params, x: jnp.sum(fused.apply({"params": params}, x) ** 2)
    seen = quantizations(jax.grad(loss, argnums=(0, 1)), params, x)
    assert sorted(seen) == [(5, 3, 8), (5, 16), (16, 3, 8)], "grad, lhs, rhs: once each"

    def three(params, x):
        apart = [jfp8.Dense(8).apply({"params": p}, x) for p in params]
        return jnp.sum(jnp.stack(apart) ** 2)

    apart = [init(jfp8.Dense(8), x)["params"]] * 3
    assert quantizations(jax.grad(three), apart, x).count((5, 16)) == 3, "the count counts"


def test_dense_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="layernorm_type must be one of 'layernorm', 'rmsnorm'"):
        LayerNormDense(4, layernorm_type="LayerNorm").init(KEY, normal((2, 4)))
    with pytest.raises(ValueError, match="computes its matmul itself"):
        LayerNormDense(4, dot_general=jax.lax.dot_general)


def test_modules_are_values():
    for make in (
        lambda **fields: LayerNormDense((2, 4), **fields),
        lambda **fields: LayerNormMLP(8, **fields),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
        assert make() != make(recipe=Float8CurrentScaling())


# LayerNormMLP.


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + jnp.exp(-x))


def relu(x):
    return jnp.where(x > 0, x, 0.0)


FORMULAS = {
    "gelu": lambda h: gelu(h[:, 0]),
    "squared_relu": lambda h: relu(h[:, 0]) ** 2,
    "swiglu": lambda h: silu(h[:, 0]) * h[:, 1],
}


@pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")
@pytest.mark.representative(1)
@pytest.mark.parametrize("activation", FORMULAS)
def test_mlp_is_its_formula_with_rounded_operands(activation):
    gated = activation.endswith("glu")
    mlp = LayerNormMLP(
        24,
        activation=activation,
        layernorm_type="rmsnorm" if gated else "layernorm",
        zero_centered_gamma=gated,
        epsilon=0.01,
    )
    x, dy = normal((8, 16)) + 0.5, normal((8, 16), 9, 2.0**-10)
    params = random_params(mlp, x)
    assert params["wi"]["kernel"].shape == (16, 1 + gated, 24)
    assert shapes_of(params["wo"]) == {"kernel": (24, 16), "bias": (16,)}

    def written_out(product, params, x):
        wi, wo = params["wi"], params["wo"]
        y = normalized(x, wi, mlp.layernorm_type, mlp.zero_centered_gamma, mlp.epsilon)
        hidden = product("ai,inj->anj", y, wi["kernel"]) + wi["bias"][None]
        return product("aj,jo->ao", FORMULAS[activation](hidden), wo["kernel"]) + wo["bias"][None]

    assert_all_close(
        lambda params, x: mlp.apply({"params": params}, x),
        functools.partial(written_out, fake_product),
        functools.partial(written_out, exact_product),
        params,
        x,
        dy=dy,
    )


X = normal((5, 16))


@pytest.mark.slow
def test_mlp_drops_what_is_between_the_products():
    """A quarter of it, and the rest grows by 4/3; only if it is not deterministic."""
    mlp = LayerNormMLP(2048, intermediate_dropout_rate=0.25, activation="relu", use_bias=False)
    # Of zeros, which are normalised to zeros, ln_bias makes ones, and the product 2048 ones.
    wi = {"kernel": jnp.full((16, 1, 2048), 1 / 16), "scale": jnp.ones(16), "ln_bias": jnp.ones(16)}
    params = {"wi": wi, "wo": {"kernel": jnp.ones((2048, 16))}}
    run = lambda **how: np.asarray(apply(mlp, {"params": params}, jnp.zeros((1, 16)), **how))
    np.testing.assert_allclose(run(deterministic=True), 2048, rtol=1e-5)
    y = run(deterministic=False, rngs={"dropout": KEY})
    kept = y / 2048 * 0.75
    # Four standard deviations of a mean of 2048 choices.
    np.testing.assert_allclose(kept, 0.75, atol=4 * math.sqrt(0.75 * 0.25 / 2048))
    assert np.all(kept != 0.75)
    fixed = mlp.clone(deterministic=True)
    assert np.all(np.asarray(apply(fixed, {"params": params}, jnp.zeros((1, 16)))) > 2047)


def test_mlp_with_dropout_wants_to_be_told():
    mlp = LayerNormMLP(8, intermediate_dropout_rate=0.25)
    with pytest.raises(ValueError, match="deterministic"):
        jax.eval_shape(mlp.init, KEY, X)
    jax.eval_shape(LayerNormMLP(8).init, KEY, X)  # without any it does not


def test_mlp_lists_the_activations_it_knows():
    words = "activation must be one of 'gelu', 'silu', 'relu', 'squared_relu', 'geglu'.*'swish'"
    with pytest.raises(ValueError, match=words):
        LayerNormMLP(8, activation="swish").init(KEY, X)


@pytest.mark.slow
def test_the_backward_pass_of_an_mlp_keeps_bytes():
    """Beside the inputs: one byte per operand of a product, and bf16 before the activation."""
    mlp = LayerNormMLP(64, activation="swiglu", dtype=jnp.bfloat16)
    x = normal((48, 16)).astype(jnp.bfloat16)
    params = init(mlp, x)["params"]
    of = lambda params, x: mlp.apply({"params": params}, x)
    kept = jax.tree.leaves(jax.jit(lambda *args: jax.vjp(of, *args)[1])(params, x))
    large = sorted((a.dtype.name, a.shape) for a in kept if a.size > 64)
    assert large == [
        ("bfloat16", (48, 2, 64)),
        ("bfloat16", (48, 16)),
        ("uint8", (16, 2, 64)),
        ("uint8", (48, 16)),
        ("uint8", (48, 64)),
        ("uint8", (64, 16)),
    ]
