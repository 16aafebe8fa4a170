"""Detects arithmetic on the leaves of a `ScaledArray`, when it is rebuilt from them.

Data and scale are leaves of a pytree, so that ``jax.tree.map(lambda leaf: 2 * leaf, q)`` gives four
times the values. What a function did to the leaves shows only here, and only in part: floats wider
than the stored ones come from a cast, and while a function is traced, arrays know the operation
that made them. In eager mode they do not: `2 * leaf` is in FP8 again, and is not detected.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.scaling import printing
from jfp8.tracing.compat import primitive_of

# Only a function of leaves does this in FP8: jfp8 decodes values first.
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "pow", "integer_pow", "reduce_sum"})


def check_leaves(data: Any, scale: Any) -> None:
    """Raise if `data` and `scale` were computed separately from those of a `ScaledArray`.

    Placeholders of any type pass, and so do scalars, which may stand for a leaf: a mask, a learning
    rate.

    Raises:
      TypeError: `data` holds floats of more than 8 bits, or `scale` floats of 16; or both are
        tracers that an arithmetic operation made.
    """
    if not _is_float(data) or not data.ndim:
        return
    if data.dtype.itemsize > 1:
        raise _refusal("data", f"came back as {printing.array(data)}, not in FP8")
    if not _is_float(scale):
        return
    if scale.dtype.itemsize == 2:
        raise _refusal("scale", f"came back as {printing.array(scale)}, not in float32 or E8M0FNU")
    made_by = primitive_of(data)
    if made_by in _ARITHMETIC and primitive_of(scale) in _ARITHMETIC:
        raise _refusal("data", f"was computed in FP8, by `{made_by}`, and so was its scale")


def _is_float(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(x.dtype, jnp.floating)


def _refusal(name: str, what: str) -> TypeError:
    return TypeError(
        f"The {name} of a ScaledArray {what}: a function of leaves, such as jax.tree.map's, "
        "changed data and scale separately, which does not change the values in the same way. "
        "Pass it the whole array, jax.tree.map(function, tree, is_leaf=jfp8.is_scaled_array), or "
        "values: jfp8.dequantize_tree(tree)."
    )
