"""Faults of tensors that have a scale, but too few bits in their format."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jfp8.debug.faults.evidence import (
    NOISY,
    at_step,
    beyond_any_scale,
    exponent_at,
    fraction_above,
    has_no_scale,
    is_gradient,
    percent,
    saturated_samples,
    severity_of,
    vanishing_samples,
    what_vanished,
)
from jfp8.debug.faults.run import Finding, Run, found_in
from jfp8.scaling.formats import E5M2

# What is finer than the scales of a recipe with several.
_FINER = {
    "rowwise": "Its scales serve whole rows: use block scales, so that the largest elements cost "
    "only their neighbours: MXFP8BlockScaling() (32 of them) or Float8BlockScaling() (128)",
    "block": "Its scales serve blocks of 128: use MXFP8BlockScaling(), whose blocks are of 32",
    "nvfp4": "Its blocks share the range of one scale for the tensor: use MXFP8BlockScaling(), "
    "whose blocks have a range of their own",
}
_PERHAPS_FINER = "Try MXFP8BlockScaling(), whose scales serve 32 elements, if its own serve more"


def outliers(run: Run) -> Iterator[Finding]:
    """Tensors that span more than their format does: the largest elements cost the others bits."""
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
                "Use block scales, so that the largest elements cost only their neighbours: "
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
    """Tensors that are inaccurate although few elements vanish or saturate."""
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
