"""Hooks through which Flax's own layers get an FP8 matmul."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jfp8.layers.nnx.products import ConvGeneralDilated, DotGeneral, EinsumOp, Product
from jfp8.layers.options import promoted
from jfp8.matmul.spec import Implementation
from jfp8.recipes.registry import RecipeLike


def _own_kernel_shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.kernel_shape)


@dataclass(frozen=True)
class Hook:
    """The hook for the matmul of one kind of layer.

    Attributes:
      name: name of the layer's attribute.
      product: constructor of the FP8 matmul.
      stock: Flax's own functions.
      kernel_shape: shape of the kernel of a single layer.
    """

    name: str
    product: type[Product]
    stock: tuple[Any, ...]
    kernel_shape: Callable[[Any], tuple[int, ...]] = _own_kernel_shape

    def is_stock_in(self, layer: Any) -> bool:
        """Return True if `layer` still computes its matmul in Flax."""
        as_flax = any(getattr(layer, self.name, None) is stock for stock in self.stock)
        return as_flax and getattr(layer, f"{self.name}_cls", None) is None

    def stacked_axes(self, layer: Any) -> tuple[int, ...]:
        """Return the sizes of the leading axes that ``nnx.vmap`` has added to `layer`."""
        shape = tuple(layer.kernel.get_value().shape)
        return shape[: len(shape) - len(self.kernel_shape(layer))]

    def product_for(
        self,
        layer: Any,
        recipe: RecipeLike | None,
        implementation: Implementation = None,
        path: str = "",
    ) -> Product:
        """Return an FP8 matmul for `layer`, with state for each in a stack."""
        shape, single = tuple(layer.kernel.get_value().shape), self.kernel_shape(layer)
        leading = self.stacked_axes(layer)
        if shape != (*leading, *single):
            raise ValueError(
                f"The kernel of {type(layer).__name__} at {path!r} has shape {shape}, but a single "
                f"layer's is {single}. Layers must be stacked along leading axes, as "
                "nnx.vmap(make, out_axes=0) does, for their amax histories to be stacked like them."
            )
        how: Any = {"implementation": implementation, "path": path, "leading": leading}
        return self.product(recipe=recipe, **how)


# nnx.ConvTranspose has no hook, so None.
_CONV = Hook("conv_general_dilated", ConvGeneralDilated, (None, lax.conv_general_dilated))

HOOKS: dict[type[nnx.Module], Hook] = {
    nnx.Linear: Hook(
        "dot_general",
        DotGeneral,
        (lax.dot_general,),
        lambda layer: (layer.in_features, layer.out_features),
    ),
    nnx.LinearGeneral: Hook(
        "dot_general",
        DotGeneral,
        (None, lax.dot_general),
        lambda layer: (*layer.batch_axis.values(), *layer.in_features, *layer.out_features),
    ),
    nnx.Conv: _CONV,
    nnx.ConvTranspose: _CONV,
    nnx.Einsum: Hook("einsum_op", EinsumOp, (jnp.einsum,)),
}


def hook_of(layer: Any) -> Hook | None:
    """Return the hook of `layer`, or None if its kind has none."""
    return next((hook for kind, hook in HOOKS.items() if isinstance(layer, kind)), None)


def install(layer: Any, *, recipe: RecipeLike | None, implementation: Implementation) -> None:
    """Make `layer`, of a kind with a hook, compute its matmul in FP8 from now on."""
    hook = hook_of(layer)
    assert hook is not None
    product = hook.product_for(layer, recipe, implementation)
    product.casts_kernel = layer.promote_dtype is dtypes.promote_dtype
    # The attribute held a function, and was static.
    setattr(layer, hook.name, nnx.data(product))
    layer.promote_dtype = SparingScaledArrays(layer.promote_dtype)


@dataclass(frozen=True)
class SparingScaledArrays:
    """A layer's ``promote_dtype`` that leaves `ScaledArray`s unchanged, and compares by value."""

    promote_dtype: Callable[..., Any]

    def __repr__(self) -> str:
        return repr(self.promote_dtype)

    def __call__(self, args: tuple[Any, ...], /, **options: Any) -> tuple[Any, ...]:
        """Promote all others; by Flax's own rule, a kernel in f32 is left to the matmul."""
        promote = lambda arrays: self.promote_dtype(tuple(arrays), **options)
        casts_kernel = self.promote_dtype is dtypes.promote_dtype
        return tuple(promoted(promote, args, casts_kernel))
