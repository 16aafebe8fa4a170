"""Print results: as text, in tables with a head, and the same text in Jupyter."""

from __future__ import annotations

import html
from collections.abc import Sequence

Table = Sequence[Sequence[str]]


class Printed:
    """Show what ``print`` shows as the value of a cell, too: a base of results."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def preformatted(text: str) -> str:
    """Write `text` as an HTML element."""
    return f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"


def table_lines(table: Table, *, numbers: bool = False) -> list[str]:
    """Return the lines of `table`; `numbers` aligns all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    side = str.rjust if numbers else str.ljust
    return [
        "  ".join([cells[0].ljust(widths[0]), *map(side, cells[1:], widths[1:])]).rstrip()
        for cells in table
    ]


def ruled_lines(table: Table, *, numbers: bool = False) -> list[str]:
    """Return `table_lines` with a rule below the head."""
    head, *rows = table_lines(table, numbers=numbers)
    return [head, "-" * len(head), *rows]
