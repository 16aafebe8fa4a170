"""Faults of scales and histories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jfp8.debug.faults.evidence import (
    FORMAT_CALLED,
    MANY_LOST,
    NOISY,
    TOO_MUCH_HEADROOM,
    at,
    between,
    beyond_any_scale,
    bits_to_keep,
    cut_in,
    cut_sentence,
    follows_itself,
    fraction_from,
    has_no_scale,
    is_gradient,
    median,
    often,
    percent,
    severity,
    smallest,
    steps_of,
    too_small_in,
    vanishing_in,
)
from jfp8.debug.faults.run import Finding, Run, step_of
from jfp8.debug.records import TensorStats
from jfp8.scaling.formats import E5M2
from jfp8.scaling.printing import counted

# Scales


def no_scale(run: Run) -> Iterator[Finding]:
    """Tensors that are cast as they are (direct_e5m2, unscaled, the gradients of hybrid)."""
    unscaled = [tensor for tensor in run.tensors if has_no_scale(tensor)]
    gradients = [tensor for tensor in unscaled if is_gradient(tensor[0])]
    yield from _gradients_without_scale(gradients)
    for tensor in unscaled:
        vanishing, cut = vanishing_in(tensor), cut_in(tensor)
        if is_gradient(tensor[0]) or not (vanishing or cut):
            continue
        worst = max(vanishing or cut, key=lambda row: row.underflow + row.overflow)
        lost = f"{percent(worst.underflow)} of it becomes zero{at(worst)}, cast without a scale."
        yield Finding(
            severity(worst, cut=not vanishing),
            "no_scale",
            worst.name,
            steps_of(vanishing or cut),
            lost if vanishing else cut_sentence(worst),
            "Use a recipe with scales, such as DelayedScaling() or Float8CurrentScaling().",
        )


def _gradients_without_scale(gradients: Sequence[Sequence[TensorStats]]) -> Iterator[Finding]:
    """What only the loss scale keeps in range. It is one for all, so the largest bounds it."""
    samples = [row for tensor in gradients for row in tensor if row.amax > 0]
    # A factor of 2 is left for steps to come.
    room = math.floor(min((row.headroom for row in samples), default=0.0) - 1)
    silent = sum(all(row.amax == 0 for row in tensor) for tensor in gradients)
    vanishing = [(tensor, too_small_in(tensor)) for tensor in gradients]
    needed = [max(map(bits_to_keep, bad), default=0) for _, bad in vanishing]
    of_all = max(needed, default=0)
    for (tensor, bad), own in zip(vanishing, needed, strict=True):
        name, cut = tensor[0].name, cut_in(tensor)
        if bad:
            worst = max(bad, key=lambda row: row.underflow)
            evidence = (
                f"{percent(worst.underflow)} of it becomes zero{at(worst)} (SQNR "
                f"{worst.sqnr:.0f} dB): most of it is around 2^{median(worst)}, and "
                f"{worst.format} without a scale ends at 2^{smallest(FORMAT_CALLED[worst.format])}."
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
            yield Finding(
                severity(worst), "vanishing_gradient", name, steps_of(bad), evidence, remedy
            )
        elif cut:
            worst = min(cut, key=lambda row: row.headroom)
            remedy = (
                f"Lower the loss scale by a factor of 2^{math.ceil(-worst.headroom)} at least, or "
                "use a recipe with scales for gradients, such as DelayedScaling()."
            )
            sentence = cut_sentence(worst)
            yield Finding("error", "saturated_gradient", name, steps_of(cut), sentence, remedy)


def stale_history(run: Run) -> Iterator[Finding]:
    """Delayed scaling whose history does not follow the tensor. Nothing is judged by a threshold.

    In a history that is kept up, an amax that saturated raises the scale of the next step; no entry
    outlives its length; and the scale is not just that of the tensor at hand.
    """
    frozen = run.frozen()
    for i, tensor in enumerate(run.tensors):
        if not tensor[0].history:
            continue
        same, alone = frozen.get(i), follows_itself(tensor)
        lost = max(row.underflow + row.overflow for row in tensor)
        if same:
            low, high = min(r.amax for r in same), max(r.amax for r in same)
            yield Finding(
                "error" if lost >= MANY_LOST or cut_in(tensor) else "warning",
                "stale_history",
                tensor[0].name,
                steps_of(same),
                f"Its scale stays {same[0].scale_max:.4g} in all of {len(same)} samples"
                f"{between(same)}, while its amax moves from {low:.3g} to {high:.3g}.",
                "The history is not kept up: put the fp8 collection that a step returns into the "
                "next one (jfp8.TrainState does; in a loop of your own apply with mutable=['fp8'], "
                "or call jfp8.advance).",
            )
        elif alone and tensor[0].tensor in ("lhs", "rhs"):
            yield Finding(
                "note",
                "empty_history",
                tensor[0].name,
                steps_of(tensor),
                f"Its scale is that of its own amax in all of {len(tensor)} samples: its history "
                "is empty, and delayed scaling works as current scaling.",
                "Nothing is lost but time. To get what you asked for, put the fp8 collection that "
                "a step returns into the next one, or ask for Float8CurrentScaling().",
            )


def short_history(run: Run) -> Iterator[Finding]:
    """Delayed scaling that often meets values which it no longer, or not yet, expects."""
    frozen = run.frozen()
    for i, tensor in enumerate(run.tensors):
        cut = cut_in(tensor)
        if not tensor[0].history or i in frozen or not often(cut, tensor):
            continue
        if len(cut) < 2 and max(row.overflow for row in cut) < 0.01:
            continue  # one element in one of few samples
        worst = min(cut, key=lambda row: row.headroom)
        known = max((r.amax for r in tensor if step_of(r) < step_of(worst)), default=0.0)
        length = tensor[0].history
        if known >= worst.amax / 2:
            remedy = (
                f"It has been as large before, longer ago than {length} steps: raise "
                f"amax_history_len, to {8 * length}, say."
            )
        else:
            bits = min(math.ceil(-worst.headroom), 4)
            remedy = (
                f"It grows faster than a history can tell: set margin={bits}, or use "
                "Float8CurrentScaling(), which looks at the tensor itself."
            )
        yield Finding(
            severity(worst, cut=True),
            "short_history",
            tensor[0].name,
            steps_of(cut),
            f"{cut_sentence(worst)} That happens in {len(cut)} of {len(tensor)} samples.",
            remedy,
        )


def long_history(run: Run) -> Iterator[Finding]:
    """Delayed scaling that holds room for values which are long gone, and loses those at hand."""
    frozen = run.frozen()
    for i, tensor in enumerate(run.tensors):
        bad = [row for row in vanishing_in(tensor) if row.headroom >= TOO_MUCH_HEADROOM]
        bad = [row for row in bad if not beyond_any_scale(row)]
        if not tensor[0].history or i in frozen or not bad:
            continue
        worst = max(bad, key=lambda row: row.underflow)
        yield Finding(
            severity(worst),
            "long_history",
            tensor[0].name,
            steps_of(bad),
            f"{percent(worst.underflow)} of it becomes zero{at(worst)}: its history of "
            f"{worst.history} steps expects values 2^{worst.headroom:.0f} times as large as any.",
            "A spike stays in the history for too long: lower amax_history_len, or set "
            'amax_compute_algo="most_recent"; Float8CurrentScaling() has no memory at all.',
        )


def outliers(run: Run) -> Iterator[Finding]:
    """Tensors that span more than their format does: the largest elements cost the others."""
    for tensor in run.tensors:
        bad = [row for row in vanishing_in(tensor) if beyond_any_scale(row)]
        if not bad or has_no_scale(tensor):
            continue  # without a scale, that comes first
        worst = max(bad, key=lambda row: row.underflow)
        spread = math.log2(worst.amax) - median(worst)
        top = fraction_from(worst, math.log2(worst.amax) - 8)
        exempt = f'exempt the layer: jfp8.convert(..., exempt=(*jfp8.EDGES, "{worst.path}"))'
        if worst.scale_min != worst.scale_max:
            remedy = f"Its scales are fine-grained already: {exempt}."
        elif is_gradient(worst) and not beyond_any_scale(worst, E5M2):
            remedy = (
                f'Give gradients the range of E5M2 (fp8_format="HYBRID"), use block scales '
                f"(MXFP8BlockScaling(), Float8BlockScaling()), or {exempt}."
            )
        else:
            remedy = (
                "Use block scales, so that the largest elements cost only their neighbours: "
                f"MXFP8BlockScaling() or Float8BlockScaling(); or {exempt}."
            )
        yield Finding(
            severity(worst),
            "outliers",
            tensor[0].name,
            steps_of(bad),
            f"{percent(worst.underflow)} of it becomes zero{at(worst)}: its amax, "
            f"{worst.amax:.3g}, is 2^{spread:.0f} times its median, and {percent(top)} of its "
            f"elements are within 2^8 of it.",
            remedy,
        )


def noise(run: Run) -> Iterator[Finding]:
    """Tensors that come out wrong although few elements vanish or saturate."""
    for tensor in run.tensors:
        known = [row for row in tensor if row.amax > 0 and not math.isnan(row.sqnr)]
        bad = [row for row in known if row.sqnr < NOISY]
        said = vanishing_in(tensor) or cut_in(tensor) or has_no_scale(tensor)
        if said or len(bad) <= len(known) / 2:
            continue
        worst = min(bad, key=lambda row: row.sqnr)
        yield Finding(
            "warning",
            "noise",
            tensor[0].name,
            steps_of(bad),
            f"Its error is {percent(10 ** (-worst.sqnr / 20))} of it by size (SQNR "
            f"{worst.sqnr:.1f} dB){at(worst)}, in {len(bad)} of {len(known)} samples.",
            f"{worst.format} has too few bits for it: use a recipe with more, finer scales, or "
            f'exempt the layer: exempt=(*jfp8.EDGES, "{worst.path}").',
        )
