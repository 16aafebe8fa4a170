"""The statistics of a run by tensor and step, and signs of faults in one tensor's statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jfp8.conversion.product_report import Report
from jfp8.debug.records import TensorStats, steps_of
from jfp8.scaling.formats import Format, format_called

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
      severity: ``"error"`` (training loses numbers that it needs), ``"warning"`` (it costs accuracy
        or will), or ``"note"``.
      fault: its name, ``"outliers"``.
      tensor: `TensorStats.name` of the tensor, or the path of a layer.
      steps: the steps in which it was seen; empty if the statistics have no steps.
      evidence: a sentence with the numbers that say so.
      remedy: a sentence that says what to do.
    """

    severity: Severity
    fault: str
    tensor: str
    steps: tuple[int, ...]
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Run:
    """The statistics of a training run."""

    tensors: tuple[tuple[TensorStats, ...], ...]  # in program order; of each its rows by step
    products: Report | None = None  # the model's, if `jfp8.report` was asked

    @staticmethod
    def of(rows: Iterable[TensorStats], products: Report | None = None) -> Run:
        """Sort `rows` by tensor and step."""
        found: dict[tuple[object, ...], list[TensorStats]] = {}
        for row in rows:
            key = (row.path, row.index, row.tensor, row.products, row.recipe, row.format)
            # Only the place in the program tells layers without a path apart.
            found.setdefault(key if row.path else (*key, row.order), []).append(row)
        tensors = sorted(found.values(), key=lambda rows: rows[0].order)
        return Run(tuple(tuple(sorted(t, key=step_of)) for t in tensors), products)

    def without_non_finite_steps(self) -> Run:
        """Leave out the steps in which anything was not finite: no other sign is sure there."""
        bad = {row.step for tensor in self.tensors for row in tensor if row.nonfinite > 0}
        kept = (tuple(row for row in tensor if row.step not in bad) for tensor in self.tensors)
        return Run(tuple(tensor for tensor in kept if tensor), self.products)


Fault = Callable[[Run], Iterator[Finding]]


def found_in(
    rows: Sequence[TensorStats], severity: Severity, fault: str, evidence: str, remedy: str
) -> Finding:
    """Return a finding about samples of one tensor."""
    return Finding(severity, fault, rows[0].name, steps_of(rows), evidence, remedy)


def step_of(row: TensorStats) -> int:
    """Return the step of a sample, or -1."""
    return -1 if row.step is None else row.step


# Fractions of elements that become zero. In healthy trainings of small language models, under every
# 8-bit recipe, at most 1.1 % of any tensor do in any step. If half do, gradients no longer arrive.
# (In E2M1 most elements below a 24th of their block's largest become zero, up to 29 % of a tensor
# in healthy trainings: there half are many.)
MANY_LOST, MOST_LOST = 0.1, 0.5
# Headroom in bits at which values are cut to half of themselves. Under delayed scaling that happens
# in single steps of healthy trainings too, since no history knows the future.
CUT_IN_HALF = -1.0
# So it is a fault only in more than a tenth of the steps. Of 17 amaxes of one distribution, the
# newest is the largest in 1 case of 17: a history of 16 saturates in 6 % of the steps, mostly by
# little.
OFTEN = 0.1
# Error of more than a quarter of the signal, by size. Rounding to nearest leaves 31 dB in E4M3, 25
# in E5M2, and about 20 in E2M1; stochastic rounding 4 to 5 dB less.
NOISY = 12.0


def at_step(row: TensorStats) -> str:
    """Return the step of a sample in words."""
    return "" if row.step is None else f" at step {row.step}"


def percent(fraction: float) -> str:
    """Return a fraction in words."""
    return f"{100 * fraction:.3g} %"


def is_gradient(row: TensorStats) -> bool:
    """Decide if the tensor is a gradient."""
    return row.tensor in ("grad", "d_lhs", "d_rhs")


def severity_of(row: TensorStats, cut: bool = False) -> Severity:
    """Return "error" if most of the elements are lost, by saturation (`cut`) or as zeros."""
    return "error" if (row.overflow if cut else row.underflow) >= MOST_LOST else "warning"


def is_often(bad: Sequence[TensorStats], rows: Sequence[TensorStats]) -> bool:
    """Decide if too many of all samples are bad to be exceptions."""
    return len(bad) > OFTEN * len(rows)


def vanishing_samples(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """Return the samples in which many elements become zero, if there are too many."""
    many = MANY_LOST if format_called(tensor[0].format).bits >= 8 else MOST_LOST
    bad = [row for row in tensor if row.underflow >= many]
    return bad if is_often(bad, tensor) else []


def saturated_samples(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """Return the samples in which values were cut in half, or worse."""
    return [row for row in tensor if row.headroom <= CUT_IN_HALF]


def what_vanished(row: TensorStats) -> str:
    """Describe an underflow, as the beginning of a sentence."""
    return f"{percent(row.underflow)} of it becomes zero{at_step(row)}"


def what_saturated(row: TensorStats) -> str:
    """Describe an overflow, as a sentence."""
    return (
        f"Values up to {row.amax:.3g} are cut to {row.amax * 2**row.headroom:.3g}{at_step(row)}, "
        f"{percent(row.overflow)} of its elements."
    )


def has_no_scale(tensor: Sequence[TensorStats]) -> bool:
    """Decide if the scale is 1 whatever the tensor is."""
    return not tensor[0].history and all(
        row.scale_min == row.scale_max == 1.0 for row in tensor if row.amax > 0
    )


def fraction_above(row: TensorStats, exponent: float) -> float:
    """Return the fraction of nonzero elements from ``2^exponent`` up, spread evenly in bins."""
    total = sum(row.exponents.values())
    part = sum(n * min(max(e + 1 - exponent, 0.0), 1.0) for e, n in row.exponents.items())
    return part / total if total else 1.0


def exponent_at(quantile: float, row: TensorStats) -> int:
    """Return the exponent of the nonzero element at that quantile."""
    below, total = 0, sum(row.exponents.values())
    for exponent, n in sorted(row.exponents.items()):
        below += n
        if below > quantile * total:
            return exponent
    return 0


def beyond_any_scale(row: TensorStats, fmt: Format | None = None) -> bool:
    """Decide if many elements would vanish even under the best scale for the whole tensor.

    The best is ``amax / fmt.max``, under which elements below half of the smallest value become
    zero. If there are several scales, they are the best already.
    """
    fmt = fmt or format_called(row.format)
    if row.scale_min != row.scale_max or not row.amax:
        return True
    binades = math.log2(fmt.max / fmt.smallest_subnormal) + 1
    return 1 - fraction_above(row, math.log2(row.amax) - binades) >= MANY_LOST / 2
