"""Small arrays in few kernels of a GPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax


def in_few_kernels(tree: Any) -> Any:
    """Return `tree`, small arrays, computed before what reads them, in few kernels on a GPU.

    XLA:GPU merges kernels with results of one shape if they read one array, also in a program for
    several devices, where joining arrays could send them. So each is or-ed with the same zero.
    """

    def same(x: jax.Array) -> jax.Array:
        integers = x.dtype if x.dtype == bool else np.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = lax.bitcast_convert_type(x, integers)
        zero = lax.optimization_barrier(np.array([0, 2], integers))[0]
        return lax.bitcast_convert_type(bits | zero, x.dtype)

    return lax.optimization_barrier(jax.tree.map(same, tree))
