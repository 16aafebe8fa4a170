"""`serving_tensors`: the arrays that an engine reads, made one at a time from a model's weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfp8.checkpoint.fp8_style import Fp8Style, Stored, styles
from jfp8.checkpoint.torch_layout import Names, Tensors, from_flax_params, on_this_host, places
from jfp8.conversion.selection import Recipes, select
from jfp8.quantizers.quantizer import Context, Current
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.scales import amax
from jfp8.tracing.caller import user_level

Arrays = dict[str, np.ndarray]
OF_INPUTS = ("input_scale", "input_global_scale", "act_scale")  # the last in older files for vLLM


@dataclass(frozen=True)
class ServingTensors:
    """Iterate over ``(name, array)``: names, shapes and bytes of an engine's checkpoint.

    An array is made when the iteration reaches it, and is not kept. Every iteration reads the
    weights again. If weights are sharded over several processes, all of these must iterate.

    Attributes:
      tensors: arrays and instances of `ScaledArray` by name, in PyTorch's layout.
      style: how they are stored.
    """

    tensors: Mapping[str, Any]
    style: Fp8Style

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield from stored(self, name)[0].items()

    def config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of config.json, for which all weights are read."""
        layers = {k: v for name in self.tensors for k, v in stored(self, name)[1].items()}
        return self.style.config(layers)


def stored(serving: ServingTensors, name: str) -> tuple[Arrays, dict[str, Stored | None]]:
    """Return the arrays that store one of the tensors, and its layer's entry for the config."""
    tensors = serving.tensors
    x, layer = on_this_host(tensors[name]), name.removesuffix(".weight")
    if not isinstance(x, ScaledArray):
        is_weight = x.ndim >= (2 if layer != name else 3)  # stacked experts have no ".weight"
        return {name: x}, {layer: None} if is_weight else {}
    layout, arrays = serving.style.split(name, x)
    if taken := arrays.keys() & tensors.keys() - {name}:
        raise ValueError(f"{min(taken)!r} is taken by the scale of {name!r}.")
    calibrated = any(f"{layer}.{scale}" in tensors for scale in OF_INPUTS)
    return arrays, {layer: (layout, calibrated)}


def serving_tensors(
    tensors: Any,
    style: Fp8Style | str,
    *,
    names: Names | None = None,
    recipe: Recipes | None = None,
) -> ServingTensors:
    """Return the tensors that `save_fp8_safetensors` writes, to send them to an engine instead.

    Args:
      tensors: arrays and instances of `ScaledArray` by name, in PyTorch's layout ``[out, in]``; or
        with `names` the parameters of a Flax model.
      style: the original's; or ``"deepseek"``, ``"compressed-tensors"``, ``"modelopt"``,
        ``"gpt-oss"`` or ``"per-tensor"``, see `Fp8Style`. A weight keeps its format.
      names: see `from_flax_params`.
      recipe: quantizes matrices that are none yet as this recipe quantizes weights in the forward
        product: one recipe, or some by patterns of paths, ``{"*/mlp/*": "nvfp4", "*": "rowwise"}``,
        as for `jfp8.convert`; None leaves a layer as it is. Paths are the parameters' paths, or
        without `names` the tensors' names.

    Returns:
      An iterable of ``(name, array)`` whose `config()` is the ``quantization_config``.

    Raises:
      ValueError: scales that the style does not have, or would round; names that collide; an
        unknown style; no scales of activations where the style says that there are.

    >>> import jax.numpy as jnp, jfp8
    >>> params, names = {"up": {"kernel": jnp.ones((64, 32))}}, {"up.weight": "up/kernel"}
    >>> stream = jfp8.checkpoint.serving_tensors(params, "modelopt", names=names, recipe="nvfp4")
    >>> for name, array in stream:
    ...     print(name, array.dtype, array.shape)
    up.weight uint8 (32, 32)
    up.weight_scale float8_e4m3fn (32, 4)
    up.weight_scale_2 float32 ()
    """
    if not isinstance(style, Fp8Style):
        if style not in styles():
            raise ValueError(
                f"style={style!r} is unknown. Allowed: {', '.join(map(repr, styles()))}, or the "
                "Fp8Style that load_fp8_safetensors returned."
            )
        style = styles()[style]
    found = tensors if names is None else from_flax_params(tensors, names)
    if recipe is not None:
        found = _quantized(found, names, recipe)
    if style.input_scales and not any(name.endswith(OF_INPUTS) for name in found):
        raise ValueError(
            "The style's quantization_config says that the files have calibrated scales of "
            "activations (input_scale), but there are none among the tensors. Add those that "
            'load_fp8_safetensors returned, or write another style, such as "per-tensor".'
        )
    return ServingTensors(found, style)


def _quantized(tensors: Mapping[str, Any], names: Names | None, recipe: Recipes) -> Tensors:
    """Return `tensors`, of which those that are kernels are quantized where they are read."""
    paths = {n: n[: -len(".weight")].replace(".", "/") for n in tensors if n.endswith(".weight")}
    if names is not None:
        matrices = {n: p for n, p in places(names).items() if p.axes or p.path.endswith("kernel")}
        paths = {name: place.path.rpartition("/")[0] for name, place in matrices.items()}
    selection = select(recipe, (), None)
    selection.check_patterns(paths.values())

    def made(name: str) -> Any:
        x = on_this_host(tensors[name])
        if names is None and name not in paths and np.ndim(x) > 2:
            warnings.warn(
                f"The stack {name!r}, of shape {x.shape}, stays in {x.dtype}: without names=, only "
                'tensors called ".weight" are known to be [out, in]. Split it into matrices with '
                "such names, or pass Flax parameters and names=.",
                stacklevel=user_level(),
            )
        chosen = selection.decide(paths[name], x, None).recipe if name in paths else None
        if chosen is None or isinstance(x, ScaledArray) or x.ndim < 2:
            return x
        quantizer, x = chosen.products().fprop.rhs or Current(E4M3FN), jnp.asarray(x)
        return quantizer(x, Context((x.ndim - 1,), amax(x), None, None))

    return Tensors({name: partial(made, name) for name in tensors})
