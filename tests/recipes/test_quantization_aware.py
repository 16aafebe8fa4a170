"""Quantization-aware training: the export has the bits of the forward pass, seen by identities."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
from jfp8.matmul.one_quantized import multiply_dequantized
from jfp8.matmul.spec import MatmulSpec
from jfp8.quantizers import Blockwise, Current, Delayed, FromForward
from jfp8.recipes import PerOperand, Product, QuantizationAware
from jfp8.tracing.devices import Gpu
from support.fake_quantization import E2M1, E4M3, mx, nvfp4, per_row, tiles

RULES = {
    "block": tiles(E4M3, 128),
    "rowwise": per_row(E4M3, None),
    "mxfp8": mx(E4M3),
    "mxfp4": mx(E2M1),
    "nvfp4": nvfp4(1),
}
grids = pytest.mark.parametrize("grid", RULES)
QAT = {grid: QuantizationAware(grid) for grid in RULES}


def fake_quantized(grid, kernel) -> np.ndarray:
    """A matrix that is summed over its first dimension; float64."""
    return RULES[grid](np.asarray(kernel, np.float32)[None], 1)[0]


def assert_deployed(grid, multiplied, stored, kernel):
    """What the forward pass multiplied is what is stored, bit for bit, and on the grid."""
    multiplied = np.asarray(multiplied, np.float32)
    np.testing.assert_array_equal(multiplied, np.asarray(values_of(stored), np.float32))
    expected = fake_quantized(grid, kernel)
    assert 0.01 < np.linalg.norm(expected - kernel) / np.linalg.norm(kernel) < 0.2
    # f32 scales: a value is the rounded product of two numbers, or of three.
    ulps = {"rowwise": 2, "nvfp4": 4}.get(grid, 0)
    assert (abs(multiplied - expected) <= ulps * 2.0**-24 * abs(expected)).all()


def uneven(*shape, seed=1) -> jax.Array:
    """With rows of different sizes, so that scales differ."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-3, 4, (shape[-2], 1))
    return jnp.asarray(rng.normal(size=shape) * sizes, jnp.float32)


values_of = jax.jit(jfp8.ScaledArray.dequantize)


def stored_for(recipe, params, **how):
    return jax.jit(lambda params: jfp8.quantize_params(params, recipe, **how))(params)


# The forward pass's operand, the stored array, and the matrix, for each kind of layer.


def linen_dense(recipe):
    layer = jfp8.Dense(128, use_bias=False, recipe=recipe)
    params = {"kernel": uneven(128, 128)}
    stored = stored_for(recipe, {"layer": params})["layer"]
    apply = jax.jit(lambda params: layer.apply({"params": params}, jnp.eye(128)))
    np.testing.assert_array_equal(apply(stored), apply(params))
    yield apply(params), stored["kernel"], params["kernel"]


def linen_dense_general(recipe):
    """The output projection of attention, which sums over two dimensions of its kernel."""
    layer = jfp8.DenseGeneral(128, axis=(-2, -1), use_bias=False, recipe=recipe)
    params = {"kernel": uneven(128, 128).reshape(2, 64, 128)}
    out = {"attention": {"out": params}}
    stored = stored_for(recipe, out, contracting={"*/out": (0, 1)})["attention"]["out"]
    apply = jax.jit(
        lambda params: layer.apply({"params": params}, jnp.eye(128).reshape(128, 2, 64))
    )
    np.testing.assert_array_equal(apply(stored), apply(params))
    flat = stored["kernel"].reshape(128, 128)
    yield apply(params), flat, params["kernel"].reshape(128, 128)


def nnx_einsum(recipe):
    """A kernel that is summed over its last dimension, as that of an embedding that is tied."""
    layer = nnx.Einsum("...k,nk->...n", (128, 256), rngs=nnx.Rngs(0))
    kernel = uneven(256, 128)
    layer.kernel.set_value(kernel.T)
    layer = jfp8.convert(layer, recipe, exempt=())
    call = nnx.jit(lambda layer: layer(jnp.eye(256)))
    y = call(layer)
    params = nnx.state(layer, nnx.Param)
    nnx.update(layer, stored_for(recipe, params, contracting={"*": 1}))
    np.testing.assert_array_equal(call(layer), y)
    yield y, layer.kernel.get_value().T, kernel


def experts(recipe):
    kernels = uneven(3, 128, 128) * jnp.array([1.0, 8.0, 0.125]).reshape(3, 1, 1)
    x, sizes = jnp.tile(jnp.eye(128), (3, 1)), jnp.full(3, 128)
    stored = stored_for(recipe, {"wi": {"kernel": kernels}}, stacked="wi")["wi"]["kernel"]
    dot = jax.jit(lambda w: jfp8.scaled_ragged_dot(x, w, sizes, recipe=recipe))
    y = dot(kernels)
    np.testing.assert_array_equal(dot(stored), y)
    yield from zip(y.reshape(3, 128, 128), (each_of(stored, i) for i in range(3)), kernels)


def each_of(stack, i):
    is_stacked = lambda leaf: leaf.ndim == 3
    return jax.tree.map(lambda leaf: leaf[i] if is_stacked(leaf) else leaf, stack)


def function(recipe):
    """A product of any function, with the weight first."""
    converted = jfp8.convert(lambda params, x: params["w"].T @ x, recipe, exempt=())
    params = {"w": uneven(128, 128)}
    stored = stored_for(recipe, params, kernels="w")["w"]
    yield jax.jit(converted)(params, jnp.eye(128)).T, stored, params["w"]


LAYERS = (linen_dense, linen_dense_general, nnx_einsum, experts, function)
DAILY = {("mxfp4", linen_dense), ("nvfp4", experts), ("block", nnx_einsum), ("mxfp4", function)}


@pytest.mark.parametrize(
    ("grid", "layer"),
    [
        pytest.param(
            g, f, marks=() if (g, f) in DAILY else pytest.mark.slow, id=f"{g}-{f.__name__}"
        )
        for g in RULES
        for f in LAYERS
    ],
)
def test_the_export_is_what_the_forward_pass_multiplied(grid, layer):
    for case in layer(QAT[grid]):
        assert_deployed(grid, *case)


def test_each_layer_has_its_grid():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = lambda name: nn.Dense(64, use_bias=False, name=name)(x)
            return {name: dense(name) for name in ("first", "second", "third")}

    recipes = {"first": None, "second": QAT["nvfp4"], "*": QAT["mxfp8"]}
    model, x = jfp8.convert(Model(), recipes, exempt=()), jnp.eye(64)
    params = {
        name: {"kernel": uneven(64, 64, seed=i)}
        for i, name in enumerate(("first", "second", "third"))
    }
    y = jax.jit(model.apply)({"params": params}, x)
    stored = stored_for(recipes, params)
    np.testing.assert_array_equal(y["first"], params["first"]["kernel"])
    np.testing.assert_array_equal(stored["first"]["kernel"], params["first"]["kernel"])
    for name, grid in (("second", "nvfp4"), ("third", "mxfp8")):
        assert_deployed(grid, y[name], stored[name]["kernel"], params[name]["kernel"])


@pytest.mark.parametrize("grid", ["mxfp4", "rowwise"])
def test_layers_in_bf16_quantize_what_they_cast(grid):
    recipe = QAT[grid]
    layer = jfp8.Dense(64, use_bias=False, dtype=jnp.bfloat16, recipe=recipe)
    params = {"kernel": uneven(128, 64)}
    stored = stored_for(recipe, {"layer": params}, dtype=jnp.bfloat16)["layer"]
    y = jax.jit(layer.apply)({"params": params}, jnp.eye(128))
    assert y.dtype == jnp.bfloat16
    values = stored["kernel"].dequantize()
    np.testing.assert_array_equal(y, values.astype(jnp.bfloat16))
    # Where scales are powers of two, a checkpoint in bf16 keeps every value.
    assert bool((values == values.astype(jnp.bfloat16)).all()) == (grid == "mxfp4")
    in_f32 = stored_for(recipe, {"layer": params})["layer"]
    assert not (in_f32["kernel"].dequantize() == values).all()


def test_adapters_train_on_the_deployed_weights():
    """LoRA: the gradient goes through the bytes that the forward pass multiplied."""
    layer, recipe = jfp8.Dense(64, use_bias=False, recipe=QAT["mxfp4"]), QAT["mxfp4"]
    kernel, x, dy = (
        uneven(64, 64),
        uneven(8, 64, seed=3),
        uneven(8, 64, seed=4),
    )
    stored = stored_for(recipe, {"layer": {"kernel": kernel}})["layer"]

    def loss(adapter):
        a, b = adapter
        x_in = x + x @ a @ b
        return jnp.vdot(layer.apply({"params": stored}, x_in), dy)

    a, b = uneven(64, 2, seed=5) / 64, uneven(2, 64, seed=6) / 64
    found = jax.jit(jax.grad(loss))((a, b))
    dx = np.asarray(dy, np.float64) @ fake_quantized("mxfp4", kernel).T
    d_b = np.asarray(x @ a, np.float64).T @ dx
    np.testing.assert_allclose(found[1], d_b, rtol=1e-5, atol=1e-5 * abs(d_b).max())
    assert np.linalg.norm(d_b - np.asarray(x @ a).T @ (dy @ kernel.T)) > 0.01 * np.linalg.norm(d_b)


# Accelerators: bf16 operands where that is exact.


@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
@grids
def test_bf16_products_are_exact(grid, kind):
    products = QAT[grid].products()
    kernel = uneven(128, 64)
    q = stored_for(QAT[grid], {"layer": {"kernel": kernel}})["layer"]["kernel"]
    summed = {"fprop": 0, "dgrad": 1}[kind]
    x = uneven(16, kernel.shape[summed], seed=3).astype(jnp.bfloat16)
    spec = MatmulSpec(
        (((1,), (summed,)), ((), ())),
        powers_of_two=getattr(products, kind).powers_of_two,
        device=Gpu("NVIDIA H100", (9, 0)),
    )
    run = jax.jit(lambda x, q: multiply_dequantized(x, q, spec))
    # A sum over output channels has a factor for each term.
    in_bf16 = (grid, kind) != ("rowwise", "dgrad")
    (dot,) = [
        e
        for e in jax.make_jaxpr(run)(x, q).eqns[0].params["jaxpr"].eqns
        if e.primitive.name == "dot_general"
    ]
    assert {v.aval.dtype for v in dot.invars} == {
        jnp.dtype(jnp.bfloat16 if in_bf16 else jnp.float32)
    }
    exact = [np.asarray(each, np.float64) for each in (x, q.dequantize())]
    exact[1] = exact[1] if summed == 0 else exact[1].T
    y, bound = exact[0] @ exact[1], abs(exact[0]) @ abs(exact[1])
    assert (abs(np.asarray(run(x, q)) - y) <= 140 * 2.0**-24 * bound).all()


def test_mistakes_of_recipes():
    with pytest.raises(
        ValueError, match=r"weights='int4'\): allowed are 'block', .*'nvfp4', a quan"
    ):
        QuantizationAware("int4")
    with pytest.raises(ValueError, match="weights=None"):
        QuantizationAware(None)
    with pytest.raises(ValueError, match="backward='bf16'.*allowed are 'dequantized', 'high_prec"):
        QuantizationAware(backward="bf16")
    for q in (Delayed(jfp8.E4M3FN), Current(jfp8.E4M3FN, rounding="stochastic")):
        with pytest.raises(ValueError, match="the values of a step could not be exported"):
            QuantizationAware(q)
    with pytest.raises(ValueError, match="give both blocks of 16"):
        QuantizationAware("mxfp4", "nvfp4")
    own = QuantizationAware(Blockwise(jfp8.E4M3FN, (128, 128)))
    assert own.products().fprop.rhs.scale_rounding is None
    assert jfp8.recipes.get("qat", weights="nvfp4") == QAT["nvfp4"]


def test_mistakes_with_operands_from_the_forward_product():
    q, again, plain = Current(jfp8.E4M3FN), FromForward(jfp8.E4M3FN), Product(None, None)
    PerOperand(Product(q, q), Product(None, again), Product(again, None))
    wrong = {
        "rhs": (Product(q, q), Product(q, again), plain),
        "grad": (Product(q, q), Product(again, None), plain),
        "lhs": (Product(q, q), plain, Product(dataclasses.replace(again, fmt=jfp8.E5M2), None)),
    }
    for role, products in wrong.items():
        with pytest.raises(ValueError, match=f"quantizers of {role} are .* is for dgrad.rhs and w"):
            PerOperand(*products)
    with pytest.raises(ValueError, match="quantizers of rhs are None and From"):
        PerOperand(Product(q, None), Product(None, again), plain)


def test_exports_that_would_have_other_values_are_refused():
    traced = lambda params, **how: jax.eval_shape(
        lambda: jfp8.quantize_params(params, "qat", **how)
    )
    out = {"out": {"kernel": jnp.ones((2, 64, 32))}}
    with pytest.raises(ValueError, match=r"'out', of shape \(2, 64, 32\).*contracting=\{"):
        traced(out)
    with pytest.raises(ValueError, match=r"stacked=, whose matrices must consist of whole blocks"):
        traced({"layers": {"kernel": jnp.ones((2, 40, 32))}}, stacked="layers")
    with pytest.raises(ValueError, match="cuts blocks"):
        traced({"out": {"kernel": jnp.ones((4, 24, 8))}}, contracting={"*": (0, 1)})
    with pytest.raises(ValueError, match="'in' matches no layer"):
        traced(out, contracting={"in": 0})


def test_a_kernel_that_was_quantized_along_another_dimension_is_refused():
    """Its values would be rounded again, to others. Oracle: `x @ w` in f32."""
    w = jax.random.normal(jax.random.key(0), (64, 32))
    params = jfp8.quantize_params({"a": {"kernel": w}}, "qat", contracting={"a": 1})
    q = params["a"]["kernel"]
    multiply = lambda x, d: jfp8.scaled_dot_general(x, q, (((1,), (d,)), ((), ())), recipe="qat")
    np.testing.assert_array_equal(multiply(jnp.eye(32), 1), np.asarray(q).T)
    with pytest.raises(ValueError, match=r"sums over its dimensions \(0,\), .* contracting=, or"):
        multiply(jnp.eye(64), 0)
