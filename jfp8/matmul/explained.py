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
    """Return a context in which the function `what` notes, for a report, how a GPU computes."""
    if EXPLAINING.value is None:
        return contextlib.nullcontext()
    return getattr(importlib.import_module(_EXPLANATIONS), what)(*arguments)
