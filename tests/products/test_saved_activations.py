"""Activations saved in FP8, against ml_dtypes and derivatives written out in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.layers import transformer_math
from jfp8.products.saved_activations import BLOCK, keeping_inputs, save_in_fp8
from jfp8.products.vjp import SAVED
from support.arrays import device_normal as normal

KEY = jax.random.key(3)


def sqnr(y, reference) -> float:
    """Decibels of `reference` above the error of `y`."""
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return float(20 * np.log10(np.linalg.norm(reference) / np.linalg.norm(reference - y)))


def rmsnorm(x, scale):
    scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return x * scale / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


def kept_by(f, *args) -> list[jax.Array]:
    """What the backward pass of `f` holds on to."""
    return jax.tree.leaves(jax.jit(lambda *args: jax.vjp(f, *args)[1])(*args))


# The oracle: codes and scales by ml_dtypes, and derivatives of two functions.


def blocks_of(x: np.ndarray, block: int) -> list[np.ndarray]:
    return np.split(x, range(block, x.shape[-1], block), axis=-1)


def oracle(x, dtype, largest, block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, bf16 scales, and the values that they stand for."""
    codes, scales, values = [], [], []
    for part in blocks_of(np.asarray(x, np.float32), block):
        amax = np.abs(part).max(-1, keepdims=True)
        scale = np.where(amax > 0, amax / np.float32(largest), 1).astype(ml_dtypes.bfloat16)
        inverse = np.float32(1) / scale.astype(np.float32)
        data = np.clip(part * inverse, -largest, largest).astype(dtype)
        codes.append(data.view(np.uint8))
        scales.append(scale)
        values.append(data.astype(np.float32) * scale.astype(np.float32))
    return tuple(np.concatenate(parts, -1) for parts in (codes, scales, values))


def silu_vjp(x, dy) -> np.ndarray:
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    sigmoid = 1 / (1 + np.exp(-x))
    return dy * sigmoid * (1 + x * (1 - sigmoid))


def rmsnorm_vjp(x, scale, dy) -> tuple[np.ndarray, np.ndarray]:
    x, scale, dy = (np.asarray(a, np.float64) for a in (x, scale, dy))
    rms = np.sqrt(np.mean(x**2, -1, keepdims=True))
    unit, g = x / rms, dy * scale
    dx = (g - unit * np.mean(g * unit, -1, keepdims=True)) / rms
    return dx, (dy * unit).reshape(-1, x.shape[-1]).sum(0)


FORMATS = {"E4M3FN": (ml_dtypes.float8_e4m3fn, 448.0), "E5M2": (ml_dtypes.float8_e5m2, 57344.0)}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("shape", "block"), [((2, 3, 80), 32), ((5, 20), 128), ((40,), 8)])
def test_the_codes_kept_are_those_of_ml_dtypes(shape, block, fmt):
    x = normal(shape, 1) * jnp.exp(2 * normal(shape, 2))
    x = x.at[..., -block:].set(0) if shape[-1] > block else x
    g = save_in_fp8(jax.nn.silu, fmt=getattr(jfp8, fmt), block=block)
    codes, scale = kept_by(g, x)
    expected = oracle(x, *FORMATS[fmt], block)
    assert (codes.dtype, scale.dtype) == (jnp.uint8, jnp.bfloat16)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scale, expected[1])
    assert np.any(codes)


@pytest.mark.representative(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(6, 96), (2, 3, 80), (40,)])
def test_gradients_are_those_at_what_was_kept(shape, fmt):
    x, dy = normal(shape, 1), normal(shape, 2)
    scale = 1 + 0.1 * normal((shape[-1],), 3)
    *_, kept = oracle(x, *FORMATS[fmt], BLOCK)
    how = {"fmt": getattr(jfp8, fmt)}
    (dx,) = jax.jit(lambda x, dy: jax.vjp(save_in_fp8(jax.nn.silu, **how), x)[1](dy))(x, dy)
    np.testing.assert_allclose(dx, silu_vjp(kept, dy), rtol=2e-5, atol=1e-6)
    ours = jax.jit(lambda x, s, dy: jax.vjp(save_in_fp8(rmsnorm, **how), x, s)[1](dy))
    for grad, expected in zip(ours(x, scale, dy), rmsnorm_vjp(kept, scale, dy), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=2e-5, atol=1e-5)
    exact = rmsnorm_vjp(x, scale, dy)[0]
    assert not np.allclose(ours(x, scale, dy)[0], exact, rtol=1e-4, atol=1e-4), "the oracle tells"


def test_a_layer_keeps_the_codes_of_the_format_that_it_names():
    x = normal((4, 64))
    e4m3, e5m2 = (kept_by(keeping_inputs(jnp.sin, fmt), x) for fmt in (jfp8.E4M3FN, jfp8.E5M2))
    assert [a.tobytes() for a in map(np.asarray, e4m3)] != [
        a.tobytes() for a in map(np.asarray, e5m2)
    ]
    for a, b in zip(e5m2, kept_by(save_in_fp8(jnp.sin, fmt=jfp8.E5M2), x), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.representative(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_forward_pass_does_not_change(dtype, compiled):
    x, scale = normal((8, 96), dtype=dtype), normal((96,), 1, dtype=dtype)
    transform = jax.jit if compiled else lambda f: f
    for f, args in ((jax.nn.gelu, (x,)), (rmsnorm, (x, scale))):
        g = save_in_fp8(f)
        y = transform(g)(*args)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, transform(f)(*args))
        differentiated, vjp = jax.vjp(g, *args)
        np.testing.assert_array_equal(differentiated, f(*args))
        assert [d.dtype for d in vjp(y)] == [a.dtype for a in args]


def test_trap_f8_arrays_are_widened_in_loops():
    """XLA:CPU stores them as f16 across a loop: what is stacked are uint8."""
    g = save_in_fp8(jax.nn.silu)

    def loss(x):
        return jnp.sum(jax.lax.scan(lambda c, _: (g(c) + c, None), x, None, length=8)[0])

    hlo = jax.jit(jax.grad(loss)).lower(normal((16, 64))).compile().as_text()
    assert "u8[8,16,64]" in hlo
    assert not any(f"{wide}[8,16,64]" in hlo for wide in ("f8e4m3fn", "f16", "bf16", "f32"))


@pytest.mark.slow
def test_trap_outliers_take_the_scale_of_their_neighbors():
    """A few channels of a residual stream are a hundred times the others.

    Such an outlier is most of its row's mean square: kept with the 3 % of E4M3 it would turn all
    gradients of its row. As the largest of its block it is kept to the rounding of a bf16 scale.
    """
    x = normal((64, 256), 1).at[:, ::64].set(100 + normal((64, 4), 3))
    codes, scale = kept_by(save_in_fp8(jax.nn.silu), x)
    values = np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = values * np.repeat(np.asarray(scale, np.float32), BLOCK, -1)
    np.testing.assert_allclose(values[:, ::64], x[:, ::64], rtol=2.0**-8)
    assert np.abs(values[:, ::64] / x[:, ::64] - 1).max() > 0, "it is rounded at all"
    dy, ones = normal((64, 256), 2), jnp.ones(256)
    dx, d_scale = jax.vjp(save_in_fp8(rmsnorm), x, ones)[1](dy)
    exact = rmsnorm_vjp(x, ones, dy)
    assert sqnr(dx, exact[0]) > 50
    assert sqnr(d_scale, exact[1]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [jfp8.E4M3FN, jfp8.E5M2, jfp8.E3M4, jfp8.E2M1FN], ids=repr)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_gradient(bad, fmt):
    """Where `f` itself would hide it: tanh has no slope at infinity."""
    x = normal((4, 64)).at[2, 5].set(bad)
    dx = jax.jit(jax.grad(lambda x: jnp.sum(save_in_fp8(jnp.tanh, fmt=fmt)(x))))(x)
    assert np.isnan(dx[2, 5])
    assert np.isfinite(np.delete(np.asarray(dx), 2, axis=0)).all()
    assert np.isfinite(dx[2, BLOCK:]).all()


def masked(x, key, tree, mask):
    noise = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(mask & noise, jnp.sin(x) * tree["w"][0], tree["b"])


@pytest.mark.slow
def test_the_rest_is_any_tree_and_kept_exactly():
    x, mask = normal((6, 64)), normal((6, 64), 1) > 0
    tree = {"w": (1 + normal((1, 64), 2), None), "b": normal((6, 64), 3)}
    *_, kept = oracle(x, *FORMATS["E4M3FN"], BLOCK)
    loss = lambda f, x, tree: jnp.sum(jnp.cos(f(x, KEY, tree, mask)))
    grad = lambda f, x: jax.grad(loss, argnums=2)(f, x, tree)
    ours, expected = grad(save_in_fp8(masked), x), jax.grad(loss, argnums=(1, 2))(masked, x, tree)
    # The cosine is of the exact result; the slope by `w` is what `x` was kept as.
    np.testing.assert_array_equal(ours["b"], expected[1]["b"])
    dy = jax.grad(lambda y: jnp.sum(jnp.cos(y)))(masked(x, KEY, tree, mask))
    by_w = jax.vjp(lambda tree: masked(jnp.asarray(kept), KEY, tree, mask), tree)[1](dy)[0]
    np.testing.assert_allclose(ours["w"][0], by_w["w"][0], rtol=1e-5, atol=1e-5)
    assert sqnr(ours["w"][0], expected[1]["w"][0]) < 60, "it is not that of x itself"


@pytest.mark.slow
def test_transformations_keep_to_the_loop():
    """scan, remat and jit of the same layers, with keys and masks, give the same gradient."""
    g = save_in_fp8(masked)
    keys = jax.random.split(KEY, 3)
    tree = {"w": (1 + normal((3, 1, 64), 2), None), "b": normal((3, 1, 1), 3)}

    def loop(x, tree):
        for i in range(3):
            x = x + g(x, keys[i], jax.tree.map(lambda a, i=i: a[i], tree), x > 0)
        return jnp.sum(x**2)

    def layer(x, xs):
        key, tree = xs
        return x + g(x, key, tree, x > 0), None

    def scan(layer, x, tree):
        return jnp.sum(jax.lax.scan(layer, x, (keys, tree))[0] ** 2)

    x = normal((6, 64))
    both = lambda f: jax.jit(jax.grad(f, argnums=(0, 1)))(x, tree)
    expected = jax.grad(loop, argnums=(0, 1))(x, tree)
    assert np.linalg.norm(expected[0]) > 1
    for transformed in (layer, jax.checkpoint(layer)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            both(functools.partial(scan, transformed)),
            expected,
        )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sharded", ["first", "rest"])
def test_shard_map(sharded, check_vma):
    """The gradient of what is replicated is summed over the devices, as it is without."""
    g = save_in_fp8(lambda x, w: x * jnp.tanh(x * w))
    x, w = (
        normal((8 if sharded == "first" else 1, 64)),
        normal((1 if sharded == "first" else 8, 64)),
    )
    specs = (P("data"), P()) if sharded == "first" else (P(), P("data"))
    loss = lambda x, w: jnp.sum(jnp.sin(g(x, w)))

    def on_mesh(x, w):
        shard = lambda x, w: jax.lax.psum(loss(x, w), "data")
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(
            x, w
        )

    ours = jax.jit(jax.grad(on_mesh, argnums=(0, 1)))(x, w)
    for a, b in zip(ours, jax.grad(loss, argnums=(0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert np.linalg.norm(a) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("given", "name"), [({}, SAVED), ({"name": "another"}, "another")])
def test_policies_of_checkpoint_keep_the_codes_by_their_name(given, name):
    block = lambda x, w: x + save_in_fp8(jax.nn.silu, **given)(x @ w) @ w
    x, w = normal((32, 64)), normal((64, 64), 1) / 8
    for named in (name, "a third"):
        policy = jax.checkpoint_policies.save_only_these_names(named)
        kept = kept_by(jax.checkpoint(block, policy=policy), x, w)
        codes = [a for a in kept if (a.dtype, a.shape) == (jnp.uint8, x.shape)]
        assert len(codes) == (named == name)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_are_refused():
    g, x = save_in_fp8(jnp.tanh), normal((64,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(g, (x,), (x,))
    gradient = jax.grad(lambda x: jnp.sum(g(x)))
    with pytest.raises(TypeError, match="Second derivatives of what save_in_fp8 returns"):
        jax.grad(lambda x: jnp.sum(gradient(x)))(x)


def test_a_closure_over_traced_arrays_is_refused():
    x = normal((64,))

    def by_closure(w):
        return jnp.sum(save_in_fp8(lambda x: x * w)(x))

    words = r"reads arrays that are not its arguments, \['.*float32\[64\]'\].*Make them arguments"
    with pytest.raises(ValueError, match=words):
        jax.grad(by_closure)(jnp.ones(64))

    def body(c, _):
        mask = c > 0
        return save_in_fp8(lambda x: jnp.where(mask, x * x, 0))(c), None

    with pytest.raises(ValueError, match=r"bool\[64\]"):
        jax.grad(lambda x: jnp.sum(jax.lax.scan(body, x, None, length=2)[0]))(x)
    constant = np.arange(64, dtype=np.float32)
    dx = jax.grad(lambda x: jnp.sum(save_in_fp8(lambda x: x * constant)(x)))(x)
    np.testing.assert_array_equal(dx, constant)


@pytest.mark.parametrize(
    ("how", "x", "error", "words"),
    [
        ({"fmt": 8}, None, TypeError, "fmt must be a jfp8.Format.*got 8"),
        ({"fmt": jfp8.E8M0FNU}, None, TypeError, "with a sign.*E8M0FNU"),
        ({"block": 0}, None, ValueError, "a positive number of elements, like 32; got 0"),
        ({"block": True}, None, ValueError, "got True"),
        ({}, jnp.arange(3), TypeError, "x has dtype int32"),
        ({}, jnp.float32(1), ValueError, "x has no dimension.*Leave save_in_fp8 out"),
    ],
)
def test_mistakes_are_explained(how, x, error, words):
    with pytest.raises(error, match=words):
        save_in_fp8(jnp.tanh, **how)(x)


@pytest.mark.slow
def test_attention_keeps_no_weights():
    """Of queries, keys and values there are fewer than of weights: H * T^2 of them."""
    query, key, value = (normal((2, 48, 4, 8), i) for i in range(3))
    how = {"is_causal": True}

    def attend(query, key, value, saved=None):
        operands = query[..., None, :], jnp.stack([key, value], -2)
        how["saved_activations"] = saved
        return transformer_math.projected_attention(*operands, **how)[0]

    saving = functools.partial(attend, saved=jfp8.E4M3FN)
    kept = kept_by(saving, query, key, value)
    large = sorted((a.dtype.name, a.size) for a in kept if a.size >= query.size)
    assert large == [("float32", query.size), ("float32", key.size), ("uint8", value.size)]
    for attend_by in (attend, saving):
        assert max(a.size for a in kept_by(attend_by, query, key, value)) < 2 * 4 * 48**2
    np.testing.assert_array_equal(saving(query, key, value), attend(query, key, value))
    dy = normal((2, 48, 4, 8), 4)
    ours, exact = (jax.vjp(f, query, key, value)[1](dy) for f in (saving, attend))
    # The weights are exact, and with them the gradient of the values; the others are not.
    np.testing.assert_allclose(ours[2], exact[2], rtol=1e-5, atol=1e-6)
    assert 25 < sqnr(ours[0], exact[0]) < 60
    assert 25 < sqnr(ours[1], exact[1]) < 60
