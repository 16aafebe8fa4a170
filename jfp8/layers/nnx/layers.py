"""Flax's own layers with an FP8 product inside."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jfp8.layers.nnx.conv_transpose import HookedConvTranspose
from jfp8.layers.nnx.hooks import has_stock_product, hook_of, install
from jfp8.matmul.spec import Implementation
from jfp8.recipes.recipe import Recipe


class Fp8Layer:
    """What the layers of this file add to Flax's: a product of their own."""

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | str | None = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        hook, name = hook_of(self), type(self).__name__
        if hook is not None and not has_stock_product(self):
            raise ValueError(
                f"jfp8.nnx.{name} computes its product itself, so it does not take {hook.name}. "
                f"Pass recipe=..., or use flax.nnx.{name}."
            )
        install(self, recipe=recipe, implementation=implementation)


class Linear(Fp8Layer, nnx.Linear):
    """``flax.nnx.Linear`` with its product, forward and backward, in FP8.

    Takes every argument of ``nnx.Linear`` but ``dot_general``; the ``nnx.Param`` state is that of
    ``nnx.Linear``, with the same initial values for the same `rngs`. The kernel may be a
    `ScaledArray`. The other layers do likewise.

    Args:
      args, kwargs: as for ``nnx.Linear``.
      recipe: which quantizer each operand gets; None: that of the `jfp8.autocast` region, or else
        ``DelayedScaling()``.
      implementation: see `jfp8.scaled_matmul`.

    >>> import jax.numpy as jnp, jfp8
    >>> from flax import nnx
    >>> layer = jfp8.nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """


class LinearGeneral(Fp8Layer, nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with its product, forward and backward, in FP8.

    Takes every argument of ``nnx.LinearGeneral`` but ``dot_general`` and ``dot_general_cls``, and
    the `recipe` and `implementation` of `Linear`.
    """


class Conv(Fp8Layer, nnx.Conv):
    """``flax.nnx.Conv`` with its convolution, forward and backward, in FP8.

    Takes every argument of ``nnx.Conv`` but ``conv_general_dilated``, and the `recipe` and
    `implementation` of `Linear`.
    """


class ConvTranspose(Fp8Layer, HookedConvTranspose):
    """``flax.nnx.ConvTranspose`` with its convolution, forward and backward, in FP8.

    Takes every argument of ``nnx.ConvTranspose``, and the `recipe` and `implementation` of
    `Linear`.
    """


class Einsum(Fp8Layer, nnx.Einsum):
    """``flax.nnx.Einsum`` with its product, forward and backward, in FP8.

    Takes every argument of ``nnx.Einsum`` but ``einsum_op``, and the `recipe` and `implementation`
    of `Linear`.
    """
