"""Verdicts about paired runs, against published tables and draws whose true mean is known."""

import math

import numpy as np
import pytest
from scipy import special

from support.scripts import imported, run_script

equivalence = imported("equivalence", "benchmarks").equivalence


def test_the_interval_is_that_of_students_paper():
    """Hours of sleep that ten patients gained by one drug more than by another (1908): the mean is
    1.58, and its interval of 95 % that of any textbook, [0.70, 2.46]."""
    gained = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = equivalence(gained, margin=0.5, confidence=0.95)
    assert found.n == 10
    assert found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert found.verdict == "different"


# Three gaps, 0 and +-1 about a middle, have the standard error 1 / sqrt(3), and t is 2.919986.
WIDE = 2.919986 / math.sqrt(3)


@pytest.mark.parametrize(
    ("middle", "margin", "verdict"),
    [
        (0.0, WIDE + 1e-4, "equivalent"),
        (0.0, WIDE - 1e-4, "inconclusive"),  # one and the same: both ends are beyond
        (0.2, WIDE + 0.1, "inconclusive"),
        (2.0, 0.4, "inconclusive"),  # surely above 0, and not surely above the margin
        (2.0, 4.0, "equivalent"),  # surely above 0, and surely small
        (2.0, 2.0 - WIDE - 1e-4, "different"),
        (2.0, 2.0 - WIDE + 1e-4, "inconclusive"),
        (-2.0, 2.0 - WIDE - 1e-4, "different"),
    ],
)
def test_verdicts(middle, margin, verdict):
    found = equivalence([middle - 1, middle, middle + 1], margin=margin)
    assert found.verdict == verdict
    assert (found.low, found.high) == pytest.approx((middle - WIDE, middle + WIDE), abs=1e-6)
    assert (found.pairs_needed <= found.n) == (verdict != "inconclusive")


def test_pairs_needed_tell_if_nothing_changes():
    """Of gaps m - a and m + a in equal numbers, mean and spread are known for any number."""
    found = equivalence([-0.4, 0.6] * 2)
    assert found.verdict == "inconclusive"
    spread, needed = np.std([-0.4, 0.6] * 2, ddof=1), int(found.pairs_needed)
    half = lambda n: special.stdtrit(n - 1, 0.95) * spread / math.sqrt(n)
    assert half(needed) < 0.25 - 0.1 <= half(needed - 1)
    assert equivalence([-50.0, 50.0]).pairs_needed == math.inf
    many = equivalence([-3.0, 3.0] * 600)  # the error of the mean is 3 / sqrt(1199)
    assert (many.verdict, many.pairs_needed <= 1200) == ("equivalent", True)


def test_errors_are_as_rare_as_promised():
    """Runs whose true gap is the margin are called equivalent in 5 % of cases, of 400 in 20 +- 4.4;
    the interval holds the true mean in 90 %, of 400 in 360 +- 6."""
    draws = np.random.default_rng(0).normal(0.25, 0.1, (400, 6))
    found = [equivalence(gaps) for gaps in draws]
    assert 20 - 13 <= sum(f.verdict == "equivalent" for f in found) <= 20 + 13
    assert 20 - 13 <= sum(f.verdict == "different" for f in found) <= 20 + 13
    assert 360 - 18 <= sum(f.low < 0.25 < f.high for f in found) <= 360 + 18


@pytest.mark.parametrize(
    ("gaps", "options", "message"),
    [
        ([0.1], {}, r"the shape \(1,\).*two or more.*Train from more seeds"),
        ([[0.1, 0.2]], {}, r"the shape \(1, 2\)"),
        ([0.1, math.nan, math.inf], {}, "2 of 3 gaps are NaN or Inf: these runs diverged"),
        ([0.1, 0.2], {"margin": 0.0}, "margin=0.0: must be above 0"),
        ([0.1, 0.2], {"margin": math.nan}, "margin=nan"),
        ([0.1, 0.2], {"confidence": 90}, "confidence=90: must be between 0 and 1"),
    ],
)
def test_what_it_cannot_judge_it_refuses(gaps, options, message):
    with pytest.raises(ValueError, match=message):
        equivalence(gaps, **options)


def test_the_command_prints_the_verdict(tmp_path):
    gaps = ["-0.53", "0.16", "0.25", "--margin", "3", "--confidence", "0.8"]
    printed = run_script("benchmarks/equivalence.py", *gaps, cwd=tmp_path)
    assert printed.rstrip() == str(equivalence([-0.53, 0.16, 0.25], margin=3, confidence=0.8))
    assert printed.rstrip().endswith("(80 %, 3 pairs), margin 3: equivalent")
