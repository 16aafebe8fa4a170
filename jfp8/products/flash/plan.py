"""`AttentionSpec`: what is known of attention while JAX traces, and the plan of the core."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jfp8.matmul.explained import explained
from jfp8.products.flash.mask import Visible
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.devices import Device, Gpu

_KERNELS = "jfp8.kernels.attention"  # the planner for GPUs, and of implementations by name


@dataclass(frozen=True)
class AttentionSpec:
    """The spec of attention for planners; see `scaled_dot_product_attention`."""

    recipe: Recipe | None  # None quantizes nothing
    visible: Visible
    depth: int
    scale: float  # of the scores
    dtype: np.dtype  # of the query
    device: Device = None


@dataclass(frozen=True)
class Reference:
    """The plan of the core: attention is computed by `blocks`, on any device."""

    named: bool = False  # by the user
    whole = None  # or a function that computes attention and is differentiated as a whole
    cast_heads = None  # or a function that quantizes heads straight and transposed

    def forward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute the forward pass: ``reference(*operands)``."""
        del options
        with explained("attention", self.named):
            return reference(*operands)

    def backward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute the backward pass: ``reference(*operands)``."""
        return self.forward(reference, *operands, **options)


def plan_attention(spec: AttentionSpec, implementation: str | None) -> Any:
    """Return the implementation that is asked for, or the best that computes what `blocks` does."""
    if implementation in ("emulate", "bf16"):
        return Reference(named=True)
    if implementation is None and not isinstance(spec.device, Gpu):
        return Reference()
    return importlib.import_module(_KERNELS).plan(spec, implementation)
