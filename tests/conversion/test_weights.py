"""Weights in FP8 only: `jfp8.quantize_params`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8 import recipes

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 32))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))


def one_scale(kernel):
    """The rule in numpy: ``data = e4m3(kernel / scale)``, ``scale = amax / 448``."""
    kernel = np.asarray(kernel, np.float32)
    scale = np.max(np.abs(kernel)) / np.float32(448)
    return (kernel * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn), scale


def leaves_by_path(tree):
    is_leaf = lambda x: isinstance(x, jfp8.ScaledArray)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


@pytest.mark.slow
def test_kernels_become_bytes_and_a_scale_and_nothing_else_changes():
    params = Mlp().init(KEY, X)["params"]
    before, after = leaves_by_path(params), leaves_by_path(jfp8.quantize_params(params))
    assert before.keys() == after.keys()
    for path, leaf in after.items():
        if "kernel" not in path:
            np.testing.assert_array_equal(leaf, before[path])
            continue
        data, scale = one_scale(before[path])
        np.testing.assert_array_equal(np.asarray(leaf.data).view(np.uint8), data.view(np.uint8))
        assert leaf.scale == scale
        assert leaf.data.nbytes == before[path].size  # one byte for each weight


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "current", "block", "direct_e5m2", "mxfp8", "nvfp4"])
def test_a_converted_model_gives_the_same_numbers_from_fp8_weights(name):
    """The weights were rounded before instead of during the call: by the same rule, so equal."""
    recipe = recipes.get(name)
    model = jfp8.convert(Mlp(), recipe)
    params = model.init(KEY, X)["params"]
    frozen = jfp8.quantize_params(params, recipe, exempt="Dense_1")  # the logits
    apply = jax.jit(model.apply)
    y = apply({"params": params}, X)
    np.testing.assert_array_equal(apply({"params": frozen}, X), y)
    exact = Mlp().apply({"params": params}, X)
    assert 1e-3 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.5


@pytest.mark.slow
def test_exempt_layers_compute_with_the_values_of_fp8_weights():
    model = jfp8.convert(Mlp(), exempt="*")
    params = jfp8.quantize_params(Mlp().init(KEY, X)["params"])
    is_frozen = lambda leaf: isinstance(leaf, jfp8.ScaledArray)
    values = jax.tree.map(
        lambda x: x.dequantize() if is_frozen(x) else x, params, is_leaf=is_frozen
    )
    y = jax.jit(model.apply)({"params": params}, X)
    np.testing.assert_array_equal(y, jax.jit(Mlp().apply)({"params": values}, X))


LAYERS = {
    "Dense": (jfp8.Dense(6), (4, 32)),
    "DenseGeneral": (jfp8.DenseGeneral((2, 3), axis=(-2, -1)), (4, 8, 4)),
    "Conv": (jfp8.Conv(6, (3, 3)), (2, 6, 6, 4)),
    "ConvTranspose": (jfp8.ConvTranspose(6, (3, 3), strides=(2, 2)), (2, 6, 6, 4)),
    "Einsum": (jfp8.Einsum((32, 6), "ab,bc->ac"), (4, 32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_every_layer_takes_them(case):
    layer, shape = case
    x = jax.random.normal(jax.random.key(2), shape)
    params = layer.init(KEY, x)["params"]
    run = jax.jit(lambda params, x: layer.apply({"params": params}, x))
    np.testing.assert_array_equal(run(jfp8.quantize_params(params), x), run(params, x))


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@pytest.mark.representative(1)
def test_stacked_layers_have_scales_of_their_own(name):
    recipe = recipes.get(name)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = lambda layer, x, _: (layer(x), None)
            scan = nn.scan(
                inner, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return scan(nn.Dense(32, name="layers"), x, None)[0]

    model = jfp8.convert(Stack(), recipe, exempt=())
    params = jax.jit(model.init)(KEY, X)["params"]
    params["layers"]["kernel"] *= jnp.array([1.0, 64.0, 1 / 64]).reshape(3, 1, 1)
    frozen = jfp8.quantize_params(params, recipe, stacked="layers")
    assert frozen["layers"]["kernel"].scale.shape[0] == 3
    apply = jax.jit(model.apply)
    np.testing.assert_array_equal(apply({"params": frozen}, X), apply({"params": params}, X))


@pytest.mark.slow
def test_fine_tuning_moves_what_is_left():
    """Frozen kernels get no gradient; biases and norms do, through them."""
    model = jfp8.convert(Mlp(), recipes.Float8CurrentScaling(), exempt=())
    params = jfp8.quantize_params(model.init(KEY, X)["params"])
    is_frozen = lambda leaf: isinstance(leaf, jfp8.ScaledArray)
    frozen = jax.tree.map(lambda x: x if is_frozen(x) else None, params, is_leaf=is_frozen)
    free = jax.tree.map(lambda x: None if is_frozen(x) else x, params, is_leaf=is_frozen)
    together = lambda free: jax.tree.map(
        lambda a, b: b if a is None else a,
        frozen,
        free,
        is_leaf=lambda x: x is None or is_frozen(x),
    )
    loss = jax.jit(lambda free: jnp.mean(model.apply({"params": together(free)}, X) ** 2))
    tx = optax.adam(1e-2)
    opt_state, before = tx.init(free), loss(free)
    for _ in range(5):
        grads = jax.grad(loss)(free)
        updates, opt_state = tx.update(grads, opt_state)
        free = optax.apply_updates(free, updates)
    assert all(float(jnp.linalg.norm(g)) > 0 for g in jax.tree.leaves(grads))
    assert loss(free) < 0.9 * before


@pytest.mark.slow
@pytest.mark.parametrize("array", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_bf16_checkpoints(array):
    """As a checkpoint is read, too: arrays of numpy have a `.data`, which is a buffer."""
    params = jax.tree.map(lambda x: array(x.astype(jnp.bfloat16)), Mlp().init(KEY, X)["params"])
    kernel = jfp8.quantize_params(params)["Dense_0"]["kernel"]
    data, scale = one_scale(params["Dense_0"]["kernel"])
    np.testing.assert_array_equal(np.asarray(kernel.data).view(np.uint8), data.view(np.uint8))
    assert kernel.scale == scale


def test_nnx():
    model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu)
    model = jfp8.convert(model, recipes.Float8CurrentScaling(), exempt=())
    y = model(X)
    nnx.update(model, jfp8.quantize_params(nnx.state(model, nnx.Param)))
    assert isinstance(model.layers[0].kernel.get_value(), jfp8.ScaledArray)
    np.testing.assert_array_equal(model(X), y)


def test_errors():
    params = Mlp().init(KEY, X)["params"]
    with pytest.raises(ValueError, match=r"'Dense_7' matches no layer.*Dense_0, Dense_1, Dense_2"):
        jfp8.quantize_params(params, exempt="Dense_7")
    with pytest.raises(ValueError, match=r"'Dense_7' matches no layer"):
        jfp8.quantize_params(params, stacked=["Dense_7"])
    with pytest.raises(TypeError, match="params must be nested dicts"):
        jfp8.quantize_params(jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="recipe must be a recipe object"):
        jfp8.quantize_params(params, jfp8.recipes.DelayedScaling)
    with pytest.raises(ValueError, match="in FP8 already"):
        jfp8.quantize_params(jfp8.quantize_params(params))
