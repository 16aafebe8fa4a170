"""The product to compute of two `ScaledArray`s, and its layout of dimensions and scales."""

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

from jfp8.kernels.paired import Paired
from jfp8.scaling.arrays import ScaledArray, scale_as_f32_pair
from jfp8.scaling.formats import E4M3FN, E5M2, E8M0FNU
from jfp8.scaling.parts import expand_scale
from jfp8.tracing.context import Tpu

Numbers: TypeAlias = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]

Accumulation = Literal["f32", "f32_every_128", "hopper", "hopper_every_128"]
ACCUMULATIONS: tuple[str, ...] = get_args(Accumulation)

HARDWARE_FORMATS = frozenset({E4M3FN, E5M2})


@dataclass(frozen=True)
class Job:
    """The product to compute of two operands; see `scaled_matmul`.

    Attributes:
      dimension_numbers: checked.
      dtype: that of the result.
      accumulation, fast_accumulation, powers_of_two: see `scaled_matmul`.
      parts: the dtype in which devices send the parts of a sum that the compiler divides; None:
        that of the result.
      tpu: that the operands are on, where their types do not say it.
      bias: ``[n]``, added to the result once that has its dtype; None: none is.
    """

    dimension_numbers: Numbers
    dtype: np.dtype
    accumulation: str
    fast_accumulation: bool
    powers_of_two: bool
    parts: np.dtype | None = None
    tpu: Tpu | None = None
    bias: jax.Array | None = None

    @property
    def dtype_of_parts(self) -> np.dtype:
        """The dtype of a product before it is scaled.

        TPUs among which the compiler divides arrays add parts of sums up in it: in f32 they would
        send twice the bytes.
        """
        divided = self.tpu is not None and self.tpu.divides
        sent = np.dtype(self.parts or self.dtype)
        return sent if divided and sent == jnp.bfloat16 else np.dtype(np.float32)


# Products of arrays of any shape, as products of (batches of) matrices.


def check_dimension_numbers(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    dimension_numbers: lax.DotDimensionNumbers,
) -> Numbers:
    """`dimension_numbers` as tuples of non-negative ints, checked against the shapes.

    Raises:
      ValueError: not of the form ``((lc, rc), (lb, rb))``, a dimension that does not exist or is
        named twice, or paired dimensions of different sizes; the message names both.
    """
    try:
        (lc, rc), (lb, rb) = dimension_numbers
        lc, rc, lb, rb = (tuple(map(operator.index, dims)) for dims in (lc, rc, lb, rb))
    except (TypeError, ValueError):
        raise ValueError(
            "dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, "
            f"rhs_batch)), four sequences of ints; got {dimension_numbers!r}."
        ) from None
    shapes = f"lhs has shape {tuple(lhs_shape)} and rhs {tuple(rhs_shape)}"
    for name, dims, shape in (("lhs", lc + lb, lhs_shape), ("rhs", rc + rb, rhs_shape)):
        if any(not 0 <= d < len(shape) for d in dims) or len(set(dims)) != len(dims):
            raise ValueError(
                f"dimension_numbers name {name} dimensions {dims}, which must be distinct and from "
                f"0 to {len(shape) - 1}; {shapes}."
            )
    for kind, left, right in (("contracting", lc, rc), ("batch", lb, rb)):
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
    return (lc, rc), (lb, rb)


def free_dims(ndim: int, contract: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that are neither contracted nor batch dimensions."""
    return tuple(d for d in range(ndim) if d not in contract and d not in batch)


@dataclass(frozen=True)
class Layout:
    """Where the dimensions of two operands go in their product.

    Attributes:
      lhs_free, rhs_free: the dimensions that are neither contracted nor batch dimensions.
      sizes: ``(m, n, k)`` of each matrix product: lhs free, rhs free, contracted.
      shape: of the product: batch, lhs free, rhs free dimensions.
    """

    lhs_free: tuple[int, ...]
    rhs_free: tuple[int, ...]
    sizes: tuple[int, int, int]
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def layout_of(lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], numbers: Numbers) -> Layout:
    """The layout of a product with these checked dimension numbers."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs_free = free_dims(len(lhs_shape), lhs_contract, lhs_batch)
    rhs_free = free_dims(len(rhs_shape), rhs_contract, rhs_batch)
    batch, rows, columns, summed = (
        tuple(shape[d] for d in dims)
        for shape, dims in (
            (lhs_shape, lhs_batch),
            (lhs_shape, lhs_free),
            (rhs_shape, rhs_free),
            (lhs_shape, lhs_contract),
        )
    )
    sizes = (math.prod(rows), math.prod(columns), math.prod(summed))
    return Layout(lhs_free, rhs_free, sizes, (*batch, *rows, *columns))


def as_matrices(lhs: jax.Array, rhs: Any, numbers: Numbers) -> tuple[jax.Array, Any, Numbers]:
    """Operands with at most one batch dimension, one free and one contracting dimension.

    Raises:
      ValueError: `rhs` is a `ScaledArray`, whose blocks would be cut.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    layout = layout_of(lhs.shape, rhs.shape, numbers)
    lhs, lhs_k = _grouped(lhs, lhs_batch, layout.lhs_free, lhs_contract)
    rhs, rhs_k = _grouped(rhs, rhs_batch, layout.rhs_free, rhs_contract)
    batch = ((0,), (0,)) if lhs_batch else ((), ())
    return lhs, rhs, (((lhs_k,), (rhs_k,)), batch)


def _grouped(
    x: Any, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]
) -> tuple[Any, int]:
    """`x` with each of three groups of dimensions merged into one, and the position of `contract`.

    The batch dimension comes first, if there is one; the other two keep their order, and are added
    if they are missing. Nothing is transposed unless a group is out of order or not contiguous.
    """
    matrix = sorted((tuple(free), tuple(contract)))
    groups = [tuple(batch), *matrix] if batch else matrix
    order = [d for group in groups for d in group]
    x = x if order == sorted(order) else x.transpose(order)
    sizes = iter(x.shape)
    x = x.reshape([math.prod(next(sizes) for _ in group) for group in groups])
    return x, len(groups) - 1 if groups[-1] == tuple(contract) else len(groups) - 2


def to_last(x: jax.Array, axis: int) -> jax.Array:
    """`x` with its last two dimensions exchanged, unless `axis` is the last."""
    return x if axis == x.ndim - 1 else x.swapaxes(-1, -2)


# Scales laid out like the result, and products that are multiplied by them.


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


def row_scales(q: ScaledArray, contract: Sequence[int], batch: Sequence[int]) -> jax.Array:
    """The scales as f32[], or one for each free index, f32[(batch,) free]."""
    scale = jnp.asarray(q.scale)
    if not scale.ndim:
        return scale
    free = free_dims(q.ndim, contract, batch)
    scale = to_output(scale, q, batch, free, 0, 0)
    scale = jnp.broadcast_to(scale, [q.shape[d] for d in (*batch, *free)])
    size = math.prod(q.shape[d] for d in free)
    return scale.reshape(-1, size) if batch else scale.reshape(size)


LARGEST_FACTOR = np.float32(np.finfo(np.float32).max)


def scale_products(
    lhs_scales: tuple[jax.Array, ...], rhs_scales: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Factors for the product of both operands; E8M0 scales come as pairs, others alone.

    No factor is Inf, because 0 times Inf is NaN. Spikes in two histories of a product make such
    scales; each step would be NaN and skipped, and the histories would keep their spikes forever.
    Instead, a sum of codes below 1 gives a finite number that is too small; a larger one gives Inf.
    """
    pairs = itertools.zip_longest(lhs_scales, rhs_scales)
    return [
        b if a is None else a if b is None else jnp.minimum(a * b, LARGEST_FACTOR) for a, b in pairs
    ]


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """A product of plain arrays with f32 sums, in `dtype`."""
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=dtype
    )


def scale_shape_of(q: ScaledArray) -> tuple[int, ...]:
    """The shape of the scale of `q`, two-level or not."""
    return jnp.shape(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale)


def scale_dtype(q: ScaledArray) -> np.dtype:
    """The dtype in which the scales of blocks are stored."""
    return np.dtype(q.scale.data.dtype if isinstance(q.scale, ScaledArray) else q.scale.dtype)


def varies_along_sum(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> bool:
    """Whether a scale of either operand varies along the sum."""
    (lhs_contract, rhs_contract), _ = job.dimension_numbers
    return varies_along(lhs, lhs_contract) or varies_along(rhs, rhs_contract)


def varies_along(q: ScaledArray, dims: Sequence[int]) -> bool:
    """Whether the scale of `q` varies along these dimensions."""
    shape = scale_shape_of(q)
    return bool(shape) and any(shape[d] != 1 for d in dims)


def are_powers_of_two(q: ScaledArray, dims: Sequence[int], job: Job) -> bool:
    """Whether the scales of an operand that is summed over `dims` are known to be powers of two.

    What `job` promises is about scales of blocks, which vary along the sum.
    """
    if scale_dtype(q) == E8M0FNU.dtype:
        return True
    return job.powers_of_two and varies_along(q, dims)


def factors_of(lhs: ScaledArray, rhs: ScaledArray, job: Job) -> list[jax.Array]:
    """Factors for a product of the stored values: the scales that do not vary along the sum."""
    for operand in (lhs, rhs):
        if isinstance(operand, Paired):
            return [operand.factor]
    _, (lhs_batch, rhs_batch) = job.dimension_numbers
    layout = layout_of(lhs.shape, rhs.shape, job.dimension_numbers)
    rows, columns = layout.lhs_free, layout.rhs_free
    lhs_scales, rhs_scales = scale_as_f32_pair(lhs), scale_as_f32_pair(rhs)
    return scale_products(
        tuple(to_output(s, lhs, lhs_batch, rows, 0, len(columns)) for s in lhs_scales),
        tuple(to_output(s, rhs, rhs_batch, columns, len(rows), 0) for s in rhs_scales),
    )


def plus_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """``y + bias`` for every row, as Flax adds a bias; `y` if there is none."""
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


def times(y: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """`y` times all factors, in f32 if there are any."""
    for factor in factors:
        y = y.astype(jnp.float32) * factor
    return y
