"""Peak rates of GPUs, from the data sheets of NVIDIA, for scripts that fit or draw rates."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Hold TFLOP/s with sums in f32, and TB/s, from data sheets: half of those with sparsity."""

    bf16: float
    fp8: float
    memory: float
    nvfp4: float = 0.0


# Data sheets of NVIDIA: SXM boards, an eighth of an HGX, a 72nd of a rack (GB200, GB300), cards.
PEAKS = {
    "H100": Peak(989.5, 1979, 3.35),
    "H200": Peak(989.5, 1979, 4.8),
    "B200": Peak(2250, 4500, 8.0, 9000),
    "GB200": Peak(2500, 5000, 8.0, 10000),
    "B300": Peak(2250, 4500, 8.0, 13500),
    "GB300": Peak(2500, 5000, 8.0, 15000),
    "L40S": Peak(362, 733, 0.864),
    "RTX PRO 6000": Peak(503.8, 1008, 1.792, 2015),
    "RTX 4090": Peak(165.2, 330.3, 1.008),
    "RTX 5090": Peak(209.5, 419, 1.792, 1676),
}
