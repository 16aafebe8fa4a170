"""``convert(..., cache_dtype=...)`` of Linen models: caches that it does not reach raise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from jfp8.scaling.formats import Format
from jfp8.scaling.trees import is_scaled_array

Kept = np.dtype | Format


def check_kinds(kept: Kept, kinds: Iterable[type]) -> None:
    """Raise ``ValueError`` if no module has a cache that `convert` could make.

    Args:
      kept: ``cache_dtype``.
      kinds: the types of all modules.
    """
    if not any(issubclass(kind, nn.MultiHeadDotProductAttention) for kind in kinds):
        raise ValueError(
            f"cache_dtype={kept} is for models with nn.MultiHeadDotProductAttention(decode=True), "
            "and this model has no such layer. Caches that other modules make, or that are "
            "arguments, stay as they are. Leave out cache_dtype."
        )


def check_dtypes(kept: Kept, cache: Any) -> None:
    """Raise ``ValueError`` if something in the collection `cache` is not in the dtype `kept`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(meta.unbox(cache), is_leaf=is_scaled_array)
    for path, leaf in flat:
        stored = leaf.format if is_scaled_array(leaf) else leaf.dtype
        is_number = is_scaled_array(leaf) or jnp.issubdtype(stored, jnp.floating)
        if is_number and stored != kept:
            *module, name = (key.key for key in path)
            raise ValueError(
                f"cache_dtype={kept}, but {name} of {'/'.join(module) or 'the model'} is stored in "
                f"{stored}. Make the cache by init of the converted model. If the module is not "
                "nn.MultiHeadDotProductAttention, convert does not reach its cache: leave out "
                "cache_dtype. (Layers of jfp8 take cache_dtype themselves.)"
            )
