"""`write_tensorboard`, read back from its files with tensorboardX's own protocol buffers."""

import functools
import importlib
import math
import struct
import sys

import pytest

import support.rows
from jfp8.debug.records import NUMBERS
from jfp8.debug.tensorboard import TensorBoardWriter, write_tensorboard

row = functools.partial(
    support.rows.row,
    step=10,
    path="decoder/Dense_0",
    tensor="lhs",
    count=100,
    amax=3.5,
    scale_min=0.25,
    scale_max=0.5,
    underflow=0.125,
    overflow=0.0625,
    mse=2.0**-20,
    headroom=-0.5,
    exponents={-3: 10, -1: 20, 1: 70},
)


@pytest.fixture
def proto():
    pytest.importorskip("tensorboardX")
    return importlib.import_module("tensorboardX.proto.event_pb2")


def events(proto, folder):
    """The events of all files of a folder: records of length, checksum, data, checksum."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(proto.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def values(proto, folder):
    return {(v.tag, e.step): v for e in events(proto, folder) for v in e.summary.value}


def test_scalars(proto, tmp_path):
    write_tensorboard(tmp_path, [row(), row(step=20, amax=7.0)])
    found = values(proto, tmp_path)
    given = row()
    for name in NUMBERS:
        scalar = found[f"{name}/decoder/Dense_0/lhs", 10].simple_value
        assert scalar == getattr(given, name)  # all of them are exact in f32
    assert found["amax/decoder/Dense_0/lhs", 20].simple_value == 7.0
    assert len(found) == 2 * (len(NUMBERS) + 1)
    numbers = {name for name, value in given.to_dict().items() if isinstance(value, float)}
    assert numbers == set(NUMBERS)


def test_histogram_of_exponents(proto, tmp_path):
    write_tensorboard(tmp_path, [row()])
    histogram = values(proto, tmp_path)["exponent/decoder/Dense_0/lhs", 10].histo
    assert list(histogram.bucket_limit) == [-2, -1, 0, 1, 2]  # upper ends
    assert list(histogram.bucket) == [10, 0, 20, 0, 70]
    assert (histogram.min, histogram.max, histogram.num) == (-3, 2, 100)
    assert histogram.sum == 10 * -2.5 + 20 * -0.5 + 70 * 1.5
    assert histogram.sum_squares == 10 * 2.5**2 + 20 * 0.5**2 + 70 * 1.5**2


def test_what_is_not_finite_is_left_out(proto, tmp_path):
    write_tensorboard(tmp_path, [row(sqnr=math.inf, headroom=math.nan, exponents={})])
    tags = {tag for tag, _ in values(proto, tmp_path)}
    assert "amax/decoder/Dense_0/lhs" in tags
    assert not [tag for tag in tags if tag.startswith(("sqnr", "headroom", "exponent"))]


def test_tags(proto, tmp_path):
    rows = {
        ("amax/decoder/Dense_0/lhs_fprop", 10): row(products="fprop"),
        ("amax/decoder/Dense_0_3_1/lhs", 10): row(index=(3, 1)),
        ("amax/decoder/Dense_0/d_rhs", 10): row(tensor="d_rhs", products="wgrad"),
        ("amax/lhs", 10): row(path=""),
        ("amax/decoder/Dense_0/lhs", 0): row(step=None),
    }
    write_tensorboard(tmp_path, rows.values())
    assert {key for key in values(proto, tmp_path) if key[0].startswith("amax")} == set(rows)


def test_calls_in_a_row_add_up(proto, tmp_path):
    """Within a second, too, of which the names of files have but one."""
    for step in range(3):
        write_tensorboard(tmp_path, [row(step=step)])
    assert {step for _, step in values(proto, tmp_path)} == {0, 1, 2}
    writer = TensorBoardWriter(tmp_path)
    writer.write([row(step=3)])
    writer.write([row(step=4)])
    # Written by then, although the writer is still open.
    assert {step for _, step in values(proto, tmp_path)} == {0, 1, 2, 3, 4}
    assert len(list(tmp_path.iterdir())) == 4
    writer.close()


def test_without_tensorboardx(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        write_tensorboard(tmp_path, [row()])
