"""Small PNG files for the pages."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Write `figure` in 256 colours, as many as lines and letters need."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, facecolor="white")
    image = Image.open(file).convert("RGB")
    image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        path, format="png", optimize=True
    )
