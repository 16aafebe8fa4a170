"""The bytes sent between devices: for each block, codes in one of the formats and a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.casts import ROUNDINGS, Rounding
from jfp8.scaling.codes import codes_of, codes_to_format, decode
from jfp8.scaling.formats import E4M3FN, FORMATS, Format, as_format
from jfp8.scaling.granularity import Block
from jfp8.scaling.quantization import block_scale
from jfp8.scaling.random_bits import fold_in, hash_bits, seed_of
from jfp8.scaling.scales import quantize_with_scale

AxisName: TypeAlias = Any
"""What `jax.lax` takes: the name of a mapped axis, or a tuple of several."""

E2M5 = Format("E2M5", np.dtype(np.uint8), 2, 5, 1, 7.75, 0x7E, 0x7F)
"""Two bits of exponent and five of mantissa: noise of -43 dB, not -31.5. Only for the wire."""

FINEST: tuple[Format, Format] = (E4M3FN, E2M5)
"""As `fmt` of a collective: the more accurate of the two for each block."""

MIN_SIZE = 2**12
"""Below 16 KiB of f32, the time of a collective is its latency, whatever its bytes."""

_ON_WIRE = (*(f for f in FORMATS if f.bits == 8 and f.signed), E2M5)


@dataclass(frozen=True)
class Wire:
    """Pack the elements of an array into records.

    Attributes:
      axis_name: the devices that take part.
      fmt: 8-bit format of the codes. Of two, every block is written in the more accurate one, and
        the sign of its scale tells which: negative for the second.
      block: number of elements in a record, which share a scale.
      rounding: see `jfp8.cast`.
    """

    axis_name: AxisName
    fmt: Format | tuple[Format, Format] = FINEST
    block: int = 128
    rounding: Rounding = "nearest_even"

    def __post_init__(self) -> None:
        given = self.fmt if isinstance(self.fmt, tuple) else (self.fmt,)
        formats = tuple(as_format(f, known=(*FORMATS, E2M5)) for f in given)
        object.__setattr__(self, "fmt", formats if isinstance(self.fmt, tuple) else formats[0])
        if len(formats) not in (1, 2) or not all(f in _ON_WIRE for f in formats):
            allowed = ", ".join(f.name for f in _ON_WIRE)
            raise TypeError(
                f"fmt must be a format of one byte with a sign, one of {allowed}, or two of them; "
                f"got {self.fmt!r}. A collective sends whole bytes."
            )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(
                f"block={self.block!r} must be a positive int: the number of elements that share "
                "a scale, for example 128."
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding={self.rounding!r} is unknown. Allowed: {', '.join(ROUNDINGS)}."
            )

    @property
    def formats(self) -> tuple[Format, ...]:
        """`fmt` as a tuple."""
        return self.fmt if isinstance(self.fmt, tuple) else (self.fmt,)

    @property
    def devices(self) -> int:
        """The number of devices that take part."""
        return lax.axis_size(self.axis_name)

    @property
    def record(self) -> int:
        """Bytes in a record: the codes, and a scale in f32."""
        return self.block + 4

    def pays(self, sizes: list[int], multiple: int = 1) -> bool:
        """Return whether arrays of `sizes` take fewer bytes than f32 in a `multiple` of records."""
        records = sum(-(-size // self.block) for size in sizes)
        return -(-records // multiple) * multiple * self.record < 4 * sum(sizes)

    def seed(self, key: jax.Array | None) -> jax.Array | None:
        """A different seed on every device, if the rounding needs one: uint32[2]."""
        if self.rounding != "stochastic":
            return None
        if key is None:
            raise ValueError(
                "rounding='stochastic' needs random bits, but key is None. Pass "
                "key=jax.random.key(seed), a new one for every call and the same on all devices."
            )
        return fold_in(seed_of(key), lax.axis_index(self.axis_name).astype(jnp.uint32))

    def write(self, x: jax.Array, seed: jax.Array | None) -> jax.Array:
        """The records of `x`, float[..., k]: uint8[..., ceil(k / block), record]."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.block)])
        x = x.reshape(*x.shape[:-1], -1, self.block)
        bits = None if seed is None else hash_bits(seed, x.shape)
        codes, scale = self._codes(x, self.formats[0], self.rounding, bits)
        for other in self.formats[1:]:
            other_codes, other_scale = self._codes(x, other, self.rounding, bits)
            nearer = self._error(x, other) < self._error(x, self.formats[0])
            codes = jnp.where(nearer, other_codes, codes)
            scale = jnp.where(nearer, -other_scale, scale)
        scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8)[..., 0, :]
        return jnp.concatenate([codes, scale_bytes], axis=-1)

    def _codes(
        self, x: jax.Array, fmt: Format, rounding: str, bits: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Codes of x, float[..., block], and its scale, f32[..., 1]."""
        # A block with an Inf or a NaN becomes NaN, through its scale, and so does any sum with it.
        scale, _, inverse = block_scale(x, fmt, Block((self.block,)))
        q = quantize_with_scale(x, scale, fmt, rounding, bits, inverse=inverse)
        return codes_of(q.data), scale

    def _error(self, x: jax.Array, fmt: Format) -> jax.Array:
        """Squared error of rounding x, float[..., block], to nearest, summed: f32[..., 1].

        In units of the largest element, so that none underflows. It decides for stochastic
        rounding, too: a choice that depended on the draws would be biased.
        """
        codes, scale = self._codes(x, fmt, "nearest_even", None)
        largest = scale * np.float32(fmt.max)
        error = _values(codes, fmt) / np.float32(fmt.max) - x.astype(jnp.float32) / largest
        return jnp.sum(error * error, axis=-1, keepdims=True)

    def read(self, records: jax.Array) -> jax.Array:
        """The values of uint8[..., records, record]: f32[..., records * block]."""
        codes, scale_bytes = records[..., : self.block], records[..., self.block :]
        scale = lax.bitcast_convert_type(scale_bytes, jnp.float32)[..., None]
        values = _values(codes, self.formats[0])
        for other in self.formats[1:]:
            values = jnp.where(scale < 0, _values(codes, other), values)
        return (values * jnp.abs(scale)).reshape(*records.shape[:-2], -1)

    def exchange(self, records: jax.Array) -> jax.Array:
        """Send part ``j`` of uint8[devices, ...] to device ``j``; the parts from all, in order."""
        return lax.all_to_all(records, self.axis_name, 0, 0, tiled=True)


def _values(codes: jax.Array, fmt: Format) -> jax.Array:
    """f32 values of ``uint8`` codes."""
    if fmt is not E2M5:
        return decode(codes_to_format(codes, fmt))
    magnitude = codes & np.uint8(0x7F)
    exponent, mantissa = magnitude >> 5, (magnitude & np.uint8(31)).astype(jnp.uint32)
    # In steps of 2^-5: subnormals below 32, then 32 of them for each power of two.
    hidden = (mantissa + np.uint32(32)) << (jnp.maximum(exponent, 1) - 1).astype(jnp.uint32)
    steps = jnp.where(exponent == 0, mantissa, hidden)
    values = steps.astype(jnp.float32) * np.float32(1 / 32)
    values = jnp.where(magnitude == fmt.nan_code, jnp.nan, values)
    return jnp.where(codes > magnitude, -values, values)
