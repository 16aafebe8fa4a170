"""The rows of a matmul of experts: which of its tensors is sent to them, and which sent back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfp8.matmul.known_scales import scale_shape_of
from jfp8.products.operation import Kind, Operand
from jfp8.products.quantized_rhs import values_of
from jfp8.products.ragged.exchange import Exchange
from jfp8.products.ragged.row_tiles import take_rows
from jfp8.scaling.arrays import ScaledArray

_register = partial(
    jax.tree_util.register_dataclass,
    data_fields=["exchange"],
    meta_fields=["divided", "projections"],
)


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a matmul of experts, instead of the sizes of groups.

    If ``n`` is sharded, the columns of y are sorted by device first, and then by projection.
    """

    sent: ClassVar[str]  # the operand that is sent to experts
    returned: ClassVar[Kind]  # the matmul whose result is sent back
    axis: ClassVar[str]  # the dimension of the matrices that a tensor axis may shard

    exchange: Exchange  # destinations of the copies of tokens
    divided: bool = False  # a tensor axis shards `axis`
    projections: int = 1  # equal parts of ``n``, concatenated

    @property
    def layout(self) -> PartitionSpec:
        """Return the layout of y."""
        mesh = self.exchange.mesh
        if self.returned == "fprop":
            return mesh.rows
        return PartitionSpec(*mesh.rows, None, mesh.tensor_axis if self.divided else None)

    def separate(self, lhs: jax.Array) -> jax.Array:
        """Return lhs in three dimensions."""
        return lhs

    def join(self, y: jax.Array) -> jax.Array:
        """Return the result of a matmul as the layer takes it."""
        return y

    def sort(self, lhs: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Return the tiles of `separate`, sorted on one device, and what returns the result."""
        raise NotImplementedError

    def sum_returned(self, y: jax.Array) -> jax.Array:
        """Return what was sent back, of copies ``[c, n]``, as rows."""
        raise NotImplementedError

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


@_register
@dataclass(frozen=True)
class ToExperts(ExpertRows):
    """Tokens, which are sent to their experts; results stay with these."""

    sent, returned, axis = "lhs", "dgrad", "n"

    def separate(self, lhs: jax.Array) -> jax.Array:
        return lhs[:, None]

    def sort(self, lhs: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        exchange = self.exchange.here
        each = jnp.repeat(lhs[:, 0], exchange.copies // max(len(lhs), 1), axis=0)
        tiles = take_rows(each, *exchange.places_here())
        return tiles.reshape(-1, exchange.height, each.shape[-1]), lambda y: y

    def sum_returned(self, y: jax.Array) -> jax.Array:
        """Sum the gradients of the copies of each token."""
        each = y.reshape(self.exchange.tokens, -1, y.shape[-1]).astype(jnp.float32)
        return jnp.sum(each, 1, keepdims=True).astype(y.dtype)


@_register
@dataclass(frozen=True)
class FromExperts(ExpertRows):
    """Rows that are with their experts; results are sent back to the tokens."""

    sent, returned, axis = "grad", "fprop", "k"

    def join(self, y: jax.Array) -> jax.Array:
        return y[:, 0]

    def sort(self, lhs: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        copy, row = self.exchange.here.places_here()
        return lhs, lambda y: take_rows(y.reshape(-1, y.shape[-1]), row, copy)

    def sum_returned(self, y: jax.Array) -> jax.Array:
        return y[:, None]
