"""Which GPU a program is traced for, described by an abstract mesh where there is none."""

import contextlib
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from jfp8.kernels.partitioning import why_not_divided
from jfp8.tracing.device import current_gpu
from jfp8.tracing.devices import Gpu


def described(kind, platform="gpu", sizes=(), names=(), types=None):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform=platform)
    return use_abstract_mesh(AbstractMesh(sizes, names, axis_types=types, abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "capability", "hopper", "f8"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), True, True),
        ("NVIDIA B200", (10, 0), False, True),
        ("NVIDIA GB300", (10, 3), False, True),
        ("NVIDIA L40S", (8, 9), False, True),
        ("NVIDIA A100-SXM4-80GB", (8, 0), False, False),
        ("NVIDIA H2000", None, False, True),  # not an H200: nothing is known about it
    ],
)
def test_capability_by_name(kind, capability, hopper, f8):
    with described(kind):
        assert current_gpu() == Gpu(kind, capability)
        assert (current_gpu().hopper, current_gpu().multiplies_f8) == (hopper, f8)
    for kind in ("AMD", "Radeon RX 7900 XTX", "Instinct", "gfx942", "MI300X"):
        with described(kind):
            assert current_gpu().platform == "rocm"
    with described("TPU v5", platform="tpu"):
        assert current_gpu() is None
    assert current_gpu() is None  # this machine has none


@pytest.mark.parametrize(
    ("sizes", "types", "partly"),
    [
        ((1,), (AxisType.Auto,), False),
        ((8,), (AxisType.Auto,), False),
        ((8,), (AxisType.Manual,), False),
        ((8, 4), (AxisType.Manual, AxisType.Auto), True),
        ((8, 1), (AxisType.Manual, AxisType.Auto), False),
    ],
)
def test_a_mesh_that_is_partly_manual(sizes, types, partly):
    with described("NVIDIA H200", sizes=sizes, names=("x", "y")[: len(sizes)], types=types):
        assert current_gpu().partly_manual is partly
        told = pytest.warns(UserWarning, match="Make all axes manual, or none")
        with told if partly else contextlib.nullcontext():
            assert (why_not_divided(current_gpu()) is not None) is partly


def test_inside_of_a_shard_map_over_one_axis_of_two():
    seen = []

    def f(x):
        seen.append(current_gpu().partly_manual)
        return x

    two = {"sizes": (4, 2), "names": ("x", "y"), "types": (AxisType.Auto,) * 2}
    with described("NVIDIA H200", **two):
        spec = jax.sharding.PartitionSpec("x")
        for axes in ({"x"}, {"x", "y"}):
            mapped = jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes)
            jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), "float32"))
    assert seen == [True, False]


def test_a_device_at_hand_says_its_capability_itself(monkeypatch):
    """Also one that nobody has heard of; of another kind than is asked for it tells nothing."""
    device = SimpleNamespace(device_kind="NVIDIA X1", compute_capability="12.1")
    unsure = SimpleNamespace(device_kind="NVIDIA X1", compute_capability=None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [unsure, device])
    for kind, capability in (("NVIDIA X1", (12, 1)), ("NVIDIA X2", None), ("NVIDIA H200", (9, 0))):
        with described(kind):
            assert current_gpu().capability == capability
