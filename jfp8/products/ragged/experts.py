"""`observed_expert_dot`: the matmuls of a mixture of experts, with operands sent between devices.

    ToExperts    y[tiles]  = send(q(x)) . q(w)     x [t, k] tokens,   w [E, k, n]
    FromExperts  y[copies] = back(q(h) . q(w))     h [tiles, height, k]

A tensor that is sent to experts (tokens; the gradient with respect to results) is quantized by its
sender, with one scale for each row or for all, and arrives as bytes. The first matmul takes these.
The second one, which sums over rows, dequantizes the bytes, and quantizes them along the other
direction if their scales do not serve it. (On one device, where nothing is sent, the tensor itself
is quantized a second time.) Tensors that return (results; the gradient with respect to tokens) have
the dtype of the operands.

All arrays, amaxes and scales are global, over all devices: the compiler shards elementwise
operations. Only the exchange and the matmuls are written device by device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jfp8.matmul.planner import allowed_planner, planner_of
from jfp8.matmul.spec import Implementation, MatmulSpec
from jfp8.products.operation import (
    Kind,
    Observed,
    Operand,
    Operation,
    Options,
    State,
    as_operands,
    dtypes_of,
)
from jfp8.products.ragged.by_tiles import Grouped, GroupedDot
from jfp8.products.ragged.dot import GroupedSpec, frozen_groups, plain_tile_height
from jfp8.products.ragged.exchange import Exchange
from jfp8.products.ragged.expert_mesh import ExpertMesh
from jfp8.products.ragged.expert_rows import ExpertRows
from jfp8.products.vjp import Planned, multiply_quantized
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import current_device
from jfp8.tracing.shardings import sharded_like


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows"],
    meta_fields=["shapes", "dtypes", "way"],
)
@dataclass(frozen=True)
class ExpertDot(Operation):
    """Matmuls of tiles with the matrices of experts, with rows sent between devices.

    The shape of lhs is ``[t, 1, k]`` or ``[tiles, height, k]``, and that of rhs ``[E, k, n]``.
    """

    rows: ExpertRows
    way: type[Grouped]  # plan with which a device multiplies tiles

    @property
    def exchange(self) -> Exchange:
        """Return the destinations of the rows."""
        return self.rows.exchange

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._here(self.exchange).contracting(kind)

    def terms(self, kind: Kind) -> int:
        """Return `Grouped.terms`, over all devices."""
        (experts, k, n), rows = self.shapes[1], self.exchange.place_at.size
        return {"fprop": k, "dgrad": n, "wgrad": rows // experts}[kind]

    def arrange(self, role: str, x: Any) -> Any:
        return self._here(self.exchange).arrange(role, x)

    def made(self, role: str, x: jax.Array, make: Callable[..., Any], *parts: jax.Array) -> Any:
        return self._here(self.exchange).made(role, x, make, *parts)

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        return self._here(self.exchange).quantize(role, x, quantizer, at)

    def quantize_for_both(self, role: str, x: Any, *how: Any) -> Any:
        if role == self.rows.sent:
            return None
        return self._here(self.exchange).quantize_for_both(role, x, *how)

    def after_transfer(self, role: str, q: Operand) -> Operand:
        if role != self.rows.sent:
            return q
        leaves, rebuild = _as_rows(q)

        def send(exchange: Exchange, *leaves: jax.Array) -> list[jax.Array]:
            return [exchange.here.send(leaf) for leaf in leaves]

        rows = self.exchange.mesh.rows
        run = self.exchange.mesh.run(send, (rows,) * (1 + len(leaves)), rows)
        return rebuild(run(self.exchange, *leaves), self.exchange.height)

    def relayout(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        return self._here(self.exchange).relayout(role, operand, contracting)

    def multiply(self, kind: Kind, first: Operand, second: Operand, spec: MatmulSpec) -> jax.Array:
        mesh, dtype = self.exchange.mesh, self.dtype_of(kind)
        names = self.way.dimensions(kind)
        returns = kind == self.rows.returned
        divided = self.rows.axis if self.rows.divided else ""
        in_parts = bool(divided) and divided not in names[2]
        in_parts |= kind == "wgrad" and mesh.parts > mesh.experts
        parts = (spec.partial_dtype or np.dtype(np.float32)) if in_parts else dtype
        leaves, structure = jax.tree.flatten((first, second))
        axes = {"t": mesh.token_axes, "E": mesh.expert_axis, divided: mesh.tensor_axis}
        result = mesh.rows if returns else PartitionSpec(*map(axes.get, names[2]))
        scattered = None
        if kind == "wgrad":
            # A reduce-scatter sends half the bytes of an all-reduce. If another sharding of the
            # gradient is needed, or all of it, it is sent once more, in `dtype`.
            scattered = mesh.scattered(result, self.shapes[1])
            over = [mesh.summed_axes if d == scattered else a for d, a in enumerate(result)]
            result = PartitionSpec(*over)

        def product(exchange: Exchange, *leaves: jax.Array) -> jax.Array:
            here = replace(self._here(exchange.here), dtypes=(parts,) * 3)
            a, b = structure.unflatten(leaves)
            y = here.multiply(kind, a, b, spec)
            if divided and divided not in names[2] and mesh.tensor > 1:
                y = lax.psum(y, mesh.tensor_axis)
            if kind == "wgrad":
                y = mesh.sum_over_data(y, scattered)
            y = y.astype(dtype)
            if not returns:
                return y
            return self.rows.sum_returned(exchange.here.back(y.reshape(-1, y.shape[-1])))

        layout = lambda shape, dims: PartitionSpec(
            *(None if n == 1 else axes.get(d) for n, d in zip(shape, dims, strict=False))
        )
        specs = [mesh.rows]
        for operand, dims in zip((first, second), names[:2], strict=True):
            specs += [layout(leaf.shape, dims) for leaf in jax.tree.leaves(operand)]
        run = mesh.run(product, tuple(specs), result)
        return run(self.exchange, *leaves)

    def _here(self, exchange: Exchange) -> Grouped:
        """Compute the matmuls of one device."""
        (experts, k, n), mesh = self.shapes[1], self.exchange.mesh
        parts = mesh.tensor if self.rows.divided else 1
        n, k = (n // parts, k) if self.rows.axis == "n" else (n, k // parts)
        tiles = (exchange.group.shape[-1], exchange.height, k)
        shapes = (tiles, (experts // mesh.experts, k, n))
        group, sizes = exchange.group, exchange.padded_sizes
        return self.way(shapes, self.dtypes, group, sizes)


def observed_expert_dot(
    lhs: jax.Array,
    rhs: Operand,
    rows: ExpertRows,
    options: Options,
    state: State,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, Observed]:
    """Multiply each row by the matrix of its expert, and return the amaxes of both operands. ::

        lhs is sent     lhs [t, k]               rhs [E, k, n]    y [tiles, height, n]
        y is sent back  lhs [tiles, height, k]   rhs [E, k, n]    y [c, n]

    The `rows` say which of the two is sent, and where.
    """
    lhs, rhs = as_operands(lhs, rhs)
    compute = partial(_compiled, options.on_device_of(lhs, rhs), preferred_element_type)
    return sharded_like((rows.layout, PartitionSpec()), compute, lhs, rhs, rows, state)


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(options, preferred_element_type, lhs, rhs, rows, state):
    given = lhs, rhs, rows, options, state
    return multiply_quantized(_planned(*given, preferred_element_type))


def planned_expert_dot(
    lhs: jax.Array, rhs: Operand, rows: ExpertRows, options: Options, state: State
) -> Planned:
    """Decide how an `observed_expert_dot` of `as_operands` is computed."""
    return _planned(lhs, rhs, rows, options.on_device_of(lhs, rhs), state)


def _planned(
    lhs: jax.Array,
    rhs: Operand,
    rows: ExpertRows,
    options: Options,
    state: State,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Planned:
    dtypes = dtypes_of(lhs, rhs, options, preferred_element_type)
    exchange, recipe = rows.exchange, options.recipe
    lhs, rhs = same_varying_axes((lhs, rhs))
    rhs, lhs = rows.sort_columns(frozen_groups(rhs, recipe)), rows.separate(lhs)
    tiles, quantized = exchange.group.size, isinstance(rhs, ScaledArray)
    spec = GroupedSpec(
        options, tiles * exchange.height, rhs.shape[0], quantized, height=exchange.height
    )
    way = allowed_planner(options.device, options.implementation).plan(spec).operation
    operation: Operation
    if exchange.mesh.mesh is None and not _serves_both(recipe, rows):
        # Rows are sorted before they are quantized, for both matmuls. Requantizing the bytes along
        # the other direction would round twice.
        lhs, restore = rows.sort(lhs)
        groups = exchange.here.group, exchange.here.padded_sizes
        operation = way((lhs.shape, rhs.shape), dtypes, *groups)
    else:
        operation = ExpertDot((lhs.shape, rhs.shape), dtypes, rows, way)
        restore = rows.join
    return Planned(operation, lhs, rhs, options, state, restore)


def _serves_both(recipe: Recipe, rows: ExpertRows) -> bool:
    """Return True if both matmuls of the sent tensor take the same bytes."""
    products = recipe.resolved()
    if any(product.rotation for product in vars(products).values()):
        return False
    first, second = products.by_role()[rows.sent]
    return first is not None and first == second and first.one_for_both


def plain_expert_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    rows: ExpertRows,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Compute `observed_expert_dot` in high precision."""
    compute = partial(_in_high_precision, preferred_element_type)
    return sharded_like(rows.layout, compute, lhs, rhs, rows)


def _in_high_precision(preferred_element_type, lhs, rhs, rows):
    out_dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    dtypes = (np.dtype(lhs.dtype), np.dtype(rhs.dtype), out_dtype)
    lhs = rows.separate(lhs)
    way = planner_of(current_device(lhs, rhs)).grouped_in_high_precision(GroupedDot)
    operation = ExpertDot((lhs.shape, rhs.shape), dtypes, rows, way)
    return rows.join(_plain(operation, lhs, rows.sort_columns(rhs)))


@jax.custom_vjp
def _plain(operation: ExpertDot, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _plain_forward(operation, lhs, rhs)[0]


def _plain_forward(operation, lhs, rhs):
    lhs = operation.after_transfer("lhs", lhs)
    return operation.multiply("fprop", lhs, rhs, MatmulSpec()), (operation, lhs, rhs)


def _plain_backward(residuals, dy):
    operation, lhs, rhs = residuals
    dy = operation.after_transfer("grad", dy)
    d_lhs = operation.multiply("dgrad", dy, rhs, MatmulSpec())
    return None, d_lhs, operation.multiply("wgrad", lhs, dy, MatmulSpec())


_plain.defvjp(_plain_forward, _plain_backward)


def height_for(
    recipes: Sequence[Recipe], implementation: Implementation
) -> Callable[[int, int], int]:
    """Return the height of tiles for these recipes, as a function of rows and groups."""
    options = [Options(recipe, implementation).on_device_of() for recipe in recipes]

    def height(rows: int, groups: int) -> int:
        planners = [allowed_planner(each.device, each.implementation) for each in options]
        specs = [GroupedSpec(each, rows, groups) for each in options]
        heights = [p.plan(spec).height for p, spec in zip(planners, specs, strict=True)]
        return math.lcm(*heights) if heights else plain_tile_height(rows, groups)

    return height


def can_be_divided(size: int, mesh: ExpertMesh, recipes: Sequence[Recipe]) -> bool:
    """Return True if the tensor axis shards a dimension into whole blocks and whole rotations."""
    units = [b for r in recipes for q in r.resolved().quantizers() if q.block for b in q.block]
    products = [product for recipe in recipes for product in vars(recipe.resolved()).values()]
    units += [p.rotation.size for p in products if p.rotation is not None]
    return mesh.tensor > 1 and size % (mesh.tensor * math.lcm(*units)) == 0


def _as_rows(q: Operand) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array], int], Operand]]:
    """Return the arrays ``[t, n]`` to send of an operand ``[t, 1, k]``, and the inverse.

    Scales are sent as bytes, too, unless all rows share one.
    """
    leaves, structure = jax.tree.flatten(q)
    scales = [x.dtype == jnp.float32 and isinstance(q, ScaledArray) for x in leaves]
    sent = [x.ndim == 3 for x in leaves]

    def rebuild(arrays: Sequence[jax.Array], height: int) -> Operand:
        each, found = iter(arrays), []
        for x, is_scale, moves in zip(leaves, scales, sent, strict=True):
            arrived = next(each) if moves else x
            if moves and is_scale:
                as_bytes = arrived.reshape(-1, x.shape[2], 4)
                arrived = lax.bitcast_convert_type(as_bytes, jnp.float32)
            found.append(arrived.reshape(-1, height, x.shape[2]) if moves else x)
        return structure.unflatten(found)

    rows = []
    for x, is_scale, moves in zip(leaves, scales, sent, strict=True):
        if moves:
            row = lax.bitcast_convert_type(x, jnp.uint8) if is_scale else x
            rows.append(row.reshape(x.shape[0], -1))
    return rows, rebuild
