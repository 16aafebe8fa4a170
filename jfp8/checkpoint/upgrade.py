"""`upgrade` and `downgrade`: a checkpoint for a model that differs in its FP8 parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState

from jfp8.checkpoint import histories, tree, values
from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.state_dict import Path, walk
from jfp8.checkpoint.tree import Nested
from jfp8.layers.linen.state_in_gradients import NAME, OVERWRITTEN
from jfp8.layers.nnx.products import Fp8Sink, Fp8State
from jfp8.optim.loss_scale_state import LossScaleState
from jfp8.optim.masters import init_masters
from jfp8.optim.wrapping import has_master_weights, states_of
from jfp8.scaling.arrays import ScaledArray
from jfp8.training.skipped import COUNTERS
from jfp8.training.state import TrainState


def upgrade(saved: Any, target: Any, *, strict: bool = False) -> Any:
    """Fit `saved` to the structure, the shapes and the dtypes of `target`.

    What is the same on both sides is copied bit for bit. What differs only by FP8 is converted,
    with one warning for each kind of change:

    ==============================================  ===============================================
    the checkpoint, or the target, has              what happens
    ==============================================  ===============================================
    no amax histories, or another recipe's          they start empty, or are dropped
    histories of another length                     the newest entries stay
    ``_overwrite_with_gradient``, Flax's FP8 state  it becomes ``fp8``, see `from_flax_fp8_ops`
    parameters in f32 or bf16, in FP8               they are quantized with scales like those of
                                                    the target, or dequantized
    parameters alone, for a `TrainState`            the step is 0, the optimizer starts afresh, with
                                                    masters from the parameters as they were saved;
                                                    with a loss scale, so do gradients' histories
    ==============================================  ===============================================

    What is not FP8 state has to be there, under the same names and with the same shapes. Floating
    dtypes may differ. A training state can be the target of another one, also between
    `jfp8.TrainState` and Flax's; variables can be taken out of one.

    An optimizer state is restored into the optimizer that was saved, with the same wrappers and
    storages. For another optimizer, upgrade the parameters alone: ``{"params":
    saved["params"]}``. Arrays are taken out of the boxes in which Orbax stores NNX variables.

    Args:
      saved: a state dict, such as `jfp8.checkpoint.load` returns, or any tree that
        `jfp8.checkpoint.save` takes.
      target: a training state, the collections of a model, an NNX state, or any pytree; of arrays
        or ``jax.ShapeDtypeStruct``. The result has its structure, and is on the host, or on the
        devices of its shardings. New states come from the target.
      strict: raise instead of changing anything.

    Returns:
      A tree of the structure of `target`.

    Raises:
      ValueError: something that is not FP8 state is missing, is extra, or has another shape or kind
        of dtype; another optimizer was saved; with `strict`, also instead of every warning. The
        message names the paths.

    Warns:
      CheckpointChange: once for each kind of change.

    >>> import warnings
    >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8
    >>> x = jnp.ones((1, 3))
    >>> plain = nn.Dense(4).init(jax.random.key(0), x)
    >>> fp8 = jfp8.Dense(4).init(jax.random.key(1), x)
    >>> with warnings.catch_warnings(record=True, action="always") as told:
    ...     variables = jfp8.checkpoint.upgrade(plain, fp8)
    >>> bool(jnp.all(variables["params"]["kernel"] == plain["params"]["kernel"]))
    True
    >>> str(told[0].message).split(" (")[0]
    'Amax histories that the checkpoint lacks start empty'
    """
    state, wanted = tree.nested(saved), tree.nested_target(target)
    log = Log(tree.optimizer_states(target))
    # The target is a training state, and the checkpoint says nothing about its optimizer.
    afresh = isinstance(target, TrainState | FlaxTrainState) and isinstance(state, dict)
    afresh = afresh and not {"step", "opt_state"} & set(state)
    if afresh:
        log.change("Parameters alone: the step is 0, the optimizer starts afresh", ())
        wanted = {name: child for name, child in wanted.items() if name != "opt_state"}
    arranged = state
    for path, model in walk(wanted, until=lambda node: "params" in node):
        theirs = tree.at(state, path)
        if isinstance(model, dict) and (theirs is None or isinstance(theirs, dict)):
            new = _model(model, theirs or {}, afresh, path, log)
            arranged = tree.put(arranged, path, new)
    arranged = tree.unboxed(arranged, wanted)
    if afresh and states_of(LossScaleState, target.opt_state):
        arranged = histories.without_gradients(arranged, log)
    leaves = _fitted(wanted, arranged, (), log)
    log.close(strict)
    if afresh:
        return _with_fresh_optimizer(target, leaves, arranged["params"])
    return tree.rebuilt(target, leaves)


def _model(target: Nested, saved: Nested, afresh: bool, path: Path, log: Log) -> Nested:
    """Arrange a saved model or training state like the target: its collections and counters.

    `afresh`: the target is a training state, and the checkpoint has parameters alone.
    """
    places, sources = _collections(target), _collections(saved)
    given = {name: tree.at(saved, place) for name, place in sources.items()}
    if not set(given) & {"params", OVERWRITTEN, *places}:
        given = {"params": given}
    # A model is taken out of a training state by leaving the rest where it is.
    if not {"step", "opt_state"} & set(places):
        given = {k: v for k, v in given.items() if k not in (*COUNTERS, "opt_state")}
    if OVERWRITTEN in given and OVERWRITTEN not in places:
        wanted = {name: tree.at(target, place) for name, place in places.items()}
        given["fp8"] = histories.as_fp8(given.pop(OVERWRITTEN), wanted, (*path, OVERWRITTEN), log)
    new: Nested = {"step": 0} if afresh else {}
    for name, value in given.items():
        new = tree.put(new, (sources | places).get(name, (name,)), value)
    return new


def _with_counters(given: Nested, wanted: Nested) -> Nested:
    """Return a training state with the target's counters; Flax's and older states lack some."""
    if "step" not in given:
        return given
    known = {name: wanted.get(name) for name in COUNTERS[1:]}
    kept = {name: child for name, child in given.items() if known.get(name, child) is not None}
    if not kept.keys() & known.keys():
        kept |= {n: np.zeros((), leaf.dtype) for n, leaf in known.items() if leaf is not None}
    return kept


def _fitted(target: Any, saved: Any, path: Path, log: Log) -> dict[Path, Any]:
    """Return the new leaves by their paths, from what the arranged checkpoint has at `path`."""
    if histories.is_product(target):
        return histories.fitted(target, saved, path, log)
    if histories.is_sink(target):
        return _zeros(target, path)
    if saved is None and OVERWRITTEN in path and path[-1] == NAME:
        log.change(histories.MISSING, path)
        return _zeros(target, path)
    if not isinstance(target, dict):
        return _leaf(target, saved, path, log)
    if saved is not None and not isinstance(saved, dict):
        wanted, given = tree.described(target), tree.described(saved)
        log.problem(path, f"the target has {wanted}, the checkpoint {given}")
        return {}
    new: dict[Path, Any] = {}
    saved = _with_counters(saved or {}, target)
    for name, child in target.items():
        new |= _fitted(child, saved.get(name), (*path, name), log)
    for name, child in saved.items():
        if name not in target:
            _drop(child, (*path, name), log)
    return new


def _leaf(target: Any, saved: Any, path: Path, log: Log) -> dict[Path, Any]:
    if saved is None:
        log.problem(path, f"is missing; the target has {tree.described(target)}")
        return {}
    try:
        return {path: values.fitted(target, saved, path, log)}
    except ValueError as error:
        log.problem(path, str(error))
        return {}


def _zeros(target: Any, path: Path) -> dict[Path, Any]:
    leaves = walk(target, path)
    return {place: values.placed(np.zeros(leaf.shape, leaf.dtype), leaf) for place, leaf in leaves}


def _drop(saved: Any, path: Path, log: Log) -> None:
    """Drop FP8 state that only the checkpoint has; anything else is a problem."""
    is_ours = lambda node: histories.is_product(node) or histories.is_sink(node)
    for place, node in walk(saved, path, is_ours):
        if histories.is_product(node):
            log.change(histories.DROPPED, place)
        elif not isinstance(node, dict):
            log.problem(place, f"the checkpoint has {tree.described(node)}, the target nothing")


def _collections(state: Nested) -> dict[str, Path]:
    """Return the paths of a model's collections by name, in anybody's training state.

    `jfp8.TrainState` has those but ``params`` and ``fp8`` in ``collections``; that of Flax has all
    collections of an FP8 model in ``params``; subclasses have fields for them.
    """
    places: dict[str, Path] = {name: (name,) for name in state}
    if "step" in state or "opt_state" in state:
        for holder in ("collections", "params"):
            inner = state.get(holder)
            if isinstance(inner, dict) and (holder == "collections" or "params" in inner):
                del places[holder]
                places |= {name: (holder, name) for name in inner}
    return places


def _with_fresh_optimizer(target: Any, leaves: dict[Path, Any], saved: Any) -> Any:
    """Return a training state of new `leaves`, whose optimizer starts from the parameters.

    Masters start from the `saved` parameters, before they were quantized.
    """
    new: Any = tree.rebuilt(target.replace(opt_state=()), leaves)
    is_flax, given = isinstance(target, FlaxTrainState), {"params": new.params}
    given = given if is_flax else {"variables": given}
    opt_state = type(target).create(apply_fn=target.apply_fn, tx=target.tx, **given).opt_state
    if not is_flax and has_master_weights(opt_state):
        wide = {
            place: values.decoded(tree.at(saved, place)) if isinstance(leaf, ScaledArray) else leaf
            for place, leaf in walk(tree.nested_target(new.params))
        }
        opt_state = init_masters(opt_state, tree.rebuilt(new.params, wide))
    return new.replace(opt_state=opt_state)


def downgrade(state: Any, *, dtype: jax.typing.DTypeLike = "float32") -> Any:
    """Return the variables of the same model without jfp8: no FP8 state, no parameters in FP8.

    Parameters that are stored in FP8 become the values that matmuls used, ``data * scale``; all
    others stay as they are, bit for bit.

    Args:
      state: a `jfp8.TrainState`, the variables of a model, a state dict of either, or an NNX state.
      dtype: floating dtype of parameters that were in FP8.

    Returns:
      For Linen ``{"params": ..., "batch_stats": ...}``, without ``fp8`` and ``fp8_sink``. For NNX a
      state without `jfp8.nnx.Fp8State`.

    Raises:
      TypeError: `state` is none of these.
      ValueError: there are no ``params``.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> variables = jfp8.Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))
    >>> sorted(variables), sorted(jfp8.checkpoint.downgrade(variables))
    (['fp8', 'fp8_sink', 'params'], ['params'])
    """
    if isinstance(state, nnx.State):
        kept = {
            path: variable.replace(_dequantized(variable.get_value(), dtype))
            for path, variable in nnx.to_flat_state(state)
            if not isinstance(variable, Fp8State | Fp8Sink)
        }
        return nnx.from_flat_state(kept)
    if isinstance(state, TrainState):
        state = {**state.collections, "params": state.params}
    if not isinstance(state, Mapping):
        raise TypeError(
            "downgrade takes a jfp8.TrainState, variables, a state dict or an NNX state, got "
            f"{type(state).__name__}. Of an NNX model pass nnx.state(model)."
        )
    state = dict(state)
    left_out = {"fp8", "fp8_sink", OVERWRITTEN}
    if "opt_state" in state:
        left_out |= {"opt_state", *COUNTERS}
    collections = {
        name: tree.at(state, place)
        for name, place in _collections(state).items()
        if name not in left_out
    }
    if "params" not in collections:
        raise ValueError(
            f"There are no 'params' among {sorted(map(str, state))}. Pass all variables, "
            '{"params": params}, rather than the parameters themselves.'
        )
    return {**collections, "params": _dequantized(collections["params"], dtype)}


def _dequantized(node: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Dequantize every `ScaledArray` in `node`, also where it has become a dict."""
    stored = node if isinstance(node, ScaledArray) else values.from_fields(node)
    if isinstance(stored, ScaledArray):
        return jax.tree.map(jax.numpy.asarray, stored).dequantize(dtype)
    if isinstance(node, Mapping):
        return {name: _dequantized(child, dtype) for name, child in node.items()}
    return node
