"""What a program is traced for: which GPU, which kind of mesh, and whether for a report.

`jfp8.report` needs to know which layer computes an equation, by which recipe. This is noted in the
jaxpr, in the names of scopes.
"""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.sharding import AxisType

# Compute capability by the name of the device, for programs that are compiled without it.
_CAPABILITIES = {
    r"\b(H100|H200|H20|H800|GH200)\b": (9, 0),
    r"\b(B100|B200|GB200)\b": (10, 0),
    r"\b(B300|GB300)\b": (10, 3),
    r"\b(L4|L40|L40S|RTX 40\d\d|RTX 6000 Ada)\b": (8, 9),
    r"\b(A100|A800|A30)\b": (8, 0),
}


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
      kind: its name, such as ``"NVIDIA H200"``.
      capability: compute capability, such as ``(9, 0)``; None if the name does not tell.
      partly_manual: whether it is inside of a ``shard_map`` over some axes of the mesh, while the
        compiler divides arrays along the others. There it cannot be told how to divide a kernel.
    """

    kind: str
    capability: tuple[int, int] | None
    partly_manual: bool = False

    @property
    def hopper(self) -> bool:
        """Whether it has Hopper's tensor cores and their instructions."""
        return self.capability is not None and self.capability[0] == 9

    @property
    def multiplies_f8(self) -> bool:
        """Whether it has FP8 tensor cores; True if unknown."""
        return self.capability is None or self.capability >= (8, 9)


def current_gpu() -> Gpu | None:
    """The GPU that JAX is tracing for; None if it is another device, or unknown.

    It is the default device, or the one that an abstract mesh describes, for programs that are
    compiled on a machine without a GPU::

        gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), (), abstract_device=gpu)
        ):
            ...
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = {kind for n, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if n > 1}
    partly_manual = AxisType.Manual in kinds and len(kinds) > 1
    described = getattr(mesh, "abstract_device", None)
    if described is not None:
        if described.platform != "gpu":
            return None
        return Gpu(described.device_kind, _capability_of(described.device_kind), partly_manual)
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    capability = _capability_of(device.device_kind)
    if capability is None:
        return None  # one of AMD's
    return Gpu(device.device_kind, capability, partly_manual)


def why_not_divided(gpu: Gpu) -> str | None:
    """Why the compiler cannot be told how to divide a kernel here; None if it can."""
    if not gpu.partly_manual:
        return None
    return (
        "arrays inside of a jax.shard_map over some axes of the mesh, which the compiler divides "
        "along the others. Make all axes manual, or none"
    )


@dataclass(frozen=True)
class Tpu:
    """A TPU.

    Attributes:
      kind: its name, such as ``"TPU7x"``.
      divides: whether the compiler divides arrays among several. It cannot be told how to divide a
        kernel: libtpu knows no ``custom_partitioning``.
    """

    kind: str
    divides: bool = False

    @property
    def multiplies_f8(self) -> bool:
        """Whether its matrix units take f8: from TPU7x on. Earlier ones convert it to bf16."""
        return re.match(r"TPU v\d", self.kind) is None


def current_tpu(*arrays: Any) -> Tpu | None:
    """The TPU that JAX is tracing for; None if it is another device, or unknown.

    It is the one that an abstract mesh describes, see `current_gpu`, or that is in the types of
    `arrays`, whose mesh knows its devices, or else the default device.
    """
    here = jax.sharding.get_abstract_mesh()
    for mesh in (here, *(jax.typeof(x).sharding.mesh for x in arrays)):
        described = getattr(mesh, "abstract_device", None)
        if described is not None:
            if described.platform != "tpu":
                return None
            manual = set(here.manual_axes)
            sizes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
            divides = any(size > 1 and name not in manual for name, size in sizes)
            return Tpu(described.device_kind, divides)
    if jax.default_backend() != "tpu":
        return None
    # Without a mesh in the types there may be one all the same.
    return Tpu(jax.devices()[0].device_kind, jax.device_count() > 1)


def device_kind() -> str:
    """The name of the device that JAX traces for, such as ``"NVIDIA H200"``; see `current_gpu`."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.devices()[0].device_kind if described is None else described.device_kind


def has_explicit_axes() -> bool:
    """Whether the mesh in effect has axes that are part of the types of arrays."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def has_only_explicit_axes() -> bool:
    """Whether those are all along which anything is divided."""
    mesh = jax.sharding.get_abstract_mesh()
    types = [t for n, t in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if n > 1]
    return all(each == AxisType.Explicit for each in types)


def _capability_of(kind: str) -> tuple[int, int] | None:
    """From a device of this kind, or if there is none here, from its name."""
    if jax.default_backend() == "gpu":
        for device in jax.devices():
            said = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
            if said is not None and device.device_kind == kind:
                return int(said[1]), int(said[2])
    for pattern, capability in _CAPABILITIES.items():
        if re.search(pattern, kind):
            return capability
    return None


Kind = Literal["path", "product", "layer", "recipe", "ahead", "reason", "cuda", "tpu"]

_context = jax.make_user_context(None)


def explaining() -> AbstractContextManager[object]:
    """A context in which notes are written. Programs traced before are not reused in it."""
    return _context(object())


def is_explaining() -> bool:
    """Whether a program is traced for a report."""
    return _context.value is not None


def note(kind: Kind, text: str) -> AbstractContextManager[object]:
    """A context whose equations carry a note."""
    if not is_explaining() or not text:
        return contextlib.nullcontext()
    return jax.named_scope(f"{kind}={text.replace(';', ',')};")


def notes_of(name_stack: str) -> dict[str, str]:
    """The innermost note of each kind."""
    found: dict[str, str] = {}
    kinds = "|".join(get_args(Kind))
    for kind, text in re.findall(rf"\b({kinds})=(.*?);", name_stack):
        if kind == "path" and text != found.get("path"):  # what follows is about this layer
            found = {}
        found[kind] = text
    return found


def product_path(notes: dict[str, str]) -> str:
    """The path of a layer, and of the product in it if it may have several; "" without a layer.

    Layers of Flax call their only product ``DotGeneral_0``.
    """
    inside = re.sub(r"(^|/)(DotGeneral|ConvGeneralDilated)_0$", "", notes.get("product", ""))
    return "/".join(filter(None, [notes.get("path", ""), inside]))
