"""The fault that comes before all others: NaN and Inf."""

from __future__ import annotations

from collections.abc import Iterator

from jfp8.debug.faults.evidence import OFTEN, at_step, is_gradient, percent
from jfp8.debug.faults.run import Finding, Run, Severity, step_of, steps_of
from jfp8.debug.records import TensorStats


def non_finite(run: Run) -> Iterator[Finding]:
    """The first tensor with a NaN or Inf, in the first step that has one; others follow from it."""
    rows = [row for tensor in run.tensors for row in tensor]
    bad = [row for row in rows if row.nonfinite > 0]
    if not bad:
        return
    first_step = min(map(step_of, bad))
    in_step = [row for row in bad if step_of(row) == first_step]
    source = min(in_step, key=lambda row: row.order)
    steps = sorted(set(map(step_of, bad)))
    all_steps = sorted(set(map(step_of, rows)))
    others = f", and {len(in_step) - 1} more after it" if len(in_step) > 1 else ""
    evidence = (
        f"{percent(source.nonfinite)} of its elements are NaN or Inf{at_step(source)}: the first "
        f"tensor in the program that has any{others}."
    )
    if len(steps) == 1 and steps[0] != all_steps[-1]:
        evidence += " Later steps are finite again."
    lasting = steps[-1] == all_steps[-1] and len(steps) > 1
    once = is_gradient(source) and not lasting and len(steps) <= OFTEN * len(all_steps)
    severity: Severity = "note" if once else "error"
    remedy = _ONCE if once else _remedy(source, min(row.order for row in rows))
    yield Finding(severity, "non_finite", source.name, steps_of(in_step), evidence, remedy)


_ONCE = (
    "The gradient overflowed once. A dynamic loss scale does that when it has grown too far, and "
    "falls by itself: nothing to do if you use jfp8.loss_scale()."
)


def _remedy(source: TensorStats, first_order: int) -> str:
    """Say what to do about the first tensor that is not finite."""
    if is_gradient(source):
        return "The forward pass is finite, so the gradient overflowed: lower the loss scale."
    if source.tensor == "rhs":
        cause = (
            "The weight itself is not finite, so an earlier step has broken it: look for the first "
            "gradient that was not, and do not apply such steps."
        )
    elif source.order == first_order:
        cause = (
            "Nothing in FP8 comes before it: clean the data, or look at what is computed of it "
            "first (embedding, normalization). jnp.isfinite(batch).all() tells which."
        )
    else:
        cause = (
            "Its weight and all before it are finite, so what is computed between that and "
            f"{source.layer} makes it: a division, a logarithm, an exponential. Setting "
            "jax_debug_nans finds the line."
        )
    return f"{cause} jfp8.TrainState and jfp8.skip_on_overflow skip such steps."
