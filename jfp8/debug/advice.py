"""Name the tensors that break under FP8, and a remedy for each, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jfp8.conversion.product_report import Report
from jfp8.conversion.tables import Printed
from jfp8.debug.faults import FAULTS, NAMES
from jfp8.debug.faults.evidence import Finding, Run
from jfp8.debug.faults.values import non_finite
from jfp8.debug.records import TensorStats, check_report, check_rows, steps_of
from jfp8.scaling.printing import counted, listed

_ORDER = {"error": 0, "warning": 1, "note": 2}
_PRINTED = 3  # findings of one fault that are printed in full


@dataclass(frozen=True, repr=False)
class Advice(Printed):
    """Findings of `advice`; print as sentences.

    Attributes:
      findings: all faults, the worst first; a fault that spreads to other tensors is reported for
        the first of them in the program. Empty if nothing is wrong.
      n_tensors: number of tensors that were examined.
      steps: first and last step; None if the statistics have no steps.
    """

    findings: tuple[Finding, ...]
    n_tensors: int
    steps: tuple[int, int] | None

    def of(self, fault: str) -> tuple[Finding, ...]:
        """Return the findings of one `fault`, such as ``"outliers"``.

        Raises:
          ValueError: no fault has this name.
        """
        if fault not in NAMES:
            raise ValueError(f"advice knows no fault {fault!r}. Faults: {', '.join(NAMES)}.")
        return tuple(f for f in self.findings if f.fault == fault)

    def __str__(self) -> str:
        lines = [self._headline()]
        for fault in dict.fromkeys(finding.fault for finding in self.findings):
            group = self.of(fault)
            printed = group[:_PRINTED]
            for finding, following in zip(printed, [*printed[1:], None], strict=True):
                head = f"{finding.severity}: {finding.tensor} ({fault})"
                lines += ["", head, f"  {finding.evidence}"]
                if following is None or following.remedy != finding.remedy:
                    lines.append(f"  -> {finding.remedy}")
            if rest := group[_PRINTED:]:
                named = listed([finding.tensor for finding in rest], _PRINTED)
                lines += ["", f"  The same ({fault}): {named}."]
        return "\n".join(lines)

    def _headline(self) -> str:
        if not self.n_tensors:
            return "No tensor in FP8 was recorded."
        seen = counted(self.n_tensors, "tensor")
        seen += f", steps {self.steps[0]} to {self.steps[1]}" if self.steps else ""
        if not self.findings:
            return f"Nothing is wrong ({seen})."
        count = lambda kind: sum(f.severity == kind for f in self.findings)
        found = [counted(count(kind), kind) for kind in _ORDER if count(kind)]
        return f"{', '.join(found)} ({seen})."


def advice(rows: Iterable[TensorStats], products: Report | None = None) -> Advice:
    """Name the tensors that lose what training needs, and a remedy for each.

    docs/debugging.md lists the faults that it knows. What happens now and then in healthy training
    runs is left out. Several samples tell more than one, above all about histories.

    Args:
      rows: statistics of one or more steps, from ``Stats.rows(step)``, ``Recorder.rows``, or
        `read_jsonl`.
      products: the result of ``jfp8.report(model, variables, x)`` for the same model. Rows describe
        tensors in FP8; the report adds the products that are not.

    Returns:
      `Advice`: ``print`` it, or read ``.findings``.

    Raises:
      TypeError: `rows` are not rows of statistics, or `products` is not a `jfp8.Report`.

    >>> import jax.numpy as jnp, jfp8
    >>> def product(x):
    ...     return jfp8.scaled_dot_general(
    ...         x, jnp.ones((512, 4)), (((1,), (0,)), ((), ())),
    ...         recipe=jfp8.recipes.Float8CurrentScaling(),
    ...     )
    >>> x = jnp.ones((8, 512)).at[:, 7].set(1e7)
    >>> _, stats = jfp8.debug.stats(product)(x)
    >>> finding = jfp8.debug.advice(stats.rows()).findings[0]
    >>> finding.fault, finding.evidence[:26]
    ('outliers', '99.8 % of it becomes zero:')
    """
    rows = check_rows(rows, "advice")
    if products is not None:
        check_report(products)
    run = Run.of(rows, products)
    finite = run.without_non_finite_steps()
    found = [*non_finite(run), *(finding for fault in FAULTS for finding in fault(finite))]
    steps = steps_of(rows)
    return Advice(
        tuple(sorted(found, key=lambda finding: _ORDER[finding.severity])),
        len(run.tensors),
        (steps[0], steps[-1]) if steps else None,
    )
