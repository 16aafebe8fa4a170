"""The ``quant`` argument of MaxText's layers, with a recipe of jfp8."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from maxtext.layers import quantizations

import jfp8.linen
from jfp8.recipes.in_json import from_json
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RECIPES, get

STATE = "_overwrite_with_gradient"  # the collection that MaxText's loop replaces by its gradient
PREFIX = "jfp8_"
FROM_FILE = "jfp8_file"
NAMES = (*(PREFIX + recipe.name for recipe in RECIPES), FROM_FILE)


class Quantization(quantizations.Fp8Quantization):
    """Products in FP8 as `recipe` says, with their state in ``_overwrite_with_gradient``.

    A subclass of MaxText's FP8 because its mixture of experts makes state for that class only.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        # MaxText hands this to its grouped matmul; see `enabled`.
        self.quantize_dtype: Any = recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantization) and self.recipe == other.recipe

    def __hash__(self) -> int:
        return hash(self.recipe)

    def dot_general_cls(self, mesh_axes: Any = ()) -> Any:
        return partial(jfp8.linen.DotGeneral, self.recipe, state_collection=STATE)

    def einsum(self, dtype: Any = jnp.float32) -> nn.Module:
        return ExpertEinsum(self.recipe, dtype)


class ExpertEinsum(nn.Module):
    """``einsum`` of tokens with the experts' weights in FP8; with a mask in high precision.

    MaxText also dispatches and combines tokens by einsums, with masks of the tokens' dimension B.
    """

    recipe: Recipe  # for matmuls with weights
    dtype: Any  # dtype of their operands

    @nn.compact
    def __call__(self, equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if "B" in equation.split("->")[0].split(",")[1]:
            return jnp.einsum(equation, lhs, rhs)
        product = jfp8.linen.EinsumProduct(self.recipe, state_collection=STATE)
        return product(equation.replace(" ", ""), lhs.astype(self.dtype), rhs.astype(self.dtype))


def configured(config: Any, quant_mode: str = "train") -> Quantization:
    """Return the `Quantization` that MaxText's `config` asks for, with one of `NAMES`.

    Raises:
      ValueError: an unknown name; an option with which MaxText would not call it.
    """
    for option in ("use_qwix_quantization", "te_moe_block", "use_m3_model"):
        if getattr(config, option, False):
            raise ValueError(
                f"quantization={config.quantization} with {option}=True: MaxText then multiplies "
                f"by other ways, and nothing would be in the FP8 of jfp8. Set {option}=False."
            )
    if quant_mode != "train":
        raise ValueError(
            f"quantization={config.quantization} is for training; got the mode {quant_mode!r}. "
            'Serve with quantization="" from the same parameters.'
        )
    recipe = _recipe(config)
    if getattr(config, "num_experts", 1) > 1 and config.sparse_matmul:
        _check_grouped(config, recipe)
    return Quantization(recipe)


def _recipe(config: Any) -> Recipe:
    if config.quantization != FROM_FILE:
        return get(str(config.quantization).removeprefix(PREFIX))
    if not config.quant_cfg_path:
        raise ValueError(
            f"quantization={FROM_FILE} needs quant_cfg_path=FILE, which recipe.to_json() wrote."
        )
    return from_json(Path(config.quant_cfg_path).read_text(encoding="utf-8"))


def _check_grouped(config: Any, recipe: Recipe) -> None:
    """Refuse grouped matmuls that MaxText does not compute by ``megablox.gmm``."""
    if not config.megablox or config.use_tokamax_gmm:
        raise ValueError(
            f"quantization={config.quantization} with sparse_matmul=True replaces megablox: set "
            "megablox=True use_tokamax_gmm=False, or sparse_matmul=False."
        )
    if recipe.init_state() is not None:
        warnings.warn(
            f"quantization={config.quantization}: with sparse_matmul=True each device scales "
            "the experts' matmuls by current amaxes, not by histories. For histories set "
            "sparse_matmul=False.",
            stacklevel=2,
        )
