"""`MatmulSpec`: what is known of a matmul of two `ScaledArray`s while JAX traces."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair
from jfp8.scaling.formats import E4M3FN, E5M2
from jfp8.scaling.parts import expand_scale
from jfp8.tracing.devices import Device

Numbers: TypeAlias = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]

Accumulation = Literal["f32", "f32_every_128", "hopper", "hopper_every_128"]
ACCUMULATIONS: tuple[str, ...] = get_args(Accumulation)

HARDWARE_FORMATS = frozenset({E4M3FN, E5M2})

Implementation = Literal[None, "emulate", "bf16", "xla", "mosaic_gpu", "mosaic_tpu"]


@dataclass(frozen=True)
class MatmulSpec:
    """Describe a matmul of two `ScaledArray`s while JAX traces; see `scaled_matmul`.

    Attributes:
      dimension_numbers: checked.
      dtype: the result's.
      accumulation, fast_accumulation, powers_of_two, implementation: see `scaled_matmul`.
      partial_dtype: dtype of the partial sums of devices; None means `dtype`.
      device: the one that the program is traced for.
    """

    dimension_numbers: Numbers = (((), ()), ((), ()))
    dtype: np.dtype = np.dtype(np.float32)
    accumulation: str = "f32"
    fast_accumulation: bool = False
    powers_of_two: bool = False
    partial_dtype: np.dtype | None = None
    implementation: Implementation = None
    device: Device = None


# Dimensions.


def as_numbers(dimension_numbers: lax.DotDimensionNumbers) -> Numbers:
    """Return `dimension_numbers` as tuples of ints; `layout_of` checks them against shapes."""
    try:
        (lc, rc), (lb, rb) = dimension_numbers
        lc, rc, lb, rb = (tuple(map(operator.index, dims)) for dims in (lc, rc, lb, rb))
    except (TypeError, ValueError):
        raise ValueError(
            "dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, "
            f"rhs_batch)), four sequences of ints; got {dimension_numbers!r}."
        ) from None
    return (lc, rc), (lb, rb)


def free_dims(ndim: int, contract: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions that are neither contracted nor batch dimensions."""
    return tuple(d for d in range(ndim) if d not in contract and d not in batch)


@dataclass(frozen=True)
class Layout:
    """Map the dimensions of two operands to dimensions of their product."""

    lhs_free: tuple[int, ...]
    rhs_free: tuple[int, ...]
    sizes: tuple[int, int, int]  # ``(m, n, k)`` of each matrix: lhs free, rhs free, contracted
    shape: tuple[int, ...]  # batch, lhs free, rhs free dimensions


@functools.lru_cache(maxsize=4096)
def layout_of(lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], numbers: Numbers) -> Layout:
    """Return the layout of a matmul, or raise ``ValueError`` if `numbers` do not fit the shapes."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    of_lhs, of_rhs = lhs_contract + lhs_batch, rhs_contract + rhs_batch
    shapes = f"lhs has shape {lhs_shape} and rhs {rhs_shape}"
    for name, dims, shape in (("lhs", of_lhs, lhs_shape), ("rhs", of_rhs, rhs_shape)):
        if any(not 0 <= d < len(shape) for d in dims) or len(set(dims)) != len(dims):
            raise ValueError(
                f"dimension_numbers name {name} dimensions {dims}, which must be distinct and from "
                f"0 to {len(shape) - 1}; {shapes}."
            )
    for kind, (left, right) in zip(("contracting", "batch"), numbers, strict=True):
        if len(left) != len(right):
            raise ValueError(
                f"dimension_numbers pair {len(left)} {kind} dimensions of lhs {left} with "
                f"{len(right)} of rhs {right}; {shapes}."
            )
        for a, b in zip(left, right, strict=True):
            if lhs_shape[a] != rhs_shape[b]:
                raise ValueError(
                    f"{kind} dimension {a} of lhs has size {lhs_shape[a]}, but dimension {b} of "
                    f"rhs, paired with it, has size {rhs_shape[b]}; {shapes}."
                )
    lhs_free = tuple(d for d in range(len(lhs_shape)) if d not in of_lhs)
    rhs_free = tuple(d for d in range(len(rhs_shape)) if d not in of_rhs)
    batch, rows, summed = (
        tuple(lhs_shape[d] for d in dims) for dims in (lhs_batch, lhs_free, lhs_contract)
    )
    columns = tuple(rhs_shape[d] for d in rhs_free)
    sizes = (math.prod(rows), math.prod(columns), math.prod(summed))
    return Layout(lhs_free, rhs_free, sizes, (*batch, *rows, *columns))


# Scales laid out like the result, and products that are multiplied by them.


def to_output(
    scale: jax.Array,
    q: ScaledArray,
    batch: Sequence[int],
    free: Sequence[int],
    before: int,
    after: int,
) -> jax.Array:
    """Lay a scale of `q` out like the result: batch, `before` ones, free, `after` ones."""
    if scale.ndim == 0:
        return scale
    scale = expand_scale(scale, q.shape, q.block)
    kept = (*batch, *free)
    scale = scale.transpose(*kept, *(d for d in range(scale.ndim) if d not in kept))
    sizes = scale.shape[: len(kept)]
    return scale.reshape(*sizes[: len(batch)], *(1,) * before, *sizes[len(batch) :], *(1,) * after)


LARGEST_FACTOR = np.float32(np.finfo(np.float32).max)


def scale_products(
    lhs_scales: tuple[jax.Array, ...], rhs_scales: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Return factors for the matmul of both operands; E8M0 scales come as pairs, others alone.

    No factor is Inf, because 0 times Inf is NaN. Spikes in two histories of a matmul make such
    scales; each step would be NaN and skipped, and the histories would keep their spikes forever.
    Instead, a sum of codes below 1 gives a finite number that is too small; a larger one gives Inf.
    """
    pairs = itertools.zip_longest(lhs_scales, rhs_scales)
    return [
        b if a is None else a if b is None else jnp.minimum(a * b, LARGEST_FACTOR) for a, b in pairs
    ]


def plain_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Return the ``dot_general`` of plain arrays in `dtype`, in which it is summed at least."""
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=dtype
    )


def has_one_scale(q: ScaledArray) -> bool:
    """Return whether the scale of `q` is a single f32, without dimensions."""
    scale = q.scale
    return isinstance(scale, jax.Array) and not scale.ndim and scale.dtype == jnp.float32


def factors_of(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> list[jax.Array]:
    """Return factors for a matmul of the stored values: scales that do not vary along the sum."""
    if has_one_scale(lhs) and has_one_scale(rhs):
        scales: Any = lhs.scale, rhs.scale
        return scale_products(scales[:1], scales[1:])
    _, (lhs_batch, rhs_batch) = spec.dimension_numbers
    layout = layout_of(lhs.shape, rhs.shape, spec.dimension_numbers)
    rows, columns = layout.lhs_free, layout.rhs_free
    lhs_scales, rhs_scales = scale_as_f32_pair(lhs), scale_as_f32_pair(rhs)
    return scale_products(
        tuple(to_output(s, lhs, lhs_batch, rows, 0, len(columns)) for s in lhs_scales),
        tuple(to_output(s, rhs, rhs_batch, columns, len(rows), 0) for s in rhs_scales),
    )


def times(y: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """Multiply `y` by all factors, in f32 if there are any."""
    for factor in factors:
        y = y.astype(jnp.float32) * factor
    return y
