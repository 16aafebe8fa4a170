"""A moment of an optimizer in FP8, with a scale, or a maximum and a power, for every block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.optim import levels
from jfp8.optim.storage import Storage
from jfp8.scaling import printing
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import codes_of, codes_to_format, decode, encode
from jfp8.scaling.formats import E4M3FN, E8M0FNU, Format, as_format
from jfp8.scaling.granularity import Block, PerTensor, over_blocks
from jfp8.scaling.parts import apply_scale
from jfp8.scaling.random_bits import hash_bits
from jfp8.scaling.scales import (
    LARGEST_SCALE,
    SCALE_ROUNDINGS,
    SMALLEST_SCALE,
    ScaleRounding,
    largest_integer,
    quantize_with_scale,
    scale_from_amax,
)

LARGEST_POWER = np.float32(16)


class ExpandedArray(NamedTuple):
    """Array of ``Blocks(transform="expand")``: ``|x| ~= amax * (|data| / fmt.max)^(1 / power)``.

    `amax` and `power` have the leading dimensions of ``x``, and one entry for each block.
    """

    data: jax.Array  # f8, with the signs of x
    amax: jax.Array  # bf16, rounded up; NaN if an element of the block was not finite
    power: jax.Array  # bf16, multiples of 1/16; integers for E8M0

    def __repr__(self) -> str:
        """Print shapes, not the elements."""
        blocks = f"amax {printing.array(self.amax)}, power {printing.array(self.power)}"
        return f"ExpandedArray({printing.array(self.data)}, {blocks})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values."""
        return self.data.shape


class Grid(NamedTuple):
    """Numbers of each block in ``Blocks(transform="expand")``, f32."""

    amax: jax.Array  # NaN if an element of the block was not finite
    power: jax.Array
    over_amax: jax.Array  # 1 / amax, of all blocks finite
    over_power: jax.Array


@dataclass(frozen=True, repr=False)
class Blocks(Storage):
    """FP8 with one scale for every block of elements along the last axis. ::

        None:       data = fmt(x / scale)               scale = amax / fmt.max
        "expand":   data = fmt(fmt.max * (|x| / amax)^power)

    all with the sign of ``x``. The power of ``"expand"`` stretches the range of the block, from its
    smallest nonzero magnitude to its largest, over the range of the format::

        power = floor(16 * log2(fmt.max^2 / 2) / log2(max / min)) / 16, and 16 at the most

    with the maximum rounded up to bf16 and the minimum down. Elements beyond 2^-48 of the maximum
    do not count as the minimum, and are stored as the smallest value.

    ``Blocks(jfp8.E8M0FNU, transform="expand")`` is for values that are never negative, such as
    second moments. Its 254 values are powers of two, so that the values of ``x`` are spaced in
    equal ratios. Code 0 stands for zero, and a negative number makes its block NaN. Here ``amax``
    is rounded up to a power of two. ``power`` is ``floor(253 / log2(max / min))``, with the minimum
    rounded down to a power of two, to three significant bits and at most 128. So the grid of values
    stays the same while the largest value of the block moves.

    Data has the shape of the array and scales have its leading dimensions, so that a sharding of
    the array applies to both. The last block of a row may be shorter.

    With ``rounding="stochastic"`` the decoded value is unbiased: one of the two neighbors, which
    ``"expand"`` spaces unevenly, is drawn with probabilities given by the distances of the values.
    In E8M0 the logarithm is unbiased instead, since ``1 / sqrt(v)`` then nearly is.

    Attributes:
      fmt: format of the data.
      block: number of elements in a block; None for one scale for the whole array.
      rounding: ``"nearest_even"`` or ``"stochastic"``.
      transform: the map of magnitudes before rounding.
      scale_rounding: rounding of the scales, as in `jfp8.quantize`; not for ``"expand"``, which has
        none.

    References:
      torchao ``OptimStateFp8`` (blocks of 256); COAT, arXiv 2410.19313, section 4.1 ("dynamic range
      expansion", there with ``c = sqrt(max * min)`` kept as well, which cancels out).

    >>> import jax.numpy as jnp
    >>> from jfp8.optim import Blocks
    >>> kept = Blocks(block=4).encode(jnp.arange(12.0).reshape(2, 6), jnp.zeros(2, jnp.uint32))
    >>> kept.data.shape, kept.scale.shape, kept.block
    ((2, 6), (2, 2), (1, 4))
    """

    fmt: Format = E4M3FN
    block: int | None = 128
    rounding: Literal["nearest_even", "stochastic"] = "nearest_even"
    transform: Literal[None, "expand"] = None
    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fmt", as_format(self.fmt))
        in_levels = self.fmt == E8M0FNU and self.transform == "expand"
        if not in_levels and not (self.fmt.signed and self.fmt.has_nan):
            raise TypeError(
                f"Blocks(fmt={self.fmt!r}, transform={self.transform!r}): must be a jfp8.Format "
                "with a sign and a NaN, such as jfp8.E4M3FN or jfp8.E5M2. Values that are never "
                "negative, such as second moments, can use Blocks(jfp8.E8M0FNU, "
                "transform='expand')."
            )
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise ValueError(
                f"Blocks(block={self.block!r}): must be a number of elements along the last axis, "
                "for example 128, or None for one scale for the whole array."
            )
        for name, allowed in (
            ("rounding", ("nearest_even", "stochastic")),
            ("transform", (None, "expand")),
            ("scale_rounding", SCALE_ROUNDINGS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"Blocks({name}={value!r}) is unknown. Allowed: {', '.join(map(repr, allowed))}"
                )
        if self.transform == "expand" and self.scale_rounding is not None:
            raise ValueError(
                f"Blocks(transform='expand', scale_rounding={self.scale_rounding!r}): expansion "
                "stores the amax of a block, not a scale. Drop one of the two."
            )

    def measure(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return the largest magnitude of each block of `x`; for ``"expand"`` the smallest, too."""
        if not self.fmt.signed:
            x = jnp.where(x < 0, jnp.nan, x)  # a NaN makes its block NaN
        # Integers, because a maximum of floats drops NaN on XLA:CPU.
        bits = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)
        granularity = PerTensor() if self.block is None else Block((self.block,))
        reductions = (largest_integer, _smallest_integer)[: 2 if self.transform == "expand" else 1]
        found = [over_blocks(reduce, bits, granularity) for reduce in reductions]
        return tuple(lax.bitcast_convert_type(extreme, jnp.float32) for extreme in found)

    def scales(self, measured: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return the scale of each block, f32, given `measured`; for ``"expand"`` its `Grid`."""
        if self.transform == "expand":
            return self._grid(*measured)
        (largest,), rounding = measured, self.scale_rounding
        return (scale_from_amax(largest, self.fmt, scale_rounding=rounding, poison=True),)

    def round(
        self, x: jax.Array, scales: tuple[jax.Array, ...], seed: jax.Array
    ) -> ScaledArray | ExpandedArray:
        bits = hash_bits(seed, x.shape) if self.rounding == "stochastic" else None
        block = self._block_of(x)
        if self.transform != "expand":
            if block is not None and x.shape[-1] % block[-1] == 0:
                block = None  # the shape of the scales implies it
            return quantize_with_scale(x, scales[0], self.fmt, self.rounding, bits, block)
        grid = Grid(*scales)
        if self.fmt.signed:
            data = self._expand(x, grid, bits)
        else:
            codes = levels.codes(x, grid.over_amax, grid.power, block, bits)
            data = codes_to_format(codes, self.fmt)
        amax, power = grid.amax.astype(jnp.bfloat16), grid.power.astype(jnp.bfloat16)
        return ExpandedArray(data, amax, power)  # both exact in bf16

    def tables(self, stored: ScaledArray | ExpandedArray) -> tuple[jax.Array, ...]:
        if isinstance(stored, ScaledArray):
            return (cast(jax.Array, stored.scale),)
        return stored.amax.astype(jnp.float32), np.float32(1) / stored.power.astype(jnp.float32)

    def decode(self, stored: ScaledArray | ExpandedArray, *tables: jax.Array) -> jax.Array:
        tables = tables or self.tables(stored)
        if isinstance(stored, ScaledArray):
            return scaled_values(replace(stored, scale=tables[0]))
        if self.fmt.signed:
            return self._contract(stored.data, *tables)
        return levels.values(codes_of(stored.data), self._block_of(stored.data), *tables)

    def _grid(self, largest: jax.Array, smallest: jax.Array) -> Grid:
        finite = jnp.isfinite(largest)
        if not self.fmt.signed:
            largest, power = levels.grid(smallest, largest)
        else:
            smallest, largest = _outwards(smallest, largest)
            # So that its reciprocal is a normal number, even for a block of zeros.
            largest = jnp.where(largest < SMALLEST_SCALE, 1.0, jnp.minimum(largest, LARGEST_SCALE))
            binades = jnp.log2(largest) - jnp.log2(smallest)  # the quotient could overflow
            spanned = np.float32(16 * np.log2(self.fmt.max**2 / 2))
            power = jnp.floor(spanned / jnp.clip(binades, 0.1, levels.MOST_BINADES)) / 16
            power = jnp.minimum(power, LARGEST_POWER)
        amax = jnp.where(finite, largest, jnp.nan)
        return Grid(amax, power, np.float32(1) / largest, np.float32(1) / power)

    def _expand(self, x: jax.Array, grid: Grid, bits: jax.Array | None) -> jax.Array:
        fmt, block = self.fmt, self._block_of(x)
        relative = apply_scale(jnp.abs(x), grid.over_amax, block)
        y = np.float32(fmt.max) * jnp.exp2(apply_scale(jnp.log2(relative), grid.power, block))
        # Only zero becomes zero: a second moment of zero next to a nonzero first one would make the
        # update infinite.
        y = jnp.where(jnp.abs(x) < SMALLEST_SCALE, 0.0, jnp.maximum(y, fmt.smallest_subnormal))
        return _with_sign(encode(y, fmt), x, fmt) if bits is None else self._drawn(x, y, grid, bits)

    def _contract(self, data: jax.Array, amax: jax.Array, over_power: jax.Array) -> jax.Array:
        y, block = decode(data), self._block_of(data)
        relative = jnp.abs(y) * np.float32(1 / self.fmt.max)
        relative = jnp.exp2(apply_scale(jnp.log2(relative), over_power, block))
        return jnp.copysign(apply_scale(relative, amax, block), y)

    def _drawn(self, x: jax.Array, y: jax.Array, grid: Grid, bits: jax.Array) -> jax.Array:
        """Round `x`, whose transformed magnitudes are `y`, stochastically.

        The probability comes from the distances of the decoded values:
        ``P(up) = (|x| - low) / (high - low)``. Distances of the ``y`` would decode to too large a
        mean, as roots are concave.
        """
        scales = grid.amax, grid.over_power
        value = lambda codes: self._contract(codes_to_format(codes, self.fmt), *scales)
        below = encode(y, self.fmt, "toward_zero")
        below = jnp.minimum(below, np.uint8(self.fmt.max_code - 1))
        low, high = value(below), value(below + np.uint8(1))
        uniform = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
        up = uniform * (high - low) < jnp.abs(x) - low
        return _with_sign(below + up.astype(jnp.uint8), x, self.fmt)

    def _block_of(self, x: jax.Array) -> tuple[int, ...] | None:
        return None if self.block is None else (1,) * (x.ndim - 1) + (self.block,)


def _smallest_integer(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the smallest unsigned integer along `axes` that is not 0; 0 if all are."""
    one = np.uint32(1)  # less of it, zeros wrap around to the largest integer
    return jnp.min(x - one, axis=axes, initial=np.uint32(0xFFFFFFFF)) + one


def _outwards(smallest: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, high = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
    down = lax.bitcast_convert_type(smallest, jnp.uint32) & high
    up = lax.bitcast_convert_type(largest, jnp.uint32)
    up = (jnp.minimum(up, np.uint32(0x7FFF0000)) + low) & high  # NaN does not grow into the sign
    return (lax.bitcast_convert_type(down, jnp.float32), lax.bitcast_convert_type(up, jnp.float32))


def _with_sign(codes: jax.Array, x: jax.Array, fmt: Format) -> jax.Array:
    sign = lax.bitcast_convert_type(x, jnp.uint32) >> 31 << (fmt.bits - 1)
    return codes_to_format(codes | sign.astype(jnp.uint8), fmt)
