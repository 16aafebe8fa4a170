"""Lay out tables as text and as HTML: lines of cells; the first line is the head."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

Table = Sequence[Sequence[str]]


def table_lines(table: Table, *, numbers: bool = False) -> list[str]:
    """Return the lines of `table`; `numbers` aligns all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    side = str.rjust if numbers else str.ljust
    return [
        "  ".join([cells[0].ljust(widths[0]), *map(side, cells[1:], widths[1:])]).rstrip()
        for cells in table
    ]


def table_html(table: Table, *, numbers: bool = False, faded: Collection[int] = ()) -> str:
    """Write the table of `table_lines` as an HTML element, the `faded` lines of it fainter."""

    def cell(tag: str, column: int, text: str) -> str:
        side = "right" if numbers and column else "left"
        return f"<{tag} style='text-align:{side}'>{html.escape(text)}</{tag}>"

    lines = [
        f"<tr style='opacity:{0.6 if number in faded else 1}'>"
        + "".join(cell("td" if number else "th", i, text) for i, text in enumerate(cells))
        + "</tr>"
        for number, cells in enumerate(table)
    ]
    return f"<table>{''.join(lines)}</table>"
