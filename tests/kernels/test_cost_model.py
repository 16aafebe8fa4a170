"""The model of time against measured gains and numbers by hand; rates against published timings."""

import itertools

import numpy as np
import pytest

from jfp8.kernels.cost_model import (
    BY_XLA,
    ON_ADA,
    ON_BLACKWELL,
    ON_HOPPER,
    ROUNDED,
    Work,
    costs_on,
    expected,
    scales_of,
    work_of,
)
from jfp8.kernels.rates import PEAKS, RATES, MatmulRate, Rates, name_of, rates_of
from support.scripts import imported

# Rows of TensorRT-LLM's timings, in ms: the GPU, m, n, k; bf16; FP8, without the two passes over
# the activation; these, to find its scale and to cast it.
TIMED = """
H100          8192 4096 4096   0.3436  0.1902   0.05726  0.0345
H100          512  4096 4096   0.02523 0.01578  0.008637 0.002697
H200          32768 8192 1024  0.7702  0.4603   0.05617  0.02602
H200          4096 7168 2048   0.1781  0.09842  0.01338  0.006396
B200          2048 2048 2048   0.0141  0.009001 0.01226  0.004269
B200          32768 8192 1024  0.3562  0.2045   0.02547  0.0239
B300          512  4096 4096   0.01395 0.01019  0.01141  0.002971
GB300         8192 4096 4096   0.1578  0.07936  0.02355  0.02209
L40S          4096 7168 2048   0.5136  0.3042   0.01475  0.005734
RTX_PRO_6000  4096 7168 2048   0.3026  0.1733   0.01051  0.006297
"""
# FP8 with scales in blocks, and NVFP4; both with the activation's cast, which reads bf16.
TIMED_WITH_CAST = """
B200          blocks  32768 8192 1024  0.2607
B200          nvfp4   8192 4096 4096   0.09812
B300          nvfp4   32768 8192 1024  0.2974
GB300         nvfp4   4096 7168 2048   0.04933
RTX_PRO_6000  nvfp4   8192 4096 4096   0.2578
"""


def rows(text):
    for line in text.split("\n")[1:-1]:
        gpu, *cells = line.split()
        yield gpu.replace("_", " "), *cells


def passes_of(gpu):
    return imported("pass_rates", "benchmarks").PASS_RATES[gpu]


@pytest.mark.parametrize(("gpu", "m", "n", "k", "bf16", "fp8", "amax", "cast"), list(rows(TIMED)))
def test_rates_give_published_timings(gpu, m, n, k, bf16, fp8, amax, cast):
    m, n, k = int(m), int(n), int(k)
    rates, passes, work = RATES[gpu], passes_of(gpu), (m * n * k, m * n)
    read = m * k + k * n
    found = (
        rates.bf16.seconds(*work, 2 * read + 2 * m * n),
        rates.fp8.seconds(*work, read + 2 * m * n),
        passes["amax"].seconds(2 * m * k),
        passes["cast"].seconds(3 * m * k),
    )
    timed = [float(ms) / 1e3 for ms in (bf16, fp8, amax, cast)]
    assert found == pytest.approx(timed, rel=0.16)


@pytest.mark.parametrize(("gpu", "name", "m", "n", "k", "ms"), list(rows(TIMED_WITH_CAST)))
def test_rates_of_blocks_give_published_timings(gpu, name, m, n, k, ms):
    """The matmul alone is faster."""
    m, n, k, rate = int(m), int(n), int(k), getattr(RATES[gpu], name)
    operand = 1 if name == "blocks" else 0.5
    alone = rate.seconds(m * n * k, m * n, operand * (m * k + k * n) + 2 * m * n)
    with_cast = alone + 1e-6 * passes_of(gpu)["cast"].launch + 3 * m * k / (1e12 * rate.activation)
    assert alone < with_cast == pytest.approx(float(ms) / 1e3, rel=0.1)


def test_no_rate_is_beyond_what_a_data_sheet_promises():
    for name, rates in RATES.items():
        peak = PEAKS[name]
        assert 0.5 * peak.bf16 < rates.bf16.peak < 0.85 * peak.bf16, name
        assert 0.5 * peak.fp8 < rates.fp8.peak < 0.85 * peak.fp8, name
        assert 0.55 * peak.memory < rates.cast < peak.memory, name
        assert (rates.nvfp4 is None) == (peak.nvfp4 == 0.0), name


def test_cards_that_were_not_timed_are_scaled_by_data_sheets():
    """A GB200 has 10 / 9 of the peak of a B200, and its memory; a 5090 sums at half the rate."""
    whole, scaled = RATES["B200"], RATES["GB200"]
    assert scaled.fp8.peak == pytest.approx(whole.fp8.peak * 10 / 9, rel=0.005)
    assert scaled.nvfp4.peak == pytest.approx(whole.nvfp4.peak * 10 / 9, rel=0.005)
    assert scaled.cast == whole.cast
    whole, ada, blackwell = RATES["RTX PRO 6000"], RATES["RTX 4090"], RATES["RTX 5090"]
    assert blackwell.bf16.peak == pytest.approx(whole.bf16.peak * 209.5 / 503.8, rel=0.005)
    assert ada.cast == pytest.approx(whole.cast * 1.008 / 1.792, rel=0.005)
    assert ada.nvfp4 is None is not blackwell.nvfp4


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
    ],
)
def test_rates_by_the_name_of_a_device(kind, name):
    assert name_of(kind) == name
    assert rates_of(kind) is RATES[name]


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA L40", "NVIDIA A100", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300X"],
)
def test_no_rates_of_others(kind):
    assert name_of(kind) is rates_of(kind) is None


# The model, with round rates: launches of 4 µs; 1000 TFLOP/s; 1 TB/s.
MATMUL = MatmulRate(4, 1000, 1, 0)
ROUND = Rates(
    bf16=MATMUL,
    fp8=MATMUL._replace(peak=2000),
    blocks=MATMUL._replace(peak=1600),
    cast=0.5,
    nvfp4=MATMUL._replace(peak=4000),
    rows=MATMUL._replace(peak=1250),
)
LARGE = Work(multiplications=50e9, elements=0.0)  # 0.1 ms in bf16


# Linear layers on an H100, forward and backward: their time in bf16 over that in FP8, in two runs,
# with delayed and current scaling for "one". benchmarks/results/gpu_h100.json has the times.
MEASURED = """
one      1024  1024  1024  0.46 0.47
one      2048  2048  2048  0.89
one      4096  4096  4096  1.36 1.34 1.29
one      8192  8192  8192  1.68 1.76 1.61 1.66
one     15872  4096 16384  1.79 1.86 1.68
rows     4096  4096  4096  1.20
rows     8192  8192  8192  1.61 1.60
rows    15872  4096 16384  1.57 1.57
blocks   4096  4096  4096  1.06
blocks   8192  8192  8192  1.25 1.22
blocks  15872  4096 16384  1.25 1.26
"""


@pytest.mark.parametrize("row", list(rows(MEASURED)), ids=" ".join)
def test_measured_gains(row):
    """No layer that was slower in FP8 than in bf16 is expected to be faster, or the reverse."""
    rates = rates_of("NVIDIA H100 80GB HBM3")
    scales, *sizes = row[:4]
    found = expected(work_of(tuple(map(int, sizes))), rates, scales, ON_HOPPER)
    measured = np.mean([float(gain) for gain in row[4:]])
    assert found.gain == pytest.approx(measured, rel=0.08)
    assert (found.fp8 > found.bf16) == (measured < 1)


def test_an_h200_multiplies_like_an_h100():
    for kernel in ("bf16", "fp8", "rows", "blocks"):
        timed, scaled = (getattr(RATES[name], kernel) for name in ("H100", "H200"))
        assert (scaled.peak, scaled.ramp) == (timed.peak, timed.ramp)
        assert scaled.memory > timed.memory
    assert RATES["H200"].cast == pytest.approx(RATES["H100"].cast * 4.17 / 3.05, rel=0.005)


@pytest.mark.parametrize(
    ("scales", "costs", "us"),
    [
        ("one", ON_HOPPER, 50),
        ("rows", ON_HOPPER, 80),
        ("blocks", ON_HOPPER, 62.5),
        ("mx", ON_HOPPER, 100),
        ("nvfp4", ON_HOPPER, 100),
        ("rows", ON_BLACKWELL, 50),
        ("mx", ON_BLACKWELL, 62.5),
        ("nvfp4", ON_BLACKWELL, 25),
        ("blocks", ON_ADA, 100),
    ],
)
def test_a_product_of_arithmetic_alone(scales, costs, us):
    """Of three kernels that multiply; each of the others takes 2 µs."""
    times = expected(LARGE, ROUND, scales, costs)
    others = (costs[scales].launches - 3) * 2 / 3
    assert times.bf16 == pytest.approx(104e-6)
    assert times.fp8 == pytest.approx(1e-6 * (4 + us + others))
    assert times.rounded == pytest.approx(1e-6 * (104 + (ROUNDED[scales].launches - 3) * 2 / 3))
    assert times.gain == pytest.approx(times.bf16 / min(times.fp8, times.rounded))


def test_a_product_without_a_rate_takes_as_long_as_in_bf16():
    times = expected(LARGE, ROUND._replace(rows=None), "rows", ON_HOPPER)
    assert times.fp8 == pytest.approx(1e-6 * (104 + (ON_HOPPER["rows"].launches - 3) * 2 / 3))


def test_a_product_of_bytes_alone():
    """3e9 elements: 2 + 2 + 2 bytes for three of them in bf16, 1 + 1 + 2 in FP8."""
    times = expected(Work(0.0, 3e9), ROUND, "blocks", ON_HOPPER)
    assert times.bf16 == pytest.approx(6e-3, rel=1e-2)
    assert times.fp8 == pytest.approx(4e-3 + 2 * 4.1e-3, rel=1e-2)
    assert times.rounded == pytest.approx(6e-3 + 2 * 9e-3, rel=1e-2)


def test_arithmetic_and_bytes_together():
    """3 and 4 µs are 5; a ramp of k terms doubles the arithmetic."""
    rate = MatmulRate(0, 1, 1, 0)
    assert rate.seconds(1.5e6, 3e3, 4e6) == pytest.approx(5e-6)
    assert rate._replace(ramp=500).seconds(1.5e6, 3e3, 0) == pytest.approx(6e-6)


def test_a_pass_over_what_is_cached():
    """10 TB/s up to 50 MB, 1 TB/s from 100 MB on, and of 75 MB half of each."""
    rate = imported("pass_rates", "benchmarks").Pass(0, 1, 10, 50)
    assert [1e6 * rate.seconds(1e6 * mb) for mb in (10, 50, 75, 100, 200)] == pytest.approx(
        [1, 5, 75 * (0.5 / 10 + 0.5), 100, 200]
    )


def test_scales_that_no_kernel_makes_are_kernels_of_their_own():
    for scales in ("blocks", "mx"):
        by_xla, by_kernels = (expected(LARGE, ROUND, scales, c) for c in (BY_XLA, ON_BLACKWELL))
        assert by_xla.fp8 > by_kernels.fp8
        assert (by_xla.rounded, by_xla.bf16) == (by_kernels.rounded, by_kernels.bf16)


def test_costs_by_capability():
    assert costs_on((9, 0)) is ON_HOPPER
    assert costs_on((10, 3)) is ON_BLACKWELL
    assert costs_on((10, 0), has_kernels=False) is BY_XLA
    assert costs_on((8, 9)) is costs_on((12, 0)) is costs_on(None) is ON_ADA


def test_three_products_of_a_layer_take_the_same_time():
    """Otherwise some would be in bf16, and a tensor would be laid out for both."""
    assert len({work_of(sizes) for sizes in itertools.permutations((64, 512, 8192))}) == 1
    assert work_of((2, 3, 5)) == Work(30, 10 + 15 + 6)
    assert work_of((2, 3, 5), devices=2) == Work(15, 31 / 2)


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        ([], "one"),
        ([(0, 0)], "one"),
        ([(0, 0), (0, 1)], "rows"),
        ([(128, 1), (0, 0)], "blocks"),
        ([(256, 1), (128, 128)], "blocks"),
        ([(128, 1), (32, 1)], "mx"),
        ([(16, 1), (16, 16)], "nvfp4"),
    ],
)
def test_kinds_of_scales(blocks, kind):
    assert scales_of(blocks) == kind
