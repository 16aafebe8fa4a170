"""Which layers of a converted model become FP8, and why the others do not."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jfp8.layers.linen.state_in_gradients import StateCollection, check_state_collection
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe

MAX_IMAGE_CHANNELS = 4  # grey, RGB, RGBA


class Edge(enum.Enum):
    """Layers at the edges of a model, which the literature keeps in high precision.

    References:
      arXiv 2209.05433 section 4, arXiv 1905.12334 section 3.
    """

    IMAGE_INPUT = "the first convolution of an image model (at most 4 input channels)"
    LOGITS = "a layer whose result the model returns: the final logits"


Choice = str | type | Edge | Callable[[str, Any], bool]
"""A pattern of paths (``"Encoder_0/*"``), a type, an `Edge`, or ``(path, layer) -> bool``."""

EDGES: tuple[Choice, ...] = (Edge.IMAGE_INPUT, Edge.LOGITS)


@dataclass(frozen=True)
class Decision:
    """What became of a layer: its recipe, or None and the reason.

    Attributes:
      chosen: whether it has no recipe because of `exempt` or `only` of the user.
    """

    recipe: Recipe | None
    reason: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Selection:
    """What `jfp8.convert` was told.

    Attributes:
      recipe: for all layers that are converted.
      exempt: layers that stay in high precision.
      only: layers to convert; None: all that are not exempt.
      attention: also convert attention itself, between its projections.
      state_collection: of Linen models; see `jfp8.Dense`.
    """

    recipe: Recipe
    exempt: tuple[Choice, ...] = EDGES
    only: tuple[Choice, ...] | None = None
    attention: bool = False
    state_collection: StateCollection = "fp8"

    def decide(self, path: str, layer: Any, edge: Edge | None) -> Decision:
        """Whether the layer at `path` is converted. `edge` says at which edge it is, if at any."""
        for choice in self.exempt:
            if _matches(choice, path, layer, edge):
                return Decision(None, f"exempt: {_spelled(choice)}", not isinstance(choice, Edge))
        if self.only is not None and not any(_matches(c, path, layer, edge) for c in self.only):
            return Decision(None, f"not among only={', '.join(map(_spelled, self.only))}", True)
        return Decision(self.recipe)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All that `exempt` and `only` hold."""
        return (*self.exempt, *(self.only or ()))

    def check_patterns(self, paths: Iterable[str], possible: Iterable[str] = ()) -> None:
        """Raise ``ValueError`` if a pattern matches none of `paths`, nor what is inside of one.

        Args:
          possible: paths that it may match as well, because they may be those of products.
        """
        listed = sorted(set(paths))
        known = [*listed, *possible]
        for choice in self.choices:
            if isinstance(choice, str) and not any(_path_matches(choice, path) for path in known):
                raise ValueError(
                    f"The pattern {choice!r} matches no layer of the model. Layers: "
                    f"{', '.join(listed) or 'none'}. Patterns match paths, with * for "
                    'anything, such as "decoder/*" or "*/logits".'
                )

    def check_types(self, layers: Iterable[Any]) -> None:
        """Raise ``ValueError`` if a type is that of none of `layers`."""
        found = list(layers)
        for choice in self.choices:
            if isinstance(choice, type) and not any(isinstance(x, choice) for x in found):
                names = ", ".join(sorted({type(x).__name__ for x in found}))
                raise ValueError(
                    f"The model has no layer of type {choice.__name__} that could be converted. "
                    f"It has: {names or 'none'}."
                )


def select(
    recipe: Recipe | str,
    exempt: Choice | Sequence[Choice] | None,
    only: Choice | Sequence[Choice] | None,
    attention: bool = False,
    state_collection: StateCollection = "fp8",
) -> Selection:
    """A `Selection` from what a user gave, or an error that says what to give."""
    check_state_collection(state_collection)
    chosen = None if only is None else _choices("only", only)
    if exempt is None:
        # Who names layers to convert means these, wherever they are.
        exempt = EDGES if chosen is None else ()
    return Selection(
        check_recipe(recipe),
        _choices("exempt", exempt),
        chosen,
        bool(attention),
        state_collection,
    )


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
        return _path_matches(choice, path)
    if isinstance(choice, type):
        return isinstance(layer, choice)
    if isinstance(choice, Edge):
        return choice is edge
    return bool(choice(path, layer))


def _path_matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches `path` or a module that contains it."""
    parts = path.split("/")
    wholes = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return any(fnmatch.fnmatchcase(whole, pattern) for whole in wholes)


def _spelled(choice: Choice) -> str:
    if isinstance(choice, Edge):
        return choice.value
    if isinstance(choice, str):
        return repr(choice)
    return getattr(choice, "__name__", repr(choice))
