"""The tables in docs/gpus.md that come from published timings, and the script that writes them."""

from __future__ import annotations

from pathlib import Path

from support.scripts import imported

PAGE = Path(__file__).parents[2] / "docs/gpus.md"


def test_the_page_has_the_gains_that_the_code_expects():
    gain_table = imported("gain_table", "benchmarks")
    expected, text = list(gain_table.gains()), PAGE.read_text(encoding="utf-8")
    assert "\n".join(expected) in text
    assert len(expected) == 2 + 10 * 5
    cells = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in expected[2:]}
    row = cells["| H200", "`delayed`, `current`"]
    gain = dict(zip(gain_table.SIZES, map(float, row[:5]), strict=True))
    # What a layer of 2048^3 lacks is gained at the size that the last column names.
    assert gain[2048] < 1 < gain[4096]
    assert 2048 < int(row[5].split()[0].replace(",", "")) < 4096
    assert cells["| H200", "`mxfp8`"][5] == "never |"
