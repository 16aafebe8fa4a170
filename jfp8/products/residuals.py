"""What the backward pass keeps in FP8: bytes, under names that policies of ``jax.checkpoint`` know.

``nn.remat(Block, policy=jax.checkpoint_policies.save_only_these_names("fp8_saved"))`` keeps one
byte for each element of an activation, and computes all else again: weights are quantized, or
gathered from other devices, a second time.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.bits import codes_of, codes_to_format
from jfp8.scaling.formats import Format

SAVED = "fp8_saved"
SAVED_WEIGHT = "fp8_saved_weight"

Kept = ScaledArray | jax.Array | None


def save(q: Kept, name: str) -> Kept:
    """`q`, with its data as uint8 codes, under a name.

    Codes, since XLA:CPU widens f8 arrays to f16 where it stores them across a loop.
    """
    if isinstance(q, ScaledArray):
        q = ScaledArray(codes_of(q.data), q.scale, q.block)
    return jax.tree.map(lambda x: checkpoint_name(x, name), q)


def restore(q: Kept, fmt: Format | None) -> Kept:
    """What `save` was given, whose data was in `fmt`; None: it was no `ScaledArray`."""
    if not isinstance(q, ScaledArray):
        return q
    assert fmt is not None
    return ScaledArray(codes_to_format(q.data, fmt), q.scale, q.block)
