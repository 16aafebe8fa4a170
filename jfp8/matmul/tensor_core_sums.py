"""The product as summed by Hopper's tensor cores: a published model, bit for bit, on any device.

Tensor cores do not add in IEEE arithmetic. They take 32 products at a time, align them and the
running sum to the largest exponent among them, and drop what lies beyond 13 fraction bits::

    E   = max(e(acc), max_k e(a_k) + e(b_k))                      over products that are not zero
    s   = trunc(acc * 2^(13-E)) + sum_k trunc(a_k * b_k * 2^(13-E))                  an integer
    acc = s * 2^(E-13), truncated to 13 fraction bits; a zero is +0

for one block of 32 after the other along the contraction, from ``acc = +0``: a sum of 14 bits.
``trunc`` rounds toward zero. ``e(x) = floor(log2|x|)``, but a subnormal operand has the exponent of
its format's smallest normal value; and products are not normalized, so that one may come close to
``4 * 2^E``. NaN and infinities are summed as in IEEE arithmetic; every NaN is 0x7FFFFFFF.

Everything below is exact in f32, so the order of the additions is free: a product has at most 8
significant bits, a term is an integer below 2^15, and |s| < 2^21. Nothing is small enough to be
flushed to zero: products, and so all sums, are multiples of 2^-32.

References:
  mmaemu 0.1.0 (PyPI), preset "hopper": FP8 matmuls of cuBLASLt 12.8.3.14 on an H100 PCIe, fast
  accumulation, K not split. Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores",
  arXiv:2512.07004.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.codes import decode
from jfp8.scaling.formats import E4M3FN, E5M2, format_of

BLOCK = 32  # products that are added together
FRACTION_BITS = 13  # the running sum's
LOWEST = -19  # all terms are multiples of 2^-32 (e5m2's 2^-16, squared): no lower E cuts anything
OF_ZERO = -64  # an exponent whose sum with any other is below LOWEST, and still fits an int8


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
) -> jax.Array:
    """Multiply two f8 arrays, not yet scaled: one chain over the whole contraction.

    Several contracted dimensions count as one, in the order in which they are named, the last
    varying fastest. An incomplete block is filled with zeros, which change no sum.

    >>> import jax.numpy as jnp
    >>> a = jnp.array([256.0] + 31 * [1.875], jnp.float8_e4m3fn)  # 65536 + 31 * 3.515625
    >>> dot_general(a, a, (((0,), (0,)), ((), ())))  # bits below 2^(16-13) are cut off
    Array(65536., dtype=float32)
    """
    formats = (format_of(lhs.dtype), format_of(rhs.dtype))
    if not {E4M3FN, E5M2}.issuperset(formats):
        raise NotImplementedError(
            "Hopper's tensor cores multiply the formats E4M3FN and E5M2, but the operands are "
            f"{formats[0].name} and {formats[1].name}. Use accumulation='f32'."
        )
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    a, lhs_free = _to_blocks(lhs, lhs_contract, lhs_batch)
    b, rhs_free = _to_blocks(rhs, rhs_contract, rhs_batch)
    batch = [lhs.shape[d] for d in lhs_batch]
    return _chain(a, b).reshape(*batch, *lhs_free, *rhs_free)


def _to_blocks(
    x: jax.Array, contract: Sequence[int], batch: Sequence[int]
) -> tuple[jax.Array, list[int]]:
    """Return `x` as ``[blocks, 32, batch, free]``, and the sizes of its free dimensions."""
    free = [d for d in range(x.ndim) if d not in (*contract, *batch)]
    free_sizes = [x.shape[d] for d in free]
    k, n_batch, n_free = (math.prod(x.shape[d] for d in dims) for dims in (contract, batch, free))
    x = x.transpose(*contract, *batch, *free).reshape(k, n_batch, n_free)
    x = jnp.pad(x, ((0, -k % BLOCK), (0, 0), (0, 0)))
    return x.reshape(-(-k // BLOCK), BLOCK, n_batch, n_free), free_sizes


@jax.jit
def _chain(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``[blocks, 32, B, M]`` and ``[blocks, 32, B, N]`` to ``[B, M, N]``."""
    (a, e_a), (b, e_b) = _value_and_exponent(a), _value_and_exponent(b)
    # A zero computed from the operands, so that it is sharded like them, and varies in shard_map.
    zero = 0 * e_a.sum((0, 1))[:, :, None] + 0 * e_b.sum((0, 1))[:, None, :]
    acc, _ = lax.scan(_add_block, zero.astype(jnp.float32), (a, e_a, b, e_b))
    return jnp.where(
        jnp.isnan(acc), lax.bitcast_convert_type(np.uint32(0x7FFFFFFF), acc.dtype), acc
    )


def _add_block(
    acc: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Return the running sum ``[B, M, N]`` after one more block of 32 products.

    The 32 outer products are unrolled, so that XLA fuses them all into one pass over ``[M, N]`` and
    stores none. On CPUs a loop over k takes at least twice as long, a reduction four times.
    """
    a, e_a, b, e_b = block
    e = [e_a[k][:, :, None] + e_b[k][:, None, :] for k in range(BLOCK)]
    e = functools.reduce(jnp.maximum, e).astype(jnp.int32)
    e_acc = (lax.bitcast_convert_type(acc, jnp.int32) >> 23 & 0xFF) - 127  # -127 for zero
    e = jnp.maximum(jnp.maximum(e, e_acc), LOWEST)
    inverse = _power_of_two(FRACTION_BITS - e)
    s = jnp.trunc(acc * inverse)
    for k in range(BLOCK):
        s = s + jnp.trunc(a[k][:, :, None] * b[k][:, None, :] * inverse)
    acc = s * _power_of_two(e - FRACTION_BITS)
    kept = lax.bitcast_convert_type(acc, jnp.int32) & -(1 << (23 - FRACTION_BITS))
    return lax.bitcast_convert_type(kept, jnp.float32), None


def _value_and_exponent(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values (f32) and exponents ``e(x)`` (int8: the fewer bits, the faster their maximum)."""
    fmt, value = format_of(x.dtype), decode(x)
    magnitude = lax.bitcast_convert_type(value, jnp.int32) & 0x7FFFFFFF
    e = jnp.clip((magnitude >> 23) - 127, fmt.min_exponent, fmt.max_exponent)
    return value, jnp.where(magnitude == 0, OF_ZERO, e).astype(jnp.int8)


def _power_of_two(e: jax.Array) -> jax.Array:
    """Return ``2^e`` of an int32 in [-126, 127], from the bits; XLA's exp2 rounds."""
    return lax.bitcast_convert_type((e + 127) << 23, jnp.float32)
