"""Functions that the compiler partitions by a rule, as it partitions its own operations.

Under ``jit`` with shardings, XLA decides how arrays are divided, and does not know how to divide a
kernel. A rule says which dimensions belong together::

    divided("matmul", matmul, "i k, j k -> i j", combine="sum")

Every device then calls the function with its parts. Where ``i`` or ``j`` is divided, so is the
result. Where ``k`` is, each device has a part of the sum, and the parts are added up. A name in
capitals is of a dimension that every device must have as a whole. Last operands in parentheses are
others, transposed: ``i k, j k, (k j) -> i j``. They are not read, but devices that lack parts of
``j k`` receive ``k j`` in its place, because another matmul needs it, too.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jfp8.tracing.compat import axes_by_dimension, finest_mesh, kernels_are_interpreted
from jfp8.tracing.devices import Gpu

Combine = Literal["sum", "max", "max later", "alike"]
Axes = tuple[str, ...]
ByDimension = Sequence[Axes]


class Dim(NamedTuple):
    """A dimension of an array: ``k``, or ``k/128`` for one entry for every 128 of ``k``."""

    name: str
    unit: int


@dataclass(frozen=True)
class Rule:
    """Names of the dimensions of all operands and results."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    transposed: int = 0  # how many operands, the last ones, are others transposed

    @staticmethod
    def parse(text: str) -> Rule:
        """From ``"i k, k/128 j, -> i j"``: here the last operand is a single number."""
        operands, results = (
            tuple(
                tuple(Dim(n, int(unit or 1)) for n, unit in re.findall(r"(\w+)(?:/(\d+))?", array))
                for array in side.split(",")
            )
            for side in text.split("->")
        )
        return Rule(operands, results, text.count("("))

    def exchanged(
        self, axes: dict[str, Axes], operands: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
    ) -> tuple[list[ByDimension], Callable[..., Iterator[jax.Array]]]:
        """Return how operands shall lie, and a function of such parts to the parts that are read.

        Copies are sent in the place of operands of which devices lack parts.
        """
        wanted = [[axes.get(dim.name, ()) for dim in dims] for dims in self.operands]
        have = [axes_by_dimension(x, mesh) for x in operands]
        firsts = self.operands[: len(operands) - self.transposed]
        by_names = {frozenset(dims): i for i, dims in enumerate(self.operands)}
        copies = {i: by_names[frozenset(dims)] for i, dims in enumerate(firsts)}
        copies = {i: copy for i, copy in copies.items() if copy >= len(firsts)}
        lacking = lambda i: any({*a} - {*b} for a, b in zip(have[i], wanted[i], strict=True))
        sent = {i: copy for i, copy in copies.items() if lacking(i)}
        unread = {i if i in sent else copy for i, copy in copies.items()}  # stays where it is

        def read(parts: Sequence[jax.Array]) -> Iterator[jax.Array]:
            for i, part in enumerate(parts):
                order = map(self.operands[sent.get(i, i)].index, self.operands[i])
                yield parts[sent[i]].transpose(*order) if i in sent else part

        return [have[i] if i in unread else lie for i, lie in enumerate(wanted)], read

    def units(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The elements of each name that stay together; absent: it cannot be divided."""
        units: dict[str, int] = {}
        for dim in itertools.chain(*self.operands, *self.results):
            if not dim.name.isupper():
                units[dim.name] = max(units.get(dim.name, 1), dim.unit)
        sizes = self.sizes(shapes)
        # A single unit is whole, and Shardy refuses it as one of two factors of a dimension.
        several = lambda size, unit: size % unit == 0 and (unit == 1 or size > unit)
        return {name: unit for name, unit in units.items() if several(sizes[name], unit)}

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The number of elements of each name."""
        return {dim.name: size for dim, size in _pairs(self.operands, shapes) if dim.unit == 1}

    def axes(
        self,
        units: dict[str, int],
        operands: Sequence[jax.ShapeDtypeStruct],
        results: Sequence[jax.ShapeDtypeStruct],
        mesh: Mesh,
    ) -> dict[str, Axes]:
        """The axes of `mesh` along which each name is divided; names that are whole are absent.

        An array that is divided in another way is exchanged between devices, so most arrays decide,
        or else the larger operand. A name to sum over is divided only if all operands that have it
        are divided alike: else one would have to be exchanged, and the result added up.
        """
        sizes = self.sizes([x.shape for x in operands])
        of_results = [axes_by_dimension(x, mesh) for x in results]
        wishes = [*self._wishes(operands, mesh), *_pairs(self.results, of_results)]
        votes = collections.Counter((dim.name, axes) for dim, axes in wishes)
        wishes.sort(key=lambda wish: -votes[wish[0].name, wish[1]])
        chosen: dict[str, Axes] = {}
        for (name, _), axes in wishes:
            if name in units and name not in chosen:
                taken = {axis for other in chosen.values() for axis in other}
                whole_units = sizes[name] // units[name]
                if found := _leading(axes, mesh, taken, whole_units):
                    chosen[name] = found
        return chosen

    def _wishes(
        self, operands: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
    ) -> list[tuple[Dim, Axes]]:
        """List along which axes operands are divided, the largest operand first."""
        every = list(zip(operands, self.operands, strict=True))[: len(operands) - self.transposed]
        order = sorted(every, key=lambda each: -math.prod(each[0].shape))
        of_operands = [axes_by_dimension(x, mesh) for x, _ in order]
        pairs = _pairs([dims for _, dims in order], of_operands)
        found = [(dim, axes) for dim, axes in pairs if dim.unit == 1]  # not scales, which are small
        ways: dict[str, set[Axes]] = {}
        for dim, axes in found:
            ways.setdefault(dim.name, set()).add(axes)
        apart = {name for name in self.summed() if len(ways.get(name, ())) > 1}
        return [(dim, axes) for dim, axes in found if dim.name not in apart]

    def warn_cut(self, name: str, operands: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> None:
        """Warn of names that operands have divided into parts of no whole units."""
        sizes = self.sizes([x.shape for x in operands])
        units = {dim.name: dim.unit for dim in itertools.chain(*self.operands, *self.results)}
        of_operands = [axes_by_dimension(x, mesh) for x in operands]
        for dim, axes in dict(_pairs(self.operands, of_operands)).items():
            size, unit = sizes[dim.name], units[dim.name]
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if dim.unit == 1 and parts > 1 and size % (parts * unit):
                warnings.warn(
                    f"jfp8, {name}: a dimension of {size} is divided into {parts} parts, which "
                    f"cuts blocks of {unit}. Every device gets all of it first, which takes time. "
                    f"Let each have a multiple of {unit}.",
                    stacklevel=3,
                )

    def lacking(self) -> set[str]:
        """The names of dimensions that may be divided and that a result does not have."""
        names = {dim.name for dims in self.operands for dim in dims if not dim.name.isupper()}
        return set().union(*(names - {dim.name for dim in dims} for dims in self.results))

    def summed(self) -> tuple[str, ...]:
        """The names that no result has."""
        left = {dim.name for dims in self.results for dim in dims}
        found = {dim.name: None for dims in self.operands for dim in dims if dim.name not in left}
        return tuple(found)

    def for_shardy(self, units: dict[str, int]) -> tuple[str, dict[str, int]]:
        """As Shardy writes rules: ``i (k k_unit), k j -> i j``, with the sizes of units."""

        def word(dim: Dim) -> str:
            unit = units.get(dim.name)
            if unit is None:  # nothing is divided along it, and its arrays have nothing in common
                return f"{dim.name}_{dim.unit}"
            return f"({dim.name} {dim.name}_unit)" if unit > dim.unit else dim.name

        side = lambda arrays: ", ".join(" ".join(map(word, dims)) for dims in arrays)
        sizes = {f"{name}_unit": unit for name, unit in units.items() if unit > 1}
        return f"{side(self.operands)} -> {side(self.results)}", sizes

    def batched(self, operands: Sequence[bool]) -> Rule:
        """Return this rule under ``vmap``, which adds a dimension to batched arrays."""
        names = {dim.name for array in self.operands for dim in array}
        new = Dim(next(n for n in map("b{}".format, itertools.count()) if n not in names), 1)
        return Rule(
            tuple((new, *a) if b else a for a, b in zip(self.operands, operands, strict=True)),
            tuple((new, *array) for array in self.results),
            self.transposed,
        )


def divided(
    name: str,
    function: Callable[..., Any],
    rule: str | Rule,
    combine: Combine | Sequence[Combine] | None = None,
    of_parts: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`function` of arrays, which the compiler may divide as `rule` says.

    Args:
      name: for profiles, with ``jfp8_`` before it; after a comma what else it depends on.
      function: maps arrays to an array or a tuple of arrays. Called with whole arrays, or with
        the parts of a device, each of which has whole units (128 of ``k`` if there is a ``k/128``).
      rule: see `Rule.parse`.
      combine: how the parts of a result are put together where a dimension is divided that it does
        not have: added, or their maximum, NaN if one is (of numbers that are not negative, or of
        their bits); or they are alike. "max later": all parts are sent to all devices, and XLA
        takes their maximum in the kernel that reads it. One for each result, or one for all; needed
        if a result does not have all dimensions.
      of_parts: computes parts of a sum, to send them in another dtype; None means `function`.

    Where parts would not have whole units, an operand is put together first, with a warning.
    """
    rule = Rule.parse(rule) if isinstance(rule, str) else rule
    assert combine or not rule.lacking(), f"{name}: a result lacks dimensions; say how to combine"
    if kernels_are_interpreted():  # with side effects, which a divided function cannot have
        return function
    # In shard_map a device has its own part already. (The compiler still divides along axes that
    # are not manual; JAX has no rules for kernels there, and nobody asks for them.)
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return function

    @custom_vmap
    def call(*operands: jax.Array) -> Any:
        # JAX's compilation cache can be told not to look at the addresses of rules. Then something
        # else in the program must say which function this is.
        identity = np.uint32(zlib.crc32(f"{name} {rule} {combine}".encode()))
        with jax.named_scope(f"jfp8_{name.partition(',')[0]}"):
            by_parts = _partitioned(name, function, rule, combine, of_parts or function, operands)
            return by_parts(identity, *operands)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        del size
        mapped = partial(jax.vmap, in_axes=[0 if b else None for b in batched])
        over, over_parts = mapped(function), of_parts and mapped(of_parts)
        results = divided(name, over, rule.batched(batched), combine, over_parts)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return call


def divided_sum(
    name: str, product: Callable[..., jax.Array], rule: str, dtype: np.dtype, parts: np.dtype | None
) -> Callable[..., jax.Array]:
    """``product(dtype, *arrays)`` as a function of arrays, which the compiler may divide.

    Devices send parts of a sum, to be added up, in the dtype `parts`; None: `dtype`.
    """
    of_parts = None
    if parts is not None:
        name, of_parts = f"{name}, parts in {parts}", partial(product, parts)
    return divided(name, partial(product, dtype), rule, "sum", of_parts)


def _partitioned(
    name: str,
    function: Callable[..., Any],
    rule: Rule,
    combine: Combine | Sequence[Combine] | None,
    of_parts: Callable[..., Any],
    operands: Sequence[jax.Array],
) -> Callable[..., Any]:
    """`function`, whose parts XLA asks for when it knows how its operands are divided."""
    rule = replace(rule, operands=((), *rule.operands))  # with the identity
    ways = [combine] * len(rule.results) if combine is None or isinstance(combine, str) else combine
    units = rule.units([(), *(x.shape for x in operands)])
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    of_one = AbstractMesh((), (), **({} if device is None else {"abstract_device": device}))
    partitioned = custom_partitioning(lambda identity, *parts: function(*parts))
    lowered = _each_once(function, of_parts)

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        mesh = finest_mesh(mesh, operands[1].sharding)
        ins, outs = jax.tree.leaves(operands), jax.tree.leaves(results)
        axes = rule.axes(units, ins, outs, mesh)
        rule.warn_cut(name.partition(",")[0], ins, mesh)
        named = [{dim.name for dim in dims} for dims in rule.results]
        lacking = [tuple(a for n in axes if n not in names for a in axes[n]) for names in named]
        of_results = [tuple(axes.get(dim.name, ()) for dim in dims) for dims in rule.results]
        # The maximum over all devices is the same, and XLA merges exchanges among the same devices.
        every = lambda way, a, dims: mesh.axis_names if a and way != "sum" and not any(dims) else a
        apart = list(map(every, ways, lacking, of_results))
        wanted = [axes_by_dimension(x, mesh) for x in outs]
        if of_parts is not function:  # else XLA sees by itself that a sum is wanted in parts
            of_results = [*map(partial(_shared_out, mesh=mesh), outs, of_results, apart, wanted)]

        of_operands, read = rule.exchanged(axes, ins, mesh)

        def on_parts(*parts: jax.Array) -> Any:
            parts = tuple(read(parts))[1:]
            # Parts are not on the caller's mesh, which may be explicit.
            with jax.sharding.use_abstract_mesh(of_one):
                found = lowered(any(apart), mesh, *map(jax.typeof, parts))(*parts)
                leaves, tree = jax.tree.flatten(found)
                combined = map(_combined, ways, leaves, apart, of_results, wanted)
                return tree.unflatten(x.astype(out.dtype) for x, out in zip(combined, outs))

        lie = lambda by_dimension: NamedSharding(mesh, PartitionSpec(*by_dimension))
        laid_out = jax.tree.structure(results).unflatten(map(lie, of_results))
        return mesh, on_parts, laid_out, tuple(map(lie, of_operands))

    text, factor_sizes = rule.for_shardy(units)
    partitioned.def_partition(
        partition,
        decode_shardings=False,
        sharding_rule=text,
        reduction_factors=tuple(name for name in rule.summed() if name in units),
        **factor_sizes,
    )
    return partitioned


def _each_once(function: Callable[..., Any], of_parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return what returns one of both for arrays of some types; on GPUs lowered, once for each.

    Mosaic GPU numbers the kernels that it lowers. XLA merges equal ones, and compiles them once.
    """

    @functools.cache
    def lowered(in_parts: bool, mesh: Mesh, *parts: Any) -> Callable[..., Any]:
        compute = of_parts if in_parts else function
        if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
            return compute
        allow = export.DisabledSafetyCheck.custom_call
        checks = [allow("mosaic_gpu_v2"), allow("__op$block_scaled_dot")]  # cuDNN's, on Blackwell
        lower = export.export(jax.jit(compute), platforms=["cuda"], disabled_checks=checks)
        return lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in parts)).call

    return lowered


def _pairs(
    arrays: Sequence[tuple[Dim, ...]], values: Sequence[Sequence[Any]]
) -> Iterator[tuple[Dim, Any]]:
    for dims, of_array in zip(arrays, values, strict=True):
        yield from zip(dims, of_array, strict=True)


def _leading(axes: Axes, mesh: Mesh, taken: set[str], divisible: int) -> Axes:
    """Return the longest unused prefix of `axes` whose size divides `divisible`."""
    found: Axes = ()
    for axis in axes:
        divisible, rest = divmod(divisible, mesh.shape[axis])
        if rest or axis in taken:
            break
        found = (*found, axis)
    return found


def _shared_out(
    result: Any, by_dimension: ByDimension, apart: Axes, wanted: ByDimension, mesh: Mesh
) -> ByDimension:
    """Return axes of a sum of parts, the sum's too where the result shall be divided along them."""
    found = list(by_dimension)
    devices = math.prod(mesh.shape[axis] for axis in apart)
    for d, axes in enumerate(wanted):
        if apart and axes == apart and not found[d] and result.shape[d] % devices == 0:
            found[d] = apart
    return found


def _combined(
    combine: Combine | None, x: jax.Array, axes: Axes, have: ByDimension, wanted: ByDimension
) -> jax.Array:
    """A result of all devices along `axes`, of which each has a part."""
    if not axes or combine == "alike":
        return x
    if combine == "sum":
        if x.ndim == 2 and axes == wanted[1][: len(axes)]:
            # XLA would write columns, to scatter them, and scale them apart, by a rounded scale.
            x = with_layout_constraint(x, Layout((0, 1)))
        if axes in have:
            return lax.psum_scatter(x, axes, scatter_dimension=have.index(axes), tiled=True)
        return lax.psum(x, axes)
    if combine == "max later":
        return jnp.max(lax.all_gather(x, axes), axis=0)
    # Integers, without the sign that a NaN may have: not all devices know a maximum with NaN.
    # Kernels give such bits themselves.
    if x.dtype != jnp.int32:
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.iinfo(jnp.int32).max
        return lax.bitcast_convert_type(lax.pmax(bits, axes), x.dtype)
    return lax.pmax(x, axes)


def why_not_divided(gpu: Gpu) -> str | None:
    """Return why no rule can partition a kernel here, and warn; or None if one can."""
    if not gpu.partly_manual:
        return None
    reason = (
        "arrays inside of a jax.shard_map over some axes of the mesh, which the compiler divides "
        "along the others. Make all axes manual, or none"
    )
    warnings.warn(
        f"{gpu.kind}: jfp8's kernels do not support {reason}. XLA quantizes instead, which is "
        "slower, and multiplies blocks of scales in bfloat16.",
        stacklevel=1,  # one place for all kernels, so that Python shows it once
    )
    return reason
