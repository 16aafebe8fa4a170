"""To operators and to functions of NumPy and JAX, a `ScaledArray` is an array of its values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class ByValues(NDArrayOperatorsMixin):
    """An object whose values are used by arithmetic, comparisons and conversions.

    Operators are NumPy's ufuncs (`NDArrayOperatorsMixin`), and those become functions of
    `jax.numpy`, so that ``q * 2``, ``x @ q``, ``q < 1``, ``np.exp(q)`` and ``jnp.sum(q)`` give an
    array, under `jax.jit` as well. Like a `jax.Array`, the object has no truth value if it has more
    than one element.
    """

    __slots__ = ()

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Return the values."""
        raise NotImplementedError

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the values in a floating `dtype`: an array, no longer a `ScaledArray`."""
        return self.dequantize(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(self.dequantize(), dtype)
        return values.copy() if copy else values

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(out, ByValues) for out in options.get("out", ())):
            raise TypeError(
                f"A {type(self).__name__} cannot be changed in place, as `q += x` would. Compute "
                "an array of values, `y = q + x`, and jfp8.quantize(y) to store them in FP8 again."
            )
        function = getattr(jnp, ufunc.__name__, None)
        is_known = getattr(np, ufunc.__name__, None) is ufunc and function is not None
        if method == "__call__" and is_known and not options:
            return function(*(x.dequantize() if isinstance(x, ByValues) else x for x in inputs))
        plain = (np.asarray(x) if isinstance(x, ByValues) else x for x in inputs)
        return getattr(ufunc, method)(*plain, **options)

    def __bool__(self) -> bool:
        return bool(self.dequantize())
