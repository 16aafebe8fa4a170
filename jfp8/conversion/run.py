"""Compute a program as planned: its result, and the amaxes of the operands of its matmuls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.conversion.plan import Plan, PlannedMatmul
from jfp8.conversion.program import Program
from jfp8.conversion.weight_matmul import WeightMatmul
from jfp8.conversion.weight_walk import Walk
from jfp8.layers.options import kernel_dtype
from jfp8.products.conv import convolutions
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import Observed, Options, State
from jfp8.products.ragged.dot import observed_ragged_dot
from jfp8.products.slower import why_slower
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.interpreter import Emitted
from jfp8.tracing.notes import layer_noted, note

States = Mapping[str, State]
"""The state of each matmul by its name, stacked as the loops around it are."""

Amaxes = dict[str, Observed]
"""What was observed of each matmul with histories: f32[*loops] of lhs and of rhs, 0 for nothing."""


def run_planned(
    program: Program, plan: Plan, states: States, key: jax.Array | None = None
) -> tuple[Any, Amaxes]:
    """Compute `program` with FP8 matmuls; `key` is for recipes that round stochastically."""
    planned = {n: each for n, each in plan.by_name.items() if each.decision.recipe is not None}
    loops = {name: [place for place, _ in each.loops] for name, each in planned.items()}
    feeds = {name: (states.get(name, State()), _stored(program, p)) for name, p in planned.items()}
    walk = Walk(functools.partial(_computed, plan, key), loops, plan.selection.attention)
    results, emitted = program.run(walk, program.arguments, feeds)
    amaxes: Amaxes = {}
    for name, seen in emitted:
        lhs, rhs = seen[..., 0], seen[..., 1]
        if name in amaxes:  # one weight in several matmuls
            lhs, rhs = map(jnp.maximum, amaxes[name], (lhs, rhs))
        amaxes[name] = Observed(lhs, rhs)
    return program.together(results), amaxes


def _stored(program: Program, planned: PlannedMatmul) -> ScaledArray | None:
    """Return the weight as it is kept in FP8, if it is, and each loop can take its part."""
    stored, lengths = program.stored.get(planned.weight), tuple(n for _, n in planned.loops)
    parts = jax.tree.leaves(stored)
    return stored if all(x.shape[: len(lengths)] == lengths for x in parts) else None


def _computed(
    plan: Plan, key: Any, matmul: WeightMatmul
) -> tuple[jax.Array, Emitted]:
    planned = plan.of(matmul)
    recipe, reason = planned.decision.recipe, planned.decision.reason
    gpu = plan.selection.unless_slower_on
    if recipe is not None and gpu is not None:
        reason = why_slower(gpu, recipe, matmul.plain, matmul.x, matmul.weight)
    named = planned.named
    if recipe is None or reason:
        with layer_noted(named.path, named.kind, reason):
            return matmul.plain(), []
    state, stored = matmul.at.feeds[named.name]
    state = state._replace(key=key)
    lacks = planned.has_state and state.histories is None
    with (
        layer_noted(named.path, named.kind, ""),
        note("recipe", f"{recipe.name}, no histories" if lacks else recipe.name),
        note("ahead", "later positions" if planned.looks_ahead else ""),
    ):
        y, observed = _in_fp8(matmul, recipe, state, stored)
    if state.histories is None:
        return y, []
    return y, [(named.name, jnp.stack(observed))]


def _in_fp8(
    matmul: WeightMatmul, recipe: Recipe, state: State, stored: Any
) -> tuple[jax.Array, Observed]:
    source, params = matmul.source, matmul.eqn.params
    weight = matmul.weight if source.in_f32 is None else source.in_f32
    if stored is not None and source.is_whole:
        weight = stored
    options = Options(recipe, None, kernel_dtype(matmul.x, weight, casts_kernel=True))
    how: dict[str, Any] = {"preferred_element_type": matmul.eqn.outvars[0].aval.dtype}
    if matmul.primitive == "ragged_dot_general":
        return observed_ragged_dot(matmul.x, weight, matmul.others[0], options, state, **how)
    if matmul.primitive == "conv_general_dilated":
        names = inspect.signature(convolutions).parameters
        kept = {name: params[name] for name in names if name in params}
        quantized, _ = convolutions(**kept | how)
        return quantized(matmul.x, weight, options=options, state=state)
    seen: list[Observed] = []

    def dot_general(x: Any, w: Any, numbers: Any) -> jax.Array:
        sharding = {"out_sharding": params.get("out_sharding")}
        y, observed = observed_dot_general(x, w, numbers, options, state, **how, **sharding)
        seen.append(observed)
        return y

    return matmul.by(dot_general, weight), seen[0]
