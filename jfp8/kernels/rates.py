"""Rates of GPUs, fitted to timings: of jfp8 on Hopper, published ones of other GPUs.

The published timings are of TensorRT-LLM 1.3.0rc20, by ai-dynamo/aiconfigurator (Apache-2.0,
21 August 2026): cuBLASLt's matmuls in bf16 and FP8, the same that XLA calls; its own for FP8 in
blocks of 128 and for NVFP4, the nearest to cuDNN's; its casts. docs/benchmarks.md has the errors.
"""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from typing import Any, NamedTuple

import numpy as np


class MatmulRate(NamedTuple):
    """Hold the parameters of the time of one kind of matmul."""

    launch: float  # minimum time in microseconds
    peak: float  # TFLOP/s of long sums
    memory: float  # TB/s of operands and result
    ramp: float  # terms of a sum in whose time a tile of results starts and ends
    # TB/s of the cast of the activation, if these timings include it; `seconds` does not.
    activation: float | None = None

    def seconds(self, multiplications: Any, results: Any, moved: Any) -> Any:
        """Return the time of so many multiplications, numbers in the result, and bytes."""
        arithmetic = 2 * (multiplications + self.ramp * results) / (1e12 * self.peak)
        return 1e-6 * self.launch + np.hypot(arithmetic, moved / (1e12 * self.memory))


class Rates(NamedTuple):
    """Hold the rates of one GPU."""

    bf16: MatmulRate  # cuBLASLt's
    fp8: MatmulRate  # cuBLASLt's, with one scale for each operand
    blocks: MatmulRate  # FP8 with scales of blocks of 128
    cast: float  # TB/s of a pass that reads bf16 and writes FP8, neither of which is cached
    nvfp4: MatmulRate | None = None  # None if there are no tensor cores for it
    rows: MatmulRate | None = None  # our kernel's for scales by row; None if there is none


class Peak(NamedTuple):
    """Hold TFLOP/s with sums in f32, and TB/s, from data sheets: half of those with sparsity."""

    bf16: float
    fp8: float
    memory: float
    nvfp4: float = 0.0


_DATA = tomllib.loads(resources.files("jfp8.kernels").joinpath("rates.toml").read_text("utf-8"))
PEAKS = {name: Peak(*numbers) for name, numbers in _DATA["peaks"].items()}
_rate: Any = lambda x: MatmulRate(*x) if isinstance(x, list) else x
RATES = {
    name: Rates(**{k: _rate(x) for k, x in rates.items()}) for name, rates in _DATA["rates"].items()
}


def name_of(kind: str) -> str | None:
    """Return the name in `RATES` of a kind of device, such as ``"NVIDIA H200"``, or None."""
    return next((name for name in RATES if re.search(rf"\b{name}\b(?! (Laptop|D\b))", kind)), None)


def rates_of(kind: str) -> Rates | None:
    """Return the rates of a kind of device; None if unknown."""
    return RATES.get(name_of(kind) or "")
