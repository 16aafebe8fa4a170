"""`scaled_matmul`: the dispatch over the backends in `kernels`, and the scales around them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.accumulation import (
    ACCUMULATIONS,
    dot_in_chunks,
    free_dims,
    multiply,
    scale_products,
    scale_shape_of,
    to_output,
)
from jfp8.arrays import ScaledArray, check_scale_shape, scale_as_f32_pair, scaled_values
from jfp8.formats import E4M3FN, E5M2
from jfp8.kernels import emulate, xla

Implementation = Literal[None, "emulate", "xla"]
IMPLEMENTATIONS = {"emulate": emulate.dot_general, "xla": xla.dot_general}
_HARDWARE_FORMATS = {E4M3FN, E5M2}


def scaled_matmul(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    preferred_element_type: jax.typing.DTypeLike = jnp.float32,
    accumulation: str = "f32",
    fast_accumulation: bool = False,
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
      implementation: ``"emulate"`` (f32 arithmetic on any device, the reference), ``"xla"`` (f8
        operands, FP8 tensor cores on CUDA), or None: xla on CUDA, emulate elsewhere.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives: batch, lhs free, rhs free dimensions.

    Raises:
      TypeError: an operand is no `ScaledArray` of a known format, or the result's dtype is not
        floating.
      ValueError: dimension numbers that do not fit; unknown `accumulation` or `implementation`;
        ``accumulation="hopper"`` of formats that Hopper does not multiply.
      NotImplementedError: ``implementation="xla"`` with scales that vary along a contraction, with
        another `accumulation` than ``"f32"``, or with formats other than E4M3FN and E5M2.

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
    if accumulation.startswith("hopper") and not {lhs.format, rhs.format} <= _HARDWARE_FORMATS:
        raise ValueError(
            f"accumulation={accumulation!r} is that of tensor cores which multiply E4M3FN and "
            f"E5M2, but the operands are {lhs.format.name} and {rhs.format.name}. "
            "Use accumulation='f32'."
        )
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers

    dtype = np.dtype(preferred_element_type)
    reason = _why_emulated(lhs, rhs, dimension_numbers, accumulation)
    if reason is not None:
        if implementation not in (None, "emulate"):
            raise NotImplementedError(
                f"implementation={implementation!r} does not support {reason}. "
                "Use implementation=None or 'emulate'."
            )
        implementation = "emulate"

    if _varies_along(lhs, lhs_contract) or _varies_along(rhs, rhs_contract):
        if accumulation == "f32":
            product = multiply(
                scaled_values(lhs), scaled_values(rhs), dimension_numbers, lax.Precision.HIGHEST
            )
        else:
            product = dot_in_chunks(lhs, rhs, dimension_numbers, accumulation)
        return product.astype(dtype)

    def product_of(backend):
        return lambda lhs_data, rhs_data: IMPLEMENTATIONS[backend](
            lhs_data, rhs_data, dimension_numbers, fast_accumulation=fast_accumulation
        )

    if accumulation != "f32":
        lhs_data, rhs_data = (ScaledArray(q.data, jnp.ones((), jnp.float32)) for q in (lhs, rhs))
        product = dot_in_chunks(lhs_data, rhs_data, dimension_numbers, accumulation)
    elif implementation is None:
        product = lax.platform_dependent(
            lhs.data, rhs.data, cuda=product_of("xla"), default=product_of("emulate")
        )
    else:
        product = product_of(implementation)(lhs.data, rhs.data)
    lhs_free = free_dims(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs.ndim, rhs_contract, rhs_batch)
    lhs_scales, rhs_scales = scale_as_f32_pair(lhs), scale_as_f32_pair(rhs)
    for factor in scale_products(
        tuple(to_output(s, lhs, lhs_batch, lhs_free, 0, len(rhs_free)) for s in lhs_scales),
        tuple(to_output(s, rhs, rhs_batch, rhs_free, len(lhs_free), 0) for s in rhs_scales),
    ):
        product = product * factor
    return product.astype(dtype)


def _why_emulated(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    accumulation: str,
) -> str | None:
    """What only the emulated product can do, None if any implementation can."""
    (lhs_contract, rhs_contract), _ = dimension_numbers
    if accumulation != "f32":
        return f"accumulation={accumulation!r}: it computes real products, not models of them"
    if not {lhs.format, rhs.format} <= _HARDWARE_FORMATS:
        return f"operands in {lhs.format.name} and {rhs.format.name}"
    if _varies_along(lhs, lhs_contract) or _varies_along(rhs, rhs_contract):
        return (
            "scales that vary along the contraction and so cannot leave the sum (lhs scale "
            f"{scale_shape_of(lhs)}, rhs scale {scale_shape_of(rhs)}, dimension_numbers "
            f"{dimension_numbers})"
        )
    return None


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


def _varies_along(q: ScaledArray, dims: Sequence[int]) -> bool:
    shape = scale_shape_of(q)
    return bool(shape) and any(shape[d] != 1 for d in dims)
