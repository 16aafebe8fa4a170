"""Decide if paired runs differ by less than a margin, or are too few to tell.

Give one gap for each pair of runs with the same seed, for example 100 * (loss / float32's - 1):

    python benchmarks/equivalence.py 0.060 0.148 0.149 -0.016 0.109 0.030 --margin 0.25
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Verdict = Literal["equivalent", "different", "inconclusive"]

MOST_PAIRS = 1000  # the upper limit of `Equivalence.pairs_needed`


@dataclass(frozen=True)
class Equivalence:
    """Hold the result of `equivalence`; ``str`` is one line.

    Attributes:
      n: number of pairs.
      mean: the mean of their gaps.
      low, high: ends of the confidence interval of the mean.
      margin: the largest gap that does not matter, to either side.
      confidence: the level of the interval.
      verdict: ``"equivalent"`` if the interval lies between ``-margin`` and ``margin``,
        ``"different"`` if all of it lies beyond one of them, else ``"inconclusive"``.
      pairs_needed: an estimate of how many pairs decide, if mean and spread stay as they are; at
        most `n` if these pairs already do; ``math.inf`` above 1,000 and `n`. The mean will move, so
        about half of the time that many are too few.
    """

    n: int
    mean: float
    low: float
    high: float
    margin: float
    confidence: float
    verdict: Verdict
    pairs_needed: float

    def __str__(self) -> str:
        interval = f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"
        told: str = self.verdict
        if told == "inconclusive":
            pairs = math.isfinite(self.pairs_needed)
            number = f"about {self.pairs_needed:.0f}" if pairs else f"more than {MOST_PAIRS:,}"
            told += f"; {number} pairs may decide"
        of = f"({100 * self.confidence:g} %, {self.n} pairs)"
        return f"{interval} {of}, margin {self.margin:g}: {told}"


def equivalence(gaps: ArrayLike, *, margin: float = 0.25, confidence: float = 0.9) -> Equivalence:
    """Decide if runs in FP8 are as good as runs in high precision, to within a margin. ::

        low, high = mean(gaps) -+ t * std(gaps) / sqrt(n)     t: quantile (1 + confidence) / 2 of
                                                              Student's distribution, n - 1 degrees
        "equivalent"       -margin < low and high < margin
        "different"        high < -margin or margin < low
        "inconclusive"   otherwise

    A 90 % interval inside the margins is two one-sided tests at 5 % each: runs whose true mean gap
    is a margin or more are called equivalent in at most one case of 20. The gaps should be
    independent of each other and without a long tail (a median far from the mean shows one). Test
    once, not after each pair until you like the answer.

    Args:
      gaps: ``f64[n]``, a difference for every pair of runs with the same seed and data, in the unit
        of `margin`: ``100 * (loss / loss_f32 - 1)`` is in percent, to which the default margin of
        0.25 refers.
      margin: the largest gap that does not matter.
      confidence: the level of the interval, such as 0.9.

    Returns:
      An `Equivalence`: ``print`` it, or read ``.verdict``, ``.mean``, ``.low``, ``.high``.

    Raises:
      ValueError: fewer than two gaps, or some that are not finite; `margin` not above 0;
        `confidence` not between 0 and 1.

    References:
      D. J. Schuirmann, A comparison of the two one-sided tests procedure and the power approach for
      assessing the equivalence of average bioavailability, J. Pharmacokin. Biopharm. 15 (1987) 657.
    """
    values = np.asarray(gaps, np.float64)
    if values.ndim != 1 or values.size < 2:
        raise ValueError(
            f"gaps has the shape {values.shape}, but must be a list of two or more numbers, one "
            "for each pair of runs: a single one has no spread. Train from more seeds."
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"{int((~np.isfinite(values)).sum())} of {values.size} gaps are NaN or Inf: these runs "
            "diverged, which no mean accounts for. Count them as failures, and pass "
            "gaps[np.isfinite(gaps)] to ask about the others."
        )
    if not 0 < margin < math.inf:
        raise ValueError(
            f"margin={margin!r}: must be above 0, the gap that would not matter, such as 0.25."
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r}: must be between 0 and 1, such as 0.9.")

    n, mean = values.size, float(values.mean())
    # The interval that n pairs of this spread have, by n.
    numbers = np.arange(2, max(n, MOST_PAIRS) + 1)
    halves = t_quantile((1 + confidence) / 2, numbers - 1) * values.std(ddof=1) / np.sqrt(numbers)
    half = float(halves[n - 2])
    low, high = mean - half, mean + half
    verdict: Verdict = "inconclusive"
    if -margin < low and high < margin:
        verdict = "equivalent"
    elif high < -margin or margin < low:
        verdict = "different"
    enough = numbers[halves < abs(abs(mean) - margin)]
    needed = float(enough[0]) if enough.size else math.inf
    return Equivalence(n, mean, low, high, margin, confidence, verdict, needed)


def t_quantile(p: float, degrees: ArrayLike) -> np.ndarray:
    """Return the quantile `p` of Student's distribution with so many degrees of freedom."""
    from scipy import special  # JAX requires it, and imports it late, too

    return special.stdtrit(degrees, p)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gaps", type=float, nargs="+")
    parser.add_argument("--margin", type=float, default=0.25, help="the gap that does not matter")
    parser.add_argument("--confidence", type=float, default=0.9)
    given = parser.parse_args()
    print(equivalence(given.gaps, margin=given.margin, confidence=given.confidence))


if __name__ == "__main__":
    main()
