"""The mismatch between training and decoding, against probabilities that are known."""

import numpy as np
import pytest
from scipy import special

from jfp8.debug import mismatch


def test_estimates_of_the_divergence_of_two_known_distributions():
    """Of tokens drawn from one of them, against the exact sum over the vocabulary."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=32)
    decode = special.log_softmax(logits)
    train = special.log_softmax(logits + 0.1 * rng.normal(size=32))
    exact = np.sum(special.rel_entr(np.exp(decode), np.exp(train)))
    tokens = rng.choice(32, size=400_000, p=np.exp(decode))
    found = mismatch(train[tokens], decode[tokens])
    assert found.k3 == pytest.approx(exact, rel=0.02)
    assert found.kl == pytest.approx(exact, rel=0.1)
    # The other way round is another number.
    assert mismatch(decode[tokens], train[tokens]).kl == pytest.approx(-found.kl)


def test_numbers_by_hand():
    p_train, p_decode = np.array([[0.5, 0.2], [0.1, 0.9]]), np.array([[0.5, 0.25], [0.2, 0.9]])
    found = mismatch(np.log(p_train), np.log(p_decode))
    assert found.tokens == 4
    assert found.max == pytest.approx(np.log(2))
    assert found.mean == pytest.approx((np.log(1.25) + np.log(2)) / 4)
    assert found.kl == pytest.approx((np.log(1.25) + np.log(2)) / 4)
    assert found.k3 == pytest.approx((0.8 - 1 + np.log(1.25) + 0.5 - 1 + np.log(2)) / 4)
    assert found.probability_mean == pytest.approx(0.15 / 4)
    assert found.probability_max == pytest.approx(0.1)
    masked = mismatch(np.log(p_train), np.log(p_decode), p_train > 0.15)
    assert (masked.tokens, masked.max) == (3, pytest.approx(np.log(1.25)))
    assert "at most 0.22 (3 tokens)" in str(masked)
    d = np.linspace(0, 1, 101)
    assert mismatch(-d, np.zeros(101)).p99 == pytest.approx(0.99)


def test_equal_bits_are_zeros():
    x = -np.random.default_rng(0).random(100).astype(np.float32)
    found = mismatch(x, x)
    assert {found.mean, found.p99, found.max, found.kl, found.k3, found.probability_max} == {0.0}


def test_mistakes():
    x = np.full((2, 3), -1.0)
    with pytest.raises(ValueError, match=r"must have one shape.*\(2, 3\), \(2, 2\)"):
        mismatch(x, x[:, :2])
    with pytest.raises(ValueError, match="No token is left"):
        mismatch(x, x, np.zeros_like(x))
    for wrong in (4.0, np.nan):
        with pytest.raises(ValueError, match="decode has the value .* no log-probability. Pass"):
            mismatch(x, np.where(x < 0, wrong, x))
