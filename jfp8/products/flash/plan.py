"""`AttentionSpec`: what is known of attention while JAX traces, and the plan of the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jfp8.matmul.planner import check_implementation
from jfp8.products.flash.mask import Visible
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.devices import Device
from jfp8.tracing.notes import note

IMPLEMENTATIONS = ("emulate", "bf16", "mosaic_gpu", "mosaic_gpu_blackwell")


@dataclass(frozen=True)
class AttentionSpec:
    """The spec of attention for planners; see `scaled_dot_product_attention`."""

    recipe: Recipe | None  # None quantizes nothing
    visible: Visible
    depth: int
    scale: float  # of the scores
    dtype: np.dtype  # of the query
    device: Device = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_implementation(self.implementation, IMPLEMENTATIONS)

    def reference(self) -> Reference:
        """Return the plan of the core."""
        return Reference(named=self.implementation is not None)


@dataclass(frozen=True)
class Reference:
    """The plan of the core: attention is computed by `blocks`, on any device."""

    named: bool = False  # by the user
    # A function that computes attention and is differentiated as a whole, and one that quantizes
    # heads straight and transposed; None if there is none.
    whole: ClassVar[Callable[..., jax.Array] | None] = None
    cast_heads: ClassVar[Callable[..., Any] | None] = None

    def forward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute the forward pass: ``reference(*operands)``."""
        del options
        with note("cuda", "emulate" if self.named else "bf16: no GPU is known"):
            return reference(*operands)

    def backward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute the backward pass: ``reference(*operands)``."""
        return self.forward(reference, *operands, **options)
