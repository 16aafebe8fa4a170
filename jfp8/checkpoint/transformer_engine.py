"""Amax histories of NVIDIA's Transformer Engine (TE), for its recipe ``DelayedScaling``.

TE has had four layouts for them. H is the length of the history. ::

    JAX, from 2.4   collection fp8_metas, per layer
                    x_amax_history, kernel_amax_history, grad_amax_history   f32[H]
                    x_scale, kernel_scale, grad_scale                        f32[1]
    JAX, from 1.8   collection fp8_metas, per layer
                    amax_i_*, amax_w_*, amax_g_*                             f32[H]
                    scale_i_*, scale_w_*, scale_g_*                          f32[1]
    JAX, to 1.7     collection fp8_meta_collection, per layer
                    fp8_meta_amax f32[3n, H]       rows x, kernel, grad of each of n matmuls
                    fp8_meta_scale, fp8_meta_scale_inv, fp8_max f32[3n, 1]
    PyTorch         the extra state of a module
                    amax_history_fwd f32[H, 3n]    columns x, kernel, result of each of n matmuls
                    amax_history_bwd f32[H, 2n]    columns grad of the result, grad of the input
                    scale_fwd f32[3n], scale_bwd f32[2n]

TE's ``scale`` is the reciprocal of ours. It follows from the history, as ours does, so only the
history is imported. Where it is empty, as it is between the steps when H is 1, the next step uses
current scaling.

All layouts roll by -1 and clear slot 0 for the step under way, see `histories.unrolled`.

References:
  Transformer Engine v2.18, https://github.com/NVIDIA/TransformerEngine/blob/v2.18/ with
  ``transformer_engine/jax/quantize/helper.py``, ``jax/quantize/quantizer.py``,
  ``pytorch/module/base.py``, ``pytorch/csrc/common.h``, ``common/recipe/delayed_scaling.cu``;
  v1.13 and v1.0, ``transformer_engine/jax/fp8.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from jfp8.checkpoint import histories
from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.state_dict import Path, spelled, walk
from jfp8.checkpoint.tree import Nested, at, described, nested, nested_target, rebuilt
from jfp8.scaling.sink import ROLES

# Names of histories; the rest of the name tells the matmuls of a layer apart.
_NEW = re.compile("(?P<tensor>x|kernel|grad)(?P<product>.*)_amax_history")
_OLD = re.compile("amax_(?P<tensor>[iwg])_(?P<product>.*)")
_ROLE = {"x": "lhs", "i": "lhs", "kernel": "rhs", "w": "rhs", "grad": "grad", "g": "grad"}
_PICKLED = (bytes, bytearray, memoryview)

_Product: TypeAlias = dict[str, Any]  # the history of each tensor of a matmul, a ring f32[..., H]


def from_transformer_engine(meta: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``fp8`` collection of a model, with the amax histories of Transformer Engine.

    Args:
      meta: nested dicts with NumPy or JAX arrays. For TE/JAX its collection, ``fp8_metas``, as it
        is. For TE/PyTorch ``{module: extra state}``, with names of modules nested or joined by
        dots, and extra states as dicts with ``amax_history_fwd`` and so on. PyTorch stores these
        pickled. Pickles are not read here, because they can run any code; the error says how to
        convert them.
      target: the ``fp8`` collection of the model with jfp8, as ``init`` returned it, or an NNX
        state; arrays or shapes. Modules in `meta` must have the same names as here.

    Returns:
      A collection like `target`.

    Raises:
      ValueError: `meta` has none of TE's layouts; the message names the path.
      TypeError: pickled extra states.

    Warns:
      CheckpointChange: a history changes its length, has no counterpart, or is missing.

    >>> import warnings
    >>> import jax, jax.numpy as jnp, numpy as np, jfp8
    >>> fp8 = jfp8.Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))["fp8"]
    >>> ring = np.array([0.0, 1.0, 2.0, 3.0], np.float32)  # 3 is the newest
    >>> meta = {f"{x}_amax_history": ring for x in ("x", "kernel", "grad")}
    >>> with warnings.catch_warnings(action="ignore"):
    ...     fp8 = jfp8.checkpoint.from_transformer_engine(meta, fp8)
    >>> fp8["DotGeneral_0"]["lhs"]["amax_history"][:4]
    Array([3., 2., 1., 0.], dtype=float32)
    """
    log, wanted = Log(), nested_target(target)
    found = {}
    for path, node in _layers(nested(meta), log):
        for name, product in _products(node, path, log).items():
            tensors = {role: histories.unrolled(product[role]) for role in ROLES}
            found[_place(path, name, wanted)] = tensors
    fp8 = histories.renamed(found, wanted, (), log)
    leaves = dict(walk(wanted))  # an NNX state's include parameters
    for path in histories.product_paths(wanted):
        new = histories.fitted(at(wanted, path), at(fp8, path), ("fp8", *path), log)
        leaves |= {place[1:]: leaf for place, leaf in new.items()}
    log.close(strict=False)
    return rebuilt(target, leaves)


def _layers(meta: Any, log: Log) -> Iterator[tuple[Path, Nested]]:
    """Yield the dicts in `meta` that hold the state of a layer, and the paths of their modules."""
    for path, node in walk(meta, until=_is_layer):
        modules = [name for name in path if not name.startswith("_extra_state")]
        if isinstance(node, dict):
            yield tuple(part for name in modules for part in name.split(".")), node
        elif (
            len(modules) < len(path)
            or isinstance(node, _PICKLED)
            or getattr(node, "dtype", None) == np.uint8
        ):
            _refuse(path)
        else:
            log.problem(path, f"{described(node)}, which is no state of Transformer Engine")


def _is_layer(node: Nested) -> bool:
    return any("amax" in name and not isinstance(child, dict) for name, child in node.items())


def _refuse(path: Path) -> None:
    raise TypeError(
        f"{spelled(path)} holds bytes: state that TE/PyTorch pickled. Loading a pickle runs "
        "whatever code is in it, so it is not read here. If you trust the checkpoint, and have "
        "PyTorch and Transformer Engine, convert it to dicts of numpy arrays: "
        "state = pickle.loads(extra_state.numpy().tobytes()); names = ['amax_history_fwd', "
        "'amax_history_bwd', 'scale_fwd', 'scale_bwd']; {name: state[name].numpy() for name in "
        "names}."
    )


def _products(node: Nested, path: Path, log: Log) -> dict[str, _Product]:
    """Return the histories of each matmul of a layer, by its name there."""
    found: dict[str, _Product] = {}
    if "fp8_meta_amax" in node:
        found = _rows(node["fp8_meta_amax"], path, log)
    elif "amax_history_fwd" in node:
        found = _columns(node, path, log)
    else:
        for name, ring in node.items():
            if match := _NEW.fullmatch(name) or _OLD.fullmatch(name):
                product = found.setdefault(match["product"], {})
                product[_ROLE[match["tensor"]]] = ring
    return {name: product for name, product in found.items() if _is_whole(product, path, log)}


def _rows(rings: Any, path: Path, log: Log) -> dict[str, _Product]:
    """Return the matmuls whose tensors are the rows x, kernel, grad of one array."""
    if getattr(rings, "ndim", 0) < 2 or rings.shape[-2] % 3:
        log.problem(path, f"fp8_meta_amax is {described(rings)}, not float32[3n, H]")
        return {}
    found: dict[str, _Product] = {}
    for row in range(rings.shape[-2]):
        product = found.setdefault(str(row // 3), {})
        product[ROLES[row % 3]] = np.asarray(rings)[..., row, :]
    return found


def _columns(node: Nested, path: Path, log: Log) -> dict[str, _Product]:
    """Return the matmuls whose tensors are columns of two arrays, forward and backward."""
    rings: Any = node["amax_history_fwd"], node.get("amax_history_bwd")
    widths = [ring.shape[1] if getattr(ring, "ndim", 0) == 2 else None for ring in rings]
    n = (widths[0] or 0) // 3
    if widths != [3 * n, 2 * n]:
        given = " and ".join(map(described, rings))
        log.problem(path, f"histories are {given}, not float32[H, 3n] and float32[H, 2n]")
        return {}
    # Columns x, kernel, result and grad, unused become rows x, kernel, grad.
    forward, backward = (np.asarray(ring).T for ring in rings)
    rows = np.stack([forward[0::3], forward[1::3], backward[0::2]], axis=1)
    return _rows(rows.reshape(-1, rows.shape[-1]), path, log)


def _is_whole(product: _Product, path: Path, log: Log) -> bool:
    if set(product) == set(ROLES) and histories.are_alike(product):
        return True
    given = ", ".join(f"{role} {described(ring)}" for role, ring in product.items())
    log.problem(path, f"a product has three float histories of one shape; here is {given}")
    return False


def _place(path: Path, name: str, target: Any) -> Path:
    """Return the path of a matmul: its module, and a name.

    A layer of TE keeps its own state. For other layers a module of TE keeps it, which is a product
    in the layer.
    """
    is_layer = any(place[: len(path)] == path for place in histories.product_paths(target))
    if is_layer or not path:
        return (*path, name or "0")
    return (*path[:-1], f"{path[-1]}{name}")
