"""Faults that show in the values of single samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jfp8.debug.faults.evidence import (
    MANY_LOST,
    NOISY,
    OFTEN,
    Finding,
    Run,
    Severity,
    at_step,
    beyond_any_scale,
    exponent_at,
    found_in,
    fraction_above,
    has_no_scale,
    is_gradient,
    is_often,
    percent,
    saturated_samples,
    severity_of,
    step_of,
    vanishing_samples,
    what_saturated,
    what_vanished,
)
from jfp8.debug.records import TensorStats, steps_of
from jfp8.scaling.formats import E5M2, format_called
from jfp8.scaling.printing import counted


def non_finite(run: Run) -> Iterator[Finding]:
    """Find the first tensor with a NaN or Inf, in the first step that has one."""
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
    first = min((row.order for row in rows if row.tensor == "lhs"), default=-1)
    remedy = _ONCE if once else _of_non_finite(source, first)
    yield Finding(severity, "non_finite", source.name, steps_of(in_step), evidence, remedy)


_ONCE = (
    "The gradient overflowed once. A dynamic loss scale does that when it has grown too far, and "
    "falls by itself: nothing to do if you use jfp8.loss_scale()."
)


def _of_non_finite(source: TensorStats, first_order: int) -> str:
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


_OF_ZEROS = {
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
    """Find operands that are zero in every sample; one alone may show how training begins."""
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
        if role not in _OF_ZEROS or any(row.amax > 0 for row in rows):
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
            _OF_ZEROS[role],
        )


def no_scale(run: Run) -> Iterator[Finding]:
    """Find tensors that lose by a cast without a scale (as in direct_e5m2 and unscaled)."""
    unscaled = [tensor for tensor in run.tensors if has_no_scale(tensor)]
    gradients = [tensor for tensor in unscaled if is_gradient(tensor[0])]
    yield from _gradients_without_scale(gradients)
    for tensor in unscaled:
        vanishing, cut = vanishing_samples(tensor), saturated_samples(tensor)
        if is_gradient(tensor[0]) or not (vanishing or cut):
            continue
        worst = max(vanishing or cut, key=lambda row: row.underflow + row.overflow)
        lost = f"{what_vanished(worst)}, cast without a scale."
        yield found_in(
            vanishing or cut,
            severity_of(worst, cut=not vanishing),
            "no_scale",
            lost if vanishing else what_saturated(worst),
            "Use a recipe with scales, such as DelayedScaling() or Float8CurrentScaling().",
        )


def _gradients_without_scale(gradients: Sequence[Sequence[TensorStats]]) -> Iterator[Finding]:
    """Find gradients that one loss scale for all, bounded by the largest, does not keep."""
    samples = [row for tensor in gradients for row in tensor if row.amax > 0]
    # A factor of 2 is left for steps to come.
    room = math.floor(min((row.headroom for row in samples), default=0.0) - 1)
    silent = sum(all(row.amax == 0 for row in tensor) for tensor in gradients)
    vanishing = [(tensor, _too_small_samples(tensor)) for tensor in gradients]
    needed = [max(map(_bits_to_keep, bad), default=0) for _, bad in vanishing]
    of_all = max(needed, default=0)
    for (tensor, bad), own in zip(vanishing, needed, strict=True):
        cut = saturated_samples(tensor)
        if bad:
            worst = max(bad, key=lambda row: row.underflow)
            end = round(math.log2(format_called(worst.format).smallest_subnormal))
            evidence = (
                f"{what_vanished(worst)} (SQNR "
                f"{worst.sqnr:.0f} dB): most of it is around 2^{exponent_at(0.5, worst)}, and "
                f"{worst.format} without a scale ends at 2^{end}."
            )
            if silent:
                evidence += f" Zero throughout: {counted(silent, 'gradient')}."
            raised = of_all if of_all <= room else own
            if 0 < raised <= room:
                remedy = (
                    f"Raise the loss scale by a factor of 2^{raised} "
                    f"(jfp8.loss_scale(init_scale=...); 2^{room} at the most, or others overflow)."
                )
            else:
                remedy = (
                    "Use a recipe with scales for gradients, such as DelayedScaling(): no loss "
                    "scale suits both this one and the largest gradient, which has "
                    + (f"room for 2^{room}." if room > 0 else "no room left.")
                )
            yield found_in(bad, severity_of(worst), "vanishing_gradient", evidence, remedy)
        elif cut:
            worst = min(cut, key=lambda row: row.headroom)
            remedy = (
                f"Lower the loss scale by a factor of 2^{_bits_above(gradients)} at least, or "
                "use a recipe with scales for gradients, such as DelayedScaling()."
            )
            yield found_in(cut, "error", "saturated_gradient", what_saturated(worst), remedy)


def _too_small_samples(gradient: Sequence[TensorStats]) -> list[TensorStats]:
    """Return the samples in which a gradient becomes zero, or keeps next to no bits."""
    bad = [row for row in gradient if row.underflow >= MANY_LOST or row.sqnr < NOISY]
    bad = [row for row in bad if row.headroom > 0 and row.amax > 0]
    return bad if is_often(bad, gradient) else []


def _bits_above(gradients: Sequence[Sequence[TensorStats]]) -> int:
    """Return the bits by which all gradients have to shrink for none to saturate.

    Results of products are stored too (``d_lhs``, ``d_rhs``). Those of gradients that were cut are
    too small themselves, so both cuts count.
    """
    bits = {True: 0, False: 0}
    for tensor in gradients:
        highest = min((row.headroom for row in tensor), default=0.0)
        stored = tensor[0].tensor != "grad"
        bits[stored] = max(bits[stored], math.ceil(-highest))
    return sum(bits.values())


def _bits_to_keep(row: TensorStats) -> int:
    """Return the bits by which a tensor has to grow for 99 % of it to become normal numbers."""
    return max(0, format_called(row.format).min_exponent - exponent_at(0.01, row))


# Remedies for recipes with several scales, which are finer.
_FINER = {
    "rowwise": "Its scales serve whole rows: use block scales, so that the largest elements cost "
    "only their neighbors: MXFP8BlockScaling() (32 of them) or Float8BlockScaling() (128)",
    "block": "Its scales serve blocks of 128: use MXFP8BlockScaling(), whose blocks are of 32",
    "nvfp4": "Its blocks share the range of one scale for the tensor: use MXFP8BlockScaling(), "
    "whose blocks have a range of their own",
}
_PERHAPS_FINER = "Try MXFP8BlockScaling(), whose scales serve 32 elements, if its own serve more"


def outliers(run: Run) -> Iterator[Finding]:
    """Find tensors that span more than their format: large elements cost the others bits."""
    for tensor in run.tensors:
        bad = [row for row in vanishing_samples(tensor) if beyond_any_scale(row)]
        if not bad or has_no_scale(tensor):
            continue  # without a scale, `no_scale` reports it
        worst = max(bad, key=lambda row: row.underflow)
        spread = math.log2(worst.amax) - exponent_at(0.5, worst)
        top = fraction_above(worst, math.log2(worst.amax) - 8)
        exempt = f'exempt the layer: jfp8.convert(..., exempt=(*jfp8.EDGES, "{worst.path}"))'
        if worst.recipe == "mxfp8":
            remedy = f"No recipe has finer scales with this range: {exempt}."
        elif worst.scale_min != worst.scale_max or worst.recipe in _FINER:
            remedy = f"{_FINER.get(worst.recipe, _PERHAPS_FINER)}; or {exempt}."
        elif is_gradient(worst) and not beyond_any_scale(worst, E5M2):
            remedy = (
                f'Give gradients the range of E5M2 (fp8_format="HYBRID"), use block scales '
                f"(MXFP8BlockScaling(), Float8BlockScaling()), or {exempt}."
            )
        else:
            remedy = (
                "Use block scales, so that the largest elements cost only their neighbors: "
                f"MXFP8BlockScaling() or Float8BlockScaling(); or {exempt}."
            )
        yield found_in(
            bad,
            severity_of(worst),
            "outliers",
            f"{what_vanished(worst)}: its amax, "
            f"{worst.amax:.3g}, is 2^{spread:.0f} times its median, and {percent(top)} of its "
            f"elements are within 2^8 of it.",
            remedy,
        )


def noise(run: Run) -> Iterator[Finding]:
    """Find tensors that are inaccurate although few elements vanish or saturate."""
    for tensor in run.tensors:
        known = [row for row in tensor if row.amax > 0 and not math.isnan(row.sqnr)]
        bad = [row for row in known if row.sqnr < NOISY]
        said = vanishing_samples(tensor) or saturated_samples(tensor) or has_no_scale(tensor)
        if said or len(bad) <= len(known) / 2:
            continue
        worst = min(bad, key=lambda row: row.sqnr)
        yield found_in(
            bad,
            "warning",
            "noise",
            f"Its error is {percent(10 ** (-worst.sqnr / 20))} of it by size (SQNR "
            f"{worst.sqnr:.1f} dB){at_step(worst)}, in {len(bad)} of {len(known)} samples.",
            f"{worst.format} has too few bits for it: use a recipe with more, finer scales, or "
            f'exempt the layer: exempt=(*jfp8.EDGES, "{worst.path}").',
        )
