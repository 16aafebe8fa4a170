"""Haliax, and so Levanter: ``Linear`` layers with FP8 matmuls, by haliax's own hook."""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax.quantization import (
    Fp8DotGeneralOp,
    OverwriteWithGradient,
    QuantizationConfig,
    quantize_linear_layers,
)

from jfp8.products.dot_general import scaled_dot_general
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.state_in_gradients import init_overwritten, read_overwritten

Tree = TypeVar("Tree")


class DotGeneral(OverwriteWithGradient):
    """Compute ``jax.lax.dot_general`` in FP8: haliax's ``DotGeneralOp``.

    Attributes:
      recipe: how operands are quantized.
      state: the amax histories, f32[..., 3 * (2050 + 31 H)], whose gradient is their next value;
        None if the recipe keeps none. ``haliax.quantization.apply_updates`` replaces it.
    """

    recipe: Recipe = eqx.field(static=True)
    state: jax.Array | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Compute the matmul; `precision` has no meaning for FP8 operands."""
        states, sink = None, None
        if self.state is not None:
            states, sink = read_overwritten(self.state, self.recipe.init_state())
        return scaled_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            recipe=self.recipe,
            state=states,
            sink=sink,
            preferred_element_type=preferred_element_type,
        )


def convert(
    model: Tree, recipe: RecipeLike = DelayedScaling(), targets: list[str] | str | None = None
) -> Tree:
    """Return `model` with FP8 matmuls in its ``haliax.nn.Linear`` layers, stacked ones too.

    Args:
      model: any tree of haliax's modules, such as a model of Levanter.
      recipe: how operands are quantized.
      targets: the layers to quantize, as in ``haliax.quantization.QuantizationConfig``: names,
        or a regular expression of their paths; None means all.

    Source: ``haliax.quantization.quantize_linear_layers``, which finds the layers.
    """
    checked = check_recipe(recipe)
    empty = checked.init_state()

    def ours(node: Any) -> Any:
        if not isinstance(node, Fp8DotGeneralOp):
            return node
        if empty is None:
            return DotGeneral(checked)
        stacked = node.input_scale.shape[:-1]
        return DotGeneral(checked, jnp.zeros((*stacked, init_overwritten(empty).size)))

    found = quantize_linear_layers(model, QuantizationConfig(targets, 1, fp8=True))
    return jax.tree.map(ours, found, is_leaf=lambda node: isinstance(node, Fp8DotGeneralOp))
