"""Attention with FP8 projections and products, against fake quantization written out in f32."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.layers.linen.attention import MultiHeadDotProductAttention
from jfp8.recipes import in_effect as region
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from support.arrays import assert_same, relative_error
from support.arrays import device_normal as normal
from support.layers import (
    KEY,
    apply,
    assert_of_rounded_operands,
    exact_product,
    fake_product,
    init,
)

# Parameters alone are enough for a formula.
pytestmark = pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")


def attention(params, query, keys, values, mask, product):
    """Multi-head attention, written out: products with weights, and what is between them."""

    def project(name, x):
        y = product("abi,ihd->abhd", x, params[name]["kernel"])
        return y + params[name]["bias"][None, None]

    q, k, v = project("query", query), project("key", keys), project("value", values)
    context = jfp8.scaled_dot_product_attention(q, k, v, mask=mask)
    y = product("abhd,hdo->abo", context, params["out"]["kernel"])
    return y + params["out"]["bias"][None, None]


X = normal((2, 6, 16))
KEYS, VALUES = normal((2, 5, 12), 1), normal((2, 5, 10), 2)


@pytest.mark.slow
def test_forward_and_gradients_are_those_of_rounded_operands():
    """To others, masked, with all products."""
    layer = MultiHeadDotProductAttention(
        num_heads=2,
        qkv_features=24,
        out_features=10,
        attention_products=True,
        kernel_init=nn.initializers.normal(0.5),
        bias_init=nn.initializers.normal(0.5),
    )
    inputs = X, KEYS, VALUES
    mask = jnp.asarray(np.random.default_rng(3).random((2, 1, 6, 5)) > 0.3).at[..., 0].set(True)
    params = init(layer, *inputs)["params"]
    dy = normal((2, 6, 10), 5, 2.0**-10)

    def ours(params, *inputs):
        return layer.apply({"params": params}, *inputs, mask=mask)

    def oracle(params, *inputs, product=fake_product):
        return attention(params, *inputs, mask, product)

    functions = ours, oracle, functools.partial(oracle, product=exact_product)
    assert_of_rounded_operands(functions, params, inputs, dy)


def test_disabled_it_is_the_layer_of_flax():
    """With its initial parameters."""
    layer, flax = (
        of(2, normalize_qk=True, use_bias=False, out_kernel_init=nn.initializers.uniform(), **how)
        for of, how in (
            (MultiHeadDotProductAttention, {"attention_products": True}),
            (nn.MultiHeadDotProductAttention, {}),
        )
    )
    params = init(flax, X)
    assert_same(init(layer, X)["params"], params["params"])
    expected = apply(flax, params, X)
    assert relative_error(apply(layer, params, X), expected) > 1e-3
    with region.entered(region.Region(DelayedScaling(), enabled=False)):
        y = apply(layer, params, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_clone_uses_the_new_fields():
    original = MultiHeadDotProductAttention(2, attention_products=True)
    plain = original.clone(attention_products=False)
    assert plain.qk_attn_weights_einsum_cls is None
    assert plain.attn_weights_value_einsum_cls is None
    assert plain == MultiHeadDotProductAttention(2)
    assert plain.clone(attention_products=True) == original
    recipe = Float8CurrentScaling()
    other = original.clone(recipe=recipe)
    assert other == MultiHeadDotProductAttention(2, attention_products=True, recipe=recipe)
    assert other != original
    assert sorted(jax.eval_shape(other.init, KEY, X)) == ["params"]
    assert {hook.recipe for hook in vars(other).values() if hasattr(hook, "module")} == {recipe}


@pytest.mark.parametrize("hook", ["qkv_dot_general", "out_dot_general"])
@pytest.mark.parametrize("suffix", ["", "_cls"])
def test_a_product_of_the_users_own_is_refused(hook, suffix):
    words = rf"computes its matmul itself, so it takes neither {hook} nor {hook}_cls"
    with pytest.raises(ValueError, match=words):
        MultiHeadDotProductAttention(2, **{hook + suffix: jax.lax.dot_general})


def test_an_einsum_of_the_users_own_is_kept_or_refused():
    hooks = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    layer = MultiHeadDotProductAttention(2, **hooks)
    params = init(nn.MultiHeadDotProductAttention(2), X)
    expected = apply(MultiHeadDotProductAttention(2), params, X)
    np.testing.assert_allclose(apply(layer, params, X), expected, rtol=1e-5, atol=1e-6)
    words = "qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls would have no effect"
    with pytest.raises(ValueError, match=words):
        MultiHeadDotProductAttention(2, **hooks, attention_products=True)


def test_what_would_silently_stay_in_high_precision_is_refused():
    with pytest.raises(ValueError, match="precision='highest'.*no choice of precision"):
        MultiHeadDotProductAttention(2, precision="highest", attention_products=True)
    attention_fn = lambda query, key, value: value
    with pytest.raises(ValueError, match="so attention_fn would have no effect"):
        MultiHeadDotProductAttention(2, attention_fn=attention_fn, attention_products=True)


def test_what_attention_in_fp8_cannot_do_is_refused():
    layer = MultiHeadDotProductAttention(2, dropout_rate=0.1, attention_products=True)
    params = jax.eval_shape(layer.clone(deterministic=True).init, KEY, X)

    def call(**how):
        return jax.eval_shape(lambda p: layer.apply(p, X, rngs={"dropout": KEY}, **how), params)

    with pytest.raises(ValueError, match="what dropout_rate=0.1 asks for.*exempt="):
        call(deterministic=False)
    with pytest.raises(ValueError, match="what sow_weights=True asks for"):
        call(deterministic=True, sow_weights=True)
    assert call(deterministic=True).shape == X.shape
    with region.entered(region.Region(DelayedScaling(), enabled=False)):
        assert call(deterministic=False).shape == X.shape
