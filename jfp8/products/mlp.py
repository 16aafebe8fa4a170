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

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.products.differentiated import CustomVjp, primals
from jfp8.products.operation import Observed
from jfp8.products.vjp import Planned, backward, begin, forward
from jfp8.tracing.compat import same_varying_axes


def make_all(make: Callable[..., jax.Array], h: jax.Array) -> jax.Array:
    """Return ``make(h[..., 0, :], h[..., 1, :], ...)`` in f32, rounded to the dtype of `h`.

    `make` is elementwise and hashable; caches identify it by its ``str``.
    """
    wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    return make(*(wide[..., p, :] for p in range(wide.shape[-2]))).astype(h.dtype)


def observed_mlp(
    first: Planned,
    second: Planned,
    make: Callable[..., jax.Array],
    shape: tuple[int, ...],
    bias: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Observed, Observed]]:
    """Return ``y``, and the amaxes of the operands of both matmuls.

    Args:
      first: the first matmul.
      second: the second one, planned for `hidden_like`.
      make: see `make_all`.
      shape: shape of ``h``.
      bias: ``[projections, n]``, of the first matmul.
    """
    (how, operands), (how_too, others) = begin(first), begin(second)
    like = jax.ShapeDtypeStruct(second.lhs.shape, second.lhs.dtype)
    arrays = (first.operation, second.operation), (operands, others._replace(lhs=None), bias)
    both = make, shape, like, how, how_too
    y, observed = _multiply(both, *same_varying_axes(arrays))
    return second.restore(y), lax.stop_gradient(observed)


def hidden_like(first: Planned, shape: tuple[int, ...]) -> jax.Array:
    """Return zeros of the shape and the dtype of the second matmul's lhs."""
    return jnp.zeros((*shape[:-2], shape[-1]), first.operation.dtype_of("fprop"))


def _plus(h: jax.Array, bias: jax.Array | None) -> jax.Array:
    return h if bias is None else h + bias.reshape((1,) * (h.ndim - 2) + bias.shape)


@partial(CustomVjp, nondiff_argnums=(0,))
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
    # `jax.checkpoint` does so, too: cheap values are recomputed, not saved for the backward pass.
    again, dy = lax.optimization_barrier((h, d_made))
    (dh,) = jax.vjp(partial(make_all, make), again)[1](dy)
    made_of, d_bias = (make, h, d_made), None
    if bias is not None:  # then it is in memory
        made_of, (d_bias,) = (), jax.vjp(partial(_plus, jnp.zeros_like(dh)), bias)[1](dh)
    first = backward(hows[0], kept, dh.reshape(y.shape), *made_of)
    return None, (first, second._replace(lhs=None), d_bias)


_multiply.defvjp(_forward, _backward, symbolic_zeros=True)
