"""The planner for a program that is lowered for several platforms: one switch for each product."""

from __future__ import annotations

import jax
from jax import lax

from jfp8.kernels.rocm import multiply as multiply_on_rocm
from jfp8.kernels.rocm import plan as plan  # so that all platforms save the same
from jfp8.kernels.tpu.backend import multiply as multiply_on_tpu
from jfp8.kernels.xla.bf16_dot import in_bf16
from jfp8.matmul.emulate import emulated
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the product of two operands, as each platform computes it.

    On CUDA in bf16, which is exact for stored values: JAX lowers no FP8 product that names its
    algorithm in a program for several platforms.
    """
    branches = {
        "cuda": lambda a, b: in_bf16(a, b, spec),
        "rocm": lambda a, b: multiply_on_rocm(a, b, spec),
        "tpu": lambda a, b: multiply_on_tpu(a, b, spec),
    }
    return lax.platform_dependent(lhs, rhs, default=lambda a, b: emulated(a, b, spec), **branches)
