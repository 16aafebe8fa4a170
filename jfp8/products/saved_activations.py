"""Wrap a function of an activation, so that the activation is saved in FP8 for the backward pass.

    forward    y  = f(x, *rest)                           exact: x is in high precision
    saved      q  = codes of x, and a scale for every block
    backward   dx, *drest = vjp(f, q * scale, *rest)(dy)

Matmuls already save their operands in FP8. This is for the functions between them, normalizations
and activation functions, whose backward pass needs their input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jfp8.products.differentiated import CustomVjp, first_order_only
from jfp8.products.vjp import SAVED
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import as_float_array, codes_of, codes_to_format
from jfp8.scaling.formats import E4M3FN, Format, FormatLike, as_format
from jfp8.scaling.granularity import Block, ragged_block
from jfp8.scaling.scales import amax, quantize_with_scale, reciprocal, scale_from_amax

BLOCK = 32
"""Elements that share a scale: few, so that an outlier affects few other elements."""


def save_in_fp8(
    f: Callable[..., Any], *, fmt: FormatLike = E4M3FN, block: int = BLOCK, name: str = SAVED
) -> Callable[..., Any]:
    """Return `f`, with its first argument saved in FP8 for the backward pass. ::

        y         = f(x, *rest)
        dx, drest = vjp(f, dequantize(quantize(x)), *rest)(dy)

    The forward result is unchanged. Gradients change only as much as the derivative of `f` varies
    within the rounding error of `fmt`. One byte is saved for every element of `x`, and two bytes, a
    bf16 scale, for every block of elements along its last axis. The backward pass recomputes
    `f`.

    The scale is chosen such that the largest element of its block has an error of 0.2 %, not the 6
    % of E4M3. This includes outliers, on which the statistics of a normalization depend. A block
    with a NaN or an Inf in it is NaN in the backward pass, so the gradients are, too.

    Args:
      f: function of arrays. It must take all arrays that it reads as arguments: parameters, masks,
        random keys.
      fmt: format of the codes; any signed format.
      block: number of elements of `x` that share a scale.
      name: the name under which policies of ``jax.checkpoint`` find codes and scales.

    Returns:
      Function ``g(x, *rest)``: `x` is an ``f32 | bf16 | f16`` array of at least one dimension, and
      `rest` are any arrays, or trees of arrays, saved unchanged. Only reverse mode, and only first
      derivatives: like every ``jax.custom_vjp`` it refuses ``jax.jvp``, and a second derivative
      raises ``TypeError``.

    Raises:
      TypeError: `fmt` is not a signed format; when called, `x` has another dtype.
      ValueError: `block` is not a positive integer; when called, `x` is 0-d, or `f` closes over
        traced arrays.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> gelu = jfp8.save_in_fp8(jax.nn.gelu)
    >>> x = jnp.linspace(-2, 2, 64)
    >>> bool((gelu(x) == jax.nn.gelu(x)).all())
    True
    >>> [(kept.dtype.name, kept.shape) for kept in jax.tree.leaves(jax.vjp(gelu, x)[1])]
    [('uint8', (64,)), ('bfloat16', (2,))]

    References:
      COAT, arXiv 2410.19313, section 5: activations saved with a scale for each group of elements.
    """
    fmt = as_format(fmt)
    if not fmt.signed:
        raise TypeError(f"fmt must be a jfp8.Format with a sign, like jfp8.E4M3FN; got {fmt!r}.")
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise ValueError(f"block must be a positive number of elements, like 32; got {block!r}.")

    @functools.wraps(f)
    def saving(x: jax.Array, *rest: Any) -> Any:
        x = as_float_array(x, "x")
        if x.ndim == 0:
            raise ValueError(
                "x has no dimensions, so there are no blocks to share a scale. Leave save_in_fp8 "
                "out: a single number costs nothing to save."
            )
        _check_closes_over_nothing(f, x, rest)
        options = _Options(f, fmt, block, name, x.dtype)
        return _apply(options, x, rest)

    return saving


def keeping_inputs(f: Callable[..., jax.Array], saved: Format | None) -> Callable[..., jax.Array]:
    """Return `f`, which saves only its arguments for the backward pass, the first as `saved`."""
    return jax.checkpoint(f) if saved is None else save_in_fp8(f, fmt=saved)


def _check_closes_over_nothing(f: Callable[..., Any], x: jax.Array, rest: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` if `f` reads traced arrays other than its arguments.

    The backward pass calls it when they may no longer exist, and JAX would report a leaked tracer.
    """
    read = jax.make_jaxpr(f)(x, *rest).consts
    traced = [str(jax.typeof(array)) for array in read if isinstance(array, jax.core.Tracer)]
    if traced:
        raise ValueError(
            f"The function given to save_in_fp8 reads arrays that are not its arguments, {traced}: "
            "they would get no gradient, and may no longer exist when the backward pass calls it. "
            "Make them arguments: save_in_fp8(lambda x, w: x * w)(x, w) instead of "
            "save_in_fp8(lambda x: x * w)(x)."
        )


@dataclass(frozen=True)
class _Options:
    """The arguments of `save_in_fp8`, and the dtype of `x`."""

    f: Callable[..., Any]
    fmt: Format
    block: int
    name: str
    dtype: np.dtype


def _encode(x: jax.Array, options: _Options) -> ScaledArray:
    """Return `x` in FP8: codes as uint8, and a bf16 scale for every block."""
    granularity = Block((options.block,))
    scale = scale_from_amax(amax(x, granularity), options.fmt, poison=True)
    # Not a cast and its inverse, which XLA may remove.
    scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    block = ragged_block(granularity, x.shape)
    q = quantize_with_scale(x, scale, options.fmt, block=block, inverse=reciprocal(scale))
    return ScaledArray(codes_of(q.data), scale.astype(jnp.bfloat16), block)


def _decode(q: ScaledArray, options: _Options) -> jax.Array:
    """Return the values that `_encode` stored, in the dtype of `x`."""
    data = codes_to_format(q.data, options.fmt)
    return scaled_values(replace(q, data=data)).astype(options.dtype)


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def _apply(options, x, rest):
    return options.f(x, *rest)


def _forward(options, x, rest):
    x = first_order_only(x, "what save_in_fp8 returns", "the function as it was")
    # XLA would delay the computation of the codes until they are needed, and hold x until then.
    x, q = lax.optimization_barrier((x, _encode(x, options)))
    kept = jax.tree.map(lambda array: checkpoint_name(array, options.name), q)
    return options.f(x, *rest), (kept, rest)


def _backward(options, residuals, dy):
    kept, rest = residuals
    _, vjp = jax.vjp(lambda x, rest: options.f(x, *rest), _decode(kept, options), rest)
    return vjp(dy)


_apply.defvjp(_forward, _backward)
