"""The model of time by which products are computed in FP8, against numbers worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jfp8.kernels import cost_model as pays_off
from jfp8.kernels.cost_model import (
    BY_XLA,
    ON_BLACKWELL,
    ON_HOPPER,
    RATES,
    Rates,
    Work,
    expected,
    rates_of,
    scales_of,
    work_of,
)

ROUND = Rates(bf16=1e15, fp8=2e15, memory=1e12)
LARGE = Work(multiplications=39e9, elements=0.0)  # in bf16 0.1 ms at 0.78 of the peak


@pytest.mark.parametrize("scales", ON_HOPPER)
def test_a_product_of_arithmetic_alone(scales):
    """In NVFP4 as fast as in bf16 where there are no tensor cores for it."""
    times = expected(LARGE, ROUND, scales, ON_HOPPER)
    assert times.bf16 == pytest.approx(100e-6 + 2e-6)
    multiplying = 100e-6 if scales == "nvfp4" else 50e-6
    assert times.fp8 == pytest.approx(multiplying + ON_HOPPER[scales].launches * 2e-6 / 3)
    assert times.rounded == pytest.approx(100e-6 + pays_off.ROUNDED[scales].launches * 2e-6 / 3)


def test_a_product_of_bytes_alone():
    """0.9e9 elements, at 0.9 TB/s: 2 + 2 + 2 bytes for three of them in bf16, 1 + 1 + 2 in FP8."""
    times = expected(Work(0.0, 0.9e9), ROUND, "blocks", ON_HOPPER)
    assert times.bf16 == pytest.approx(2e-3 + 2e-6)
    assert times.fp8 == pytest.approx(4e-3 / 3 + 4.1e-3 / 3 + 8 * 2e-6 / 3)
    assert times.rounded == pytest.approx(2e-3 + 9e-3 / 3 + 17 * 2e-6 / 3)


def test_four_bits():
    """A quarter of the time of bf16; 0.5 + 0.5 + 2 bytes for three elements."""
    rates = replace(ROUND, fp4=4e15)
    launches = ON_HOPPER["nvfp4"].launches * 2e-6 / 3
    assert expected(LARGE, rates, "nvfp4", ON_HOPPER).fp8 == pytest.approx(25e-6 + launches)
    moved = (1 + ON_HOPPER["nvfp4"].bytes / 3) * 1e-3
    times = expected(Work(0.0, 0.9e9), rates, "nvfp4", ON_HOPPER)
    assert times.fp8 == pytest.approx(moved + launches)


def test_scales_that_no_kernel_makes_are_kernels_of_their_own():
    for scales, launches in (("one", 22), ("blocks", 28), ("mx", 29)):
        times = expected(LARGE, ROUND, scales, BY_XLA)
        assert times.fp8 == pytest.approx(50e-6 + launches * 2e-6 / 3)
        with_kernels = expected(LARGE, ROUND, scales, ON_BLACKWELL)
        assert times.fp8 >= with_kernels.fp8
        assert (times.rounded, times.bf16) == (with_kernels.rounded, with_kernels.bf16)


def test_three_products_of_a_layer_take_the_same_time():
    """Otherwise some would be in bf16, and a tensor would be laid out for both."""
    assert len({work_of(sizes) for sizes in itertools.permutations((64, 512, 8192))}) == 1
    assert work_of((2, 3, 5)) == Work(30, 10 + 15 + 6)
    assert work_of((2, 3, 5), devices=2) == Work(15, 31 / 2)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_rates_by_the_name_of_a_device(kind, name):
    assert rates_of(kind) is RATES[name]


@pytest.mark.parametrize("kind", ["NVIDIA L40", "NVIDIA GB200", "NVIDIA A100", "cpu"])
def test_no_rates_of_others(kind):
    assert rates_of(kind) is None


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_fp8_has_twice_the_rate(rates):
    assert rates.fp8 / rates.bf16 == pytest.approx(2, abs=0.03)
    assert rates.fp4 in (None, 2 * rates.fp8)


def test_kinds_of_scales():
    assert [scales_of(along) for along in ([], [0, 0], [128, 0], [256, 128], [128, 32], [16])] == [
        *("one", "one", "blocks", "blocks", "mx", "nvfp4")
    ]


@pytest.mark.parametrize(
    ("scales", "large"), [("one", 3296), ("blocks", 2944), ("mx", 3008), ("nvfp4", 5952)]
)
def test_what_the_page_on_gpus_says_of_a_b200(scales, large):
    """As below."""

    def gain(n):
        times = expected(work_of((n, n, n)), RATES["B200"], scales, ON_BLACKWELL)
        return times.bf16 / times.fp8

    assert gain(large - 32) < 1 < gain(large)


@pytest.mark.parametrize(
    ("scales", "large"), [("one", 2048), ("blocks", 1664)], ids=["one scale", "blocks"]
)
def test_what_the_page_on_gpus_says_of_whole_layers(scales, large):
    """The first multiple of 32 from which a layer is faster in FP8 than if it is not converted."""

    def gain(n):
        times = expected(work_of((n, n, n)), RATES["H200"], scales, ON_HOPPER)
        return times.bf16 / times.fp8

    assert gain(large - 32) < 1 < gain(large)
    assert 1.4 < gain(4096) < gain(8192) < 2
