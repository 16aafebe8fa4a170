"""What a program holds that is traced for one platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jfp8.kernels.only_on import only_on, traced_for
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.notes import note


def on_cuda(
    compute: Callable[..., Any], reference: Callable[..., Any], *operands: Any, why: str = ""
) -> Any:
    """Return ``compute(*operands)``, what a CUDA GPU computes.

    Where kernels are interpreted, on whatever device there is, it is what `reference` computes.

    Args:
      compute: calls operations that only CUDA has.
      reference: gives the same numbers on any device.
      operands: arrays, or trees of them.
      why: what `jfp8.report` shows.
    """
    with note("cuda", why):
        if kernels_are_interpreted():
            return reference(*operands)
        reason = traced_for("cuda", f"A product by {why.partition(':')[0]!r}")
        return only_on("cuda", compute, reason, *operands)
