"""The tables in docs/gpus.md that come from published timings, and the script that writes them."""

from __future__ import annotations

from pathlib import Path

from support.scripts import imported

PAGE = Path(__file__).parents[2] / "docs/gpus.md"


def test_the_page_has_the_gains_that_the_code_expects():
    gain_table = imported("gain_table", "benchmarks")
    expected, text = list(gain_table.gains()), PAGE.read_text(encoding="utf-8")
    assert "\n".join(expected) in text
    assert len(expected) == 2 + 3 * 5 + 2 * 3 + 2 * 2
    cells = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in expected[2:]}
    row = cells["| H200", "`delayed`, `current`"]
    gain = dict(zip(gain_table.SIZES, map(float, row[:3]), strict=True))
    # What a layer of 1024^3 lacks is gained at the size that the last column names.
    assert gain[1024] < 1 < gain[4096]
    assert 1024 < int(row[3].split()[0].replace(",", "")) < 4096


def test_a_recipe_that_is_never_faster_has_no_row():
    gain_table = imported("gain_table", "benchmarks")
    assert gain_table.pays_from("H200", "mx") is None
    assert max(gain_table.times("H200", "mx", n).gain for n in gain_table.SIZES) < 1
    assert not any(line.startswith("| H200 | `mxfp8`") for line in gain_table.gains())
