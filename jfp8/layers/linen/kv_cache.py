"""The variables of a Linen module that hold the keys and values of earlier tokens."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from jfp8.layers.kv_cache import NAMES, KVCache, init_kv_cache

COLLECTION = "cache"


def read_cache(module: nn.Module, shape: tuple[int, ...], dtype: Any) -> KVCache | None:
    """Return the cache of `module`; None during initialization, which creates an empty cache."""
    if not module.has_variable(COLLECTION, NAMES[0]):
        if not module.is_initializing():
            raise ValueError(
                f"{type(module).__name__}(decode=True) has no cache. Create one for the longest "
                'sequence and pass it on: cache = model.init(key, whole)["cache"], then '
                'y, new = model.apply({"params": params, "cache": cache}, tokens, '
                'mutable=["cache"]). For a whole sequence without a cache use decode=False.'
            )
        empty = init_kv_cache(shape, dtype)
        if module.is_mutable_collection(COLLECTION):
            write_cache(module, empty)
        return None
    return KVCache(*(module.get_variable(COLLECTION, name) for name in NAMES))


def write_cache(module: nn.Module, cache: KVCache) -> None:
    """Store `cache` in `module`."""
    for name, value in zip(NAMES, cache, strict=True):
        module.put_variable(COLLECTION, name, value)
