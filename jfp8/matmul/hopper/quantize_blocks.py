"""Casts of a matrix to f8 with a scale for each block, in both directions in one pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfp8.matmul.hopper.quantize import (
    COLUMNS,
    ROWS,
    Sweep,
    both_ways,
    f32_magnitude,
    fastest,
    finish,
    for_each_tile,
    from_magnitude,
    magnitude,
    per_line,
    read,
    run,
    saturating,
    staging,
    write,
)
from jfp8.matmul.hopper.tiles import padded
from jfp8.scaling.formats import Format
from jfp8.scaling.scales import SMALLEST_SCALE, ScaleRounding, e8m0_code

INFINITY = np.int32(0x7F800000)


def quantize_rows_in_blocks(
    x: jax.Array,
    fmt: Format,
    block: int,
    scale_rounding: ScaleRounding,
    *,
    sweep: Sweep | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of ``1 x block`` along its rows, and `x.T` along its own rows.

    ``q[i, j] = cast(x[i, j] / s[j // block, i])`` and
    ``q_t[j, i] = cast(x[i, j] / s_t[i // block, j])``, where scales and their reciprocals are those
    of `quantizers.block_scale`: a block with a NaN or Inf in it becomes NaN as a whole. Blocks are
    the first dimension of the scales, so that scales of neighbouring lines are side by side.

    Args:
      x: f32, bf16 or f16[M, N].
      fmt: E4M3FN or E5M2.
      block: 128 or 32.
      scale_rounding: see `scaling.scale_from_amax`.
      sweep: how to walk over `x`; rows and columns are multiples of `block`.
      interpret: see `quantize.tensor_amax`.

    Returns:
      ``q`` f8[M, N], ``s`` [ceil(N / block), M], ``q_t`` f8[N, M], ``s_t`` [ceil(M / block), N].
      The scales are f32, or uint8 E8M0 codes where the rounding gives E8M0.
    """
    m, n = x.shape
    if sweep is None:
        sweep = in_blocks(x.dtype, block)
        sweep = fastest("quantize_rows_in_blocks", x, sweep) if block == 128 else sweep
    assert sweep.rows % block == sweep.columns % block == 0
    x = padded(x, sweep.rows, sweep.columns)
    rows, columns = x.shape

    def kernel(x, q, s, q_t, s_t, staged, staged_t) -> None:
        def body(i, j, tile):
            def cast(values, scales, first, lines):
                # Block by block, for all lines at once.
                parts = []
                for b in range(values.shape[1] // block):
                    part = values[:, b * block : (b + 1) * block]
                    amax = from_magnitude(jnp.max(magnitude(part), axis=1), x.dtype)
                    scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
                    store(scales.at[first + b, lines], scale)
                    scaled = part.astype(jnp.float32) * per_line(inverse, part.shape)
                    parts.append(saturating(scaled, fmt, interpret))
                return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)

            at_row = pl.ds(i * sweep.rows, sweep.rows)
            at_column = pl.ds(j * sweep.columns, sweep.columns)
            codes = cast(read(tile, ROWS), s, j * (sweep.columns // block), at_row)
            write(codes, staged, q.at[at_row, at_column])
            codes = cast(read(tile.T, COLUMNS), s_t, i * (sweep.rows // block), at_column)
            write(codes, staged_t, q_t.at[at_column, at_row])

        for_each_tile(body, x, sweep=sweep)
        finish()

    scale = jnp.float32 if scale_rounding in (None, "power_of_two") else jnp.uint8
    q, s, q_t, s_t = run(
        f"quantize_rows_in_blocks_{block}",
        kernel,
        x,
        out=[
            jax.ShapeDtypeStruct((rows, columns), fmt.dtype),
            jax.ShapeDtypeStruct((columns // block, rows), scale),
            jax.ShapeDtypeStruct((columns, rows), fmt.dtype),
            jax.ShapeDtypeStruct((rows // block, columns), scale),
        ],
        staged=staging(sweep, fmt),
        sweep=sweep,
        interpret=interpret,
    )
    return q[:m, :n], s[: -(-n // block), :m], q_t[:n, :m], s_t[: -(-m // block), :n]


def quantize_tiles(
    x: jax.Array,
    fmt: Format,
    scale_rounding: ScaleRounding,
    *,
    sweep: Sweep | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `x` in blocks of 128x128, which serve both directions: ``q_t`` is ``q.T``.

    Args:
      x: f32, bf16 or f16[M, N].
      fmt: E4M3FN or E5M2.
      scale_rounding: None or ``"power_of_two"``.
      sweep: how to walk over `x`, in tiles of 128x128.
      interpret: see `quantize.tensor_amax`.

    Returns:
      ``q`` f8[M, N], ``q_t`` f8[N, M], scales f32[ceil(M / 128), ceil(N / 128)].
    """
    m, n = x.shape
    sweep = sweep or fastest("quantize_tiles", x, in_blocks(x.dtype, 128))
    assert (sweep.rows, sweep.columns) == (128, 128)
    x = padded(x, 128, 128)
    rows, columns = x.shape

    def kernel(x, q, q_t, s, staged, staged_t) -> None:
        def body(i, j, tile):
            values = read(tile, ROWS)
            # Only reductions over one dimension at a time and bitcasts of vectors can be lowered.
            largest = f32_magnitude(jnp.max(magnitude(values), axis=1), x.dtype)
            amax = lax.bitcast_convert_type(jnp.full((128,), jnp.max(largest)), jnp.float32)
            scale, inverse = scale_and_inverse(amax, fmt, scale_rounding)
            s[i, j] = jnp.max(lax.bitcast_convert_type(scale, jnp.int32))

            def cast(values):
                scaled = values.astype(jnp.float32) * per_line(inverse, values.shape)
                return saturating(scaled, fmt, interpret)

            at_row, at_column = pl.ds(i * 128, 128), pl.ds(j * 128, 128)
            write(cast(values), staged, q.at[at_row, at_column])
            write(cast(read(tile.T, COLUMNS)), staged_t, q_t.at[at_column, at_row])

        for_each_tile(body, x, sweep=sweep)
        finish()

    q, q_t, s = run(
        "quantize_tiles",
        kernel,
        x,
        out=[
            jax.ShapeDtypeStruct((rows, columns), fmt.dtype),
            jax.ShapeDtypeStruct((columns, rows), fmt.dtype),
            jax.ShapeDtypeStruct((rows // 128, columns // 128), jnp.int32),  # bits of the scales
        ],
        staged=staging(sweep, fmt),
        sweep=sweep,
        interpret=interpret,
    )
    return q[:m, :n], q_t[:n, :m], lax.bitcast_convert_type(s, jnp.float32)


def in_blocks(dtype: jax.typing.DTypeLike, block: int) -> Sweep:
    """Tiles of whole blocks in both directions, of which two fit a multiprocessor; for f32 one."""
    if jnp.dtype(dtype).itemsize == 4 and block == 128:
        return Sweep(stages=1)
    return both_ways(dtype)


def store(ref: Any, values: jax.Array) -> None:
    """``ref[...] = values``; JAX 0.12 must be told that single bytes are meant."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def scale_and_inverse(
    amax: jax.Array, fmt: Format, scale_rounding: ScaleRounding
) -> tuple[jax.Array, jax.Array]:
    """The scale of a block and its reciprocal, f32, both NaN if `amax` is not finite.

    Bit for bit the result of `quantizers.block_scale`, by operations that the device also computes
    exactly. E8M0 scales come as their codes (uint8).
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    finite = bits < INFINITY
    if scale_rounding is None:
        # Where the scale would be below 2^-126, or NaN, a number that is safe to divide by.
        smallest = np.float32(fmt.max) * SMALLEST_SCALE
        clipped = jnp.maximum(jnp.where(finite, amax, np.float32(1.0)), smallest)
        scale = divide(clipped, jnp.full_like(amax, np.float32(fmt.max)))
        scale = jnp.where(bits == 0, np.float32(1.0), scale)
        inverse = divide(jnp.ones_like(amax), scale)
        nan = np.float32(np.nan)
        return jnp.where(finite, scale, nan), jnp.where(finite, inverse, nan)
    mode = "rceil" if scale_rounding == "power_of_two" else scale_rounding
    code = e8m0_code(amax, fmt, mode)
    if scale_rounding == "power_of_two":
        code = jnp.where(finite, jnp.where(bits == 0, 127, jnp.clip(code, 1, 253)), 255)
    # The reciprocal of 2^(c-127) has the code 254 - c, which is 0, an f32 subnormal, for no amax.
    inverse = lax.bitcast_convert_type((254 - code) << 23, jnp.float32)
    inverse = jnp.where(code == 255, np.float32(np.nan), inverse)
    if scale_rounding == "power_of_two":
        scale = lax.bitcast_convert_type(code << 23, jnp.float32)
        return jnp.where(finite, scale, np.float32(np.nan)), inverse
    return code.astype(jnp.uint8), inverse


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a / b`` rounded to nearest, for positive normal numbers with a normal quotient.

    The device's own division may be off by two units in the last place.
    """
    return nearest_quotient(a / b, a, b)


def nearest_quotient(y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The f32 nearest to ``a / b``, from a `y` off by at most three units in the last place.

    With the 24-bit mantissas ``A, B, Y`` as integers, ``Y ~ A 2^k / B`` where `k` is 23 or 24. The
    remainder ``A 2^k - B Y`` is a few times `B` at most, which survives arithmetic modulo 2^32, and
    `Y` is right once it is no larger than ``B / 2``. (A quotient never lies halfway.)
    """
    a, b = lax.bitcast_convert_type(a, jnp.int32), lax.bitcast_convert_type(b, jnp.int32)
    bits = lax.bitcast_convert_type(y, jnp.int32)
    hidden, low = np.int32(1 << 23), np.int32((1 << 23) - 1)
    numerator, divisor = (a & low) | hidden, (b & low) | hidden
    # The quotient has the exponent e(a) - e(b), or one less if A < B; `y` may be on either side of
    # a power of two, but A and B are exact. Y counts units of that exponent's last place.
    below = (numerator < divisor).astype(jnp.int32)
    exponent = (a >> 23) - (b >> 23) - below + 127
    quotient = bits - (exponent << 23) + hidden
    remainder = (numerator << (23 + below)) - divisor * quotient
    for _ in range(3):
        step = (2 * remainder > divisor).astype(jnp.int32) - (2 * remainder < -divisor).astype(
            jnp.int32
        )
        quotient = quotient + step
        remainder = remainder - step * divisor
    return lax.bitcast_convert_type(quotient - hidden + (exponent << 23), jnp.float32)
