"""The fault that comes before all others: NaN and Inf."""

from __future__ import annotations

from collections.abc import Iterator

from jfp8.debug.faults.evidence import OFTEN, at_step, is_gradient, percent
from jfp8.debug.faults.run import Finding, Run, Severity, step_of, steps_of


def non_finite(run: Run) -> Iterator[Finding]:
    """The first tensor with a NaN or Inf, in the first step that has one; others follow from it."""
    bad = [row for tensor in run.tensors for row in tensor if row.nonfinite > 0]
    if not bad:
        return
    first_step = min(map(step_of, bad))
    in_step = [row for row in bad if step_of(row) == first_step]
    source = min(in_step, key=lambda row: row.order)
    steps = sorted({step_of(row) for row in bad})
    all_steps = sorted({step_of(row) for tensor in run.tensors for row in tensor})
    others = f", and {len(in_step) - 1} more after it" if len(in_step) > 1 else ""
    evidence = (
        f"{percent(source.nonfinite)} of its elements are NaN or Inf{at_step(source)}: the first "
        f"tensor in the program that has any{others}."
    )
    if len(steps) == 1 and steps[0] != all_steps[-1]:
        evidence += " Later steps are finite again."
    first_order = min(row.order for tensor in run.tensors for row in tensor)
    lasting = steps[-1] == all_steps[-1] and len(steps) > 1
    skip = " jfp8.TrainState and jfp8.skip_on_overflow skip such steps."
    severity: Severity = "error"
    if is_gradient(source):
        once = not lasting and len(steps) <= OFTEN * len(all_steps)
        severity = "note" if once else "error"
        remedy = "The forward pass is finite, so the gradient overflowed: lower the loss scale."
        if once:
            remedy = (
                "The gradient overflowed once. A dynamic loss scale does that when it has grown "
                "too far, and falls by itself: nothing to do if you use jfp8.loss_scale()."
            )
    elif source.tensor == "rhs":
        remedy = (
            "The weight itself is not finite, so an earlier step has broken it: look for the first "
            "gradient that was not, and do not apply such steps." + skip
        )
    elif source.order == first_order:
        remedy = (
            "Nothing in FP8 comes before it: clean the data, or look at what is computed of it "
            "first (embedding, normalization). jnp.isfinite(batch).all() tells which." + skip
        )
    else:
        remedy = (
            "Its weight and all before it are finite, so what is computed between that and "
            f"{source.layer} makes it: a division, a logarithm, an exponential. Setting "
            "jax_debug_nans finds the line." + skip
        )
    yield Finding(severity, "non_finite", source.name, steps_of(in_step), evidence, remedy)
