"""Policies of `jax.checkpoint` that see FP8 matmuls as they see others.

JAX's own look for the primitive ``dot_general``. An FP8 matmul is a kernel on a GPU, and on a CPU a
``dot_general`` in float32 that is rounded later. So jfp8 names the rounded result of each FP8
matmul ``"fp8_result"``, which these policies save beside what JAX's save.

A converted model asks any policy around it about an FP8 matmul as about a ``dot_general``, so JAX's
policies serve as they are. So do ``everything_saveable``, ``nothing_saveable`` and names elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

from jax import checkpoint_policies as of_jax
from jax.extend.core.primitives import dot_general_p

from jfp8.products.vjp import RESULT
from jfp8.tracing.listing import listing

_NUMBERS = (((1,), (0,)), ((), ()))
OF_DOTS = {
    getattr(of_jax, name): name for name in ("dots_saveable", "dots_with_no_batch_dims_saveable")
}
"""JAX's policies that look for ``dot_general``, and their names."""


@functools.lru_cache(maxsize=64)  # JAX compares policies by identity
def seeing_fp8(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return `policy`, which is asked about the rounded result of an FP8 matmul twice.

    First by its name, then as if it were the result of a ``dot_general`` without batch dimensions.
    """

    def decide(prim: Any, *avals: Any, **params: Any) -> Any:
        found = policy(prim, *avals, **params)
        # A name that is not listed gets the answer that any other primitive gets.
        if params.get("name") != RESULT or found != policy(prim, *avals, **params | {"name": ""}):
            return found
        return policy(dot_general_p, *avals, *avals, dimension_numbers=_NUMBERS)

    return decide


def dots_saveable(prim: Any, *args: Any, **params: Any) -> Any:
    """Decide as JAX's policy of this name, and save the results of FP8 matmuls, too.

    Args:
      prim, args, params: see `jax.checkpoint`, which passes them.

    Returns:
      A bool, whether the results of an operation are saved, or the object by which JAX says so.

    >>> import jax, jfp8
    >>> f = jax.checkpoint(lambda x: x * 2, policy=jfp8.checkpoint_policies.dots_saveable)
    """
    return seeing_fp8(of_jax.dots_saveable)(prim, *args, **params)


def dots_with_no_batch_dims_saveable(prim: Any, *args: Any, **params: Any) -> Any:
    """Decide as JAX's policy of this name, and save the results of FP8 matmuls with weights.

    It does not save what attention multiplies. For the arguments see `dots_saveable`.

    Args:
      prim, args, params: see `jax.checkpoint`, which passes them.

    Returns:
      A bool, whether the results of an operation are saved, or the object by which JAX says so.
    """
    return seeing_fp8(of_jax.dots_with_no_batch_dims_saveable)(prim, *args, **params)


__all__ = ["dots_saveable", "dots_with_no_batch_dims_saveable"]
__dir__ = listing(__all__)
