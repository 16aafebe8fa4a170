"""The device that a program is traced for, and the mesh along which it divides arrays.

The device is known while JAX traces: an abstract mesh describes it, the types of arrays or arrays
themselves name it, or it is the default one. Only a program that is exported for several platforms
has none: see `for_platforms`.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jfp8.tracing.backends import ALLOWED
from jfp8.tracing.devices import Chip, Device, Gpu, Several, Tpu, capability_of

# The door to the chips: the subclass of `jfp8.matmul.planner.Planner` for each platform of JAX. The
# core, which computes for all others, imports none of them before a program is traced for one.
PLANNERS = {
    "cuda": "jfp8.kernels.cuda.Cuda",
    "rocm": "jfp8.kernels.platforms.Platforms",
    "tpu": "jfp8.kernels.tpu.dot.Mosaic",
    "several": "jfp8.kernels.platforms.Platforms",
}


_lowered_for = jax.make_user_context(None)


def for_platforms(*platforms: str) -> AbstractContextManager[object]:
    """Return a context in which programs are traced for other platforms than this host's.

    For ``jax.export``, which tells the platform only after the program is traced::

        with jfp8.for_platforms("cpu", "cuda"):
            exported = jax.export.export(jax.jit(f), platforms=["cpu", "cuda"])(x)

    Args:
      *platforms: any of ``"cpu"``, ``"cuda"``, ``"rocm"`` and ``"tpu"``.

    Returns:
      A context. For several platforms each FP8 matmul is written once for each, behind a switch.

    Raises:
      ValueError: no platform, or an unknown one.

    >>> import jfp8
    >>> with jfp8.for_platforms("cuda"):
    ...     pass
    """
    known = ("cpu", *sorted(PLANNERS.keys() - {"several"}))
    if not platforms or not set(platforms) <= set(known):
        raise ValueError(f"for_platforms takes any of {known}, as strings; got {platforms}.")
    return _lowered_for(tuple(sorted(set(platforms))))


def current_device(*arrays: Any) -> Device:
    """Return the device that JAX is tracing for; None if the reference computes everything.

    That is on a CPU, on a device of no known kind, and inside ``backends("emulate")``.

    The first of these that there is: the platforms of `for_platforms`; the device that the abstract
    mesh in effect describes, or the mesh in the types of `arrays`; the device that holds `arrays`;
    ``jax.default_device``; the default backend. An abstract mesh describes a device for programs
    that are compiled on a machine without one::

        gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), (), abstract_device=gpu)
        ):
            ...
    """
    if ALLOWED.value == {"emulate"}:
        return None
    here = jax.sharding.get_abstract_mesh()
    if (platforms := _lowered_for.value) is not None:
        return _device_of_platforms(platforms)
    for mesh in (here, *(jax.typeof(x).sharding.mesh for x in arrays)):
        described = getattr(mesh, "abstract_device", None)
        if described is not None:
            return _described(described.platform, described.device_kind, here, mesh)
    platform = platform_of(arrays)
    if platform == "gpu":
        kind = jax.devices("gpu")[0].device_kind
        return _described("gpu", kind, here, here)
    if platform == "tpu":
        # Without a mesh in the types there may be one all the same.
        return Tpu(jax.devices("tpu")[0].device_kind, jax.device_count("tpu") > 1)
    return Chip(platform) if platform in PLANNERS else None


def _device_of_platforms(platforms: tuple[str, ...]) -> Device:
    if len(platforms) > 1:
        return Several(platforms)
    (name,) = platforms
    if name in ("cuda", "rocm"):
        return Gpu("", None, platform=name)
    by_name: dict[str, Device] = {"cpu": None, "tpu": Tpu("TPU")}
    return by_name.get(name, Chip(name))


def _described(platform: str, kind: str, here: AbstractMesh, mesh: Any) -> Device:
    if platform == "tpu":
        manual = set(here.manual_axes)
        sizes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
        return Tpu(kind, any(size > 1 and name not in manual for name, size in sizes))
    if platform != "gpu":
        return Chip(platform, kind) if platform in PLANNERS else None
    capability = capability_of(kind)
    is_amd = capability is None and re.search(r"AMD|Radeon|Instinct|gfx\d|MI\d{3}", kind)
    kinds = {kind for n, kind in zip(here.axis_sizes, here.axis_types, strict=True) if n > 1}
    partly_manual = AxisType.Manual in kinds and len(kinds) > 1
    return Gpu(kind, capability, partly_manual, "rocm" if is_amd else "cuda")


def platform_of(arrays: Any) -> str:
    """Return JAX's name of the platform that holds `arrays`, or of the default device."""
    for x in arrays:
        while isinstance(x, jax.core.Tracer):  # wraps values outside `jit`
            x = getattr(x, "primal", getattr(x, "val", None))
        if isinstance(x, jax.Array) and getattr(x, "committed", False):
            return next(iter(x.devices())).platform
    default = jax.config.jax_default_device  # pyrefly: ignore
    if default is not None:
        return default if isinstance(default, str) else default.platform
    return jax.default_backend()


def current_gpu(*arrays: Any) -> Gpu | None:
    """Return the GPU that JAX is tracing for; None if it is another device."""
    device = current_device(*arrays)
    return device if isinstance(device, Gpu) else None


def current_tpu(*arrays: Any) -> Tpu | None:
    """Return the TPU that JAX is tracing for; None if it is another device."""
    device = current_device(*arrays)
    return device if isinstance(device, Tpu) else None


# Meshes whose axes are part of the types of arrays (``AxisType.Explicit``).


def explicit_mesh(*trees: Any) -> AbstractMesh | None:
    """Return the mesh in effect if it has explicit axes, or else one that arrays name, or None.

    ``jax.jit`` compiles for a mesh that only the types of arrays name. Without it in effect JAX
    would ask for the layout of sums in the backward pass.
    """
    here = jax.sharding.get_abstract_mesh()
    if not here.empty:
        return here if AxisType.Explicit in here.axis_types else None
    for x in jax.tree.leaves(trees):
        sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
        if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
            return sharding.mesh
    return None
