"""From values to the codes of a format and back, by their bits. Formats are not checked here.

Finite values beyond the range and infinities become the largest finite value; NaN stays NaN.
Hardware and compilers disagree on both, so codes are made from the bits of the input, with one
rounding, and are equal on every backend.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.formats import E4M3FN, E5M2, Format, format_of
from jfp8.tracing.device import current_device
from jfp8.tracing.devices import Gpu


def as_float_array(x: jax.typing.ArrayLike, what: str, *, codes: bool = True) -> jax.Array:
    """Return `x` as an array of a floating dtype of at most 32 bits, or raise ``TypeError``.

    With `codes` False, FP8 without its scale raises as well.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{what} has dtype {x.dtype}, but only real floating dtypes can be rounded to FP8 "
            f"(float32, bfloat16, float16). Convert it first, e.g. x.astype(jnp.float32)."
        )
    if x.dtype == jnp.float64:
        raise TypeError(
            f"{what} has dtype float64, which would be rounded twice on its way to FP8 (first to "
            "float32). Convert it yourself where that is acceptable: x.astype(jnp.float32)."
        )
    if x.dtype.itemsize == 1 and not codes:
        raise TypeError(
            f"{what} is {x.dtype.name}, but FP8 data needs a scale: pass x.astype(jnp.bfloat16), "
            "which is quantized here, or a weight as jfp8.ScaledArray(data, scale)."
        )
    return x


def encode(
    x: jax.Array,
    fmt: Format,
    rounding: str = "nearest_even",
    bits: jax.Array | None = None,
    *,
    finds_nan: bool = True,
) -> jax.Array:
    """Return the ``uint8`` codes of `x` in `fmt`, saturating.

    Without `finds_nan` the codes of NaN are any: for callers that know where it is. `bits` are the
    words for stochastic rounding.

    The magnitude of a normal value is its own bit pattern, rounded in integers where the format's
    mantissa ends. A subnormal has a fixed grid instead, on which one float addition rounds.
    """
    if not fmt.signed:
        return _encode_power_of_two(x, rounding, bits)
    if hardware_converts(fmt, rounding):
        return _encode_by_hardware(x, fmt)
    # bf16 is rounded in 16-bit lanes, twice as many per instruction; all else goes through f32.
    if x.dtype != jnp.bfloat16 or rounding != "nearest_even":
        x = x.astype(jnp.float32)
    lane, width = (np.uint16, 7) if x.dtype == jnp.bfloat16 else (np.uint32, 23)
    pattern = lax.bitcast_convert_type(x, lane)
    magnitude = pattern & lane((1 << (width + 8)) - 1)
    infinity = lane(0xFF << width)
    first_normal = lane((fmt.min_exponent + 127) << width)
    shift = width - fmt.mantissa_bits  # mantissa bits that are rounded away
    # Subtracts the difference of the biases, before the shift.
    rebias = lane(-((127 - fmt.bias) << width) % (1 << lane(0).nbytes * 8))

    if rounding == "nearest_even":
        odd = (magnitude >> shift) & lane(1)
        normal = (magnitude + (rebias + lane((1 << (shift - 1)) - 1)) + odd) >> shift
        # Adding a power of two whose ulp is the subnormal step rounds to that step, ties to even;
        # the low bits of the sum are the code.
        magic = np.float32(2.0 ** (23 + fmt.min_exponent - fmt.mantissa_bits))
        total = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)) + magic, jnp.uint32)
        subnormal = (total - magic.view(np.uint32)).astype(lane)
    else:
        drawn = lane(0) if bits is None else bits & lane((1 << shift) - 1)
        normal = (magnitude + drawn + rebias) >> shift
        # `shift` more bits than the code has; min() keeps the conversion of normals in range.
        step = np.float32(2.0 ** (fmt.mantissa_bits - fmt.min_exponent + shift))
        fixed = jnp.minimum(jnp.abs(x) * step, np.float32(2.0**width))
        subnormal = (fixed.astype(jnp.int32).astype(lane) + drawn) >> shift

    code = lax.select(magnitude >= first_normal, normal, subnormal)
    code = jnp.minimum(code, lane(fmt.max_code))
    sign = (pattern >> (width + 8)) << (fmt.bits - 1)
    if finds_nan:
        code = replaced_where(magnitude > infinity, code, lane(fmt.nan_code))
    return (code ^ sign).astype(jnp.uint8)


def hardware_converts(fmt: Format, rounding: str = "nearest_even") -> bool:
    """Return whether the GPU that JAX traces for has instructions that round so to `fmt`."""
    if rounding != "nearest_even" or fmt not in (E4M3FN, E5M2):
        return False
    device = current_device()
    return isinstance(device, Gpu) and device.multiplies_f8


def convert(x: jax.Array, fmt: Format) -> jax.Array:
    """Convert `x` to ``fmt.dtype``, saturating, by instructions of the processor.

    NaN stays NaN, of any sign. XLA's own conversion does not saturate e4m3fn.
    """
    limit = np.float32(fmt.max)
    return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(fmt.dtype)


def _encode_by_hardware(x: jax.Array, fmt: Format) -> jax.Array:
    """Encode with the sign of a NaN, which `convert` loses."""
    x = x.astype(jnp.float32)
    sign = lax.bitcast_convert_type(x, jnp.uint32) >> 31 << (fmt.bits - 1)
    code = lax.bitcast_convert_type(convert(x, fmt), jnp.uint8)
    return jnp.where(jnp.isnan(x), np.uint8(fmt.nan_code) ^ sign.astype(jnp.uint8), code)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Return the bits of ``|x|``, of f32 or 16 bits, which order as finite < Inf < NaN."""
    lane = {2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    if not isinstance(current_device(), Gpu):
        return lax.bitcast_convert_type(x, lane) & lane(np.iinfo(lane).max >> 1)
    # Where two amaxes of an array need the integers, XLA's GPU compiler would write them to memory.
    return lax.bitcast_convert_type(jnp.abs(x), lane)


def _encode_power_of_two(x: jax.Array, rounding: str, bits: jax.Array | None) -> jax.Array:
    """Return E8M0 codes: the f32 exponent field, rounded by the mantissa below it.

    Code 0 (2^-127) is an f32 subnormal, whose leading one sits in the mantissa field: doubling the
    pattern puts it where a hidden bit would be, so that both cases round by the same rule.
    """
    pattern = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    exponent = (pattern >> 23) & np.uint32(0xFF)  # -0 counts as zero, other negatives below
    mantissa = pattern & np.uint32(0x7FFFFF)
    # Subnormals from 2^-127 up: value = 2^-127 * (1 + fraction). Below it everything is 2^-127.
    fraction = jnp.where(
        exponent > 0,
        mantissa,
        (jnp.maximum(mantissa, np.uint32(0x400000)) - np.uint32(0x400000)) << 1,
    )
    if rounding == "nearest_even":
        up = fraction >= np.uint32(0x400000)
    elif rounding == "toward_zero":
        up = jnp.zeros(x.shape, bool)
    else:
        assert bits is not None
        up = fraction + (bits & np.uint32(0x7FFFFF)) >= np.uint32(1 << 23)
    code = jnp.minimum(exponent + up.astype(jnp.uint32), np.uint32(254))
    invalid = (pattern > np.uint32(0x7F800000)) & (pattern != np.uint32(0x80000000))
    return jnp.where(invalid, np.uint32(255), code).astype(jnp.uint8)


def replaced_where(mask: jax.Array, x: jax.Array, constant: Any) -> jax.Array:
    """Return `x`, with a constant of its dtype where `mask` is True.

    In programs that people read this is two operations, and ``jnp.where`` is a function.
    """
    return lax.select(mask, jnp.full_like(x, constant), x)


def codes_to_format(codes: jax.Array, fmt: Format) -> jax.Array:
    """Reinterpret ``uint8`` codes as ``fmt.dtype``."""
    if fmt.bits < 8:
        codes = codes.astype(jnp.uint4)
    return lax.bitcast_convert_type(codes, fmt.dtype)


def codes_of(data: jax.Array) -> jax.Array:
    """Return the ``uint8`` codes of an array stored in one of the formats."""
    if format_of(data.dtype).bits < 8:
        return lax.bitcast_convert_type(data, jnp.uint4).astype(jnp.uint8)
    return lax.bitcast_convert_type(data, jnp.uint8)


def decode(data: jax.Array) -> jax.Array:
    """Return exact f32 values of an array stored in one of the formats.

    A code is a float16 pattern once sign and mantissa are shifted into place, subnormals included;
    only the exponent's bias is off, by a power of two. Processors convert float16 natively, while
    XLA:CPU takes three times as long for ``astype`` from an f8 type.
    """
    fmt = format_of(data.dtype)
    if not fmt.signed:
        return data.astype(jnp.float32)
    if fmt.bias == 15:  # E5M2 is the upper half of float16, with its Inf and NaN
        pattern = codes_of(data).astype(jnp.uint16) << 8
        return lax.bitcast_convert_type(pattern, jnp.float16).astype(jnp.float32)
    # With its sign extended, a code needs one shift; the copies of the sign below it are cleared.
    code = codes_of(data) << (8 - fmt.bits) if fmt.bits < 8 else codes_of(data)
    extended = lax.bitcast_convert_type(code, jnp.int8).astype(jnp.int16)
    top = fmt.bits + 9 - fmt.mantissa_bits
    pattern = (extended << (top - 7)) & np.int16(~(0x7FFF << top) & 0x7FFF | -0x8000)
    values = lax.bitcast_convert_type(pattern, jnp.float16).astype(jnp.float32)
    # In integers: XLA would combine a factor here with the scale that comes next, and overflow.
    rebias = np.uint32((15 - fmt.bias) << 23)
    rebiased = lax.bitcast_convert_type(values, jnp.uint32) + rebias
    rebiased = lax.bitcast_convert_type(rebiased, jnp.float32)
    values = lax.select(values == 0, values, rebiased)
    if not fmt.has_nan:
        return values
    return replaced_where(jnp.abs(values) > np.float32(fmt.max), values, np.float32(np.nan))
