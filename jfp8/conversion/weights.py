"""Keep weights in FP8 only, for inference and fine-tuning: `quantize_params`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from jfp8.conversion.selection import Choice, Recipes, Selection, select
from jfp8.matmul.as_matrices import as_matrix, matrix_groups
from jfp8.matmul.spec import free_dims
from jfp8.quantizers.quantizer import Context, Current, Quantizer
from jfp8.recipes.per_layer import path_matches
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.scales import amax
from jfp8.tracing.caller import user_level


def quantize_params(
    params: Any,
    recipe: Recipes = DelayedScaling(),
    *,
    exempt: Choice | Sequence[Choice] = (),
    only: Choice | Sequence[Choice] | None = None,
    stacked: str | Sequence[str] = (),
    kernels: str | Sequence[str] = "kernel",
    contracting: Mapping[str, int | Sequence[int]] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
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
      recipe: the recipe of the model, or recipes of its layers. Matrices are quantized as it
        quantizes weights in the forward product; other kernels, unless they are in `contracting`,
        with its format and one scale, from which recipes with finer scales quantize again.
        `QuantizationAware` raises instead.
      exempt, only: layers whose kernels stay, or are the only ones quantized: patterns of paths
        (``"decoder/*"``) or functions ``(path, kernel) -> bool``, as for `jfp8.convert`.
      stacked: patterns of layers whose kernels have a leading axis of layers (``nn.scan``, NNX
        models made under ``nnx.vmap``) or of experts: scales for each. Others get one scale, with a
        warning where that flushes whole slices.
      kernels: the names of parameters to quantize, ``("kernel", "w")``; of modules that multiply by
        them themselves, only in converted models.
      contracting: patterns of layers, and the dimensions of their kernels, without a leading axis
        of `stacked` ones, that the product sums over: ``{"*/out": (0, 1), "*/query": 0}`` for the
        projections of attention, ``{"*": (0, 1, 2)}`` for convolutions over images. Matrices: 0.
      dtype: in which layers compute, if they cast kernels in another one to it before they quantize
        them (``nn.Dense(dtype=jnp.bfloat16)``).

    Returns:
      The same tree with a `ScaledArray` for every kernel of at least two dimensions.

    Raises:
      TypeError: `params` are not nested dicts, or have boxes (``nn.Partitioned``) around kernels;
        `recipe` is not a recipe.
      ValueError: a pattern that matches no layer with a kernel; a kernel in FP8 already; with
        `QuantizationAware`, a kernel whose values would differ from the forward pass's.

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
            f"params must be nested dicts, variables['params'], got {type(params).__name__}. "
            "For an NNX model pass nnx.state(model, nnx.Param)."
        )
    selection = select(recipe, exempt, only)
    stacks = Selection(DelayedScaling(), (stacked,) if isinstance(stacked, str) else tuple(stacked))
    summed = Selection(DelayedScaling(), tuple(contracting or ()))
    paths: list[str] = []
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    _mapped(params, (), names, lambda path, kernel: paths.append(path))
    if not paths:
        raise ValueError(f"params has no kernels of two or more dimensions called {list(names)}.")
    selection.check_patterns(paths)
    stacks.check_patterns(paths)
    summed.check_patterns(paths)

    def quantized(path: str, kernel: Any) -> Any:
        chosen = selection.decide(path, kernel, None).recipe
        if chosen is None:
            return kernel
        value = kernel.get_value() if isinstance(kernel, nnx.Variable) else kernel
        if isinstance(value, ScaledArray):
            raise ValueError("params has kernels in FP8 already; quantize_params takes originals.")
        value = value if dtype is None else value.astype(dtype)
        dims = next((d for p, d in (contracting or {}).items() if path_matches(p, path)), None)
        quantizer = chosen.products().fprop.rhs or Current(E4M3FN)
        quantize = _Single(path, chosen, quantizer, (dims,) if isinstance(dims, int) else dims)
        is_stacked = stacks.decide(path, kernel, None).recipe is None
        q = quantize.stacked(value) if is_stacked else quantize(value)
        _warn_of_flushed_slices(path, value, q)
        return kernel.replace(q) if isinstance(kernel, nnx.Variable) else q

    return _mapped(params, (), names, quantized)


@dataclass(frozen=True)
class _Single:
    """Quantize the kernel of a layer."""

    path: str
    recipe: Recipe
    quantizer: Quantizer
    summed: Sequence[int] | None  # dimensions that the product sums over, if they are given

    def __call__(self, kernel: jax.Array) -> ScaledArray:
        if self.summed is None and kernel.ndim != 2:
            return self.with_one_scale(kernel)
        summed = tuple(d % kernel.ndim for d in self.summed or (0,))
        if self.quantizer.block is None or kernel.ndim == 2:
            return self.quantizer(kernel, Context(summed, amax(kernel)))
        free = free_dims(kernel.ndim, summed, ())
        matrix, axis = as_matrix(kernel, (), free, summed)
        q = self.quantizer(matrix, Context((axis,), amax(kernel)))
        order = [d for group in matrix_groups((), free, summed) for d in group]
        return q.reshape([kernel.shape[d] for d in order]).transpose(np.argsort(order).tolist())

    def stacked(self, kernels: jax.Array) -> ScaledArray:
        q = jax.vmap(self)(kernels)
        if q.block is not None:  # blocks cut short, of whose size a slice knows nothing
            q = jax.vmap(self.with_one_scale)(kernels)
        return replace(q, scale=_with_dims(q.scale, kernels.ndim))

    def with_one_scale(self, kernel: jax.Array) -> ScaledArray:
        if self.recipe.exact_export:
            raise ValueError(
                f"The kernel of {self.path or 'the layer'!r}, of shape {kernel.shape}, would get "
                f"one scale, but {self.recipe!r} multiplies it in other blocks. Name the "
                'dimensions that its product sums over, as in contracting={"*/out": (0, 1)}; a '
                "leading axis of layers or experts by stacked=, whose matrices must consist of "
                "whole blocks; or exempt= it."
            )
        return Current(self.quantizer.fmt)(kernel, Context((), amax(kernel)))


def _warn_of_flushed_slices(path: str, kernel: jax.Array, q: ScaledArray) -> None:
    """Warn if one scale leaves a slice along the first axis only subnormal numbers and zeros."""
    if kernel.ndim == 2 or q.scale.ndim:
        return
    found = jnp.max(jnp.abs(kernel), axis=tuple(range(1, kernel.ndim)))
    if isinstance(found, jax.core.Tracer) or not found.is_fully_addressable:
        return
    sizes = np.asarray(found, np.float32)
    normal = float(np.asarray(q.scale)) * q.format.smallest_normal
    if flushed := np.count_nonzero((sizes > 0) & (sizes < normal)):
        warnings.warn(
            f"The kernel of {path or 'the layer'!r}, of shape {kernel.shape}, gets one scale, with "
            f"which FP8 has no normal number below {normal:.2g}: {flushed} of the {len(sizes)} "
            "slices along its first axis lose most of their precision, or become zero. If these "
            f"are layers or experts, pass stacked={path or '*'!r}, for a scale for each.",
            stacklevel=user_level(),
        )


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
        elif name in names and isinstance(node, meta.AxisMetadata):
            raise TypeError(
                f"params has a {name} in a {type(node).__name__}, which names its shardings. Take "
                "the arrays out: jfp8.quantize_params(flax.linen.meta.unbox(params), ...)."
            )
        else:
            new[name] = function("/".join(path), node) if is_kernel(name, node, names) else node
    return nnx.State(new) if isinstance(tree, nnx.State) else new
