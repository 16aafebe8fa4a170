"""Packed sequences, attention sinks and windows: against f64 and JAX's own, in every recipe."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.products.flash import dot_product
from jfp8.products.flash.numerics import Numerics
from support.models import gradients_of

ATTENTION = jfp8.scaled_dot_product_attention
RECIPES = ("delayed", "nvfp4", "hybrid")  # `test_flash_attention.py` has the others
# Three sequences in one of 150 tokens, across the blocks of 64 queries and of 128 keys; four.
IDS = np.stack([np.repeat([3, 1, 2], [70, 63, 17]), np.repeat([0, 5, 0, 7], [10, 100, 20, 20])])


class Unrounded(Numerics):
    """Quantize nothing, but compute block by block."""


def operands(batch=2, tokens=150, heads=4, kv_heads=2, depth=16, seed=0):
    """Q, K, V, the gradient and sinks; means keep the sinks' gradients from small differences."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, tokens, heads, depth), *[(batch, tokens, kv_heads, depth)] * 2]
    q, k, v, grad = (rng.normal(size=s).astype("f4") for s in (*shapes, shapes[0]))
    v, grad = v + 0.5, grad + 0.5
    return q, k, v, grad, np.array([-3.0, 0.5, 2.0, 6.0], "f4")


def in_f64(q, k, v, grad, sinks, seen, bias=None):
    """O, dQ, dK, dV and the gradient of sinks, by the equations; `seen` is bool[B, T, S].

    A bias is added to scores in f32, so that -1e9 leaves none of their differences.
    """
    q, k, v, grad, sinks = (np.asarray(x, np.float64) for x in (q, k, v, grad, sinks))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * scale
    if bias is not None:
        s = (s.astype("f4") + bias).astype(np.float64)
    s = np.where(seen[:, None], s, -np.inf)
    of_sink = np.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
    all_logits = np.concatenate([s, of_sink], -1)
    p = np.exp(all_logits - all_logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p, p_sink = p[..., :-1], p[..., -1]
    out = np.einsum("bnts,bsnh->btnh", p, v)
    dp = np.einsum("btnh,bsnh->bnts", grad, v)
    mean = np.einsum("btnh,btnh->bnt", grad, out)
    ds = p * (dp - mean[..., None])
    one_head = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
    dk = one_head(np.einsum("bnts,btnh->bsnh", ds, q) * scale)
    dv = one_head(np.einsum("bnts,btnh->bsnh", p, grad))
    dq = np.einsum("bnts,bsnh->btnh", ds, k) * scale
    return out, dq, dk, dv, -np.sum(p_sink * mean, axis=(0, 2))


def visible(ids=None, of_queries=None, is_causal=False, window=None, tokens=150):
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    seen = np.broadcast_to((j <= i) | (not is_causal), (2, tokens, tokens))
    if window is not None:
        seen = seen & (j >= i - window[0]) & (j <= i + window[1])
    of_queries = ids if of_queries is None else of_queries
    return seen if ids is None else seen & (of_queries[:, :, None] == ids[:, None, :])


def with_gradients(grad, *arrays, **options):
    attend = lambda q, k, v, sinks: ATTENTION(q, k, v, sinks=sinks, **options)
    y, back = jax.vjp(attend, *arrays)
    return [y, *back(jnp.asarray(grad, y.dtype))]


def packed(ids=IDS, of_queries=None):
    of_queries = ids if of_queries is None else of_queries
    return {"query_segment_ids": jnp.asarray(of_queries), "key_value_segment_ids": jnp.asarray(ids)}


BACKWARDS = IDS[:, ::-1]
CASES = {
    "segments": (packed(of_queries=BACKWARDS), {"ids": IDS, "of_queries": BACKWARDS}),
    "causal segments, a window": (
        packed() | {"is_causal": True, "local_window_size": (40, 0)},
        {"ids": IDS, "is_causal": True, "window": (40, 0)},
    ),
    "sinks alone": ({}, {}),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_softmax_with_sinks_in_f64(recipe):
    """With segments and a window; `test_without_rounding_it_is_exact` has them one by one."""
    options, seen = CASES["causal segments, a window"]
    q, k, v, grad, sinks = operands()
    found = jax.jit(functools.partial(with_gradients, grad, recipe=recipe, **options))(
        *map(jnp.asarray, (q, k, v, sinks))
    )
    expected = in_f64(q, k, v, grad, sinks, visible(**seen))
    # Attention without sinks or segments is off by more than 30 % in each of these.
    worst = 0.2 if recipe == "hybrid" else 0.1
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < worst * np.linalg.norm(b)


@pytest.mark.parametrize("by", ["blocks", "JAX"])
@pytest.mark.parametrize("case", CASES)
def test_without_rounding_it_is_exact(case, by, monkeypatch):
    if by == "blocks":
        monkeypatch.setattr(dot_product, "numerics_of", lambda recipe: Unrounded())
    options, seen = CASES[case]
    q, k, v, grad, sinks = operands()
    attend = jax.jit(functools.partial(with_gradients, grad, recipe=None, **options))
    found = attend(*map(jnp.asarray, (q, k, v, sinks)))
    expected = in_f64(q, k, v, grad, sinks, visible(**seen))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max())


def test_without_rounding_it_is_jax_with_an_explicit_mask(monkeypatch):
    """Segments and a window as one mask of ``[B, 1, T, S]``, and a sink of -inf, which is none."""
    monkeypatch.setattr(dot_product, "numerics_of", lambda recipe: Unrounded())
    q, k, v, grad, _ = map(jnp.asarray, operands())
    options = {"is_causal": True, "local_window_size": (40, 0)}
    found = with_gradients(grad, q, k, v, jnp.full(4, -jnp.inf), **packed(), **options)
    mask = jnp.asarray(IDS[:, None, :, None] == IDS[:, None, None, :])
    plain = functools.partial(jax.nn.dot_product_attention, mask=mask, **options)
    y, back = jax.vjp(plain, q, k, v)
    for a, b in zip(found, [y, *back(grad), jnp.zeros(4)], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * max(1, float(jnp.abs(b).max())))


@pytest.mark.parametrize(
    ("recipe", "by"), [*((recipe, "segments") for recipe in RECIPES), ("delayed", "mask")]
)
def test_nothing_leaks_from_another_segment(recipe, by):
    """Other tokens in the second of three segments change the gradient of the sinks alone."""
    q, k, v, grad, sinks = map(jnp.asarray, operands(batch=1))
    ids = IDS[:1]
    of_second = jnp.asarray(ids == 1)[:, :, None, None]
    hidden = packed(ids) if by == "segments" else {"mask": jnp.asarray(visible(ids)[:1, None])}
    options = hidden | {"recipe": recipe, "is_causal": True}
    run = jax.jit(functools.partial(with_gradients, **options))
    before = run(grad, q, k, v, sinks)
    other = [jnp.where(of_second, 100 * x[:, ::-1] + 3, x) for x in (grad, q, k, v)]
    after = run(*other, sinks)
    for a, b in list(zip(before, after, strict=True))[:-1]:
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_array_equal(a[ids != 1], b[ids != 1])
        assert (a[ids == 1] != b[ids == 1]).mean() > 0.9
    assert float(jnp.abs(before[0]).min()) > 0


@pytest.mark.parametrize("recipe", ["delayed", None])
def test_rows_that_a_finite_bias_hides_count_as_a_mean(recipe):
    """Rows of padding, for example: f32 has no room for a sum of weights next to -1e9.

    Beside a mask, which hides keys from that mean.
    """
    q, k, v, grad, _ = operands(tokens=8)
    bias = np.zeros((1, 1, 8, 8), "f4")
    bias[:, :, 3] = -1e9
    seen = np.random.default_rng(1).random((2, 8, 8)) < 0.7
    seen |= np.eye(8, dtype=bool)
    how = {"mask": jnp.asarray(seen[:, None]), "recipe": recipe}
    run = lambda q, k, v: ATTENTION(q, k, v, jnp.asarray(bias), **how)
    found = jax.jit(gradients_of(run))(*map(jnp.asarray, (q, k, v, grad)))
    expected = in_f64(q, k, v, grad, np.full(4, -np.inf), seen, bias)[:4]
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) < (1e-5 if recipe is None else 0.08) * np.linalg.norm(b)


@pytest.mark.parametrize("recipe", ["delayed", None])
def test_values_have_gradients_beside_a_large_sink(recipe):
    """Of each head: weights of e^-20, e^-26 and e^-300, which is 0 in f32, and ordinary ones."""
    q, k, v, grad, _ = operands(kv_heads=4)
    sinks = np.array([20.0, 26.0, 300.0, -300.0], "f4")
    run = jax.jit(functools.partial(with_gradients, grad, recipe=recipe))
    *found, of_sinks = run(*map(jnp.asarray, (q, k, v, sinks)))
    *expected, of_sinks_in_f64 = in_f64(q, k, v, grad, sinks, visible())
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a[:, :, 2]).max() < 1e-30
        for head in (0, 1, 3):
            x, y = np.asarray(a[:, :, head], np.float64), b[:, :, head]
            assert np.linalg.norm(x - y) < (1e-4 if recipe is None else 0.1) * np.linalg.norm(y)
    np.testing.assert_allclose(of_sinks, of_sinks_in_f64, rtol=0.1, atol=1e-30)


def test_values_of_many_keys_have_gradients():
    """Each of 65,536 keys has 1 / 65,536 of the weight of every query."""
    n, rng = 1 << 16, np.random.default_rng(0)
    q, (k, v) = jnp.zeros((1, 8, 1, 16)), jnp.asarray(rng.normal(size=(2, 1, n, 1, 16)), "f4")
    grad = jnp.asarray(rng.normal(size=q.shape), "f4")
    dv = jax.jit(gradients_of(ATTENTION))(q, k, v, grad)[3]
    expected = np.asarray(grad, np.float64).sum(1, keepdims=True) / n
    assert np.linalg.norm(dv - expected) < 0.05 * np.sqrt(n) * np.linalg.norm(expected)


def test_one_token_alone_is_shared_with_the_sink():
    """``v e^s / (e^s + e^sink)``, by hand: ``s = 0``, ``sink = log 3``."""
    q = k = jnp.zeros((1, 1, 1, 16))
    v, sinks = jnp.full((1, 1, 1, 16), 8.0), jnp.log(jnp.array([3.0]))
    y = jax.jit(ATTENTION)(q, k, v, sinks=sinks)
    np.testing.assert_allclose(y, 2.0, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["delayed", None])
def test_padded_queries_and_keys_get_zeros_also_with_sinks(recipe):
    q, k, v, grad, sinks = map(jnp.asarray, operands())
    lengths = jnp.array([100, 150])
    options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "recipe": recipe}
    found = jax.jit(functools.partial(with_gradients, **options))(grad, q, k, v, sinks)
    for x in found[:-1]:
        assert not jnp.any(x[0, 100:])
        assert jnp.all(jnp.any(x[0, :100] != 0, axis=(1, 2)))
    assert jnp.all(jnp.isfinite(found[-1]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"query_segment_ids": jnp.asarray(IDS)}, "Give both"),
        (packed(IDS[:, 1:]), r"integers of shape \(2, 150\), one for each token"),
        (packed(IDS.astype("f4")), "integers"),
        ({"sinks": jnp.zeros(2)}, r"one for each head; got \(2,\)"),
    ],
)
def test_wrong_arguments_are_refused(given, message):
    q, k, v, _, _ = operands()
    with pytest.raises(ValueError, match=message):
        ATTENTION(q, k, v, **given)
