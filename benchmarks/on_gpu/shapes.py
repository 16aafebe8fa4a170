"""Sizes of the products that are checked and timed."""

from __future__ import annotations

from on_gpu.cases import Settings

Shape = tuple[int, int, int]  # m, n, k


def shapes(settings: Settings) -> list[Shape]:
    """Most important first; the third is that of Transformer Engine's published figures."""
    if settings.smoke:
        return [(128, 128, 256)]
    return [(8192, 8192, 8192), (15872, 16384, 4096), (4096, 4096, 4096)]


def name_of(shape: Shape) -> str:
    """As ``M x K x N``, the way Transformer Engine writes it."""
    m, n, k = shape
    return f"{m}x{k}x{n}"
