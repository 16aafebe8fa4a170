"""Keep weights in FP8 only, for inference and fine-tuning: `quantize_params`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jfp8.conversion.selection import Choice, Recipes, Selection, select
from jfp8.quantizers.quantizer import Context, Current, Quantizer
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.scales import amax


def quantize_params(
    params: Any,
    recipe: Recipes = DelayedScaling(),
    *,
    exempt: Choice | Sequence[Choice] = (),
    only: Choice | Sequence[Choice] | None = None,
    stacked: str | Sequence[str] = (),
    kernels: str | Sequence[str] = "kernel",
) -> Any:
    """Quantize the kernels of layers in `params`: one byte for each weight, and scales. ::

        kernel ~= data * scale

    This turns an f32 or bf16 checkpoint into an FP8 one. Layers of jfp8 and converted models take
    it instead of the original, without any other state. The kernels get no gradient; everything
    else in `params` does, so that adapters and norms can be trained. Layers that a conversion
    exempts (the logits) multiply the values of their FP8 kernels in high precision: exempt them
    here too, to keep their kernels.

    Args:
      params: the ``params`` of a Linen model, nested dicts; or ``nnx.state(model, nnx.Param)``.
      recipe: the recipe of the model, or those of its layers. Matrices are quantized as it
        quantizes weights in the forward product; other kernels with its format and one scale, from
        which recipes with finer scales quantize again.
      exempt, only: layers whose kernels stay, or are the only ones quantized: patterns of paths
        (``"decoder/*"``) or functions ``(path, kernel) -> bool``, as for `jfp8.convert`.
      stacked: patterns of layers whose kernels have a leading axis of layers (``nn.scan``, NNX
        models made under ``nnx.vmap``): scales for each layer.
      kernels: the names of parameters to quantize, ``("kernel", "w")``; of modules that multiply by
        them themselves, only in converted models.

    Returns:
      The same tree with a `ScaledArray` for every kernel of at least two dimensions.

    Raises:
      TypeError: `params` are not nested dicts; `recipe` is not a recipe.
      ValueError: a pattern that matches no layer with a kernel; a kernel in FP8 already.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> model, x = jfp8.Dense(4), jnp.ones((1, 3))
    >>> params = jfp8.quantize_params(model.init(jax.random.key(0), x)["params"])
    >>> params["kernel"].data.dtype, model.apply({"params": params}, x).shape
    (dtype(float8_e4m3fn), (1, 4))
    >>> two = {name: {"kernel": jnp.ones((3, 4))} for name in "ab"}
    >>> found = jfp8.quantize_params(two, only="b")
    >>> [jfp8.is_scaled_array(found[name]["kernel"]) for name in "ab"]
    [False, True]
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be nested dicts, variables['params'], got {type(params).__name__}."
        )
    selection = select(recipe, exempt, only)
    stacks = Selection(DelayedScaling(), (stacked,) if isinstance(stacked, str) else tuple(stacked))
    paths: list[str] = []
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    _mapped(params, (), names, lambda path, kernel: paths.append(path))
    if not paths:
        raise ValueError(f"params has no kernels of two or more dimensions called {list(names)}.")
    selection.check_patterns(paths)
    stacks.check_patterns(paths)

    def quantized(path: str, kernel: Any) -> Any:
        chosen = selection.decide(path, kernel, None).recipe
        if chosen is None:
            return kernel
        quantizer = chosen.products().fprop.rhs or Current(E4M3FN)
        value = kernel.get_value() if isinstance(kernel, nnx.Variable) else kernel
        is_stacked = stacks.decide(path, kernel, None).recipe is None
        q = _stacked(value, quantizer) if is_stacked else _single(value, quantizer)
        return kernel.replace(q) if isinstance(kernel, nnx.Variable) else q

    return _mapped(params, (), names, quantized)


def _single(kernel: jax.Array, quantizer: Quantizer) -> ScaledArray:
    if isinstance(kernel, ScaledArray):
        raise ValueError("params has kernels in FP8 already; quantize_params takes the originals.")
    if kernel.ndim != 2:
        quantizer = Current(quantizer.fmt)
    return quantizer(kernel, Context((0,), amax(kernel), None, None))


def _stacked(kernels: jax.Array, quantizer: Quantizer) -> ScaledArray:
    q = jax.vmap(lambda kernel: _single(kernel, quantizer))(kernels)
    if q.block is not None:  # blocks cut short, of whose size a slice of the stack knows nothing
        q = jax.vmap(lambda kernel: _single(kernel, Current(quantizer.fmt)))(kernels)
    return replace(q, scale=_with_dims(q.scale, kernels.ndim))


def _with_dims(scale: Any, ndim: int) -> Any:
    """Give the scales of a stack a dimension for each dimension of the data."""
    if isinstance(scale, ScaledArray):
        return replace(scale, scale=_with_dims(scale.scale, ndim))
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


def is_kernel(name: Any, node: Any, names: Sequence[str] = ("kernel",)) -> bool:
    """Tell whether a parameter of this name is one that a product multiplies by."""
    if isinstance(node, nnx.Variable):
        node = node.get_value()
    return name in names and jnp.ndim(node.data if isinstance(node, ScaledArray) else node) >= 2


def _mapped(tree: Any, path: tuple[str, ...], names: Sequence[str], function: Any) -> Any:
    new = {}
    for name, node in tree.items():
        if isinstance(node, Mapping):
            new[name] = _mapped(node, (*path, str(name)), names, function)
        else:
            new[name] = function("/".join(path), node) if is_kernel(name, node, names) else node
    return nnx.State(new) if isinstance(tree, nnx.State) else new
