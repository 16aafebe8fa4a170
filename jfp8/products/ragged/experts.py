"""`observed_expert_dot`: the matmuls of a mixture of experts, with operands sent between devices.

    travels="lhs"     y[tiles]  = send(q(x)) . q(w)     x [t, k] tokens,   w [E, k, n]
    travels="result"  y[copies] = back(q(h) . q(w))     h [tiles, height, k]

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
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jfp8.matmul.known_scales import scale_shape_of
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
from jfp8.products.quantized_rhs import values_of
from jfp8.products.ragged.by_tiles import Grouped, GroupedDot
from jfp8.products.ragged.dot import GroupedSpec, frozen_groups, plain_tile_height
from jfp8.products.ragged.exchange import Exchange
from jfp8.products.ragged.expert_mesh import ExpertMesh
from jfp8.products.ragged.tiles import take_rows
from jfp8.products.vjp import multiply_quantized
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import current_device

Travels = Literal["lhs", "result"]
_SENT: dict[Travels, str] = {"lhs": "lhs", "result": "grad"}  # the operand that is sent

_TILE = 128  # rows of a tile, as kernels take them


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["exchange"],
    meta_fields=["travels", "divided", "projections"],
)
@dataclass(frozen=True)
class ExpertRows:
    """The rows of a matmul of experts, instead of the sizes of groups.

    If ``n`` is sharded, the columns of y are sorted by device first, and then by projection.
    """

    exchange: Exchange  # destinations of the copies of tokens
    travels: Travels  # the tensor that is sent
    divided: bool = False  # the tensor axis shards the matrices: ``n`` if lhs is sent, else ``k``
    projections: int = 1  # equal parts of ``n``, concatenated

    def sort_columns(self, rhs: Operand) -> Operand:
        """Return ``[E, k, n]`` with its columns in the same order as y."""
        parts = self.exchange.mesh.tensor
        if not self.divided or self.projections == 1:
            return rhs

        def by_device(x: jax.Array) -> jax.Array:
            apart = x.reshape(*x.shape[:2], self.projections, parts, -1)
            return apart.swapaxes(2, 3).reshape(x.shape)

        n = rhs.shape[-1]
        if isinstance(rhs, ScaledArray) and not {1, n}.issuperset(scale_shape_of(rhs)[-1:]):
            rhs = values_of(rhs)  # blocks of several columns
        return jax.tree.map(lambda x: by_device(x) if x.shape[-1:] == (n,) else x, rhs)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["exchange"],
    meta_fields=["shapes", "dtypes", "travels", "way", "tensor"],
)
@dataclass(frozen=True)
class ExpertDot(Operation):
    """Matmuls of tiles with the matrices of experts, with rows sent between devices.

    The shape of lhs is ``[t, 1, k]`` or ``[tiles, height, k]``, and that of rhs ``[E, k, n]``.
    """

    exchange: Exchange  # destinations of the rows
    travels: Travels  # the gradient of lhs is sent back, or the gradient of the result there
    way: type[Grouped]  # plan with which a device multiplies tiles
    tensor: bool  # see `ExpertRows.divided`

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
        if role == self._sent_role:
            return None
        return self._here(self.exchange).quantize_for_both(role, x, *how)

    def after_transfer(self, role: str, q: Operand) -> Operand:
        if role != self._sent_role:
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
        returns = kind == {"lhs": "dgrad", "result": "fprop"}[self.travels]
        divided = {"lhs": "n", "result": "k"}[self.travels] if self.tensor else ""
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
            return self._returned(exchange.here, y) if returns else y

        layout = lambda shape, dims: PartitionSpec(
            *(None if n == 1 else axes.get(d) for n, d in zip(shape, dims, strict=False))
        )
        specs = [mesh.rows]
        for operand, dims in zip((first, second), names[:2], strict=True):
            specs += [layout(leaf.shape, dims) for leaf in jax.tree.leaves(operand)]
        run = mesh.run(product, tuple(specs), result)
        return run(self.exchange, *leaves)

    @property
    def _sent_role(self) -> str:
        return _SENT[self.travels]

    def _here(self, exchange: Exchange) -> Grouped:
        """Compute the matmuls of one device."""
        (experts, k, n), mesh = self.shapes[1], self.exchange.mesh
        if self.tensor and self.travels == "lhs":
            n //= mesh.tensor
        elif self.tensor:
            k //= mesh.tensor
        tiles = (exchange.group.shape[-1], exchange.height, k)
        shapes = (tiles, (experts // mesh.experts, k, n))
        group, sizes = exchange.group, exchange.padded_sizes
        return self.way(shapes, self.dtypes, group, sizes)

    def _returned(self, exchange: Exchange, y: jax.Array) -> jax.Array:
        """Return tiles as rows of copies ``[c, 1, n]``; gradients are summed for each token."""
        copies = exchange.back(y.reshape(-1, y.shape[-1]))
        if self.travels == "result":
            return copies[:, None]
        each = copies.reshape(exchange.tokens, -1, y.shape[-1]).astype(jnp.float32)
        return jnp.sum(each, 1, keepdims=True).astype(y.dtype)


def observed_expert_dot(
    lhs: jax.Array,
    rhs: Operand,
    rows: ExpertRows,
    options: Options,
    state: State,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    multiply: Callable[..., tuple[jax.Array, Observed]] | None = None,
) -> tuple[jax.Array, Observed]:
    """Multiply each row by the matrix of its expert, and return the amaxes of both operands. ::

        lhs is sent     lhs [t, k]               rhs [E, k, n]    y [tiles, height, n]
        y is sent back  lhs [tiles, height, k]   rhs [E, k, n]    y [c, n]

    If `multiply` is given, it is called instead of `multiply_quantized`.
    """
    lhs, rhs = as_operands(lhs, rhs)
    options = options.on_device_of(lhs, rhs)
    dtypes = dtypes_of(lhs, rhs, options, preferred_element_type)
    if multiply is not None:  # it may do more, with effects
        return _observed(options, dtypes, multiply, lhs, rhs, rows, state)
    return _compiled(options, dtypes, multiply_quantized, lhs, rhs, rows, state)


def _observed(options, dtypes, multiply, lhs, rhs, rows, state):
    exchange, travels = rows.exchange, rows.travels
    recipe = options.recipe
    lhs, rhs = same_varying_axes((lhs, rhs))
    rhs = rows.sort_columns(frozen_groups(rhs, recipe))
    lhs = lhs[:, None] if travels == "lhs" else lhs
    tiles, quantized = exchange.group.size, isinstance(rhs, ScaledArray)
    spec = GroupedSpec(
        options, tiles * exchange.height, rhs.shape[0], quantized, height=exchange.height
    )
    way = allowed_planner(options.device, options.implementation).plan(spec).operation
    how = rhs, options, state
    run = lambda operation, lhs, restore: multiply(operation, lhs, *how, restore=restore)
    if exchange.mesh.mesh is None and not _serves_both(recipe, travels):
        return _sorted_first(way, dtypes, lhs, rhs, rows, run)
    operation = ExpertDot((lhs.shape, rhs.shape), dtypes, exchange, travels, way, rows.divided)
    return run(operation, lhs, lambda y: y[:, 0] if travels == "result" else y)


_compiled = jax.jit(_observed, static_argnums=(0, 1, 2))


def _serves_both(recipe: Recipe, travels: Travels) -> bool:
    """Return True if both matmuls of the sent tensor take the same bytes."""
    products = recipe.resolved()
    if any(product.rotation for product in vars(products).values()):
        return False
    first, second = products.by_role()[_SENT[travels]]
    return first is not None and first == second and first.one_for_both


def _sorted_first(way, dtypes, lhs, rhs, rows, run):
    """Sort rows on one device before they are quantized, for both matmuls.

    Requantizing the bytes along the other direction would round twice.
    """
    exchange = rows.exchange.here
    copy, row = exchange.places_here()
    if rows.travels == "lhs":
        each = jnp.repeat(lhs[:, 0], exchange.copies // max(len(lhs), 1), axis=0)
        lhs = take_rows(each, copy, row).reshape(-1, exchange.height, each.shape[-1])
    shapes, groups = (lhs.shape, rhs.shape), (exchange.group, exchange.padded_sizes)
    operation = way(shapes, dtypes, *groups)
    back = lambda y: take_rows(y.reshape(-1, y.shape[-1]), row, copy)
    return run(operation, lhs, back if rows.travels == "result" else lambda y: y)


def plain_expert_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    rows: ExpertRows,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Compute `observed_expert_dot` in high precision."""
    out_dtype = np.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    dtypes = (np.dtype(lhs.dtype), np.dtype(rhs.dtype), out_dtype)
    lhs = lhs[:, None] if rows.travels == "lhs" else lhs
    way = planner_of(current_device(lhs, rhs)).grouped_in_high_precision(GroupedDot)
    shapes, where = (lhs.shape, rhs.shape), (rows.exchange, rows.travels, way, rows.divided)
    y = _plain(ExpertDot(shapes, dtypes, *where), lhs, rows.sort_columns(rhs))
    return y[:, 0] if rows.travels == "result" else y


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
    travel = [x.ndim == 3 for x in leaves]

    def rebuild(arrays: Sequence[jax.Array], height: int) -> Operand:
        each, found = iter(arrays), []
        for x, is_scale, travels in zip(leaves, scales, travel, strict=True):
            arrived = next(each) if travels else x
            if travels and is_scale:
                as_bytes = arrived.reshape(-1, x.shape[2], 4)
                arrived = lax.bitcast_convert_type(as_bytes, jnp.float32)
            found.append(arrived.reshape(-1, height, x.shape[2]) if travels else x)
        return structure.unflatten(found)

    rows = []
    for x, is_scale, travels in zip(leaves, scales, travel, strict=True):
        if travels:
            row = lax.bitcast_convert_type(x, jnp.uint8) if is_scale else x
            rows.append(row.reshape(x.shape[0], -1))
    return rows, rebuild
