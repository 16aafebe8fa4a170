"""Decide which matmuls of a program become FP8, and which state they keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.conversion.causal import masks_later_positions
from jfp8.conversion.flops import expected_gain
from jfp8.conversion.product_rows import SLOW, looks_ahead_message, slower_message
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
from jfp8.tracing.device import current_gpu
from jfp8.tracing.interpreter import notes_in


class Named(NamedTuple):
    """Say what a door calls a matmul.

    Attributes:
      name: its state's name, unique but for matmuls that share it.
      path: by which a user selects it.
      layer: the object by which a user selects it: a module, or the shape of the weight.
      kind: the type of the layer, for reports.
      selection: decides on it.
      place: the path of the layer for reports, if it is not `path`.
      product: the name of the matmul in the layer, if it has one.
      stacks: by so many axes of the weight ``vmap`` has stacked layers, each with its own state.
      stays: why it stays as it is, whatever is selected.
    """

    name: str
    path: str
    layer: Any
    kind: str
    selection: Selection
    place: str | None = None
    product: str = ""
    stacks: int = 0
    stays: str = ""

    def decide(self, edge: Edge | None) -> Decision:
        """Decide on the matmul, which is at this `edge` of the model, if at any."""
        if self.stays:
            return Decision(None, self.stays)
        decision = self.selection.decide(self.path, self.layer, edge)
        if decision.recipe is None:
            return decision
        recipe = region.recipe_in_effect(decision.recipe, self.path)
        return Decision(recipe, "" if recipe else region.why_in_high_precision())


Namer = Callable[[WeightMatmul, int], Named]
"""Names a matmul; the number counts the states of one weight, from 1."""


@dataclass(frozen=True)
class PlannedMatmul:
    """Hold what becomes of a matmul."""

    named: Named
    matmul: WeightMatmul  # without arrays
    decision: Decision
    loops: frozenset[Place]  # the places of scans that slice its state

    @property
    def stacks(self) -> tuple[int, ...]:
        """Return the lengths of these scans, and the sizes of stacks of layers, see `Named`."""
        sizes = np.shape(self.matmul.weight)[: self.named.stacks]
        return *self.matmul.source.lengths, *sizes

    @property
    def has_state(self) -> bool:
        """Return whether it keeps amax histories."""
        recipe = self.decision.recipe
        return recipe is not None and state_shapes(recipe) is not None

    @property
    def looks_ahead(self) -> bool:
        """Return whether its scales depend on later positions of a sequence."""
        recipe = self.decision.recipe
        kind = "conv" if self.matmul.primitive.startswith("conv") else "dense"
        return recipe is not None and not recipe.is_causal(kind, history=self.has_state)

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
      of_activations: whether these are also matmuls of two activations.
      computed_again: the groups whose results FP8 matmuls read, see `Walk`.
      causal: whether the program masks later positions.
      held: paths of weights that are multiplied by arrays which the function holds itself.
      unused: the shapes of matrices, and larger weights, by which no matmul multiplies.
    """

    matmuls: dict[Any, PlannedMatmul]
    of_activations: bool
    computed_again: frozenset[Place]
    causal: bool
    held: tuple[str, ...]
    unused: dict[str, tuple[int, ...]]

    @property
    def by_name(self) -> dict[str, PlannedMatmul]:
        """Return the matmuls by the names of their states; of several that share it, one in FP8."""
        in_order = sorted(self.matmuls.values(), key=lambda each: each.decision.recipe is not None)
        return {each.named.name: each for each in in_order}

    @property
    def decisions(self) -> dict[str, Decision]:
        """Return the decisions by the paths that a user selects by."""
        return {each.named.path: each.decision for each in self.matmuls.values()}

    @property
    def ahead(self) -> dict[str, str]:
        """Return by path the recipes whose scales see later positions that the model masks."""
        masks = lambda layer: self.causal or getattr(layer, "padding", None) == "CAUSAL"
        planned = [x for x in self.matmuls.values() if x.looks_ahead and masks(x.named.layer)]
        return {x.named.path: x.decision.recipe.name for x in planned if x.decision.recipe}

    @cached_property
    def if_slower(self) -> dict[Any, str]:
        """Return a warning about matmuls that FP8 slows down on the GPU that JAX traces for.

        It is kept under the key of the last of them, so that a program which trains them all warns
        once. Matmuls of models that leave out slower ones do not count.
        """
        if (gpu := current_gpu()) is None:
            return {}
        gains, last = {}, None
        for key, each in self.matmuls.items():
            if each.decision.recipe is not None and each.named.selection.unless_slower_on is None:
                gain = expected_gain(each.matmul.eqn, each.decision.recipe, gpu)
                if gain < SLOW:
                    gains[each.named.path], last = gain, key
        return {last: slower_message(gains, gpu.kind)} if gains else {}

    def warn_ahead(self) -> None:
        """Warn if scales see later positions that the model masks."""
        if self.ahead:
            warnings.warn(looks_ahead_message(self.ahead), UserWarning, stacklevel=user_level())


def plan_of(
    program: Program,
    name_of: Namer,
    *,
    of_loss: bool = False,
    of_activations: bool = False,
    parts_apart: bool = False,
    edges: Iterable[Edge] = Edge,
) -> Plan:
    """Find all matmuls of a program with weights, and decide which become FP8.

    Args:
      of_loss: the first array of the result is a loss.
      of_activations: also find matmuls of two activations.
      parts_apart: parts of a weight have states of their own.
      edges: those that the program may have, since a part of a model has no others.
    """
    looked = _Looked(program, name_of, parts_apart)
    ends, possible = looked.look(of_activations, of_loss), {*edges}
    matmuls = {}
    for key, (named, matmul) in looked.seen.items():
        edge = looked.edge_of(key, ends)
        decision = named.decide(edge if edge in possible else None)
        matmuls[key] = PlannedMatmul(named, matmul, decision, frozenset(looked.loops[key]))
    in_fp8 = [key for key, each in matmuls.items() if each.decision.recipe is not None]
    again = frozenset().union(*(looked.groups.get(key, ()) for key in in_fp8))
    causal = masks_later_positions(program.closed, program.arguments)
    return Plan(matmuls, of_activations, again, causal, looked.held(), looked.unused())


@dataclass(frozen=True)
class _Looked:
    """Hold the matmuls that a look at a program has seen, by their keys."""

    program: Program
    name_of: Namer
    parts_apart: bool
    states: dict[str, list[Any]] = field(default_factory=dict)  # one for each weight
    seen: dict[Any, tuple[Named, WeightMatmul]] = field(default_factory=dict)  # without arrays
    loops: dict[Any, set[Place]] = field(default_factory=dict)
    groups: dict[Any, set[Place]] = field(default_factory=dict)  # whose results they read
    first: set[Any] = field(default_factory=set)  # into which no other's result goes
    low_rank: set[Any] = field(default_factory=set)
    of_constants: dict[str, bool] = field(default_factory=dict)  # by the paths of weights

    def look(self, of_activations: bool, of_loss: bool) -> frozenset[Any]:
        """See all matmuls of the program; return the keys of those that give a result of a model.

        No residual or other product comes after them, and no other matmul reads their results.
        Parameters that scale or shift these make no difference. In a loss targets, and terms of
        other layers, meet the result of the model.
        """
        walk = Walk(self.see, {}, of_activations)
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
            self.seen[key] = self.name_of(matmul, self._nth_state(matmul)), matmul.abstract()
            if matmul.source.path:
                consts = self.program.closed.consts
                self.of_constants[matmul.source.path] = any(matmul.x is x for x in consts)
        self.loops.setdefault(key, set()).update(place for place, _ in matmul.source.loops)
        if matmul.data is not None and matmul.data.group is not None:
            self.groups.setdefault(key, set()).add(matmul.data.group)
        if matmul.data is None or matmul.data.origins <= INPUTS:
            self.first.add(key)
        if matmul.data is not None and matmul.data.factor is not None:
            before, terms, rank = matmul.data.factor
            summed, features = matmul.sizes
            if summed == rank and rank * (terms + features) < terms * features:
                self.low_rank.update((key, before))
        return matmul.plain(), []

    def _nth_state(self, matmul: WeightMatmul) -> int:
        """Count the states of one weight, from 1.

        All parts of it share one unless these are apart, but no matmul that sums over other
        dimensions does. Weights that were joined have the state of the first.
        """
        weight, state = matmul.source.first, (matmul.source.lengths, matmul.summed)
        if self.parts_apart:
            weight, state = matmul.name, matmul.key
        states = self.states.setdefault(weight, [])
        states += [] if state in states else [state]
        return 1 + states.index(state)

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

    def unused(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of matrices, and larger weights, by which no matmul multiplies."""
        paths = {path for _, x in self.seen.values() for path in x.source.path.split("+")}
        weights = zip(self.program.sources, self.program.arguments, strict=False)
        named = [(source.path, np.shape(x)) for source, x in weights if source is not None]
        return {path: shape for path, shape in named if len(shape) >= 2 and path not in paths}
