"""Decide which matmuls of a function become FP8, and what state they keep."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jfp8.conversion import edges
from jfp8.conversion.product_rows import looks_ahead_message
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Decision, Edge, Selection
from jfp8.conversion.weight_matmul import WeightMatmul
from jfp8.scaling.state_in_gradients import init_overwritten
from jfp8.tracing.caller import user_level


@dataclass(frozen=True)
class PlannedMatmul:
    """A matmul of the program: its name, the loops that slice its state, its recipe and state."""

    name: str
    layer: str
    decision: Decision
    loops: tuple[Any, ...]
    state: Any = None
    looks_ahead: bool = False


@dataclass(frozen=True)
class Plan:
    """Hold what becomes of each matmul, by its `WeightMatmul.key`."""

    selection: Selection
    constants: Sequence[Any] = ()  # arrays that the function holds itself
    seen: dict[Any, tuple[str, WeightMatmul]] = field(default_factory=dict)
    matmuls: dict[Any, PlannedMatmul] = field(default_factory=dict)
    ahead: dict[str, str] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states, by name."""
        return {
            each.name: (*(length for _, length in each.loops), *each.state.shape)
            for each in self.matmuls.values()
            if each.state is not None
        }

    def see(self, matmul: WeightMatmul) -> jax.Array:
        """Note `matmul`, and compute it plainly with both ends marked."""
        key, path = key_of(matmul), matmul.source.path or _scope(matmul)
        if key not in self.seen:
            nth = 1 + sum(known[-1] == path for known, _ in self.seen.items())
            self.seen[key] = (path if nth == 1 else f"{path}_{nth}"), matmul
        return edges.mark_product(matmul, self.seen[key][0])

    def decide(self, first: frozenset[str], ends: frozenset[str], causal: bool) -> None:
        """Decide on each matmul that was seen."""
        for key, (name, matmul) in self.seen.items():
            kind = "conv" if matmul.primitive.startswith("conv") else "dense"
            edge = Edge.LOGITS if name in ends else None
            if kind == "conv" and name in first:
                channels = matmul.eqn.params["dimension_numbers"].lhs_spec[1]
                is_image = np.shape(matmul.x)[channels] <= MAX_IMAGE_CHANNELS
                edge = Edge.IMAGE_INPUT if is_image else edge
            weight = jax.ShapeDtypeStruct(np.shape(matmul.weight), matmul.weight.dtype)
            decision = self.selection.decide(name, weight, edge)
            state, ahead = None, False
            if decision.recipe is not None:
                empty = jax.eval_shape(decision.recipe.init_state)
                state = None if empty is None else jax.eval_shape(init_overwritten, empty)
                ahead = not decision.recipe.is_causal(kind, history=state is not None)
                if causal and ahead:
                    self.ahead[name] = decision.recipe.name
            self.matmuls[key] = PlannedMatmul(
                name, matmul.primitive, decision, matmul.source.loops, state, ahead
            )

    def warn(self, name: str, weights: tuple[int, ...]) -> None:
        """Warn if nothing becomes FP8, if scales look ahead, or if `weights` seem to be others."""
        met = [matmul.x for _, matmul in self.seen.values() if matmul.source.path]
        if met and all(any(x is held for held in self.constants) for x in met):
            warnings.warn(
                f"{name} multiplies argument {', '.join(map(str, weights))} by arrays that it "
                "holds itself. If those are the weights, pass them as an argument: "
                "jfp8.convert(lambda params, x: ..., recipe), or weights= for another position.",
                UserWarning,
                stacklevel=user_level(),
            )
        if self.ahead:
            warnings.warn(looks_ahead_message(self.ahead), UserWarning, stacklevel=user_level())
        planned = self.matmuls.values()
        if any(each.decision.recipe is not None or each.decision.chosen for each in planned):
            return
        stayed = "; ".join(f"{each.name}: {each.decision.reason}" for each in planned)
        why = f"It found: {stayed}. exempt=() exempts none."
        if not stayed:
            why = (
                "It found none with an operand made of the weights, argument "
                f"{', '.join(map(str, weights))}, by casts, slices and the like: see "
                "weights=."
            )
        warnings.warn(
            f"No matmul of {name} is FP8: jfp8.convert changed nothing. {why}",
            UserWarning,
            stacklevel=user_level(),
        )


def key_of(matmul: WeightMatmul) -> tuple[Any, ...]:
    """Return the key of a matmul, the path last."""
    return (*matmul.key, matmul.source.path or _scope(matmul))


def _scope(matmul: WeightMatmul) -> str:
    """Name a matmul of two activations by the scope that it is in."""
    return "/".join(filter(None, [str(matmul.eqn.source_info.name_stack), matmul.primitive]))
