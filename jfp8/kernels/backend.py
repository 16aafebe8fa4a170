"""What a backend can do, and the facts about a product by which one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.verdicts import has_passed
from jfp8.matmul.emulate import emulated
from jfp8.matmul.known_scales import are_powers_of_two, scale_dtype
from jfp8.matmul.spec import (
    ACCUMULATIONS,
    MatmulSpec,
    free_dims,
    layout_of,
    scale_shape_of,
    varies_along,
)
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import FORMATS, Format
from jfp8.tracing.backends import why_left_out
from jfp8.tracing.devices import Device, Gpu

Granularity = Literal["tensor", "rows", "blocks"]
Blocks = tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """Hold what the choice of a backend depends on. Pairs are for lhs and rhs.

    Attributes:
      granularity: ``"tensor"``: one scale for each operand; ``"rows"``: scales that can be applied
        after the sum; ``"blocks"``: an operand has scales that vary along the sum.
      blocks: the number of elements that share a scale, along the sum and across it: ``(0, 0)`` if
        all do, None if the operand is neither a matrix nor a batch of them, or its scales have two
        levels of which the outer one is not one scale for each matrix.
    """

    formats: tuple[Format, Format]
    scale_dtypes: tuple[np.dtype, np.dtype]  # in which the scales of blocks are stored
    scale_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    granularity: Granularity
    blocks: tuple[Blocks | None, Blocks | None]
    sizes: tuple[int, int, int]  # (m, n, k)
    accumulation: str
    powers_of_two: bool = False  # whether all scales are known to be


def facts_of(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> Facts:
    """Return the facts about the product of two operands."""
    contract, batch = spec.dimension_numbers
    shapes = scale_shape_of(lhs), scale_shape_of(rhs)
    granularity: Granularity = "tensor"
    if any(shapes) or any(isinstance(q.scale, ScaledArray) for q in (lhs, rhs)):
        granularity = "rows"
    if varies_along(lhs, contract[0]) or varies_along(rhs, contract[1]):
        granularity = "blocks"
    return Facts(
        formats=(lhs.format, rhs.format),
        scale_dtypes=(scale_dtype(lhs), scale_dtype(rhs)),
        scale_shapes=shapes,
        granularity=granularity,
        blocks=(_block(lhs, contract[0], batch[0]), _block(rhs, contract[1], batch[1])),
        sizes=layout_of(lhs.shape, rhs.shape, spec.dimension_numbers).sizes,
        accumulation=spec.accumulation,
        powers_of_two=all(
            are_powers_of_two(q, k, spec) for q, k in zip((lhs, rhs), contract, strict=True)
        ),
    )


def _block(q: ScaledArray, contract: tuple[int, ...], batch: tuple[int, ...]) -> Blocks | None:
    """The number of elements that share a scale along the sum and across it; see `Facts`."""
    shape = scale_shape_of(q)
    if len(contract) != 1 or len(batch) > 1 or q.ndim != len(batch) + 2:
        return None
    if isinstance(q.scale, ScaledArray):
        outer = q.scale.scale
        if isinstance(outer, ScaledArray):
            return None
        if any(n > 1 for d, n in enumerate(jnp.shape(outer)) if d not in batch):
            return None
    if not shape:
        return 0, 0
    if any(shape[d] not in (1, q.shape[d]) for d in batch):
        return None
    (free,) = free_dims(q.ndim, contract, batch)
    return q.block_sizes()[contract[0]], q.block_sizes()[free]


@dataclass(frozen=True)
class Backend:
    """Say how to multiply two `ScaledArray`s, and what is supported.

    Attributes:
      multiply: ``multiply(lhs, rhs, spec)``. It need not check for what the fields below exclude.
      blocks: the blocks of scales that vary along the sum, ``(along it, across it)``; empty: any.
      multiples_of: what all sizes must be multiples of, none of them 0.
      why_not_e5m2: why it is not chosen to multiply e5m2 by e5m2, if it is not.
      first_for: the granularities for which it is better than the backends listed before it.
      proof: the task of ``python -m jfp8 check`` that it must have passed on the GPU to be used.
      why_not_on: why it does not run on a `Gpu` or `Tpu`; None if it does. An unknown GPU counts as
        one of `gpus`.
    """

    name: str
    multiply: Callable[[ScaledArray, ScaledArray, MatmulSpec], jax.Array]
    formats: frozenset[Format] = frozenset(FORMATS)
    granularities: frozenset[Granularity] = frozenset(("tensor", "rows", "blocks"))
    blocks: frozenset[Blocks] = frozenset()
    multiples: bool = False  # whether it takes larger blocks as several of `blocks`
    scale_dtype: Any = None  # in which scales must be stored; None: any
    powers_of_two: bool = False
    accumulations: tuple[str, ...] = ACCUMULATIONS
    multiples_of: int = 1
    why_not_e5m2: str | None = None
    first_for: frozenset[Granularity] = frozenset()
    gpus: int | None = None  # the major compute capability that it is for; None: any
    proof: str | None = None
    why_not_on: Callable[[Any], str | None] = lambda device: None

    def is_for(self, gpu: Gpu | None) -> bool:
        """Return whether it may be used on a GPU of this kind; None: on one that is not known."""
        major = None if gpu is None or gpu.capability is None else gpu.capability[0]
        return self.gpus in (None, major) and (self.proof is None or has_passed(self.proof, gpu))

    def why_not(self, facts: Facts, device: Device) -> str | None:
        """Return what it does not support about a product on `device`; None if it supports all."""
        reason = (
            why_left_out(self.name)
            or self.why_not_on(device)
            or self.why_not_sums(facts.accumulation)
        )
        if reason is not None:
            return reason
        if not self.formats.issuperset(facts.formats):
            return f"operands in {facts.formats[0].name} and {facts.formats[1].name}"
        if self.scale_dtype is not None and any(d != self.scale_dtype for d in facts.scale_dtypes):
            return f"scales that are not stored in {np.dtype(self.scale_dtype).name}"
        n = self.multiples_of
        if n > 1 and any(size % n or not size for size in facts.sizes):
            return f"sizes m, n, k = {facts.sizes} that are not multiples of {n}"
        return self._why_not_scales(facts)

    def _why_not_scales(self, facts: Facts) -> str | None:
        """Say which scales it does not support."""
        shapes = "lhs scale {}, rhs scale {}".format(*facts.scale_shapes)
        if facts.granularity not in self.granularities:
            return f"scales that {_PLACES[facts.granularity]} ({shapes})"
        if facts.granularity == "blocks" and not all(map(self.takes, facts.blocks)):
            known = " and ".join(f"{across}x{along}" for along, across in sorted(self.blocks))
            return f"scales that vary along the contraction in other blocks than {known} ({shapes})"
        if self.powers_of_two and not facts.powers_of_two:
            return (
                "scales that may not be powers of two: set scale_rounding='power_of_two' in the "
                "recipe, or promise powers_of_two=True to scaled_matmul"
            )
        return None

    def why_not_sums(self, accumulation: str) -> str | None:
        """Return why it does not round sums in this way; None if it does."""
        if accumulation in self.accumulations:
            return None
        return f"accumulation={accumulation!r}: it computes real products, not models of them"

    def takes(self, block: Blocks | None) -> bool:
        """Return whether it takes scales of such blocks; see `Facts.blocks`."""
        if not self.blocks or block is None or not self.multiples:
            return not self.blocks or block in self.blocks
        along, across = block
        return any(
            along % a == 0 and (across == b or (b > 1 and across % b == 0)) for a, b in self.blocks
        )


_PLACES = {
    "tensor": "are one for each operand",
    "rows": "do not vary along the contraction",
    "blocks": "vary along the contraction and cannot be applied after it",
}


REFERENCE = Backend("emulate", emulated)


class Choice(NamedTuple):
    """The backend for a product, and why those ranked before it do not compute it."""

    backend: Backend
    refused: dict[str, str]

    def __str__(self) -> str:
        reasons = [f"{name}: {why}" for name, why in self.refused.items()]
        if len(reasons) == 1:
            reasons = list(self.refused.values())
        return ": ".join(filter(None, (self.backend.name, ", ".join(reasons))))


def none_allowed(refused: dict[str, str]) -> NotImplementedError:
    """Return the error for a product that no backend of `jfp8.backends` computes."""
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    return NotImplementedError(
        f"No backend that jfp8.backends(...) allows computes this matmul ({reasons}). Allow 'bf16' "
        "or 'emulate' as well, or leave the layer in high precision: jfp8.convert(model, "
        "exempt='its path')."
    )


def check_not_refused(implementation: str | None, reason: str | None) -> None:
    """Raise ``NotImplementedError`` if there is a `reason` why it cannot compute a product."""
    if reason is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} does not support {reason}. "
            "Use implementation=None or 'emulate'."
        )
