"""Parts of the slow tests: each file is in one of them, and they take about as long."""

import json
from pathlib import Path

import pytest

import jfp8
from support import parts

SECONDS = {"a.py": 60.0, "b.py": 30.0, "c.py": 20.0, "d.py": 11.0}
FILES = [*SECONDS, "new.py"]  # an unknown file counts as 5 s


def test_each_file_is_in_one_part_and_the_longest_are_apart():
    divided = [parts.files_of_part(FILES[::-1], SECONDS, f"{i}/2") for i in (1, 2)]
    assert divided == [{"a.py", "new.py"}, {"b.py", "c.py", "d.py"}]
    assert parts.files_of_part(FILES, SECONDS, "1/1") == set(FILES)
    assert parts.files_of_part(FILES, SECONDS, "7/7") == set()


@pytest.mark.parametrize("part", ["0/4", "5/4"])
def test_a_part_that_does_not_exist_is_told(part):
    with pytest.raises(ValueError, match=f"--part {part} must be I/N with I from 1 to N"):
        parts.files_of_part(FILES, SECONDS, part)


def test_an_update_keeps_what_did_not_run_and_drops_what_is_gone(tmp_path):
    table = tmp_path / "seconds.json"
    table.write_text(json.dumps(SECONDS))
    for name in ("b.py", "c.py", "new.py"):
        (tmp_path / name).touch()
    parts.update({"b.py": 31.26, "new.py": 7}, tmp_path, table)
    assert parts.measured(table) == {"b.py": 31.3, "c.py": 20.0, "new.py": 7}


def test_the_table_names_files():
    """Also where the package is installed elsewhere."""
    roots = parts.MEASURED.parents[1], Path(jfp8.__file__).parents[1]
    is_here = lambda file: (roots[file.startswith("jfp8/")] / file).is_file()
    assert len(parts.measured()) > 100
    assert [file for file in parts.measured() if not is_here(file)] == []
