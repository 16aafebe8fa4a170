"""`python -m jfp8 tune`, rehearsed: what is wrong never enters the table."""

import json
from argparse import Namespace

import pytest

from jfp8.command_line import tune
from jfp8.command_line.parser import main, make_parser
from support.devices import needs_mosaic


@needs_mosaic
def test_a_wrong_kernel_never_enters_the_table(tmp_path):
    """Though it would be the fastest by far: it multiplies nothing."""
    table = tmp_path / "mine.json"
    options = Namespace(kernels=["running"], candidates=2, table=table, smoke=True)
    result, lines, is_right = tune.run(options, "planted_tune:tried")
    wrong, right = result["records"]
    assert not is_right
    assert wrong["failure"].endswith("of 16384 differ")
    assert "us" not in wrong
    entry = json.loads(table.read_text())["cpu"]["running"]["128x128x128"]
    assert entry["tiles"] == right["tiles"]
    assert entry["tiles"]["group"] == 8
    assert lines[1].startswith("FAILED running, candidate 0: AssertionError")


@needs_mosaic
def test_the_first_candidate_is_what_runs_without_a_table():
    from jfp8.kernels.hopper.sweep import Sweep
    from jfp8.kernels.hopper.tiles import default_tiles

    for kind in tune.PRODUCTS:
        first = tune._tiles(kind, (8192, 8192, 8192))[0]
        assert first == default_tiles(kind, 8192, 8192, 8192)
    for name in tune.QUANTIZE:
        sweeps = tune._sweeps(name)
        assert sweeps[0] == Sweep()
        assert len(set(sweeps)) == len(sweeps) >= 2
        blocks = name in ("quantize_rows_in_blocks", "quantize_tiles")
        assert not blocks or {(s.rows, s.columns) for s in sweeps} == {(128, 128)}
    assert tune.tried({"kernel": "quantize_tiles", "shape": [8192, 8192], "index": 99}) == {}


def test_the_fastest_of_this_run_is_kept():
    table = {"NVIDIA H100": {"running": {"128x128x128": {"us": 0.1, "date": "old"}}}}
    record = {"card": "NVIDIA H100", "kernel": "running", "shape": [100, 100, 100], "tiles": {}}
    assert not tune.better(table, record, "now")  # it failed
    assert tune.better(table, record | {"us": 2.0}, "now")
    assert not tune.better(table, record | {"us": 2.1}, "now")
    assert tune.better(table, record | {"us": 1.9}, "now")
    entry = table["NVIDIA H100"]["running"]["128x128x128"]
    assert entry == {"tiles": {}, "us": 1.9, "of": "100x100x100", "date": "now"}


def test_a_rehearsal_is_not_written_into_the_package(capsys):
    assert main(["tune", "--smoke"]) == 1
    assert "--smoke needs a --table" in capsys.readouterr().out
    options = make_parser().parse_args(["tune"])
    assert json.loads(options.table.read_text()) == {}
    for shape in ("8x8", "8x8xa", "8x8x0"):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["tune", "--shapes", shape])
