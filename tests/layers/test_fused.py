"""`LayerNormDense` and `LayerNormMLP`, against fake quantization written out in f32."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfp8.layers import norm_math
from jfp8.layers.linen.fused import LayerNormDense, LayerNormMLP
from jfp8.layers.linen.layers import DenseGeneral
from support.arrays import device_normal as normal
from support.arrays import relative_error
from support.layers import (
    KEY,
    apply,
    assert_of_rounded_operands,
    exact_product,
    fake_product,
    init,
    random_params,
    shapes_of,
)

# Parameters alone are enough for a formula.
pytestmark = pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")


def assert_as_written(layer, written_out, params, x, dy):
    ours = lambda params, x: layer.apply({"params": params}, x)
    others = (functools.partial(written_out, product) for product in (fake_product, exact_product))
    assert_of_rounded_operands((ours, *others), params, (x,), dy)


def normalized(x, params, layer, axes=(-1,)):
    """By the function that `test_transformer_math` compares with float64."""
    options = {"epsilon": layer.epsilon, "layernorm_type": layer.layernorm_type}
    options |= {"zero_centered_gamma": layer.zero_centered_gamma, "axes": axes}
    return norm_math.normalize(x, params["scale"], params.get("ln_bias"), **options)


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


@pytest.mark.representative(1)
@pytest.mark.parametrize("case", DENSE_CASES)
def test_dense_is_normalization_and_product_of_rounded_operands(case):
    fields, shape, equation = DENSE_CASES[case]
    layer = LayerNormDense(**fields)
    x = normal(shape) + 0.5
    params = random_params(layer, x)
    neutral = 0.0 if layer.zero_centered_gamma else 1.0
    np.testing.assert_array_equal(init(layer, x)["params"]["scale"], neutral)
    dy = normal(jax.eval_shape(layer.apply, {"params": params}, x).shape, 9, 2.0**-10)
    axes = fields.get("axis", (-1,))

    def written_out(product, params, x):
        y = product(equation, normalized(x, params, layer, axes), params["kernel"])
        bias = params.get("bias", jnp.zeros(()))
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)

    assert_as_written(layer, written_out, params, x, dy)


@pytest.mark.slow
def test_dense_can_give_the_normalized_input():
    x = normal((5, 16)) + 1
    layer = LayerNormDense(4, return_layernorm_output=True, ln_bias_init=nn.initializers.ones)
    params = init(layer, x)
    y, given = apply(layer, params, x)
    assert relative_error(given, nn.LayerNorm().init_with_output(KEY, x)[0] + 1) < 1e-6
    np.testing.assert_array_equal(y, apply(layer.clone(return_layernorm_output=False), params, x))


def test_dense_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="layernorm_type must be one of 'layernorm', 'rmsnorm'"):
        LayerNormDense(4, layernorm_type="LayerNorm").init(KEY, normal((2, 4)))
    with pytest.raises(ValueError, match="computes its matmul itself"):
        LayerNormDense(4, dot_general=jax.lax.dot_general)


FORMULAS = {
    "gelu": lambda h: jax.nn.gelu(h[:, 0]),
    "swiglu": lambda h: jax.nn.silu(h[:, 0]) * h[:, 1],
}


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
        y = normalized(x, wi, mlp)
        hidden = product("ai,inj->anj", y, wi["kernel"]) + wi["bias"][None]
        return product("aj,jo->ao", FORMULAS[activation](hidden), wo["kernel"]) + wo["bias"][None]

    assert_as_written(mlp, written_out, params, x, dy)


class WrittenOut(nn.Module):
    """`LayerNormMLP` with a dropout, of layers of Linen."""

    @nn.compact
    def __call__(self, x):
        how = {"bias_init": nn.initializers.normal()}
        wi = LayerNormDense((1, 24), return_layernorm_output=True, name="wi", **how)
        hidden = nn.Dropout(0.3, deterministic=False)(jax.nn.gelu(wi(x)[0][..., 0, :]))
        return DenseGeneral(16, name="wo", **how)(hidden)


def test_an_mlp_draws_as_layers_of_linen_do():
    """From the keys of Linen's paths: initial values and dropout; with the names of their state."""
    rngs = {"params": KEY, "dropout": jax.random.key(1)}
    how = {"intermediate_dropout_rate": 0.3, "bias_init": nn.initializers.normal()}
    ours = LayerNormMLP(24, deterministic=False, **how)
    run = lambda layer: jax.jit(layer.init_with_output)(rngs, normal((8, 16)))
    jax.tree.map(np.testing.assert_array_equal, run(ours), run(WrittenOut()))


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
