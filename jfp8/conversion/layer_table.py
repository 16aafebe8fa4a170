"""The products of a model by layer: which are FP8, and why the others are not."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jfp8.conversion.layer_tree import TreeLine, tree_lines
from jfp8.conversion.product_rows import NO_LAYER, OWN_ATTENTION, ProductRow
from jfp8.conversion.tables import Table, table_lines

WIDTH = 100  # columns of text
_NAMED = 8  # layers listed under one reason
_SHAPES = re.compile(r" \(lhs scale (?:[^()]|\([^()]*\))*\)")  # that a reason is given for
Rows = Sequence[ProductRow]


@dataclass(frozen=True)
class LayerLine:
    """A layer, or several that are alike, and all of their products."""

    place: TreeLine
    rows: tuple[ProductRow, ...]


@dataclass(frozen=True)
class Reason:
    """Why something is as it is, and the layers that it concerns."""

    text: str
    layers: tuple[str, ...]


def lines_of(rows: Rows) -> list[LayerLine]:
    """The layers of a model as a tree, alike ones in one line."""
    layers: dict[str, list[ProductRow]] = {}
    for row in rows:
        nowhere = "(the model itself)" if row.layer else "(no layer)"
        layers.setdefault(row.path or nowhere, []).append(row)
    alike = {
        path: frozenset(dataclasses.replace(row, path="") for row in of_layer)
        for path, of_layer in layers.items()
    }
    return [
        LayerLine(place, tuple(row for path in place.layers for row in layers[path]))
        for place in tree_lines(alike)
    ]


def table_of(lines: Sequence[LayerLine]) -> Table:
    """Head and lines, each with a mark for each of the three products."""
    rows = [row for line in lines for row in line.rows]
    here = any(row.tpu for row in rows)
    elsewhere = any(row.cuda not in ("", row.implementation) for row in rows if row.fp8)
    by = "on CUDA" if elsewhere and not here else "computed by"
    table: list[Sequence[str]] = [("layer", "fprop", "dgrad", "wgrad", "FLOPs", "recipe", by)]
    flops = max(sum(row.flops for row in rows), 1)
    for line in lines:
        fp8 = [row for row in line.rows if row.fp8]
        share = 100 * sum(row.flops for row in line.rows) / flops
        table.append(
            (
                "  " * line.place.depth + line.place.name,
                *map(_mark, _three_products(line.rows)),
                f"{share:5.1f} %" if line.rows else "",
                _listed(row.recipe for row in fp8),
                _listed(_backend(row)[0] for row in fp8),
            )
        )
    return table


def text_lines(table: Table) -> list[str]:
    """`table` as lines of at most `WIDTH` columns: the names of layers give way."""
    others = max(map(len, table_lines([("", *cells) for _, *cells in table])))
    room = max(WIDTH - others, 16)
    return table_lines([(_shortened(name, room), *cells) for name, *cells in table])


def in_high_precision(lines: Sequence[LayerLine]) -> list[Reason]:
    """Why products are not FP8: each reason once."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        for row in line.rows:
            if not row.fp8:
                text, place = row.reason, ""
                for known in (NO_LAYER, OWN_ATTENTION):
                    if text.startswith(f"{known}: "):
                        text, place = known, text.removeprefix(f"{known}: ")
                places = found.setdefault(text, {}).setdefault(line.place.path, [])
                if place and place not in places:
                    places.append(place)
    return [
        Reason(
            text,
            tuple(f"{path} ({', '.join(at)})" if at else path for path, at in layers.items()),
        )
        for text, layers in found.items()
    ]


def in_bf16(lines: Sequence[LayerLine]) -> list[Reason]:
    """Why a GPU or TPU computes products of FP8 operands in bf16: each reason once."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        for row in line.rows:
            backend, why = _backend(row)
            if row.fp8 and backend == "bf16":
                found.setdefault(_SHAPES.sub("", why), {})[line.place.path] = None
    return [Reason(why, tuple(layers)) for why, layers in found.items()]


def reason_lines(reasons: Sequence[Reason]) -> Iterator[str]:
    """Each of `reasons`, and below it the layers."""
    for reason in reasons:
        more = len(reason.layers) - _NAMED
        layers = ", ".join(reason.layers[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        for text, indent in ((reason.text, "  "), (layers, "    ")):
            yield from wrapped(text, indent)


def wrapped(text: str, indent: str = "") -> list[str]:
    """The lines of a paragraph."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _three_products(rows: Rows) -> tuple[Rows, Rows, Rows]:
    """The rows of fprop, dgrad and wgrad.

    Of a product in high precision, the shape of its result tells which gradient it is: the operand
    with these dimensions is the one that it belongs to.
    """
    of = lambda *kinds: [row for row in rows if row.kind in kinds]
    forward, backward = of("forward"), of("backward")
    by_lhs, by_rhs = (
        [row for row in backward if _dimensions(row.out) in {_dimensions(x) for x in operands}]
        for operands in ([row.lhs for row in forward], [row.rhs for row in forward])
    )
    few = sum(row.times for row in backward) < 2 * sum(row.times for row in forward)
    if by_lhs == by_rhs and few:
        by_lhs = []  # of equal dimensions: data needs no gradient, weights do
    elif not by_lhs and not by_rhs:
        by_lhs = by_rhs = backward
    return of("fprop", "forward"), [*of("dgrad"), *by_lhs], [*of("wgrad"), *by_rhs]


def _dimensions(spelled: str) -> tuple[str, ...]:
    """Those of ``"f32[8,1,64]"`` in any order, without ones."""
    return tuple(sorted(d for d in spelled.rstrip("]").partition("[")[2].split(",") if d != "1"))


def _mark(rows: Rows) -> str:
    return _listed("FP8" if row.fp8 else _high_precision(row) for row in rows)


def _high_precision(row: ProductRow) -> str:
    """``"f32"``: the dtype of the operand that is not narrow."""
    lhs, rhs = (x.partition("[")[0] for x in (row.lhs, row.rhs))
    return rhs if lhs.startswith("e") else lhs


def _backend(row: ProductRow) -> tuple[str, str]:
    """What computes it on the TPU, or else on CUDA, and why nothing better does."""
    name, _, why = (row.tpu or row.cuda or row.implementation).partition(": ")
    return name, why


def _listed(words: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _shortened(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    end = (room - 2) // 2
    return f"{text[: room - 2 - end]}..{text[-end:]}"
