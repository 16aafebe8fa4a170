"""Numbers of scripts in benchmarks/: against tables of Student's t, JAX, and numbers by hand."""

from functools import partial

import jax
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from support.scripts import imported


def drawn(draw, *args, **kwargs):
    """Return new axes on which `draw` has drawn."""
    ax = Figure(layout="constrained").subplots()
    draw(ax, *args, **kwargs)
    return ax


@pytest.mark.parametrize(("confidence", "t"), [(0.9, 2.3533634348), (0.5, 0.7648923284)])
def test_the_mean_gap_lies_in_its_interval(confidence, t):
    exact = np.random.default_rng(0).uniform(2, 3, size=(4, 6))
    run = exact * np.random.default_rng(1).normal(1.01, 0.005, size=exact.shape)
    steps = 25 * np.arange(1, 7)
    draw = imported("gap_curves", "benchmarks").gap_curve
    ax = drawn(draw, "FP8", run, exact, steps, confidence)
    gaps = 100 * (run / exact - 1)
    mean, half = gaps.mean(0), t * gaps.std(0, ddof=1) / 2
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), steps)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), mean, rtol=1e-12)
    x, y = ax.collections[0].get_paths()[0].vertices.T
    ends = [[f(y[x == step]) for step in steps] for f in (min, max)]
    np.testing.assert_allclose(ends, [mean - half, mean + half], rtol=1e-6)


def test_attention_in_float64():
    benchmark = imported("attention_accuracy", "benchmarks")
    arrays = benchmark.operands("outlier values", 24, 16, seed=0)
    twice = [(x, x) for x in (x.astype(np.float64) for x in arrays)]

    @partial(jax.jit, static_argnums=0)
    def by_jax(causal, *arrays):
        *heads, grad = (x[:, None] for x in arrays)
        out, vjp = jax.vjp(partial(jax.nn.dot_product_attention, is_causal=causal), *heads)
        return out, *vjp(grad)

    for causal in (True, False):
        wanted = by_jax(causal, *arrays)
        for x, y in zip(benchmark.attention(*twice, causal), wanted, strict=True):
            assert benchmark.error(np.asarray(y)[:, 0], x) < 1e-5
