"""The speed of a step of `llama_nnx` by a model of time, and its ratio to the peak rate."""

from __future__ import annotations

from typing import Any

from jfp8.kernels.rates import PEAKS, name_of, rates_of

from .llama_nnx import Size


def flops_per_token(size: Size) -> tuple[float, float]:
    """Return FLOPs of the layers' kernels, and of the rest; causal attention counts half."""
    kernels = 6.0 * size.layers * sum(n * m for n, m in size.kernels)
    return kernels, 6.0 * size.width * (size.vocabulary + size.layers * size.seq_len)


def expected(found: Any, size: Size, tokens: int, devices: int, kind: str) -> float | None:
    """Return tokens per second of matmuls and quantizing alone; None for an unknown device.

    In `found`, a `jfp8.report`, FP8 matmuls have a time on one device.
    """
    rates, (kernels, others) = rates_of(kind), flops_per_token(size)
    if rates is None:
        return None
    in_fp8 = sum(row.times * row.expected_us for row in found.rows if row.fp8) / 1e6
    flops = tokens / devices * (others if in_fp8 else kernels + others)
    return tokens / (in_fp8 + flops / (1e12 * rates.bf16.peak))


def mfu(tokens_per_second: float, size: Size, devices: int, kind: str) -> float | None:
    """Return the fraction of the peak rate in bf16, also for FP8; None for an unknown device."""
    name, flops = name_of(kind), tokens_per_second * sum(flops_per_token(size))
    return None if name is None else flops / (devices * 1e12 * PEAKS[name].bf16)
