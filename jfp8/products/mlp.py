"""Two matmuls with an activation function between them, as one operation with one VJP. ::

    h = first(x, w1) + bias                    [..., projections, n]
    y = second(make(h[..., 0, :], ...), w2)

Kernels that quantize can compute the lhs of the second matmul while they read `h`, and the gradient
with respect to `h` from `h` and the second matmul's gradient, unless a bias needs it, too. Then
neither is written to memory. Without such a kernel, XLA computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.bias import plus_bias
from jfp8.products.vjp import backward, begin, forward, primals
from jfp8.tracing.compat import same_varying_axes


def make_all(make: Callable[..., jax.Array], h: jax.Array) -> jax.Array:
    """Return ``make(h[..., 0, :], h[..., 1, :], ...)`` in f32, rounded to the dtype of `h`.

    `make` is elementwise and hashable; caches identify it by its ``str``.
    """
    wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    return make(*(wide[..., p, :] for p in range(wide.shape[-2]))).astype(h.dtype)


def through_both(
    first: Callable[..., Any],
    second: Callable[..., jax.Array],
    make: Callable[..., jax.Array],
    shape: tuple[int, ...],
) -> Any:
    """Return ``y`` from the operands that layers provide, and record the amaxes of both matmuls.

    Args:
      first: ``first(multiply=...)`` of a layer that calls it instead of `multiply_quantized`, and
        returns its result. A bias of the layer is a further argument, ``bias``.
      second: ``second(x, multiply=...)`` likewise. It may use only the shape and dtype of `x`.
      make: see `make_all`.
      shape: shape of ``h``.
    """
    begun: list[Any] = []  # of the first matmul; then the amaxes that it observed

    def multiply_first(operation, *given, restore=None, bias=None):
        begun[:] = operation, bias, *begin(*given)
        hidden = jnp.zeros((*shape[:-2], shape[-1]), operation.dtype_of("fprop"))
        y = second(hidden, multiply=multiply_second)
        return y, begun.pop()

    def multiply_second(operation, lhs, *given, restore, bias=None):
        first_operation, first_bias, first_how, operands = begun
        how, others = begin(lhs, *given)
        both = make, shape, jax.ShapeDtypeStruct(lhs.shape, lhs.dtype), first_how, how
        arrays = (first_operation, operation), (operands, others._replace(lhs=None), first_bias)
        y, observed = _multiply(both, *same_varying_axes(arrays))
        seen_first, seen = lax.stop_gradient(observed)
        begun.append(seen_first)
        return plus_bias(restore(y), bias), seen

    return first(multiply=multiply_first)


def _plus(h: jax.Array, bias: jax.Array | None) -> jax.Array:
    return h if bias is None else h + bias.reshape((1,) * (h.ndim - 2) + bias.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(both, operations, operands):
    return _through(both, operations, operands, and_backward=False)[0]


def _forward(both, operations, operands):
    operations, values = primals(both[3:], (operations, operands), operands[:2])
    return _through(both, operations, values)


def _through(both, operations, operands, and_backward=True):
    make, shape, lhs, *hows = both
    first, second, bias = operands
    how = {"and_backward": and_backward}
    (y, seen), kept = forward(hows[0], operations[0], first, **how)
    h = _plus(y.reshape(shape), bias)
    made_of = (make, h) if h.dtype == lhs.dtype else ()  # no kernel produces an array that is cast
    second = second._replace(lhs=make_all(make, h).astype(lhs.dtype).reshape(lhs.shape))
    (z, seen_too), kept_too = forward(hows[1], operations[1], second, *made_of, **how)
    return (z, (seen, seen_too)), (h.reshape(y.shape), bias, kept, kept_too)


def _backward(both, residuals, cotangents):
    make, shape, _, *hows = both
    y, bias, kept, kept_too = residuals
    second = backward(hows[1], kept_too, cotangents[0])
    assert second.lhs is not None
    h, d_made = y.reshape(shape), second.lhs.astype(y.dtype).reshape(*shape[:-2], shape[-1])
    # As in `jax.checkpoint`: cheap values are recomputed, not saved for the backward pass.
    again, dy = lax.optimization_barrier((h, d_made))
    (dh,) = jax.vjp(partial(make_all, make), again)[1](dy)
    made_of, d_bias = (make, h, d_made), None
    if bias is not None:  # then it is in memory
        made_of, (d_bias,) = (), jax.vjp(partial(_plus, jnp.zeros_like(dh)), bias)[1](dh)
    first = backward(hows[0], kept, dh.reshape(y.shape), *made_of)
    return None, (first, second._replace(lhs=None), d_bias)


_multiply.defvjp(_forward, _backward, symbolic_zeros=True)
