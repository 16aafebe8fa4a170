"""Policies of `jax.checkpoint` that see FP8 matmuls as they see others.

JAX's own look for the primitive ``dot_general``. An FP8 matmul is a kernel on a GPU, and on a CPU a
``dot_general`` in float32 that is rounded later. So jfp8 names the rounded result of each FP8
matmul ``"fp8_result"``, which these policies save beside what JAX's save::

    jfp8.checkpoint_policies.dots_saveable = save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, save_only_these_names("fp8_result")
    )

``everything_saveable`` and ``nothing_saveable`` of JAX need no other form.
"""

from typing import Any

from jax import checkpoint_policies as of_jax

from jfp8.products.vjp import RESULT
from jfp8.tracing.listing import listing

_results = of_jax.save_only_these_names(RESULT)
_dots = of_jax.save_from_both_policies(of_jax.dots_saveable, _results)
_dots_with_no_batch_dims = of_jax.save_from_both_policies(
    of_jax.dots_with_no_batch_dims_saveable, _results
)


def dots_saveable(prim: Any, *args: Any, **params: Any) -> Any:
    """Decide as JAX's policy of this name, and save the results of FP8 matmuls, too.

    Args:
      prim, args, params: see `jax.checkpoint`, which passes them.

    Returns:
      A bool, whether the results of an operation are saved, or the object by which JAX says so.

    >>> import jax, jfp8
    >>> f = jax.checkpoint(lambda x: x * 2, policy=jfp8.checkpoint_policies.dots_saveable)
    """
    return _dots(prim, *args, **params)


def dots_with_no_batch_dims_saveable(prim: Any, *args: Any, **params: Any) -> Any:
    """Decide as JAX's policy of this name, and save the results of FP8 matmuls with weights.

    It does not save what attention multiplies. For the arguments see `dots_saveable`.

    Args:
      prim, args, params: see `jax.checkpoint`, which passes them.

    Returns:
      A bool, whether the results of an operation are saved, or the object by which JAX says so.
    """
    return _dots_with_no_batch_dims(prim, *args, **params)


__all__ = ["dots_saveable", "dots_with_no_batch_dims_saveable"]
__dir__ = listing(__all__)
