"""Faults of tensors that are cast without a scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jfp8.debug.faults.evidence import (
    MANY_LOST,
    NOISY,
    exponent_at,
    has_no_scale,
    is_gradient,
    is_often,
    saturated_samples,
    severity_of,
    vanishing_samples,
    what_saturated,
    what_vanished,
)
from jfp8.debug.faults.run import Finding, Run, found_in
from jfp8.debug.records import TensorStats
from jfp8.scaling.formats import format_called
from jfp8.scaling.printing import counted


def no_scale(run: Run) -> Iterator[Finding]:
    """Tensors that are cast as they are (direct_e5m2, unscaled, the gradients of hybrid)."""
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
    """Gradients that only the loss scale keeps in range: one for all, bounded by the largest."""
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
    """The samples in which a gradient without a scale becomes zero, or keeps next to no bits."""
    bad = [row for row in gradient if row.underflow >= MANY_LOST or row.sqnr < NOISY]
    bad = [row for row in bad if row.headroom > 0 and row.amax > 0]
    return bad if is_often(bad, gradient) else []


def _bits_above(gradients: Sequence[Sequence[TensorStats]]) -> int:
    """By how many bits all gradients have to shrink for none to saturate.

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
    """By how many bits the tensor has to grow for 99 of 100 elements to become normal numbers."""
    return max(0, format_called(row.format).min_exponent - exponent_at(0.01, row))
