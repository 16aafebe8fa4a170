"""`equivalence`: whether paired runs differ by less than a margin, or are too few to tell."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

Verdict = Literal["equivalent", "different", "cannot be told"]

MOST_PAIRS = 1000  # that `Equivalence.pairs_needed` counts up to


@dataclass(frozen=True, repr=False)
class Equivalence:
    """What `equivalence` found; prints as one line.

    Attributes:
      n: number of pairs.
      mean: the mean of their gaps.
      low, high: ends of the confidence interval of the mean.
      margin: the largest gap that does not matter, to either side.
      confidence: the level of the interval.
      verdict: ``"equivalent"`` if the interval lies between ``-margin`` and ``margin``,
        ``"different"`` if all of it lies beyond one of them, else ``"cannot be told"``.
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
        if told == "cannot be told":
            pairs = math.isfinite(self.pairs_needed)
            number = f"about {self.pairs_needed:.0f}" if pairs else f"more than {MOST_PAIRS:,}"
            told += f"; {number} pairs might tell"
        of = f"({100 * self.confidence:g} %, {self.n} pairs)"
        return f"{interval} {of}, margin {self.margin:g}: {told}"

    __repr__ = __str__


def equivalence(
    gaps: jax.typing.ArrayLike, *, margin: float = 0.25, confidence: float = 0.9
) -> Equivalence:
    """Whether runs in FP8 are as good as those in high precision, to within a margin. ::

        low, high = mean(gaps) -+ t * std(gaps) / sqrt(n)     t: quantile (1 + confidence) / 2 of
                                                              Student's distribution, n - 1 degrees
        "equivalent"       -margin < low and high < margin
        "different"        high < -margin or margin < low
        "cannot be told"   otherwise

    Finding no difference does not prove that there is none: few runs find nothing. So equivalence
    is what has to be shown. A 90 % interval inside the margins is two one-sided tests at 5 % each:
    runs whose true mean gap is a margin or more are called equivalent in at most one case of 20. A
    gap can be significantly different from 0 and still equivalent, if it is small: ``low`` and
    ``high`` then have the same sign.

    The gaps should be independent of each other and without a long tail (a median far from the mean
    shows one). Test once, not after each pair until you like the answer.

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

    >>> import jfp8
    >>> jfp8.debug.equivalence([0.06, 0.15, 0.15, -0.02, 0.11, 0.03])
    +0.08 [+0.0235, +0.137] (90 %, 6 pairs), margin 0.25: equivalent
    >>> jfp8.debug.equivalence([-0.53, 0.16, 0.25]).verdict
    'cannot be told'

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

    n, mean, spread = values.size, float(values.mean()), float(values.std(ddof=1))
    half = _half_width(n, spread, confidence)
    low, high = mean - half, mean + half
    verdict: Verdict = "cannot be told"
    if -margin < low and high < margin:
        verdict = "equivalent"
    elif high < -margin or margin < low:
        verdict = "different"
    needed = _pairs_needed(abs(abs(mean) - margin), spread, confidence, max(n, MOST_PAIRS))
    return Equivalence(n, mean, low, high, margin, confidence, verdict, needed)


def _half_width(n: int, spread: float, confidence: float) -> float:
    return t_quantile((1 + confidence) / 2, n - 1) * spread / math.sqrt(n)


def _pairs_needed(distance: float, spread: float, confidence: float, most: int) -> float:
    """The fewest pairs whose interval extends less than `distance` to either side, by bisection."""
    too_few, enough = 1, most
    if _half_width(enough, spread, confidence) >= distance:
        return math.inf
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _half_width(middle, spread, confidence) < distance:
            enough = middle
        else:
            too_few = middle
    return enough


@functools.cache
def t_quantile(p: float, degrees: int) -> float:
    """The quantile `p` >= 1/2 of Student's distribution.

    For whole degrees of freedom ``v``, with ``t = sqrt(v) tan(a)``, the probability is a finite sum
    (Abramowitz and Stegun 26.7.3 and 26.7.4)::

        P(|T| < t) = sin(a) (1 + 1/2 c^2 + 1*3/(2*4) c^4 + ... c^(v-2))                     v even
        P(|T| < t) = 2/pi (a + sin(a) (c + 2/3 c^3 + 2*4/(3*5) c^5 + ... c^(v-2)))          v odd

    where ``c = cos(a)``. It grows with the angle, which is found by bisection.
    """
    odd = degrees % 2
    k = np.arange(1, (degrees - odd) // 2)  # the terms after the first
    ratios = (2 * k - 1 + odd) / (2 * k + odd)
    few = degrees == 1  # the sum of which is empty

    def within(angle: float) -> float:
        c = math.cos(angle)
        terms = np.cumprod(ratios * c * c).sum() + 1.0
        total = math.sin(angle) * (0.0 if few else terms)
        return 2 / math.pi * (angle + c * total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 2 * p - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)
