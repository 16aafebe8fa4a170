"""Find the layers at the edges of an NNX model by their shapes, names and places.

Nothing is traced, and the order of attributes does not count: a copy of a model has another one.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from jfp8.conversion.nnx import attributes_of, nodes_of
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Edge, Selection
from jfp8.layers.nnx.hooks import hook_of, is_stacked
from jfp8.tracing.caller import user_level

_HEADS = {"classifier", "head", "lm_head", "logits", "unembed"}
_FUSED = range(1, 5)  # projections in one layer, such as those of queries, keys and values


def edges_of(
    model: nnx.Module, layers: Sequence[tuple[str, nnx.Module]], selection: Selection
) -> dict[str, Edge]:
    """Find the edges of `model` among its `layers`, which are in the order of definition.

    The image enters by the first convolution, if it has at most 4 input channels. Logits leave by
    one of the linear layers that the model itself holds, or else by one of all that are no part of
    a list of layers; see `_logits`. Layers that are stacked are in the middle of a model.
    """
    edges: dict[str, Edge] = {}
    convolutions = [(path, layer) for path, layer in layers if isinstance(layer, nnx.Conv)]
    if convolutions and not is_stacked(convolutions[0][1]):
        path, first = convolutions[0]
        if first.in_features <= MAX_IMAGE_CHANNELS:
            edges[path] = Edge.IMAGE_INPUT
    found = _logits(model, dict(layers))
    if len(found) > 1 and Edge.LOGITS in selection.choices:
        warnings.warn(_unclear(model, found), UserWarning, stacklevel=user_level())
    return edges | dict.fromkeys(found, Edge.LOGITS)


def _logits(model: nnx.Module, layers: dict[str, nnx.Module]) -> list[str]:
    """Find the layer that gives the logits; all that it may be, if nothing tells.

    It is the one whose features no layer reads, not even as one of several fused projections; or
    the one that is called like a head; or the last in the code of the class.
    """
    kinds = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
    linear = [path for path, x in layers.items() if isinstance(x, kinds) and not is_stacked(x)]
    if isinstance(model, nnx.Sequential):
        return [path for path in linear if path.count("/") < 2][-1:]
    read = {_features(node)[0] for _, node in nodes_of(model) if hook_of(node) is not None}
    is_read = lambda path: any(_features(layers[path])[1] in (n * k for n in read) for k in _FUSED)
    found = [path for path in linear if "/" not in path]
    found = found or [p for p in linear if not any(part.isdigit() for part in p.split("/"))]
    found = [path for path in found if not is_read(path)] or found
    found = [path for path in found if path.rpartition("/")[2] in _HEADS] or found
    ordered = all(_has_order(model, path, found[-1]) for path in found[:-1])
    return found[-1:] if ordered else found


def _features(layer: Any) -> tuple[int, int]:
    """Return how many features a layer reads, and how many it makes."""
    if not isinstance(layer, nnx.Einsum):
        return int(np.prod(layer.in_features)), int(np.prod(layer.out_features))
    operands, _, result = (layer.einsum_str or "").replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    sizes = dict(zip(kernel, layer.kernel_shape))
    reads = math.prod(n for axis, n in sizes.items() if axis not in result)
    return reads, math.prod(n for axis, n in sizes.items() if axis in result and axis not in x)


def _has_order(model: nnx.Module, *paths: str) -> bool:
    """Tell whether the code of a class says which of two layers was made first."""
    above = os.path.commonprefix([path.split("/") for path in paths])
    known = attributes_of(type(dict(nodes_of(model)).get("/".join(above))))
    return all(path.split("/")[len(above)] in known for path in paths)


def _unclear(model: nnx.Module, found: Sequence[str]) -> str:
    return (
        f"jfp8.convert cannot tell which layer of {type(model).__name__} gives the logits, and "
        f"takes all of these for it: {', '.join(map(repr, found))}. By default they stay in high "
        "precision. Their shapes, names, and the code of their class do not say which it is. Name "
        f"it: `jfp8.convert(model, recipe, exempt=(jfp8.Edge.IMAGE_INPUT, {found[-1]!r}))`."
    )
