"""Matmuls of two matrices of f8 codes, on the matrix units of a TPU.

If no scale varies along the contraction, the units take the codes themselves: a TPU7x multiplies
f8, earlier TPUs convert f8 to bf16, which is exact. If scales do, each tile is dequantized to
bf16 as it arrives, which is exact for powers of two, and is never in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jfp8.kernels.tpu.sharded import LANES
from jfp8.matmul.spec import LARGEST_FACTOR
from jfp8.tracing.compat import kernels_are_interpreted, of_varying

TILE = 1024  # rows, columns and terms of a tile, at most
VMEM = 48 * 2**20  # bytes that a kernel may use; a TPU7x has 64 MiB for each core, others 128

# A matrix of one element, for registers of scalars: vectors of them are not batched by ``vmap``.
ONE_NUMBER = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)

Ref = Any


@of_varying
@partial(jax.jit, static_argnames=("summed", "dtype", "in_blocks", "flops"))
def matmul(
    a: jax.Array,
    b: jax.Array,
    summed: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    *,
    scales: tuple[jax.Array, jax.Array],
    in_blocks: bool,
    bias: jax.Array | None = None,
    flops: int | None = None,
) -> jax.Array:
    """Compute ``y[i, j] = sum_k a[i, k] b[j, k] s[i] t[j]``, in f32, rounded once.

    Args:
      a, b: f8 matrices whose sizes are multiples of `LANES`, in any layout.
      summed: the dimension of either that is summed over.
      dtype: dtype of the result, f32 or bf16.
      scales: ``s`` and ``t``: f32[], or f32[m, 1] and f32[1, n]. Or `in_blocks`, powers of two, one
        for each block of 32 or 128 terms: f32, or uint8 of E8M0 codes, ``[k / block, free]``.
      bias: [1, n], added to ``y`` in its dtype; None for no bias.
      flops: the number for the compiler's schedule; ``2 m n k`` if None.
    """
    m, n, k = a.shape[1 - summed[0]], b.shape[1 - summed[1]], a.shape[summed[0]]
    step = min(k, TILE) if in_blocks else divisor(k)  # tiles of scales must be whole
    sizes = {"m": _rows(m), "n": _rows(n), "k": step, "": 1}

    def spec(*dims: str) -> pl.BlockSpec:
        at = lambda i, j, t: tuple({"m": i, "n": j, "k": t, "": 0}[d] for d in dims)
        return pl.BlockSpec([sizes[d] for d in dims], at)

    specs = [spec(*((free, "k") if dim else ("k", free))) for dim, free in zip(summed, "mn")]
    of_scales = []
    for scale, free, dims in zip(scales, "mn", (("m", ""), ("", "n")), strict=True):
        if in_blocks:
            rows = step * len(scale) // k
            of_scales.append(pl.BlockSpec((rows, sizes[free]), spec("k", free).index_map))
        else:
            of_scales.append(spec(*dims) if scale.ndim else ONE_NUMBER)
    of_bias = None if bias is None else spec("", "n")
    scales_2d = [scale if scale.ndim else scale.reshape(1, 1) for scale in scales]
    operands = a, b, scales_2d, bias

    out = jax.ShapeDtypeStruct((m, n), dtype)
    moved = jax.tree.leaves((operands, out))
    return pl.pallas_call(
        partial(_kernel, summed=summed, in_blocks=in_blocks, step=step, left=k % step),
        grid=(pl.cdiv(m, sizes["m"]), pl.cdiv(n, sizes["n"]), pl.cdiv(k, step)),
        in_specs=(*specs, of_scales, of_bias),
        out_specs=spec("m", "n"),
        out_shape=out,
        scratch_shapes=[pltpu.VMEM((sizes["m"], sizes["n"]), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k if flops is None else flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * np.dtype(x.dtype).itemsize for x in moved),
        ),
        name="jfp8_matmul_in_blocks" if in_blocks else "jfp8_matmul",
    )(*in_hbm(operands))


def _kernel(a, b, scales, bias, y, total, *, summed, in_blocks, step: int, left: int) -> None:
    """Add `step` terms to the sums of a tile; the last time `left`, unless that is 0."""
    t, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(t == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    tiles: list[jax.Array] = [a[...], b[...]]
    if in_blocks:
        tiles = [dequantized(*each) for each in zip(tiles, (s[...] for s in scales), summed)]
        if left:  # values read beyond them are not zero
            terms = jnp.where(t == last, left, step)
            at = [lax.broadcasted_iota(jnp.int32, x.shape, d) for x, d in zip(tiles, summed)]
            tiles = [jnp.where(i < terms, x, jnp.zeros_like(x)) for i, x in zip(at, tiles)]
    numbers = (((summed[0],), (summed[1],)), ((), ()))
    first, second = tiles
    total[...] += lax.dot_general(first, second, numbers, preferred_element_type=jnp.float32)

    @pl.when(t == last)
    def _():
        result = total[...]
        if not in_blocks:
            s, t = (x[0, 0] if x.shape == (1, 1) else x[...] for x in scales)
            result = result * jnp.minimum(s * t, LARGEST_FACTOR)
        result = result.astype(y.dtype)
        y[...] = result if bias is None else result + bias[...]


def in_hbm(arrays: Sequence[Any]) -> Sequence[Any]:
    """Return `arrays` in HBM, before the compiler would copy them into the kernel's own memory."""
    if kernels_are_interpreted():
        return arrays
    stay = lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM) if x.ndim > 1 else x
    return jax.tree.map(stay, arrays)


def divisor(n: int) -> int:
    """Return the largest tile that divides `n`: values read past an array are arbitrary."""
    return next(t for t in range(TILE, 0, -LANES) if n % t == 0)


def _rows(n: int) -> int:
    """Return rows of a tile of `n`: many, so that the other operand is reread seldom."""
    return min(range(min(n, TILE), 0, -LANES), key=lambda t: -(-n // t) * (t + LANES // 2))


def dequantized(codes: jax.Array, scale: jax.Array, summed: int) -> jax.Array:
    """Return codes times their scales, ``[blocks, free]``, in bf16, exact for powers of two.

    Of E8M0 codes as scales, code 255 is NaN, and code 0 is zero, as on XLA:CPU.
    """
    block = codes.shape[summed] // len(scale)
    if scale.dtype == jnp.uint8:
        code = scale.astype(jnp.int32)
        values = lax.bitcast_convert_type(code << 23, jnp.float32)
        scale = jnp.where(code == 255, jnp.nan, values)
    by_term = along_rows(scale.astype(jnp.bfloat16), block)
    return codes.astype(jnp.bfloat16) * (by_term.T if summed else by_term)


def along_rows(rows: jax.Array, block: int) -> jax.Array:
    """Return each of ``rows[blocks, n]`` repeated `block` times."""
    each = [jnp.broadcast_to(rows[b : b + 1], (block, rows.shape[1])) for b in range(len(rows))]
    return jnp.concatenate(each)
