"""`benchmarks/attention_accuracy.py`: its oracle, and that docs/attention.md has its figures."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark():
    return imported("attention_accuracy", "benchmarks")


@pytest.fixture(scope="module")
def errors(benchmark):
    return json.loads(benchmark.RESULTS.read_text())["errors"]


def test_attention_in_float64(benchmark):
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


def test_the_page_has_the_recorded_figures(benchmark, errors):
    page = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    assert benchmark.table(errors, 4096, 128, causal=True) in page
    of = lambda way: errors["outlier values, T 4096, H 128, full"][way]["unquantized"]["O"]
    in_page = re.search(
        r"([\d.]+) % per tensor, ([\d.]+) % rotated, and ([\d.]+) % with a scale per token",
        " ".join(page.split()),
    )
    wanted = [100 * of(way) for way in ("per tensor", "per tensor, rotated", "tokens")]
    assert in_page.groups() == tuple(f"{x:.2g}" for x in wanted)


@pytest.mark.slow
def test_the_library_is_measured(benchmark):
    rows = benchmark.measure("normal", 130, 16, causal=True)
    for name, row in rows.items():
        assert row["unquantized"]["O"] < (0.01 if name == "bf16" else 0.1)
        assert row["dequantized"]["O"] < row["unquantized"]["O"]
