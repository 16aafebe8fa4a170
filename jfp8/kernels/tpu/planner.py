"""The planner for TPUs."""

from __future__ import annotations

from typing import Any

from jfp8.kernels.tpu import backend
from jfp8.kernels.tpu.dot import DotOnTpu, dot_on_tpu
from jfp8.products.dot_general import DotSpec
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.device import Tpu

multiply = backend.multiply


def plan(spec: Any) -> DotOnTpu | None:
    """Return what computes the operation that `spec` describes; None: the reference.

    Convolutions and grouped products are those of the core.
    """
    if not isinstance(spec, DotSpec):
        return None
    device = spec.options.device
    if not isinstance(device, Tpu):  # named, elsewhere: kernels are interpreted
        device = Tpu("TPU") if kernels_are_interpreted() else None
    return None if device is None else dot_on_tpu(spec, device)
