"""Two products with an activation between them, as one operation with one VJP. ::

    h = first(x, w1) + bias                    h [..., projections, n]
    y = second(make(h[..., 0, :], ...), w2)

Kernels that quantize may make the operand of the second product as they read `h`; and, if no bias
needs it as well, the gradient of `h`, of `h` and of the gradient that the second product returns.
Then these are never in memory. Where no kernel makes them, XLA does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.spec import plus_bias
from jfp8.products.operation import Observed, Options, Planned, State, as_lhs, as_operand
from jfp8.products.vjp import How, backward, begin, forward
from jfp8.tracing.compat import same_varying_axes

Layer = Callable[..., Any]  # of ``by=...``, which it calls as it would `observed_dot_general`


def make_all(make: Callable[..., jax.Array], h: jax.Array) -> jax.Array:
    """Return ``make(h[..., 0, :], h[..., 1, :], ...)``, in f32, rounded to the dtype of `h`.

    Args:
      make: of f32 arrays, element by element. Hashable; caches know it by its ``str``.
    """
    wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    return make(*(wide[..., p, :] for p in range(wide.shape[-2]))).astype(h.dtype)


def through_both(
    first: Layer,
    second: Callable[..., Any],
    make: Callable[..., jax.Array],
    h_shape: Sequence[int],
    plan: Callable[..., Planned],
) -> Any:
    """Return what `first` makes of ``y`` above, as if that were the result of its product.

    Each layer brings operands, options and state of its product, and records what that observed.

    Args:
      first: ``first(by=...)`` calls ``by`` as it would call `observed_dot_general`.
      second: ``second(x, by=...)`` likewise, for an `x` that has nothing but the shape and dtype of
        its operand.
      make: see `make_all`.
      h_shape: ``[..., projections, n]``.
      plan: plans a product; takes what ``by`` is given, but state and bias.
    """

    def begun(lhs: Any, rhs: Any, options: Options, state: State, how: Any) -> Any:
        lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
        planned = plan(lhs, rhs, options=options.on_device_of(lhs, rhs), **how)
        return planned, *begin(planned.lhs, planned.rhs, planned.options, state)

    def by_first(
        lhs: Any, rhs: Any, *, options: Options, state: State, bias: Any = None, **how: Any
    ) -> tuple[Any, Observed]:
        planned, first_how, operands = begun(lhs, rhs, options, state, how)
        h_bias, seen = bias, []

        def by_second(
            lhs: Any, rhs: Any, *, options: Options, state: State, bias: Any = None, **how: Any
        ) -> tuple[jax.Array, Observed]:
            other, second_how, others = begun(lhs, rhs, options, state, how)
            both = _Both(make, (*h_shape,), other.lhs.shape, first_how, second_how)
            operations = planned.operation, other.operation
            arrays = operations, (operands, others._replace(lhs=None), h_bias)
            y, observed = _multiply(both, *same_varying_axes(arrays))
            of_first, of_second = map(How.end, (first_how, second_how), observed)
            seen.append(of_first)
            return plus_bias(other.restore(y), bias), of_second

        operand = jnp.zeros((*h_shape[:-2], h_shape[-1]), planned.operation.dtype_of("fprop"))
        return second(operand, by=by_second), seen.pop()

    return first(by=by_first)


@dataclass(frozen=True)
class _Both:
    """What is known of both products while JAX traces.

    Attributes:
      make: see `make_all`.
      h, lhs: shapes of the operand of `make`, and of what the second product takes.
      first, second: how each is computed.
    """

    make: Callable[..., jax.Array]
    h: tuple[int, ...]
    lhs: tuple[int, ...]
    first: How
    second: How


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(both, operations, operands):
    return _forward(both, operations, operands, and_backward=False)[0]


def _forward(both, operations, operands, and_backward=True):
    first, second, bias = operands
    (y, seen), kept = forward(both.first, operations[0], first, and_backward)
    h = y.reshape(both.h)
    h = h if bias is None else h + bias
    by = partial(operations[1].quantize_made, both.make, (h,))
    second = second._replace(lhs=make_all(both.make, h).reshape(both.lhs))
    (z, more), others = forward(both.second, operations[1], second, and_backward, by)
    return (z, (seen, more)), (h.reshape(y.shape), bias, kept, others)


def _backward(both, residuals, cotangents):
    flat, bias, kept, others = residuals
    h = flat.reshape(both.h)
    second = backward(both.second, others, cotangents[0])
    dy = second.lhs.reshape(*h.shape[:-2], h.shape[-1])
    # As by `jax.checkpoint`: what is cheap is computed again, not kept since the forward pass.
    again, d_made = lax.optimization_barrier((h, dy))
    (dh,) = jax.vjp(partial(make_all, both.make), again)[1](d_made)
    by, d_bias = partial(kept.operation.quantize_made, both.make, (h, dy)), None
    if bias is not None:
        (d_bias,) = jax.vjp(lambda bias: jnp.zeros_like(dh) + bias, bias)[1](dh)
        by = None  # it is in memory
    first = backward(both.first, kept, dh.reshape(flat.shape), by)
    return None, (first, second._replace(lhs=None), d_bias)


_multiply.defvjp(_forward, _backward)
