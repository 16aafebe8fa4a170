"""The planner for AMD GPUs, and for programs that are lowered for several platforms.

The compiler for AMD GPUs accepts f8 arrays. A program for several platforms has one switch for each
matmul. All operations use the reference, so that all platforms save the same.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jfp8.kernels.backend import facts_of
from jfp8.kernels.tpu.backend import multiply as multiply_on_tpu
from jfp8.kernels.xla import f8_dot
from jfp8.kernels.xla.bf16_dot import in_bf16
from jfp8.matmul.emulate import emulated
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Several
from jfp8.tracing.notes import note


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the matmul of two operands, as each platform computes it.

    In a program for several, on CUDA in bf16, which is exact for stored values: JAX lowers no FP8
    matmul that names its algorithm there.
    """
    if not isinstance(spec.device, Several):
        return _on_rocm(lhs, rhs, spec)
    branches = {
        "cuda": lambda a, b: in_bf16(a, b, spec),
        "rocm": lambda a, b: _on_rocm(a, b, spec),
        "tpu": lambda a, b: multiply_on_tpu(a, b, spec),
    }
    return lax.platform_dependent(lhs, rhs, default=lambda a, b: emulated(a, b, spec), **branches)


def _on_rocm(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the matmul of two operands, as f8 arrays if XLA supports their scales."""
    refused = f8_dot.BACKEND.why_not(facts_of(lhs, rhs, spec), None)
    kind = getattr(spec.device, "kind", "")
    why = f": {kind} has FP8 tensor cores for fnuz formats alone" if "MI300" in kind else ""
    with note("cuda", f"{'emulate' if refused else 'xla'}{why}"):
        return (emulated if refused else f8_dot.f8_by_xla)(lhs, rhs, spec)


def plan(spec: Any) -> None:
    """Return None, because all operations use the reference."""
    del spec
