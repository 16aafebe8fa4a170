"""Rates of GPUs, fitted to published timings: nothing here was measured by running jfp8.

The timings are from TensorRT-LLM 1.3.0rc20, published by ai-dynamo/aiconfigurator (Apache-2.0,
21 August 2026): cuBLASLt's matmuls in bf16 and FP8, the same that XLA calls; kernels of
TensorRT-LLM for FP8 in blocks of 128 and for NVFP4, the nearest to cuDNN's and jfp8's kernels;
and its casts to FP8. docs/gpus.md sums up the errors.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np


class Matmul(NamedTuple):
    """Hold the parameters of the time of one kind of matmul.

    Attributes:
      launch: minimum time in microseconds.
      peak: TFLOP/s of long sums.
      memory: TB/s of operands and result.
      ramp: terms of a sum in whose time a tile of results starts and ends.
      activation: TB/s of the cast of the activation, included in these timings, but not in
        `seconds`; None if it is not included.
    """

    launch: float
    peak: float
    memory: float
    ramp: float
    activation: float | None = None

    def seconds(self, multiplications: Any, results: Any, moved: Any) -> Any:
        """Return the time of so many multiplications, numbers in the result, and bytes."""
        arithmetic = 2 * (multiplications + self.ramp * results) / (1e12 * self.peak)
        return 1e-6 * self.launch + np.hypot(arithmetic, moved / (1e12 * self.memory))


class Rates(NamedTuple):
    """Hold the rates of one GPU.

    Attributes:
      bf16, fp8: matmuls of cuBLASLt, FP8 with one scale for each operand.
      blocks: FP8 with scales of blocks of 128.
      nvfp4: None if there are no tensor cores for it.
      cast: TB/s of a pass that reads bf16 and writes FP8, neither of which is cached.
    """

    bf16: Matmul
    fp8: Matmul
    blocks: Matmul
    cast: float
    nvfp4: Matmul | None = None


# Written by benchmarks/fit_rates.py. Scaled from timed cards by their peaks, not timed, are GB200
# (from B200), RTX 4090 and RTX 5090 (from RTX PRO 6000).
RATES = {
    "B200": Rates(
        bf16=Matmul(2.69, 1550, 7.07, 1),
        fp8=Matmul(3.83, 3100, 5.66, 1),
        blocks=Matmul(4.78, 3050, 6.56, 91.3, 6.04),
        cast=4.64,
        nvfp4=Matmul(6.25, 4560, 5.35, 261, 3.78),
    ),
    "B300": Rates(
        bf16=Matmul(2.46, 1640, 8.75, 1),
        fp8=Matmul(3.82, 3290, 6.15, 1),
        blocks=Matmul(4.6, 3380, 5.72, 33.4, 6.37),
        cast=4.74,
        nvfp4=Matmul(8.36, 6550, 2.83, 990, 4.41),
    ),
    "GB300": Rates(
        bf16=Matmul(2.76, 1930, 7.35, 1),
        fp8=Matmul(4.19, 3780, 6.01, 1),
        blocks=Matmul(4.33, 3740, 5.73, 2.66, 6.11),
        cast=5.03,
        nvfp4=Matmul(8.12, 7000, 2.71, 717, 4.69),
    ),
    "H100": Rates(
        bf16=Matmul(3.05, 801, 4.62, 83.1),
        fp8=Matmul(4.03, 1550, 3.61, 240),
        blocks=Matmul(2.97, 1340, 2.35, 447, 1.86),
        cast=3.05,
    ),
    "H200": Rates(
        bf16=Matmul(2.94, 799, 6.09, 78.8),
        fp8=Matmul(3.87, 1540, 4.49, 233),
        blocks=Matmul(2.74, 1360, 2.99, 525, 1.8),
        cast=4.17,
    ),
    "L40S": Rates(
        bf16=Matmul(2.94, 211, 1.55, 41.3),
        fp8=Matmul(3.08, 390, 1.17, 22),
        blocks=Matmul(0.5, 214, 1.55, 1, 1.62),
        cast=0.676,
    ),
    "RTX PRO 6000": Rates(
        bf16=Matmul(5.52, 400, 1.4, 22.8),
        fp8=Matmul(4.44, 742, 1.42, 1),
        blocks=Matmul(14.1, 745, 3.33, 1400, 0.592),
        cast=1.49,
        nvfp4=Matmul(4.02, 1450, 2.11, 1, 1.74),
    ),
    "GB200": Rates(
        bf16=Matmul(2.69, 1720, 7.07, 1),
        fp8=Matmul(3.83, 3440, 5.66, 1),
        blocks=Matmul(4.78, 3390, 6.56, 91.3, 6.04),
        cast=4.64,
        nvfp4=Matmul(6.25, 5070, 5.35, 261, 3.78),
    ),
    "RTX 4090": Rates(
        bf16=Matmul(5.52, 131, 0.787, 22.8),
        fp8=Matmul(4.44, 243, 0.799, 1),
        blocks=Matmul(14.1, 244, 1.87, 1400, 0.592),
        cast=0.838,
    ),
    "RTX 5090": Rates(
        bf16=Matmul(5.52, 166, 1.4, 22.8),
        fp8=Matmul(4.44, 308, 1.42, 1),
        blocks=Matmul(14.1, 310, 3.33, 1400, 0.592),
        cast=1.49,
        nvfp4=Matmul(4.02, 1210, 2.11, 1, 1.74),
    ),
}


def name_of(kind: str) -> str | None:
    """Return the name in `RATES` of a kind of device, such as ``"NVIDIA H200"``, or None."""
    found = [name for name in RATES if re.search(rf"\b{name}\b(?! (Laptop|D\b))", kind)]
    return found[0] if found else None


def rates_of(kind: str) -> Rates | None:
    """Return the rates of a kind of device; None if unknown."""
    return RATES.get(name_of(kind) or "")
