"""The capabilities of a backend, and the facts about a matmul by which one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.verdicts import has_passed
from jfp8.matmul.known_scales import are_powers_of_two, scale_dtype, scale_shape_of, varies_along
from jfp8.matmul.planner import Planner
from jfp8.matmul.spec import ACCUMULATIONS, MatmulSpec, free_dims, layout_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import FORMATS, Format
from jfp8.tracing.backends import why_left_out
from jfp8.tracing.devices import Device, Gpu

ScaleKind = Literal["tensor", "rows", "blocks"]
BlockSize = tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """Hold the facts on which the choice of a backend depends. Pairs are for lhs and rhs."""

    formats: tuple[Format, Format]
    scale_dtypes: tuple[np.dtype, np.dtype]  # dtypes in which the scales of blocks are stored
    scale_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    # One scale for each operand, scales that can be applied after the sum, or others.
    granularity: ScaleKind
    # Elements that share a scale, along the contraction and across it: (0, 0) if all do, None for
    # an operand without matrices, or whose scales' outer level has several for each matrix.
    blocks: tuple[BlockSize | None, BlockSize | None]
    sizes: tuple[int, int, int]  # (m, n, k)
    accumulation: str
    powers_of_two: bool = False  # True if all scales are known to be powers of two


def facts_of(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> Facts:
    """Return the facts about the matmul of two operands."""
    contract, batch = spec.dimension_numbers
    shapes = scale_shape_of(lhs), scale_shape_of(rhs)
    granularity: ScaleKind = "tensor"
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


def _block(q: ScaledArray, contract: tuple[int, ...], batch: tuple[int, ...]) -> BlockSize | None:
    """Return how many elements share a scale along the contraction and across it; see `Facts`."""
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
    """Describe how to multiply two `ScaledArray`s, and the supported operands.

    Attributes:
      multiply: ``multiply(lhs, rhs, spec)``. It need not validate what the fields below exclude.
      blocks: supported blocks of scales, ``(along, across)`` the contraction; empty if any.
      multiples_of: number that must divide all sizes, which must not be 0.
      why_not_e5m2: the reason if it does not multiply e5m2 by e5m2.
      first_for: the granularities for which it is better than the backends listed before it.
      proof: the task of ``python -m jfp8 check`` that must pass on the GPU before it is used.
      why_not_on: why it does not run on a `Gpu` or `Tpu`; None if it does. An unknown GPU counts as
        one of `gpus`.
    """

    name: str
    multiply: Callable[[ScaledArray, ScaledArray, MatmulSpec], jax.Array]
    formats: frozenset[Format] = frozenset(FORMATS)
    granularities: frozenset[ScaleKind] = frozenset(("tensor", "rows", "blocks"))
    blocks: frozenset[BlockSize] = frozenset()
    multiples: bool = False  # True if it takes larger blocks as several of `blocks`
    scale_dtype: Any = None  # in which scales must be stored; None if any
    powers_of_two: bool = False
    accumulations: tuple[str, ...] = ACCUMULATIONS
    multiples_of: int = 1
    why_not_e5m2: str | None = None
    first_for: frozenset[ScaleKind] = frozenset()
    gpus: int | None = None  # the major compute capability that it supports; None if any
    proof: str | None = None
    why_not_on: Callable[[Any], str | None] = lambda device: None

    def is_for(self, gpu: Gpu | None) -> bool:
        """Return True if it may be used on a GPU of this kind; None stands for an unknown GPU."""
        major = None if gpu is None or gpu.capability is None else gpu.capability[0]
        return self.gpus in (None, major) and (self.proof is None or has_passed(self.proof, gpu))

    def why_not(self, facts: Facts, device: Device) -> str | None:
        """Return the unsupported property of a matmul on `device`; None if all are supported."""
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
        """Return the reason why it does not round sums this way; None if it does."""
        if accumulation in self.accumulations:
            return None
        return f"accumulation={accumulation!r}: it computes real matmuls, not models of them"

    def takes(self, block: BlockSize | None) -> bool:
        """Return True if it takes scales of such blocks; see `Facts.blocks`."""
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


REFERENCE = Backend("emulate", Planner().multiply)


class Choice(NamedTuple):
    """The backend for a matmul, and the reasons against higher-ranked backends."""

    backend: Backend
    refused: dict[str, str]

    def __str__(self) -> str:
        reasons = [f"{name}: {why}" for name, why in self.refused.items()]
        if len(reasons) == 1:
            reasons = list(self.refused.values())
        return ": ".join(filter(None, (self.backend.name, ", ".join(reasons))))


def first_that_can(
    backends: Iterable[tuple[Backend, str | None]], refused: dict[str, str]
) -> Choice:
    """Return the first of `backends` with no reason against it, and the others with `refused`.

    Raises:
      NotImplementedError: no backend that `jfp8.backends` allows computes the matmul.
    """
    for backend, reason in backends:
        if reason is None:
            return Choice(backend, refused)
        refused = refused | {backend.name: reason}
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    raise NotImplementedError(
        f"No backend that jfp8.backends(...) allows computes this matmul ({reasons}). Allow 'bf16' "
        "or 'emulate' as well, or leave the layer in high precision: jfp8.convert(model, "
        "exempt='its path')."
    )


def check_not_refused(implementation: str | None, reason: str | None) -> None:
    """Raise if there is a `reason` why the implementation cannot compute this."""
    if reason is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} does not support {reason}. "
            "Use implementation=None or 'emulate'."
        )
