"""Fields of recipes that say which values they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def takes(allowed: Iterable[Any] | type[bool], default: Any) -> Any:
    """A field that takes one of `allowed`: some values, the ints of a range, or ``bool``."""
    return dataclasses.field(default=default, metadata={"allowed": allowed})


def check_fields(recipe: Any) -> None:
    """Raise unless each field of `recipe` that says which values it takes has one of them.

    Raises:
      TypeError: no bool, or no int, where one is asked for.
      ValueError: another value than the allowed ones.
    """
    for field in dataclasses.fields(recipe):
        if "allowed" in field.metadata:
            given = getattr(recipe, field.name)
            call = f"{type(recipe).__name__}({field.name}={given!r})"
            _check(call, given, field.metadata["allowed"])


def _check(call: str, given: Any, allowed: Any) -> None:
    if allowed is bool:
        if not isinstance(given, bool):
            raise TypeError(f"{call}: must be True or False.")
    elif isinstance(allowed, range):
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(f"{call}: must be an int.")
        if given not in allowed:
            raise ValueError(f"{call}: must be from {allowed[0]} to {allowed[-1]}.")
    elif given not in tuple(allowed):
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{call}: allowed are {listed}.")
