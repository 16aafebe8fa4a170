"""An rhs that is a `ScaledArray`: a weight that is only kept in FP8."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.as_matrices import as_matrix
from jfp8.matmul.spec import Numbers, free_dims
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray, dequantize
from jfp8.scaling.scales import amax


def values_of(x: ScaledArray | jax.Array) -> jax.Array:
    """Return `x` as an array: the values of a `ScaledArray`, whose bytes get no gradient."""
    if not isinstance(x, ScaledArray):
        return x
    return dequantize(replace(x, data=lax.stop_gradient(x.data)))


def with_one_scale(q: ScaledArray) -> ScaledArray | None:
    """Return `q` with a 0-d scale, if it has no more than one scale."""
    if isinstance(q.scale, ScaledArray) or jnp.size(q.scale) != 1:
        return None
    return ScaledArray(q.data, q.scale.reshape(()))


def has_scales_of(
    quantizer: Quantizer,
    q: ScaledArray,
    contracting: tuple[int, ...],
    quantize: Callable[[jax.Array, Quantizer, Context], ScaledArray],
) -> bool:
    """Return whether the scales of `q` are laid out as those that `quantize` would make."""
    if not jnp.ndim(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale):
        return False

    def quantized(x: jax.Array) -> ScaledArray:
        seed = jnp.zeros((2,), jnp.uint32)
        return quantize(x, quantizer, Context(contracting, amax(x), None, seed))

    wanted = jax.eval_shape(quantized, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    bare = [replace(each, block=None, carrier=None) for each in (q, wanted)]
    leaves = [jax.tree.leaves(each) for each in bare]
    # Scales that are applied after the sum may be in E8M0 as well.
    typed = 1 if quantizer.block is None else len(leaves[1])
    shapes = [[x.shape for x in each] + [x.dtype for x in each[:typed]] for each in leaves]
    return shapes[0] == shapes[1] and q.block_sizes() == wanted.block_sizes()


def rhs_of_matrices(
    rhs: ScaledArray | jax.Array, numbers: Numbers, recipe: Recipe
) -> ScaledArray | jax.Array:
    """Return `rhs` for `as_matrices`: the values of a `ScaledArray`, unless its bytes fit."""
    if not isinstance(rhs, ScaledArray):
        return rhs
    quantizer, ((_, contract), (_, batch)) = recipe.resolved().fprop.rhs, numbers
    if quantizer is not None and quantizer.fmt == rhs.format:
        with suppress(ValueError):  # its blocks are not those of the matrix
            q, k = as_matrix(rhs, batch, free_dims(rhs.ndim, contract, batch), contract)
            if has_scales_of(quantizer, q, (k,), lambda x, by, at: by(x, at)):
                return rhs
    if recipe.exact_export:
        raise ValueError(
            f"{rhs!r} does not have the scales of {recipe!r} for a matmul that sums over its "
            f"dimensions {contract}, and would be rounded again. Pass these dimensions to "
            "quantize_params as contracting=, or use the recipe by which it was quantized."
        )
    return values_of(rhs)
