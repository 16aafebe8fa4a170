"""Flax's own layers with an FP8 product inside."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jfp8.layers.nnx.conv_transpose import HookedConvTranspose
from jfp8.layers.nnx.hooks import hook_of, install, is_stock
from jfp8.matmul.choice import Implementation
from jfp8.recipes.recipe import Recipe


def _install_own(layer: Any, recipe: Recipe | None, implementation: Implementation) -> None:
    """Give `layer` its product, or an error if it was told to use something else."""
    hook = hook_of(layer)
    assert hook is not None
    if not is_stock(layer, hook):
        name = type(layer).__name__
        raise ValueError(
            f"jfp8.nnx.{name} computes its product itself, so it does not take {hook.name}. Pass "
            f"recipe=..., or use flax.nnx.{name}."
        )
    install(layer, hook, recipe=recipe, implementation=implementation)


class Linear(nnx.Linear):
    """``flax.nnx.Linear`` with its product, forward and backward, in FP8.

    Takes every argument of ``nnx.Linear`` but ``dot_general``; the ``nnx.Param`` state is that of
    ``nnx.Linear``, with the same initial values for the same `rngs`. The kernel may be a
    `ScaledArray`.

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

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _install_own(self, recipe, implementation)


class LinearGeneral(nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with its product, forward and backward, in FP8.

    Takes every argument of ``nnx.LinearGeneral`` but ``dot_general`` and ``dot_general_cls``; the
    ``nnx.Param`` state is the same, with the same initial values for the same `rngs`.

    Args:
      args, kwargs: as for ``nnx.LinearGeneral``.
      recipe, implementation: see `Linear`.
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _install_own(self, recipe, implementation)


class Conv(nnx.Conv):
    """``flax.nnx.Conv`` with its convolution, forward and backward, in FP8.

    Takes every argument of ``nnx.Conv`` but ``conv_general_dilated``; the ``nnx.Param`` state is
    the same, with the same initial values for the same `rngs`.

    Args:
      args, kwargs: as for ``nnx.Conv``.
      recipe, implementation: see `Linear`.
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _install_own(self, recipe, implementation)


class ConvTranspose(HookedConvTranspose):
    """``flax.nnx.ConvTranspose`` with its convolution, forward and backward, in FP8.

    Takes every argument of ``nnx.ConvTranspose``; the ``nnx.Param`` state is the same, with the
    same initial values for the same `rngs`.

    Args:
      args, kwargs: as for ``nnx.ConvTranspose``.
      recipe, implementation: see `Linear`.
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _install_own(self, recipe, implementation)


class Einsum(nnx.Einsum):
    """``flax.nnx.Einsum`` with its product, forward and backward, in FP8.

    Takes every argument of ``nnx.Einsum`` but ``einsum_op``; the ``nnx.Param`` state is the same,
    with the same initial values for the same `rngs`.

    Args:
      args, kwargs: as for ``nnx.Einsum``.
      recipe, implementation: see `Linear`.
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _install_own(self, recipe, implementation)
