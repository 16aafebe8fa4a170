"""Attention of f8 operands by its equations in float64, with bounds on what roundings change."""

import jax.numpy as jnp
import numpy as np

from jfp8 import E4M3FN
from jfp8.kernels.flash.problem import Stored, Vectors
from support.arrays import f64

BLOCK = 128  # keys


def operands_of(heads, groups, rows, keys, size, formats=(E4M3FN, E4M3FN, E4M3FN)):
    """Random ones, and a token of zeros; keys and values have scales of many magnitudes."""
    rng = np.random.default_rng(rows + keys + size)
    key_heads = heads // groups
    shapes = (heads, rows, size), (key_heads, keys, size), (key_heads, size, keys)
    q, k, v_t = (
        jnp.asarray(rng.standard_normal(s), fmt.dtype)
        for s, fmt in zip(shapes, formats, strict=True)
    )
    q_scale = rng.uniform(0.5, 2, (heads, rows))
    k_scale = 10 ** rng.uniform(-2.5, 0.5, (key_heads, keys))
    v_scale = 2.0 ** rng.integers(-6, 6, (key_heads, keys))
    # As tokens of zeros are quantized where scales move into weights.
    of_zeros = lambda x: jnp.asarray(x, jnp.float32).at[:, 5].set(2.0**-126)
    data = q.at[:, 5].set(0), k.at[:, 5].set(0), v_t.at[:, :, 5].set(0)
    return *data, *map(of_zeros, (q_scale, k_scale, v_scale))


def visible_keys(rows, keys, is_causal, window, length):
    """bool[rows, keys]."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    left, right = window or (rows + keys, rows + keys)
    seen = (j >= i - left) & (j <= i + right) & (j < length)
    return seen & (j <= i) if is_causal else seen


def rounded(x, fmt=E4M3FN):
    return x.astype(np.float32).astype(fmt.dtype).astype(np.float64)


def attention_in_f64(q, k, v_t, q_scale, k_scale, v_scale, scale, visible):
    """One head by the equations, block by block: o and lse, with a bound on the error of each.

    The kernel's logits are f32: they differ by at most a rounding for each of the H terms and for
    each factor. So does the maximum, and with exp2, off by 2^-22, that bounds how far a probability
    may be from ours. Where a rounding to e4m3fn lies in between, its two results are both right.
    """
    rows, size = q.shape
    factor = q_scale[:, None] * scale * np.log2(np.e)
    s = np.where(visible, q @ k.T * factor * k_scale, -np.inf)
    slack = (size + 6) * 2.0**-24 * (np.abs(q) @ np.abs(k).T * factor * k_scale + 8)
    m, l, acc, bound = np.full(rows, -np.inf), np.zeros(rows), 0.0, 0.0
    for start in range(0, len(k), BLOCK):
        block = slice(start, start + BLOCK)
        seen = visible[:, block]
        before, m = m, np.maximum(m, s[:, block].max(1))
        shift = np.where(np.isinf(m), 0, m)
        p, shrink = np.exp2(s[:, block] - shift[:, None]), np.exp2(before - shift)
        l = l * shrink + p.sum(1)
        unit = np.where(seen, v_scale[block], 0).max(1)
        unit = np.where(unit == 0, 1, unit)
        w = p * (v_scale[block] / unit[:, None]) * 2.0**8
        off = slack[:, block] + np.where(seen, slack[:, block], 0).max(1, keepdims=True) + 2.0**-22
        flips = rounded(w * (1 + off)) - rounded(w * (1 - off))
        unit = unit[:, None] * 2.0**-8
        acc = acc * shrink[:, None] + rounded(w) @ v_t[:, block].T * unit
        bound = bound * shrink[:, None] + flips @ np.abs(v_t[:, block]).T * unit
        bound = bound + 2.0**-16 * (rounded(w) @ np.abs(v_t[:, block]).T * unit)
    some = l > 0
    factor = np.where(some, 1 / np.where(some, l, 1), 0)
    off = np.where(visible, slack, 0).max(1) + 2.0**-20
    with np.errstate(divide="ignore"):
        lse = m * np.log(2) + np.log(l)
    return acc * factor[:, None], (bound + off[:, None] * np.abs(acc)) * factor[:, None], lse, off


def assert_attention(
    results, operands, groups, scale, is_causal, window, lengths, out_dtype, mask=True
):
    o, lse = results
    assert (o.dtype, lse.dtype, o.shape) == (out_dtype, jnp.float32, operands[0].shape)
    q, k, v_t, *scales = map(f64, operands)
    for head in range(len(q)):
        g = head // groups
        q_scale, k_scale, v_scale = (x[i] for x, i in zip(scales, (head, g, g), strict=True))
        length = k.shape[1] if lengths is None else lengths[g]
        visible = visible_keys(q.shape[1], k.shape[1], is_causal, window, length)
        visible = visible & np.broadcast_to(mask, (len(q), *visible.shape))[head]
        want, bound, want_lse, lse_bound = attention_in_f64(
            q[head], k[g], v_t[g], q_scale, k_scale, v_scale, scale, visible
        )
        bound = bound + float(jnp.finfo(out_dtype).eps) / 2 * (np.abs(want) + bound)
        assert (np.abs(f64(o[head]) - want) <= bound).all()
        none = ~visible.any(1)
        assert (f64(o[head])[none] == 0).all()
        assert (f64(lse[head])[none] == -np.inf).all()
        off = np.abs(f64(lse[head])[~none] - want_lse[~none])
        assert (off <= lse_bound[~none] + 2.0**-22 * np.abs(want_lse[~none])).all()
        # The bound is no excuse: it is small beside the values.
        if (~none).any():
            assert np.median(bound[~none]) < 0.02 * np.median(np.abs(want[~none])) + 1e-30


def backward_operands_of(sizes, seen, grad_fmt, scale):
    """Random operands; `seen` is bool[rows, keys] of each head of queries, or of keys."""
    heads, groups, rows, keys, size = sizes
    rng = np.random.default_rng(rows + keys + size)
    of_keys = heads // groups
    data = lambda *shape, fmt=E4M3FN: jnp.asarray(rng.standard_normal(shape), fmt.dtype)
    stored = Stored(
        data(heads, rows, size),
        data(of_keys, keys, size),
        data(of_keys, keys, size),
        data(heads, rows, size, fmt=grad_fmt),
        data(heads, size, rows),
        data(of_keys, size, keys),
        data(heads, size, rows, fmt=grad_fmt),
    )
    numbers = lambda n, length: jnp.asarray(10 ** rng.uniform(-1, 0.3, (n, length)), jnp.float32)
    scales = [
        numbers(*((of_keys, keys) if name[0] in "kv" else (heads, rows))) for name in stored._fields
    ]
    # A query of zeros, and one that no gradient has reached.
    stored = stored._replace(q=stored.q.at[:, 5].set(0), grad_t=stored.grad_t.at[:, :, 9].set(0))
    scales[6] = scales[6].at[:, 9].set(2.0**-126)
    log_sum = np.zeros((heads, rows))
    for head in range(heads):
        g = head // groups
        s = f64(stored.q[head]) @ f64(stored.k[g]).T * scale
        s = s * f64(scales[0][head])[:, None] * f64(scales[1][g])
        with np.errstate(divide="ignore"):
            visible = seen[head * len(seen) // heads]
            log_sum[head] = np.log(np.where(visible, np.exp(s), 0).sum(1))
    dot = jnp.asarray(rng.standard_normal((heads, rows)), jnp.float32)
    return stored, Vectors(*scales, jnp.asarray(log_sum, jnp.float32), dot)


def times(x, error, matrix, fmt):
    """``cast(x) . matrix``, with a bound: both roundings of `x` and any order of sums are right."""
    flips = np.abs(rounded(x + error, fmt) - rounded(x - error, fmt))
    in_order = 2.0**-16 * np.abs(rounded(x, fmt)) @ np.abs(matrix)
    return rounded(x, fmt) @ matrix, flips @ np.abs(matrix) + in_order


def times_scaled(x, error, matrix, fmt):
    """The same with a scale for each row of `x`: a power of two that lets its largest fit."""
    largest = np.abs(x).max(1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(largest == 0, fmt.max, largest) / fmt.max))
    near = np.abs(np.log2(np.where(largest == 0, 1, largest) / fmt.max) % 1)
    assert np.minimum(near, 1 - near)[largest > 0].min(initial=1) > 1e-5  # else both are right
    y, bound = times(x / scale, error / scale, matrix, fmt)
    return y * scale, bound * scale


def scores_in_f64(stored, vectors, head, g, scale, seen):
    """P and dS of a head, each with a bound on its error."""
    q, k, v, grad, *_ = stored
    size = q.shape[-1]
    by = lambda i, n: f64(vectors[i][n])
    s, of_sum = [
        f(q[head]) @ f(k[g]).T * scale * by(0, head)[:, None] * by(1, g)
        for f in (f64, lambda x: np.abs(f64(x)))
    ]
    p = np.where(seen, np.exp(np.where(seen, s, 0) - np.where(seen, by(7, head)[:, None], 0)), 0)
    slack = (size + 8) * 2.0**-24 * (of_sum + np.abs(np.where(seen, by(7, head)[:, None], 0)) + 8)
    factor = by(3, head)[:, None] * by(2, g)
    dp, of_sum = (f(grad[head]) @ f(v[g]).T * factor for f in (f64, lambda x: np.abs(f64(x))))
    dot = by(8, head)[:, None]
    ds = p * (dp - dot)
    error = slack * np.abs(ds) + p * (size + 8) * 2.0**-24 * (of_sum + np.abs(dot))
    return p, slack * p, ds, error


def gradients_in_f64(stored, vectors, groups, scale, seen, formats):
    """dQ, dK, dV, the largest of dS, and bounds on the errors of the first three."""
    heads = len(stored.q)
    dq, dk, dv = (np.zeros((2, *x.shape)) for x in (stored.q, stored.k, stored.v))
    largest = np.zeros(stored.q.shape[:2])
    q_2, k_2, grad_2 = (f64(x).swapaxes(1, 2) for x in stored[4:])
    q_scale, k_scale, grad_scale = map(f64, vectors[4:7])
    for head in range(heads):
        g = head // groups
        visible = seen[head * len(seen) // heads]
        p, p_error, ds, error = scores_in_f64(stored, vectors, head, g, scale, visible)
        largest[head] = np.abs(ds).max(1)
        for at in range(0, stored.k.shape[1], 128):
            part = slice(at, at + 128)
            x, e = (y[:, part] * k_scale[g, part] for y in (ds, error))
            dq[:, head] += np.array(times_scaled(x, e, k_2[g, part], formats[0])) * scale
        for at in range(0, stored.q.shape[1], 64):
            part = slice(at, at + 64)
            unit = grad_scale[head, part].max() / 256
            x, e = (y[part].T * grad_scale[head, part] / unit for y in (p, p_error))
            dv[:, g] += np.array(times(x, e, grad_2[head, part], E4M3FN)) * unit
            x, e = (y[part].T * q_scale[head, part] for y in (ds, error))
            dk[:, g] += np.array(times_scaled(x, e, q_2[head, part], formats[1])) * scale
    return (dq, dk, dv), largest


def assert_gradients(results, stored, vectors, groups, scale, seen, formats, out_dtype):
    *found, largest = results
    wanted, largest_wanted = gradients_in_f64(stored, vectors, groups, scale, seen, formats)
    np.testing.assert_allclose(largest, largest_wanted, rtol=1e-4, atol=1e-5)
    for x, (want, bound) in zip(found, wanted, strict=True):
        assert (x.dtype, x.shape) == (out_dtype, want.shape)
        bound = bound + float(jnp.finfo(out_dtype).eps) / 2 * (np.abs(want) + bound)
        assert (np.abs(f64(x) - want) <= bound).all()
        assert np.median(bound) < 0.02 * np.median(np.abs(want[want != 0]))  # it is no excuse


def with_other_tokens(operands, start):
    """Return `operands` with other tokens from `start` on, and other scales for these."""
    q, k, v_t, q_scale, k_scale, v_scale = operands
    return (
        q.at[:, start:].set(448.0),
        k.at[:, start:].set(-448.0),
        v_t.at[:, :, start:].set(448.0),
        q_scale.at[:, start:].set(1e4),
        k_scale.at[:, start:].set(1e4),
        v_scale.at[:, start:].set(2.0**60),
    )
