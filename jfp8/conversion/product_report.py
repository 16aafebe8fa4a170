"""Hold the products of a model, and print them by layer and by product: `Report`."""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import dataclass
from typing import Any

from jfp8.conversion.layer_table import (
    Lines,
    Reasons,
    in_bf16,
    in_high_precision,
    lines_of,
    reason_lines,
    table_of,
    text_lines,
    wrapped,
)
from jfp8.conversion.product_rows import (
    ProductRow,
    looks_ahead_message,
    product_table,
    si,
    times_message,
)
from jfp8.conversion.tables import table_html, table_lines


@dataclass(frozen=True, repr=False)
class Report:
    """Hold the result of `report`. It prints as a table of the layers, in Jupyter as HTML.

    Numbered siblings whose products are the same share a line, ``block_{0..5}``. ``fprop``,
    ``dgrad`` and ``wgrad`` are marked ``FP8``, or with the dtype in which they are computed. FLOPs
    are those of all three products, in all layers of the line. Below are the reasons.

    Attributes:
      rows: every product, in the order of the program.
      causal: whether the program masks later positions, as far as that can be detected.
    """

    rows: tuple[ProductRow, ...]
    causal: bool = False

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
            "products": [dataclasses.asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """Return the report in one line."""
        n = sum(row.times for row in self.rows)
        fp8 = sum(row.times for row in self.rows if row.fp8)
        return (
            f"{100 * self.fp8_fraction:.1f} % of {si(self.flops)}FLOPs are FP8: "
            f"{fp8} of {n} products."
        )

    def verbose(self) -> str:
        """Return a line for each product: its operands, and what computes it.

        Traced for a GPU whose rates `kernels.cost_model` has, also the expected times, of all times
        that a product is computed together, and for comparison those of layers in bf16.
        """
        head, *lines = table_lines(product_table(self.rows))
        times = wrapped(times_message(self.rows))
        return "\n".join([head, "-" * len(head), *lines, *times, *self._said()])

    def __str__(self) -> str:
        layers = lines_of(self.rows)
        text = []
        if layers:
            head, *lines = text_lines(table_of(layers))
            text = [head, "-" * max(map(len, (head, *lines))), *lines, ""]
        for title, reasons in _why_not(layers).items():
            text += [title, *reason_lines(reasons), ""]
        return "\n".join([*text, *self._said()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        layers = lines_of(self.rows)
        plain = [
            i for i, (_, rows) in enumerate(layers, 1) if rows and not any(row.fp8 for row in rows)
        ]
        lines = (self.summary(), *self.warnings())
        parts = [f"<p><b>{html.escape(line)}</b></p>" for line in lines]
        table = [(name.replace("  ", "\u2003"), *cells) for name, *cells in table_of(layers)]
        parts.append(table_html(table, faded=plain))
        for title, reasons in _why_not(layers).items():
            items = (
                f"<li>{html.escape(text)}<br>{html.escape(', '.join(layers))}</li>"
                for text, layers in reasons.items()
            )
            parts.append(f"<p>{html.escape(title)}</p><ul>{''.join(items)}</ul>")
        unconverted = [number for number, row in enumerate(self.rows, 1) if not row.fp8]
        products = table_html(product_table(self.rows), faded=unconverted)
        parts.append(f"<details><summary>Every product</summary>{products}</details>")
        return "".join(parts)

    def _said(self) -> list[str]:
        """Return the summary and the warnings, as lines."""
        warnings = (line for warning in self.warnings() for line in wrapped(warning))
        return [self.summary(), *warnings]

    def warnings(self) -> list[str]:
        """Warn before training if scales of a causal model look ahead."""
        rows = self.looking_ahead
        if not rows:
            return []
        return [looks_ahead_message({row.path or row.layer: row.recipe for row in rows})]


def _why_not(layers: Lines) -> dict[str, Reasons]:
    who = "a TPU" if any(row.tpu for _, rows in layers for row in rows) else "an NVIDIA GPU"
    found = {
        "In high precision:": in_high_precision(layers),
        f"FP8 that {who} computes in bf16:": in_bf16(layers),
    }
    return {title: reasons for title, reasons in found.items() if reasons}
