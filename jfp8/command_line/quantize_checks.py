"""Hold each kernel that quantizes, bit for bit, to `jfp8.quantize` and its parts on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.command_line.exactness import Record, kernel, on_cpu, run, same
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import E8M0FNU, Format
from jfp8.scaling.granularity import Block, PerAxis
from jfp8.scaling.parts import expand_scale
from jfp8.scaling.quantization import block_scale
from jfp8.scaling.scales import amax, quantize_with_scale, reciprocal, scale_from_amax


def agree(ours: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> Record:
    """Hold `ours` to `reference` on a CPU, bit for bit."""
    same(run(ours, *arguments), on_cpu(reference, *arguments))
    return {}


def check_tensor_amax(x: jax.Array) -> Record:
    """Check the amax of a tensor, which is left out unless it is needed."""
    f = lambda x, known: largest(kernel("tensor_amax")(x, known))
    same(run(f, x, jnp.float32([2])), [np.full((), 2, np.float32)])
    return agree(f, lambda x, _: amax(x), x, jnp.float32([0]))


def largest(amaxes: jax.Array) -> jax.Array:
    """Return the amax of a tensor from the bits of the amaxes of its parts."""
    return jax.lax.bitcast_convert_type(jnp.max(amaxes), jnp.float32)


def check_row_and_column_amax(x: jax.Array, sweep: Any = None) -> Record:
    """Check the amaxes of rows and of columns, from one read."""

    def reference(x):
        return amax(x, PerAxis(0))[:, 0], amax(x, PerAxis(1))[0]

    return agree(lambda x: kernel("row_and_column_amax")(x, sweep=sweep), reference, x)


def from_amax(fmt: Format) -> Callable[..., Any]:
    """Return the function by which `quantize_tensor` makes a scale from one amax."""
    make = kernel("scale_and_inverse")
    return lambda known: make(known[0], fmt, None, poison=False)


def check_quantize_tensor(x: jax.Array, fmt: Format, with_amax: bool, sweep: Any = None) -> Record:
    """Check a matrix and its transpose, quantized by one scale that is made inside."""
    known = jnp.float32([3.7])  # some saturate

    def ours(x, known):
        options = {"fmt": fmt, "scale_of": from_amax(fmt), "with_amax": with_amax, "sweep": sweep}
        q, q_t, scale, *amaxes = kernel("quantize_tensor")(x, known, **options)
        return q, q_t, scale, *map(largest, amaxes)

    def reference(x, known):
        scale = scale_from_amax(known, fmt)
        q = _codes(x, reciprocal(scale[0]), fmt)
        return (q, q.T, scale, amax(x)) if with_amax else (q, q.T, scale)

    return agree(ours, reference, x, known)


def check_quantize_lines(x: jax.Array, fmt: Format, sweep: Any = None) -> Record:
    """Check a matrix quantized by row, and its transpose by column."""
    rng = np.random.default_rng(5)
    rows, columns = (
        jnp.asarray(rng.uniform(0.5, 300, size), jnp.float32).at[0].set(1.0) for size in x.shape
    )

    def ours(x, rows, columns):
        return kernel("quantize_lines")(x, rows, columns, fmt, sweep=sweep)

    def reference(x, rows, columns):
        return _codes(x, rows[:, None], fmt), _codes(x, columns[None], fmt).T

    return agree(ours, reference, x, rows, columns)


def _codes(x: jax.Array, inverse: jax.Array, fmt: Format) -> jax.Array:
    # With `inverse`, whoever calls has made non-finite blocks NaN; here none does.
    q = quantize_with_scale(x, jnp.ones_like(inverse), fmt, inverse=inverse).data
    bits = jax.lax.bitcast_convert_type(q, jnp.uint8)
    bits = jnp.where(jnp.isfinite(x), bits, np.uint8(fmt.nan_code))
    return jax.lax.bitcast_convert_type(bits, fmt.dtype)


def check_quantize_rows_in_blocks(
    x: jax.Array, fmt: Format, block: int, rounding: str | None, sweep: Any = None
) -> Record:
    """Check a matrix and its transpose with a scale for each part of a row."""

    def ours(x):
        return kernel("quantize_rows_in_blocks")(x, fmt, block, rounding, sweep=sweep)

    def reference(x):
        q, s = _in_blocks(x, fmt, Block((1, block)), rounding)
        q_t, s_t = _in_blocks(x, fmt, Block((block, 1)), rounding)
        return q, s.T, q_t.T, s_t

    return agree(ours, reference, x)


def check_quantize_tiles(
    x: jax.Array, fmt: Format, rounding: str | None, sweep: Any = None
) -> Record:
    """Check a matrix and its transpose with a scale for each 128x128."""

    def ours(x):
        return kernel("quantize_tiles")(x, fmt, rounding, sweep=sweep)

    def reference(x):
        q, s = _in_blocks(x, fmt, Block((128, 128)), rounding)
        return q, q.T, s

    return agree(ours, reference, x)


def _in_blocks(x: jax.Array, fmt: Format, granularity: Block, rounding: Any) -> Any:
    scale, block, inverse = block_scale(x, fmt, granularity, rounding)
    q = quantize_with_scale(x, scale, fmt, block=block, inverse=inverse)
    # A block without a scale is NaN as a whole; `quantize_with_scale` leaves its zeros as they are,
    # which makes no difference to the values.
    lost = jnp.isnan(expand_scale(inverse, x.shape, granularity.shape))
    bits = jax.lax.bitcast_convert_type(q.data, jnp.uint8)
    bits = jnp.where(lost, np.uint8(fmt.nan_code), bits)
    if scale.dtype == E8M0FNU.dtype:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, fmt.dtype), scale


def check_quantize_heads(x: jax.Array, fmt: Format) -> Record:
    """Check the second and third head of each group of `x`, see the kernel."""
    batch, tokens, groups, *_ = x.shape
    inverse = np.random.default_rng(5).uniform(0.5, 300, (batch, groups, 2, tokens))

    def ours(x, inverse):
        return kernel("quantize_heads")(x, inverse, first=1, fmt=fmt)

    def reference(x, inverse):
        heads = x.transpose(0, 2, 3, 1, 4)[:, :, 1:3].astype(jnp.float32)
        q = cast(heads * inverse[..., None], fmt)
        return q, q.swapaxes(-1, -2)

    return agree(ours, reference, x, jnp.asarray(inverse, jnp.float32))
