"""Notes on the backends that a GPU would use, taken for a report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.notes import note


@contextlib.contextmanager
def explained(backend: str, *operands: Any) -> Iterator[None]:
    """Note in this context that a GPU would compute by `backend`, and the operands' formats."""
    formats = [x.format.name.lower() for x in operands if isinstance(x, ScaledArray)]
    with note("cuda", backend), note("formats", " ".join(formats) if len(formats) == 2 else ""):
        yield
