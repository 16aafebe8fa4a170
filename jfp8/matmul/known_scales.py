"""Properties of an operand's scales that are known while JAX traces."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E8M0FNU


def scale_shape_of(q: ScaledArray) -> tuple[int, ...]:
    """Return the shape of the scale of `q`, two-level or not."""
    return jnp.shape(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale)


def varies_along_sum(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> bool:
    """Return True if a scale of either operand varies along the sum."""
    (lhs_contract, rhs_contract), _ = spec.dimension_numbers
    return varies_along(lhs, lhs_contract) or varies_along(rhs, rhs_contract)


def varies_along(q: ScaledArray, dims: Sequence[int]) -> bool:
    """Return True if the scale of `q` varies along these dimensions."""
    shape = scale_shape_of(q)
    return bool(shape) and any(shape[d] != 1 for d in dims)


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
