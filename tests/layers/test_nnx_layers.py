"""NNX layers: hooks, masks, stored kernels, attention; `test_exact_layers` has their numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
import jfp8.nnx
from support.arrays import assert_same, relative_error
from support.arrays import keyed_normal as normal
from support.recorded import record

# name: (arguments, keyword arguments, shape of the input)
LAYERS = {
    "Linear": ((4, 5), {}, (3, 4)),
    "LinearGeneral": (((6, 4), (3, 2)), {"axis": (-2, -1)}, (3, 6, 4)),
    "Conv": ((4, 6, (3, 3)), {"strides": 2, "kernel_dilation": 2, "padding": 2}, (2, 7, 7, 4)),
    "ConvTranspose": ((4, 5, (3, 3)), {"strides": 2}, (2, 3, 3, 4)),
    "Einsum": (("nta,hab->nthb", (3, 4, 5), (3, 5)), {}, (2, 6, 4)),
}


def made(package, name, **options):
    args, kwargs, _ = LAYERS[name]
    return getattr(package, name)(*args, **kwargs, **options, rngs=nnx.Rngs(7))


def input_of(name, seed=1):
    return normal(seed, LAYERS[name][2])


@nnx.jit
def call(layer, *args):
    return layer(*args)


def test_products_as_hooks_of_flax_layers():
    hooks = {
        "Linear": {"dot_general": jfp8.nnx.DotGeneral()},
        "Conv": {"conv_general_dilated": jfp8.nnx.ConvGeneralDilated()},
        "Einsum": {"einsum_op": jfp8.nnx.EinsumOp()},
    }
    for name, hook in hooks.items():
        layer, x = made(nnx, name, **hook), input_of(name)
        np.testing.assert_array_equal(call(layer, x), call(made(jfp8.nnx, name), x))


def test_a_mask_of_a_convolution_is_kept():
    mask = jnp.tril(jnp.ones((3, 4, 6)))
    for name in ("Conv", "ConvTranspose"):
        ours, stock = (
            getattr(package, name)(4, 6, 3, mask=mask, rngs=nnx.Rngs(0))
            for package in (jfp8.nnx, nnx)
        )
        x = normal(0, (2, 5, 4))
        assert relative_error(call(ours, x), call(stock, x)) < 0.06
        ours.mask = jnp.ones((1, 4, 6))
        with pytest.raises(ValueError, match="(?i)mask .*shape"):
            ours(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Linear", "Conv", "ConvTranspose", "Einsum"])
def test_a_kernel_may_be_a_scaled_array(name):
    """One byte for each weight, and what its own quantization would have given."""
    layer, x = made(jfp8.nnx, name, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), input_of(name)
    layer.eval()
    wanted = call(layer, x)
    q = jfp8.quantize(layer.kernel.get_value())
    layer.kernel.set_value(q)
    assert_same(call(layer, x), wanted)
    stock = made(nnx, name)
    stock.kernel.set_value(q.dequantize())
    with jfp8.autocast(enabled=False):
        assert relative_error(call(layer, x), call(stock, x)) < 1e-2  # bf16


def test_out_sharding():
    spec = P(None, "d")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        layer = jfp8.nnx.Linear(4, 16, rngs=nnx.Rngs(0))
        x = jax.device_put(normal(0, (8, 4)), NamedSharding(mesh, P("d", None)))
        y = nnx.jit(lambda layer, x: layer(x, out_sharding=spec))(layer, x)
        assert y.sharding.spec == spec


ATTENTION = {"decode": False, "qkv_features": 16, "num_heads": 4, "in_features": 8}


def attention(package, **options):
    return package.MultiHeadAttention(**ATTENTION, **options, rngs=nnx.Rngs(5))


@pytest.mark.slow
def test_attention_is_drop_in():
    options = {"num_kv_heads": 2, "normalize_qk": True}
    ours, stock = attention(jfp8.nnx, **options), attention(nnx, **options)
    assert_same(*(nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (ours, stock)))
    q, kv = normal(0, (2, 5, 8)), normal(1, (2, 6, 8))
    for args in ((q, kv), (q,)):
        recorded = nnx.clone(ours)
        assert 1e-3 < relative_error(call(recorded, *args), call(stock, *args)) < 0.12
    record(recorded, q)
    products = [m for _, m in nnx.iter_modules(recorded) if isinstance(m, jfp8.nnx.DotGeneral)]
    assert len(products) == 4  # one for each projection, not one shared by three
    amaxes = [float(p.histories()["rhs"][0]) for p in products]
    assert len(set(amaxes)) == 4


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="a newer Flax passes positions on")
def test_attention_passes_positions_on():
    def attend(query, key, value, *, input_positions, **options):
        scaled = query * input_positions[..., None, None]
        return nnx.dot_product_attention(scaled, key, value, **options)

    ours, stock = (attention(package, attention_fn=attend) for package in (jfp8.nnx, nnx))
    q, positions = normal(0, (2, 5, 8)), jnp.asarray([[0, 1, 2, 3, 4], [0, 1, 7, 8, 20]])
    expected = stock(q, input_positions=positions)
    assert 1e-3 < relative_error(ours(q, input_positions=positions), expected) < 0.12
    assert relative_error(ours(q, input_positions=positions[:, ::-1]), expected) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_is_the_function_that_is_tested_by_itself(groups):
    q, k, v = (normal(i, (2, 5, n, 8)) for i, n in enumerate((4, groups, groups)))
    layer, function = jfp8.nnx.DotProductAttention(), jfp8.scaled_dot_product_attention
    layer.eval()
    mask = jnp.asarray(normal(9, (2, 1, 5, 5)) > -0.5) | jnp.eye(5, dtype=bool)[None, None]
    for how in ({}, {"is_causal": True}, {"is_causal": True, "mask": mask}):
        y, expected = (jax.jit(partial(f, **how))(q, k, v) for f in (layer, function))
        np.testing.assert_array_equal(y, expected)
    several = lambda x: jnp.stack([x, x + 1], axis=1)  # dimensions of the batch
    y = jax.jit(layer)(*map(several, (q, k, v)), mask=mask[:, None])
    np.testing.assert_allclose(y[:, 0], jax.jit(layer)(q, k, v, mask=mask), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "hook", "value"),
    [
        ("Linear", "dot_general", jnp.dot),
        ("LinearGeneral", "dot_general_cls", jfp8.nnx.DotGeneral),
        ("Conv", "conv_general_dilated", partial(jax.lax.conv_general_dilated)),
        ("Einsum", "einsum_op", partial(jnp.einsum)),
    ],
)
def test_trap_two_products_for_one_layer(name, hook, value):
    with pytest.raises(ValueError, match=rf"does not take {hook.removesuffix('_cls')}"):
        made(jfp8.nnx, name, **{hook: value})


def test_mistakes_of_attention():
    with pytest.raises(ValueError, match="does not take qkv_dot_general"):
        attention(jfp8.nnx, qkv_dot_general=jnp.dot)
    with pytest.raises(ValueError, match="attention_fn would have no effect"):
        attention(jfp8.nnx, attention_products=True, attention_fn=lambda q, k, v, **_: v)
    ours, q = jfp8.nnx.DotProductAttention(), jnp.ones((1, 2, 1, 4))
    for how in ({"dropout_rate": 0.5}, {"module": ours}):
        with pytest.raises(ValueError, match="makes its weights block by block and keeps none"):
            ours(q, q, q, **how)
    with jfp8.autocast(enabled=False):
        assert ours(q, q, q, dropout_rate=0.5, dropout_rng=jax.random.key(0)).shape == q.shape
