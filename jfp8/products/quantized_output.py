"""Results of matmuls that a recipe stores in FP8."""

from __future__ import annotations

import jax

from jfp8.products.observers import OBSERVER
from jfp8.products.seeds import seed_for
from jfp8.quantizers.quantizer import Context
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import scaled_values
from jfp8.scaling.scales import amax

_RESULTS = {"fprop": "y", "dgrad": "d_lhs", "wgrad": "d_rhs"}


def quantized_output(
    kind: str, product: Product, y: jax.Array, seed: jax.Array | None
) -> jax.Array:
    """Return the result of a matmul, rounded to the format in which its recipe stores results."""
    if product.output is None:
        return y
    largest, role = amax(y), _RESULTS[kind]
    bits = seed_for(f"{role}()", largest, seed) if product.output.stochastic else None
    q = product.output(y, Context((), largest, None, bits))
    if (watching := OBSERVER.value) is not None:
        q = watching.quantized(role, kind, product.output, y, q)
    return scaled_values(q).astype(y.dtype)
