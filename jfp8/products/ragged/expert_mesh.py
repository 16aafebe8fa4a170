"""`ExpertMesh`: the axes of a mesh that divide tokens and experts, and what devices exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jfp8.tracing.compat import mesh_in_effect
from jfp8.tracing.shardings import automatic


@dataclass(frozen=True)
class ExpertMesh:
    """The axes that shard experts and tokens.

    Without a mesh everything is on one device, or where the compiler puts it.
    """

    mesh: Mesh | AbstractMesh | None = None
    expert_axis: str = "expert"  # shards experts and tokens
    data_axes: tuple[str, ...] = ()  # shards tokens, too; each part of them has all experts
    tensor_axis: str | None = None  # shards the matrices of each expert

    @property
    def token_axes(self) -> tuple[str, ...]:
        """All that divide tokens, in the order of their parts."""
        return (*self.data_axes, self.expert_axis)

    @property
    def experts(self) -> int:
        """The number of devices that share the experts."""
        return self._size(self.expert_axis)

    @property
    def parts(self) -> int:
        """The number of parts of the tokens."""
        return math.prod(map(self._size, self.token_axes))

    @property
    def tensor(self) -> int:
        """The number of parts of each matrix."""
        return 1 if self.tensor_axis is None else self._size(self.tensor_axis)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The `data_axes` with several devices, of which each has a part of sums over tokens."""
        return tuple(axis for axis in self.data_axes if self._size(axis) > 1)

    def scattered(self, spec: PartitionSpec, shape: tuple[int, ...]) -> int | None:
        """Return the dimension of a sum over tokens that is sharded as it is added up.

        None if devices get all of it: no dimension but the first is whole and divides evenly.
        """
        parts = math.prod(map(self._size, self.summed_axes))
        for dimension, (axis, size) in enumerate(zip(spec, shape, strict=True)):
            if parts > 1 and dimension and axis is None and size % parts == 0:
                return dimension
        return None

    def _size(self, axis: str) -> int:
        return 1 if self.mesh is None else self.mesh.shape[axis]

    @property
    def rows(self) -> PartitionSpec:
        """Return the layout of arrays whose first dimension is tokens, or groups of tokens."""
        return PartitionSpec() if self.mesh is None else PartitionSpec(self.token_axes)

    def run(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `f` on every device, of its parts; without a mesh just `f`."""
        if self.mesh is None:
            return f
        mapped = jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=in_specs if isinstance(in_specs, tuple) else (in_specs,),
            out_specs=out_specs,
            axis_names=set(self.mesh.axis_names)
            - set(jax.sharding.get_abstract_mesh().manual_axes),
            check_vma=False,
        )
        return jax.jit(mapped)

    # On a device, inside of `run`.

    def index(self) -> jax.Array | int:
        """Return the index of this device among the devices that share the experts."""
        return 0 if self.mesh is None else lax.axis_index(self.expert_axis)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Gather the arrays of all devices that share the experts: ``[n, ...]``."""
        return x[None] if self.mesh is None else lax.all_gather(x, self.expert_axis)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """``x[i]`` to device i: ``[n, b, ...]`` to ``[n b, ...]``, in the order of senders."""
        moved = lax.all_to_all(x, self.expert_axis, 0, 0)
        return moved.reshape(-1, *x.shape[2:])

    def ragged(self, x: jax.Array, result: jax.Array, *chunks: jax.Array) -> jax.Array:
        """Return ``jax.lax.ragged_all_to_all``."""
        return lax.ragged_all_to_all(x, result, *chunks, axis_name=self.expert_axis)

    def sum_over_data(self, x: jax.Array, dimension: int | None) -> jax.Array:
        """Return the sum of `x`, or of `dimension` only the part that this device shall have."""
        axes = self.summed_axes
        if not axes:
            return x
        if dimension is None:
            return lax.psum(x, axes)
        return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)


def expert_mesh(
    expert_axis: str | None,
    data_axes: tuple[str, ...],
    tensor_axis: str | None,
    num_experts: int,
) -> ExpertMesh:
    """Return an `ExpertMesh` of the given axes that the mesh of ``jax.set_mesh`` has.

    Without an `expert_axis` experts are not sharded.
    """
    mesh = mesh_in_effect()
    if expert_axis is None or mesh is None:
        return ExpertMesh()
    if expert_axis not in mesh.shape:
        raise ValueError(
            f"expert_axis={expert_axis!r} is not an axis of the mesh in effect, which has "
            f"{mesh.axis_names}. Name one of them, or make the mesh with it: "
            f"jax.make_mesh((8,), ({expert_axis!r},))."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = {axis for axis, kind in kinds.items() if kind == AxisType.Manual}
    if expert_axis in manual:
        raise ValueError(
            f"expert_axis={expert_axis!r} belongs to an enclosing jax.shard_map, where each device "
            "has its own part already. Leave that axis out of it (axis_names=...): the layer "
            "divides tokens and experts along it by itself."
        )
    size = mesh.shape[expert_axis]
    if num_experts % size:
        raise ValueError(
            f"{num_experts} experts cannot be divided evenly among the {size} devices of "
            f"expert_axis={expert_axis!r}. Choose a multiple of {size} experts, or a shorter axis."
        )
    free = lambda axis: axis in mesh.shape and axis not in manual
    data = tuple(axis for axis in data_axes if free(axis) and axis != expert_axis)
    tensor = tensor_axis if tensor_axis is not None and free(tensor_axis) else None
    return ExpertMesh(automatic(mesh), expert_axis, data, tensor)
