"""Notes for a report on a CPU: the backend of an NVIDIA GPU for each operation of the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from jfp8.kernels.backend import facts_of
from jfp8.kernels.cuda_backends import choose
from jfp8.matmul.spec import MatmulSpec
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.notes import note


def matmul(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> AbstractContextManager[object]:
    """Return a context that notes the backend of a matmul."""
    backend = spec.implementation or str(choose(facts_of(lhs, rhs, spec), None))
    return _noted(backend, lhs, rhs)


def grouped(
    operation: Any, kind: str, first: Any, second: Any, spec: MatmulSpec
) -> AbstractContextManager[object]:
    """Return a context that notes the backend of grouped matmuls."""
    del operation, kind
    by_xla = spec.implementation is None and spec.accumulation == "f32"
    why = "bf16: no FP8 kernel for these groups on this GPU" if by_xla else "emulate"
    return _noted(why, first, second)


def attention(named: bool) -> AbstractContextManager[object]:
    """Return a context that notes the backend of attention, if the reference is `named` or not."""
    return note("cuda", "emulate" if named else "bf16: no GPU is known")


@contextlib.contextmanager
def _noted(backend: str, *operands: Any) -> Iterator[None]:
    formats = [x.format.name.lower() for x in operands if isinstance(x, ScaledArray)]
    with note("cuda", backend), note("formats", " ".join(formats) if len(formats) == 2 else ""):
        yield


convolution = partial(_noted, "bf16: there is no FP8 convolution")
