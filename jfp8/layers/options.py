"""Options of layers: allowed values, and options that a layer passes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import as_float_array

# Options of a normalization, and of each matmul.
NORM_OPTIONS = ("layernorm_type", "epsilon", "zero_centered_gamma", "saved_activations")
PRODUCT_OPTIONS = (
    "use_bias",
    "dtype",
    "param_dtype",
    "kernel_init",
    "bias_init",
    "recipe",
    "implementation",
)


def options_of(layer: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of `layer` with these names, to be passed on."""
    return {name: getattr(layer, name) for name in names}


def check_option(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless `value`, given for `name`, is one of `allowed`."""
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_use_bias(layer: Any) -> None:
    """Raise ``TypeError`` if `layer` got its recipe by position, in place of ``use_bias``."""
    recipe = layer.use_bias
    if isinstance(recipe, Recipe | type | str):
        raise TypeError(
            f"jfp8.{type(layer).__name__} got use_bias={recipe!r}. If that is the recipe, name it: "
            f"jfp8.{type(layer).__name__}(..., recipe=...)."
        )


def check_operand(lhs: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raise ``TypeError`` if a layer has rounded its input to FP8 already, without a scale."""
    if _is_fp8(lhs.dtype):
        raise TypeError(
            f"The layer was given dtype={lhs.dtype.name}, to which Flax rounds its operands "
            "without a scale. Leave dtype out, or pass jnp.bfloat16: the layer quantizes to FP8 "
            "itself, in the formats of its recipe=."
        )


def _is_fp8(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def kernel_dtype(lhs: Any, rhs: Any, casts_kernel: bool) -> np.dtype | None:
    """Return the dtype to which a matmul casts its kernel; None if the layer casts it.

    A kernel in f32 of a layer that computes in fewer bits is cast by the matmul, so that its
    gradient is the matmul's f32 sums.
    """
    in_f32 = isinstance(rhs, jax.Array) and rhs.dtype == jnp.float32
    return np.dtype(lhs.dtype) if casts_kernel and in_f32 and lhs.dtype.itemsize < 4 else None


def kernel_values(rhs: Any, dtype: np.dtype | None, of_quantized: Any) -> jax.Array:
    """Return a kernel as an array, cast to `dtype` if given; a `ScaledArray` in `of_quantized`."""
    if isinstance(rhs, ScaledArray):
        return rhs.dequantize(of_quantized)
    return rhs if dtype is None else rhs.astype(dtype)


def promoted(
    promote: Callable[[Sequence[Any]], Sequence[Any]], arrays: Sequence[Any], casts_kernel: bool
) -> list[Any]:
    """Return inputs, a kernel and maybe a bias, as `promote` casts them, but for `ScaledArray`s.

    With `casts_kernel` the matmul casts a kernel in f32, see `kernel_dtype`.
    """
    for name, x in zip(("inputs", "kernel"), arrays[:2], strict=True):
        if not isinstance(x, ScaledArray) and _is_fp8(jnp.result_type(x)):
            as_float_array(x, name, codes=False)  # raises
    cast = promote([None if isinstance(x, ScaledArray) else x for x in arrays])
    both = zip(arrays, cast, strict=True)
    inputs, kernel, *bias = (x if isinstance(x, ScaledArray) else p for x, p in both)
    if not isinstance(kernel, ScaledArray) and kernel_dtype(kernel, arrays[1], casts_kernel):
        kernel = arrays[1]
    return [inputs, kernel, *bias]


@contextlib.contextmanager
def replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Replace `attributes` of `module` for one call, of which neither Linen nor NNX need know."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)
