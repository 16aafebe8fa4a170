"""Every notebook runs from top to bottom, and is committed with the outputs of such a run."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import jfp8
from test_english import FIRST, PHRASES

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_first_cell_installs_and_imports(path):
    """In at most three lines. There is no address to install from, so none is invented."""
    first = code_cells(nbformat.read(path, as_version=4))[0].source
    assert len(first.splitlines()) <= 3
    assert "pip install" in first
    assert first.endswith("import jfp8")
    assert "://" not in first


@each_notebook
def test_text_has_no_mannerisms(path):
    cells = nbformat.read(path, as_version=4).cells
    text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = re.sub(r"`[^`]*`", "_", text).replace("\n", " ")
    found = {p: re.findall(p, text) for p, *_ in PHRASES if p != FIRST}
    assert not any(found.values()), found


@pytest.mark.notebook
@each_notebook
def test_runs(path):
    """nbclient raises CellExecutionError, with the cell and its traceback, at the first error."""
    notebook = nbformat.read(path, as_version=4)
    # A user's own kernel called python3 would test another environment: ask where it ran.
    where = nbformat.v4.new_code_cell("import sys, jfp8; print(sys.prefix, jfp8.__file__, sep='|')")
    notebook.cells.append(where)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client.execute(env=os.environ | {"PYTHONPATH": search})

    (answer,) = where.outputs
    assert answer.text.strip() == f"{sys.prefix}|{jfp8.__file__}"
    for cell in code_cells(notebook):
        assert cell.execution_count is not None
        assert all(output.output_type != "error" for output in cell.outputs)
        warnings = [o.text for o in cell.outputs if o.get("name") == "stderr"]
        assert not warnings, f"{cell.source}\nwrote to stderr: {warnings}"


@each_notebook
def test_is_committed_as_a_fresh_run_left_it(path):
    """In order, complete, small, without errors or warnings, and for anybody's kernel."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert all(output.get("name") != "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 500_000
    texts = json.dumps([output.get("text", "") for output in outputs])
    assert not any(folder in texts for folder in ("/home/", "/root/", "/tmp/", "/Users/"))
