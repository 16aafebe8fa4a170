"""Transposed convolutions as convolutions of a dilated image, by the rules of JAX and Flax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.scaling.arrays import ScaledArray

Padding = str | Sequence[tuple[int, int]]


def conv_transpose(
    lhs: jax.Array,
    rhs: jax.Array | ScaledArray,
    strides: Sequence[int],
    padding: Padding,
    rhs_dilation: Sequence[int],
    transpose_kernel: bool,
    convolve: Callable[..., jax.Array],
) -> jax.Array:
    """Compute ``jax.lax.conv_transpose``, channels last, with ``convolve`` for its convolution.

    Args:
      lhs: ``[n, *space, in]``.
      rhs: ``[*window, in, out]``, or ``[*window, out, in]`` with `transpose_kernel`.
      padding: also ``"CIRCULAR"``, as Flax has it.
      convolve: called like ``jax.lax.conv_general_dilated``.
    """
    rank = lhs.ndim - 2
    if transpose_kernel:
        values = rhs.dequantize() if isinstance(rhs, ScaledArray) else rhs
        if values.dtype == jnp.float32 and lhs.dtype.itemsize < 4:
            values = values.astype(lhs.dtype)  # `convolve` would cast it
        rhs = jnp.flip(values, range(rank))
    rule = "VALID" if padding == "CIRCULAR" else padding
    if isinstance(rule, str):
        extents = [(k - 1) * d + 1 for k, d in zip(rhs.shape[:rank], rhs_dilation, strict=True)]
        pads = [_padding(k, s, rule) for k, s in zip(extents, strides, strict=True)]
    else:
        pads = list(rule)
    space = "DHW"[-rank:] if rank <= 3 else "".join(map(chr, range(ord("a"), ord("a") + rank)))
    channels = "OI" if transpose_kernel else "IO"
    numbers: Any = (f"N{space}C", f"{space}{channels}", f"N{space}C")
    dilations = {"lhs_dilation": tuple(strides), "rhs_dilation": tuple(rhs_dilation)}
    y = convolve(lhs, rhs, (1,) * rank, pads, dimension_numbers=numbers, **dilations)
    if padding == "CIRCULAR":
        periods = [n * s for n, s in zip(lhs.shape[1:-1], strides, strict=True)]
        y = _wrapped(y, periods, more_after=transpose_kernel)
    return y


def _padding(size: int, stride: int, rule: str) -> tuple[int, int]:
    """Return the padding of ``jax.lax.conv_transpose``, for a kernel of `size`."""
    if rule == "SAME":
        total = size + stride - 2
        before = size - 1 if stride > size - 1 else -(-total // 2)
    elif rule == "VALID":
        total = size + stride - 2 + max(size - stride, 0)
        before = size - 1
    else:
        raise ValueError(
            f"padding={rule!r}: a transposed convolution takes 'SAME', 'VALID', 'CIRCULAR', or a "
            "pair of ints for each spatial dimension."
        )
    return before, total - before


def _wrapped(y: jax.Array, periods: Sequence[int], *, more_after: bool) -> jax.Array:
    """Return `y`, with values outside one period added to the other end, as Flax does."""
    for axis, period in enumerate(periods, start=1):
        missing = -(y.shape[axis] - period) % (2 * period)
        half, rest = missing // 2, missing - missing // 2
        pad = (half, rest) if more_after else (rest, half)
        y = jnp.pad(y, [pad if d == axis else (0, 0) for d in range(y.ndim)])
        y = y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)
    return y
