"""Two products as one operation, and operands that the kernel which quantizes them makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
from jfp8.kernels.elementary import elementary
from jfp8.kernels.quantize_and_transpose import Gradient, Made, quantize_both_ways
from jfp8.layers import transformer_math
from jfp8.layers.transformer_math import ACTIVATIONS, Activation, projections_of
from jfp8.products import mlp
from jfp8.products.mlp import make_all
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Context, Current, Delayed, Unit
from jfp8.scaling.scales import amax
from jfp8.tracing.devices import Gpu
from support.devices import needs_mosaic, pretend, traced_for

E4M3, E5M2 = jfp8.E4M3FN, jfp8.E5M2
NEW = {"amax_history": jnp.zeros(4), "amax": jnp.zeros(())}
SEEN = {"amax_history": jnp.array([3.0, 0.5, 0.0, 0.0]), "amax": jnp.array(7.0)}


def by_numpy(name, projections):
    """In float64, from the published formulas; projections are the last but one dimension."""
    x, *gates = np.moveaxis(np.asarray(projections, np.float64), -2, 0)
    f = {
        "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "relu": lambda x: np.maximum(x, 0),
        "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    }
    f |= {"geglu": f["gelu"], "swiglu": f["silu"], "reglu": f["relu"]}
    if name == "clamped_swiglu":
        x, gates = np.minimum(x, 7), [np.clip(gates[0], -7, 7) + 1]
        f[name] = lambda x: x / (1 + np.exp(-1.702 * x))
    return f[name](x) * np.prod(gates, axis=0)


def projections(name, m=100, n=150, dtype=jnp.bfloat16):
    x = np.random.default_rng(0).normal(size=(m, projections_of(name), n))
    return jnp.asarray(x * 2.0 ** np.random.default_rng(1).integers(-3, 3, size=(m, 1, 1)), dtype)


def cotangent(m=100, n=150, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(2).normal(size=(m, n)) / 8, dtype)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_for_kernels(name):
    """To the bit those of the layers; a NaN stays one."""
    x = projections(name).at[3, 0, 3].set(jnp.nan).at[4, 0, 4].set(-0.0)
    wide = [x[:, p].astype(jnp.float32) for p in range(x.shape[1])]
    for_kernels = elementary(Activation(name))
    found = jax.jit(for_kernels)(*wide).astype(x.dtype)
    layers = jax.jit(lambda x: transformer_math.activate(x, name))(x)
    found, layers = (np.asarray(y, np.float32) for y in (found, layers))
    np.testing.assert_array_equal(found, layers)
    np.testing.assert_allclose(found, by_numpy(name, x), rtol=5e-3, atol=1e-5)
    assert np.isnan(found[3, 3])
    assert "custom_jvp" not in str(jax.make_jaxpr(for_kernels)(*wide))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_for_kernels(name):
    """To the bit those of the layers, and the slopes of the published formulas."""
    x, dy = projections(name), cotangent()
    wide = [x[:, p].astype(jnp.float32) for p in range(x.shape[1])]
    for_kernels = elementary(Gradient(Activation(name)))
    parts = jax.jit(for_kernels)(*wide, dy.astype(jnp.float32))
    found = jnp.stack(parts, axis=1).astype(x.dtype)
    _, back = jax.vjp(lambda x: transformer_math.activate(x, name), x)
    np.testing.assert_array_equal(*(np.asarray(d, np.float32) for d in (found, *jax.jit(back)(dy))))
    step, exact = 1e-6, np.asarray(x, np.float64)
    for p in range(x.shape[1]):
        ahead, behind = exact.copy(), exact.copy()
        ahead[:, p] += step
        behind[:, p] -= step
        slope = (by_numpy(name, ahead) - by_numpy(name, behind)) / (2 * step)
        want = slope * np.asarray(dy, np.float64)
        np.testing.assert_allclose(np.asarray(found[:, p], np.float64), want, rtol=6e-3, atol=3e-5)
    assert "add_any" not in str(jax.make_jaxpr(for_kernels)(*wide, wide[0]))


@pytest.mark.representative(1)
@needs_mosaic
@pytest.mark.parametrize(
    ("quantizer", "state", "name"),
    [
        (Delayed(E4M3, length=4), SEEN, "swiglu"),
        (Delayed(E5M2, length=4), NEW, "gelu"),
        (Blockwise(E4M3, (128, 1), "power_of_two"), None, "swiglu"),
        (Blockwise(E4M3, (128, 128)), None, "swiglu"),
        (Blockwise(E4M3, (32, 1), "rceil"), None, "squared_relu"),
        (Unit(E5M2), None, "reglu"),
    ],
    ids=str,
)
def test_the_kernel_makes_it(quantizer, state, name):
    """The same bytes, scales and amaxes, without a look at the array."""
    x = projections(name)
    y = jax.jit(lambda x: transformer_math.activate(x, name))(x)
    assert_made(quantizer, state, y, Activation(name), x)


def assert_made(quantizer, state, y, make, *parts):
    """As the quantizer does of `parts`, without a race; a zero may have another sign."""
    from support.interpreter import no_races

    unknown = Made(jnp.full_like(y, jnp.nan), [*parts], make)

    @jax.jit
    def in_two_steps(y):
        largest = amax(y)
        along, across = (quantizer(y, Context((d,), largest, state)) for d in (1, 0))
        return along, across.T, largest

    with no_races():
        found = quantize_both_ways(quantizer, None, unknown, state)
    found = found._replace(amax=jnp.max(found.amax))
    if quantizer.block is not None:  # XLA takes it, if it is wanted
        found = found._replace(amax=amax(y))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(in_two_steps(y)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(*(np.asarray(v, np.float32) for v in (a, b)))


@pytest.mark.representative(2)
@needs_mosaic
@pytest.mark.parametrize(
    ("quantizer", "state", "name", "n", "special"),
    [
        (Delayed(E5M2, length=4), SEEN, "swiglu", 150, ()),
        (Delayed(E4M3, length=4), NEW, "geglu", 150, ()),
        (Blockwise(E5M2, (128, 1), "power_of_two"), None, "swiglu", 256, (np.nan, np.inf)),
        (Blockwise(E4M3, (128, 1)), None, "gelu", 150, ()),
        (Blockwise(E4M3, (32, 1), "rceil"), None, "reglu", 160, (np.nan, -np.inf)),
        (Blockwise(E4M3, (128, 128)), None, "swiglu", 128, ()),
        (Unit(E5M2), None, "squared_relu", 150, (np.nan,)),
    ],
    ids=str,
)
def test_the_kernel_makes_a_gradient(quantizer, state, name, n, special):
    """That of all projections, side by side; NaN and Inf show where XLA has them."""
    x, dy = projections(name, n=n), cotangent(n=n)
    for i, value in enumerate(special):
        x, dy = x.at[3 + i, 0, 5].set(value), dy.at[70, 7 + i].set(value)
    y, back = jax.vjp(lambda x: transformer_math.activate(x, name), x)
    assert y.shape == dy.shape
    (dx,) = jax.jit(back)(dy)
    assert_made(quantizer, state, dx.reshape(len(dx), -1), Gradient(Activation(name)), x, dy)


@needs_mosaic
@pytest.mark.parametrize(
    ("quantizer", "make"),
    [
        (Blockwise(E4M3, (128, 1)), Gradient(Activation("swiglu"))),
        (Current(E4M3), Activation("swiglu")),
    ],
    ids=["blocks that would mix projections", "an amax beforehand"],
)
def test_what_kernels_do_not_make_is_taken_as_an_array(quantizer, make):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parts = [projections("swiglu"), *([cotangent()] if isinstance(make, Gradient) else [])]
    array = jnp.ones((100, 150 * len(parts)), jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        found = quantize_both_ways(quantizer, None, Made(array, parts, make), None)
    np.testing.assert_array_equal(found.straight.dequantize(), array)


def noted_makes(monkeypatch):
    """What is made by kernels, as of now."""
    makes = set()

    def quantize(quantizer, dtype, x, *args):
        if isinstance(x, Made):
            makes.add(x.make)
        return quantize_both_ways(quantizer, dtype, x, *args)

    pretend(monkeypatch, Gpu("NVIDIA H200", (9, 0)))
    for module in ("k_major", "grouped_kernels"):
        monkeypatch.setattr(f"jfp8.kernels.{module}.quantize_both_ways", quantize)
    return makes


VALUE, GRADIENT = Activation("swiglu"), Gradient(Activation("swiglu"))
MADE = {"both": {VALUE, GRADIENT}, "value": {VALUE}, "nothing": set()}


@needs_mosaic
@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        ("linen", {}, "both"),
        ("linen", {"use_bias": True}, "value"),
        ("linen", {"saved_activations": E4M3}, "nothing"),
        ("linen", {"intermediate_dropout_rate": 0.5}, "nothing"),
        ("nnx", {}, "both"),
        ("nnx", {"use_bias": True}, "value"),
        ("nnx", {"intermediate_dropout_rate": 0.5}, "nothing"),
    ],
    ids=str,
)
def test_what_kernels_make(layer, options, expected, monkeypatch):
    """No gradient that a bias needs as well, and nothing where there is more in between."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    how = {"recipe": "block", "implementation": "mosaic_gpu", "dtype": jnp.bfloat16}
    how = {"activation": "swiglu", "use_bias": False, **how, **options}
    x = jnp.ones((128, 128), jnp.bfloat16)
    if layer == "linen":
        module = jfp8.LayerNormMLP(128, **how, deterministic=False)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = jax.eval_shape(module.init, keys, x)
        apply = lambda v, x: module.apply(v, x, rngs={"dropout": keys["dropout"]})
    else:
        model = nnx.eval_shape(lambda: jfp8.nnx.LayerNormMLP(128, 128, **how, rngs=nnx.Rngs(0)))
        graph, variables = nnx.split(model)
        apply = lambda v, x: nnx.merge(graph, v)(x)
    makes = noted_makes(monkeypatch)
    loss = lambda v, x: jnp.sum(apply(v, x).astype(jnp.float32))
    with plgpu.force_gpu_interpret_mode():
        jax.eval_shape(jax.grad(loss, argnums=(0, 1), allow_int=True), variables, x)
    assert makes == MADE[expected]


@needs_mosaic
def test_captured_intermediates_are_arrays(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    pretend(monkeypatch, Gpu("NVIDIA H200", (9, 0)))

    how = {"recipe": "block", "implementation": "mosaic_gpu", "dtype": jnp.bfloat16}
    layer = jfp8.LayerNormMLP(128, activation="swiglu", use_bias=False, **how)
    x = jnp.ones((128, 128), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    capture = lambda v, x: layer.apply(v, x, capture_intermediates=True, mutable=["intermediates"])
    with plgpu.force_gpu_interpret_mode():
        _, captured = jax.eval_shape(capture, variables, x)
    *_, (projections, _) = captured["intermediates"]["wi"]["__call__"]
    assert projections.shape == (128, 2, 128)


FUSED = {
    "linen, delayed": ("linen", "delayed", {}),
    "nnx, bias, current": ("nnx", "current", {"use_bias": True}),
    "linen, bias, block": ("linen", "block", {"use_bias": True}),
    "nnx, delayed": ("nnx", "delayed", {}),
    "MoE, delayed": ("moe", "delayed", {}),
    "MoE, block": ("moe", "block", {}),
    "nnx MoE, delayed": ("nnx moe", "delayed", {}),
}


def function_of(layer, recipe, options):
    """A layer as ``f(variables, x)``, which also returns what the call has recorded."""
    how = {"activation": "swiglu", "recipe": recipe, "dtype": jnp.bfloat16}
    x, key = jnp.ones((4, 32)), jax.random.key(0)
    if layer in ("linen", "moe"):
        how |= {"use_bias": False, **options} if layer == "linen" else {}
        module = jfp8.LayerNormMLP(48, **how) if layer == "linen" else jfp8.linen.MoE(2, 48, **how)
        variables = module.init(key, x)
        return lambda v, x: module.apply(v, x, mutable=["fp8"]), variables
    if layer == "nnx":
        how |= {"use_bias": False, **options}
        model = jfp8.nnx.LayerNormMLP(32, 48, **how, rngs=nnx.Rngs(0))
    else:
        model = jfp8.nnx.MoE(32, 2, 48, **how, rngs=nnx.Rngs(0))
    graph, variables = nnx.split(model)

    def apply(variables, x):
        model = nnx.merge(graph, variables, copy=True)
        return model(x), nnx.state(model, jfp8.nnx.Fp8State)

    return apply, variables


def transformed(apply, wrap):
    """A function of variables and of ``x[3, 8, 32]``, of the loss of `apply`."""

    def loss(v, x):
        y, recorded = apply(v, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), recorded

    def scanned(v, x):
        total = lambda total, x: (total + loss(v, x)[0], None)
        return jax.lax.scan(total, jnp.float32(0), x)[0], ()

    by_gradient = lambda f: jax.value_and_grad(f, argnums=(0, 1), has_aux=True, allow_int=True)
    batched = lambda f: jax.vmap(f, in_axes=(None, 0))
    return {
        "value": lambda v, x: apply(v, x[0]),
        "grad": lambda v, x: by_gradient(loss)(v, x[0]),
        "vmap of grad": batched(by_gradient(loss)),
        "remat": lambda v, x: by_gradient(jax.checkpoint(loss))(v, x[0]),
        "scan": by_gradient(scanned),
    }[wrap]


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("wrap", ["grad", "value", "vmap of grad", "remat", "scan"])
def test_one_operation_is_two_products(name, wrap, monkeypatch):
    """Bit for bit: the result, all gradients, those of sinks too, and what is recorded."""
    apply, variables = function_of(*FUSED[name])
    x = jax.random.normal(jax.random.key(1), (3, 8, 32), jnp.float32)
    want = jax.jit(transformed(apply, wrap))(variables, x)
    calls = []
    monkeypatch.setattr(transformer_math, "may_be_one_operation", lambda *_: True)
    monkeypatch.setattr(mlp, "make_all", lambda *args: calls.append(1) or make_all(*args))
    found = jax.jit(transformed(apply, wrap))(variables, x)
    assert calls
    for a, b in zip(*map(jax.tree.leaves, (want, found)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@needs_mosaic
def test_a_sequence_that_is_padded():
    """Each of 8 sequences is padded to 2,048 rows, so no kernel computes the activation."""
    how = {"activation": "swiglu", "use_bias": False, "dtype": jnp.bfloat16, "recipe": "delayed"}
    layer, x = jfp8.LayerNormMLP(128, **how), jax.ShapeDtypeStruct((8, 2047, 128), jnp.bfloat16)
    with traced_for("NVIDIA H200"):
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        loss = lambda x, variables: jnp.sum(layer.apply(variables, x))
        program = str(jax.make_jaxpr(jax.grad(loss))(x, variables))
    assert program.count("jfp8_quantize_tensor") > 3
