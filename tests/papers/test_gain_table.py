"""The tables in docs/gpus.md that come from published timings, and the script that writes them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from jfp8.kernels.rates import Matmul
from support.scripts import imported

PAGE = Path(__file__).parents[2] / "docs/gpus.md"


@pytest.fixture(scope="module")
def fit_rates():
    return imported("fit_rates", "benchmarks")


def test_the_page_has_the_gains_that_the_code_expects():
    gain_table = imported("gain_table", "benchmarks")
    expected, text = list(gain_table.gains()), PAGE.read_text(encoding="utf-8")
    assert "\n".join(expected) in text
    assert len(expected) == 2 + 10 * 5
    cells = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in expected[2:]}
    row = cells["| H200", "`delayed`, `current`"]
    gain = dict(zip(gain_table.SIZES, map(float, row[:5]), strict=True))
    # What a layer of 2048^3 lacks is gained at the size that the last column names.
    assert gain[2048] < 1 < gain[4096]
    assert 2048 < int(row[5].split()[0].replace(",", "")) < 4096
    assert cells["| H200", "`mxfp8`"][5] == "never |"


Pass = imported("pass_rates", "benchmarks").Pass
RATES = {
    "bf16": Matmul(5, 500, 2, 50),
    "fp8": Matmul(6, 900, 1.5, 100),
    "blocks": Matmul(7, 800, 1.5, 200, 3),
    "amax": Pass(8, 1, 3, 40),
    "cast": Pass(2, 2, 4, 40),
}


def written(folder, fit_rates, noise):
    """Write timings of a card with `RATES`, and formulas of their own."""
    rng = np.random.default_rng(0)
    jitter = lambda: 1 + noise * rng.normal()
    sizes = [512, 1024, 1536, 2048, 4096, 8192]
    shapes = [(m, n, k) for m in sizes for n in sizes for k in sizes]
    ms = lambda launch, *parts: jitter() * (launch / 1e3 + 1e3 * np.hypot(*parts))
    gemm = ["gpu,kernels,m,n,k,bf16_ms,fp8_ms,fp8_block_ms,nvfp4_ms"]
    quantize = ["gpu,kernels,quant_dtype,m,k,amax_and_scale_ms,cast_ms"]
    passes = {}
    for m, k in {(m, k) for m, _, k in shapes}:
        a, c = (
            launch / 1e3 + width * m * k / 1e9 * (hits / cached + (1 - hits) / memory)
            for launch, memory, cached, width in ((8, 1, 3, 2), (2, 2, 4, 3))
            for hits in [min(max(2 - width * m * k / 40e6, 0), 1)]
        )
        passes[m, k] = a * jitter(), c * jitter()
        quantize.append(f"X,{fit_rates.KERNELS},fp8,{m},{k},{passes[m, k][0]},{passes[m, k][1]}")
    for m, n, k in shapes:
        read, out = m * k + k * n, m * n
        bf16 = ms(5, 2 * out * (k + 50) / 500e12, (2 * read + 2 * out) / 2e12)
        fp8 = ms(6, 2 * out * (k + 100) / 900e12, (read + 2 * out) / 1.5e12)
        blocks = ms(7, 2 * out * (k + 200) / 800e12, (read + 2 * out) / 1.5e12)
        blocks += 2e-3 + 3 * m * k / 3e9
        gemm.append(f"X,{fit_rates.KERNELS},{m},{n},{k},{bf16},{fp8 + sum(passes[m, k])},{blocks},")
    for name, rows in (("gemm", gemm), ("quantize", quantize)):
        with gzip.open(folder / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(rows))


def test_a_fit_finds_the_rates_of_timings(fit_rates, tmp_path):
    written(tmp_path, fit_rates, noise=0.0)
    cards = fit_rates.load(tmp_path)
    found = fit_rates.fit(cards["X"])
    assert found.keys() == RATES.keys()
    for name, rate in RATES.items():
        assert list(filter(None, found[name])) == pytest.approx(list(filter(None, rate)), rel=0.02)
    assert max(error for error, _ in fit_rates.judge(found, cards["X"]).values()) < 0.002


def test_a_fit_is_judged_on_shapes_that_it_has_not_seen(fit_rates, tmp_path, capsys):
    """5 % of noise are a median error of 0.67 times as much; rates of half the peak are seen."""
    written(tmp_path, fit_rates, noise=0.05)
    fit_rates.main([str(tmp_path), "--seed", "3"])
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 3")
    errors = {line.split()[1]: float(line.split()[2]) for line in lines}
    assert errors.keys() == RATES.keys()
    assert 2.5 < errors["bf16"] < 4.5
    cards = fit_rates.load(tmp_path)
    slow = RATES | {"bf16": RATES["bf16"]._replace(peak=250)}
    error, bias = fit_rates.judge(slow, cards["X"])["bf16"]
    assert error > 0.5 < bias - 1
    right, wrong = (fit_rates.right_answers(r, cards["X"])["fp8"] for r in (RATES, slow))
    assert right > 0.95 > wrong
