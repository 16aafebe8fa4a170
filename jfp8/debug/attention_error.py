"""`attention_error`: which operands the error of attention in FP8 comes from, head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.products.flash import blocks
from jfp8.products.flash.dot_product import scaled_dot_product_attention
from jfp8.products.flash.mask import Visible, padded
from jfp8.products.flash.numerics import Numerics, Uses, for_both, numerics_of
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe


@dataclass(frozen=True)
class AttentionError:
    """Errors by head, f64[heads]: the norm of the error over that of the exact result.

    Attributes:
      from_scores: of ``O`` where only Q and K are rounded.
      from_context: of ``O`` where only P and V are rounded.
      both: of ``O`` where all four are.
    """

    from_scores: np.ndarray
    from_context: np.ndarray
    both: np.ndarray

    def __str__(self) -> str:
        lines = ["head  from Q, K  from P, V  together"]
        columns = (self.from_scores, self.from_context, self.both)
        for head, errors in enumerate(zip(*columns, strict=True)):
            cells = (f"{100 * error:7.2f} %" for error in errors)
            lines.append(f"{head:4}  " + "  ".join(cells))
        return "\n".join(lines)


def attention_error(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    recipe: Recipe | str = DelayedScaling(),
) -> AttentionError:
    """What the forward pass of attention in FP8 loses, and to which of its two products. ::

        S = q(Q) q(K)^T scale     O = q(P) q(V)

    Errors of Q and K go through the softmax: an error in a score is one in an exponent.

    Args:
      query, key, value, scale, is_causal: see `jfp8.scaled_dot_product_attention`.
      recipe: an object or its name; without histories.

    Returns:
      An `AttentionError`: ``print`` it.

    Raises:
      TypeError, ValueError: as of `jfp8.scaled_dot_product_attention`.

    >>> import jax, jfp8
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 64, 2, 32)) for i in range(3))
    >>> found = jfp8.debug.attention_error(q, k, 4 * v)
    >>> found.both.shape, bool((found.both < 0.1).all())
    ((2,), True)
    """
    whole = numerics_of(check_recipe(recipe))
    kinds = {
        "exact": Numerics(),
        "from_scores": replace(Numerics(), query=whole.query, key=whole.key),
        "from_context": replace(whole, query=Uses(), key=Uses()),
        "both": whole,
    }
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    # Raises for what attention does not take.
    jax.eval_shape(partial(scaled_dot_product_attention, is_causal=is_causal), *arrays)
    scale = 1 / math.sqrt(arrays[0].shape[-1]) if scale is None else scale

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
        return {name: _attended(q, k, v, kind, scale, is_causal) for name, kind in kinds.items()}

    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays)
    results = run(q, k, v)
    exact = results.pop("exact")
    return AttentionError(**{name: _by_head(y - exact, exact) for name, y in results.items()})


def _attended(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    numerics: Numerics,
    scale: float,
    is_causal: bool,
) -> jax.Array:
    """O, f32[batch, heads of keys, groups, tokens, depth]."""
    (batch, queries, heads, depth), (_, keys, kv_heads, _) = query.shape, key.shape
    visible = Visible((queries, keys), is_causal, None)
    (size, of_keys), (n, m) = visible.block, visible.blocks
    query = query.reshape(batch, queries, kv_heads, heads // kv_heads, depth)
    q = padded(query.transpose(0, 2, 3, 1, 4), 3, n * size)
    k, v = (padded(x.swapaxes(1, 2), 2, m * of_keys) for x in (key, value))
    q, k = (for_both(x, uses, None)[0] for x, uses in ((q, numerics.query), (k, numerics.key)))
    v, _ = for_both(v, numerics.value, None, folded=True)
    return blocks.forward(q, k, v, visible, scale, numerics).out[:, :, :, :queries]


def _by_head(error: jax.Array, exact: jax.Array) -> np.ndarray:
    """For each head the norm of the first over that of the second."""
    squares = lambda x: np.sum(np.square(np.asarray(x, np.float64)), axis=(0, 3, 4))
    return np.sqrt(squares(error) / squares(exact)).reshape(-1)
