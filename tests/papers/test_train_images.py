"""`examples/train_images.py`: its data, its convolution, and a run of a few steps."""

import functools
import gzip
import json
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

from support.scripts import imported


def idx(array: np.ndarray) -> bytes:
    """An IDX file, written as the MNIST page describes it."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


def write_folder(folder: Path) -> None:
    """Four IDX files, two of them gzipped: images of 12 x 10 whose class is their brightest row."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 200), ("t10k", 40)):
        labels = rng.integers(10, size=count).astype(np.uint8)
        images = rng.integers(100, size=(count, 12, 10)).astype(np.uint8)
        images[np.arange(count), labels] += 150
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))


train_images, model = (imported(name, "examples") for name in ("train_images", "images.model"))
data = train_images.data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("idx")
    write_folder(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stride"), [(1, 2), (3, 1), (3, 2)])
def test_conv_is_that_of_flax(size, stride):
    """The same initial kernel and products; "SAME" pads an even and an odd side differently."""
    x = np.random.default_rng(0).normal(size=(2, 8, 7, 3)).astype(np.float32)
    ours = model.Conv(5, size, stride)
    flax = nn.Conv(5, (size, size), stride, use_bias=False)
    variables, theirs = ours.init(jax.random.key(0), x), flax.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables, theirs)

    (y, vjp), (expected, expected_vjp) = (
        jax.vjp(layer.apply, variables, x) for layer in (ours, flax)
    )
    dy = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    assert y.shape == expected.shape
    # sums of at most 45 products, of 112 in the kernel's gradient
    for a, b in zip(jax.tree.leaves((y, vjp(dy))), jax.tree.leaves((expected, expected_vjp(dy)))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_a_short_run(folder, tmp_path, monkeypatch, capsys):
    one_block = functools.partial(model.ResNet, widths=(8,))  # compiles sooner
    monkeypatch.setattr(train_images, "ResNet", one_block)
    argv = ["--compare", "--data", str(folder), "--steps", "20", "--lr", "1e-2", "--loss-scale"]
    result = train_images.main([*argv, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"images: {folder}, 200 to train on and 40 to test" in printed
    assert "FP8, delayed" in printed
    assert "points" in printed
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    figures = dict(field.split("=") for field in line.split()[1:])
    assert figures["example"] == "train_images"
    assert float(figures["fp8"]) == pytest.approx(result["test_loss"]["fp8"], rel=1e-5)
    noise = abs(result["noise_percent"])
    assert 0 < noise < 100
    assert f"on other batches, float32 ends {noise:.2f} % away" in printed
    assert float(figures["f32_accuracy"]) == pytest.approx(result["test_accuracy"]["f32"])

    fp8, f32 = (result["train_loss"][run] for run in ("fp8", "f32"))
    assert fp8[0] == pytest.approx(f32[0], rel=0.02), "the same initial parameters and batch"
    assert fp8[0] != f32[0], "and yet one of them in FP8"
    for losses in (fp8, f32):
        assert np.isfinite(losses).all()
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    assert np.isfinite(list(result["test_loss"].values())).all()
    for accuracy in result["test_accuracy"].values():
        assert accuracy * 40 / 100 == pytest.approx(round(accuracy * 40 / 100))  # 40 images
        assert 0 <= accuracy <= 100
