"""`Carried`: collections among gradients, which arithmetic on gradients does not change.

People scale, clip, sum and average whole trees of gradients, and compute norms of them. So numbers
that are not gradients are scaled down until they do not affect a norm, and are stored next to a
unit: any factor on the numbers also scales the unit, and reading divides by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.scaling.sink import SMALL

_LEAST, _MOST = 2.0**-40, 2.0**40  # bounds of factors


@partial(jax.tree_util.register_dataclass, data_fields=["numbers", "units"], meta_fields=["dtypes"])
@dataclass(frozen=True)
class Carried(Mapping[str, Any]):
    """Hold collections: a mapping from names to collections, which unpacks them.

    After a multiplication of all leaves by one factor they are unchanged, and after a sum or a
    mean of several of these, the mean. After anything else, such as noise, they are NaN.

    Attributes:
      numbers: the collections. Floating arrays are times 2^-64, in f32 or f64; others are bytes,
        ``f32[..., n]`` times 2^-64. Keys are unchanged.
      units: f32[2], 2^-64 and twice that.
      dtypes: dtypes of the arrays, in the order of the leaves.
    """

    numbers: Any
    units: jax.Array
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, collections: Mapping[str, Any]) -> Carried:
        """Return the `Carried` of `collections`."""
        arrays, structure = jax.tree.flatten(dict(collections))
        arrays = [jnp.asarray(x) for x in arrays]
        numbers = structure.unflatten(map(_packed, arrays))
        return cls(numbers, SMALL * jnp.array([1.0, 2.0]), tuple(x.dtype for x in arrays))

    def is_lost(self) -> jax.Array:
        """Return True if everything was multiplied by 0, bool[]."""
        return jnp.all(self.units == 0)

    def _factor(self) -> jax.Array:
        """Return the factor by which all numbers were multiplied, or NaN: f32[...]."""
        if self.units.dtype == jnp.float16:
            raise TypeError(
                "Gradients in float16 cannot hold the collections next to them, such as "
                "batch_stats. Cast the gradients of parameters alone: "
                "dataclasses.replace(grads, params=jax.tree.map(cast, grads.params))."
            )
        first, second = jnp.moveaxis(self.units.astype(jnp.float32) / SMALL, -1, 0)
        size = jnp.abs(first)
        is_factor = jnp.abs(second - 2 * first) <= size / 64
        return jnp.where(is_factor & (size > _LEAST) & (size < _MOST), first, jnp.nan)

    def __getitem__(self, name: str) -> Any:
        numbers, structure = jax.tree.flatten(self.numbers)
        unpack = partial(_unpacked, self._factor())
        return structure.unflatten(map(unpack, numbers, self.dtypes))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _packed(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    if not _is_wide(x.dtype):
        narrow = x.astype(jnp.uint8) if x.dtype == bool else x
        x = lax.bitcast_convert_type(narrow, jnp.uint8).reshape(*x.shape, -1)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) * SMALL


def _unpacked(factor: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) / SMALL
    value = wide / lax.expand_dims(factor, range(factor.ndim, x.ndim))
    if _is_wide(dtype):
        return value.astype(dtype)
    codes = jnp.round(value).astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.bool_):
        return codes[..., 0] > 0
    codes = codes if dtype.itemsize > 1 else codes[..., 0]
    return lax.bitcast_convert_type(codes, dtype)
