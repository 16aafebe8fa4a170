"""Notes in a jaxpr for `jfp8.report`: which layer computes an equation, and by which recipe.

They are names of scopes, and are only written while a report is made.
"""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager
from typing import Literal

import jax

Kind = Literal["path", "product", "layer", "recipe", "reason", "cuda"]

_context = jax.make_user_context(None)


def explaining() -> AbstractContextManager[object]:
    """A context in which notes are written. Nothing that was traced before is reused in it."""
    return _context(object())


def note(kind: Kind, text: str) -> AbstractContextManager[object]:
    """A context whose equations carry a note."""
    if _context.value is None or not text:
        return contextlib.nullcontext()
    return jax.named_scope(f"{kind}={text.replace(';', ',')};")


def notes_of(name_stack: str) -> dict[str, str]:
    """The innermost note of each kind."""
    found: dict[str, str] = {}
    for kind, text in re.findall(r"\b(path|product|layer|recipe|reason|cuda)=(.*?);", name_stack):
        if kind == "path" and text != found.get("path"):  # what follows is about this layer
            found = {}
        found[kind] = text
    return found


def product_path(notes: dict[str, str]) -> str:
    """The path of a layer, and of the product in it, if it may have several: empty if no layer's.

    Layers of Flax call their only product ``DotGeneral_0``.
    """
    inside = re.sub(r"(^|/)(DotGeneral|ConvGeneralDilated)_0$", "", notes.get("product", ""))
    return "/".join(filter(None, [notes.get("path", ""), inside]))
