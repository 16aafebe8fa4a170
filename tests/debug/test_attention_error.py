"""`debug.attention_error`: where its figures come from is known here."""

import jax
import ml_dtypes
import numpy as np
import pytest

import jfp8

Q, K, V = (jax.random.normal(jax.random.key(i), (2, 20, 4, 16)) for i in range(3))


def rounded(x):
    """E4M3 with a scale for each token and head, by ml_dtypes."""
    scale = (np.abs(x).max(-1, keepdims=True) / np.float32(448)).astype(np.float32)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def exact(q, k, v):
    scores = np.einsum("btnh,bsnh->bnts", *map(np.float64, (q, k))) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(scores[0, 0]), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), np.float64(v))


def test_errors_by_head():
    """Head 1 has an exact V: all of it is one value. Head 2 has large scores."""
    q, v = np.array(Q), np.array(V)
    v[:, :, 1], q[:, :, 2] = 1, 8 * q[:, :, 2]
    found = jfp8.debug.attention_error(q, K, v, is_causal=True)
    reference = exact(q, K, v)
    error = exact(rounded(q), rounded(np.array(K)), v) - reference
    norms = [np.sqrt(np.square(x).sum((0, 1, 3))) for x in (error, reference)]
    np.testing.assert_allclose(found.from_scores, norms[0] / norms[1], rtol=1e-3, atol=1e-6)
    assert found.from_scores.argmax() == 2
    assert (found.from_context < 0.06).all()
    assert found.from_context.argmin() == 1
    together = np.hypot(found.from_scores, found.from_context)
    np.testing.assert_allclose(found.both, together, rtol=0.2)
    assert str(found).splitlines()[3].split()[:2] == ["2", f"{100 * found.from_scores[2]:.2f}"]


def test_what_attention_does_not_take_is_refused():
    with pytest.raises(ValueError, match=r"query must have the shape \[B, T, N, H\]"):
        jfp8.debug.attention_error(Q, K[..., :8], V)
