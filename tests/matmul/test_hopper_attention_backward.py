"""Attention's backward pass in Pallas, interpreted, against its equations in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jfp8 import E4M3FN, E5M2
from jfp8.kernels.flash.division import backward_rule
from jfp8.kernels.flash.operands import Stored, Vectors
from jfp8.kernels.hopper.attention import attention_backward
from support.interpreter import no_races

F32, BF16 = jnp.float32, jnp.bfloat16


def f64(x):
    return np.asarray(x).astype(np.float64)


def visible_keys(rows, keys, is_causal, window, length):
    """bool[rows, keys]."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    left, right = window or (rows + keys, rows + keys)
    seen = (j >= i - left) & (j <= i + right) & (j < length)
    return seen & (j <= i) if is_causal else seen


def random_mask(*shape):
    """bool[shape]: most keys hidden; some queries see none, and some no key of a block."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
        mask[..., 64:, :128] = False
    else:
        mask[..., -128:] = False
    return mask


def operands_of(sizes, seen, grad_fmt, scale):
    """Random ones, each of two uses of an operand with bytes and scales of its own.

    Args:
      seen: of each head of queries, bool[rows, keys].
    """
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
    numbers = lambda n, length: jnp.asarray(10 ** rng.uniform(-1, 0.3, (n, length)), F32)
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
            log_sum[head] = np.log(np.where(seen[head], np.exp(s), 0).sum(1))
    dot = jnp.asarray(rng.standard_normal((heads, rows)), F32)
    return stored, Vectors(*scales, jnp.asarray(log_sum, F32), dot)


def rounded(x, fmt):
    return x.astype(np.float32).astype(fmt.dtype).astype(np.float64)


def times(x, error, matrix, fmt):
    """``cast(x) . matrix``, with a bound on its error: both roundings of `x` are right.

    So is any order of the sum, in f32.
    """
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
        p, p_error, ds, error = scores_in_f64(stored, vectors, head, g, scale, seen[head])
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
    assert heads == len(seen)
    return (dq, dk, dv), largest


BOTH = (E5M2, E4M3FN), BF16
CASES = {
    # heads, groups, rows, keys, size
    "all": (
        (4, 2, 200, 300, 64),
        {"window": (150, 110), "key_lengths": [270, 0]},
        (E5M2, E4M3FN),
        BF16,
    ),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, (E5M2, E5M2), F32),
    "grouped": ((2, 2, 130, 100, 64), {"is_causal": True}, (E4M3FN, E5M2), F32),
    "rings": ((1, 1, 400, 700, 64), {}, (E4M3FN, E4M3FN), F32),
    "window": ((1, 1, 130, 256, 128), {"window": (30, 0)}, (E5M2, E5M2), BF16),
    "mask": ((2, 2, 200, 150, 64), {"mask": (2, 200, 150)}, (E5M2, E5M2), F32),
    "mask-of-keys": ((1, 1, 150, 200, 128), {"mask": (1, 1, 200), "is_causal": True}, *BOTH),
    "mask-of-queries": ((1, 1, 150, 200, 64), {"mask": (1, 150, 1), "window": (90, 30)}, *BOTH),
}


@pytest.mark.representative(2)
@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    sizes, options, formats, out_dtype = CASES[case]
    heads, groups, rows, keys, size = sizes
    options = {"is_causal": False, "window": None} | options
    lengths, scale = options.pop("key_lengths", None), 0.7 * size**-0.5
    of_head = np.repeat(lengths or [keys] * (heads // groups), groups)
    mask = random_mask(*options.pop("mask")) if "mask" in options else None
    seen = [visible_keys(rows, keys, *options.values(), length) for length in of_head]
    seen = np.array(seen) & (True if mask is None else mask)
    stored, vectors = operands_of(sizes, seen, formats[0], scale)
    key_lengths = None if lengths is None else jnp.array(lengths, jnp.int32)
    how = {"groups": groups, "scale": scale, "formats": formats, "out_dtype": out_dtype}
    with no_races() as params:
        *found, largest = jax.block_until_ready(
            attention_backward(
                *(stored, vectors, key_lengths, None if mask is None else jnp.array(mask)),
                **how,
                **options,
                interpret=params,
            )
        )
    wanted, largest_wanted = gradients_in_f64(stored, vectors, groups, scale, seen, formats)
    np.testing.assert_allclose(largest, largest_wanted, rtol=1e-4, atol=1e-5)
    for x, (want, bound) in zip(found, wanted, strict=True):
        assert (x.dtype, x.shape) == (out_dtype, want.shape)
        bound = bound + float(jnp.finfo(out_dtype).eps) / 2 * (np.abs(want) + bound)
        assert (np.abs(f64(x) - want) <= bound).all()
        assert np.median(bound) < 0.02 * np.median(np.abs(want[want != 0]))  # it is no excuse


def test_heads_of_256_are_refused():
    of = jax.ShapeDtypeStruct((1, 8, 256), E4M3FN.dtype)
    how = {"groups": 1, "scale": 1.0, "is_causal": False, "window": None}
    with pytest.raises(ValueError, match="64 or 128 numbers, not 256"):
        attention_backward(
            Stored(*[of] * 7), Vectors(*[of] * 9), **how, formats=(E5M2, E5M2), out_dtype=F32
        )


def test_rules_of_division():
    matrices = "b n T H, b n/4 S H, b n/4 S H, b n T H, b n H T, b n/4 H S, b n H T"
    vectors = "b n T, b n/4 S, b n/4 S, b n T, b n T, b n/4 S, b n T, b n T, b n T"
    results = "b n T H, b n/4 S H, b n/4 S H, b n T"
    lengths = jnp.ones((2, 2), jnp.int32)
    assert backward_rule(4, key_lengths=lengths) == f"{matrices}, {vectors}, b n/4 -> {results}"
    rule = backward_rule(1)
    assert rule == f"{matrices}, {vectors} -> {results}".replace("/4", "")
