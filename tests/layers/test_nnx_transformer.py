"""The fused NNX layers: those of Linen, whose formulas `test_fused` and its like check."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.layers.linen.transformer import TransformerLayer
from support.arrays import keyed_normal as normal

# Parameters alone are enough for a formula.
pytestmark = pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")
D = 8


def assert_like_linen(ours, linen, *args, gradients=False, **how):
    """The same parameters, here away from zeros and ones, results and maybe gradients."""
    graph, params, rest = nnx.split(ours, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(params)
    drawn = [leaf + 0.2 * normal(i, leaf.shape) for i, leaf in enumerate(leaves)]
    params, pure = structure.unflatten(drawn), nnx.to_pure_dict
    shapes = jax.eval_shape(linen.init, jax.random.key(0), *args, **how)["params"]
    assert jax.tree.map(jnp.shape, pure(params)) == jax.tree.map(jnp.shape, shapes)

    @jax.jit
    def run(params):
        def numbers(f):
            y, vjp = jax.vjp(f, params)
            return y, vjp(y) if gradients else ()

        return (
            numbers(lambda params: nnx.merge(graph, params, rest, copy=True)(*args, **how)),
            numbers(lambda params: linen.apply({"params": pure(params)}, *args, **how)),
        )

    found, expected = run(params)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, expected)
    assert np.std(jax.tree.leaves(found)[0]) > 0.1
    return found[0]


def test_a_decoder_computes_what_that_of_linen_does():
    x, encoded = normal(0, (2, 5, D)), normal(1, (2, 7, 6))
    options = {"layer_type": "decoder", "enable_relative_embedding": True, "num_gqa_groups": 2}
    ours = jfp8.nnx.TransformerLayer(D, 16, 4, **options, encoded_features=6, rngs=nnx.Rngs(0))
    masks = {"attention_mask": normal(2, (2, 1, 5, 5)) > -1}
    masks["encoder_decoder_mask"] = normal(3, (2, 1, 5, 7)) > -1
    assert_like_linen(ours, TransformerLayer(D, 16, 4, **options), x, encoded, **masks)


@pytest.mark.slow
def test_dropout_follows_train_and_eval():
    rates = dict.fromkeys(("hidden_dropout", "attention_dropout", "intermediate_dropout"), 0.5)
    layer = jfp8.nnx.TransformerLayer(D, 16, 2, **rates, rngs=nnx.Rngs(0))
    without = jfp8.nnx.TransformerLayer(D, 16, 2, rngs=nnx.Rngs(0))
    nnx.update(without, nnx.state(layer, nnx.Param))
    without.eval()
    x = normal(0, (2, 5, D))
    call = nnx.jit(lambda layer, x: layer(x))
    assert np.abs(call(layer, x) - call(layer, x)).max() > 0.1
    layer = nnx.clone(layer)
    layer.eval()
    # The histories of the calls before count; start from none.
    nnx.update(layer, nnx.state(without, jfp8.nnx.Fp8State))
    np.testing.assert_allclose(call(layer, x), call(without, x), rtol=1e-6)


def test_mistakes():
    make = lambda **options: jfp8.nnx.TransformerLayer(D, 16, 2, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="layer_type must be one of 'encoder', 'decoder'"):
        make(layer_type="both")
    with pytest.raises(ValueError, match="layernorm_type must be one of"):
        jfp8.nnx.LayerNormLinear(D, 4, layernorm_type="batch", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="encoded_features is for"):
        make(encoded_features=4)
    with pytest.raises(TypeError, match="no option 'actvation'. Did you mean 'mlp_act"):
        make(actvation="gelu")
    with pytest.raises(TypeError, match="LayerNormMLP has no option 'precision'.*activation, "):
        jfp8.nnx.LayerNormMLP(D, 16, precision=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="give `encoded` to the call"):
        make(layer_type="decoder")(jnp.ones((1, 5, D)))


def test_modules_compare_by_value():
    graphs = [nnx.graphdef(jfp8.nnx.TransformerLayer(8, 16, 2, rngs=nnx.Rngs(i))) for i in (0, 1)]
    assert len({*graphs}) == 1


def test_relative_position_biases():
    options = {"num_buckets": 8, "max_distance": 12, "embedding_init": nnx.initializers.normal(3.0)}
    biases = jfp8.nnx.RelativePositionBiases(4, **options, rngs=nnx.Rngs(0))
    table = biases.rel_embedding.get_value()
    assert table.shape == (4, 8)
    assert 2 < jnp.std(table) < 4
    del options["embedding_init"]
    twin = jfp8.linen.RelativePositionBiases(4, **options)
    expected = twin.apply({"params": {"rel_embedding": table}}, 16, 16)
    np.testing.assert_array_equal(biases(16, 16), expected)
    farther = jfp8.linen.RelativePositionBiases(4, num_buckets=8)
    assert (expected != farther.apply({"params": {"rel_embedding": table}}, 16, 16)).any()
    how = {"enable_relative_embedding": True, "dtype": jnp.bfloat16}
    layer = jfp8.nnx.TransformerLayer(8, 16, 2, **how, rngs=nnx.Rngs(0))
    assert layer.relpos_bias(4, 4).dtype == jnp.bfloat16


def test_an_mlp_drops_what_is_between_its_products():
    """All of it, with a rate of 1: what is left is the bias of the second product."""
    make = partial(jfp8.nnx.LayerNormMLP, D, 16, intermediate_dropout_rate=1.0)
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param, ...)
    params = jax.tree.map(
        lambda a: np.linspace(1, 2, a.size, dtype=a.dtype).reshape(a.shape), params
    )

    @jax.jit
    def run(params, x):
        mlp = nnx.merge(graph, params, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rest))
        with jfp8.autocast(enabled=False):
            return mlp(x, deterministic=False), mlp(x, deterministic=True)

    dropped, kept = run(params, np.ones((3, D), np.float32))
    bias = nnx.to_pure_dict(params)["wo"]["bias"]
    np.testing.assert_array_equal(dropped, np.broadcast_to(bias, (3, D)))
    assert np.all(kept > dropped)
