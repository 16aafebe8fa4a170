"""The place in the user's code that a warning is about."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import flax
import jax
import optax

_NOT_THE_USER = (
    *(str(Path(module.__file__).parent) for module in (jax, flax, optax)),
    str(Path(__file__).parents[1]),
    contextlib.__file__,  # between two frames of JAX, for one
)


def user_level() -> int:
    """Return ``stacklevel`` for a warning: the first frame outside JAX, Flax, Optax and jfp8."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    return level
