"""Where second derivatives are refused."""

from __future__ import annotations

from functools import partial

import jax


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def first_order_only(
    x: jax.Array, of: str = "FP8 products", instead: str = "nn.Dense"
) -> jax.Array:
    """`x`, where only a second derivative would differentiate it: that of f8 bytes is zero."""
    del of, instead
    return x


@first_order_only.defjvp
def _refuse_second_order(of, instead, primals, tangents):
    raise TypeError(
        f"Second derivatives of {of} are not supported: the backward pass works on f8 bytes, "
        f"through which nothing can be differentiated. Use {instead} where you need them. If you "
        "do not: JAX also takes one where a function that is differentiated calls jax.vjp, "
        "jax.grad or nn.vjp itself, even if nothing but the value is used. Then compute the value "
        "outside of that call, and pass jax.lax.stop_gradient of inputs and parameters into it."
    )
