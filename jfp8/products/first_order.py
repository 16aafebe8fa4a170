"""Where second derivatives are refused."""

from __future__ import annotations

from functools import partial

import jax

_PRODUCTS = (
    "Second derivatives of FP8 products are not supported: the backward pass works on f8 bytes, "
    "through which nothing can be differentiated. Use nn.Dense where you need them."
)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_order_only(x: jax.Array, reason: str = _PRODUCTS) -> jax.Array:
    """`x`, where only a second derivative would differentiate it: that of f8 bytes is zero."""
    del reason
    return x


@first_order_only.defjvp
def _refuse_second_order(reason, primals, tangents):
    raise TypeError(reason)
