"""The fault of tensors whose elements are all zero."""

from __future__ import annotations

from collections.abc import Iterator

from jfp8.debug.faults.evidence import has_no_scale, is_gradient, vanishing_samples
from jfp8.debug.faults.run import Finding, Run, found_in
from jfp8.debug.records import TensorStats

_REMEDIES = {
    "lhs": "No recipe is at fault, since its elements are zero before they are cast: look at what "
    "computes it (a ReLU that is always off, a mask, a scale of zero), or at the data. Its layer "
    "gives its bias alone, and its weight learns nothing.",
    "rhs": "A weight that starts at zero is right where a branch begins closed (LoRA, the last "
    "layer of a residual block), and moves in the first steps. One that stays zero is not trained, "
    "or was lost in a checkpoint.",
    "grad": "No recipe is at fault, since its elements are zero before they are cast: look at what "
    "comes after the layer (a weight of zero, stop_gradient, a ReLU that is always off), and "
    "whether the loss is used.",
}


def dead(run: Run) -> Iterator[Finding]:
    """Operands that are zero in every sample; a single sample may show how training begins."""
    # If gradients vanish because they have no scale, those of earlier layers do too: `no_scale`
    # reports both.
    vanishing = any(
        is_gradient(rows[0]) and has_no_scale(rows) and vanishing_samples(rows)
        for rows in run.tensors
    )
    operands: dict[tuple[object, ...], list[TensorStats]] = {}
    for rows in run.tensors:
        row = rows[0]
        place = () if row.path else (row.order,)
        operands.setdefault((row.path, row.index, row.tensor, *place), []).extend(rows)
    for rows in operands.values():
        role = rows[0].tensor
        if role not in _REMEDIES or any(row.amax > 0 for row in rows):
            continue
        if role == "grad" and vanishing:
            continue
        steps = len({row.step for row in rows})
        samples = "the only sample" if steps == 1 else f"all of {steps} samples"
        yield found_in(
            rows,
            "warning" if steps > 1 else "note",
            "dead",
            f"All of it is zero in {samples}.",
            _REMEDIES[role],
        )
