"""Faults of amax histories: they are not updated, are too short, or too long."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from jfp8.debug.faults.evidence import (
    MANY_LOST,
    Finding,
    Run,
    beyond_any_scale,
    found_in,
    is_often,
    saturated_samples,
    severity_of,
    step_of,
    vanishing_samples,
    what_saturated,
    what_vanished,
)
from jfp8.debug.records import TensorStats, steps_of

# A history that predicts up to 3 bits (a factor of 8) too much does no harm: E4M3's 17.8 binades,
# and the more of E5M2, leave enough.
_TOO_MUCH_HEADROOM = 3.0


def stale_history(run: Run) -> Iterator[Finding]:
    """Find delayed scaling whose history does not follow the tensor, without thresholds.

    In a history that is updated, an amax that saturated raises the scale of the next step; no entry
    outlives its length; and the scale is not simply that of the current tensor.
    """
    for tensor, same in _with_history(run):
        alone = _scale_follows_amax(tensor)
        lost = max(row.underflow + row.overflow for row in tensor)
        if same:
            low, high = min(r.amax for r in same), max(r.amax for r in same)
            steps = steps_of(same)
            when = f" of steps {steps[0]} to {steps[-1]}" if steps else ""
            yield found_in(
                same,
                "error" if lost >= MANY_LOST or saturated_samples(tensor) else "warning",
                "stale_history",
                f"Its scale stays {same[0].scale_max:.4g} in all of {len(same)} samples"
                f"{when}, while its amax moves from {low:.3g} to {high:.3g}.",
                "The history is not kept up: put the fp8 collection that a step returns into the "
                "next one (jfp8.TrainState does; in a loop of your own apply with mutable=['fp8'], "
                "or call jfp8.advance).",
            )
        elif alone and tensor[0].tensor in ("lhs", "rhs"):
            yield found_in(
                tensor,
                "note",
                "empty_history",
                f"Its scale is that of its own amax in all of {len(tensor)} samples: its history "
                "is empty, and delayed scaling works as current scaling.",
                "Nothing is lost but time. To get what you asked for, put the fp8 collection that "
                "a step returns into the next one, or ask for Float8CurrentScaling().",
            )


def short_history(run: Run) -> Iterator[Finding]:
    """Find delayed scaling that often meets values that it does not expect."""
    for tensor, stale in _with_history(run):
        cut = saturated_samples(tensor)
        if stale or not is_often(cut, tensor):
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
        yield found_in(
            cut,
            severity_of(worst, cut=True),
            "short_history",
            f"{what_saturated(worst)} That happens in {len(cut)} of {len(tensor)} samples.",
            remedy,
        )


def long_history(run: Run) -> Iterator[Finding]:
    """Find delayed scaling that leaves room for values of long ago, and loses current ones."""
    for tensor, stale in _with_history(run):
        bad = [row for row in vanishing_samples(tensor) if row.headroom >= _TOO_MUCH_HEADROOM]
        bad = [row for row in bad if not beyond_any_scale(row)]
        if stale or not bad:
            continue
        worst = max(bad, key=lambda row: row.underflow)
        yield found_in(
            bad,
            severity_of(worst),
            "long_history",
            f"{what_vanished(worst)}: its history of "
            f"{worst.history} steps expects values 2^{worst.headroom:.0f} times as large as any.",
            "A spike stays in the history for too long: lower amax_history_len, or set "
            'amax_compute_algo="most_recent"; Float8CurrentScaling() has no memory at all.',
        )


def _with_history(run: Run) -> Iterator[tuple[Sequence[TensorStats], list[TensorStats]]]:
    """Yield tensors that have a history, and the samples in which it should have changed the scale.

    A scale that is older than its history may come from an amax that recurs, as in data of bytes:
    most tensors must show it. A saturated value that did not raise the scale is proof.
    """
    tensors = [tensor for tensor in run.tensors if tensor[0].history]
    same = [_same_scale(tensor) if tensor[0].step is not None else [] for tensor in tensors]
    forgot = [_forgot(rows) for rows in same]
    either = [sure or _outlived(rows) for sure, rows in zip(forgot, same, strict=True)]
    counted = sum(tensor[0].step is not None for tensor in tensors)
    stale = either if sum(either) > counted / 2 else forgot
    for tensor, rows, is_stale in zip(tensors, same, stale, strict=True):
        yield tensor, rows if is_stale else []


def _same_scale(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """Return the last samples with the same scale, if their amax changes."""
    same = list(itertools.takewhile(lambda r: r.scale_max == tensor[-1].scale_max, tensor[::-1]))
    amaxes = [row.amax for row in same]
    return same[::-1] if max(amaxes) > 1.01 * min(amaxes) else []


def _forgot(same: Sequence[TensorStats]) -> bool:
    """Find a saturated value that did not raise the scale while the history still holds it."""
    pairs = itertools.pairwise(same)
    return any(a.headroom < -0.01 and step_of(b) - step_of(a) <= a.history for a, b in pairs)


def _outlived(same: Sequence[TensorStats]) -> bool:
    """Decide if the scale is older than anything that its history remembers.

    Scales that are powers of two prove nothing, since one serves amaxes that differ.
    """
    if len(same) < 3 or math.frexp(same[0].scale_max)[0] == 0.5:
        return False
    return step_of(same[-1]) - step_of(same[0]) > same[0].history


def _scale_follows_amax(tensor: Sequence[TensorStats]) -> bool:
    """Decide if the scale is a fixed part of the amax of the same step, which changes."""
    amaxes = [row.amax for row in tensor if row.amax > 0]
    if len(amaxes) < 3 or max(amaxes) <= 1.01 * min(amaxes):
        return False
    ratios = [row.scale_max / row.amax for row in tensor if row.amax > 0]
    return max(ratios) <= min(ratios) * (1 + 1e-5)
