"""Sizes of the matmuls that are checked and timed."""

from __future__ import annotations

from on_gpu.cases import Settings

Shape = tuple[int, int, int]  # m, n, k


def shapes(settings: Settings) -> list[Shape]:
    """List sizes, most important first; the third is from Transformer Engine's published ones."""
    if settings.smoke:
        return [(128, 128, 256)]
    return [(8192, 8192, 8192), (15872, 16384, 4096), (4096, 4096, 4096)]


def name_of(shape: Shape) -> str:
    """Return ``M x K x N``, in Transformer Engine's order."""
    m, n, k = shape
    return f"{m}x{k}x{n}"
