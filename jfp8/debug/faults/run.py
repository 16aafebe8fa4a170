"""Where faults are looked for: the statistics of a run, by tensor and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jfp8.conversion.product_report import Report
from jfp8.debug.records import TensorStats

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
      severity: ``"error"`` (training loses numbers that it needs), ``"warning"`` (it costs accuracy
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
      tensors: the rows of each tensor in the order of the steps; tensors in that of the program.
      products: what `jfp8.report` says of the model, None if it was not asked.
    """

    tensors: tuple[tuple[TensorStats, ...], ...]
    products: Report | None = None

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


def steps_of(rows: Iterable[TensorStats]) -> tuple[int, ...]:
    """Return the steps of these samples, in order, each once."""
    return tuple(sorted({row.step for row in rows if row.step is not None}))


def step_of(row: TensorStats) -> int:
    """Return the step of a sample, or -1."""
    return -1 if row.step is None else row.step
