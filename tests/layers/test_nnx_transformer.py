"""The fused NNX layers: those of Linen, whose formulas `test_fused` and its like check."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.layers.linen.fused import LayerNormDense
from jfp8.layers.linen.transformer import TransformerLayer
from support.arrays import keyed_normal as normal

# Parameters alone are enough for a formula.
pytestmark = pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")
D = 8


def randomized(layer):
    """Every parameter away from zeros and ones, which would hide a mistake."""
    state = nnx.state(layer, nnx.Param)
    leaves, structure = jax.tree.flatten(state)
    leaves = [leaf + 0.2 * normal(i, leaf.shape) for i, leaf in enumerate(leaves)]
    nnx.update(layer, jax.tree.unflatten(structure, leaves))
    return layer


def assert_like_linen(ours, linen, *args, **kwargs):
    """The same parameters, outputs and gradients."""
    params = nnx.to_pure_dict(nnx.state(randomized(ours), nnx.Param))
    shapes = jax.eval_shape(linen.init, jax.random.key(0), *args, **kwargs)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

    def with_loss(y):
        first = jax.tree.leaves(y)[0]
        return (first * normal(9, first.shape)).sum(), y

    @jax.jit
    def reference(params):
        f = lambda params: with_loss(linen.apply({"params": params}, *args, **kwargs))
        return jax.grad(f, has_aux=True)(params)

    @nnx.jit
    def found(layer):
        return nnx.grad(lambda layer: with_loss(layer(*args, **kwargs)), has_aux=True)(layer)

    evaluated = nnx.view(ours, use_running_average=True)
    (grads, y), (wanted_grads, wanted) = found(evaluated), reference(params)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, y, wanted)
    jax.tree.map(close, nnx.to_pure_dict(nnx.filter_state(grads, nnx.Param)), wanted_grads)
    return y


@pytest.mark.slow
def test_layer_norm_linear():
    x = normal(0, (3, 5, D)) * 3 + 1
    options = {"layernorm_type": "rmsnorm", "zero_centered_gamma": True, "dtype": jnp.bfloat16}
    ours = jfp8.nnx.LayerNormLinear(D, (3, 4), **options, rngs=nnx.Rngs(0))
    y = assert_like_linen(ours, LayerNormDense((3, 4), **options), x)
    assert y.dtype == jnp.bfloat16
    ours = jfp8.nnx.LayerNormLinear(
        (5, D), 4, axis=(1, -1), return_layernorm_output=True, rngs=nnx.Rngs(0)
    )
    linen = LayerNormDense(4, axis=(1, -1), return_layernorm_output=True)
    assert_like_linen(ours, linen, x)


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


def test_a_decoder_computes_what_that_of_linen_does():
    """In high precision, and forward: what `test_transformer_layer` has not."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, encoded = draw(2, 5, D), draw(2, 7, 6)
    masks = {"attention_mask": draw(2, 1, 5, 5) > -1, "encoder_decoder_mask": draw(2, 1, 5, 7) > -1}
    options = {"layer_type": "decoder", "enable_relative_embedding": True, "num_gqa_groups": 2}
    make = partial(jfp8.nnx.TransformerLayer, D, 16, 4, **options, encoded_features=6)
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)
    params = jax.tree.map(lambda a: draw(*a.shape) / 2, params)
    rest = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), rest)
    linen = TransformerLayer(D, 16, 4, **options)

    @jax.jit
    def run(params):
        with jfp8.autocast(enabled=False):
            ours = nnx.merge(graph, params, rest)(x, encoded, **masks)
            variables = {"params": nnx.to_pure_dict(params)}
            return ours, linen.apply(variables, x, encoded, **masks)

    y, expected = run(params)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert np.std(expected) > 1


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


def test_packed_sequences_with_sinks_and_a_window_are_those_of_linen():
    options = {"num_gqa_groups": 2, "attention_sinks": True, "local_window_size": (5, 0)}
    linen = jfp8.TransformerLayer(16, 32, 4, recipe="rowwise", **options)
    ours = jfp8.nnx.TransformerLayer(16, 32, 4, recipe="rowwise", **options, rngs=nnx.Rngs(0))
    ours.self_attention.sinks.set_value(jnp.array([-1.0, 0.0, 2.0, 5.0]))
    params = nnx.to_pure_dict(nnx.state(ours, nnx.Param))
    x = jax.random.normal(jax.random.key(1), (2, 9, 16))
    ids = jnp.array([[1] * 4 + [2] * 5, [3] * 9])
    run = nnx.jit(lambda layer, x, ids: layer(x, segment_ids=ids))
    y = run(ours, x, ids)
    found = jax.jit(linen.apply)({"params": params}, x, segment_ids=ids)
    np.testing.assert_array_equal(y, found)
    assert float(jnp.abs(y - run(ours, x, jnp.zeros_like(ids))).max()) > 0.01
