"""Helpers of the tests of checkpoints."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jfp8
from jfp8.checkpoint import CheckpointChange


def told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Return the result of `function`, and its messages, which name the file that called it."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = function(*args, **kwargs)
    assert all(issubclass(w.category, CheckpointChange) for w in caught), [str(w) for w in caught]
    assert {w.filename for w in caught} <= {__file__}
    return result, [str(w.message) for w in caught]


@functools.partial(jax.jit, static_argnums=0)
def quantized(recipe: Any, w: jax.typing.ArrayLike) -> jfp8.ScaledArray:
    """Quantize a matrix ``[out, in]`` as `recipe` does in the forward product."""
    return jfp8.quantize_params({"kernel": w.T}, recipe)["kernel"].T


@jax.jit
def dequantized(q: jfp8.ScaledArray) -> jax.Array:
    """Return the values of `q`, by one program instead of one for each operation."""
    return q.dequantize()


def assert_same(a: Any, b: Any) -> None:
    """Check that two trees have the same structure, dtypes, shapes and bytes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    leaves = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), path
