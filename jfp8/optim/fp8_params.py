"""FP8 parameters: how to differentiate with respect to them, and how to update their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_of, codes_to_format, decode
from jfp8.scaling.formats import format_of
from jfp8.scaling.granularity import Block
from jfp8.scaling.parts import apply_scale
from jfp8.scaling.random_bits import hash_bits
from jfp8.scaling.scales import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    amax,
    quantize_with_scale,
    reciprocal,
    scale_from_amax,
)
from jfp8.scaling.trees import is_scaled_array
from jfp8.tracing.compat import vary_like


def carriers(params: optax.Params) -> Any:
    """Return the tree to differentiate: `params` with f32 zeros for every `ScaledArray`.

    Args:
      params: pytree of arrays and `ScaledArray`.

    Returns:
      The same tree, with an f32 array of the same shape for every `ScaledArray`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> params = {"w": jfp8.quantize(jnp.ones((2, 3))), "b": jnp.zeros(3)}
    >>> f = lambda c: jnp.sum(jfp8.optim.with_carriers(params, c)["w"].dequantize() ** 2)
    >>> jax.grad(f)(jfp8.optim.carriers(params))["w"][0]
    Array([2., 2., 2.], dtype=float32)
    """
    return _map_stored(lambda q: vary_like(jnp.zeros(q.shape, jnp.float32), q.data), params)


def with_carriers(params: optax.Params, differentiated: Any) -> optax.Params:
    """Return `params` for the model, with `differentiated` as the carriers of FP8 parameters.

    A `ScaledArray` with ``optax.MaskedNode()`` in `differentiated` stays frozen.

    Args:
      params: pytree of arrays and `ScaledArray`.
      differentiated: the tree from `carriers`, or the tracers that JAX puts in its place.

    Returns:
      A tree like `params`.
    """

    def attach(p: Any, c: Any) -> Any:
        if not is_scaled_array(p):
            return c
        return p if isinstance(c, optax.MaskedNode) else replace(p, carrier=c)

    return jax.tree.map(attach, params, differentiated, is_leaf=is_scaled_array)


def without_stored(params: optax.Params) -> Any:
    """Replace every `ScaledArray` by ``optax.MaskedNode()``, for any optimizer."""
    return _map_stored(lambda q: optax.MaskedNode(), params)


def _map_stored(function: Callable[[ScaledArray], Any], params: Any) -> Any:
    return jax.tree.map(
        lambda p: function(p) if is_scaled_array(p) else p, params, is_leaf=is_scaled_array
    )


@partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=[])
@dataclass(frozen=True)
class StoredUpdate:
    """The update of a `ScaledArray`: differences of bit patterns, modulo 2^8 and 2^32.

    `apply_updates` adds them. The result is exact, and zeros change no bit: code that skips a step
    by setting its updates to zero skips this one, too.

    Attributes:
      data: uint8, differences of the codes.
      scale: uint32, differences of the f32 scales' bits.
    """

    data: jax.Array
    scale: jax.Array


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Apply updates as Optax does, and `StoredUpdate` to FP8 parameters.

    Args:
      params: parameters, some of them `ScaledArray`.
      updates: the updates from an optimizer made by `master_weights`; a `ScaledArray` whose update
        is ``optax.MaskedNode()`` does not change.

    Returns:
      The new parameters, with the types of `params`.

    Raises:
      TypeError: a `ScaledArray` with any other update.
    """

    def apply(p: Any, u: Any) -> Any:
        if not isinstance(p, ScaledArray):
            return optax.apply_updates(p, u)
        if isinstance(u, optax.MaskedNode):
            return p
        if not isinstance(u, StoredUpdate):
            raise TypeError(
                f"A parameter of shape {p.shape} is stored in FP8, but its update is not a "
                "StoredUpdate. A plain update, added and rounded to nearest, would mostly be "
                "lost. Wrap the optimizer: jfp8.optim.master_weights(tx)."
            )
        scale = lax.bitcast_convert_type(_bits(p) + u.scale, jnp.float32)
        return replace(p, data=codes_to_format(codes_of(p.data) + u.data, p.format), scale=scale)

    return jax.tree.map(apply, params, updates, is_leaf=lambda x: x is None or is_scaled_array(x))


def update_by_lot(p: ScaledArray, u: jax.Array, seed: jax.Array) -> StoredUpdate:
    """Return the update that takes `p` to ``p + u`` rounded stochastically."""
    in_units = decode(p.data) + apply_scale(u.astype(jnp.float32), reciprocal(_scale(p)), p.block)
    return _difference(p, _stored(p, in_units, "stochastic", hash_bits(seed, p.shape)))


def update_to(p: ScaledArray, value: jax.Array) -> StoredUpdate:
    """Return the update that takes `p` to `value` rounded to nearest."""
    in_units = apply_scale(value, reciprocal(_scale(p)), p.block)
    return _difference(p, _stored(p, in_units, "nearest_even", None))


def _stored(
    p: ScaledArray, in_units: jax.Array, rounding: str, bits: jax.Array | None
) -> ScaledArray:
    """Store `in_units`, in units of `p`'s scales, with scales that change by powers of two."""
    fmt = format_of(p.data.dtype)
    largest = amax(in_units, None if _scale(p).ndim == 0 else Block(p.block_sizes()))
    factor = scale_from_amax(largest, fmt, scale_rounding="power_of_two")
    moved = _scale(p) * factor
    factor = jnp.where((moved >= SMALLEST_SCALE) & (moved <= LARGEST_SCALE), factor, 1.0)
    q = quantize_with_scale(in_units, factor, fmt, rounding, bits, p.block)
    return replace(q, scale=_scale(p) * factor)


def _difference(old: ScaledArray, new: ScaledArray) -> StoredUpdate:
    return StoredUpdate(codes_of(new.data) - codes_of(old.data), _bits(new) - _bits(old))


def _bits(q: ScaledArray) -> jax.Array:
    return lax.bitcast_convert_type(_scale(q), jnp.uint32)


def _scale(q: ScaledArray) -> jax.Array:
    assert not isinstance(q.scale, ScaledArray)  # init refuses two-level scales
    return q.scale
