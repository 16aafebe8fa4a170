"""Tables as text and as HTML: lines of cells; the first line is the head."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

Table = Sequence[Sequence[str]]


def table_lines(table: Table, *, numbers: bool = False) -> list[str]:
    """The lines of `table`, each column as wide as its widest cell.

    Args:
      table: lines of equally many cells.
      numbers: align all columns but the first to the right.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    side = str.rjust if numbers else str.ljust
    return [
        "  ".join([cells[0].ljust(widths[0]), *map(side, cells[1:], widths[1:])]).rstrip()
        for cells in table
    ]


def table_html(table: Table, *, numbers: bool = False, faded: Collection[int] = ()) -> str:
    """`table` as an HTML element.

    Args:
      table: as for `table_lines`.
      numbers: as for `table_lines`.
      faded: lines to draw fainter than the others, counted from the head.
    """

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
