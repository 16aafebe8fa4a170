"""Signatures of NNX layers: the parameters of their constructors, and their recipes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Self

from flax import nnx
from flax.nnx import reprlib

from jfp8.recipes.in_effect import recipe_in_effect
from jfp8.recipes.per_layer import PerLayer
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.tracing.listing import did_you_mean

# Flax's arguments for the matmul, which layers of jfp8 compute themselves.
_HOOK = re.compile(r"(.*dot_general|conv_general_dilated|einsum_op)(_cls)?")


class SignatureOfClass:
    """The ``__signature__`` of an NNX class: its constructor's, which Flax's metaclass hides.

    `inspect.signature` reads it, and with it completion and documentation. In place of
    ``**options`` of a typed dict, and of ``*args, **options``, it has the parameters of the next
    base's constructor.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # an instance is called by __call__
        return inspect.Signature(list(_parameters(owner.__mro__).values()))


def _parameters(classes: tuple[type, ...]) -> dict[str, inspect.Parameter]:
    """Return the parameters of the first constructor among `classes`, without ``self``."""
    first = next(i for i, each in enumerate(classes) if "__init__" in vars(each))
    _, *found = inspect.signature(classes[first].__init__).parameters.values()
    any_number = [x for x in found if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    is_typed = any(str(x.annotation).startswith("Unpack[") for x in any_number)
    own = {x.name: x for x in found}
    if len(any_number) < 2 and not is_typed:
        return own
    both = own | _parameters(classes[first + 1 :])
    named = [x for x in both.values() if x not in any_number and not _HOOK.fullmatch(x.name)]
    return {x.name: x for x in sorted(named, key=lambda x: x.kind)}


class ExplicitModule(nnx.Module):
    """A base of modules whose constructors name all options."""

    __signature__: Any = SignatureOfClass()

    def __new__(cls, *args: Any, **options: Any) -> Self:
        # Before Python's own message, which does not list the known options.
        known = inspect.signature(cls).parameters
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in known.values()):
            for name in options:
                if name not in known:
                    raise _unknown(cls, name, list(known))
        return super().__new__(cls)


def _unknown(layer: type, name: str, known: list[str]) -> Exception:
    flax = next((base for base in layer.__mro__ if base.__module__.startswith("flax.nnx.nn")), None)
    if flax is not None and name in inspect.signature(flax.__init__).parameters:
        return ValueError(
            f"jfp8.nnx.{layer.__name__} computes its matmul itself, so it does not take {name}. "
            f"Pass recipe=..., or use flax.nnx.{flax.__name__}."
        )
    hint = did_you_mean(name, known)
    return TypeError(f"{layer.__name__} has no option {name!r}.{hint} Options: {', '.join(known)}.")


class PrintsRecipe(ExplicitModule):
    """A base of modules that print their constructor's arguments, their state, and the recipe.

    It is the recipe in effect, from any source.
    """

    recipe: Recipe | PerLayer | None
    path: str

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe" and not (value is None or isinstance(value, PerLayer)):
            value = check_recipe(value)
        super().__setattr__(name, value)

    def __nnx_repr__(self) -> Generator[Any, Any, None]:
        given = inspect.signature(type(self)).parameters.keys()
        for part in super().__nnx_repr__():
            if isinstance(part, reprlib.Attr):
                if part.key == "recipe":
                    part = replace(part, value=recipe_in_effect(self.recipe, self.path))
                elif part.key not in given and not isinstance(part.value, nnx.Dict | nnx.Variable):
                    continue
            yield part
