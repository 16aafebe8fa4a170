"""The planner for AMD GPUs: matmuls by XLA, whose compiler accepts f8 arrays."""

from __future__ import annotations

from typing import Any

import jax

from jfp8.kernels.backend import facts_of
from jfp8.kernels.xla import f8_dot
from jfp8.matmul.emulate import emulated
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.notes import note


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the matmul of two operands, as f8 arrays if XLA supports their scales."""
    refused = f8_dot.BACKEND.why_not(facts_of(lhs, rhs, spec), None)
    kind = getattr(spec.device, "kind", "")
    why = f": {kind} has FP8 tensor cores for fnuz formats alone" if "MI300" in kind else ""
    with note("cuda", f"{'emulate' if refused else 'xla'}{why}"):
        return (emulated if refused else f8_dot.f8_by_xla)(lhs, rhs, spec)


def plan(spec: Any) -> None:
    """Return None, because all operations use the reference."""
    del spec
