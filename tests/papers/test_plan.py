"""The planning calculator prints the table of the page."""

import re
from pathlib import Path

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
plan = imported("plan", "benchmarks")


def test_the_table_of_the_page_is_what_the_command_prints(capsys):
    page = (ROOT / "docs/scaling_out.md").read_text()
    (command,) = re.findall(r"\$ python benchmarks/plan\.py ((?:.*\\\n)*.*)\n", page)
    plan.main(command.replace("\\\n", " ").split())
    head, table = capsys.readouterr().out.strip().split("\n\n")
    assert head in page
    printed = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    times = [f"| {cells[5]} | {cells[-2]} | {cells[-1]} |" for cells in printed]
    shown = page.partition(head)[2].split("\n\n")[1].splitlines()[2:]
    assert len(shown) >= 5
    assert [row for row in shown if not row.endswith(tuple(times))] == []
