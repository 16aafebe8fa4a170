"""The products of a model by layer: which are FP8, and why the others are not."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from jfp8.conversion.layer_tree import TreeLine, tree_lines
from jfp8.conversion.product_rows import NO_LAYER, OWN_ATTENTION, ProductRow
from jfp8.conversion.tables import Table, table_lines

WIDTH = 100  # columns of text
_NAMED = 8  # layers listed under one reason
_SHAPES = re.compile(r" \(lhs scale (?:[^()]|\([^()]*\))*\)")  # that a reason is given for
Rows = Sequence[ProductRow]
Lines = Sequence[tuple[TreeLine, Rows]]  # a layer, or several that are alike, and their products
Reasons = Mapping[str, Sequence[str]]  # and the layers that each concerns


def lines_of(rows: Rows) -> Lines:
    """Return the layers of a model as a tree, alike ones in one line."""
    layers: dict[str, list[ProductRow]] = {}
    for row in rows:
        nowhere = "(the model itself)" if row.layer else "(no layer)"
        layers.setdefault(row.path or nowhere, []).append(row)
    alike = {
        path: frozenset(dataclasses.replace(row, path="") for row in of_layer)
        for path, of_layer in layers.items()
    }
    return [
        (line, [row for path in line.layers for row in layers[path]]) for line in tree_lines(alike)
    ]


def table_of(lines: Lines) -> Table:
    """Return head and lines, each with a mark for each of the three products."""
    rows = [row for _, of_line in lines for row in of_line]
    here = any(row.tpu for row in rows)
    elsewhere = any(row.cuda not in ("", row.implementation) for row in rows if row.fp8)
    by = "on CUDA" if elsewhere and not here else "computed by"
    table: list[Sequence[str]] = [("layer", "fprop", "dgrad", "wgrad", "FLOPs", "recipe", by)]
    flops = max(sum(row.flops for row in rows), 1)
    for line, of_line in lines:
        name = "  " * line.depth + line.name
        fp8 = [row for row in of_line if row.fp8]
        share = f"{100 * sum(row.flops for row in of_line) / flops:5.1f} %" if of_line else ""
        recipes = _listed(row.recipe for row in fp8)
        backends = _listed(_backend(row)[0] for row in fp8)
        table.append((name, *map(_mark, _three_products(of_line)), share, recipes, backends))
    return table


def text_lines(table: Table) -> list[str]:
    """Lay `table` out in at most `WIDTH` columns: the names of layers give way."""
    others = max(map(len, table_lines([("", *cells) for _, *cells in table])))
    room = max(WIDTH - others, 16)
    return table_lines([(_shortened(name, room), *cells) for name, *cells in table])


def in_high_precision(lines: Lines) -> Reasons:
    """Return why products are not FP8."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for line, rows in lines:
        for reason in (row.reason for row in rows if not row.fp8):
            texts = [text for text in (NO_LAYER, OWN_ATTENTION) if reason.startswith(f"{text}: ")]
            text = texts[0] if texts else reason
            places = found.setdefault(text, {}).setdefault(line.path, {})
            places.update(dict.fromkeys(reason.removeprefix(f"{text}: ") for text in texts))
    return {
        text: [f"{path} ({', '.join(at)})" if at else path for path, at in layers.items()]
        for text, layers in found.items()
    }


def in_bf16(lines: Lines) -> Reasons:
    """Return why a GPU or TPU computes products of FP8 operands in bf16."""
    found: dict[str, dict[str, None]] = {}
    for line, rows in lines:
        for backend, why in (_backend(row) for row in rows if row.fp8):
            if backend == "bf16":
                found.setdefault(_SHAPES.sub("", why), {})[line.path] = None
    return {why: list(layers) for why, layers in found.items()}


def reason_lines(reasons: Reasons) -> Iterator[str]:
    """List each of `reasons`, and below it the layers."""
    for text, layers in reasons.items():
        more = len(layers) - _NAMED
        named = ", ".join(layers[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield from wrapped(text, "  ")
        yield from wrapped(named, "    ")


def wrapped(text: str, indent: str = "") -> list[str]:
    """Break a paragraph into lines."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _three_products(rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Return the rows of fprop, dgrad and wgrad.

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
    """Return the dimensions of ``"f32[8,1,64]"`` in any order, without ones."""
    return tuple(sorted(d for d in spelled.rstrip("]").partition("[")[2].split(",") if d != "1"))


def _mark(rows: Rows) -> str:
    return _listed("FP8" if row.fp8 else _high_precision(row) for row in rows)


def _high_precision(row: ProductRow) -> str:
    """Return the dtype of the operand that is not narrow: ``"f32"``."""
    lhs, rhs = (x.partition("[")[0] for x in (row.lhs, row.rhs))
    return rhs if lhs.startswith("e") else lhs


def _backend(row: ProductRow) -> tuple[str, str]:
    """Return the backend on the TPU, or else on CUDA, and why there is no better one."""
    name, _, why = (row.tpu or row.cuda or row.implementation).partition(": ")
    return name, why


def _listed(words: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _shortened(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    end = (room - 2) // 2
    return f"{text[: room - 2 - end]}..{text[-end:]}"
