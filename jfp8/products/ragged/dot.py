"""`scaled_ragged_dot`: one matmul for each group of rows, with quantized operands.

Group sizes are arbitrary and known only from the data: the tokens of each expert of a mixture. Rows
are laid out in tiles of equal height, each of which belongs to one group and is padded with
zeros. Every matmul then multiplies tiles, each by the matrix of its group. No row is multiplied
by the matrices of other groups, and no scale or rotation crosses the border of a group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfp8.matmul.planner import allowed_planner
from jfp8.matmul.spec import Implementation
from jfp8.products.explicit_sharding import with_result_like
from jfp8.products.operation import (
    Observed,
    Operand,
    Options,
    State,
    Use,
    as_operands,
    dtypes_of,
    in_mesh_of_arguments,
)
from jfp8.products.quantized_rhs import values_of
from jfp8.products.ragged.by_tiles import Grouped, GroupedDot, quantized_by_group
from jfp8.products.ragged.row_tiles import lay_out, take_rows
from jfp8.products.vjp import Planned, multiply_quantized
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import explicit_mesh

# Rows of a tile, if the recipe does not set it: enough for the matrix units; for much smaller
# groups, at most a quarter of the average rows of a group.
TILE, _SMALLEST_TILE = 128, 16


def scaled_ragged_dot(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    group_sizes: jax.typing.ArrayLike,
    *,
    recipe: RecipeLike = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Return ``jax.lax.ragged_dot`` with FP8 operands, forward and backward. ::

        y_i = lhs_i . rhs_e    for each row i of group e; y_i = 0 for rows after the last group

    The groups are consecutive rows of `lhs`: the first ``group_sizes[0]``, the next
    ``group_sizes[1]``, and so on. Operands and results are in high precision.

    Scales. Each group's matrix has its own, computed from its current values under every recipe,
    because one history could not serve matrices of different magnitude. (The one of "rhs" records
    their largest amax, and is not read.) `lhs` and the gradient are each one tensor, and
    may have a history. If a recipe's scales, or its rotation, run along rows, they start anew
    with each group; recipes with a scale for a whole row or column of an operand then have one for
    every 128 rows of a group. Rows after the last group are ignored, forward and backward.

    Args:
      lhs: array ``f32 | bf16 | f16`` of shape ``[m, k]``.
      rhs: the same of shape ``[g, k, n]``. It may be a `ScaledArray`: matrices that are only stored
        in FP8. They get no gradient. Their bytes are used unchanged if they have the format that
        `recipe` requires and one scale for each group, ``[g, 1, 1]``, one for all, or one for each
        row or block as `recipe` requires in this matmul; otherwise their values are quantized.
      group_sizes: integers of shape ``[g]``, not negative, with a sum of at most ``m``. A group may
        be empty.
      recipe, state, sink, key, preferred_element_type: see `scaled_dot_general`. With another
        ``accumulation`` than ``"f32"``, sums over rows are promoted every 128 rows of a group.
      implementation: ``"emulate"`` (a loop over tiles on any device), ``"xla"``
        (``jax.lax.ragged_dot_general`` of the stored values in bfloat16, which is exact),
        ``"mosaic_gpu"`` (Pallas kernels for Hopper, for recipes with one scale per tensor or in
        blocks of 128), or None: on CUDA mosaic_gpu if possible; else a tile of each group at a
        time, if a backend of `scaled_matmul` takes the recipe's formats and scales; else xla.
        On other devices emulate. (JAX's own ragged matmuls may compute all rows with all matrices.)

    Returns:
      Array of shape ``[m, n]``.

    Raises:
      TypeError: operands that are not real floating arrays of at most 32 bits; `group_sizes` that
        are not integers; `recipe` is not a recipe.
      ValueError: shapes that do not match; a `state` of another recipe; a `sink` of another shape
        or dtype; unknown `implementation`.
      NotImplementedError: ``implementation="xla"`` with another accumulation than ``"f32"``;
        ``"mosaic_gpu"`` if there are no such kernels, see `scaled_matmul`.

    >>> import jax.numpy as jnp
    >>> from jfp8.products.ragged.dot import scaled_ragged_dot
    >>> x, w = jnp.ones((5, 2)), jnp.stack([jnp.ones((2, 4)), jnp.full((2, 4), 3.0)])
    >>> [round(y) for y in scaled_ragged_dot(x, w, jnp.array([3, 1]))[:, 0].tolist()]
    [2, 2, 2, 6, 0]
    """
    options, states = Options(check_recipe(recipe), implementation), State(state, sink, key)
    result = {"preferred_element_type": preferred_element_type}
    return observed_ragged_dot(lhs, rhs, group_sizes, options, states, **result)[0]


@in_mesh_of_arguments
def observed_ragged_dot(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike | ScaledArray,
    group_sizes: jax.typing.ArrayLike,
    options: Options,
    state: State,
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, Observed]:
    """Compute `scaled_ragged_dot`, and return the amaxes of its operands without gradients."""
    lhs, rhs = as_operands(lhs, rhs)
    options = options.on_device_of(lhs, rhs)
    sizes = _check_group_sizes(lhs, rhs, group_sizes)
    compute = functools.partial(
        _observed, options, dtypes_of(lhs, rhs, options, preferred_element_type)
    )
    if explicit_mesh() is not None:
        return with_result_like(_spec_of(lhs, rhs), compute, lhs, rhs, sizes, state)
    return compute(lhs, rhs, sizes, state)


def _spec_of(lhs: jax.Array, rhs: Operand) -> PartitionSpec:
    """Return the sharding of the result: rows like `lhs`, columns like `rhs` over other axes."""
    matrices = rhs.data if isinstance(rhs, ScaledArray) else rhs
    rows, _ = jax.typeof(lhs).sharding.spec
    *_, columns = jax.typeof(matrices).sharding.spec
    axes = lambda entry: {*entry} if isinstance(entry, tuple) else {entry}
    return PartitionSpec(rows, None if axes(rows) & axes(columns) else columns)


# Compiled as one program even if its caller is not: it consists of very many operations.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _observed(options, dtypes, lhs, rhs, sizes, state):
    m, (groups, _, n) = lhs.shape[0], rhs.shape
    lhs, rhs, sizes = same_varying_axes((lhs, rhs, sizes))
    rhs = frozen_groups(rhs, options.recipe)
    spec = GroupedSpec(options, m, groups, isinstance(rhs, ScaledArray))
    found = allowed_planner(options.device, options.implementation).plan(spec)
    tiles = lay_out(sizes, m, found.height)
    rows = take_rows(lhs, tiles.rows, tiles.slots)
    shapes = rows.shape, rhs.shape
    operation = found.operation(shapes, dtypes, tiles.group, tiles.padded_sizes)
    y, observed = multiply_quantized(Planned(operation, rows, rhs, options, state))
    y = take_rows(y.reshape(tiles.rows.size, n), tiles.slots, tiles.rows.reshape(-1))
    return y, observed


@dataclass(frozen=True)
class GroupedPlan:
    """The plan of a grouped matmul: the operation that multiplies tiles of a height."""

    height: int
    operation: type[Grouped]


@dataclass(frozen=True)
class GroupedSpec:
    """The static description of a grouped matmul, from which it is planned."""

    options: Options  # including the device
    rows: int
    groups: int
    has_quantized_rhs: bool = False
    height: int | None = None  # rows of a tile, if they are planned already

    def reference(self) -> GroupedPlan:
        """Return the reference plan."""
        height = self.height or tile_height(self.options.recipe, self.rows, self.groups)
        return GroupedPlan(height, GroupedDot)


def _check_group_sizes(lhs: jax.Array, rhs: Operand, group_sizes: Any) -> jax.Array:
    """Validate shapes and return `group_sizes` as int32."""
    shapes = f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(
            f"A ragged matmul takes lhs of shape [m, k] and rhs of shape [g, k, n], but {shapes}. "
            "Reshape activations of more dimensions: x.reshape(-1, x.shape[-1])."
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
            f"group_sizes must have shape ({rhs.shape[0]},), one size for each matrix in rhs, "
            f"with at least one matrix; got {sizes.shape}; {shapes}."
        )
    return sizes.astype(jnp.int32)


def tile_height(recipe: Recipe, m: int, groups: int, *, at_once: bool = False) -> int:
    """Return a height of tiles that no block of scales or of a rotation crosses.

    The height changes results only through the order of f32 sums, unless they depend on the length
    of a sum: then it is 128. Tiles may be higher if one of each group is multiplied `at_once`.
    """
    products = recipe.resolved()
    fprop, dgrad, wgrad = products.fprop, products.dgrad, products.wgrad
    along_rows = [q.block[1] for q in (fprop.lhs, dgrad.lhs) if q is not None and q.block]
    along_rows += [q.block[0] for q in (wgrad.lhs, wgrad.rhs) if q is not None and q.block]
    if wgrad.rotation is not None:
        along_rows.append(wgrad.rotation.size)
    multiple = math.lcm(*along_rows)

    height = TILE
    spans = any(q is not None and q.spans_rows for q in (wgrad.lhs, wgrad.rhs))
    if not spans and at_once:
        height = max(_quarter(m, groups), TILE)
    elif not spans and recipe.accumulation == "f32":
        height = plain_tile_height(m, groups)
    return -(-height // multiple) * multiple


def plain_tile_height(m: int, groups: int) -> int:
    """Return the height of tiles for matmuls in high precision."""
    return min(max(_quarter(m, groups), _SMALLEST_TILE), TILE)


def _quarter(m: int, groups: int) -> int:
    """Return a power of two, at most a quarter of the average rows of a group."""
    quarter = max(m // (4 * groups), 1)
    return 1 << (quarter.bit_length() - 1)


def frozen_groups(rhs: Operand, recipe: Recipe) -> Operand:
    """Return `rhs` for `multiply_quantized`: a `ScaledArray` only if its bytes are used."""
    if not isinstance(rhs, ScaledArray):
        return rhs
    fprop = recipe.resolved().fprop
    found = Use("fprop", fprop, fprop.rhs, (1,)).unchanged(rhs, quantized_by_group)
    return values_of(rhs) if found is None else found
