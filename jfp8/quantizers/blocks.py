"""Quantizers with one scale for every block of elements."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jfp8.quantizers.quantizer import Along, Context, Quantizer, ScalesFromData
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E4M3FN, Format, as_format
from jfp8.scaling.quantization import block_scale, two_level_scale
from jfp8.scaling.scales import Block, amax, ragged_block


@dataclass(frozen=True, repr=False)
class _InBlocks(Quantizer):
    """What quantizers in blocks have in common: the block size, and how blocks lie in an array."""

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
        """The blocks of an array of `ndim` dimensions."""
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
    """A narrow scale for every block, and one f32 scale for the tensor (NVFP4). ::

        S = scale_fmt.max * fmt.max / amax        the tensor's, multiplying
        s = cast(amax_block / fmt.max * S, scale_fmt)
        q = cast(x / (s / S), fmt)                by the rounded s
        x ~= q * s / S

    Attributes:
      block_size: as for `Blockwise`.
      scale_fmt: format of ``s``.

    References:
      arXiv 2509.25149 appendix B; Transformer Engine, ``common/cast/nvfp4``.
    """

    scale_fmt: Format = E4M3FN

    def __post_init__(self) -> None:
        super().__post_init__()
        fmt = as_format(self.scale_fmt, "scale_fmt")
        object.__setattr__(self, "scale_fmt", fmt)
        if not fmt.signed or not fmt.has_nan:
            raise ValueError(
                f"scale_fmt={fmt!r}: must be a format with a sign and a NaN (for the scale of a "
                "block that holds one), such as jfp8.E4M3FN."
            )

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        granularity = self.granularity(x.ndim, context)
        scale, inverse = two_level_scale(amax(x, granularity), self.fmt, self.scale_fmt)
        block = ragged_block(granularity, x.shape)
        return self.data_for(x, scale, context, block=block, inverse=inverse)
