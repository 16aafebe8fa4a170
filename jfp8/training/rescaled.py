"""Histories of gradients after a change of the loss scale, which they carry."""

from __future__ import annotations

from typing import Any

import jax

from jfp8.scaling.history import CHECK, intact_states, sealed
from jfp8.training.histories import Collections, map_products, rescaled


def rescale_grad_histories(fp8: Collections, ratio: jax.Array) -> Collections:
    """Multiply every gradient amax in `fp8` by `ratio` = new / old loss scale.

    Gradients carry the loss scale, so their history must follow it, or every growth saturates.
    """

    def rescale(product: Any) -> Any:
        states = intact_states(product)
        grad = jax.tree.map(lambda amaxes: rescaled(amaxes, ratio), states["grad"])
        new = {**states, "grad": grad}
        return sealed(new) if CHECK in product else new

    return map_products(rescale, fp8)
