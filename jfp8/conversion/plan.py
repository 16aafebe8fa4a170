"""Decide which matmuls of a program become FP8, and which state they keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.conversion.causal import masks_later_positions
from jfp8.conversion.product_rows import looks_ahead_message
from jfp8.conversion.program import Program
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Decision, Edge, Selection
from jfp8.conversion.weight_matmul import INPUTS, Place, WeightMatmul
from jfp8.conversion.weight_walk import Walk, origins_of
from jfp8.products.operation import State
from jfp8.recipes import in_effect as region
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.history import state_shapes
from jfp8.scaling.state_in_gradients import init_overwritten, read_overwritten
from jfp8.tracing.caller import user_level
from jfp8.tracing.interpreter import notes_in


class Named(NamedTuple):
    """Say what a door calls a matmul.

    Attributes:
      name: of its state, unique but for matmuls that share it.
      path: by which a user selects it.
      layer: what a user selects it by: a module, or the shape of the weight.
      kind: the type of the layer, for reports.
      place: the path of the layer for reports, if it is not `path`.
      product: the name of the matmul in the layer, if it has one.
      stacks: by so many axes of the weight ``vmap`` has stacked layers, each with its own state.
      stays: why it stays as it is, whatever is selected.
    """

    name: str
    path: str
    layer: Any
    kind: str
    place: str | None = None
    product: str = ""
    stacks: int = 0
    stays: str = ""


Namer = Callable[[WeightMatmul, int], Named]
"""Names a matmul; the number counts those of one weight, from 1."""


def nth_kind(kinds: dict[str, list[Any]], matmul: WeightMatmul) -> int:
    """Count the kinds of matmuls of one weight, from 1.

    All parts of a weight have one state, but not what sums over other dimensions of it. Weights
    that were joined have the state of the first.
    """
    kind = [length for _, length in matmul.source.loops], matmul.summed
    seen = kinds.setdefault(matmul.source.path.split("+")[0], [])
    seen += [] if kind in seen else [kind]
    return 1 + seen.index(kind)


@dataclass(frozen=True)
class PlannedMatmul:
    """Hold what becomes of a matmul."""

    named: Named
    weight: str  # its path
    decision: Decision
    loops: frozenset[Place]  # the places of scans that slice its state
    stacks: tuple[int, ...]  # the lengths of these, and the sizes of stacks of layers, see `Named`
    looks_ahead: bool = False

    @property
    def has_state(self) -> bool:
        """Return whether it keeps amax histories."""
        recipe = self.decision.recipe
        return recipe is not None and state_shapes(recipe) is not None

    def init_state(self, init: Callable[[Recipe], Any]) -> Any:
        """Return ``init(recipe)``, of zeros, stacked as the layers are."""
        assert self.decision.recipe is not None
        stacked = lambda x: jnp.zeros((*self.stacks, *x.shape), x.dtype)
        return jax.tree.map(stacked, init(self.decision.recipe))

    def init_overwritten(self) -> jax.Array:
        """Return an empty state as one array, whose gradient is its next value."""
        init: Any = lambda recipe: init_overwritten(recipe.init_state())
        return self.init_state(init)

    def read_overwritten(self, variable: jax.Array) -> State:
        """Return the histories and the sink in such an array."""
        recipe: Any = self.decision.recipe
        read = partial(read_overwritten, empty=recipe.init_state())
        for _ in self.stacks:
            read = jax.vmap(read)
        return State(*read(jnp.asarray(variable)))


@dataclass(frozen=True)
class Plan:
    """Hold what becomes of each matmul of a program, by its `WeightMatmul.key`.

    Attributes:
      ahead: the recipes of matmuls whose scales see later positions, where the model masks these.
      held: paths of weights that are multiplied by arrays which the function holds itself.
    """

    selection: Selection
    matmuls: dict[Any, PlannedMatmul]
    of_activations: bool = False
    ahead: dict[str, str] = field(default_factory=dict)
    held: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, PlannedMatmul]:
        """Return the matmuls by the names of their states; of several that share it, one in FP8."""
        in_order = sorted(self.matmuls.values(), key=lambda each: each.decision.recipe is not None)
        return {each.named.name: each for each in in_order}

    def of(self, matmul: WeightMatmul) -> PlannedMatmul:
        """Return what becomes of `matmul`."""
        return self.matmuls[matmul.key]

    def warn_ahead(self) -> None:
        """Warn if scales see later positions that the model masks."""
        if self.ahead:
            warnings.warn(looks_ahead_message(self.ahead), UserWarning, stacklevel=user_level())


def plan_of(
    program: Program,
    selection: Selection,
    name_of: Namer,
    *,
    of_loss: bool = False,
    of_activations: bool = False,
    is_whole: bool = True,
) -> Plan:
    """Find all matmuls of a program with weights, and decide which become FP8.

    Args:
      of_loss: the first array of the result is a loss.
      of_activations: also find matmuls of two activations.
      is_whole: the program computes a whole model, which has edges.
    """
    looked = _Looked(program, name_of)
    ends = looked.look(of_activations, of_loss)
    causal = masks_later_positions(program.closed, program.arguments)
    plan = Plan(selection, {}, of_activations, held=looked.held())
    for key, (named, matmul) in looked.seen.items():
        edge = looked.edge_of(key, ends) if is_whole else None
        decision = selection.decide(named.path, named.layer, edge)
        if named.stays:
            decision = Decision(None, named.stays)
        elif region.is_overridden() and decision.recipe is not None:
            decision = Decision(region.recipe_in_effect(decision.recipe, named.path))
        lengths = [length for _, length in matmul.source.loops]
        stacks = *lengths, *np.shape(matmul.weight)[: named.stacks]
        loops = frozenset(looked.loops[key])
        planned = PlannedMatmul(named, matmul.source.path, decision, loops, stacks)
        if decision.recipe is not None:
            kind = "conv" if matmul.primitive.startswith("conv") else "dense"
            ahead = not decision.recipe.is_causal(kind, history=planned.has_state)
            masks = causal or getattr(named.layer, "padding", None) == "CAUSAL"
            if masks and ahead:
                plan.ahead[named.path] = decision.recipe.name
            planned = replace(planned, looks_ahead=ahead)
        plan.matmuls[key] = planned
    return plan


@dataclass(frozen=True)
class _Looked:
    """Hold the matmuls that a look at a program has seen, by their keys."""

    program: Program
    name_of: Namer
    seen: dict[Any, tuple[Named, WeightMatmul]] = field(default_factory=dict)  # without arrays
    loops: dict[Any, set[Place]] = field(default_factory=dict)
    first: set[Any] = field(default_factory=set)  # into which no other's result goes
    low_rank: set[Any] = field(default_factory=set)
    of_constants: dict[str, bool] = field(default_factory=dict)  # by the paths of weights

    def look(self, of_activations: bool, of_loss: bool) -> frozenset[Any]:
        """See all matmuls of the program; return the keys of those that give a result of a model.

        No residual or other product comes after them, and no other matmul reads their results.
        Parameters that scale or shift these make no difference. In a loss targets, and terms of
        other layers, meet the result of the model.
        """
        walk = Walk(self.see, {}, of_activations, emits=False)
        results: list[Any] = []

        def look(*arguments: Any) -> None:
            results.extend(notes_in(self.program.run(walk, arguments, {})[0]))

        jax.eval_shape(look, *self.program.arguments)
        origins = [origins_of([x]) for x in results]
        ends = origins[:1] if of_loss else [each for each in origins if len(each) == 1]
        return frozenset().union(*ends) - walk.used - INPUTS

    def see(self, matmul: WeightMatmul) -> tuple[jax.Array, list[Any]]:
        """Note `matmul`, and compute it plainly."""
        key = matmul.key
        if key not in self.seen:
            nth = 1 + sum(known[-1] == key[-1] for known in self.seen)
            named = self.name_of(matmul, nth)
            self.seen[key] = named, matmul.abstract()
            if matmul.source.path:
                consts = self.program.closed.consts
                self.of_constants[matmul.source.path] = any(matmul.x is x for x in consts)
        self.loops.setdefault(key, set()).update(place for place, _ in matmul.source.loops)
        if matmul.data is None or matmul.data.origins <= INPUTS:
            self.first.add(key)
        if matmul.data is not None and matmul.data.factor is not None:
            before, terms, rank = matmul.data.factor
            summed, features = matmul.sizes
            if summed == rank and rank * (terms + features) < terms * features:
                self.low_rank.update((key, before))
        return matmul.plain(), []

    def edge_of(self, key: Any, ends: frozenset[Any]) -> Edge | None:
        """Return the edge of the model that a matmul is at, if any."""
        _, matmul = self.seen[key]
        if key in self.low_rank:
            return Edge.LOW_RANK
        if key in ends:
            return Edge.LOGITS
        if matmul.primitive.startswith("conv") and key in self.first:
            channels = matmul.eqn.params["dimension_numbers"].lhs_spec[1]
            if np.shape(matmul.x)[channels] <= MAX_IMAGE_CHANNELS:
                return Edge.IMAGE_INPUT
        return None

    def held(self) -> tuple[str, ...]:
        """Return the weights if all are multiplied by arrays that the function holds itself."""
        return tuple(self.of_constants) if all(self.of_constants.values()) else ()
