"""Attention's operands, reported to the observer of matmuls (`jfp8.debug.stats`).

The operands of the two forward products, and the gradients by their results:

    scores   S = Q K^T       lhs: Q     rhs: K     grad: dS
    context  O = P V         lhs: P     rhs: V     grad: dO
"""

from __future__ import annotations

from typing import Literal

import jax

from jfp8.products.flash.numerics import Quantized, Uses
from jfp8.products.observers import OBSERVER
from jfp8.quantizers.quantizer import Quantizer, Unit
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import Format
from jfp8.tracing.notes import note

Part = Literal["scores", "context"]


def shown(
    part: Part,
    role: str,
    kinds: tuple[str, str],
    uses: Uses,
    x: jax.Array,
    both: tuple[Quantized, Quantized],
) -> tuple[Quantized, Quantized]:
    """Return `both`, shown: a stored operand `x` as its two products, of these `kinds`, take it."""
    is_one = both[0] is both[1]
    first = _shown(part, role, "+".join(kinds) if is_one else kinds[0], uses.first, x, both[0])
    return first, first if is_one else _shown(part, role, kinds[1], uses.second, x, both[1])


def _shown(
    part: Part, role: str, kinds: str, quantizer: Quantizer | None, x: jax.Array, q: Quantized
) -> Quantized:
    if quantizer is None:
        return q
    return q._replace(data=_data(part, role, kinds, quantizer, x, q.data, q.scale[..., None]))


def shown_block(
    part: Part,
    role: str,
    kind: str,
    fmt: Format | None,
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Return `data`, shown: the block `x` of weights or of gradients of scores, rounded."""
    return data if fmt is None else _data(part, role, kind, Unit(fmt), x, data, scale)


def _data(
    part: Part,
    role: str,
    kinds: str,
    quantizer: Quantizer,
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    watching = OBSERVER.value
    if watching is None:
        return data
    with note("product", part):
        return watching.quantized(role, kinds, quantizer, x, ScaledArray(data, scale)).data
