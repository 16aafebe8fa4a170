"""Hold the products of a model, and print them by layer and by product: `Report`."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jfp8.conversion.layer_tree import TreeLine, tree_lines
from jfp8.conversion.product_rows import (
    AT_CODE,
    SLOW,
    ProductRow,
    blind_message,
    gain_of,
    looks_ahead_message,
    product_table,
    slower_message,
)
from jfp8.conversion.tables import Printed, Table, preformatted, ruled_lines, table_lines
from jfp8.scaling.printing import listed, si

_WIDTH = 100  # columns of text
_NAMED = 8  # layers listed under one reason
_SHAPES = re.compile(r" \(lhs scale (?:[^()]|\([^()]*\))*\)")  # for which a reason is given
Rows = Sequence[ProductRow]
Lines = Sequence[tuple[TreeLine, Rows]]  # a layer, or several that are alike, and their products


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Hold the result of `report`. It prints as a table of the layers, in Jupyter as HTML.

    Numbered siblings whose products are the same share a line, ``block_{0..5}``. ``fprop``,
    ``dgrad`` and ``wgrad`` are marked ``FP8``, or with the dtype in which they are computed. FLOPs
    are the sums of all three matmuls, in all layers of the line. Traced for a GPU with known rates,
    ``gain`` is how many times as fast as in bf16 the matmuls of a line are expected to be, and the
    last sentences have the gains of all matmuls and of a training step. Below are reasons.

    Attributes:
      rows: every product, in the order of the program.
      causal: whether the program masks later positions, as far as that can be detected.
      gpu: the kind of GPU for which JAX traced, if any.
      step: the expected microseconds of the parts of a training step with AdamW, as it is and in
        bf16, by name; empty unless JAX traced a gradient for a GPU with known rates.
      blind: policies of ``jax.checkpoint`` around FP8 matmuls that do not see these.
    """

    rows: tuple[ProductRow, ...]
    causal: bool = False
    gpu: str = ""
    step: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    blind: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Return the FLOPs of all products."""
        return sum(row.flops for row in self.rows)

    @property
    def fp8_fraction(self) -> float:
        """Return the fraction of the FLOPs of all products that is FP8: 0 to 1."""
        return sum(row.flops for row in self.rows if row.fp8) / max(self.flops, 1)

    @property
    def unconverted(self) -> tuple[ProductRow, ...]:
        """Return the products in high precision."""
        return tuple(row for row in self.rows if not row.fp8)

    @property
    def looking_ahead(self) -> tuple[ProductRow, ...]:
        """Return the forward products of a causal model whose scales see later positions."""
        return tuple(row for row in self.rows if self.causal and row.looks_ahead)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "fp8_fraction": self.fp8_fraction,
            "flops": self.flops,
            "step": dict(self.step),
            "products": [dataclasses.asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """Return the report in one line."""
        n = sum(row.times for row in self.rows)
        fp8 = sum(row.times for row in self.rows if row.fp8)
        gain = gain_of(self.rows)
        speed = f"Expected by a cost model: {gain or 1:.2f} times as fast as bf16, in all products."
        return (
            f"{100 * self.fp8_fraction:.1f} % of {si(self.flops)}FLOPs are FP8: "
            f"{fp8} of {n} products.{f' {speed}' if gain else ''}"
        )

    @property
    def step_gain(self) -> float | None:
        """Return the expected speed of a training step, relative to bf16; None if unknown."""
        if not self.step or gain_of(self.rows) is None:
            return None
        return sum(us for _, us in self.step.values()) / sum(us for us, _ in self.step.values())

    def _step_lines(self) -> list[str]:
        """Say how much a whole training step gains, and where its time goes."""
        if (gain := self.step_gain) is None:
            return []
        total = sum(here for here, _ in self.step.values())
        shares = [f"{name} {100 * here / total:.0f} %" for name, (here, _) in self.step.items()]
        return _wrapped(
            f"Expected of a training step with AdamW: {gain:.2f} times as fast as in bf16. Of its "
            f"time take {', '.join(shares)}."
        )

    def verbose(self) -> str:
        """Return a line for each product."""
        return "\n".join([*ruled_lines(product_table(self.rows)), *self._said()])

    def __str__(self) -> str:
        layers = _lines_of(self.rows)
        text = []
        if layers:
            head, *lines = _text_lines(_table_of(layers))
            text = [head, "-" * max(map(len, (head, *lines))), *lines, ""]
        return "\n".join([*text, *_reason_lines(layers), *self._said()])

    def _repr_html_(self) -> str:
        products = preformatted(self.verbose())
        more = f"<details><summary>Every product</summary>{products}</details>"
        return super()._repr_html_() + more

    def _said(self) -> list[str]:
        warnings = (line for warning in self.warnings() for line in _wrapped(warning))
        return [self.summary(), *self._step_lines(), *warnings]

    def warnings(self) -> list[str]:
        """Warn before training of scales that look ahead, slow FP8, and matmuls not saved."""
        ahead = {row.path or row.layer: row.recipe for row in self.looking_ahead}
        gains = {path: gain_of(rows) or 1.0 for path, rows in _by_layer(self.rows).items()}
        slow = {path: gain for path, gain in gains.items() if gain < SLOW}
        found = [looks_ahead_message(ahead)] if ahead else []
        found += map(blind_message, self.blind)
        return [*found, slower_message(slow, self.gpu)] if slow else found


def _by_layer(rows: Rows) -> dict[str, list[ProductRow]]:
    layers: dict[str, list[ProductRow]] = {}
    for row in rows:
        nowhere = "(the model itself)" if row.layer else "(no layer)"
        layers.setdefault(row.path or nowhere, []).append(row)
    return layers


def _lines_of(rows: Rows) -> Lines:
    """Return the layers of a model as a tree, alike ones in one line."""
    layers = _by_layer(rows)
    same = lambda rows: frozenset(dataclasses.replace(row, path="") for row in rows)
    lines = tree_lines({path: same(of_layer) for path, of_layer in layers.items()})
    return [(line, [row for path in line.layers for row in layers[path]]) for line in lines]


def _table_of(lines: Lines) -> Table:
    rows = [row for _, of_line in lines for row in of_line]
    here = any(row.tpu for row in rows)
    elsewhere = any(row.cuda not in ("", row.implementation) for row in rows if row.fp8)
    by = "on CUDA" if elsewhere and not here else "computed by"
    head = ("layer", "fprop", "dgrad", "wgrad", "FLOPs", "recipe", by, "gain")
    flops = max(sum(row.flops for row in rows), 1)
    table = [head, *(_cells_of(line, of_line, flops) for line, of_line in lines)]
    return table if gain_of(rows) else [cells[:-1] for cells in table]


def _cells_of(line: TreeLine, rows: Rows, flops: int) -> tuple[str, ...]:
    fp8, gain = [row for row in rows if row.fp8], gain_of(rows)
    return (
        "  " * line.depth + line.name,
        *(_listed(map(_precision, of_kind)) for of_kind in _three_products(rows)),
        f"{100 * sum(row.flops for row in rows) / flops:5.1f} %" if rows else "",
        _listed(row.recipe for row in fp8),
        _listed(_backend(row)[0] for row in fp8),
        "" if gain is None else f"{gain:.2f}x",
    )


def _text_lines(table: Table) -> list[str]:
    """Lay `table` out in at most `_WIDTH` columns: the names of layers give way."""
    others = max(map(len, table_lines([("", *cells) for _, *cells in table])))
    room = max(_WIDTH - others, 16)
    return table_lines([(_shortened(name, room), *cells) for name, *cells in table])


def _reasons(lines: Lines) -> Iterator[tuple[bool, str, str, str]]:
    """List why products are in high precision (True), or computed in bf16; the layer, the code."""
    for line, row in [(line, row) for line, rows in lines for row in rows]:
        backend, why = _backend(row)
        if row.fp8 and backend == "bf16":
            yield False, _SHAPES.sub("", why), line.path, ""
        if not row.fp8:
            at_code = (text for text in AT_CODE if row.reason.startswith(f"{text}: "))
            reason = next(at_code, row.reason)
            yield True, reason, line.path, row.reason.removeprefix(reason).removeprefix(": ")


def _reason_lines(lines: Lines) -> Iterator[str]:
    """Say each reason once, with the layers that it concerns."""
    who = "a TPU" if any(row.tpu for _, rows in lines for row in rows) else "an NVIDIA GPU"
    titles = {True: "In high precision:", False: f"FP8 that {who} computes in bf16:"}
    found: dict[bool, dict[str, dict[str, dict[str, None]]]] = {True: {}, False: {}}
    for plain, reason, path, code in _reasons(lines):
        found[plain].setdefault(reason, {}).setdefault(path, {})[code] = None
    for plain, reasons in found.items():
        yield from [titles[plain]] if reasons else []
        for reason, layers in reasons.items():
            named = [f"{x} ({', '.join(at)})" if any(at) else x for x, at in layers.items()]
            yield from _wrapped(reason, "  ")
            yield from _wrapped(listed(named, _NAMED), "    ")
        yield from [""] if reasons else []


def _wrapped(text: str, indent: str = "") -> list[str]:
    how = {"initial_indent": indent, "subsequent_indent": indent}
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False, **how)


def _three_products(rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Return the rows of fprop, dgrad and wgrad.

    In high precision, a gradient has the dimensions of the operand that it belongs to.
    """
    of = lambda *kinds: [row for row in rows if row.kind in kinds]
    forward, backward = of("forward"), of("backward")
    by_lhs, by_rhs = (
        [row for row in backward if _dimensions(row.out) in {_dimensions(x) for x in operands}]
        for operands in ([row.lhs for row in forward], [row.rhs for row in forward])
    )
    few = sum(row.times for row in backward) < 2 * sum(row.times for row in forward)
    if by_lhs == by_rhs and few:
        by_lhs = []  # in a tie: data needs no gradient, weights do
    elif not by_lhs and not by_rhs:
        by_lhs = by_rhs = backward
    return of("fprop", "forward"), [*of("dgrad"), *by_lhs], [*of("wgrad"), *by_rhs]


def _dimensions(spelled: str) -> tuple[str, ...]:
    """Return the dimensions of ``"f32[8,1,64]"`` in any order, without ones."""
    return tuple(sorted(d for d in spelled.rstrip("]").partition("[")[2].split(",") if d != "1"))


def _precision(row: ProductRow) -> str:
    """Return ``"FP8"``, or the dtype of the operand that is not narrow: ``"f32"``."""
    lhs, rhs = (x.partition("[")[0] for x in (row.lhs, row.rhs))
    return "FP8" if row.fp8 else rhs if lhs.startswith("e") else lhs


def _backend(row: ProductRow) -> tuple[str, str]:
    """Return the backend on the TPU, or else on CUDA, and why there is no better one."""
    name, _, why = (row.tpu or row.cuda or row.implementation).partition(": ")
    return name, why


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _shortened(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    end = (room - 2) // 2
    return f"{text[: room - 2 - end]}..{text[-end:]}"
