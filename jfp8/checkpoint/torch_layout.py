"""Tensors in PyTorch's layout, and the same as parameters of a Flax model, without dequantizing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jfp8.checkpoint.state_dict import is_spread, short, unflatten, walk
from jfp8.checkpoint.tree import nested_target
from jfp8.scaling.arrays import ScaledArray


@dataclass(frozen=True)
class Place:
    """The place of a tensor of PyTorch in a Flax model.

    Attributes:
      path: the parameter's, ``"layers_0/mlp/up/kernel"``.
      axes: the dimensions of the tensor and of the parameter, by names that you choose: ``"(heads=4
        depth) in -> layer=3 in heads depth"``. Parentheses split or join; ``layer=3`` is the index
        along an axis that several tensors share. If None, a ``kernel`` is transposed, anything
        else stays as it is.
      times, plus: ``parameter = tensor * times + plus``. The scale of a `ScaledArray` takes
        `times`.
    """

    path: str
    axes: str | None = field(default=None, kw_only=True)
    times: float = field(default=1.0, kw_only=True)
    plus: float = field(default=0.0, kw_only=True)


class Tensors(Mapping[str, Any]):
    """Tensors by name, each of which is made where it is asked for, and not kept."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __or__(self, other: Mapping[str, Any]) -> Tensors:
        return Tensors(self._makers | {n: partial(other.__getitem__, n) for n in other})


Names = Mapping[str, str | Place | None]


def to_flax_params(tensors: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Turn tensors in PyTorch's layout into the parameters of a Flax model.

    Bytes and scales are transposed, reshaped and stacked; nothing is rounded. Layers of jfp8 and
    converted models take a `ScaledArray` as kernel.

    Args:
      tensors: arrays and instances of `ScaledArray` by name, as `load_fp8_safetensors` gives them.
      names: for each tensor the path of its parameter, alone or followed by axes, ``"up/kernel: o i
        -> i o"``, or a `Place`; None leaves it out. `names_for` has tables of several models.

    Returns:
      Nested dicts of JAX arrays and instances of `ScaledArray`. Names that are numbers become ints,
      as NNX has them.

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
    stacks: dict[str, tuple[_Axes, dict[tuple[int, ...], Any]]] = {}
    for name, place in places(names).items():
        x = _affine(name, tensors[name], place.times, place.plus)
        axes = _axes(place, x.ndim)
        first, parts = stacks.setdefault(place.path, (axes, {}))
        index = tuple(axes.index.values())
        if index in parts or axes.index.keys() != first.index.keys():
            raise ValueError(f"{place.path!r} gets two tensors; {name!r} is the second.")
        parts[index] = _rearranged(name, x, axes.left, axes.right, axes.sizes)
    leaves = []
    for path, (axes, parts) in stacks.items():
        x = _stacked(path, parts, axes) if axes.index else parts[()]
        keys = tuple(int(key) if key.isdigit() else key for key in path.split("/"))
        leaves.append((keys, jax.tree.map(jnp.asarray, x)))
    return unflatten(leaves)


def from_flax_params(params: Any, names: Names) -> Tensors:
    """Turn parameters into tensors in PyTorch's layout: `to_flax_params` inverted, bit for bit.

    Args:
      params: nested dicts or an NNX state of arrays and instances of `ScaledArray`.
      names: see `to_flax_params`. Tensors with None are left out.

    Returns:
      NumPy arrays and instances of `ScaledArray` by name, each made where it is read. Of an array
      that is sharded over several processes all of these must read it: each gets the whole.

    Raises:
      ValueError: a parameter has no name, or a name no parameter.
    """
    found = {"/".join(path): leaf for path, leaf in walk(nested_target(params))}
    by_name = places(names)
    _check_same("parameters", set(found), {place.path for place in by_name.values()})
    return Tensors({name: partial(_tensor, name, found[p.path], p) for name, p in by_name.items()})


def _tensor(name: str, x: Any, place: Place) -> Any:
    axes = _axes(place, x.ndim)
    if at := dict(zip(axes.stacked, axes.index.values(), strict=True)):
        x = x[tuple(at.get(axis, slice(None)) for axis in range(x.ndim))]
    x = _rearranged(name, on_this_host(x), axes.right, axes.left, axes.sizes)
    return _affine(name, x, 1 / place.times, -place.plus / place.times)


def on_this_host(x: Any) -> Any:
    """Return an array, or all of a `ScaledArray`, as NumPy arrays of this process."""
    gather = partial(multihost_utils.process_allgather, tiled=True)
    return jax.tree.map(lambda leaf: np.asarray(gather(leaf) if is_spread(leaf) else leaf), x)


def places(names: Names) -> dict[str, Place]:
    """Return the `Place` of each tensor that has one."""
    found = {}
    for name, place in names.items():
        if isinstance(place, str):
            text, _, plus = place.partition(" + ")
            text, _, times = text.partition(" * ")
            path, _, axes = text.partition(":")
            place = Place(path.strip(), axes=axes.strip() or None)
            place = replace(place, times=float(times or 1), plus=float(plus or 0))
        if place is not None:
            found[name] = place
    return found


class _Axes(NamedTuple):
    """The axes of a `Place`: names of each dimension on both sides, without stacked ones."""

    left: list[list[str]]
    right: list[list[str]]
    sizes: dict[str, int]
    index: dict[str, int]
    stacked: list[int]  # where the parameter has the axes of `index`


def _axes(place: Place, ndim: int) -> _Axes:
    """Parse the axes of a `Place`; if it has none, keep or transpose `ndim` dimensions."""
    left = [f"d{d}" for d in range(ndim)]
    is_kernel = place.path.split("/")[-1] == "kernel"
    right = [*left[:-2], *left[:-3:-1]] if is_kernel else left
    text = place.axes or f"{' '.join(left)} -> {' '.join(right)}"
    sides = re.sub(r"=\d+", "", text).split("->")
    found = [re.findall(r"\(([^()]+)\)|([^\s()]+)", side) for side in sides]
    groups = [[(joined or one).split() for joined, one in side] for side in found]
    left, right = groups if len(groups) == 2 else ([], [])
    numbers = {key: int(n) for key, n in re.findall(r"([A-Za-z_]\w*)=(\d+)", text)}
    index = {key: n for key, n in numbers.items() if key not in sum(left, [])}
    stacked = [i for i, group in enumerate(right) if group[0] in index]
    right = [group for group in right if group[0] not in index]
    if len(groups) != 2 or sorted(sum(left, [])) != sorted(sum(right, [])):
        raise ValueError(
            f"axes={text!r} of {place.path!r} must name the same dimensions on both sides of one "
            'arrow, for example "(heads=4 depth) in -> layer=0 in heads depth".'
        )
    return _Axes(left, right, numbers, index, stacked)


def _rearranged(
    name: str, x: Any, left: list[list[str]], right: list[list[str]], sizes: dict[str, int]
) -> Any:
    """Return `x`, whose dimensions `left` names, with those that `right` names."""
    if len(left) != x.ndim:
        raise ValueError(f"{name!r} of shape {x.shape} has not the {len(left)} dimensions of axes.")
    found: dict[str, int] = {}
    for group, n in zip(left, x.shape, strict=True):
        found |= _split_size(name, n, group, sizes)
    order = [list(found).index(axis) for axis in sum(right, [])]
    try:
        if len(found) > x.ndim:
            x = x.reshape(*found.values())
        x = x if order == sorted(order) else x.transpose(*order)
        shape = [math.prod(found[axis] for axis in group) for group in right]
        return x.reshape(*shape) if len(shape) < len(found) else x
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error


def _split_size(name: str, n: int, group: list[str], sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of the axes of a dimension of `n`, of which at most one is not given."""
    given = math.prod(sizes.get(axis, 1) for axis in group)
    free = [axis for axis in group if axis not in sizes]
    if len(free) > 1 or n % given or (not free and n != given):
        raise ValueError(
            f"{name!r} has a dimension of {n}, of which axes makes ({' '.join(group)}): give all "
            f"of these sizes but one, and such that they divide it, {group[0]}=8."
        )
    return {axis: sizes.get(axis, n // given) for axis in group}


def _affine(name: str, x: Any, times: float, plus: float) -> Any:
    if times == 1 and not plus:
        return x
    if isinstance(x, ScaledArray):
        if plus or not isinstance(x.scale, ScaledArray) and x.scale.dtype != np.float32:
            raise ValueError(
                f"{name!r} is another number in this model, times {times:g} plus {plus:g}, which "
                "its scales cannot hold. Keep this layer in high precision."
            )
        return replace(x, scale=_affine(name, x.scale, times, plus))
    return (x.astype(np.float32) * np.float32(times) + np.float32(plus)).astype(x.dtype)


def _check_same(what: str, given: set[str], named: set[str]) -> None:
    """Raise ``ValueError`` unless the tensors or parameters are those that are named."""
    sides = {
        f"{what} without a place in names": given - named,
        f"names without one of the {what}": named - given,
    }
    if parts := [f"{text}: {short(sorted(names))}" for text, names in sides.items() if names]:
        raise ValueError(
            f"There are {'; and '.join(parts)}. names needs an entry for each tensor; None leaves "
            "it out."
        )


def _stacked(path: str, parts: dict[tuple[int, ...], Any], axes: _Axes) -> Any:
    """Stack tensors along new axes, where `axes` has them in the parameter."""
    counts = tuple(max(index) + 1 for index in zip(*parts, strict=True))
    if missing := sorted(set(np.ndindex(*counts)) - set(parts)):
        named = ", ".join(map("{}={}".format, axes.index, missing[0]))
        raise ValueError(f"{path!r} has no {named}, but indices must count from 0 without a gap.")
    leaves = [parts[index] for index in sorted(parts)]
    first = leaves[0]
    block = getattr(first, "block", None)
    kinds = {(type(x), x.shape, getattr(x, "block", None)) for x in leaves}
    if len(kinds) > 1:
        raise ValueError(f"The tensors of {path!r} differ: {sorted(map(str, kinds))}.")
    if block is not None:
        raise ValueError(
            f"{path!r} has blocks of {block}, which do not divide its shape {first.shape}: a stack "
            "cannot hold them. Use layers without nn.scan, or values: tensors[name].dequantize()."
        )

    def stacked(*layers: Any) -> Any:
        ones = (1,) * (first.ndim - np.ndim(layers[0]))  # one scale for each tensor
        return np.stack(layers).reshape(*counts, *np.shape(layers[0]), *ones)

    stack = jax.tree.map(stacked, *leaves)
    order = list(range(len(counts), stack.ndim))
    for count, axis in enumerate(axes.stacked):
        order.insert(axis, count)
    return stack.transpose(*order)
