"""Notes on the backends that a GPU would use, taken for a report."""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from typing import Any

from jfp8.tracing.notes import EXPLAINING

# No file of the core imports a kernel: see `spec.planner_of`.
_EXPLANATIONS = "jfp8.kernels.explain"


def explained(what: str, *arguments: Any) -> AbstractContextManager[object]:
    """Return a context that notes how a GPU would compute something, if a report is being made.

    Args:
      what: a function of `jfp8.kernels.explain`.
      arguments: of that.
    """
    if EXPLAINING.value is None:
        return contextlib.nullcontext()
    return getattr(importlib.import_module(_EXPLANATIONS), what)(*arguments)
