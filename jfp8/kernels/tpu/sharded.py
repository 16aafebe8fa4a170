"""The shardings of a matmul's three matrices over TPUs, if they are known while JAX traces.

The compiler for TPUs cannot shard a kernel. With explicit axes of the mesh,
the types of arrays contain their shardings, and each TPU can run the kernels on its shards, in a
``shard_map``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jfp8.kernels.partitioning import Axes, Rule
from jfp8.matmul.spec import Numbers, layout_of
from jfp8.products.explicit_sharding import Specs
from jfp8.products.operation import Kind

LANES = 128  # elements of a row of a register; the kernels take sizes that are multiples of it
# The mesh axes over which the rows and the columns of a matrix are sharded.
OfMatrix = tuple[Axes, Axes]


@dataclass(frozen=True)
class Shardings:
    """The shardings of a matmul's matrices: lhs, rhs and y, and likewise their gradients."""

    lhs: OfMatrix
    rhs: OfMatrix
    y: OfMatrix

    def of(self, kind: Kind) -> tuple[OfMatrix, OfMatrix, OfMatrix]:
        lhs, rhs, y = self.lhs, self.rhs, self.y
        return {"fprop": (lhs, rhs, y), "dgrad": (y, rhs, lhs), "wgrad": (lhs, y, rhs)}[kind]


def matrix_shardings(
    specs: Specs, shapes: tuple[tuple[int, ...], tuple[int, ...]], numbers: Numbers
) -> Shardings | None:
    """Return the shardings of operands with these `shapes`, without batch dimensions, as matrices.

    None if shards of a matrix are not rectangles, for example if a sharded dimension is not the
    first of those that form its rows; or if the kernels do not support them.
    """
    (lhs_sum, rhs_sum), _ = numbers
    whole = layout_of(*shapes, numbers)
    m, n = whole.lhs_free, whole.rhs_free
    y_dims = tuple(range(len(m) + len(n)))
    matrices = (
        (specs.lhs, shapes[0], sorted((m, lhs_sum))),
        (specs.rhs, shapes[1], sorted((n, rhs_sum))),
        (specs.y, whole.shape, [y_dims[: len(m)], y_dims[len(m) :]]),
    )
    found = []
    for spec, shape, groups in matrices:
        if getattr(spec, "unreduced", None):
            return None
        of_dims = [each if isinstance(each, tuple) else (each,) if each else () for each in spec]
        of_dims += [()] * (len(shape) - len(spec))
        for group in groups:
            dims = [d for d in group if shape[d] > 1]
            if any(of_dims[d] for d in dims[1:]):
                return None
            axes = of_dims[dims[0]] if dims else ()
            if math.prod(shape[d] for d in dims) % (count_of(axes) * LANES):
                return None
            found.append(axes)
    return Shardings(*((found[i], found[i + 1]) for i in (0, 2, 4)))


def on_each(axes: OfMatrix | None, function: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """Return `function` run on each TPU, on its shard of a matrix; of the matrix without axes.

    In `rule`, as for `divided`, ``i`` and ``j`` are the rows and columns, and ``PART`` a dimension
    with entries of each shard. It is part of a matmul, and not differentiated; so JAX need not know
    what varies over the mesh.
    """
    if axes is None:
        return function
    named = {"i": axes[0], "j": axes[1], "PART": axes[0] + axes[1]}
    parsed = Rule.parse(rule)
    operands, results = (
        tuple(spec_of([named.get(dim.name, ()) for dim in dims]) for dims in side)
        for side in (parsed.operands, parsed.results)
    )
    results = results if len(results) > 1 else results[0]
    return jax.shard_map(function, in_specs=operands, out_specs=results, check_vma=False)


class Division(NamedTuple):
    """Hold the axes over which operands and result of a matmul are sharded, and its sum."""

    first: OfMatrix
    second: OfMatrix
    summed: Axes
    result: OfMatrix


def division_of(
    shardings: Shardings, kind: Kind, contracting: tuple[int, int], order: Sequence[int] | None
) -> Division:
    """Return the division of a matmul among TPUs, for matrices with these shardings.

    A dimension that both operands shard alike is summed in partial sums. So is one that only one
    operand shards, if its axes are otherwise unused: the other operand then takes a slice of its
    copy. Otherwise shards are gathered, such as the weights of FSDP.

    `contracting` are the contracted dimensions, `order` is the result's, see `Dot`.
    """
    (first, second, result), (a, b) = shardings.of(kind), contracting
    rows, columns = result if order in (None, (0, 1)) else result[::-1]
    summed = first[a]
    if first[a] != second[b]:
        found = first[a] or second[b]
        alone = not (first[a] and second[b]) and not set(found) & {*rows, *columns}
        summed = found if alone else ()
    keep = lambda axes: tuple(axis for axis in axes if axis not in summed)
    of_first = (summed, keep(rows)) if a == 0 else (keep(rows), summed)
    of_second = (summed, keep(columns)) if b == 0 else (keep(columns), summed)
    # A sum is scattered over the last axes of a dimension: shards of others are in between.
    scattered = lambda axes: tuple(axis for axis in axes if axis in summed)
    ends = lambda axes: keep(axes) + scattered(axes) == axes
    rows, columns = (axes if ends(axes) else keep(axes) for axes in result)
    return Division(of_first, of_second, summed, (rows, columns))


def count_of(axes: Axes) -> int:
    """Return the number of shards of a dimension."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes)


def spec_of(axes: Sequence[Axes]) -> PartitionSpec:
    """Return a spec with these axes for each dimension."""
    return PartitionSpec(*(each or None for each in axes))


def spec_of_scale(shape: Sequence[int], axes: OfMatrix) -> PartitionSpec:
    """Return the spec of scales of a sharded matrix: a dimension of 1 is shared."""
    return spec_of([each if size > 1 else () for size, each in zip(shape, axes, strict=False)])
