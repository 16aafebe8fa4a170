"""Faults in the choice of what is in FP8."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jfp8.conversion.product_rows import ProductRow
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Edge
from jfp8.debug.faults.evidence import Finding, Run, percent
from jfp8.debug.records import steps_of
from jfp8.scaling.printing import listed


def edges_in_fp8(run: Run) -> Iterator[Finding]:
    """Find the first convolution of images and the final logits, which the literature exempts."""
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
            steps_of(rows),
            f"This is {edge.value}. It is computed in FP8.{quality}",
            "Errors there reach everything, and little is gained: leave exempt= of jfp8.convert at "
            f'its default, or name it: exempt=(*jfp8.EDGES, ...); here, exempt="{product.path}" '
            "does.",
        )


def little_in_fp8(run: Run) -> Iterator[Finding]:
    """Find a choice of layers that leaves most of the work in high precision."""
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
        how = "exempts" if reason != choice else "leaves out"
        yield Finding(
            "warning",
            "little_in_fp8",
            layers[0],
            (),
            f"{chosen} {how} {percent(share)} of the FLOPs: {listed(layers, 3)}. "
            f"{percent(run.products.fp8_fraction)} are FP8.",
            "Narrow it to the layers that need it: jfp8.report shows what each costs, and without "
            "exempt= only the edges of the model stay in high precision.",
        )


def _takes_images(row: ProductRow) -> bool:
    """Recognize a convolution of few channels, the last size of ``"f32[8,28,28,1]"``."""
    channels = row.lhs.rstrip("]").rpartition(",")[2]
    return "Conv" in row.layer and channels.isdecimal() and int(channels) <= MAX_IMAGE_CHANNELS
