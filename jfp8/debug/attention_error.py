"""`attention_error`: attribute the error of attention in FP8 to its operands, head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.conversion.tables import Printed, table_lines
from jfp8.products.flash import blocks
from jfp8.products.flash.dot_product import scaled_dot_product_attention
from jfp8.products.flash.mask import Visible, padded
from jfp8.products.flash.numerics import Numerics, Uses, for_both, numerics_of
from jfp8.recipes.per_tensor import DelayedScaling


@dataclass(frozen=True, repr=False)
class AttentionError(Printed):
    """Relative errors of O by head, f64[heads].

    Attributes:
      from_scores: only Q and K are rounded.
      from_context: only P and V are rounded.
      both: all four are.
    """

    from_scores: np.ndarray
    from_context: np.ndarray
    both: np.ndarray

    def __str__(self) -> str:
        columns = zip(self.from_scores, self.from_context, self.both, strict=True)
        cells = [[f"{100 * error:.2f} %" for error in errors] for errors in columns]
        table = [[str(head), *errors] for head, errors in enumerate(cells)]
        head = ("head", "from Q, K", "from P, V", "together")
        return "\n".join(table_lines([head, *table], numbers=True))


def attention_error(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    is_causal: bool = False,
) -> AttentionError:
    """Measure the error of attention's forward pass in FP8, of both products and of each. ::

        S = q(Q) q(K)^T / sqrt(H)     O = q(P) q(V)

    Errors of Q and K go through the softmax: an error in a score is one in an exponent. Scales are
    as attention in layers, which has no histories.

    Args:
      query, key, value, is_causal: see `jfp8.scaled_dot_product_attention`.

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
    whole = numerics_of(DelayedScaling())
    kinds = {
        "exact": Numerics(),
        "from_scores": replace(Numerics(), query=whole.query, key=whole.key),
        "from_context": replace(whole, query=Uses(), key=Uses()),
        "both": whole,
    }
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    # Raises for what attention does not take.
    jax.eval_shape(partial(scaled_dot_product_attention, is_causal=is_causal), *arrays)
    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays)
    results = {name: _attended(q, k, v, kind, is_causal) for name, kind in kinds.items()}
    exact = results.pop("exact")
    squares = lambda x: np.sum(np.square(np.asarray(x, np.float64)), axis=(0, 3, 4))
    by_head = lambda error: np.sqrt(squares(error) / squares(exact)).reshape(-1)
    return AttentionError(**{name: by_head(y - exact) for name, y in results.items()})


@partial(jax.jit, static_argnames=("numerics", "is_causal"))
def _attended(
    query: jax.Array, key: jax.Array, value: jax.Array, numerics: Numerics, is_causal: bool
) -> jax.Array:
    """Return O, f32[batch, heads of keys, groups, tokens, depth]."""
    (batch, queries, heads, depth), (_, keys, kv_heads, _) = query.shape, key.shape
    visible = Visible((queries, keys), is_causal, None)
    (size, of_keys), (n, m) = visible.block, visible.blocks
    query = query.reshape(batch, queries, kv_heads, heads // kv_heads, depth)
    q = padded(query.transpose(0, 2, 3, 1, 4), 3, n * size)
    k, v = (padded(x.swapaxes(1, 2), 2, m * of_keys) for x in (key, value))
    q, k = (for_both(x, uses, None)[0] for x, uses in ((q, numerics.query), (k, numerics.key)))
    v, _ = for_both(v, numerics.value, None, folded=True)
    return blocks.forward(q, k, v, visible, 1 / math.sqrt(depth), numerics).out[:, :, :, :queries]
