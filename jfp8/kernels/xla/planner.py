"""The planner for ``implementation="xla"`` and ``"bf16"``: dots by XLA, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jfp8.kernels import cuda
from jfp8.kernels.backend import check_not_refused, facts_of
from jfp8.kernels.xla import bf16_dot, f8_dot
from jfp8.kernels.xla.grouped import GroupedByXla
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.ragged.dot import GroupedPlan, GroupedSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the matmul of two operands by the named backend."""
    backend = bf16_dot.BACKEND if spec.implementation == "bf16" else f8_dot.BACKEND
    facts = facts_of(lhs, rhs, spec)
    if backend is bf16_dot.BACKEND and facts.accumulation == "f32_every_128":
        facts = replace(facts, accumulation="f32")
    check_not_refused(backend.name, backend.why_not(facts, spec.device))
    with note("cuda", backend.name):
        return backend.multiply(lhs, rhs, spec)


def plan(spec: Any) -> Any:
    """Return the operation for `spec`; None to use the reference."""
    if isinstance(spec.options.device, Gpu):
        return cuda.plan(spec)
    if isinstance(spec, GroupedSpec):
        return GroupedPlan(spec.reference().height, GroupedByXla)
    return None
