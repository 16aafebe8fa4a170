"""The mixture of experts against one that computes every expert for every token, and its parts."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import ScaledArray
from jfp8.layers.linen.moe import ExpertDense, MoE, Router
from jfp8.recipes.per_tensor import Float8CurrentScaling
from support.arrays import relative_error
from support.layers import fake

KEY = jax.random.key(5)
TOKENS, FEATURES, HIDDEN, EXPERTS = 36, 16, 24, 5


def tokens(shape=(TOKENS, FEATURES), seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# The oracle: every expert computes every token, and a mask picks what counts.


def in_f32(x, w, mask):
    """``y_t = sum_e mask_te x_t . w_e``: [t, k], [g, k, n], [t, g] -> [t, n]."""
    return jnp.einsum("tk,gkn,tg->tn", x, w, mask, precision="highest")


expert_products = fake(in_f32, of_rhs=jax.vmap)


@functools.partial(jax.jit, static_argnames=("k", "activation", "renormalize", "product"))
def oracle(params, x, k, activation, *, renormalize, product=expert_products):
    """``(y, load-balancing loss)``; a copy of a token for each of its choices."""
    p = jax.nn.softmax(jnp.dot(x, params["router"]["kernel"], precision="highest"))
    wi, wo = params["wi"]["kernel"], params["wo"]["kernel"]
    groups = wi.shape[0]
    best = jnp.argsort(-p, axis=-1)[:, :k]
    chosen = jax.nn.one_hot(best, groups)
    weights = jnp.sum(chosen * p[:, None, :], axis=-1)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    mask = chosen.reshape(-1, groups)
    copies = jnp.repeat(x, k, axis=0)
    hidden = product(copies, wi, mask)
    if activation == "swiglu":
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = jax.nn.silu(gate) * up
    else:
        hidden = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}[activation](hidden)
    y = product(hidden, wo, mask).reshape(x.shape[0], k, -1)
    fractions = jnp.mean(mask, axis=0)
    loss = groups * jnp.sum(jax.lax.stop_gradient(fractions) * jnp.mean(p, axis=0))
    return jnp.sum(y * weights[..., None], axis=1), loss


@functools.cache
def made(**fields):
    model = MoE(EXPERTS, HIDDEN, **{"recipe": Float8CurrentScaling(), **fields})
    return model, jax.jit(model.init)(KEY, jnp.ones((2, FEATURES)))["params"]


@functools.cache
def applied(model):
    """``(params, x) -> y``, compiled once for each shape."""
    return jax.jit(lambda params, x: model.apply({"params": params}, x))


@pytest.mark.representative(1)
@pytest.mark.parametrize(("k", "activation"), [(2, "swiglu"), (1, "relu")])
def test_block_is_that_of_every_expert_for_every_token(k, activation):
    """y, the loss, and the gradients of both by all parameters and the tokens."""
    model, params = made(
        num_experts_per_token=k, activation=activation, return_load_balancing_loss=True
    )
    x, dy = tokens(), tokens(seed=1)

    @functools.partial(jax.jit, static_argnums=0)
    def run(f, params, x):
        (y, loss), vjp = jax.vjp(f, params, x)
        return y, loss, vjp((dy, jnp.float32(3.0)))

    y, loss, gradients = run(lambda p, x: model.apply({"params": p}, x), params, x)
    y_expected, loss_expected, expected = run(
        lambda p, x: oracle(p, x, k, activation, renormalize=k > 1), params, x
    )
    # A hidden value at a tie of the rounding may go the other way, by a step of 2^-4 at most.
    assert relative_error(y, y_expected) < 2e-3
    assert float(loss) == pytest.approx(float(loss_expected), rel=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 4e-3
    exact, _ = oracle(params, x, k, activation, renormalize=k > 1, product=in_f32)
    assert 0.01 < relative_error(y, exact) < 0.1


def test_a_disabled_region_computes_in_high_precision():
    """Of tokens with any leading dimensions."""
    model, params = made()
    x = tokens()
    with jfp8.autocast(enabled=False):
        y = applied(model)(params, x.reshape(2, 3, -1, FEATURES)).reshape(x.shape)
    exact, _ = oracle(params, x, 2, "swiglu", renormalize=True, product=in_f32)
    assert relative_error(y, exact) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_router_computes_in_high_precision(dtype):
    """Logits that differ by 2^-11 of their size are told apart, beside a token of outliers."""
    kernel = np.zeros((FEATURES, EXPERTS), np.float32)
    kernel[0, :2] = 1.0, 1.0 + 2.0**-11
    x = np.full((4, FEATURES), 8.0, dtype)
    x[0, 1:] = 1e6
    router = Router(EXPERTS, 1, nn.initializers.zeros)
    routed = jax.jit(router.apply)({"params": {"kernel": kernel}}, x)
    assert routed.experts.tolist() == [[1]] * 4
    logits = np.float64([8.0, 8 * (1 + 2.0**-11), 0, 0, 0])
    expected = np.exp(logits) / np.sum(np.exp(logits))
    np.testing.assert_allclose(routed.probabilities, np.tile(expected, (4, 1)), rtol=2e-6)


def leaves_called(tree, name):
    return {
        "/".join(str(getattr(k, "key", k)) for k in path[:-1]): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(path[-1], "key", None) == name
    }


def test_variables():
    variables = jax.eval_shape(MoE(EXPERTS, HIDDEN).init, KEY, jnp.ones((2, FEATURES)))
    shapes = jax.tree.map(lambda leaf: leaf.shape, variables["params"])
    assert shapes == {
        "router": {"kernel": (FEATURES, EXPERTS)},
        "wi": {"kernel": (EXPERTS, FEATURES, 2 * HIDDEN)},
        "wo": {"kernel": (EXPERTS, HIDDEN, FEATURES)},
    }
    assert sorted(variables) == ["fp8", "fp8_sink", "params"]
    paths = [f"{layer}/RaggedDot_0" for layer in ("wi", "wo")]
    assert sorted(leaves_called(variables["fp8_sink"], "amax")) == paths
    expected = sorted(f"{path}/{role}" for path in paths for role in ("grad", "lhs", "rhs"))
    assert sorted(leaves_called(variables["fp8"], "amax_history")) == expected


@pytest.mark.slow
def test_each_expert_starts_like_a_dense_layer_of_its_own():
    layer = ExpertDense(64, 32)
    init = jax.jit(layer.init)
    kernel = init(KEY, jnp.ones((64, 50)), jnp.ones((64,), jnp.int32))["params"]["kernel"]
    deviations = np.std(np.asarray(kernel), axis=(1, 2)) * np.sqrt(50)
    np.testing.assert_allclose(deviations, 1.0, atol=0.1)
    flat = np.asarray(kernel).reshape(64, -1)
    assert np.max(np.abs(np.corrcoef(flat) - np.eye(64))) < 0.15


def test_partitioned_kernels():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
    model = MoE(EXPERTS, HIDDEN, kernel_init=init)
    shapes = jax.eval_shape(model.init, KEY, jnp.ones((2, FEATURES)))
    specs = nn.get_partition_spec(shapes)["params"]
    assert tuple(specs["wi"]["kernel"]) == (None, "model", None)
    assert shapes["params"]["wi"]["kernel"].value.shape == (EXPERTS, FEATURES, 2 * HIDDEN)


def test_stored_kernels():
    """Kernels of bytes, one scale for each expert, give what their values give."""
    model, params = made()
    x = tokens()
    stored = {
        name: {"kernel": jfp8.quantize(params[name]["kernel"], granularity=jfp8.PerAxis(0))}
        for name in ("wi", "wo")
    }
    assert all(isinstance(layer["kernel"], ScaledArray) for layer in stored.values())
    y = applied(model)({**params, **stored}, x)
    np.testing.assert_allclose(y, applied(model)(params, x), rtol=1e-5, atol=1e-6)


def test_saved_activations():
    """The same result; the gradient moves by what one byte for an activation's input costs."""
    (model, params), x = made(), tokens()
    saving = model.clone(saved_activations=jfp8.E4M3FN)

    @jax.jit
    def run(params):
        loss = lambda params, model: (jnp.sum((y := model.apply({"params": params}, x)) ** 2), y)
        return [jax.grad(loss, has_aux=True)(params, each) for each in (saving, model)]

    (ours, y), (theirs, expected) = run(params)
    np.testing.assert_array_equal(y, expected)
    assert 0 < relative_error(ours["wi"]["kernel"], theirs["wi"]["kernel"]) < 0.1


@pytest.mark.slow
def test_errors():
    x = jnp.ones((2, FEATURES))
    with pytest.raises(ValueError, match="activation must be one of 'gelu', .*; got 'tanh'"):
        MoE(EXPERTS, HIDDEN, activation="tanh").init(KEY, x)
    with pytest.raises(ValueError, match="experts_per_token=6 must be from 1 to"):
        MoE(EXPERTS, HIDDEN, num_experts_per_token=6).init(KEY, x)
