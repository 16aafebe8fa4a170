"""The variables of an NNX module that hold the keys and values of earlier tokens."""

from __future__ import annotations

from flax import nnx

from jfp8.layers.kv_cache import NAMES, KVCache


def read_cache(module: nnx.Module) -> KVCache | None:
    """Return the cache of `module`; None before ``init_cache``."""
    variables = [getattr(module, name) for name in NAMES]
    if any(variable is None for variable in variables):
        return None
    return KVCache(*(variable.get_value() for variable in variables))


def write_cache(module: nnx.Module, cache: KVCache) -> None:
    """Store `cache` in `module`."""
    for name, value in zip(NAMES, cache, strict=True):
        variable = getattr(module, name)
        if variable is None:
            setattr(module, name, nnx.data(nnx.Cache(value)))
        else:
            variable.set_value(value)
