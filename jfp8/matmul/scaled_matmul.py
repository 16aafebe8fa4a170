"""`scaled_matmul`: a matmul of two `ScaledArray`s, by a chosen or the best backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.planner import check_implementation, multiply
from jfp8.matmul.spec import ACCUMULATIONS, Implementation, MatmulSpec, as_numbers, layout_of
from jfp8.scaling.arrays import ScaledArray, check_scale_shape
from jfp8.tracing.device import current_device


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
    """Return ``y = dot_general(lhs.data, rhs.data) * (lhs.scale * rhs.scale)``.

    The sum of products is in f32, multiplied by the scales in f32, and rounded once to the output
    dtype. It is not differentiable; `scaled_dot_general` is.

    Args:
      lhs, rhs: quantized operands, of any two formats (e4m3 x e5m2 included), with any scales.
      dimension_numbers: see ``jax.lax.dot_general``:
        ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
      preferred_element_type: floating dtype of the result.
      accumulation: how the sum over the contraction is rounded. ``"f32"``: every addition in f32,
        in any order; scales that vary along the contraction are multiplied in first.
        ``"f32_every_128"``: f32 sums of 128 products, scaled and added in f32. ``"hopper"``: the
        tensor cores of Hopper with fast accumulation, which keep 14 bits of the running sum.
        ``"hopper_every_128"``: the same, promoted to f32 every 128 products. The last three are
        emulated on every device, the last two slowly. Hopper's sums are also promoted wherever a
        scale changes.
      fast_accumulation: if `accumulation` is ``"f32"``, allow real tensor cores to keep fewer bits
        of the running sum, which is faster; no effect where they are not used.
      powers_of_two: a promise that all scales of blocks are powers of two and normal f32 numbers,
        so that the values of the operands are exact in bf16, and their scales in E8M0. (Blackwell
        gives NaN for a block whose scale is not.) E8M0 scales do not need it.
      implementation: ``"emulate"``: f32 arithmetic on any device, the reference. ``"bf16"``: stored
        values, which are exact in bf16, on any device. ``"xla"``: f8 operands for XLA, FP8 tensor
        cores on CUDA. ``"mosaic_gpu"``: Pallas kernels for Hopper. ``"mosaic_tpu"``: the Pallas
        kernel for TPUs. None chooses the best one that `jfp8.backends` allows on the platform that
        the program is compiled for (on CPUs emulate); `jfp8.report` shows which.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives: batch, lhs free, rhs free dimensions.

    Raises:
      TypeError: an operand is not a `ScaledArray` of a known format, or the result's dtype is not
        floating.
      ValueError: dimension numbers that do not fit; unknown `accumulation` or `implementation`;
        ``accumulation="hopper"`` with formats that Hopper does not multiply.
      NotImplementedError: ``implementation="xla"`` with scales that vary along a contraction, with
        another `accumulation` than ``"f32"``, or with formats other than E4M3FN and E5M2;
        ``"mosaic_gpu"`` on anything but a Hopper GPU with JAX 0.11.2 or later, with scales in other
        blocks than 1x128 and 128x128, or on an array that the compiler partitions;
        ``"mosaic_tpu"`` on anything but a TPU, with sizes that are no multiples of 128, with scales
        in other blocks than of 32 and 128 or that may not be powers of two, or on such an array.

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
        _ = operand.format  # raises for data of any other dtype
        check_scale_shape(operand)
    if not jnp.issubdtype(preferred_element_type, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating dtype, got {preferred_element_type}."
        )
    check_implementation(implementation)
    if accumulation not in ACCUMULATIONS:
        allowed = ", ".join(map(repr, ACCUMULATIONS))
        raise ValueError(f"accumulation={accumulation!r} is unknown. Allowed: {allowed}.")
    numbers = as_numbers(dimension_numbers)
    layout_of(lhs.shape, rhs.shape, numbers)  # raises if they do not fit
    dtype = np.dtype(preferred_element_type)
    spec = MatmulSpec(
        numbers,
        dtype,
        accumulation,
        fast_accumulation,
        powers_of_two,
        implementation=implementation,
        device=current_device(lhs.data, rhs.data),
    )
    return multiply(lhs, rhs, spec)
