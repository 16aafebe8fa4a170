"""`scaled_matmul`: the dispatch over the backends in `kernels`, and the scales around them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.accumulation import ACCUMULATIONS
from jfp8.backends import (
    HARDWARE_FORMATS,
    Job,
    emulated,
    f8_by_xla,
    in_bf16,
    varies_along_sum,
    why_not_f8_by_xla,
)
from jfp8.blackwell import by_blackwell, why_not_blackwell
from jfp8.matrices import matrix_sizes
from jfp8.mosaic import by_mosaic, why_not_mosaic
from jfp8.scaling.arrays import ScaledArray, check_scale_shape
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
_WHY_NOT: dict[str, Callable[[ScaledArray, ScaledArray, Job], str | None]] = {
    "emulate": lambda lhs, rhs, job: None,
    "xla": why_not_f8_by_xla,
    "mosaic_gpu": why_not_mosaic,
}

# Multiplications below which a matrix product is faster in bf16 than in FP8 with all that comes
# with it, by a model of time and not yet measured: break-even is between 750^3 and 1300^3 at the
# rates of an H200, depending on how many bytes quantizing moves.
SMALL_PRODUCT = 512**3


def scaled_matmul(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    preferred_element_type: jax.typing.DTypeLike = jnp.float32,
    accumulation: str = "f32",
    fast_accumulation: bool = False,
    powers_of_two: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """``y = dot_general(lhs.data, rhs.data) * (lhs.scale * rhs.scale)``.

    The products are summed in f32, multiplied by the scales in f32, and rounded once to the output
    dtype. Not differentiable: `scaled_dot_general` is.

    Args:
      lhs, rhs: quantized operands, of any two formats (e4m3 x e5m2 included), with any scales.
      dimension_numbers: as for ``jax.lax.dot_general``:
        ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
      preferred_element_type: floating dtype of the result.
      accumulation: how the sum over the contraction is rounded. ``"f32"``: every addition in f32,
        in any order; scales that vary along the contraction are multiplied in first.
        ``"f32_every_128"``: f32 sums of 128 products, scaled and added in f32. ``"hopper"``: the
        tensor cores of Hopper with fast accumulation, which keep 14 bits of the running sum.
        ``"hopper_every_128"``: the same, promoted to f32 every 128 products. The last three are
        emulated on any device, the last two slowly. Hopper's sums are also promoted wherever a
        scale changes.
      fast_accumulation: allow real tensor cores to keep fewer bits of the running sum, which is
        faster, if `accumulation` is ``"f32"``; it changes nothing where they are not used.
      powers_of_two: a promise that all scales in blocks are powers of two, so that the values of
        the operands are exact in bf16. Scales in E8M0 are so without it.
      implementation: ``"emulate"``: f32 arithmetic on any device, the reference. ``"xla"``: f8
        operands for XLA, FP8 tensor cores on CUDA. ``"mosaic_gpu"``: Pallas kernels for Hopper.
        None: the best for the platform that the program is compiled for (see `on_cuda`), emulate
        on CPUs. Which one that is, `jfp8.report` shows.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives: batch, lhs free, rhs free dimensions.

    Raises:
      TypeError: an operand is no `ScaledArray` of a known format, or the result's dtype is not
        floating.
      ValueError: dimension numbers that do not fit; unknown `accumulation` or `implementation`;
        ``accumulation="hopper"`` of formats that Hopper does not multiply.
      NotImplementedError: ``implementation="xla"`` with scales that vary along a contraction, with
        another `accumulation` than ``"f32"``, or with formats other than E4M3FN and E5M2;
        ``"mosaic_gpu"`` on anything but a Hopper GPU with JAX 0.11.2 or later, with scales in other
        blocks than 1x128 and 128x128, or on an array that the compiler divides among devices.

    >>> import jax.numpy as jnp, jfp8
    >>> x = jfp8.quantize(jnp.ones((2, 3)), scale_rounding="power_of_two")
    >>> w = jfp8.quantize(jnp.full((3, 4), 2.0), scale_rounding="power_of_two")
    >>> jfp8.scaled_matmul(x, w, (((1,), (0,)), ((), ())))
    Array([[6., 6., 6., 6.],
           [6., 6., 6., 6.]], dtype=float32)
    """
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(operand, ScaledArray):
            raise TypeError(
                f"scaled_matmul: {name} must be a ScaledArray, got {type(operand).__name__}. "
                "Quantize it first: jfp8.quantize(x); or use jfp8.scaled_dot_general."
            )
        _ = operand.format  # refuses data of any other dtype
        check_scale_shape(operand)
    if not jnp.issubdtype(preferred_element_type, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating dtype, got {preferred_element_type}."
        )
    check_implementation(implementation)
    if accumulation not in ACCUMULATIONS:
        allowed = ", ".join(map(repr, ACCUMULATIONS))
        raise ValueError(f"accumulation={accumulation!r} is unknown. Allowed: {allowed}.")
    if accumulation.startswith("hopper") and not {lhs.format, rhs.format} <= HARDWARE_FORMATS:
        raise ValueError(
            f"accumulation={accumulation!r} is that of tensor cores which multiply E4M3FN and "
            f"E5M2, but the operands are {lhs.format.name} and {rhs.format.name}. "
            "Use accumulation='f32'."
        )
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    dtype = np.dtype(preferred_element_type)
    job = Job(dimension_numbers, dtype, accumulation, fast_accumulation, powers_of_two)
    if implementation is None:
        return _by_platform(lhs, rhs, job)
    reason = _WHY_NOT[implementation](lhs, rhs, job)
    if reason is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} does not support {reason}. "
            "Use implementation=None or 'emulate'."
        )
    with note("cuda", implementation):
        return IMPLEMENTATIONS[implementation](lhs, rhs, job)


def _by_platform(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> jax.Array:
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


def check_dimension_numbers(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    dimension_numbers: lax.DotDimensionNumbers,
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]:
    """`dimension_numbers` as tuples of non-negative ints, checked against the shapes.

    Raises:
      ValueError: not of the form ``((lc, rc), (lb, rb))``, a dimension that does not exist or is
        named twice, or paired dimensions of different sizes; the message names both.
    """
    try:
        (lc, rc), (lb, rb) = dimension_numbers
        lc, rc, lb, rb = (tuple(map(operator.index, dims)) for dims in (lc, rc, lb, rb))
    except (TypeError, ValueError):
        raise ValueError(
            "dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, "
            f"rhs_batch)), four sequences of ints; got {dimension_numbers!r}."
        ) from None
    shapes = f"lhs has shape {tuple(lhs_shape)} and rhs {tuple(rhs_shape)}"
    for name, dims, shape in (("lhs", lc + lb, lhs_shape), ("rhs", rc + rb, rhs_shape)):
        if any(not 0 <= d < len(shape) for d in dims) or len(set(dims)) != len(dims):
            raise ValueError(
                f"dimension_numbers name {name} dimensions {dims}, which must be distinct and from "
                f"0 to {len(shape) - 1}; {shapes}."
            )
    for kind, left, right in (("contracting", lc, rc), ("batch", lb, rb)):
        if len(left) != len(right):
            raise ValueError(
                f"dimension_numbers pair {len(left)} {kind} dimensions of lhs {left} with "
                f"{len(right)} of rhs {right}; {shapes}."
            )
        for a, b in zip(left, right, strict=True):
            if lhs_shape[a] != rhs_shape[b]:
                raise ValueError(
                    f"{kind} dimension {a} of lhs has size {lhs_shape[a]}, but dimension {b} of "
                    f"rhs, with which it is paired, has size {rhs_shape[b]}; {shapes}."
                )
    return (lc, rc), (lb, rb)
