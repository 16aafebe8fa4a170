"""`Exchange`: send copies of tokens to the experts that they chose, and results back.

    tokens of a device  --send-->  tiles of its experts  --back-->  a result for each copy

Experts are sharded over one axis of a mesh, tokens over several. Copies arrive sorted by expert,
and in the order of the tokens: on many devices an expert has the same rows as
on one. Rows are sent in the dtype in which they are given, so 8-bit data is sent as
bytes. On CUDA a ragged exchange writes each copy to its destination; elsewhere each pair of devices
exchanges a bucket large enough for all copies, since sizes are known only from the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.products.ragged.expert_mesh import ExpertMesh
from jfp8.products.ragged.row_tiles import RowTiles, lay_out, rows_at
from jfp8.scaling.codes import codes_of, codes_to_format
from jfp8.scaling.formats import E8M0FNU, format_of
from jfp8.tracing.device import current_gpu


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Exchange:
    """Destinations of the copies of tokens; the leading dimension of all arrays counts devices.

    ``t`` tokens and ``c = t k`` copies of a device; ``n`` devices that share the experts; ``m``
    rows of tiles; ``b`` rows of a bucket.

    Attributes:
      mesh: the mesh over which tokens and experts are sharded.
      tokens, copies, height: ``t``, ``c``, and the rows of a tile.
      group: i32[d, tiles], the expert of each tile, counted from the first of its device.
      padded_sizes: i32[d, e], number of rows in the tiles of each expert of a device.
      sizes: i32[d, e], number of copies for each expert.
      copy_at: i32[d, n, b], the copy at each place of the buckets; ``c`` if there is none.
      place_of: i32[d, c], the inverse; ``n b`` for a copy that no expert gets.
      row_of: i32[d, n, b], the row of the tiles for each place of the buckets that arrive; ``m``
        for none.
      place_at: i32[d, m], the inverse; ``n b`` if a tile has no row.
      order: i32[d, c], the copies sorted by expert.
      places: i32[d, c], the inverse.
      chunks, chunks_back: the rows that a device exchanges with each expert, contiguous on both
        sides: offsets at the sender, sizes, offsets at the receiver, and sizes that arrive; see
        ``jax.lax.ragged_all_to_all``.
    """

    mesh: ExpertMesh = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})
    copies: int = field(metadata={"static": True})
    height: int = field(metadata={"static": True})
    group: jax.Array
    padded_sizes: jax.Array
    sizes: jax.Array
    copy_at: jax.Array
    place_of: jax.Array
    row_of: jax.Array
    place_at: jax.Array
    order: jax.Array
    places: jax.Array
    chunks: tuple[jax.Array, ...]
    chunks_back: tuple[jax.Array, ...]

    @property
    def here(self) -> Exchange:
        """Return the exchange of this device, without the leading dimension."""
        return jax.tree.map(lambda x: x[0], self)

    @property
    def rows(self) -> int:
        """Return the number of rows in all tiles of a device."""
        return self.place_at.shape[-1]

    def send(self, x: jax.Array) -> jax.Array:
        """Send rows of tokens ``[t, ...]`` or copies ``[c, ...]`` to rows of tiles ``[m, ...]``.

        This and `back` are called on one device, with its own shard; see `here`.
        """
        if x.dtype == E8M0FNU.dtype:  # E8M0 has no zero to pad tiles with
            return codes_to_format(self.send(codes_of(x)), E8M0FNU)
        each = self.copies // x.shape[0] if x.shape[0] else 1  # copies of a row
        if self.mesh.experts == 1:
            return rows_at(x, self.places_here()[0] // each)
        with jax.named_scope("jfp8_dispatch"):
            if _has_ragged_exchange(x):
                sorted_copies = rows_at(x, self.order // each)
                tiles = jnp.zeros((self.rows, *x.shape[1:]), x.dtype)
                return self.mesh.ragged(sorted_copies, tiles, *self.chunks)
            wire, arrived = _as_bytes(rows_at(x, self.copy_at // each))
            return arrived(rows_at(self.mesh.all_to_all(wire), self.place_at))

    def places_here(self) -> tuple[jax.Array, jax.Array]:
        """Return the copy in each row of the tiles, and the inverse, if nothing leaves a device."""
        copy = rows_at(self.copy_at.reshape(-1), self.place_at, fill=self.copies)
        return copy, rows_at(self.row_of.reshape(-1), self.place_of, fill=self.rows)

    def back(self, y: jax.Array) -> jax.Array:
        """Send rows of tiles, ``[m, ...]``, back to copies, ``[c, ...]``; 0 for dropped ones."""
        if self.mesh.experts == 1:
            return rows_at(y, self.places_here()[1])
        with jax.named_scope("jfp8_combine"):
            if _has_ragged_exchange(y):
                copies = jnp.zeros((self.copies, *y.shape[1:]), y.dtype)
                return self.mesh.ragged(y, copies, *self.chunks_back)[self.places]
            return rows_at(self.mesh.all_to_all(rows_at(y, self.row_of)), self.place_of)


def plan_exchange(
    experts: jax.Array,
    count: int,
    mesh: ExpertMesh,
    height: Callable[[int, int], int],
    capacity_factor: float | None = None,
) -> Exchange:
    """Compute the destinations of the copies of tokens.

    Args:
      experts: i32[t, k], the experts that each token chose; `count` for none. The number of
        tokens is a multiple of the number of shards, ``mesh.parts``.
      count: number of all experts.
      height: function of the largest number of rows on a device, and of its number of experts.
      capacity_factor: an expert gets at most this times the mean number of copies, the first. The
        others are dropped: their results are 0. With None nothing is dropped, and each device
        has memory for the copies of all devices that share the experts.
    """
    tokens, k = experts.shape[0] // mesh.parts, experts.shape[1]
    copies, own = tokens * k, count // mesh.experts
    everyone = mesh.experts * copies
    capacity = None
    rows = everyone
    if capacity_factor is not None:
        if not capacity_factor > 0:
            raise ValueError(
                f"capacity_factor={capacity_factor!r} must be positive: an expert gets at most "
                "this times its share of the tokens. Use 1.25, or None to drop none."
            )
        capacity = max(1, int(-(-capacity_factor * everyone // count)))
        rows = min(rows, own * capacity)
    options = count, mesh, rows, height(rows, own), capacity
    on_device = lambda experts: jax.tree.map(lambda x: x[None], _plan_here(experts, *options))
    return mesh.run(on_device, in_specs=mesh.rows, out_specs=mesh.rows)(experts)


def _plan_here(
    experts: jax.Array,
    count: int,
    mesh: ExpertMesh,
    rows: int,
    height: int,
    capacity: int | None,
) -> Exchange:
    """Return the exchange of one device, without the leading dimension."""
    tokens, k = experts.shape
    copies, n = tokens * k, mesh.experts
    own = count // n
    chosen = experts.reshape(-1)
    me = mesh.index()

    counted = jnp.zeros((count,), jnp.int32).at[chosen].add(1, mode="drop")
    counts = mesh.all_gather(counted)
    before = _exclusive(counts, 0)
    kept = counts if capacity is None else jnp.clip(capacity - before, 0, counts)
    before, sizes = _exclusive(kept, 0), jnp.sum(kept, 0)
    starts = _exclusive(counts, 1)  # each expert's, among the sorted copies of a device

    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    indices = jnp.arange(copies, dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(indices, unique_indices=True)
    rank = places - rows_at(starts[me], chosen)  # among the copies of this device for its expert
    is_kept = rank < rows_at(kept[me], chosen)

    # Buckets: the one for each device has the copies for its experts, one expert after the other.
    bucket = min(copies, rows)
    in_bucket = _exclusive(kept.reshape(n, n, own), 2).reshape(n, count)
    place = chosen // own * bucket + rows_at(in_bucket[me], chosen) + rank
    place = jnp.where(is_kept, place, n * bucket).astype(jnp.int32)
    copy_at = jnp.full((n * bucket,), copies, jnp.int32).at[place].set(indices, mode="drop")

    # Tiles of the experts of this device.
    of_mine = lambda x: lax.dynamic_slice_in_dim(x, me * own, own, axis=-1)
    tiles = lay_out(of_mine(sizes), rows, height)
    row_of, place_at = _rows_that_arrive(of_mine(kept), of_mine(before), tiles, bucket)

    # Chunks: one for each pair of a device and an expert.
    tile_starts = _exclusive((-(-sizes // height) * height).reshape(n, own), 1).reshape(count)
    arrive = of_mine(kept).reshape(-1)
    from_tiles = (of_mine(tile_starts)[None] + of_mine(before)).reshape(-1)
    return Exchange(
        mesh=mesh,
        tokens=tokens,
        copies=copies,
        height=height,
        group=tiles.group,
        padded_sizes=tiles.padded_sizes,
        sizes=of_mine(sizes),
        copy_at=copy_at.reshape(n, bucket),
        place_of=place,
        row_of=row_of,
        place_at=place_at,
        order=order,
        places=places,
        chunks=(starts[me], kept[me], tile_starts + before[me], arrive),
        chunks_back=(from_tiles, arrive, of_mine(starts).reshape(-1), kept[me]),
    )


def _rows_that_arrive(
    kept: jax.Array, before: jax.Array, tiles: RowTiles, bucket: int
) -> tuple[jax.Array, jax.Array]:
    """Compute `row_of` and `place_at` of an `Exchange`.

    Each device has `kept` copies for each expert of this device, and earlier ones those `before`.
    """
    n, own = kept.shape
    ends = jnp.cumsum(kept, 1)
    at = jnp.arange(bucket, dtype=jnp.int32)
    expert = jnp.sum(ends[:, None, :] <= at[None, :, None], 2, dtype=jnp.int32)
    inside = jnp.minimum(expert, own - 1)
    offset = _exclusive(jnp.sum(kept, 0), 0)[None] + before - (ends - kept)
    position = at[None] + jnp.take_along_axis(offset, inside, 1)  # among the rows of all experts
    total = tiles.rows.size
    row_of = jnp.where(expert < own, rows_at(tiles.slots, position), total).astype(jnp.int32)
    place_at = jnp.full((total,), n * bucket, jnp.int32)
    all_places = jnp.arange(n * bucket, dtype=jnp.int32)
    return row_of, place_at.at[row_of.reshape(-1)].set(all_places, mode="drop")


def _as_bytes(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return 8-bit codes as uint8, and the inverse; XLA:CPU would send 16 bits."""
    if x.dtype.itemsize > 1 or x.dtype == jnp.uint8:
        return x, lambda x: x
    fmt = format_of(x.dtype)
    return codes_of(x), lambda x: codes_to_format(x, fmt)


def _exclusive(x: jax.Array, axis: int) -> jax.Array:
    """Return the sum of the elements before each element."""
    return jnp.cumsum(x, axis) - x


def _has_ragged_exchange(x: jax.Array) -> bool:
    """Return True if the device that JAX traces for supports ``jax.lax.ragged_all_to_all``."""
    gpu = current_gpu(x)
    return gpu is not None and gpu.platform == "cuda"
