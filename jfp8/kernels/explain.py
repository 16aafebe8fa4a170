"""Notes for a report on a CPU: the backend of an NVIDIA GPU for each matmul of the reference."""

from __future__ import annotations

import jax

from jfp8.kernels.backend import facts_of
from jfp8.kernels.cuda_backends import choose
from jfp8.matmul.explained import explained
from jfp8.matmul.planner import Planner
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray


class Explained(Planner):
    """Compute by the reference, and note the backend of a matmul."""

    def multiply(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        backend = spec.implementation or str(choose(facts_of(lhs, rhs, spec), None))
        with explained(backend, lhs, rhs):
            return super().multiply(lhs, rhs, spec)
