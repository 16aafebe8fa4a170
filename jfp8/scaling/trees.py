"""Trees with `ScaledArray`s in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jfp8.scaling.arrays import ScaledArray, dequantize


def is_scaled_array(node: Any) -> bool:
    """Return whether `node` is a `ScaledArray`: the ``is_leaf`` for `jax.tree.map`.

    Without it, data and scale are separate leaves, and ``2 * leaf`` gives four times the values. As
    one leaf, a `ScaledArray` computes with its values.

    Args:
      node: anything.

    Returns:
      bool.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> params = {"kernel": jfp8.quantize(jnp.array([1.0, 2.0]))}
    >>> jax.tree.map(lambda x: 2 * x, params, is_leaf=jfp8.is_scaled_array)
    {'kernel': Array([2., 4.], dtype=float32)}
    """
    return isinstance(node, ScaledArray)


def dequantize_tree(tree: Any, dtype: jax.typing.DTypeLike = jnp.float32) -> Any:
    """Replace each `ScaledArray` in `tree` by its values: for averages, norms and the like.

    Args:
      tree: pytree of anything.
      dtype: floating dtype of the values.

    Returns:
      Pytree with an array for each `ScaledArray`; all other leaves as they are.

    Raises:
      TypeError, ValueError: see `dequantize`.

    >>> import jax.numpy as jnp, jfp8
    >>> jfp8.dequantize_tree({"kernel": jfp8.quantize(jnp.array([1.0, 2.0])), "step": 3})
    {'kernel': Array([1., 2.], dtype=float32), 'step': 3}
    """
    values = lambda x: dequantize(x, dtype) if isinstance(x, ScaledArray) else x
    return jax.tree.map(values, tree, is_leaf=is_scaled_array)
