"""The ``fp8`` and ``fp8_sink`` collections of a model, filled with histories from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jfp8.checkpoint import histories
from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.tree import Nested, at, nested, rebuilt, walk
from jfp8.checkpoint.values import placed


def filled(target: Mapping[str, Any], fp8: Nested, log: Log) -> dict[str, Any]:
    """Those of the two collections that `target` has.

    Args:
      target: collections of a model; arrays or shapes.
      fp8: histories in the layout of ``target["fp8"]``, of any length, some of them or all.
      log: is told of what changes.
    """
    found: dict[str, Any] = {}
    if "fp8" in target:
        wanted = nested(target["fp8"])
        new = {}
        for path in histories.product_paths(wanted):
            saved = at(fp8, path)
            new |= histories.fitted(at(wanted, path), saved, ("fp8", *path), log)
        leaves = dict(walk(wanted, ("fp8",)))  # of an NNX state, parameters as well
        leaves |= {path: placed(history, leaves[path]) for path, history in new.items()}
        found["fp8"] = rebuilt(target["fp8"], {path[1:]: leaf for path, leaf in leaves.items()})
    if "fp8_sink" in target:
        sinks = dict(walk(nested(target["fp8_sink"])))
        zeros = {p: placed(np.zeros(leaf.shape, np.float32), leaf) for p, leaf in sinks.items()}
        found["fp8_sink"] = rebuilt(target["fp8_sink"], zeros)
    return found
