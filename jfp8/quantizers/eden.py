"""The quantizer that is unbiased because its operand was rotated at random."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.quantizers.blocks import TwoLevelScales
from jfp8.quantizers.quantizer import Context
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_to_format, decode, encode
from jfp8.scaling.granularity import ragged_block
from jfp8.scaling.parts import apply_scale
from jfp8.scaling.random_bits import hash_bits
from jfp8.scaling.scales import quantize_with_scale, reciprocal


@dataclass(frozen=True, repr=False)
class Eden(TwoLevelScales):
    """`TwoLevel` with values rounded to nearest, and scales that make up for it (MS-EDEN). ::

        q  = cast(x / (s / S), fmt)                    to nearest, as in `TwoLevel`
        c  = sum(x^2) / sum(x * q * s / S)             of each group of values along the sum
        s' = stochastic(c * s, scale_fmt)
        x ~= q * s' / S

    So ``sum(x * x~) = sum(x^2)`` on average: the part of the error along `x` is removed. What is
    left is orthogonal to `x`, and averages to zero over random rotations of the groups: rotate
    the operands by a ``RandomHadamard`` of as many values. (A Hadamard matrix with random signs is
    not uniformly random, so that a small bias remains.) Values are not rounded stochastically, and
    so lose less.

    Attributes:
      block_size, scale_fmt, targets, reach, outer: as for `TwoLevel`. Leave room for `c` below
        ``scale_fmt.max``, by the `reach`; the free dimension of a block is 1.
      group: the number of values along the sum that share a ``c``: a multiple of the block's.

    References:
      arXiv 2601.22813, "MS-EDEN", whose sums are of values that are already divided by their
      blocks' scales; EDEN, arXiv 2108.08842.
    """

    group: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        along, free = self.block_size
        group = self.group
        if isinstance(group, bool) or not isinstance(group, int) or group < 1 or group % along:
            raise ValueError(
                f"group={group!r} with block_size={self.block_size!r}: must be a positive multiple "
                f"of the {along} values of a block along the sum."
            )
        if free != 1:
            raise ValueError(
                f"Eden(block_size={self.block_size!r}): a group is a stretch along the sum. Use "
                f"block_size=({along}, 1)."
            )
        if self.rounding != "nearest_even":
            raise ValueError(
                f"Eden(rounding={self.rounding!r}): values are rounded to nearest, and "
                "unbiased through their scales. Use TwoLevel for another rounding."
            )

    @property
    def one_for_both(self) -> bool:
        return False

    @property
    def stochastic(self) -> bool:
        return True

    def __call__(self, x: jax.Array, context: Context) -> ScaledArray:
        assert context.seed is not None  # stochastic quantizers always get one
        (axis,) = context.contracting
        block = ragged_block(self.granularity(x.ndim, context), x.shape)
        scale, inverse = self.scales(x, context)
        q = quantize_with_scale(x, scale, self.fmt, block=block, inverse=inverse)
        s, outer = decode(scale.data), scale.scale
        assert isinstance(outer, jax.Array)
        # In units of the outer scale, so that no square leaves the range of f32.
        stored = apply_scale(decode(q.data), s, block)
        given = jnp.where(jnp.isnan(stored), 0.0, x.astype(jnp.float32) * reciprocal(outer))
        stored = jnp.where(jnp.isnan(stored), 0.0, stored)
        wanted, found = (_group_sums(given * y, self.group, axis) for y in (given, stored))
        correction = jnp.where(found > 0, wanted / jnp.where(found > 0, found, 1.0), 1.0)
        correction = jnp.repeat(correction, self.group // self.block_size[0], axis=axis)
        s = s * lax.slice_in_dim(correction, 0, s.shape[axis], axis=axis)
        codes = encode(s, self.scale_fmt, "stochastic", hash_bits(context.seed, s.shape))
        narrow = codes_to_format(codes, self.scale_fmt)
        return ScaledArray(q.data, ScaledArray(narrow, outer), block)


def _group_sums(x: jax.Array, group: int, axis: int) -> jax.Array:
    """Sum `group` consecutive values along `axis`, the last group padded with zeros."""
    x = jnp.pad(x, [(0, -n % group if d == axis else 0) for d, n in enumerate(x.shape)])
    shape = [*x.shape[:axis], x.shape[axis] // group, group, *x.shape[axis + 1 :]]
    return jnp.sum(x.reshape(shape), axis=axis + 1)
