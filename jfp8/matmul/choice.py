"""Which backend computes a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.bf16 import in_bf16
from jfp8.matmul.blackwell.product import by_blackwell, why_not_blackwell
from jfp8.matmul.dimensions import matrix_sizes
from jfp8.matmul.emulate.product import emulated
from jfp8.matmul.hopper.product import by_mosaic, why_not_mosaic
from jfp8.matmul.job import HARDWARE_FORMATS, Job, varies_along_sum
from jfp8.matmul.xla import f8_by_xla, why_not_f8_by_xla
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E5M2
from jfp8.tracing.device import Gpu, current_gpu
from jfp8.tracing.notes import note

Implementation = Literal[None, "emulate", "xla", "mosaic_gpu"]


Backend = Callable[[ScaledArray, ScaledArray, Job], jax.Array]


IMPLEMENTATIONS: dict[str, Backend] = {
    "emulate": emulated,
    "xla": f8_by_xla,
    "mosaic_gpu": by_mosaic,
}


WHY_NOT: dict[str, Callable[[ScaledArray, ScaledArray, Job], str | None]] = {
    "emulate": lambda lhs, rhs, job: None,
    "xla": why_not_f8_by_xla,
    "mosaic_gpu": why_not_mosaic,
}

# Multiplications below which a matrix product is faster in bf16 than in FP8 with all that comes
# with it, by a model of time and not yet measured: break-even is between 750^3 and 1300^3 at the
# rates of an H200, depending on how many bytes quantizing moves.
SMALL_PRODUCT = 512**3


def by_platform(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
    """The product by the best backend of the platform that the program is compiled for."""
    if job.accumulation.startswith("hopper"):
        return emulated(lhs, rhs, job)  # a model of hardware, not hardware
    backend, why = on_cuda(lhs, rhs, job, current_gpu())

    def cuda(lhs, rhs):
        with note("cuda", why):
            return backend(lhs, rhs, job)

    reference = lambda lhs, rhs: emulated(lhs, rhs, job)
    # AMD's and Google's compilers take f8 arrays, and multiply them as well as the chip can.
    reason = why_not_f8_by_xla(lhs, rhs, job)
    other = reference if reason else lambda lhs, rhs: f8_by_xla(lhs, rhs, job)
    return lax.platform_dependent(lhs, rhs, cuda=cuda, rocm=other, tpu=other, default=reference)


def on_cuda(lhs: ScaledArray, rhs: ScaledArray, job: Job, gpu: Gpu | None) -> tuple[Backend, str]:
    """The backend for an NVIDIA GPU, and its name or the reason why it is not FP8.

    1. Formats that tensor cores do not take: bf16, in which all stored values are exact.
    2. If the GPU is known: bf16 also for products of fewer than `SMALL_PRODUCT` multiplications,
       and for GPUs without FP8.
    3. One scale per operand: cuBLASLt, by XLA. Scales by row, and in blocks of 128: Pallas kernels
       on Hopper. In blocks of 32: cuDNN on Blackwell.
    4. Otherwise scales by row after cuBLASLt's product, and blocks in bf16.
    """
    job = replace(job, accumulation="f32")  # of sums in hardware, which are promoted on the way
    if not {lhs.format, rhs.format} <= HARDWARE_FORMATS:
        return in_bf16, f"bf16: no tensor cores for {lhs.format.name} x {rhs.format.name}"
    if gpu is not None and not gpu.multiplies_f8:
        return in_bf16, f"bf16: {gpu.kind} has no FP8 tensor cores"
    m, n, k = matrix_sizes(lhs.shape, rhs.shape, job.dimension_numbers)
    if gpu is not None and m * n * k < SMALL_PRODUCT:
        return in_bf16, "bf16: FP8 does not pay for a product this small"
    in_blocks = varies_along_sum(lhs, rhs, job)
    by_row = any(
        jnp.ndim(q.scale) if not isinstance(q.scale, ScaledArray) else 1 for q in (lhs, rhs)
    )
    # XLA knows no product of these two, though Hopper has one.
    both_e5m2 = lhs.format == rhs.format == E5M2
    ours = in_blocks or by_row or both_e5m2
    if gpu is not None and ours and why_not_mosaic(lhs, rhs, job, gpu) is None:
        return by_mosaic, "mosaic_gpu"
    if gpu is not None and in_blocks and why_not_blackwell(lhs, rhs, job, gpu) is None:
        return by_blackwell, "cudnn"
    if in_blocks:
        return in_bf16, "bf16: no kernel for these blocks of scales on this GPU"
    if both_e5m2:
        return in_bf16, "bf16: XLA has no product of e5m2 by e5m2"
    return f8_by_xla, "xla"


def check_implementation(implementation: str | None) -> None:
    """Raise ``ValueError`` unless `implementation` is None or names a backend."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(
            f"implementation={implementation!r} is unknown. Allowed: {allowed}, or None, which "
            "picks one for the platform."
        )
