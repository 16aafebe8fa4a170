"""Small arrays in few kernels of a GPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax


def mergeable(tree: Any) -> Any:
    """Return `tree`, small arrays, so that XLA:GPU may merge the kernels that compute them.

    It merges kernels with results of one shape if they read the same elements of an array and none
    waits for another, also in a program for several devices, where joining arrays could send them.
    So each is or-ed with the same zero, one of a constant that XLA keeps as it is.
    """

    def same(x: jax.Array) -> jax.Array:
        integers = x.dtype if x.dtype == bool else np.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = lax.bitcast_convert_type(x, integers)
        zero = lax.optimization_barrier(np.array([0, 1, 1], integers))[0]
        return lax.bitcast_convert_type(bits | zero, x.dtype)

    return jax.tree.map(same, tree)


def in_few_kernels(tree: Any) -> Any:
    """Return `tree`, small arrays, computed before what reads them; see `mergeable`."""
    return lax.optimization_barrier(mergeable(tree))
