"""Where second derivatives are refused."""

from __future__ import annotations

import jax


@jax.custom_jvp
def first_order_only(x: jax.Array) -> jax.Array:
    """`x`, where only a second derivative would differentiate it: that of f8 bytes is zero."""
    return x


@first_order_only.defjvp
def _refuse_second_order(primals, tangents):
    raise TypeError(
        "Second derivatives of FP8 products are not supported: the backward pass works on f8 "
        "bytes, through which nothing can be differentiated. Use nn.Dense where you need them."
    )
