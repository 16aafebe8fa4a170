"""Policies of `jax.checkpoint` that see FP8 matmuls as they see others.

JAX's own look for the primitive ``dot_general``. An FP8 matmul is a kernel on a GPU, and on a CPU a
``dot_general`` in float32 that is rounded later. So jfp8 names the rounded result of each FP8
matmul ``"fp8_result"``, which these policies save beside what JAX's save::

    jfp8.checkpoint_policies.dots_saveable = save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, save_only_these_names("fp8_result")
    )

``everything_saveable`` and ``nothing_saveable`` of JAX need no other form.
"""

from jax import checkpoint_policies as of_jax

from jfp8.products.vjp import RESULT
from jfp8.tracing.listing import listing

_results = of_jax.save_only_these_names(RESULT)

dots_saveable = of_jax.save_from_both_policies(of_jax.dots_saveable, _results)
"""Save the results of all matmuls, FP8 or not."""

dots_with_no_batch_dims_saveable = of_jax.save_from_both_policies(
    of_jax.dots_with_no_batch_dims_saveable, _results
)
"""Save the results of matmuls with weights, FP8 or not; not those of attention."""

__all__ = ["dots_saveable", "dots_with_no_batch_dims_saveable"]
__dir__ = listing(__all__)
