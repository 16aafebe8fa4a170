"""Programs for devices that are not here."""

import importlib
import pkgutil
import sys

import jax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jfp8.kernels

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2 or later"
)


def traced_for(kind="NVIDIA H200", multiprocessors=132):
    """Return a context that traces for a GPU of this kind."""
    gpu = AbstractDevice(device_kind=kind, num_cores=multiprocessors, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


def lowered_for(kind, f, *args):
    """Return the StableHLO of `f` for a GPU of this kind."""
    with traced_for(kind):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def pretend(monkeypatch, device):
    """Trace for `device` from now on; kernels are imported first, so that it is true of all."""
    for module in pkgutil.walk_packages(jfp8.kernels.__path__, "jfp8.kernels."):
        importlib.import_module(module.name)
    found = {
        "current_device": lambda *arrays: device,
        "on_platform": lambda platform, kernel, elsewhere, *operands: kernel(*operands),
    }
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("jfp8.")]
    for name, function in found.items():
        for module in modules:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)


def interpret_tpu_kernels(monkeypatch):
    """Run Pallas kernels for TPUs on this machine. Clear JAX's caches when the test is over."""
    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **kw: call(*a, **kw | {"interpret": True}))
    for module in ("on_platform", "tpu.matmul", "tpu.dot"):
        monkeypatch.setattr(f"jfp8.kernels.{module}.kernels_are_interpreted", lambda: True)
