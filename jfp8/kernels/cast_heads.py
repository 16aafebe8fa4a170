"""Operands of attention, quantized from the result of a projection.

The kernels of attention take each head both straight and transposed. A kernel that quantizes writes
both, from one read of the projection; XLA would transpose heads and tokens first.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import jax

from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.partitioning import divided
from jfp8.matmul.spec import HARDWARE_FORMATS
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import Format
from jfp8.tracing.compat import same_varying_axes

Pair: TypeAlias = tuple[jax.Array, jax.Array]


def cast_heads(
    x: jax.Array,
    inverse: jax.Array,
    fmt: Format,
    projection: jax.Array | None = None,
    first: int = 0,
) -> Pair | None:
    """Return `_cast_heads` of these arguments; None if there is no kernel."""
    *_, tokens, depth = x.shape
    if tokens % 128 or depth not in (64, 128, 256) or fmt not in HARDWARE_FORMATS:
        return None
    if projection is None:
        in_groups = x.reshape(*x.shape[:2], -1, tokens, depth)
        projection, first = in_groups.transpose(0, 3, 1, 2, 4), 0
    return _cast_heads(x, inverse, fmt, projection, first % projection.shape[-2])


# Kernels are slow to compile, so each is compiled once for all layers of the same shapes.
@partial(jax.jit, static_argnums=(2, 4))
def _cast_heads(
    x: jax.Array, inverse: jax.Array, fmt: Format, projection: jax.Array, first: int
) -> Pair:
    """Return ``cast(x * inverse[..., None], fmt)``, straight and transposed.

    `x` is ``[batch, groups, heads of a group, tokens, depth]``, the third of which may be missing,
    for 1. `projection`, ``[batch, tokens, groups, heads of a group, depth]``, contains it, from
    head `first` of each group on.
    """
    each = x.shape[:-2]

    def by_kernel(x: jax.Array, inverse: jax.Array, projection: jax.Array) -> Pair:
        from jfp8.kernels.hopper.quantize_heads import quantize_heads

        kernel = partial(quantize_heads, first=first, fmt=fmt)
        rule = "b T g R H, b g N T -> b g N T H, b g N H T"
        quantize = divided(f"quantize_heads, {fmt}, {first}", kernel, rule)
        inverse = inverse.reshape(*each[:2], -1, inverse.shape[-1])
        q, q_t = same_varying_axes((quantize(projection, inverse), x))[0]
        return q.reshape(*each, *q.shape[-2:]), q_t.reshape(*each, *q_t.shape[-2:])

    def by_cast(x: jax.Array, inverse: jax.Array, projection: jax.Array) -> Pair:
        del projection
        q = cast(x * inverse[..., None], fmt)
        return q, q.swapaxes(-1, -2)

    return on_platform("cuda", by_kernel, by_cast, x, inverse, projection)
