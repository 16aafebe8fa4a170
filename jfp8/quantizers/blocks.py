"""Quantizers with one scale for every block of elements."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import jax

from jfp8.quantizers.quantizer import EVERYWHERE, Along, Context, Quantizer, ScalesFromData
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E2M1FN, E4M3FN, Format, as_format
from jfp8.scaling.granularity import Block, ragged_block
from jfp8.scaling.least_error import LARGEST_COMPARED, with_least_error
from jfp8.scaling.quantization import block_scale, two_level_scale
from jfp8.scaling.scales import amax

Outer = Literal["tensor", "row"]


@dataclass(frozen=True, repr=False)
class _InBlocks(Quantizer):
    """Base of quantizers in blocks: the block size and the layout of blocks in an array."""

    block_size: tuple[int, int] = (32, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.block_size
        if not (
            isinstance(size, tuple)
            and len(size) == 2
            and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in size)
        ):
            raise ValueError(
                "block_size must be two positive ints, the size along the contraction and the size "
                f"along the free dimension, like (32, 1) or (128, 128); got {size!r}."
            )

    @property
    def block(self) -> tuple[int, int]:
        return self.block_size

    @property
    def one_for_both(self) -> bool:
        return self.block_size[0] == self.block_size[1]

    def granularity(self, ndim: int, context: Context) -> Block:
        """Return the blocks of an array of `ndim` dimensions."""
        (contracting,) = context.contracting
        return Block(
            tuple(self.block_size[0 if d == contracting else 1] for d in (ndim - 2, ndim - 1))
        )


@dataclass(frozen=True, repr=False)
class Blockwise(ScalesFromData, _InBlocks):
    """One scale for every block of elements, from the data itself (current scaling).

    Attributes:
      block_size: elements of a block along the contraction, and along the free dimension. If both
        are equal, both directions of contraction see the same numbers.
      scale_rounding: see `scaling.scale_from_amax`; None gives f32 scales.
    """

    @property
    def powers_of_two(self) -> bool:
        return self.scale_rounding is not None

    def scale_shared_along(self, history: bool) -> frozenset[Along]:
        del history
        along: tuple[Along, Along] = ("contracting", "free")
        sizes = zip(along, self.block_size, strict=True)
        return frozenset(dimension for dimension, size in sizes if size > 1)

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        granularity = self.granularity(x.ndim, context)
        scale, block, inverse = block_scale(x, self.fmt, granularity, self.scale_rounding)
        return self.data_for(x, scale, context, block=block, inverse=inverse)


@dataclass(frozen=True, repr=False)
class TwoLevel(_InBlocks):
    """A narrow scale for every block, and one f32 scale for the tensor, or for each row. ::

        S = reach / amax                          of the tensor, or the row; multiplying
        s = cast(amax_block / t * S, scale_fmt)   for a target t
        q = cast(x / (s / S), fmt)                by the rounded s
        x ~= q * s / S

    With one target, ``fmt.max``, and a reach of ``scale_fmt.max * fmt.max``, this is NVFP4. With
    several, each block takes the one whose values, rounded to nearest, have the smallest sum of
    squared errors, and of equal ones the first. The choice does not depend on random bits: with
    it, stochastic rounding stays unbiased.

    Attributes:
      block_size: see `Blockwise`.
      scale_fmt: format of ``s``.
      targets: to what the largest value of a block may be scaled; ``()``: to ``fmt.max``.
      reach: to what the largest value of all is scaled, before ``s`` divides it; None:
        ``scale_fmt.max`` times the first target. No larger than ``scale_fmt.max`` times the
        smallest, or ``s`` would saturate.
      outer: unit that shares an ``S``: the ``"tensor"``, or each ``"row"`` that a matmul sums over.

    References:
      arXiv 2509.25149 appendix B; Transformer Engine, ``common/cast/nvfp4``. Several targets: arXiv
      2512.02010.
    """

    scale_fmt: Format = E4M3FN
    targets: tuple[float, ...] = ()
    reach: float | None = None
    outer: Outer = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        fmt = as_format(self.scale_fmt, "scale_fmt")
        object.__setattr__(self, "scale_fmt", fmt)
        if not fmt.signed or not fmt.has_nan:
            raise ValueError(
                f"scale_fmt={fmt!r}: must be a format with a sign and a NaN (for the scale of a "
                "block that holds one), such as jfp8.E4M3FN."
            )
        self._check_targets()
        if self.outer not in ("tensor", "row"):
            raise ValueError(f"outer={self.outer!r} is unknown. Allowed: 'tensor', 'row'.")
        if self.outer == "row" and self.block_size[1] != 1:
            raise ValueError(
                f"outer='row' with block_size={self.block_size!r}: the rows of a block would have "
                f"different scales. Use block_size=({self.block_size[0]}, 1)."
            )

    def _check_targets(self) -> None:
        targets, elements = self.targets, math.prod(self.block_size)
        if not isinstance(targets, tuple) or not all(map(_is_positive, targets)):
            raise ValueError(
                f"targets={targets!r}: must be a tuple of positive numbers, such as (6.0, 4.0)."
            )
        if self.reach is not None and not _is_positive(self.reach):
            raise ValueError(f"reach={self.reach!r}: must be None or a positive number.")
        first, *_ = targets = targets or (self.fmt.max,)
        reach = self.scale_fmt.max * first if self.reach is None else self.reach
        most = self.scale_fmt.max * min(targets)
        if reach > most:
            raise ValueError(
                f"targets={self.targets!r} with reach={self.reach!r}: the scale of a block would "
                f"be up to {reach / min(targets):g}, but {self.scale_fmt.name} ends at "
                f"{self.scale_fmt.max:g}. Give it a reach of at most {most:g}."
            )
        if len(targets) > 1 and (elements > LARGEST_COMPARED or self.fmt != E2M1FN):
            raise ValueError(
                f"targets={targets!r} for {self.fmt.name} and block_size={self.block_size!r}: "
                f"errors are compared for E2M1FN in blocks of at most {LARGEST_COMPARED} elements. "
                "Use such blocks, or one target."
            )

    @property
    def one_for_both(self) -> bool:
        return super().one_for_both and not self.spans_rows

    @property
    def spans_rows(self) -> bool:
        return self.outer == "row"

    def scale_shared_along(self, history: bool) -> frozenset[Along]:
        del history
        return frozenset(("contracting",)) if self.outer == "row" else EVERYWHERE

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        granularity = self.granularity(x.ndim, context)
        block = ragged_block(granularity, x.shape)
        largest = amax(x, granularity)
        targets = self.targets or (self.fmt.max,)
        reach = self.scale_fmt.max * targets[0] if self.reach is None else self.reach
        scales = functools.partial(
            two_level_scale,
            *(largest, self.fmt, self.scale_fmt),
            reach=reach,
            axis=context.contracting[0] if self.outer == "row" else None,
        )
        scale, inverse = with_least_error(x, [scales(target=t) for t in targets], granularity)
        return self.data_for(x, scale, context, block=block, inverse=inverse)


def _is_positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf
