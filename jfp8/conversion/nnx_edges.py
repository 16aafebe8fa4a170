"""Find the layers at the edges of an NNX model by their shapes, names and places.

Nothing is traced, and the order of attributes does not count: a copy of a model has another one.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from jfp8.conversion.nnx import attributes_of, nodes_of
from jfp8.conversion.selection import MAX_IMAGE_CHANNELS, Edge, Selection
from jfp8.layers.nnx.hooks import hook_of, stacked_axes
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
    for path, layer in [(p, layer) for p, layer in layers if isinstance(layer, nnx.Conv)][:1]:
        if layer.in_features <= MAX_IMAGE_CHANNELS and not stacked_axes(layer):
            edges[path] = Edge.IMAGE_INPUT
    found = _logits(model)
    if len(found) > 1 and Edge.LOGITS in selection.choices:
        warnings.warn(
            f"jfp8.convert cannot tell which layer of {type(model).__name__} gives the logits, and "
            f"takes all of these for it: {', '.join(map(repr, found))}. By default they stay in "
            "high precision. Their shapes, names, and the code of their class do not say which it "
            "is. Name it: `jfp8.convert(model, recipe, exempt=(jfp8.Edge.IMAGE_INPUT, "
            f"{found[-1]!r}))`, or all that do.",
            stacklevel=user_level(),
        )
    return edges | dict.fromkeys(found, Edge.LOGITS)


def _logits(model: nnx.Module) -> list[str]:
    """Find the layers that give logits; all that may, if nothing tells.

    They are those whose features no layer reads, not even as one of several fused projections, or
    of these those that are called like a head; or the last one in the code of the class. They may
    be in FP8.
    """
    layers = {path: node for path, node in nodes_of(model) if hook_of(node) is not None}
    kinds = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
    linear = [path for path, x in layers.items() if isinstance(x, kinds) and not stacked_axes(x)]
    if isinstance(model, nnx.Sequential):
        return [path for path in linear if path.count("/") < 2][-1:]
    read = {_features(layer)[0] for layer in layers.values()}
    is_read = lambda path: any(_features(layers[path])[1] in (n * k for n in read) for k in _FUSED)
    found = [path for path in linear if "/" not in path]
    found = found or [path for path in linear if not re.search(r"(^|/)\d+(/|$)", path)]
    unread = [path for path in found if not is_read(path)]
    named = [path for path in unread or found if path.rpartition("/")[2] in _HEADS]
    return named or unread or _last(model, found)


def _features(layer: Any) -> tuple[int, int]:
    if not isinstance(layer, nnx.Einsum):
        return int(np.prod(layer.in_features)), int(np.prod(layer.out_features))
    operands, _, result = (layer.einsum_str or "").replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    sizes = dict(zip(kernel, layer.kernel_shape))
    reads = [n for axis, n in sizes.items() if axis not in result]
    makes = [n for axis, n in sizes.items() if axis in result and axis not in x]
    return int(np.prod(reads)), int(np.prod(makes))


def _last(model: nnx.Module, paths: list[str]) -> list[str]:
    """Return the last of `paths` in the code of a class; all, if no code has their order."""
    for path in paths[:-1]:
        above = os.path.commonprefix([path.split("/"), paths[-1].split("/")])
        known = attributes_of(type(dict(nodes_of(model)).get("/".join(above))))
        if not {x.split("/")[len(above)] for x in (path, paths[-1])}.issubset(known):
            return paths
    return paths[-1:]
