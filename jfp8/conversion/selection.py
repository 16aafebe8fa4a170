"""Select the layers of a model that become FP8, and say why the others do not."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jfp8.layers.kv_cache import dtype_or_format
from jfp8.layers.linen.state_in_gradients import StateCollection, check_state_collection
from jfp8.matmul.planner import Work, planner_of
from jfp8.recipes.per_layer import PerLayer, check_recipes, path_matches
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike
from jfp8.scaling.formats import Format, FormatLike
from jfp8.tracing.device import current_gpu
from jfp8.tracing.devices import Gpu, capability_of, unknown_card

SLOWER = "slower"  # in `exempt`: what a model of time expects to be slower in FP8
SLOWER_ON = "slower on "  # the same on a named card
MAX_IMAGE_CHANNELS = 4  # gray, RGB, RGBA


class Edge(enum.Enum):
    """Name layers at the edges of a model, which the literature keeps in high precision.

    References:
      arXiv 2209.05433 section 4, arXiv 1905.12334 section 3; of adapters arXiv 2106.09685.
    """

    IMAGE_INPUT = "the first convolution of an image model (at most 4 input channels)"
    LOGITS = "a layer whose result the model returns: the final logits"
    LOW_RANK = "one of two matmuls in a row, x a b, whose rank is low: an adapter (LoRA)"


Choice = str | type | Edge | Callable[[str, Any], bool]
"""A pattern of paths (``"Encoder_0/*"``), a type, an `Edge`, or ``(path, layer) -> bool``."""

Recipes = RecipeLike | PerLayer | Mapping[str, RecipeLike | None]
"""A recipe or its name; or patterns of paths with those of the layers that they match."""

EDGES: tuple[Choice, ...] = tuple(Edge)


@dataclass(frozen=True)
class Decision:
    """Hold the recipe of a layer, or None and the reason."""

    recipe: Recipe | None
    reason: str = ""
    chosen: bool = False  # the user said so: by `exempt`, `only`, or a recipe of None


@dataclass(frozen=True)
class Selection:
    """Hold the arguments of `jfp8.convert`, checked."""

    recipe: Recipe | PerLayer
    exempt: tuple[Choice, ...] = EDGES
    only: tuple[Choice, ...] | None = None
    attention: bool = False
    state_collection: StateCollection = "fp8"
    cache_dtype: np.dtype | Format | None = None
    unless_slower_on: Gpu | None = None
    verbose: bool = False  # print the decisions; see `jfp8.initialize`

    def for_gpu(self) -> Selection:
        """Take ``"slower"``, or ``"slower on NVIDIA H100"``, out of `exempt`, and hold the GPU."""
        strings = [choice for choice in self.exempt if isinstance(choice, str)]
        asked = [each for each in strings if each == SLOWER or each.startswith(SLOWER_ON)]
        if not asked:
            return self
        if len(asked) > 1:
            raise ValueError(f"exempt has {' and '.join(map(repr, asked))}: give one of them.")
        others = tuple(choice for choice in self.exempt if choice != asked[0])
        return dataclasses.replace(self, exempt=others, unless_slower_on=_rated_gpu(asked[0]))

    def decide(self, path: str, layer: Any, edge: Edge | None) -> Decision:
        """Decide on the layer at `path`, which is at this `edge` of the model, if at any."""
        for choice in self.exempt:
            if _matches(choice, path, layer, edge):
                return Decision(None, f"exempt: {_spelled(choice)}", not isinstance(choice, Edge))
        if self.only is not None and not any(_matches(c, path, layer, edge) for c in self.only):
            return Decision(None, f"not among only={', '.join(map(_spelled, self.only))}", True)
        recipe = self.recipe.for_layer(path)
        if recipe is None:
            assert isinstance(self.recipe, PerLayer)
            return Decision(None, self.recipe.reason(path), chosen=True)
        return Decision(recipe)

    def decide_on_attention(self, path: str, layer: Any) -> Decision:
        """Decide on attention between the projections of `layer`; in FP8 no GPU has a kernel."""
        decision = self.decide(path, layer, None)
        if decision.recipe is not None and self.unless_slower_on is not None:
            return Decision(None, f"exempt: {SLOWER!r} (attention in FP8 has no kernel)", True)
        return decision

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the entries of `exempt` and `only`, and the patterns of the recipes."""
        return (*self.exempt, *(self.only or ()), *self.patterns)

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Return the recipes that a layer may have."""
        return self.recipe.given if isinstance(self.recipe, PerLayer) else (self.recipe,)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the path patterns of a per-layer recipe, else ()."""
        return self.recipe.patterns if isinstance(self.recipe, PerLayer) else ()

    def check_patterns(self, paths: Iterable[str], possible: Iterable[str] = ()) -> None:
        """Raise ``ValueError`` if a pattern matches none of `paths`, nor one of the `possible`.

        Also if patterns before it match all that it matches.
        """
        listed = sorted(set(paths))
        known = [*listed, *possible]
        for choice in self.choices:
            if isinstance(choice, str) and not any(path_matches(choice, path) for path in known):
                raise ValueError(
                    f"The pattern {choice!r} matches no layer of the model. Layers: "
                    f"{', '.join(listed) or 'none'}. Patterns match paths, with * for "
                    'anything, such as "decoder/*" or "*/logits".'
                )
        left = known
        for pattern in self.patterns:
            rest = [path for path in left if not path_matches(pattern, path)]
            if len(rest) == len(left) and pattern != "*":  # it may be there for what is left
                raise ValueError(
                    f"The recipe of {pattern!r} is that of no layer: the patterns before it match "
                    f"all that it matches, and the first that matches wins. Put {pattern!r} in "
                    "front of them."
                )
            left = rest

    def check_types(self, layers: Iterable[Any]) -> None:
        """Raise ``ValueError`` if no layer of `layers` has a chosen type."""
        found = list(layers)
        for choice in self.choices:
            if isinstance(choice, type) and not any(isinstance(x, choice) for x in found):
                names = ", ".join(sorted({type(x).__name__ for x in found}))
                raise ValueError(
                    f"The model has no layer of type {choice.__name__} that could be converted. "
                    f"It has: {names or 'none'}."
                )


def select(
    recipe: Recipes,
    exempt: Choice | Sequence[Choice] | None,
    only: Choice | Sequence[Choice] | None,
    attention: bool = False,
    state_collection: StateCollection = "fp8",
    cache_dtype: FormatLike | None = None,
) -> Selection:
    """Check the arguments of a user, and raise an error that says what to give."""
    check_state_collection(state_collection)
    chosen = None if only is None else _choices("only", only)
    if exempt is None:
        # Who names layers to convert means these, wherever they are.
        exempt = EDGES if chosen is None else ()
    return Selection(
        check_recipes(recipe),
        _choices("exempt", exempt),
        chosen,
        bool(attention),
        state_collection,
        None if cache_dtype is None else dtype_or_format(cache_dtype),
    )


def _rated_gpu(choice: str) -> Gpu:
    """Return the GPU here, or the one that `choice` names; raise if its rates are not known."""
    rated, card = planner_of(Gpu("", None)).rated, choice[len(SLOWER_ON) :]
    gpu = Gpu(card, None) if card else current_gpu()
    if gpu is None or planner_of(gpu).expected_times(Work(1, 1), "one") is None:
        if card:
            raise ValueError(f"exempt={choice!r}: {unknown_card(card, rated)}")
        kind = jax.default_backend() if gpu is None else gpu.kind
        raise ValueError(
            f"exempt={choice!r} needs a GPU with known rates: {', '.join(rated)}; and JAX traces "
            f"for {kind!r} here. Convert where JAX sees the GPU, or name one, "
            f"exempt='{SLOWER_ON}NVIDIA H100'. Or name the layers, exempt='decoder/*'."
        )
    # No device has the short name, so that times measured on one machine play no part.
    name = max((name for name in rated if name in card), key=len, default="")
    return Gpu(name, capability_of(name)) if card else gpu


def _choices(name: str, given: Choice | Sequence[Choice]) -> tuple[Choice, ...]:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    choices: tuple[Any, ...] = tuple(given) if several else (given,)
    for choice in choices:
        if not (isinstance(choice, (str, type, Edge)) or callable(choice)):
            raise TypeError(
                f"{name}={given!r}: must be patterns of paths such as 'decoder/*', types such as "
                "nn.Conv, members of jfp8.Edge, or functions (path, layer) -> bool; or several of "
                "these."
            )
    return choices


def _matches(choice: Choice, path: str, layer: Any, edge: Edge | None) -> bool:
    if isinstance(choice, str):
        return path_matches(choice, path)
    if isinstance(choice, type):
        return isinstance(layer, choice)
    if isinstance(choice, Edge):
        return choice is edge
    return bool(choice(path, layer))


def _spelled(choice: Choice) -> str:
    if isinstance(choice, Edge):
        return choice.value
    if isinstance(choice, str):
        return repr(choice)
    return getattr(choice, "__name__", repr(choice))
