"""The pictures of the pages: stored ones are what `benchmarks/pictures.py` draws, and are shown."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib import image

from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "docs/_static"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
pictures = imported("pictures", "benchmarks")


def test_every_stored_picture_has_its_command_and_its_page():
    shown = {}
    for page in PAGES:
        for text, target in re.findall(r"!\[([^]]*)\]\(([^)]+\.png)\)", page.read_text()):
            shown[(page.parent / target).resolve()] = text
    stored = {*STATIC.glob("*.png"), ROOT / "docs/loss.png"}
    assert {path.stem for path in stored} == {*pictures.NAMES}
    assert set(shown) == stored
    assert all(len(text.split()) >= 8 for text in shown.values())
    assert all(path.stat().st_size < 130_000 for path in stored)


def test_pictures_of_notebooks_are_theirs(tmp_path):
    for name in pictures.NOTEBOOKS:
        pictures.write(name, tmp_path)
        assert (tmp_path / f"{name}.png").read_bytes() == (STATIC / f"{name}.png").read_bytes()


QUICK = ("core", "like_float32", "loss", "experts")
SLOW = ("memory", "roofline", "curves", "long_run", "error_against_bits", "error_map")
SLOW += ("sums", "gaps")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_stored_pictures_are_what_is_drawn_now(name, tmp_path):
    """Up to letters, which another version of matplotlib may draw otherwise."""
    assert set(pictures.DRAWN) == {"dead_gradients", *QUICK, *SLOW}
    folder = tmp_path / "_static"
    folder.mkdir()
    pictures.write(name, folder)
    place = Path(f"{'' if name == 'loss' else '_static/'}{name}.png")
    stored, drawn = (image.imread(d / place)[..., :3] for d in (STATIC.parent, tmp_path))
    assert stored.shape == drawn.shape
    assert np.abs(stored - drawn).mean() < 0.01
    assert np.all(stored[0, 0] == 1)  # white paper


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Small gradients are zero under 'unscaled'")  # the finding
def test_gradients_of_lower_layers_die(tmp_path):
    """A training, of which other flags of XLA change the squares, but not what the picture says."""
    figure = pictures.dead_gradients()
    imported("png", "benchmarks").save(figure, tmp_path / "drawn.png")
    stored, drawn = STATIC / "dead_gradients.png", tmp_path / "drawn.png"
    assert image.imread(stored).shape == image.imread(drawn).shape
    ax = figure.axes[0]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [f"layers_{i}" for i in range(10, -1, -2)]
    (dead,) = ax.collections[1:]
    assert dead.get_label() == "dead: all zeros"
    rows = [int(path.vertices[:, 1].min()) for path in dead.get_paths()]
    assert min(rows) > 1  # not those of the upper two layers
    assert rows.count(5) > 5


def test_the_model_of_a_linear_layer():
    """Of 4096 x 4096 x 4096 on an H200: 12 n^2 bytes by products in FP8, and 12 to quantize."""
    roofline = imported("roofline", "benchmarks")
    h200, n = roofline.PEAKS["H200"], 4096
    assert roofline.traffic(n, n, n, "FP8") == 24 * n**2
    assert roofline.traffic(n, n, n, "bf16") == 18 * n**2
    assert roofline.rate(h200, n, "bf16") == pytest.approx(989.5)
    seconds = 6 * n**3 / 1979e12 + 12 * n**2 / 4.8e12
    assert roofline.rate(h200, n, "FP8") == pytest.approx(6 * n**3 / seconds / 1e12)
    # A small one is bound by its bytes.
    assert roofline.rate(h200, 64, "bf16") == pytest.approx(6 * 64**3 / (18 * 64**2) * 4.8)
    gains = {n: roofline.rate(h200, n, "FP8") / roofline.rate(h200, n, "bf16") for n in (750, 1300)}
    assert gains[750] < 1 < gains[1300]  # a claim of the page on GPUs
