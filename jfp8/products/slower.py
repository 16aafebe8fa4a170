"""Find the matmuls that a model of time expects to be slower in FP8: ``exempt="slower"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jfp8.matmul.planner import Work, planner_of
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.devices import Gpu
from jfp8.tracing.interpreter import CALLS, equations


def why_slower(gpu: Gpu, recipe: Recipe, plain: Callable[[], jax.Array], lhs: Any, rhs: Any) -> str:
    """Explain why FP8 is slower on `gpu` than the layer's ``plain()``; ``""`` if it is not."""
    closed = jax.make_jaxpr(plain)()
    sizes = [math.prod(x.shape) for x in (lhs, rhs, closed.out_avals[0])]
    batches = list(_batches_in(closed.jaxpr))
    batch = batches[0] if batches else 1
    # Convolutions by 1x1 kernels are matmuls.
    in_f8 = bool(batches) or math.prod(rhs.shape[:-2]) == 1
    # Each of the sizes m, n and k is in two of the arrays, and the batch size in all three.
    multiplications = math.sqrt(math.prod(sizes) / max(batch, 1))
    work, quantizers = Work(multiplications, sum(sizes)), recipe.resolved().quantizers()
    gain = planner_of(gpu).expected_gain(work, quantizers, in_f8)
    if gain >= 1:
        return ""
    return f"exempt: 'slower' ({recipe.name} has {gain:.2f} of the speed of bf16 on {gpu.kind})"


def _batches_in(jaxpr: Any) -> Iterator[int]:
    """Yield the batch size of each ``dot_general`` of a traced function, also in a ``jit``."""
    for eqn, _, _ in equations(jaxpr, enters=lambda eqn, _: eqn.primitive.name in CALLS):
        if eqn.primitive.name == "dot_general":
            _, (batched, _) = eqn.params["dimension_numbers"]
            yield math.prod(eqn.invars[0].aval.shape[d] for d in batched)
