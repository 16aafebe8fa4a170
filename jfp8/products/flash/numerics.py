"""Quantizers of attention's operands under a recipe.

What is stored, queries, keys, values and the gradient of the result, has a scale for each token and
head, or one from an amax history. So nothing that a query may not see changes its result. What
exists block by block only, the weights ``P`` and the gradient ``dS`` of the scores, is scaled where
it is made: see `blocks`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.quantizer import Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import E4M3FN, Format
from jfp8.scaling.history import AmaxState
from jfp8.scaling.scales import SMALLEST_SCALE, reciprocal, scale_from_amax
from jfp8.tracing.device import current_device

_KNOWN = (Current, Delayed, Rowwise, Blockwise, TwoLevel, Unit)


class Quantized(NamedTuple):
    """An operand ``x[..., tokens, depth] ~= data * scale[..., None]``.

    Attributes:
      data: f8, or the values themselves where the recipe leaves them in high precision.
      scale: f32[..., tokens].
      amax: f32[], of the operand.
    """

    data: jax.Array
    scale: jax.Array
    amax: jax.Array


class Uses(NamedTuple):
    """Quantizers of a stored operand in its two matmuls; None keeps high precision."""

    first: Quantizer | None = None
    second: Quantizer | None = None


@dataclass(frozen=True)
class Numerics:
    """Quantizers of each operand of the six matmuls; see `blocks` for the equations."""

    query: Uses = Uses()  # in S and dK
    key: Uses = Uses()  # in S and dQ
    value: Uses = Uses()  # in O and dP
    grad: Uses = Uses()  # dO, in dP and dV
    weights: tuple[Format | None, Format | None] = (None, None)  # P in O and dV
    scores: tuple[Format | None, Format | None] = (None, None)  # dS in dQ and dK


@functools.cache
def numerics_of(recipe: Recipe | None) -> Numerics:
    """Return the numerics of attention under `recipe`.

    S and O are forward products, and K and V their second operands. dQ and dP are gradients of
    first operands, dK and dV of second ones. The format of gradients is that of forward operands:
    with a scale for each token, they need no wider range, and would lose a bit of precision.
    """
    if recipe is None:
        return Numerics()
    if recipe.accumulation.startswith("hopper"):
        raise ValueError(
            f"{recipe!r} emulates the sums of a GPU (accumulation={recipe.accumulation!r}), and "
            "scaled_dot_product_attention adds in f32. Use a recipe with accumulation='f32'."
        )
    products = recipe.resolved()
    if products.fprop.lhs is None:  # activations stay in high precision, and there are no weights
        return Numerics()
    # A subclass may do anything.
    fprop, dgrad, wgrad = (
        [q if type(q) in _KNOWN else None for q in (product.lhs, product.rhs)]
        for product in (products.fprop, products.dgrad, products.wgrad)
    )
    forward = format_of(fprop[0])
    if forward is not None:
        dgrad[0], wgrad[1] = (_in(forward, q) for q in (dgrad[0], wgrad[1]))
    return Numerics(
        query=Uses(fprop[0], wgrad[0]),
        key=Uses(fprop[1], dgrad[1]),
        value=Uses(fprop[1], dgrad[1]),
        grad=Uses(dgrad[0], wgrad[1]),
        weights=(format_of(fprop[0]), format_of(wgrad[0])),
        scores=(format_of(dgrad[0]), format_of(wgrad[1])),
    )


def _in(fmt: Format, quantizer: Quantizer | None) -> Quantizer | None:
    """Return the quantizer of a gradient in `fmt`, unless it has no scale."""
    if quantizer is None or isinstance(quantizer, Unit) or format_of(quantizer) == fmt:
        return quantizer
    return replace(quantizer, fmt=fmt)


def format_of(quantizer: Quantizer | None) -> Format | None:
    """Return its format; e4m3 instead of four bits, too few without scales of small blocks."""
    if quantizer is None:
        return None
    return quantizer.fmt if quantizer.fmt.has_nan else E4M3FN


def for_both(
    x: jax.Array, uses: Uses, state: AmaxState | None, *, folded: bool = False
) -> tuple[Quantized, Quantized]:
    """Quantize `x` for both of its products; see `quantize_tokens`."""
    first = quantize_tokens(x, uses.first, state, folded=folded)
    return first, first if uses.second == uses.first else quantize_tokens(x, uses.second, state)


def quantize_tokens(
    x: jax.Array,
    quantizer: Quantizer | None,
    state: AmaxState | None,
    *,
    folded: bool = False,
) -> Quantized:
    """Quantize ``x[..., tokens, depth]`` with a scale for each token.

    Args:
      quantizer: None: `x` is not rounded. Its blocks do not matter, nor how it rounds their scales.
      state: the amax history; None, or one without an entry: the scales follow from the tokens.
      folded: whether a product multiplies its other operand by the scales, before that is rounded:
        then they are powers of two, and exact.
    """
    stored, x = x, x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    if quantizer is None:
        return Quantized(stored, jnp.ones_like(largest), jnp.max(largest))
    fmt = format_of(quantizer)
    assert fmt is not None
    rounding = "power_of_two" if folded else None
    margin = quantizer.margin if isinstance(quantizer, Delayed) else 0
    scale = scale_from_amax(largest, fmt, margin=margin, scale_rounding=rounding, poison=True)
    if isinstance(quantizer, Unit):
        scale = jnp.ones_like(scale)
    if isinstance(quantizer, Delayed) and state is not None:
        seen = quantizer.expected(state) > 0
        of_history = replace(quantizer, scale_rounding=rounding or quantizer.scale_rounding)
        scale = jnp.where(seen, of_history.scale(jnp.zeros(()), state), scale)
    data = cast(x * reciprocal(scale)[..., None], fmt)
    # Scales are compared where they move into weights. That of zeros, 1 so far, would be the
    # largest.
    scale = jnp.where(largest == 0, SMALLEST_SCALE, scale)
    return Quantized(data, scale, jnp.max(largest))


def quantize_made(x: jax.Array, fmt: Format | None, axis: int) -> tuple[jax.Array, jax.Array]:
    """A block that was just made, and its scales, powers of two: one for all along `axis`."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    if fmt is None:
        return x, jnp.ones_like(largest)
    scale = scale_from_amax(largest, fmt, scale_rounding="power_of_two", poison=True)
    return cast(x * reciprocal(scale), fmt), scale


def weights_factor(fmt: Format | None) -> float:
    """Return the factor of weights, which are at most 1: the largest power of two that fits."""
    return 1.0 if fmt is None else 2.0 ** math.floor(math.log2(fmt.max))


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``einsum(equation, a, b)`` in f32 of data in f8, or of values.

    f8 values are exact in bf16, and their products in f32: there, a GPU has tensor cores for them.
    With an operand of 16 bits, the other one is rounded to them.
    """
    sizes = {x.dtype.itemsize for x in (a, b)}
    if 2 in sizes:
        dtype = a.dtype if a.dtype.itemsize == 2 else b.dtype
    else:
        in_f32 = 4 in sizes or current_device(a, b) is None
        dtype = np.dtype(jnp.float32 if in_f32 else jnp.bfloat16)
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(
        equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
