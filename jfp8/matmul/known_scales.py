"""Properties of an operand's scales that are known while JAX traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jfp8.matmul.spec import MatmulSpec, varies_along
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E8M0FNU


def scale_dtype(q: ScaledArray) -> np.dtype:
    """Return the dtype in which the scales of blocks are stored."""
    return np.dtype(q.scale.data.dtype if isinstance(q.scale, ScaledArray) else q.scale.dtype)


def are_powers_of_two(q: ScaledArray, dims: Sequence[int], spec: MatmulSpec) -> bool:
    """Return whether scales of an operand summed over `dims` are known to be powers of two.

    The promise of `spec` concerns scales of blocks, which vary along the sum.
    """
    if scale_dtype(q) == E8M0FNU.dtype:
        return True
    return spec.powers_of_two and varies_along(q, dims)
