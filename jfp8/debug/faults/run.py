"""What faults are looked for in: the statistics of a run, by tensor and step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jfp8.conversion.product_rows import Report
from jfp8.debug.records import TensorStats

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
      severity: ``"error"`` (numbers are lost that training needs), ``"warning"`` (it costs accuracy
        or will), or ``"note"``.
      fault: its name, ``"outliers"``.
      tensor: `TensorStats.name` of the tensor, or the path of a layer.
      steps: those in which it was seen; empty if the statistics have no steps.
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
    """The statistics of a training run.

    Attributes:
      tensors: of each tensor its rows in the order of the steps; tensors in that of the program.
      products: what `jfp8.report` says of the model, None if nobody asked it.
    """

    tensors: tuple[tuple[TensorStats, ...], ...]
    products: Report | None = None

    @staticmethod
    def of(rows: Iterable[TensorStats], products: Report | None = None) -> Run:
        """Sort `rows` by tensor and step."""
        found: dict[tuple[object, ...], list[TensorStats]] = {}
        for row in rows:
            key = (row.path, row.index, row.tensor, row.products, row.recipe, row.format)
            # Of layers without a path nothing but their place in the program is known.
            found.setdefault(key if row.path else (*key, row.order), []).append(row)
        tensors = sorted(found.values(), key=lambda rows: rows[0].order)
        return Run(tuple(tuple(sorted(t, key=step_of)) for t in tensors), products)

    def frozen(self) -> dict[int, list[TensorStats]]:
        """The samples in which a scale stood still although its history should have moved it.

        By position in `tensors`. Where a saturated value left no trace, that is certain. A scale
        that is older than its history may be due to an amax that comes back, as in data of bytes:
        then most tensors have to be alike, since those of weights and gradients do not repeat.
        """
        same = {
            i: _same_scale(tensor)
            for i, tensor in enumerate(self.tensors)
            if tensor[0].history and tensor[0].step is not None
        }
        forgot = {i for i, rows in same.items() if _forgot(rows)}
        all_of_them = forgot | {i for i, rows in same.items() if _outlived(rows)}
        sure = all_of_them if len(all_of_them) > len(same) / 2 else forgot
        return {i: same[i] for i in sure}

    def without_non_finite_steps(self) -> Run:
        """The run without the steps in which anything was not finite: nothing else is sure then."""
        bad = {row.step for tensor in self.tensors for row in tensor if row.nonfinite > 0}
        kept = (tuple(row for row in tensor if row.step not in bad) for tensor in self.tensors)
        return Run(tuple(tensor for tensor in kept if tensor), self.products)


Fault = Callable[[Run], Iterator[Finding]]


def step_of(row: TensorStats) -> int:
    """The step of a sample; -1 for one that has none."""
    return -1 if row.step is None else row.step


def _same_scale(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """The last samples in a row with one and the same scale, while the amax moves."""
    same = list(itertools.takewhile(lambda r: r.scale_max == tensor[-1].scale_max, tensor[::-1]))
    amaxes = [row.amax for row in same]
    return same[::-1] if max(amaxes) > 1.01 * min(amaxes) else []


def _forgot(same: Sequence[TensorStats]) -> bool:
    """Whether a value that saturated did not raise the scale, as long as a history holds it."""
    pairs = itertools.pairwise(same)
    return any(a.headroom < -0.01 and step_of(b) - step_of(a) <= a.history for a, b in pairs)


def _outlived(same: Sequence[TensorStats]) -> bool:
    """Whether the scale is older than anything that its history remembers.

    Powers of two tell nothing: there the same scale serves amaxes that differ.
    """
    if len(same) < 3 or math.frexp(same[0].scale_max)[0] == 0.5:
        return False
    return step_of(same[-1]) - step_of(same[0]) > same[0].history
