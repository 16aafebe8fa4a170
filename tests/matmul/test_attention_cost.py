"""The model of time of attention, against published timings of cuDNN's."""

from __future__ import annotations

import numpy as np
import pytest

from jfp8.kernels.cost_model import expected_attention
from jfp8.kernels.rates import RATES, SCORES

# TFLOP/s of cuDNN in 16 bits on an H100 SXM5, from figures 5 and 6 of FlashAttention-3 (arXiv
# 2407.08608): 16,384 tokens in all, 2,048 numbers in the heads of each. By pass, depth, causality.
TOKENS = 1024, 2048, 4096, 8192, 16384
TIMED = {
    ("forward", 64, False): (373, 395, 408, 412, 413),
    ("forward", 128, False): (574, 617, 609, 600, 595),
    ("forward", 128, True): (410, 484, 518, 529, 539),
    ("backward", 64, False): (348, 395, 417, 432, 433),
    ("backward", 128, False): (408, 465, 499, 518, 516),
}


def times(which, tokens, depth, is_causal=True, card="H100", width=2048, rows=16384):
    sizes = rows // tokens * width // depth, 1, tokens, tokens, depth
    return expected_attention(which, sizes, is_causal, RATES[card], SCORES[card])


def test_bf16_against_published_timings():
    ratios = []
    for (which, depth, is_causal), timed in TIMED.items():
        for tokens, published in zip(TOKENS, timed, strict=True):
            pairs = 16384 * tokens * (2048 // depth) / (2 if is_causal else 1)
            flops = 2 * {"forward": 2, "backward": 5}[which] * pairs * depth
            seconds = times(which, tokens, depth, is_causal).bf16
            ratios.append(flops / seconds / 1e12 / published)
    assert len(ratios) == 25
    assert 0.85 < min(ratios) < max(ratios) < 1.25
    assert 0.95 < np.median(ratios) < 1.05


@pytest.mark.parametrize("card", SCORES)
def test_fp8_gains_forward_alone_in_long_sequences(card):
    """Backward, two kernels compute the softmax and the scores again."""
    gain = lambda *args: times(*args, card=card).gain
    assert gain("forward", 16384, 128) > 1.1
    assert gain("forward", 1024, 64) < 0.8
    for tokens in TOKENS:
        assert gain("backward", tokens, 64) < gain("backward", tokens, 128) < 1


def test_times_grow_with_the_work():
    """Four times the pairs of 8 times the tokens; quantizing is a part of a short sequence's."""
    short, long = (times("forward", n, 128, rows=n) for n in (8192, 65536))
    assert 60 < long.bf16 / short.bf16 < 65
    assert 40 < long.fp8 / short.fp8 < 64
    # 12 bytes read and written of an element of Q, K and V, and ten launches, are no more.
    per_pass = 3 * 8192 * 2048 * 6 / (1e12 * RATES["H100"].cast) + 10 * 2e-6
    assert 0 < per_pass < short.fp8
