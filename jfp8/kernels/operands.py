"""Operands and their scales in the shapes of kernels, matrices for example, and results back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.partitioning import divided, divided_sum
from jfp8.matmul.as_matrices import as_matrices, matrix_groups
from jfp8.matmul.spec import MatmulSpec, Numbers, factors_of, layout_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Tpu
from jfp8.tracing.few_kernels import mergeable

TILE = 128  # size of the kernels' tiles; others are padded with zeros, once, before quantization


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "carrier", "factor", "transposed"),
    meta_fields=("block",),
)
@dataclass(frozen=True, eq=False)
class Paired(ScaledArray):
    """A `ScaledArray` with what the kernel that quantized it has written besides, if anything.

    XLA would start a kernel for one number, and devices would send both matrices.
    """

    factor: jax.Array | None = None  # f32[], as by `scale_products` with the other operand's scale
    transposed: jax.Array | None = None  # the data


def by_rows(
    lhs: ScaledArray,
    rhs: ScaledArray,
    spec: MatmulSpec,
    name: str,
    product: Callable[..., jax.Array],
    rule: str,
    scales: Sequence[jax.Array],
) -> jax.Array:
    """Multiply as ``product(dtype, a[m, k], b[n, k], *scales)``, which devices share by `rule`.

    For each matrix of a batch; `scales` have one dimension more for it, if any.
    """
    a, b, (contract, batch) = as_matrices(lhs.data, rhs.data, spec.dimension_numbers)
    last = lambda x, k: x if k == x.ndim - 1 else x.swapaxes(-1, -2)
    a, b = (last(x, k) for x, (k,) in zip((a, b), contract, strict=True))
    multiply = divided_sum(name, product, rule, spec.dtype, spec.partial_dtype)
    if batch[0]:
        multiply = jax.vmap(multiply, in_axes=(0, 0, *(0 if s.ndim else None for s in scales)))
    y = multiply(a, b, *scales)
    return y.reshape(layout_of(lhs.shape, rhs.shape, spec.dimension_numbers).shape)


def scales_by_block(
    scale: jax.Array, q: ScaledArray, batch: Sequence[int], units: dict[int, int]
) -> jax.Array:
    """Return ``[(batch,) ...]``: a scale for each of the `units` of elements, by dimension."""
    sizes = [-(-q.shape[d] // unit) for d, unit in units.items()]
    if scale.ndim:
        scale = scale.transpose(*batch, *units)
        for axis, (d, unit) in enumerate(units.items(), len(batch)):
            size = sizes[axis - len(batch)]
            if scale.shape[axis] != size:
                scale = jnp.repeat(scale, max(q.block_sizes()[d] // unit, 1), axis=axis)
                scale = lax.slice_in_dim(scale, 0, size, axis=axis)
    return jnp.broadcast_to(scale, (*(q.shape[d] for d in batch), *sizes))


def factors_by_kernels(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> list[jax.Array]:
    """Return `factors_of`, or the factor written by the kernel that quantized an operand."""
    for operand in (lhs, rhs):
        if isinstance(operand, Paired) and operand.factor is not None:
            return [operand.factor]
    return [factor if factor.ndim else mergeable(factor) for factor in factors_of(lhs, rhs, spec)]


def dtype_of_partial_sums(spec: MatmulSpec) -> np.dtype:
    """Return the dtype of a matmul before it is scaled.

    TPUs over which the compiler shards arrays add partial sums in it: in f32 they would send
    twice the bytes.
    """
    divides = isinstance(spec.device, Tpu) and spec.device.divides
    sent = np.dtype(spec.partial_dtype or spec.dtype)
    return sent if divides and sent == jnp.bfloat16 else np.dtype(np.float32)


@dataclass(frozen=True)
class Arrangement:
    """Convert an array to a matrix: pad, transpose, reshape, transpose again, and pad."""

    shape: tuple[int, ...]  # shape of the array, with zeros after its values
    order: tuple[int, ...]  # order of its dimensions, before they are merged
    sizes: tuple[int, ...]  # sizes of the merged dimensions
    swapped: bool = False  # True if the last two of these are exchanged
    padded: tuple[int, int] | None = None  # shape with zeros after the values; None if unpadded
    values: tuple[int, ...] | None = None  # the shape of the array without zeros; None: the same

    def matrix(self, x: Any) -> Any:
        """Return an array, or a `ScaledArray`, as the matrix."""
        x = _padded(x, self.shape)
        if self.order != tuple(range(len(self.shape))):
            x = x.transpose(*self.order)
        x = x if x.shape == self.sizes else x.reshape(*self.sizes)
        x = x.T if self.swapped else x
        return x if self.padded is None else _sharded_like(x, _padded(x, self.padded))

    def array(self, y: jax.Array) -> jax.Array:
        """Return a matrix, or one whose rows are not merged yet, as the array."""
        if self.padded is not None:
            rows, columns = self.sizes[::-1] if self.swapped else self.sizes
            y = y.reshape(self.padded)
            y = _sharded_like(y, y[:rows, :columns])
        y = y.T if self.swapped else y
        y = y.reshape([self.shape[d] for d in self.order])
        y, values = y.transpose(np.argsort(self.order).tolist()), self.values or self.shape
        return y if values == y.shape else y[tuple(map(slice, values))]


def _padded(x: Any, shape: tuple[int, ...]) -> Any:
    if x.shape == shape or isinstance(x, ScaledArray):
        return x
    return jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, shape, strict=True)])


def _sharded_like(x: Any, y: Any) -> Any:
    """Shard the rows of `y` like `x`, which has more or fewer zeros after its rows.

    XLA propagates no sharding between dimensions of different sizes. Shards are whole tiles.
    """
    fewer, more = sorted((len(x), len(y)))
    parts = math.gcd(fewer, more // TILE)
    if fewer == more or parts == 1:
        return y
    by_parts = lambda x: x.reshape(parts, -1, x.shape[1])
    like = divided("rows", lambda x, y: y, "i a b, i c d -> i c d", combine="alike")
    return like(by_parts(x), by_parts(y)).reshape(y.shape)


def arrangements(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], numbers: Numbers
) -> dict[str, Arrangement]:
    """Return the arrangements of lhs, rhs and grad (or y) as matrices, or batches of them."""
    (lc, rc), (lb, rb) = numbers
    layout = layout_of(*shapes, numbers)
    m, n, _ = layout.sizes
    found = {}
    for role, shape, *groups in (
        ("lhs", shapes[0], lb, layout.lhs_free, lc),
        ("rhs", shapes[1], rb, layout.rhs_free, rc),
    ):
        merged = matrix_groups(*groups)
        order = tuple(d for group in merged for d in group)
        sizes = tuple(math.prod(shape[d] for d in group) for group in merged)
        found[role] = Arrangement(shape, order, sizes)
    batch = (math.prod(layout.shape[: len(lb)]),) if lb else ()
    order = tuple(range(len(layout.shape)))
    found["grad"] = Arrangement(layout.shape, order, (*batch, m, n))
    return found
