"""Small PNG files for the pages."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image


def save(figure: Figure, path: Path, dpi: int = 220) -> None:
    """Write `figure` on white paper."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, facecolor="white")
    shrink(file, path)


def shrink(file: Any, path: Path) -> None:
    """Write the picture in `file` in 256 colors, as many as lines and letters need."""
    image = Image.open(file).convert("RGB")
    few = image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.putpalette([255 if part > 252 else part for part in few.getpalette() or ()])  # white
    few.save(path, format="png", optimize=True)
