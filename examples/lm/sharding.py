"""The placement of all arrays: a mesh of (data, fsdp, tensor), and a rule for every parameter.

    data     every group of devices has all parameters, and its own shard of the batch
    fsdp     also its own shard of the batch, and of every parameter, which is gathered for use
    tensor   the same batch, and its own columns (qkv, up, head) or rows (out, down) of every kernel

Nothing else is needed: `jax.jit` inserts the communication. Amax histories are on every device,
because they are too small to be worth sharding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))
EVERYWHERE = P()

# Columns first, rows second: qkv and out, and up and down, need no communication in between.
# The tables of 256 bytes and 128 positions are replicated: XLA cannot shard every look-up.
RULES = (
    (r"(qkv|up|head)/kernel$", P("fsdp", "tensor")),
    (r"(out|down)/kernel$", P(("tensor", "fsdp"), None)),
    (r"", EVERYWHERE),  # embeddings and norms
)


def make_mesh(
    data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Create a mesh; neighboring devices share a tensor axis, which communicates most."""
    return jax.make_mesh(
        (data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def spec_of(path: Sequence[Any], parameter: Any, mesh: Mesh) -> P:
    """Return the first rule that matches; an indivisible dimension stays whole."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
    layers = parameter.ndim - len(spec)  # a leading axis of layers under nn.scan
    entries = [None] * layers + list(spec)
    sizes = [math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in entries]
    divides = [n % size == 0 for n, size in zip(parameter.shape, sizes)]
    return P(*(entry if fits else None for entry, fits in zip(entries, divides)))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes of the mesh that shard one dimension."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def specs_of(params: Any, mesh: Mesh) -> Any:
    """Return a `PartitionSpec` for every parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, p: spec_of(path, p, mesh), params)


def of_parameters(params: Any, mesh: Mesh) -> Any:
    """Return a `NamedSharding` for every parameter."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(params, mesh))


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """Replicate every leaf on every device."""
    return jax.tree.map(lambda _: NamedSharding(mesh, EVERYWHERE), tree)


def bytes_of(tree: Any) -> int:
    """Return the bytes of `tree`, each element counted once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def bytes_on_one_device(tree: Any) -> int:
    """Return the bytes of `tree` on the first of this process's devices."""
    shards = (leaf.addressable_shards[0].data for leaf in jax.tree.leaves(tree))
    return sum(shard.nbytes for shard in shards)


def of_one_device(tree: Any) -> Any:
    """Return replicated arrays as NumPy arrays, from the first of this process's devices."""
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data), tree)


def assert_same_on_every_device(tree: Any) -> int:
    """Compare this process's copies of replicated arrays bit by bit.

    Returns:
      number of devices that agree: 0 if there is nothing to compare.
    """
    devices = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        devices = len(copies)
        if len(set(copies)) != 1:
            raise AssertionError(f"{jax.tree_util.keystr(path)} is not the same on every device")
    return devices


def assert_same_in_every_process(tree: Any) -> int:
    """Compare replicated arrays between processes bit by bit; return how many processes agree."""
    leaves = jax.tree.leaves(of_one_device(tree))
    own = np.frombuffer(b"".join(leaf.tobytes() for leaf in leaves), np.uint8)
    everyone = multihost_utils.process_allgather(own).reshape(jax.process_count(), -1)
    if (everyone != everyone[0]).any():
        raise AssertionError(
            f"the processes differ in {(everyone != everyone[0]).any(0).sum()} bytes"
        )
    return len(everyone)
