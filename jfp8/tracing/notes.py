"""Notes in a traced program, from which `jfp8.report` learns which layer computes an equation.

A note is the name of a scope, which JAX keeps with each equation of a jaxpr.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, get_args

import jax

Kind = Literal["path", "product", "layer", "recipe", "ahead", "reason", "formats", "cuda", "tpu"]

EXPLAINING = jax.make_user_context(None)
"""Its ``value`` is not None while a program is traced for a report."""


def explaining() -> AbstractContextManager[object]:
    """Return a context in which notes are written. Programs traced before are not reused in it."""
    return EXPLAINING(object())


def note(kind: Kind, text: str) -> AbstractContextManager[object]:
    """Return a context whose equations carry a note, while a program is traced for a report."""
    if EXPLAINING.value is None or not text:
        return contextlib.nullcontext()
    return jax.named_scope(f"{kind}={text.replace(';', ',')};")


@contextlib.contextmanager
def layer_noted(path: str, layer: str, reason: str) -> Iterator[None]:
    """Note the path and type of a layer, and the reason if its matmul is not converted."""
    with note("path", path), note("layer", layer), note("reason", reason):
        yield


def notes_of(name_stack: str) -> dict[str, str]:
    """Return the innermost note of each kind about the innermost layer."""
    by_path: dict[str, dict[str, str]] = {}
    found = by_path.setdefault("", {})
    kinds = "|".join(get_args(Kind))
    for kind, text in re.findall(rf"\b({kinds})=(.*?);", name_stack):
        if kind == "path":  # further notes are about this layer
            found = by_path.setdefault(text, {})
        found[kind] = text
    return found


def product_path(notes: dict[str, str]) -> str:
    """Return the path of a layer, and of the matmul in it if it may have several; "" without one.

    Layers of Flax call their only matmul ``DotGeneral_0``.
    """
    inside = re.sub(r"(^|/)(DotGeneral|ConvGeneralDilated)_0$", "", notes.get("product", ""))
    return "/".join(filter(None, [notes.get("path", ""), inside]))
