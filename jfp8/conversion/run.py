"""Compute a program as planned: its result, and the amaxes of the operands of its matmuls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.conversion.flops import expected_gain
from jfp8.conversion.plan import Named, Plan, PlannedMatmul
from jfp8.conversion.program import Program
from jfp8.conversion.weight_matmul import Place, WeightMatmul
from jfp8.conversion.weight_walk import Walk
from jfp8.layers.options import kernel_dtype
from jfp8.products.conv import convolutions
from jfp8.products.dot_general import observed_dot_general
from jfp8.products.operation import Observed, Options, State
from jfp8.products.ragged.dot import observed_ragged_dot
from jfp8.products.shared_input import SharedInput
from jfp8.recipes import in_effect as region
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Gpu
from jfp8.tracing.interpreter import Emitted, arrays
from jfp8.tracing.notes import layer_noted, note

States = Mapping[str, State]
"""The state of each matmul by its name, stacked as the loops around it are."""

Amaxes = dict[str, Observed]
"""The amaxes of each matmul with histories: f32[*loops] of lhs and of rhs, 0 for nothing."""


def run_planned(
    program: Program,
    plan: Plan,
    states: States,
    *,
    key: jax.Array | None = None,
    if_lacking: str | None = None,
    if_lost: str | None = None,
) -> tuple[Any, Amaxes]:
    """Compute `program` with FP8 matmuls.

    Args:
      key: for recipes that round stochastically.
      if_lacking: a warning if matmuls are trained that lack the histories of their recipe.
      if_lost: a warning if those that have histories are trained.
    """
    if region.is_overridden():  # states belong to other recipes
        states, if_lacking = {}, None
    planned = {n: each for n, each in plan.by_name.items() if each.decision.recipe is not None}
    loops: dict[str, set[Place]] = {}  # by the name of a state, all scans that slice it
    for each in plan.matmuls.values():
        loops.setdefault(each.named.name, set()).update(each.loops)
    feeds = {name: (states.get(name, State()), _stored(program, p)) for name, p in planned.items()}
    compute = partial(_computed, plan, key, (if_lost, if_lacking))
    walk = Walk(compute, loops, plan.of_activations, plan.computed_again)
    results, emitted = program.run(walk, program.arguments, feeds)
    amaxes: Amaxes = {}
    for name, seen in emitted:
        lhs, rhs = seen[..., 0], seen[..., 1]
        if name in amaxes:  # one weight in several matmuls
            lhs, rhs = map(jnp.maximum, amaxes[name], (lhs, rhs))
        amaxes[name] = Observed(lhs, rhs)
    return program.together(arrays(results)), amaxes


def _stored(program: Program, planned: PlannedMatmul) -> ScaledArray | None:
    """Return the weight as it is kept in FP8, if it is, and each loop can take its part."""
    stored, stacks = program.stored.get(planned.matmul.source.path), planned.stacks
    whole = all(x.shape[: len(stacks)] == stacks for x in jax.tree.leaves(stored))
    return stored if whole else None


def _computed(
    plan: Plan, key: Any, if_trained: tuple[str | None, ...], matmul: WeightMatmul
) -> tuple[jax.Array, Emitted]:
    planned = plan.matmuls[matmul.key]
    recipe, reason = planned.decision.recipe, planned.decision.reason
    gpu = planned.named.selection.unless_slower_on
    if recipe is not None and gpu is not None:
        reason = _why_slower(gpu, recipe, matmul)
    named = planned.named
    if recipe is None or reason:
        with _noted(named, reason):
            return matmul.plain(), []
    state, stored = matmul.at.feeds[named.name]
    shared = None
    if matmul.data is not None and matmul.data.key is not None:  # layers with one input
        shared = matmul.at.memo.setdefault(matmul.data.key, SharedInput())
    state = state._replace(key=key, shared=shared)
    lacks = planned.has_state and state.histories is None
    with (
        _noted(named, ""),
        note("recipe", f"{recipe.name}, no histories" if lacks else recipe.name),
        note("ahead", "later positions" if planned.looks_ahead else ""),
    ):
        how = getattr(named.layer, "implementation", None)
        told = if_trained[lacks] if planned.has_state else None
        told = told or plan.if_slower.get(matmul.key)
        options = Options(recipe, how, if_trained=told)
        y, observed = _in_fp8(matmul, options, state, stored, named.stacks)
    if state.histories is None:
        return y, []
    return y, [(named.name, lax.stop_gradient(jnp.stack(observed, -1)))]


def _why_slower(gpu: Gpu, recipe: Recipe, matmul: WeightMatmul) -> str:
    """Explain why FP8 should be slower on `gpu` than the matmul as it is; "" if it is not."""
    gain = expected_gain(matmul.eqn, recipe, gpu)
    if gain >= 1:
        return ""
    return f"exempt: 'slower' ({recipe.name} has {gain:.2f} of the speed of bf16 on {gpu.kind})"


@contextmanager
def _noted(named: Named, reason: str) -> Iterator[None]:
    path = named.path if named.place is None else named.place
    with layer_noted(path, named.kind, reason), note("product", named.product):
        yield


def _in_fp8(
    matmul: WeightMatmul, options: Options, state: State, stored: Any, stacks: int
) -> tuple[jax.Array, Observed]:
    source, params = matmul.source, matmul.eqn.params
    weight = matmul.weight if source.in_f32 is None else source.in_f32
    if stored is not None and source.is_whole:
        weight = stored
    options = replace(options, rhs_dtype=kernel_dtype(matmul.x, weight, casts_kernel=True))
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
        dot = partial(observed_dot_general, options=options, **how, **sharding)
        y, observed = over_stacks(dot, stacks)(x, w, numbers, state=state)
        seen.append(observed)
        return y

    return matmul.by(dot_general, weight), seen[0]


def over_stacks(dot_general: Callable[..., Any], stacks: int) -> Callable[..., Any]:
    """Return `dot_general` over the first `stacks` axes of rhs, each entry with its own state.

    It takes ``(lhs, rhs, dimension_numbers, state=)``, the state stacked along leading axes.
    """
    if not stacks:
        return dot_general

    def stacked(x: jax.Array, w: Any, numbers: Any, *, state: State) -> Any:
        (first, second), (first_batch, second_batch) = numbers
        x_axis, y_axis = None, x.ndim - len(first)
        if 0 in second_batch:
            y_axis = list(second_batch).index(0)
            x_axis = first_batch[y_axis]
        less = lambda dims, axis: tuple(d - (d > axis) for d in dims if d != axis)
        inner = (
            (first if x_axis is None else less(first, x_axis), less(second, 0)),
            (first_batch if x_axis is None else less(first_batch, x_axis), less(second_batch, 0)),
        )
        one = over_stacks(dot_general, stacks - 1)
        run = lambda x, w, state: one(x, w, inner, state=state)
        # A key serves all layers.
        axis: Any = lambda x: None if x is None else 0
        of_state = State(axis(state.histories), axis(state.sink))
        return jax.vmap(run, in_axes=(x_axis, 0, of_state), out_axes=(y_axis, 0))(x, w, state)

    return stacked
