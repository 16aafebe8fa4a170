"""`scaled_ragged_dot`: one product for each group of rows, with quantized operands.

The groups are of any size, which only the data tells: the tokens of each expert of a mixture. Rows
are laid out in tiles of equal height, each of which belongs to one group and is filled up with
zeros; every product is then one over tiles, each with the matrix of its group. Nothing is computed
for all groups, and no scale and no rotation reaches from one group into the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.accumulation import scale_products, scale_shape_of, to_output
from jfp8.arrays import ScaledArray, scale_as_f32_pair, scaled_values
from jfp8.bilinear import Kind, Observed, Operand, Operation, multiply_quantized
from jfp8.compat import same_varying_axes
from jfp8.dot_general import Dot, as_lhs, as_operand, check_out_dtype, frozen_values, value_dtype
from jfp8.formats import Format, codes_of, codes_to_format, decode, format_of
from jfp8.matmul import Implementation, check_implementation
from jfp8.quantizers import Context, Quantizer
from jfp8.random_bits import fold_in
from jfp8.recipes import DelayedScaling, Product, Recipe, check_recipe
from jfp8.scaling import AmaxState, amax

# Rows of a tile, where the recipe leaves it open: enough for the matrix units, and for groups much
# smaller than that, no more than a quarter of what a group has on average.
_TILE, _SMALLEST_TILE = 128, 16


def scaled_ragged_dot(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    group_sizes: jax.typing.ArrayLike,
    *,
    recipe: Recipe = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """``jax.lax.ragged_dot`` with FP8 operands, forward and backward. ::

        y_i = lhs_i . rhs_e    for each row i of group e; y_i = 0 for rows after the last group

    The groups are consecutive rows of `lhs`: the first ``group_sizes[0]``, the next
    ``group_sizes[1]``, and so on. High precision in and out, as with `scaled_dot_general`.

    Scales. Each group's matrix has its own, from the data at hand, whatever the recipe: one history
    could not serve matrices of different magnitude. (The history of "rhs" in the state records the
    largest amax of them, and is not read.) `lhs` and the gradient are each one tensor, and may have
    a history. Where a recipe's scales, or its rotation, run along rows, they start anew with each
    group; recipes with a scale for a whole row or column of an operand have one for each 128 rows
    of a group there. Rows after the last group are not looked at, neither forward nor backward.

    Args:
      lhs: ``f32 | bf16 | f16`` of shape ``[m, k]``.
      rhs: the same of shape ``[g, k, n]``. It may be a `ScaledArray`: matrices that are only kept
        in FP8. They get no gradient, and are used as they are where they have one scale for each
        group, ``[g, 1, 1]``, or one for all, and the format that `recipe` asks for; otherwise
        their values are quantized.
      group_sizes: integers of shape ``[g]``, not negative, with a sum of at most ``m``. A group may
        be empty.
      recipe, state, sink, key, preferred_element_type: see `scaled_dot_general`. With another
        ``accumulation`` than ``"f32"``, sums over rows are promoted every 128 rows of a group.
      implementation: ``"emulate"`` (a loop over tiles on any device), ``"xla"``
        (``jax.lax.ragged_dot_general`` of the stored values in bfloat16, which is exact), or None:
        xla on CUDA, emulate elsewhere. (On CPUs JAX's own ragged products compute every row with
        every matrix.)

    Returns:
      Array of shape ``[m, n]``.

    Raises:
      TypeError: operands that are not real floating arrays of at most 32 bits; `group_sizes` that
        are not integers; no recipe.
      ValueError: shapes that do not match; a `state` of another recipe; a `sink` of another shape;
        unknown `implementation`.
      NotImplementedError: ``implementation="xla"`` with another accumulation than ``"f32"``.

    >>> import jax.numpy as jnp
    >>> from jfp8.ragged_dot import scaled_ragged_dot
    >>> x, w = jnp.ones((5, 2)), jnp.stack([jnp.ones((2, 4)), jnp.full((2, 4), 3.0)])
    >>> [round(y) for y in scaled_ragged_dot(x, w, jnp.array([3, 1]))[:, 0].tolist()]
    [2, 2, 2, 6, 0]
    """
    y, _ = observed_ragged_dot(
        lhs,
        rhs,
        group_sizes,
        recipe=recipe,
        state=state,
        sink=sink,
        key=key,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    return y


def observed_ragged_dot(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    group_sizes: jax.typing.ArrayLike,
    *,
    recipe: Recipe,
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Observed]:
    """`scaled_ragged_dot`, and the amaxes it saw on the way; they have no gradient."""
    check_recipe(recipe)
    check_implementation(implementation)
    lhs, rhs = as_lhs(lhs), as_operand(rhs, "rhs")
    sizes = _check_group_sizes(lhs, rhs, group_sizes)
    out_dtype = check_out_dtype(preferred_element_type, lhs, rhs)
    return _observed(recipe, implementation, out_dtype, lhs, rhs, sizes, state, sink, key)


# Compiled in one piece also where nothing around it is: it consists of very many operations.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _observed(recipe, implementation, out_dtype, lhs, rhs, sizes, state, sink, key):
    dtypes = (np.dtype(lhs.dtype), value_dtype(rhs), out_dtype)
    m, (groups, _, n) = lhs.shape[0], rhs.shape
    lhs, rhs, sizes = same_varying_axes((lhs, rhs, sizes))
    rhs, scales = _frozen_groups(rhs, recipe)
    tiles = lay_out(sizes, m, _tile_height(recipe, m, groups))
    rows = take_rows(lhs, tiles.rows, tiles.slots)
    operation = GroupedDot((rows.shape, rhs.shape), dtypes, implementation)
    y, observed = multiply_quantized(
        operation,
        rows,
        rhs,
        tiles.group,
        tiles.padded_sizes,
        *scales,
        recipe=recipe,
        state=state,
        sink=sink,
        key=key,
    )
    y = take_rows(y.reshape(tiles.rows.size, n), tiles.slots, tiles.rows.reshape(-1))
    return y, observed


def _check_group_sizes(lhs: jax.Array, rhs: Operand, group_sizes: Any) -> jax.Array:
    """`group_sizes` as int32, if they fit operands that fit each other."""
    shapes = f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(
            f"A ragged product takes lhs of shape [m, k] and rhs of shape [g, k, n], but {shapes}. "
            "Reshape what comes before: x.reshape(-1, x.shape[-1])."
        )
    if lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"lhs is multiplied along its dimension 1, of size {lhs.shape[1]}, and rhs along its "
            f"dimension 1, of size {rhs.shape[1]}: they must be equal; {shapes}."
        )
    sizes = jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes must be integers, the number of rows of each group, got {sizes.dtype}."
        )
    if sizes.shape != rhs.shape[:1] or not rhs.shape[0]:
        raise ValueError(
            f"group_sizes must have shape ({rhs.shape[0]},), one size for each of the matrices in "
            f"rhs, and at least one, got {sizes.shape}; {shapes}."
        )
    return sizes.astype(jnp.int32)


# Rows and tiles.


class Tiles(NamedTuple):
    """Where the rows of groups are in tiles, for ``m`` rows and ``t`` tiles of height ``h``.

    Attributes:
      rows: i32[t, h], the row at each place; ``m`` where there is none.
      slots: i32[m], the place of each row, counted through all tiles; ``t * h`` for rows of no
        group.
      group: i32[t], the group that each tile belongs to.
      padded_sizes: i32[g], the rows of all tiles of each group.
    """

    rows: jax.Array
    slots: jax.Array
    group: jax.Array
    padded_sizes: jax.Array


def lay_out(sizes: jax.Array, m: int, height: int) -> Tiles:
    """Tiles for groups of these `sizes`, i32[g], among `m` rows; as many as there can be needed."""
    groups = sizes.shape[0]
    filled = min(groups, m)
    # At worst, each group but one has a single row, or one more than fills its tiles.
    count = max((m - filled) // height + filled, 1)
    tiles = -(-sizes // height)
    tile_end, row_end = jnp.cumsum(tiles), jnp.cumsum(sizes)
    tile_start, row_start = tile_end - tiles, row_end - sizes

    def group_of(position: jax.Array, end: jax.Array) -> jax.Array:
        # Beyond the last: that of the last, whose matrix takes part anyway.
        position = jnp.clip(position, 0, jnp.maximum(end[-1] - 1, 0))
        found = jnp.searchsorted(end, position, side="right")
        return jnp.minimum(found, groups - 1).astype(jnp.int32)

    tile = jnp.arange(count, dtype=jnp.int32)
    group = group_of(tile, tile_end)
    begin = (tile - tile_start[group]) * height
    within = begin[:, None] + jnp.arange(height, dtype=jnp.int32)[None, :]
    rows = jnp.where(within < sizes[group][:, None], row_start[group][:, None] + within, m)

    row = jnp.arange(m, dtype=jnp.int32)
    group_of_row = group_of(row, row_end)
    slots = tile_start[group_of_row] * height + row - row_start[group_of_row]
    slots = jnp.where(row < row_end[-1], slots, count * height)
    return Tiles(rows, slots, group, tiles * height)


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """``x[index]``, with zeros where `index` is beyond the last row; its gradient is one as well.

    Args:
      x: ``[rows, ...]``.
      index: i32 of any shape, in which each row occurs at most once.
      inverse: i32[rows], where in the flat `index` each row occurs; beyond its end if nowhere.

    Returns:
      Array of shape ``[*index.shape, ...]``.
    """
    return _rows_at(x, index)


def _rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    if not x.shape[0]:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def _take_rows_fwd(x, index, inverse):
    return _rows_at(x, index), (index, inverse)


def _take_rows_bwd(residuals, ct):
    index, inverse = residuals
    ct = ct.reshape(index.size, *ct.shape[index.ndim :])
    return _rows_at(ct, inverse), None, None


take_rows.defvjp(_take_rows_fwd, _take_rows_bwd)


def _tile_height(recipe: Recipe, m: int, groups: int) -> int:
    """A height that no block of scales, and no rotated stretch, along the rows reaches across.

    It makes no difference to the numbers but in the order of f32 sums, unless they depend on how
    far a sum goes: then it is 128.
    """
    products = recipe.products()
    fprop, dgrad, wgrad = products.fprop, products.dgrad, products.wgrad
    along_rows = [q.block[1] for q in (fprop.lhs, dgrad.lhs) if q is not None and q.block]
    along_rows += [q.block[0] for q in (wgrad.lhs, wgrad.rhs) if q is not None and q.block]
    if wgrad.rotation is not None:
        along_rows.append(len(wgrad.rotation.signs))
    multiple = math.lcm(*along_rows)

    height = _TILE
    by_row = (q is None or q.block or q.one_for_both for q in (wgrad.lhs, wgrad.rhs))
    if recipe.accumulation == "f32" and all(by_row):
        quarter = max(m // (4 * groups), 1)
        height = min(max(1 << (quarter.bit_length() - 1), _SMALLEST_TILE), _TILE)
    return -(-height // multiple) * multiple


def _frozen_groups(rhs: Operand, recipe: Recipe) -> tuple[Operand, tuple[jax.Array, ...]]:
    """`rhs` as `multiply_quantized` takes it, and scales, one for each group, to use instead.

    A `ScaledArray` with a scale for each group goes there with a single one, which makes its amax
    that of the largest group, and is taken as it is where a recipe has no reason against that.
    """
    if not isinstance(rhs, ScaledArray):
        return rhs, ()
    products = recipe.products()
    uses = ((products.fprop, products.fprop.rhs), (products.dgrad, products.dgrad.rhs))
    fits = all(q is not None and q.fmt == rhs.format and p.rotation is None for p, q in uses)
    shape = scale_shape_of(rhs)
    if not fits or isinstance(rhs.scale, ScaledArray) or math.prod(shape[1:]) != 1:
        return frozen_values(rhs), ()
    if math.prod(shape) == 1:
        return ScaledArray(rhs.data, rhs.scale.reshape(())), ()
    if shape[0] != rhs.shape[0]:
        return frozen_values(rhs), ()
    largest, stored = amax(scaled_values(rhs)), amax(decode(rhs.data))
    scale = jnp.where(stored > 0, largest / jnp.where(stored > 0, stored, 1.0), 1.0)
    return ScaledArray(rhs.data, scale), (lax.stop_gradient(rhs.scale),)


# The product.


@dataclass(frozen=True)
class GroupedDot(Operation):
    """The product of each tile of rows with the matrix of its group.

    ``y[t] = lhs[t] . rhs[group[t]]``. Beside the operands it takes the group of each tile, the
    rows of all tiles of each group, and, for an rhs that came quantized, a scale for each group.

    Attributes:
      shapes: of lhs ``[t, h, k]`` and rhs ``[g, k, n]``.
      dtypes: of lhs, rhs and y.
      implementation: see `scaled_ragged_dot`.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype, np.dtype]
    implementation: Implementation

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return {"fprop": ((2,), (1,)), "dgrad": ((2,), (2,)), "wgrad": ((1,), (1,))}[kind]

    def terms(self, kind: Kind) -> int:
        """As many as there are; in wgrad on average, the zeros that fill up tiles included."""
        (tiles, height, k), (groups, _, n) = self.shapes
        return {"fprop": k, "dgrad": n, "wgrad": tiles * height // groups}[kind]

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        """As the quantizer says; rhs group by group, each by its own amax and without history."""
        if role != "rhs":
            return quantizer(x, at)
        contracting = tuple(d - 1 for d in at.contracting)

        def quantize_one(x: jax.Array, group: jax.Array) -> ScaledArray:
            seed = None if at.seed is None else fold_in(at.seed, group)
            return quantizer(x, Context(contracting, amax(x), None, seed))

        q = jax.vmap(quantize_one)(x, jnp.arange(x.shape[0], dtype=jnp.uint32))
        block = None if q.block is None else (1, *q.block)
        return ScaledArray(q.data, _with_all_dims(q.scale, x.ndim), block)

    def multiply(
        self,
        kind: Kind,
        first: Operand,
        second: Operand,
        how: Product,
        accumulation: str,
        extra: tuple[jax.Array, ...],
    ) -> jax.Array:
        group, padded_sizes, *scales = extra
        if scales and isinstance(second, ScaledArray):
            second = ScaledArray(second.data, scales[0])
        dtype = self.dtypes[{"fprop": 2, "dgrad": 0, "wgrad": 1}[kind]]

        def by_tiles(first: Operand, second: Operand) -> jax.Array:
            return self._by_tiles(kind, first, second, how, accumulation, group)

        def by_groups(first: Operand, second: Operand) -> jax.Array:
            return self._by_groups(kind, first, second, group, padded_sizes)

        if self.implementation == "emulate" or (
            self.implementation is None and accumulation != "f32"
        ):
            y = by_tiles(first, second)
        elif accumulation != "f32":
            raise NotImplementedError(
                f"implementation='xla' does not support accumulation={accumulation!r}: it computes "
                "real products, not models of them. Use implementation=None or 'emulate'."
            )
        elif self.implementation == "xla":
            y = by_groups(first, second)
        else:
            y = lax.platform_dependent(first, second, cuda=by_groups, default=by_tiles)
        return y.astype(dtype)

    def _by_tiles(
        self,
        kind: Kind,
        first: Operand,
        second: Operand,
        how: Product,
        accumulation: str,
        group: jax.Array,
    ) -> jax.Array:
        """One tile after the other, each an ordinary product; f32."""
        (_, height, k), (groups, _, n) = self.shapes
        f32 = np.dtype(np.float32)
        dot = Dot((((1,), (0,)), ((), ())), ((height, k), (k, n)), (f32, f32, f32), "emulate")
        tiles, others = _Stack(first), _Stack(second)
        product = lambda a, b: dot.multiply(kind, a, b, how, accumulation, ())
        indices = jnp.arange(group.shape[0])
        if kind != "wgrad":
            return lax.map(lambda i: product(tiles[i], others[group[i]]), indices)

        def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return total.at[group[i]].add(product(tiles[i], others[i])), None

        zeros = jnp.zeros((groups, k, n), jnp.float32)
        zeros, *_ = same_varying_axes((zeros, first, second, group))
        return lax.scan(add, zeros, indices)[0]

    def _by_groups(
        self, kind: Kind, first: Operand, second: Operand, group: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """JAX's own ragged product, over all tiles of a group at once; f32."""
        in_sum, in_second_sum = {
            "fprop": ((2,), (1,)),
            "dgrad": ((2,), (2,)),
            "wgrad": ((0, 1), (0, 1)),
        }[kind]
        factors: list[jax.Array] = []
        precision = None
        if isinstance(first, ScaledArray) and isinstance(second, ScaledArray):
            if not _varies_along(first, in_sum) and not _varies_along(second, in_second_sum):
                factors = _factors(kind, first, second, group)
                # Every stored value is a bf16 value, so the tensor cores of bf16 are exact.
                first, second = (decode(q.data).astype(jnp.bfloat16) for q in (first, second))
        if isinstance(first, ScaledArray) or isinstance(second, ScaledArray):
            precision = lax.Precision.HIGHEST
        first, second = (
            scaled_values(x) if isinstance(x, ScaledArray) else x for x in (first, second)
        )
        common = jnp.promote_types(first.dtype, second.dtype)
        tiles, height, _ = self.shapes[0]
        flat = lambda x: x.astype(common).reshape(tiles * x.shape[1], x.shape[-1])
        first, second = flat(first), second.astype(common) if kind != "wgrad" else flat(second)
        sums = {"fprop": ([1], [1]), "dgrad": ([1], [2]), "wgrad": ([0], [0])}[kind]
        y = lax.ragged_dot_general(
            first,
            second,
            sizes,
            lax.RaggedDotDimensionNumbers((sums, ([], [])), [0], [] if kind == "wgrad" else [0]),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if kind != "wgrad":
            # Nobody says what a ragged product has in the rows of tiles that are not needed.
            needed = jnp.arange(y.shape[0])[:, None] < jnp.sum(sizes)
            y = jnp.where(needed, y, 0.0).reshape(tiles, height, y.shape[-1])
        for factor in factors:
            y = y * factor
        return y


def _factors(
    kind: Kind, first: ScaledArray, second: ScaledArray, group: jax.Array
) -> list[jax.Array]:
    """What to multiply products of the stored values by: scales that do not vary along the sum."""
    first_free, second_free = {"fprop": (1, 2), "dgrad": (1, 1), "wgrad": (2, 2)}[kind]
    of_rows = (to_output(s, first, (0,), (first_free,), 0, 1) for s in scale_as_f32_pair(first))
    of_columns = (
        to_output(s, second, (0,), (second_free,), 1, 0) for s in scale_as_f32_pair(second)
    )
    if kind != "wgrad":
        of_columns = (s[group] if s.ndim and s.shape[0] > 1 else s for s in of_columns)
    return scale_products(tuple(of_rows), tuple(of_columns))


def _varies_along(q: ScaledArray, dims: Sequence[int]) -> bool:
    shape = scale_shape_of(q)
    return bool(shape) and any(shape[d] != 1 for d in dims)


class _Stack:
    """Matrices behind each other, each a `ScaledArray` or not, to take one out of in a loop.

    What is stored in 8 bits goes into the loop as uint8: XLA:CPU would widen f8 arrays there.
    """

    def __init__(self, x: Operand) -> None:
        leaves, self.structure = jax.tree.flatten(x)
        self.formats = [format_of(a.dtype) if a.dtype.itemsize == 1 else None for a in leaves]
        self.leaves = [
            a if fmt is None else codes_of(a) for a, fmt in zip(leaves, self.formats, strict=True)
        ]

    def __getitem__(self, i: jax.Array) -> Operand:
        def item(leaf: jax.Array, fmt: Format | None) -> jax.Array:
            # A single scale for all has no dimensions; a dimension of size 1 gives what is in it.
            leaf = lax.dynamic_index_in_dim(leaf, i, keepdims=False) if leaf.ndim else leaf
            return leaf if fmt is None else codes_to_format(leaf, fmt)

        x = self.structure.unflatten(map(item, self.leaves, self.formats))
        if isinstance(x, ScaledArray) and x.block is not None:
            x = replace(x, block=x.block[1:])
        return x


def _with_all_dims(scale: jax.Array | ScaledArray, ndim: int) -> jax.Array | ScaledArray:
    """The scale of a stack of arrays, which `jax.vmap` gave a leading dimension."""
    if isinstance(scale, ScaledArray):
        return replace(scale, scale=_with_all_dims(scale.scale, ndim))
    return scale if scale.ndim == ndim else lax.expand_dims(scale, range(1, ndim))
