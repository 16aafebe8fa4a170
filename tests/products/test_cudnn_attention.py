"""Attention by cuDNN: its scales, what it refuses, what it does not see; cuDNN is emulated.

The emulation has the equations of cuDNN's own test (cudnn-frontend, test/python/sdpa/fp8_ref.py).
"""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import recipes
from jfp8.kernels import attention
from jfp8.kernels.attention import plan
from jfp8.products.flash import passes
from jfp8.products.flash.mask import Visible
from jfp8.products.flash.plan import AttentionSpec
from jfp8.scaling.sink import decode_amax, init_sink
from jfp8.tracing import compat
from jfp8.tracing.devices import Gpu
from support.arrays import relative_error

RECIPE = recipes.DelayedScaling()
AMAXES = {"query": 2.0, "key": 40.0, "value": 0.03}  # a scale in the wrong place shows
T, HEADS, KV_HEADS, DEPTH = 64, 4, 2, 32


def f8(x):
    return jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn)


def emulated(
    q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, *, scale, is_causal
):
    assert {x.dtype.name for x in (q, k, v)} == {"float8_e4m3fn"}
    assert {x.shape for x in (descale_q, descale_k, descale_v, scale_o)} == {(1, 1, 1, 1)}
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = jnp.einsum("bnth,bnsh->bnts", q, k) * descale_q * descale_k * scale
    if is_causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf)
    m = s.max(-1, keepdims=True)
    p = jnp.exp(s - m)
    total = p.sum(-1, keepdims=True)
    w = f8(p * scale_s).astype(jnp.float32)
    out = jnp.einsum("bnts,bnsh->bnth", w, v) * descale_v * descale_s / total
    return f8(out * scale_o), (m + jnp.log(total))[..., 0]


@pytest.fixture
def with_cudnn(monkeypatch):
    monkeypatch.setattr(passes, "called", functools.cache(passes.called.__wrapped__))
    monkeypatch.setattr(compat, "cudnn_attention", lambda: emulated)
    anywhere = lambda platform, kernel, elsewhere, *operands: kernel(*operands)
    monkeypatch.setattr(attention, "on_platform", anywhere)


def operands(seed=0):
    """Queries, keys, values and the gradient of the result; outliers near the histories' amaxes."""
    rng = np.random.default_rng(seed)
    shapes = [(2, T, n, DEPTH) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    sizes = (*AMAXES.values(), 1.0)
    made = [rng.normal(size=s) * amax / 4 for s, amax in zip(shapes, sizes, strict=True)]
    return [jnp.asarray(x, jnp.float32) for x in made]


def states(entries=True):
    amaxes = {
        ("scores", "lhs"): AMAXES["query"],
        ("scores", "rhs"): AMAXES["key"],
        ("context", "rhs"): AMAXES["value"],
    }
    made = {which: RECIPE.init_state() for which in ("scores", "context")}
    for (which, role), amax in amaxes.items():
        state = made[which][role]
        state["amax_history"] = state["amax_history"].at[0].set(amax if entries else 0)
    return made


def attend(q, k, v, state, sink=None):
    how = {"is_causal": True, "recipe": RECIPE, "scale": 0.1, "implementation": "cudnn"}
    return jfp8.scaled_dot_product_attention(q, k, v, state=state, sink=sink, **how)


def test_the_scales_are_those_of_cudnn(with_cudnn):
    """Forward, from histories and without an entry, and the gradients; no token looks ahead."""
    q, k, v, grad = operands()
    sinks = {name: init_sink() for name in ("scores", "context")}

    @jax.jit
    def attention(q, k, v, state):
        out, vjp = jax.vjp(lambda q, k, v, sink: attend(q, k, v, state, sink), q, k, v, sinks)
        return out, vjp(grad)

    @jax.jit
    def by_jax(q, k, v):
        of = partial(jax.nn.dot_product_attention, is_causal=True, scale=0.1)
        out, vjp = jax.vjp(of, q, k, v)
        return out, vjp(grad)

    exact, wanted = by_jax(q, k, v)
    for entries in (True, False):
        out, (*gradients, sent) = attention(q, k, v, states(entries))
        assert relative_error(out, exact) < 0.1
        for x, y in zip(gradients, wanted, strict=True):
            assert relative_error(x, y) < 0.2
        amaxes = decode_amax(sent["scores"])[0], decode_amax(sent["context"])[0]
        np.testing.assert_array_equal(amaxes[0][:2], [jnp.abs(x).max() for x in (q, k)])
        assert amaxes[1][1] == jnp.abs(v).max()
        # The largest value may be all that a query sees, and is not cut off.
        largest = v.at[:, 0].set(AMAXES["value"])
        first = attention(q, k, largest, states(entries))[0][:, 0]
        np.testing.assert_allclose(first, AMAXES["value"], rtol=2**-4)

    changed = [x.at[1].multiply(5).at[0, T - 1].multiply(3) for x in (q, k, v)]
    before, after = (np.asarray(attention(*x, states())[0][0]) for x in ((q, k, v), changed))
    np.testing.assert_array_equal(before[: T - 1], after[: T - 1])
    assert (before[T - 1] != after[T - 1]).any()


REFUSED = {
    "bias": ({"bias": jnp.zeros((1, 1, T, T))}, "a bias"),
    "mask": ({"mask": jnp.ones((T, T), bool)}, "a mask"),
    "window": ({"local_window_size": 3}, "a window"),
    "lengths": ({"key_value_seq_lengths": jnp.array([3, 4])}, "lengths of sequences"),
    "another recipe": (
        {"recipe": "rowwise", "state": None},
        "without amax histories for Q, K and V",
    ),
    "e5m2": ({"recipe": recipes.DelayedScaling(fp8_format="E5M2")}, "in E4M3FN"),
    "no state": ({"state": None}, "attention without state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_support(case):
    changes, message = REFUSED[case]
    q, k, v, _ = operands()
    how = {"recipe": RECIPE, "state": states()} | changes
    with pytest.raises(ValueError, match="'cudnn' does not support .*" + message):
        jfp8.scaled_dot_product_attention(q, k, v, implementation="cudnn", **how)


@pytest.mark.parametrize(
    ("depth", "capability", "message"),
    [
        (72, (9, 0), "heads of 72 numbers"),
        (256, (9, 0), None),
        (256, (10, 0), "at most 128"),
        (128, (10, 3), None),
        (128, (8, 9), "compute capability 9 and 10"),
        (128, (12, 0), "compute capability 9 and 10"),
    ],
)
def test_the_gpu_decides_too(depth, capability, message):
    gpu = Gpu("a GPU", capability)
    spec = AttentionSpec(RECIPE, Visible((T, T), True, None), depth, 1.0, True, gpu)
    if message is None:
        assert plan(spec, "cudnn").kernels == "cudnn"
    else:
        with pytest.raises(ValueError, match=message):
            plan(spec, "cudnn")
    assert plan(spec, None).kernels != "cudnn"


@pytest.mark.parametrize(
    ("version", "message"),
    [(90000, "needs 9.1"), (91000, "not 9.10.0"), (91002, None), (None, None)],
)
def test_the_version_of_cudnn(version, message, monkeypatch):
    monkeypatch.setattr(compat, "cudnn_version", lambda: version)
    spec = AttentionSpec(RECIPE, Visible((T, T), False, None), 64, 1.0, has_state=True)
    if message is None:
        assert plan(spec, "cudnn").uses_one_scale
    else:
        with pytest.raises(ValueError, match=message):
            plan(spec, "cudnn")


def test_without_it_in_jax(monkeypatch):
    monkeypatch.setattr(compat, "cudnn_attention", lambda: None)
    with pytest.raises(ValueError, match="it has no attention in FP8 by cuDNN"):
        attend(*operands()[:3], states())


def test_jax_has_it():
    """Its private operation has the results that `compat` takes from it."""
    q, k, v, _ = operands()
    jaxpr = str(jax.make_jaxpr(attend)(q, k, v, states()))
    assert "dot_product_attention_fp8_fwd" in jaxpr
    number = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    data = [jax.ShapeDtypeStruct((2, n, T, DEPTH), jnp.float8_e4m3fn) for n in (4, 2, 2)]
    of = lambda *x: compat.cudnn_attention()(*x, scale=0.1, is_causal=True)
    out, log_sum = jax.eval_shape(of, *data, *[number] * 6)
    assert (out.shape, out.dtype) == (data[0].shape, data[0].dtype)
    assert (log_sum.shape, log_sum.dtype) == ((2, 4, T), jnp.float32)


def test_on_a_cpu_it_is_an_error():
    q, k, v, _ = operands()
    with pytest.raises(NotImplementedError, match="compiled for another platform"):
        jax.jit(attend)(q, k, v, states())
