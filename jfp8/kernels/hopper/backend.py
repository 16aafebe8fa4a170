"""Matmuls of `ScaledArray`s by the Pallas kernels for Hopper in this folder.

The kernels take matrices with the contraction last, ``y[i, j] = sum_k a[i, k] b[j, k]``, because
Hopper's tensor cores read 8-bit operands only in this layout. This file transforms any matmul into
that form, and its scales into the shapes of the kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels.backend import Backend
from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.operands import by_rows, scales_by_block
from jfp8.kernels.partitioning import why_not_divided
from jfp8.kernels.verdicts import why_failed
from jfp8.matmul.as_matrices import row_scales
from jfp8.matmul.known_scales import varies_along_sum
from jfp8.matmul.spec import HARDWARE_FORMATS, MatmulSpec, free_dims, layout_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.backends import why_left_out
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.devices import Gpu

BLOCK = 128  # along the contraction: the number of terms that kernels sum before they scale
HOPPER = {9: "Hopper (compute capability 9.0)"}  # by major compute capability


def why_no_quantizing(gpu: Gpu | None, families: dict[int, str] | None = None) -> str | None:
    """Return the reason why no kernel quantizes on `gpu`. Blackwell can, without tensor cores."""
    return why_none_for(gpu, families or HOPPER | {10: "Blackwell (10.x)"}, "quantizing")


def why_none_for(gpu: Gpu | None, families: dict[int, str], task: str) -> str | None:
    """Return the reason why `gpu` has no kernels for a task: they are for `families`, by major."""
    if jax.__version_info__ < (0, 11, 2):
        if gpu is not None and gpu.capability is not None and gpu.capability[0] in families:
            warnings.warn(
                f"JAX {jax.__version__} has none of jfp8's Pallas kernels for the {gpu.kind}; rows "
                "and blocks of scales, grouped matmuls are slower without them. "
                "Install Python 3.12 or later, and there jfp8[cuda].",
                stacklevel=1,  # one place for all tasks, so that Python shows it once
            )
        return (
            f"JAX {jax.__version__}: the Mosaic GPU kernels need 0.11.2 or later, and with it "
            "Python 3.12"
        )
    if (reason := why_left_out("mosaic_gpu")) is not None:
        return reason
    if kernels_are_interpreted() or gpu is None:
        return None
    if gpu.capability is None or gpu.capability[0] not in families:
        return f"{gpu.kind}: the Mosaic GPU kernels are for {' and '.join(families.values())}"
    return why_not_divided(gpu) or why_failed({task}, gpu)


def by_mosaic(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Multiply by a kernel, with scales by row and column at its end, or per 128 inside it."""

    def kernel(lhs: ScaledArray, rhs: ScaledArray) -> jax.Array:
        from jfp8.kernels.hopper import matmul as kernels

        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = spec.dimension_numbers
        if varies_along_sum(lhs, rhs, spec):
            rows, columns, _ = layout_of(lhs.shape, rhs.shape, spec.dimension_numbers).sizes
            b_scale = _block_scales(rhs, rhs_contract[0], rhs_batch, tiles=True)
            b_by_tile = b_scale.shape[-1] != columns
            a_scale = _block_scales(lhs, lhs_contract[0], lhs_batch, tiles=not b_by_tile)
            name = "block_matmul"
            product = lambda dtype, a, b, s, t: kernels.block_matmul(a, b, s, t, dtype)
            m = "m" if a_scale.shape[-1] == rows else f"m/{BLOCK}"
            n = f"n/{BLOCK}" if b_by_tile else "n"
            rule = f"m k, n k, k/{BLOCK} {m}, k/{BLOCK} {n} -> m n"
        else:
            a_scale = row_scales(lhs, lhs_contract, lhs_batch)
            b_scale = row_scales(rhs, rhs_contract, rhs_batch)
            promote = not spec.fast_accumulation
            name = "matmul" if promote else "matmul, fast"
            product = lambda dtype, a, b, s, t: kernels.matmul(a, b, s, t, dtype, promote=promote)
            by_row, by_column = ("m" if a_scale.ndim else ""), ("n" if b_scale.ndim else "")
            rule = f"m k, n k, {by_row}, {by_column} -> m n"
        return by_rows(lhs, rhs, spec, name, product, rule, (a_scale, b_scale))

    return on_platform("cuda", kernel, "mosaic_gpu", lhs, rhs)


BACKEND = Backend(
    "mosaic_gpu",
    by_mosaic,
    formats=HARDWARE_FORMATS,
    blocks=frozenset({(BLOCK, 1), (BLOCK, BLOCK)}),
    multiples=True,
    scale_dtype=np.float32,
    accumulations=("f32", "f32_every_128"),
    gpus=9,
    why_not_on=lambda gpu: why_none_for(gpu, HOPPER, "products"),  # an unknown one: as Hopper
)


def _block_scales(q: ScaledArray, contract: int, batch: Sequence[int], tiles: bool) -> jax.Array:
    """Return the scales as f32[(batch,) k / 128, n], or ``n / 128`` if sufficient and allowed."""
    (free,), scale = free_dims(q.ndim, (contract,), batch), jnp.asarray(q.scale)
    by_tile = tiles and (not scale.ndim or q.block_sizes()[free] > 1)
    return scales_by_block(scale, q, batch, {contract: BLOCK, free: BLOCK if by_tile else 1})
