"""Tensors in PyTorch's layout, and the same as parameters of a Flax model, without dequantizing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.checkpoint.state_dict import flatten, unflatten
from jfp8.scaling.arrays import ScaledArray


@dataclass(frozen=True)
class Place:
    """The place of a tensor of PyTorch in a Flax model.

    Attributes:
      path: of the parameter, ``"layers_0/mlp/up/kernel"``. A ``kernel`` is transposed: ``[out,
        in]`` becomes ``[in, out]``.
      shape: of the parameter, if it has other dimensions: ``(features, heads, depth)``.
      inputs: how many dimensions of `shape` are the kernel's inputs: 2 in ``(heads, depth,
        features)``.
      layer: the index along a leading axis of layers, as ``nn.scan`` stacks them.
    """

    path: str
    shape: tuple[int, ...] | None = None
    inputs: int = 1
    layer: int | None = None

    @property
    def is_kernel(self) -> bool:
        """Tell whether the parameter is transposed."""
        return self.path.rpartition("/")[2] == "kernel"


Names = Mapping[str, str | Place | None]


def to_flax_params(tensors: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Turn tensors in PyTorch's layout into the parameters of a Flax model.

    Bytes and scales are transposed, reshaped and stacked; nothing is rounded. Layers of jfp8 and
    converted models take a `ScaledArray` as kernel.

    Args:
      tensors: arrays and instances of `ScaledArray` by name, as `load_fp8_safetensors` gives them.
      names: for each tensor the path of its parameter, or a `Place`; None leaves it out.

    Returns:
      Nested dicts of JAX arrays and instances of `ScaledArray`.

    Raises:
      ValueError: names and tensors that do not belong together; a shape that cuts blocks; layers
        of a stack that are missing.

    >>> import jax.numpy as jnp, jfp8
    >>> tensors = {"up.weight": jfp8.quantize(jnp.ones((6, 4)), granularity=jfp8.PerAxis(0))}
    >>> params = jfp8.checkpoint.to_flax_params(tensors, {"up.weight": "up/kernel"})
    >>> params["up"]["kernel"].shape, params["up"]["kernel"].scale.shape
    ((4, 6), (1, 6))
    """
    _check_same("tensors", set(tensors), set(names))
    stacks: dict[str, dict[int | None, Any]] = {}
    for name, place in _places(names):
        x = tensors[name]
        if place.is_kernel:
            x = _transposed(x)
        if place.shape is not None:
            x = _reshaped(name, x, place.shape)
        layers = stacks.setdefault(place.path, {})
        if place.layer in layers or (None in layers) != (place.layer is None) and layers:
            raise ValueError(f"{place.path!r} gets two tensors; {name!r} is the second.")
        layers[place.layer] = x
    leaves = []
    for path, layers in stacks.items():
        x = layers[None] if None in layers else _stacked(path, layers)
        leaves.append((tuple(path.split("/")), jax.tree.map(jnp.asarray, x)))
    return unflatten(leaves)


def from_flax_params(params: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Turn parameters into tensors in PyTorch's layout: `to_flax_params` inverted, bit for bit.

    Args:
      params: nested dicts of arrays and instances of `ScaledArray`.
      names: as for `to_flax_params`. Tensors with None are left out.

    Returns:
      NumPy arrays and instances of `ScaledArray` by name.

    Raises:
      ValueError: a parameter has no name, or a name no parameter.
    """
    found = {"/".join(path): leaf for path, leaf in flatten(dict(params))}
    places = dict(_places(names))
    _check_same("parameters", set(found), {place.path for place in places.values()})
    tensors = {}
    for name, place in places.items():
        x = jax.tree.map(np.asarray, found[place.path])
        if place.layer is not None:
            x = x[place.layer]
        if place.shape is not None:
            inputs, outputs = place.shape[: place.inputs], place.shape[place.inputs :]
            flat = (math.prod(inputs), math.prod(outputs)) if place.is_kernel else (-1,)
            x = _reshaped(name, x, flat)
        tensors[name] = _transposed(x) if place.is_kernel else x
    return tensors


def _places(names: Names) -> list[tuple[str, Place]]:
    found = ((n, Place(p) if isinstance(p, str) else p) for n, p in names.items())
    return [(name, place) for name, place in found if place is not None]


def _check_same(what: str, given: set[str], named: set[str]) -> None:
    """Raise ``ValueError`` unless the tensors or parameters are those that are named."""
    parts = []
    for missing, text in (
        (given - named, f"{what} without a place in names"),
        (named - given, f"names without one of the {what}"),
    ):
        if missing:
            shown = ", ".join(map(repr, sorted(missing)[:4]))
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            parts.append(f"{text}: {shown}{more}")
    if parts:
        raise ValueError(
            f"There are {'; and '.join(parts)}. names needs an entry for each tensor; None leaves "
            "it out."
        )


def _transposed(x: Any) -> Any:
    return x.transpose(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)


def _reshaped(name: str, x: Any, shape: tuple[int, ...]) -> Any:
    try:
        return x.reshape(*shape)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name!r}: {error}") from error


def _stacked(path: str, layers: dict[int | None, Any]) -> Any:
    """Stack the tensors of all layers along a new leading axis."""
    indices = sorted(i for i in layers if i is not None)
    if indices != list(range(len(indices))):
        raise ValueError(f"{path!r} has the layers {indices}, but they must count from 0.")
    parts = [layers[i] for i in indices]
    kinds = {(type(x), x.shape, getattr(x, "block", None)) for x in parts}
    if len(kinds) > 1:
        raise ValueError(f"The layers of {path!r} differ: {sorted(map(str, kinds))}.")
    if getattr(parts[0], "block", None) is not None:
        raise ValueError(
            f"{path!r} has blocks of {parts[0].block}, which do not divide its shape "
            f"{parts[0].shape}: a stack cannot hold them. Use layers without nn.scan, or values: "
            "tensors[name].dequantize()."
        )
    stack = jax.tree.map(lambda *layers: np.stack(layers), *parts)
    if isinstance(stack, ScaledArray) and stack.scale.ndim == 1:  # one scale for each layer
        return replace(stack, scale=stack.scale.reshape(-1, *(1,) * parts[0].ndim))
    return stack
