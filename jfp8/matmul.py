"""`scaled_matmul`: the dispatch over the backends in `kernels`, and the scales around them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.arrays import ScaledArray, dequantize, scale_as_f32_pair
from jfp8.kernels import emulate, xla

Implementation = Literal[None, "emulate", "xla"]
IMPLEMENTATIONS = {"emulate": emulate.dot_general, "xla": xla.dot_general}
ACCUMULATIONS = ("f32",)


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
      lhs, rhs: quantized operands, of any two f8 formats (e4m3 x e5m2 included). Scales that vary
        along a contracted dimension cannot leave the sum; such operands are dequantized first.
      dimension_numbers: as for ``jax.lax.dot_general``:
        ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
      preferred_element_type: floating dtype of the result.
      accumulation: how the sum over the contraction is rounded. ``"f32"``: every addition in f32.
      fast_accumulation: allow tensor cores to keep fewer bits of the running sum (about 14), which
        is faster; it changes nothing where they are not used.
      implementation: ``"emulate"`` (f32 arithmetic on any device, the reference), ``"xla"`` (f8
        operands, FP8 tensor cores on CUDA), or None: xla on CUDA, emulate elsewhere.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives: batch, lhs free, rhs free dimensions.

    Raises:
      TypeError: an operand is no `ScaledArray` of a known format, or the result's dtype is not
        floating.
      ValueError: dimension numbers that do not fit; unknown `accumulation` or `implementation`.
      NotImplementedError: ``implementation="xla"`` with scales that vary along a contraction, or
        with 4-bit operands.

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
    if not jnp.issubdtype(preferred_element_type, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating dtype, got {preferred_element_type}."
        )
    check_implementation(implementation)
    if accumulation not in ACCUMULATIONS:
        allowed = ", ".join(map(repr, ACCUMULATIONS))
        raise ValueError(f"accumulation={accumulation!r} is unknown. Allowed: {allowed}.")
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers

    lhs_scales, rhs_scales = scale_as_f32_pair(lhs), scale_as_f32_pair(rhs)
    if _vary_along(lhs_scales, lhs_contract) or _vary_along(rhs_scales, rhs_contract):
        if implementation == "xla":
            raise NotImplementedError(
                "implementation='xla' takes scales out of the sum, but a scale varies along the "
                f"contraction (lhs scale {lhs_scales[0].shape}, rhs scale {rhs_scales[0].shape}, "
                f"dimension_numbers {dimension_numbers}). Use implementation=None or 'emulate'."
            )
        product = lax.dot_general(
            dequantize(lhs),
            dequantize(rhs),
            dimension_numbers,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return product.astype(preferred_element_type)
    eight_bits = lhs.format.bits == rhs.format.bits == 8
    if implementation == "xla" and not eight_bits:
        raise NotImplementedError(
            "implementation='xla' multiplies 8-bit formats, but the operands are "
            f"{lhs.format.name} and {rhs.format.name}. Use implementation=None or 'emulate'."
        )

    def product_of(backend):
        return lambda lhs_data, rhs_data: IMPLEMENTATIONS[backend](
            lhs_data, rhs_data, dimension_numbers, fast_accumulation=fast_accumulation
        )

    if implementation is None and eight_bits:
        product = lax.platform_dependent(
            lhs.data, rhs.data, cuda=product_of("xla"), default=product_of("emulate")
        )
    else:
        product = product_of(implementation or "emulate")(lhs.data, rhs.data)
    lhs_free = _free(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = _free(rhs.ndim, rhs_contract, rhs_batch)
    factors = itertools.zip_longest(
        [_to_output(s, lhs.shape, lhs_batch, lhs_free, 0, len(rhs_free)) for s in lhs_scales],
        [_to_output(s, rhs.shape, rhs_batch, rhs_free, len(lhs_free), 0) for s in rhs_scales],
        fillvalue=np.float32(1.0),
    )
    for lhs_factor, rhs_factor in factors:
        product = product * (lhs_factor * rhs_factor)
    return product.astype(preferred_element_type)


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


def _vary_along(scales: tuple[jax.Array, ...], dims: tuple[int, ...]) -> bool:
    return any(s.ndim > 0 and any(s.shape[d] != 1 for d in dims) for s in scales)


def _free(ndim: int, contract: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d not in contract + batch)


def _to_output(
    scale: jax.Array,
    data_shape: tuple[int, ...],
    batch: tuple[int, ...],
    free: tuple[int, ...],
    before: int,
    after: int,
) -> jax.Array:
    """A scale laid out like the product: batch, then `before` ones, free dims, `after` ones."""
    if scale.ndim == 0:
        return scale
    for d, (n, m) in enumerate(zip(data_shape, scale.shape, strict=True)):
        if m not in (1, n):  # a block of several elements
            scale = jnp.repeat(scale, n // m, axis=d)
    scale = scale.transpose(*batch, *free, *(d for d in range(scale.ndim) if d not in batch + free))
    kept = scale.shape[: len(batch) + len(free)]
    shape = kept[: len(batch)] + (1,) * before + kept[len(batch) :] + (1,) * after
    return scale.reshape(shape)
