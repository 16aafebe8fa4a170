"""The planner for AMD GPUs, and for programs that are lowered for several platforms.

The compiler for AMD GPUs accepts f8 arrays. A program for several platforms has one switch for each
matmul. All operations use the reference, so that all platforms save the same.
"""

from __future__ import annotations

import jax
from jax import lax

from jfp8.kernels.backend import facts_of
from jfp8.kernels.tpu.backend import multiply as multiply_on_tpu
from jfp8.kernels.xla import f8_dot
from jfp8.kernels.xla.bf16_dot import in_bf16
from jfp8.matmul.planner import Planner
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Several
from jfp8.tracing.notes import note


class Platforms(Planner):
    """Multiply as each platform does.

    In a program for several, on CUDA in bf16, which is exact for stored values: JAX lowers no FP8
    matmul that names its algorithm there.
    """

    def multiply(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        if not isinstance(spec.device, Several):
            return self._on_rocm(lhs, rhs, spec)
        emulate = super().multiply
        branches = {
            "cuda": lambda a, b: in_bf16(a, b, spec),
            "rocm": lambda a, b: self._on_rocm(a, b, spec),
            "tpu": lambda a, b: multiply_on_tpu(a, b, spec),
        }
        return lax.platform_dependent(
            lhs, rhs, default=lambda a, b: emulate(a, b, spec), **branches
        )

    def _on_rocm(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        """Multiply f8 arrays if XLA supports their scales."""
        refused = f8_dot.BACKEND.why_not(facts_of(lhs, rhs, spec), None)
        kind = getattr(spec.device, "kind", "")
        why = f": {kind} has FP8 tensor cores for fnuz formats alone" if "MI300" in kind else ""
        with note("cuda", f"{'emulate' if refused else 'xla'}{why}"):
            return (super().multiply if refused else f8_dot.f8_by_xla)(lhs, rhs, spec)
