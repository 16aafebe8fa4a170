"""Weights in FP8 only: `jfp8.quantize_params`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import recipes
from support.models import Model

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 32))


def layers_of_an_mlp(module, x):
    x = nn.LayerNorm()(nn.relu(nn.Dense(64)(x)))
    return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))


MLP = Model(layers_of_an_mlp)


def one_scale(kernel):
    """The rule in numpy: ``data = e4m3(kernel / scale)``, ``scale = amax / 448``."""
    kernel = np.asarray(kernel, np.float32)
    scale = np.max(np.abs(kernel)) / np.float32(448)
    return (kernel * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn), scale


def leaves_by_path(tree):
    is_leaf = lambda x: isinstance(x, jfp8.ScaledArray)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def test_kernels_are_cast_before_they_are_quantized():
    kernel = jax.random.normal(KEY, (32, 16))
    cast = kernel.astype(jnp.bfloat16)
    q = jfp8.quantize_params({"kernel": kernel}, dtype=jnp.bfloat16)["kernel"]
    np.testing.assert_array_equal(q.data, one_scale(cast)[0])
    assert q.scale == one_scale(cast)[1] != one_scale(kernel)[1]


@pytest.mark.slow
@pytest.mark.parametrize("array", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_become_bytes_and_a_scale_and_nothing_else_changes(array, dtype):
    """As a checkpoint is read, too: arrays of numpy have a `.data`, which is a buffer."""
    params = jax.tree.map(lambda x: array(x.astype(dtype)), MLP.init(KEY, X)["params"])
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
    # Exempt layers compute with their values.
    apply = jax.jit(jfp8.convert(MLP, exempt="*").apply)
    params = jfp8.quantize_params(params)
    y = jax.jit(MLP.apply)({"params": jfp8.dequantize_tree(params)}, X)
    np.testing.assert_array_equal(apply({"params": params}, X), y)


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

    inner = lambda layer, x, _: (layer(x), None)
    scan = nn.scan(inner, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    stack = Model(lambda module, x: scan(nn.Dense(32, name="layers"), x, None)[0])
    model = jfp8.convert(stack, recipe, exempt=())
    params = jax.jit(model.init)(KEY, X)["params"]
    params["layers"]["kernel"] *= jnp.array([1.0, 64.0, 1 / 64]).reshape(3, 1, 1)
    frozen = jfp8.quantize_params(params, recipe, stacked="layers")
    assert frozen["layers"]["kernel"].scale.shape[0] == 3
    apply = jax.jit(model.apply)
    np.testing.assert_array_equal(apply({"params": frozen}, X), apply({"params": params}, X))


def test_errors():
    params = {f"Dense_{i}": {"kernel": jnp.ones((8, 8))} for i in range(3)}
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
    with pytest.raises(ValueError, match=r"no kernels .* called \['kernel'\]"):
        jfp8.quantize_params({"a": {"w": jnp.ones((8, 8))}})
