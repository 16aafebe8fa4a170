"""The planner for a program that is lowered for several platforms: one switch for each product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax import lax

from jfp8.kernels.backend import facts_of
from jfp8.kernels.cuda_backends import choose
from jfp8.kernels.rocm import (
    grouped_in_high_precision,
    quantizes_by_kernels,
    residual_sum,
)
from jfp8.kernels.rocm import (
    multiply as multiply_on_rocm,
)
from jfp8.kernels.tpu.backends import choose_on_tpu
from jfp8.matmul.emulate import emulated
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.device import Gpu

__all__ = ["grouped_in_high_precision", "multiply", "plan", "quantizes_by_kernels", "residual_sum"]


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the product of two operands, as each platform computes it.

    Nothing is known of the device but its platform: XLA multiplies, and no kernel does.
    """
    facts = facts_of(lhs, rhs, spec)
    on_cuda, on_tpu = choose(facts, None).backend, choose_on_tpu(facts, None).backend
    branches = {
        "cuda": lambda a, b: on_cuda.multiply(a, b, replace(spec, device=Gpu("", None))),
        "rocm": lambda a, b: multiply_on_rocm(a, b, spec),
        "tpu": lambda a, b: on_tpu.multiply(a, b, spec),
    }
    return lax.platform_dependent(lhs, rhs, default=lambda a, b: emulated(a, b, spec), **branches)


def plan(spec: Any) -> None:
    """Return None: all operations are those of the core, so that all platforms save the same."""
    del spec
