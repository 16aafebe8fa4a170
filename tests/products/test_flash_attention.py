"""Attention in FP8: against attention without it, exact sums of its own bytes, its promises."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import E4M3FN, E5M2, recipes
from jfp8.products.flash import dot_product
from jfp8.products.flash.numerics import Numerics, numerics_of, quantize_tokens
from jfp8.scaling import init_sink
from jfp8.tracing.compat import jaxprs_of
from support.arrays import relative_error
from support.models import gradients_of

ATTENTION = jfp8.scaled_dot_product_attention
RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4", "hybrid", "direct_e5m2")


def operands(batch=2, queries=150, keys=150, heads=4, kv_heads=2, depth=16, seed=0):
    """Q, K, V and the gradient of the result."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, queries, heads, depth), *[(batch, keys, kv_heads, depth)] * 2]
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in (*shapes, shapes[0])]


class Unrounded(Numerics):
    """Quantize nothing, but compute block by block."""


def with_gradients(function, *arrays, grad):
    return jax.jit(gradients_of(function))(*arrays, grad)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": (5, 140)},
    "causal window": {"local_window_size": 20, "is_causal": True},
    "lengths": {"key_value_seq_lengths": jnp.array([40, 150])},
    "mask": {"mask": "rows"},
    "bias": {"bias": "of a batch", "is_causal": True},
    "bias of heads": {"bias": "heads"},
}


OFTEN = ("bias",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in OFTEN else pytest.mark.slow)
        for case in (*CASES, "few queries", "no batch")
    ],
)
def test_without_rounding_it_is_attention(case, monkeypatch):
    """No operand quantized, against JAX's own: result and all gradients, to f32."""
    monkeypatch.setattr(dot_product, "numerics_of", lambda recipe: Unrounded())
    rng = np.random.default_rng(1)
    options = dict(CASES.get(case, {}))
    q, k, v, grad = operands(queries=3 if case == "few queries" else 150)
    t, s = q.shape[1], k.shape[1]
    if case == "mask":
        options["mask"] = jnp.asarray(rng.random((2, 1, t, s)) < 0.3).at[..., 0].set(True)
    shape = {"of a batch": (1, 4, t, s), "heads": (1, 4, 1, s)}.get(options.pop("bias", None))
    arrays = [q, k, v] if shape is None else [q, k, v, jnp.asarray(rng.normal(size=shape), "f4")]
    if case == "no batch":
        arrays, grad = [x[0] for x in arrays], grad[0]
    ours = jax.jit(functools.partial(ATTENTION, **options))
    found = with_gradients(ours, *arrays, grad=grad)
    reference = functools.partial(jax.nn.dot_product_attention, **options)
    expected = with_gradients(reference, *arrays, grad=grad)
    assert len(found) == 1 + len(arrays)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Sums of up to 150 products of numbers near 1, and a softmax in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(1, float(jnp.abs(b).max())))


def blockwise(q, k, v, q_scale, k_scale, v_scale, scale):
    """One head, causal, in f64: the equations of a block, with the rounding of ml_dtypes."""
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        m, total, o = -np.inf, 0.0, np.zeros(v.shape[1])
        for j in range(0, i + 1, 128):
            seen = slice(j, min(j + 128, i + 1))
            s = (k[seen] @ q[i]) * q_scale[i] * scale * k_scale[seen]
            largest = max(m, s.max())
            p, before = np.exp(s - largest), np.exp(m - largest)
            of_row = v_scale[seen].max()
            w = (p * v_scale[seen] / of_row * 256).astype(ml_dtypes.float8_e4m3fn)
            o = o * before + (w.astype(np.float64) @ v[seen]) * of_row / 256
            m, total = largest, total * before + p.sum()
        out[i] = o / total
    return out


def test_the_equations_of_a_block():
    q, k, v, _ = operands(batch=1, queries=300, keys=300, heads=1, kv_heads=1, depth=64)
    v = v * 2.0 ** np.random.default_rng(2).integers(-4, 5, (1, 300, 1, 1))  # scales that differ
    v = v.at[:, 7].set(0)
    y = jax.jit(functools.partial(ATTENTION, is_causal=True, recipe="mxfp8"))(q, k, v)[0, :, 0]
    tokens = lambda x, folded: quantize_tokens(
        x[0, :, 0], recipes.MXFP8BlockScaling().resolved().fprop.lhs, None, folded=folded
    )
    stored = [tokens(q, False), tokens(k, False), tokens(v, True)]
    data = [np.asarray(x.data).astype(np.float64) for x in stored]
    scales = [np.asarray(x.scale, np.float64) for x in stored]
    # The stored bytes, by ml_dtypes: scales are amax / 448. Those of values alone are rounded up to
    # 2^n, also where the recipe rounds those of its blocks.
    up = lambda scale: 2.0 ** np.ceil(np.log2(scale))
    for x, found, s, rounded in zip((q, k, v), data, scales, (np.array,) * 2 + (up,), strict=True):
        x = np.asarray(x[0, :, 0], np.float32)
        largest = np.abs(x).max(1)
        exact = np.where(largest > 0, largest / np.float32(448), 1)
        s = np.where(largest > 0, s, 1)
        np.testing.assert_array_equal(s, rounded(exact))
        inverse = (1 / s.astype(np.float32)).astype(np.float32)[:, None]
        np.testing.assert_array_equal(
            found, (x * inverse).astype(ml_dtypes.float8_e4m3fn).astype(float)
        )
    expected = blockwise(*data, *scales, 1 / 8)
    # A weight whose exponential differs in its last place may round to the next of 16 values.
    assert relative_error(y, expected) < 1e-3
    np.testing.assert_allclose(y, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    in_f64 = np.asarray(jax.nn.dot_product_attention(q, k, v, is_causal=True)[0, :, 0])
    assert relative_error(y, in_f64) > 0.01  # it did round


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=() if r == "nvfp4" else pytest.mark.slow) for r in RECIPES]
)
def test_nothing_of_a_later_token_or_another_sequence_shows(recipe):
    """To the bit, whatever the later tokens are; in the other direction it does show."""
    q, k, v, _ = operands(queries=200, keys=200)
    f = jax.jit(functools.partial(ATTENTION, is_causal=True, recipe=recipe))
    y = f(q, k, v)
    for changed in (
        [x.at[:, 140:].multiply(1e4) for x in (q, k, v)],
        [x.at[:, 140:].set(0) for x in (q, k, v)],
    ):
        other = f(*changed)
        np.testing.assert_array_equal(other[:, :140], y[:, :140])
        assert np.all(np.any(np.asarray(other[:, 140:] != y[:, 140:]), axis=(2, 3)))
    other = f(*(x.at[1].multiply(1e4) for x in (q, k, v)))
    np.testing.assert_array_equal(other[0], y[0])
    assert np.any(np.asarray(other[1] != y[1]))


def test_attention_has_no_weights():
    """A recipe for weights alone leaves it in high precision; one for activations does not."""
    assert numerics_of(recipes.QuantizationAware()) == Numerics()
    found = numerics_of(recipes.QuantizationAware("mxfp8", "mxfp8"))
    assert (found.weights, found.scores) == ((E4M3FN, None), (None, None))


ATTENDING = [recipe for recipe in recipes.RECIPES if recipe is not recipes.QuantizationAware]


@pytest.mark.parametrize("recipe", ATTENDING, ids=lambda recipe: recipe.name)
def test_every_recipe_has_formats_for_attention(recipe):
    found = numerics_of(recipe())
    forward = E5M2 if recipe.name == "direct_e5m2" else E4M3FN
    backward = E5M2 if recipe.name in ("direct_e5m2", "hybrid", "unscaled") else E4M3FN
    assert found.weights == (forward, forward)
    assert found.scores == (backward, backward)


def states(recipe):
    return {which: recipe.init_state() for which in ("scores", "context")}


def test_histories():
    """Scales of an earlier step: larger values saturate. The sink brings exact amaxes back."""
    recipe = recipes.DelayedScaling(amax_history_len=4)
    q, k, v, grad = operands(queries=20, keys=30)
    sink = {"scores": init_sink(), "context": init_sink()}
    f = jax.jit(
        lambda q, k, v, state, sink: ATTENTION(q, k, v, recipe=recipe, state=state, sink=sink)
    )
    state = states(recipe)
    y, back = jax.vjp(lambda q, k, v, sink: f(q, k, v, state, sink), q, k, v, sink)
    *_, d_sink = back(grad)
    np.testing.assert_array_equal(y, f(q, k, v, None, None))  # no history yet
    advanced = jfp8.advance(state, {which: {"amax": row} for which, row in d_sink.items()})
    largest = lambda which, role: float(advanced[which][role]["amax_history"].max())
    amax = lambda x: float(jnp.abs(x).max())
    assert largest("scores", "lhs") == amax(q)
    assert largest("scores", "rhs") == amax(k)
    assert largest("context", "rhs") == amax(v)
    assert largest("context", "grad") == amax(grad)
    assert largest("context", "lhs") == 1
    clipped = f(q, k, 100 * v, advanced, sink)
    assert amax(clipped) <= 2 * amax(v)  # the scale of V is the next power of two
    assert amax(f(q, k, 100 * v, state, sink)) > 10 * amax(v)


def test_a_causal_query_sees_itself():
    """And the first query nothing else: its result is its value, rounded."""
    q, k, v, _ = operands(queries=3, keys=3, kv_heads=4)
    y = jax.jit(functools.partial(ATTENTION, is_causal=True, recipe="rowwise"))(q, k, v)
    assert 0 < relative_error(y[:, 0], v[:, 0]) < 2**-4
    assert relative_error(y[:, 1], v[:, 1]) > 0.1


@pytest.mark.parametrize("recipe", ["current", None])
def test_a_query_without_keys_gives_zero(recipe):
    q, k, v, grad = operands(queries=20, keys=30)
    mask = jnp.ones((1, 1, 20, 30), bool).at[:, :, 3].set(False)
    f = jax.jit(functools.partial(ATTENTION, mask=mask, recipe=recipe))
    y, *gradients = with_gradients(f, q, k, v, grad=grad)
    assert not np.any(np.asarray(y[:, 3]))
    assert np.all(np.any(np.asarray(y[:, :3]) != 0, axis=(2, 3)))
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)
    assert not np.any(np.asarray(gradients[0][:, 3]))


def test_tokens_without_gradient_do_not_drown_others():
    """Such as padding: the loss takes nothing of it. The scale of zeros is not 1 among weights."""
    q, k, v, grad = operands(queries=100, keys=100)
    grad = grad.at[:, 50:].set(0) * 1e-6
    f = functools.partial(ATTENTION, recipe="current")
    found = with_gradients(f, q, k, v, grad=grad)
    expected = with_gradients(jax.nn.dot_product_attention, q, k, v, grad=grad)
    assert all(relative_error(a, b) < 0.13 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_what_is_not_finite_shows_where_it_is_seen(bad):
    q, k, v, _ = operands(queries=140, keys=140)
    f = jax.jit(functools.partial(ATTENTION, is_causal=True, recipe="current"))
    y = f(q, k, v.at[0, 130, 1, 2].set(bad))
    seen = np.isnan(np.asarray(y))
    assert seen[0, 130:, 2:].any(axis=-1).all()  # the heads of that key
    assert not seen[0, :128].any()
    assert not seen[0, :, :2].any()
    assert not seen[1].any()


def test_no_array_of_queries_by_keys():
    q, k, v, grad = operands(batch=1, queries=1024, keys=1024, heads=2, kv_heads=1)
    f = functools.partial(ATTENTION, is_causal=True)
    program = jax.make_jaxpr(lambda *x: with_gradients(f, *x[:3], grad=x[3]))(q, k, v, grad)
    sizes = [v.aval.size for eqn in equations_of(program.jaxpr) for v in eqn.outvars]
    assert max(sizes) < 1024 * 1024 / 8
    assert len(sizes) > 100


def equations_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations_of(inner)


@pytest.mark.slow
def test_under_transformations():
    q, k, v, grad = operands(queries=20, keys=30)
    f = functools.partial(ATTENTION, is_causal=True, recipe="rowwise")
    # The gradient is an argument: XLA:CPU folds constants in f8 to wrong ones in such programs.
    loss = lambda q, k, v, grad: jnp.sum(f(q, k, v) * grad)
    gradient = lambda loss: jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v, grad)
    for a, b in zip(gradient(jax.checkpoint(loss)), gradient(loss), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    batched = jax.jit(jax.vmap(lambda q, k, v: f(q[None], k[None], v[None])[0]))(q, k, v)
    np.testing.assert_allclose(batched, jax.jit(f)(q, k, v), rtol=0, atol=1e-6)
    by_batch = jax.sharding.PartitionSpec("data")
    on_parts = jax.shard_map(
        lambda *arrays: jax.vjp(f, *arrays[:3])[1](arrays[3]),
        mesh=jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=by_batch,
        out_specs=by_batch,
    )
    for a, b in zip(jax.jit(on_parts)(q, k, v, grad), gradient(loss), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    with pytest.raises(TypeError, match="Second derivatives of scaled_dot_product_attention"):
        jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, k, v, grad) ** 2))(q)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    arrays = [x.astype(dtype) for x in operands(queries=20, keys=30)]
    found = with_gradients(jax.jit(ATTENTION), *arrays[:3], grad=arrays[3])
    assert [x.dtype for x in found] == [dtype] * 4
    *wide, grad = (x.astype(jnp.float32) for x in arrays)
    expected = with_gradients(jax.nn.dot_product_attention, *wide, grad=grad)
    assert all(0.005 < relative_error(a, b) < 0.12 for a, b in zip(found, expected, strict=True))


Q, K, V, _ = operands(queries=8, keys=9)
ERRORS = {
    "heads": (lambda: ATTENTION(Q[:, :, :3], K, V), ValueError, "N a multiple of K"),
    "depth": (lambda: ATTENTION(Q, K[..., :8], V[..., :8]), ValueError, r"got \(2, 8, 4, 16\)"),
    "integers": (lambda: ATTENTION(Q.astype(int), K, V), TypeError, "query"),
    "mask": (lambda: ATTENTION(Q, K, V, mask=jnp.ones((8, 9))), TypeError, "must be bool"),
    "bias": (lambda: ATTENTION(Q, K, V, jnp.ones((8, 8))), ValueError, "does not broadcast to"),
    "window": (lambda: ATTENTION(Q, K, V, local_window_size=-1), ValueError, "cannot be negative"),
    "lengths": (
        lambda: ATTENTION(Q, K, V, query_seq_lengths=jnp.ones(3, int)),
        ValueError,
        "query_seq_lengths must be integers of shape",
    ),
    "state": (
        lambda: ATTENTION(Q, K, V, state=recipes.DelayedScaling().init_state()),
        ValueError,
        "'scores' and 'context'",
    ),
    "recipe": (lambda: ATTENTION(Q, K, V, recipe="fp9"), ValueError, "fp9"),
    "implementation": (
        lambda: ATTENTION(Q, K, V, implementation="mosaic_gpu"),
        ValueError,
        "Allowed: 'emulate', 'xla', 'cudnn'",
    ),
    "an implementation of JAX": (
        lambda: ATTENTION(Q, K, V, implementation="xla"),
        ValueError,
        "in high precision only. Pass recipe=None",
    ),
    "hopper": (
        lambda: ATTENTION(Q, K, V, recipe=recipes.DelayedScaling(accumulation="hopper")),
        ValueError,
        "adds in f32",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        call()
