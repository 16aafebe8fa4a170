"""What is to be computed of two `ScaledArray`s, and their scales as the result has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.matmul.dimensions import Numbers, layout_of
from jfp8.scaling.arrays import ScaledArray, expand_scale, scale_as_f32_pair
from jfp8.scaling.formats import E4M3FN, E5M2

Accumulation = Literal["f32", "f32_every_128", "hopper", "hopper_every_128"]
ACCUMULATIONS: tuple[str, ...] = get_args(Accumulation)


def to_output(
    scale: jax.Array,
    q: ScaledArray,
    batch: Sequence[int],
    free: Sequence[int],
    before: int,
    after: int,
) -> jax.Array:
    """A scale of `q` laid out like the product: batch, `before` ones, free dims, `after` ones."""
    if scale.ndim == 0:
        return scale
    scale = expand_scale(scale, q.shape, q.block)
    kept = (*batch, *free)
    scale = scale.transpose(*kept, *(d for d in range(scale.ndim) if d not in kept))
    sizes = scale.shape[: len(kept)]
    return scale.reshape(*sizes[: len(batch)], *(1,) * before, *sizes[len(batch) :], *(1,) * after)


def scale_products(
    lhs_scales: tuple[jax.Array, ...], rhs_scales: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Factors for the product of both operands; E8M0 scales come as pairs, others alone.

    None is Inf, for 0 times it would be NaN. Two spikes in the histories of a product have such
    scales; each step would be NaN and skipped, and the histories would keep their spikes for good.
    A sum of codes below 1 then gives a finite number that is too small; a larger one gives Inf.
    """
    largest = np.float32(np.finfo(np.float32).max)
    pairs = itertools.zip_longest(lhs_scales, rhs_scales)
    return [b if a is None else a if b is None else jnp.minimum(a * b, largest) for a, b in pairs]


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """A product of plain arrays with f32 sums."""
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=jnp.float32
    )


def scale_shape_of(q: ScaledArray) -> tuple[int, ...]:
    """The shape of the scale of `q`, two-level or not."""
    return jnp.shape(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale)


HARDWARE_FORMATS = frozenset({E4M3FN, E5M2})


@dataclass(frozen=True)
class Job:
    """What is to be computed of two operands; see `scaled_matmul`.

    Attributes:
      dimension_numbers: checked.
      dtype: of the result.
      accumulation, fast_accumulation, powers_of_two: see `scaled_matmul`.
    """

    dimension_numbers: Numbers
    dtype: np.dtype
    accumulation: str
    fast_accumulation: bool
    powers_of_two: bool


def scale_dtype(q: ScaledArray) -> np.dtype:
    """The dtype that the scales of blocks are stored in."""
    return np.dtype(q.scale.data.dtype if isinstance(q.scale, ScaledArray) else q.scale.dtype)


def varies_along_sum(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> bool:
    """Whether a scale of either operand cannot leave the sum."""
    (lhs_contract, rhs_contract), _ = job.dimension_numbers
    return varies_along(lhs, lhs_contract) or varies_along(rhs, rhs_contract)


def varies_along(q: ScaledArray, dims: Sequence[int]) -> bool:
    """Whether the scale of `q` is not the same all along these dimensions."""
    shape = scale_shape_of(q)
    return bool(shape) and any(shape[d] != 1 for d in dims)


def factors_of(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> list[jax.Array]:
    """What to multiply a product of the stored values by: scales that left the sum."""
    _, (lhs_batch, rhs_batch) = job.dimension_numbers
    layout = layout_of(lhs.shape, rhs.shape, job.dimension_numbers)
    rows, columns = layout.lhs_free, layout.rhs_free
    lhs_scales, rhs_scales = scale_as_f32_pair(lhs), scale_as_f32_pair(rhs)
    return scale_products(
        tuple(to_output(s, lhs, lhs_batch, rows, 0, len(columns)) for s in lhs_scales),
        tuple(to_output(s, rhs, rhs_batch, columns, len(rows), 0) for s in rhs_scales),
    )


def times(y: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """`y` times all factors, in f32 if there are any."""
    for factor in factors:
        y = y.astype(jnp.float32) * factor
    return y
