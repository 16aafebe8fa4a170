"""The planner for ``implementation="xla"``: f8 dots by XLA, on any device."""

from __future__ import annotations

from typing import Any

import jax

from jfp8.kernels import cuda
from jfp8.kernels.backend import check_not_refused, facts_of
from jfp8.kernels.xla import f8_dot
from jfp8.kernels.xla.grouped import GroupedByXla
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.ragged.dot import GroupedPlan, GroupedSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the product of two operands as f8 arrays.

    Raises:
      NotImplementedError: XLA has no such product.
    """
    reason = f8_dot.BACKEND.why_not(facts_of(lhs, rhs, spec), spec.device)
    check_not_refused("xla", reason)
    with note("cuda", "xla"):
        return f8_dot.f8_by_xla(lhs, rhs, spec)


def plan(spec: Any) -> Any:
    """Return what computes the operation that `spec` describes; None: the reference."""
    if isinstance(spec.options.device, Gpu):
        return cuda.plan(spec)
    if isinstance(spec, GroupedSpec):
        return GroupedPlan(spec.reference().height, GroupedByXla)
    return None
