"""`upgrade`: a checkpoint of one model as the state of another that differs in its FP8 parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState as FlaxTrainState

from jfp8.checkpoint import histories, optimizer_state, values
from jfp8.checkpoint.changes import CheckpointChange, Log
from jfp8.checkpoint.flax_fp8_ops import COLLECTION, as_fp8
from jfp8.checkpoint.optimizer_state import Part
from jfp8.checkpoint.tree import (
    Nested,
    Path,
    at,
    described,
    nested,
    optimizer_states,
    put,
    rebuilt,
    walk,
)
from jfp8.optim.masters import has_master_weights, init_masters
from jfp8.optim.stored_state import is_stored
from jfp8.training.state import TrainState

__all__ = ["CheckpointChange", "upgrade"]


def upgrade(saved: Any, target: Any, *, strict: bool = False) -> Any:
    """`saved` as a tree of the structure, the shapes and the dtypes of `target`.

    What is the same on both sides is taken over bit for bit. What differs only by FP8 is made to
    fit, and each kind of change is told in one warning:

    ==============================================  ===============================================
    the checkpoint, or the target, has              what happens
    ==============================================  ===============================================
    no amax histories, or those of another recipe   they start empty, or are dropped
    histories of another length                     the newest entries stay
    ``_overwrite_with_gradient``, Flax's FP8 state  it becomes ``fp8``, see `from_flax_fp8_ops`
    parameters in f32 or bf16, in FP8               they are quantized with scales like those of
                                                    the target, or dequantized
    `master_weights`                                masters start from the parameters as they were
                                                    saved, or take their place
    moments in f32, in few bits                     they are encoded, rounding to nearest, or
                                                    decoded
    `loss_scale`                                    a new one begins, or it is dropped, and
                                                    histories of gradients follow
    parameters alone, for a `TrainState`            the step is 0, the optimizer starts afresh
    ==============================================  ===============================================

    What is not FP8 state has to be there, under the same names and with the same shapes. Floating
    dtypes may differ. A training state can be the target of another one, also between
    `jfp8.TrainState` and Flax's; variables can be taken out of one.

    A moment in `Blocks` does not say whether it is that of ``transform="sqrt"``: it is read as a
    plain one. Convert moments that are kept that way with their storage's own ``decode``.

    Args:
      saved: a state dict, such as `jfp8.checkpoint.load` returns, or any pytree.
      target: a training state, the collections of a model, an NNX state, or any pytree; of arrays
        or ``jax.ShapeDtypeStruct``. It says what the result looks like, and where it is: on the
        host, or on the devices of its shardings. New states are those of the target.
      strict: raise instead of changing FP8 state.

    Returns:
      The new tree.

    Raises:
      ValueError: something that is not FP8 state is missing, is too much, or has another shape or
        kind of dtype; with `strict`, also if FP8 state differs. The message names the paths.

    Warns:
      CheckpointChange: once for each kind of change.

    >>> import warnings
    >>> import flax.linen as nn, jax, jax.numpy as jnp, jfp8
    >>> from jfp8.checkpoint.upgrade import upgrade
    >>> x = jnp.ones((1, 3))
    >>> plain = nn.Dense(4).init(jax.random.key(0), x)
    >>> fp8 = jfp8.Dense(4).init(jax.random.key(1), x)
    >>> with warnings.catch_warnings(record=True, action="always") as told:
    ...     variables = upgrade(plain, fp8)
    >>> bool(jnp.all(variables["params"]["kernel"] == plain["params"]["kernel"]))
    True
    >>> str(told[0].message).split(" (")[0]
    'Amax histories that the checkpoint lacks start empty'
    """
    state, wanted = nested(saved), nested(target)
    afresh = _is_train_state(target) and _has_parameters_alone(state)
    walker = _Upgrade(Log(), optimizer_states(target), afresh, {}, {})
    walker.node(wanted, state, ())
    walker.log.close(strict, stacklevel=2)
    if afresh:
        return _with_fresh_optimizer(target, walker)
    return rebuilt(target, walker.new)


@dataclass(frozen=True)
class _Upgrade:
    """One walk over the target, with the checkpoint at its side.

    Attributes:
      log: what changes, and what does not fit.
      optimizers: the paths of the optimizer states in the target.
      afresh: the target is a training state that gets a new optimizer state afterwards.
      new: the new leaves, by their paths in the target.
      wide: with `afresh`, the f32 values of FP8 parameters, by their paths in ``params``.
    """

    log: Log
    optimizers: frozenset[Path]
    afresh: bool
    new: dict[Path, Any]
    wide: dict[Path, np.ndarray]

    def node(self, target: Any, saved: Any, path: Path) -> None:
        """Whatever is at `path` of the target; `saved` is None if the checkpoint lacks it."""
        if path in self.optimizers:
            self.optimizer(target, {} if saved is None else saved, path, _Parameters({}, {}))
        elif histories.is_product(target):
            self.product(target, saved, path)
        elif histories.is_sink(target):
            self.zeros(target, path)
        elif not isinstance(target, dict):
            self.leaf(target, saved, path)
        elif saved is not None and not isinstance(saved, dict):
            wanted, given = described(target), described(saved)
            self.log.problem(path, f"the target has {wanted}, the checkpoint {given}")
        elif "params" in target:
            self.model(target, saved or {}, path)
        else:
            self.entries(target, saved or {}, path)

    def entries(self, target: Nested, saved: Nested, path: Path) -> None:
        """The entries of a dict, and those that only the checkpoint has."""
        for name, child in target.items():
            self.node(child, saved.get(name), (*path, name))
        for name, child in saved.items():
            if name not in target:
                self.unexpected(child, (*path, name))

    def unexpected(self, saved: Any, path: Path) -> None:
        """What only the checkpoint has: FP8 state goes, anything else is a problem."""
        if path in self.optimizers:
            self.optimizer({}, saved, path, _Parameters({}, {}))
        elif histories.is_product(saved):
            self.log.change(histories.DROPPED, path)
        elif histories.is_sink(saved):
            return
        elif isinstance(saved, dict):
            for name, child in saved.items():
                self.unexpected(child, (*path, name))
        else:
            self.log.problem(path, f"the checkpoint has {described(saved)}, the target nothing")

    def product(self, target: Nested, saved: Any, path: Path) -> None:
        """The histories of one product."""
        fitted = histories.fitted(target, saved, path, self.log)
        for place, leaf in walk(target, path):
            self.new[place] = values.placed(fitted[place], leaf)

    def zeros(self, target: Any, path: Path) -> None:
        """Zeros for every leaf of `target`."""
        for place, leaf in walk(target, path):
            zero = np.zeros(np.shape(leaf), getattr(leaf, "dtype", None) or type(leaf))
            self.leaf(leaf, zero, place)

    def leaf(self, target: Any, saved: Any, path: Path) -> None:
        """One leaf of the target."""
        if saved is None:
            self.log.problem(path, f"is missing; the target has {described(target)}")
            return
        try:
            self.new[path] = values.fitted(target, saved, path, self.log)
        except ValueError as error:
            self.log.problem(path, str(error))

    def model(self, target: Nested, saved: Nested, path: Path) -> None:
        """Collections of a model, or a training state: both sides as collections."""
        wanted, places = _collections(target, path)
        given, sources = _collections(saved, path)
        if "params" not in given and not set(given) & set(wanted):
            given = {"params": given}
        # A model is taken out of a training state by leaving the rest where it is.
        optimizer = next((p[-1] for p in self.optimizers if p[:-1] == path), None)
        if optimizer is None and "step" not in wanted:
            given = {k: v for k, v in given.items() if k not in ("step", "opt_state")}
        if COLLECTION in given and COLLECTION not in wanted:
            state = given.pop(COLLECTION)
            given["fp8"] = as_fp8(state, wanted, (*path, COLLECTION), self.log)

        before, after = (
            {} if optimizer is None else side.pop(optimizer, {}) for side in (given, wanted)
        )
        params = _Parameters(given.get("params", {}), optimizer_state.masters(before))
        if self.afresh and path == ():
            self.log.note("Parameters alone: the step is 0, the optimizer starts afresh", path)
            given = {"step": 0, **given}
            self.remember(wanted["params"], params.params)
        elif optimizer is not None:
            kept = optimizer_state.masters(after)
            given["params"] = self.unmastered(wanted["params"], params, kept, places["params"])
            self.optimizer(after, before, (*path, optimizer), params)
        for name, child in wanted.items():
            self.node(child, given.get(name), places[name])
        for name, child in given.items():
            if name not in wanted:
                self.unexpected(child, sources.get(name, (*path, name)))
        if "fp8" in wanted:
            self.follow_loss_scale(wanted["fp8"], places["fp8"], before, after)

    def unmastered(self, target: Any, saved: _Parameters, kept: Nested, path: Path) -> Any:
        """The saved parameters, or their masters where the target has them in 16 or 32 bits."""
        params = saved.params
        for place, leaf in walk(target):
            master = at(saved.masters, place)
            if master is None or is_stored(leaf) or at(kept, place) is not None:
                continue
            if at(params, place) is not None:
                self.log.change("Parameters are taken from their masters", (*path, *place))
                params = put(params, place, master)
        return params

    def remember(self, target: Any, saved: Any) -> None:
        """Keep what parameters are before they are quantized, for their masters."""
        for place, leaf in walk(target):
            found = at(saved, place)
            if is_stored(leaf) and found is not None:
                try:
                    self.wide[place] = values.floats(found, place, Log())
                except ValueError:
                    continue  # the walk over the parameters tells why

    def optimizer(self, target: Any, saved: Any, path: Path, parameters: _Parameters) -> None:
        """An optimizer state, or a part of one; {} where there is none."""
        simple = not optimizer_state.is_composed(target) and not optimizer_state.is_composed(saved)
        if simple and isinstance(target, dict) and isinstance(saved, dict):
            for name in {**target, **saved}:
                inner = target.get(name, {}), saved.get(name, {})
                self.optimizer(*inner, (*path, name), parameters)
        elif simple and not isinstance(target, dict):
            self.leaf(target, saved, path)
        elif simple:
            given = described(saved)
            self.log.problem(path, f"the target has {described(target)}, the checkpoint {given}")
        else:
            self.composed(target, saved, path, parameters)

    def composed(self, target: Any, saved: Any, path: Path, parameters: _Parameters) -> None:
        """An optimizer state that is put together of several: part by part."""
        wanted, given = optimizer_state.parts(target, path), optimizer_state.parts(saved, path)
        own = [[part for part in parts if part.kind == "own"] for parts in (wanted, given)]
        if len(own[0]) != len(own[1]):
            spelled = [", ".join(described(p.fields) for p in parts) or "nothing" for parts in own]
            self.log.problem(path, f"the target has {spelled[0]}; the checkpoint {spelled[1]}")
            return
        for part, theirs in zip(*own, strict=True):
            self.optimizer(part.fields, theirs.fields, part.path, parameters)
        scales = [part for part in given if part.kind == "loss scale"]
        counts = [part for part in given if part.kind in ("count", "masters")]
        for part in wanted:
            if part.kind == "loss scale":
                self.loss_scale(part, scales.pop(0) if scales else None)
            elif part.kind in ("count", "masters"):
                self.count(part, counts.pop(0) if counts else None)
            if part.kind == "masters":
                self.masters(part, parameters)
        for part in scales:
            self.log.change("A loss scale is dropped", part.path)
        if optimizer_state.masters(saved) and not optimizer_state.masters(target):
            self.log.change("Masters of parameters are not kept any more", path)

    def loss_scale(self, part: Part, saved: Part | None) -> None:
        if saved is None:
            self.log.change("A loss scale begins, as the target has it", part.path)
        for name, leaf in part.fields.items():
            place = (*part.path, name)
            if saved is not None:
                self.leaf(leaf, saved.fields.get(name), place)
            elif isinstance(leaf, jax.ShapeDtypeStruct):
                self.log.problem(place, "is missing, and the target has a shape but no value")
            else:
                self.new[place] = leaf

    def count(self, part: Part, saved: Part | None) -> None:
        """The number of steps from which random bits follow: any will do, but not one twice."""
        count, place = part.fields["count"], (*part.path, "count")
        if saved is None:
            self.zeros(count, place)
        else:
            self.leaf(count, saved.fields.get("count"), place)

    def masters(self, part: Part, parameters: _Parameters) -> None:
        for place, leaf in walk(part.fields["masters"]):
            path = (*part.path, "masters", *place)
            master = at(parameters.masters, place)
            if master is None:
                master = at(parameters.params, place)
                self.log.change("Masters start from the parameters as they were saved", path)
            self.leaf(leaf, master, path)

    def follow_loss_scale(self, target: Any, path: Path, before: Any, after: Any) -> None:
        """Gradients carry the loss scale, and so do their histories: make them follow it."""
        old, new = optimizer_state.loss_scales(before), optimizer_state.loss_scales(after)
        if self.afresh and new:
            factor, what = 0.0, "start empty: their loss scale is not known"
        elif bool(old) == bool(new):
            factor, what = 1.0, ""
        else:
            factor, what = _number(new) / _number(old), "follow the loss scale"
        if factor == 1.0:
            return
        for product in histories.product_paths(target):
            grad = at(target, product)["grad"]
            for place, leaf in walk(grad, (*path, *product, "grad")):
                history = np.asarray(self.new.get(place, 0.0))
                if np.any(history):
                    self.log.change(f"Amax histories of gradients {what}", place[:-1])
                followed = np.minimum(history * np.float32(factor), np.finfo(np.float32).max)
                self.new[place] = values.placed(followed, leaf)


@dataclass(frozen=True)
class _Parameters:
    """What an optimizer state is about.

    Attributes:
      params: the saved parameters, nested dicts.
      masters: the saved masters, nested dicts of the same names; {} without.
    """

    params: Any
    masters: Nested


def _collections(state: Nested, path: Path = ()) -> tuple[Nested, dict[str, Path]]:
    """Collections of a model by their names, and where each is, whoever's training state it is.

    `jfp8.TrainState` has those but ``params`` and ``fp8`` in ``collections``; that of Flax has all
    collections of an FP8 model in ``params``; subclasses have fields for them.
    """
    found: Nested = dict(state)
    places: dict[str, Path] = {name: (*path, name) for name in state}
    if "step" in state or "opt_state" in state:
        for holder in ("collections", "params"):
            inner = found.get(holder)
            if isinstance(inner, dict) and (holder == "collections" or "params" in inner):
                del found[holder]
                found |= inner
                places |= {name: (*path, holder, name) for name in inner}
    return found, places


def _number(loss_scales: list[Any]) -> float:
    """The value of a loss scale; 1 without one, or where there is no use for it."""
    for scale in loss_scales:
        if not isinstance(scale, jax.ShapeDtypeStruct) and np.shape(scale) == ():
            value = float(np.asarray(scale, np.float32))
            return value if np.isfinite(value) and value > 0 else 1.0
    return 1.0


def _has_parameters_alone(state: Any) -> bool:
    """Whether a checkpoint says nothing about the optimizer."""
    return isinstance(state, dict) and not {"step", "opt_state"} & set(state)


def _is_train_state(target: Any) -> bool:
    return isinstance(target, TrainState | FlaxTrainState)


def _with_fresh_optimizer(target: Any, walker: _Upgrade) -> Any:
    """A training state of new parameters: the optimizer sees those, and no others."""
    new: Any = rebuilt(target.replace(opt_state=()), walker.new)
    create = type(target).create
    if isinstance(target, FlaxTrainState):
        fresh: Any = create(apply_fn=target.apply_fn, params=new.params, tx=target.tx)
        return new.replace(opt_state=fresh.opt_state)
    variables = {"params": new.params}
    fresh = create(apply_fn=target.apply_fn, variables=variables, tx=target.tx)
    opt_state = fresh.opt_state
    if has_master_weights(opt_state):
        wide = {place: walker.wide.get(place, x) for place, x in walk(nested(new.params))}
        opt_state = init_masters(opt_state, rebuilt(new.params, wide))
    return new.replace(opt_state=opt_state)
