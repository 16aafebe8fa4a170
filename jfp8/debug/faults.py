"""What can go wrong with a tensor in FP8, and how each case shows in its statistics.

A fault is a function ``Run -> findings``. Elements are lost because the scale of the tensor ... ::

    is always 1                                       `no_scale`
    stands still                                      `stale_history`
    comes from a history that forgets or grows late   `short_history`
    comes from a history that remembers a spike       `long_history`
    is as good as one scale can be                    `outliers`

Before any of it the tensor has to be finite, `non_finite`, and a tensor may lose too many bits
without losing elements, `noise`. Which layers are in FP8 is another matter: `edges_in_fp8`,
`little_in_fp8`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jfp8.conversion.products import ProductRow, Report
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Edge
from jfp8.debug.records import TensorStats
from jfp8.scaling.formats import E5M2, FORMATS, Format
from jfp8.scaling.printing import counted

Severity = Literal["error", "warning", "note"]

# A tenth of the elements vanishes. In trainings of small language models that go well, under every
# recipe in 8 bits, it is at most 1.1 % of any tensor in any step. Where it is half of them,
# gradients no longer arrive. (In E2M1 all below a 24th of the largest of a block becomes zero, more
# often than not: up to 29 % there, and nothing to be found in it. Its noise tells.)
MANY_LOST, MOST_LOST = 0.1, 0.5
# Values cut to half of themselves or less. Under delayed scaling that happens in good trainings,
# too, in single steps, since no history knows the future.
CUT_IN_HALF = -1.0
# So it is a fault in more than a tenth of the steps. Of 17 amaxes that are drawn alike, the newest
# is the largest in 1 case of 17: a history of 16 saturates in 6 % of the steps, mostly by little.
OFTEN = 0.1
# Nobody notices a history that predicts up to 3 bits (a factor of 8) too much: of E4M3's 17.8
# binades, and more of E5M2's, enough are left.
TOO_MUCH_HEADROOM = 3.0
# Error of more than a quarter of the signal, by size. Rounding to nearest leaves 31 dB in E4M3, 25
# in E5M2, and about 20 in E2M1; stochastic rounding 4 to 5 dB less.
NOISY = 12.0

_FORMATS = {fmt.name: fmt for fmt in FORMATS}


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
        return Run(tuple(tuple(sorted(t, key=_step_of)) for t in tensors), products)

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


# Not finite


def non_finite(run: Run) -> Iterator[Finding]:
    """The first tensor with a NaN or Inf, in the first step that has one; the rest follows it."""
    bad = [row for tensor in run.tensors for row in tensor if row.nonfinite > 0]
    if not bad:
        return
    first_step = min(map(_step_of, bad))
    in_step = [row for row in bad if _step_of(row) == first_step]
    source = min(in_step, key=lambda row: row.order)
    steps = sorted({_step_of(row) for row in bad})
    all_steps = sorted({_step_of(row) for tensor in run.tensors for row in tensor})
    others = f", and {len(in_step) - 1} more after it" if len(in_step) > 1 else ""
    evidence = (
        f"{_percent(source.nonfinite)} of its elements are NaN or Inf{_at(source)}: the first "
        f"tensor in the program that has any{others}."
    )
    if len(steps) == 1 and steps[0] != all_steps[-1]:
        evidence += " Later steps are finite again."
    first_order = min(row.order for tensor in run.tensors for row in tensor)
    lasting = steps[-1] == all_steps[-1] and len(steps) > 1
    skip = " jfp8.TrainState and jfp8.skip_on_overflow skip such steps."
    severity: Severity = "error"
    if source.tensor in ("grad", "d_lhs", "d_rhs"):
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
    yield Finding(severity, "non_finite", source.name, _steps(in_step), evidence, remedy)


# Scales


def no_scale(run: Run) -> Iterator[Finding]:
    """Tensors that are cast as they are (direct_e5m2, unscaled, the gradients of hybrid)."""
    unscaled = [tensor for tensor in run.tensors if _has_no_scale(tensor)]
    gradients = [tensor for tensor in unscaled if _is_gradient(tensor[0])]
    yield from _gradients_without_scale(gradients)
    for tensor in unscaled:
        vanishing, cut = _vanishing(tensor), _cut(tensor)
        if _is_gradient(tensor[0]) or not (vanishing or cut):
            continue
        worst = max(vanishing or cut, key=lambda row: row.underflow + row.overflow)
        lost = f"{_percent(worst.underflow)} of it becomes zero{_at(worst)}, cast without a scale."
        yield Finding(
            _severity(worst, cut=not vanishing),
            "no_scale",
            worst.name,
            _steps(vanishing or cut),
            lost if vanishing else _cut_sentence(worst),
            "Use a recipe with scales, such as DelayedScaling() or Float8CurrentScaling().",
        )


def _gradients_without_scale(gradients: Sequence[Sequence[TensorStats]]) -> Iterator[Finding]:
    """What only the loss scale keeps in range. It is one for all, so the largest bounds it."""
    samples = [row for tensor in gradients for row in tensor if row.amax > 0]
    # A factor of 2 is left for steps to come.
    room = math.floor(min((row.headroom for row in samples), default=0.0) - 1)
    silent = sum(all(row.amax == 0 for row in tensor) for tensor in gradients)
    vanishing = [(tensor, _too_small(tensor)) for tensor in gradients]
    needed = [max(map(_bits_to_keep, bad), default=0) for _, bad in vanishing]
    of_all = max(needed, default=0)
    for (tensor, bad), own in zip(vanishing, needed, strict=True):
        name, cut = tensor[0].name, _cut(tensor)
        if bad:
            worst = max(bad, key=lambda row: row.underflow)
            evidence = (
                f"{_percent(worst.underflow)} of it becomes zero{_at(worst)} (SQNR "
                f"{worst.sqnr:.0f} dB): most of it is around 2^{_median(worst)}, and "
                f"{worst.format} without a scale ends at 2^{_smallest(_FORMATS[worst.format])}."
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
                _severity(worst), "vanishing_gradient", name, _steps(bad), evidence, remedy
            )
        elif cut:
            worst = min(cut, key=lambda row: row.headroom)
            remedy = (
                f"Lower the loss scale by a factor of 2^{math.ceil(-worst.headroom)} at least, or "
                "use a recipe with scales for gradients, such as DelayedScaling()."
            )
            sentence = _cut_sentence(worst)
            yield Finding("error", "saturated_gradient", name, _steps(cut), sentence, remedy)


def stale_history(run: Run) -> Iterator[Finding]:
    """Delayed scaling whose history does not follow the tensor. Nothing is judged by a threshold.

    In a history that is kept up, an amax that saturated raises the scale of the next step; no entry
    outlives its length; and the scale is not just that of the tensor at hand.
    """
    frozen = run.frozen()
    for i, tensor in enumerate(run.tensors):
        if not tensor[0].history:
            continue
        same, alone = frozen.get(i), _follows_itself(tensor)
        lost = max(row.underflow + row.overflow for row in tensor)
        if same:
            low, high = min(r.amax for r in same), max(r.amax for r in same)
            yield Finding(
                "error" if lost >= MANY_LOST or _cut(tensor) else "warning",
                "stale_history",
                tensor[0].name,
                _steps(same),
                f"Its scale stays {same[0].scale_max:.4g} in all of {len(same)} samples"
                f"{_between(same)}, while its amax moves from {low:.3g} to {high:.3g}.",
                "The history is not kept up: put the fp8 collection that a step returns into the "
                "next one (jfp8.TrainState does; in a loop of your own apply with mutable=['fp8'], "
                "or call jfp8.advance).",
            )
        elif alone and tensor[0].tensor in ("lhs", "rhs"):
            yield Finding(
                "note",
                "empty_history",
                tensor[0].name,
                _steps(tensor),
                f"Its scale is that of its own amax in all of {len(tensor)} samples: its history "
                "is empty, and delayed scaling works as current scaling.",
                "Nothing is lost but time. To get what you asked for, put the fp8 collection that "
                "a step returns into the next one, or ask for Float8CurrentScaling().",
            )


def short_history(run: Run) -> Iterator[Finding]:
    """Delayed scaling that often meets values which it no longer, or not yet, expects."""
    frozen = run.frozen()
    for i, tensor in enumerate(run.tensors):
        cut = _cut(tensor)
        if not tensor[0].history or i in frozen or not _often(cut, tensor):
            continue
        if len(cut) < 2 and max(row.overflow for row in cut) < 0.01:
            continue  # one element in one of few samples
        worst = min(cut, key=lambda row: row.headroom)
        known = max((r.amax for r in tensor if _step_of(r) < _step_of(worst)), default=0.0)
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
            _severity(worst, cut=True),
            "short_history",
            tensor[0].name,
            _steps(cut),
            f"{_cut_sentence(worst)} That happens in {len(cut)} of {len(tensor)} samples.",
            remedy,
        )


def long_history(run: Run) -> Iterator[Finding]:
    """Delayed scaling that holds room for values which are long gone, and loses those at hand."""
    frozen = run.frozen()
    for i, tensor in enumerate(run.tensors):
        bad = [row for row in _vanishing(tensor) if row.headroom >= TOO_MUCH_HEADROOM]
        bad = [row for row in bad if not _beyond_any_scale(row)]
        if not tensor[0].history or i in frozen or not bad:
            continue
        worst = max(bad, key=lambda row: row.underflow)
        yield Finding(
            _severity(worst),
            "long_history",
            tensor[0].name,
            _steps(bad),
            f"{_percent(worst.underflow)} of it becomes zero{_at(worst)}: its history of "
            f"{worst.history} steps expects values 2^{worst.headroom:.0f} times as large as any.",
            "A spike stays in the history for too long: lower amax_history_len, or set "
            'amax_compute_algo="most_recent"; Float8CurrentScaling() has no memory at all.',
        )


def outliers(run: Run) -> Iterator[Finding]:
    """Tensors that span more than their format does: the largest elements cost the others."""
    for tensor in run.tensors:
        bad = [row for row in _vanishing(tensor) if _beyond_any_scale(row)]
        if not bad or _has_no_scale(tensor):
            continue  # without a scale, that comes first
        worst = max(bad, key=lambda row: row.underflow)
        spread = math.log2(worst.amax) - _median(worst)
        top = _fraction_from(worst, math.log2(worst.amax) - 8)
        exempt = f'exempt the layer: jfp8.convert(..., exempt=(*jfp8.EDGES, "{worst.path}"))'
        if worst.scale_min != worst.scale_max:
            remedy = f"Its scales are fine-grained already: {exempt}."
        elif _is_gradient(worst) and not _beyond_any_scale(worst, E5M2):
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
            _severity(worst),
            "outliers",
            tensor[0].name,
            _steps(bad),
            f"{_percent(worst.underflow)} of it becomes zero{_at(worst)}: its amax, "
            f"{worst.amax:.3g}, is 2^{spread:.0f} times its median, and {_percent(top)} of its "
            f"elements are within 2^8 of it.",
            remedy,
        )


def noise(run: Run) -> Iterator[Finding]:
    """Tensors that come out wrong although few elements vanish or saturate."""
    for tensor in run.tensors:
        known = [row for row in tensor if row.amax > 0 and not math.isnan(row.sqnr)]
        bad = [row for row in known if row.sqnr < NOISY]
        said = _vanishing(tensor) or _cut(tensor) or _has_no_scale(tensor)
        if said or len(bad) <= len(known) / 2:
            continue
        worst = min(bad, key=lambda row: row.sqnr)
        yield Finding(
            "warning",
            "noise",
            tensor[0].name,
            _steps(bad),
            f"Its error is {_percent(10 ** (-worst.sqnr / 20))} of it by size (SQNR "
            f"{worst.sqnr:.1f} dB){_at(worst)}, in {len(bad)} of {len(known)} samples.",
            f"{worst.format} has too few bits for it: use a recipe with more, finer scales, or "
            f'exempt the layer: exempt=(*jfp8.EDGES, "{worst.path}").',
        )


# What is in FP8


def edges_in_fp8(run: Run) -> Iterator[Finding]:
    """The first convolution of images and the final logits, which the literature exempts."""
    if run.products is None:
        return
    forward = [row for row in run.products.rows if row.kind in ("fprop", "forward")]
    found: list[tuple[ProductRow, Edge, str]] = []
    if forward and forward[0].fp8 and _takes_images(forward[0]):
        found.append((forward[0], Edge.IMAGE_INPUT, "lhs"))
    if forward and forward[-1].fp8:
        found.append((forward[-1], Edge.LOGITS, "grad"))
    for product, edge, tensor in found:
        rows = [r for t in run.tensors for r in t if (r.path, r.tensor) == (product.path, tensor)]
        known = [row.sqnr for row in rows if not math.isnan(row.sqnr)]
        quality = f" Its {tensor} has an SQNR of {min(known):.0f} dB at worst." if known else ""
        yield Finding(
            "warning",
            "edge_in_fp8",
            product.path,
            _steps(rows),
            f"This is {edge.value}. It is computed in FP8.{quality}",
            "Errors there reach everything, and little is gained: leave exempt= of jfp8.convert at "
            f'its default, or name it: exempt=(*jfp8.EDGES, ...); here, exempt="{product.path}" '
            "does.",
        )


def little_in_fp8(run: Run) -> Iterator[Finding]:
    """A choice of layers that leaves most of the work in high precision."""
    if run.products is None or not run.products.flops:
        return
    by_reason: dict[str, list[ProductRow]] = {}
    edges = {f"exempt: {edge.value}" for edge in Edge}
    for row in run.products.unconverted:
        if row.reason.startswith(("exempt: ", "not among only=")) and row.reason not in edges:
            by_reason.setdefault(row.reason, []).append(row)
    for reason, rows in by_reason.items():
        share = sum(row.flops for row in rows) / run.products.flops
        if share <= 0.5:
            continue
        layers = list(dict.fromkeys(row.path for row in rows))
        choice = reason.removeprefix("exempt: ")
        chosen = f"exempt={choice}" if reason != choice else reason.removeprefix("not among ")
        named = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
        how = "exempts" if reason != choice else "leaves out"
        yield Finding(
            "warning",
            "little_in_fp8",
            layers[0],
            (),
            f"{chosen} {how} {_percent(share)} of the FLOPs: {named}. "
            f"{_percent(run.products.fp8_fraction)} are FP8.",
            "Narrow it to the layers that need it: jfp8.report shows what each costs, and without "
            "exempt= only the edges of the model stay in high precision.",
        )


# What the faults above are made of


def _takes_images(row: ProductRow) -> bool:
    """Whether it is a convolution of at most 4 channels, the last size of ``"f32[8,28,28,1]"``."""
    channels = row.lhs.rstrip("]").rpartition(",")[2]
    return "Conv" in row.layer and channels.isdecimal() and int(channels) <= MAX_IMAGE_CHANNELS


def _step_of(row: TensorStats) -> int:
    return -1 if row.step is None else row.step


def _steps(rows: Iterable[TensorStats]) -> tuple[int, ...]:
    return tuple(sorted({row.step for row in rows if row.step is not None}))


def _at(row: TensorStats) -> str:
    return "" if row.step is None else f" at step {row.step}"


def _between(rows: Sequence[TensorStats]) -> str:
    steps = _steps(rows)
    return f" of steps {steps[0]} to {steps[-1]}" if steps else ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _is_gradient(row: TensorStats) -> bool:
    return row.tensor in ("grad", "d_lhs", "d_rhs")


def _severity(row: TensorStats, cut: bool = False) -> Severity:
    return "error" if (row.overflow if cut else row.underflow) >= MOST_LOST else "warning"


def _often(bad: Sequence[TensorStats], rows: Sequence[TensorStats]) -> bool:
    return len(bad) > OFTEN * len(rows)


def _vanishing(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """The samples in which many elements become zero, if that is not an exception."""
    bad = [row for row in tensor if row.underflow >= MANY_LOST and _FORMATS[row.format].bits >= 8]
    return bad if _often(bad, tensor) else []


def _too_small(gradient: Sequence[TensorStats]) -> list[TensorStats]:
    """The samples in which a gradient without a scale becomes zero, or keeps next to no bits."""
    bad = [row for row in gradient if row.underflow >= MANY_LOST or row.sqnr < NOISY]
    bad = [row for row in bad if row.headroom > 0 and row.amax > 0]
    return bad if _often(bad, gradient) else []


def _cut(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """The samples in which values were cut in half, or worse."""
    return [row for row in tensor if row.headroom <= CUT_IN_HALF]


def _cut_sentence(row: TensorStats) -> str:
    return (
        f"Values up to {row.amax:.3g} are cut to {row.amax * 2**row.headroom:.3g}{_at(row)}, "
        f"{_percent(row.overflow)} of its elements."
    )


def _has_no_scale(tensor: Sequence[TensorStats]) -> bool:
    """Whether the scale is 1 whatever the tensor is."""
    return not tensor[0].history and all(
        row.scale_min == row.scale_max == 1.0 for row in tensor if row.amax > 0
    )


def _same_scale(tensor: Sequence[TensorStats]) -> list[TensorStats]:
    """The last samples in a row with one and the same scale, while the amax moves."""
    same = list(itertools.takewhile(lambda r: r.scale_max == tensor[-1].scale_max, tensor[::-1]))
    amaxes = [row.amax for row in same]
    return same[::-1] if max(amaxes) > 1.01 * min(amaxes) else []


def _forgot(same: Sequence[TensorStats]) -> bool:
    """Whether a value that saturated did not raise the scale, as long as a history holds it."""
    pairs = itertools.pairwise(same)
    return any(a.headroom < -0.01 and _step_of(b) - _step_of(a) <= a.history for a, b in pairs)


def _outlived(same: Sequence[TensorStats]) -> bool:
    """Whether the scale is older than anything that its history remembers.

    Powers of two tell nothing: there the same scale serves amaxes that differ.
    """
    if len(same) < 3 or math.frexp(same[0].scale_max)[0] == 0.5:
        return False
    return _step_of(same[-1]) - _step_of(same[0]) > same[0].history


def _follows_itself(tensor: Sequence[TensorStats]) -> bool:
    """Whether the scale is a fixed part of the amax of the same step, while that moves."""
    amaxes = [row.amax for row in tensor if row.amax > 0]
    if len(amaxes) < 3 or max(amaxes) <= 1.01 * min(amaxes):
        return False
    ratios = [row.scale_max / row.amax for row in tensor if row.amax > 0]
    return max(ratios) <= min(ratios) * (1 + 1e-5)


def _smallest(fmt: Format) -> int:
    return round(math.log2(fmt.smallest_subnormal))


def _fraction_from(row: TensorStats, exponent: float) -> float:
    """The part of the elements but zero that is at least ``2^exponent``; within a bin, evenly."""
    total = sum(row.exponents.values())
    part = sum(n * min(max(e + 1 - exponent, 0.0), 1.0) for e, n in row.exponents.items())
    return part / total if total else 1.0


def _median(row: TensorStats) -> int:
    """The exponent of the middle element but for zeros."""
    return _quantile(row, 0.5)


def _quantile(row: TensorStats, q: float) -> int:
    below, total = 0, sum(row.exponents.values())
    for exponent, n in sorted(row.exponents.items()):
        below += n
        if below > q * total:
            return exponent
    return 0


def _bits_to_keep(row: TensorStats) -> int:
    """By how many bits the tensor has to grow for 99 of 100 elements to become normal numbers."""
    return max(0, _FORMATS[row.format].min_exponent - _quantile(row, 0.01))


def _beyond_any_scale(row: TensorStats, fmt: Format | None = None) -> bool:
    """Whether many elements would vanish even under the best scale for the whole tensor.

    That is ``amax / fmt.max``, under which what is below half of the smallest value becomes zero.
    If there are several scales, they are the best already.
    """
    fmt = fmt or _FORMATS[row.format]
    if row.scale_min != row.scale_max or not row.amax:
        return True
    binades = math.log2(fmt.max / fmt.smallest_subnormal) + 1
    return 1 - _fraction_from(row, math.log2(row.amax) - binades) >= MANY_LOST / 2


FAULTS: tuple[Fault, ...] = (
    no_scale,
    stale_history,
    short_history,
    long_history,
    outliers,
    noise,
    edges_in_fp8,
    little_in_fp8,
)
"""What is looked for in finite steps; `non_finite` comes before them."""
