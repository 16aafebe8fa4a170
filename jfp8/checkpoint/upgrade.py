"""`upgrade`: a checkpoint of one model, converted to one that differs in its FP8 parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax.training.train_state import TrainState as FlaxTrainState

from jfp8.checkpoint import histories
from jfp8.checkpoint.changes import CheckpointChange, Log
from jfp8.checkpoint.flax_fp8_ops import COLLECTION, as_fp8
from jfp8.checkpoint.optimizer_state import masters
from jfp8.checkpoint.tree import (
    Nested,
    Path,
    at,
    described,
    nested,
    optimizer_states,
    rebuilt,
    walk,
)
from jfp8.checkpoint.upgrade_optimizer import (
    Parameters,
    fit_optimizer,
    follow_loss_scale,
    unmastered,
)
from jfp8.checkpoint.values import Leaves, floats
from jfp8.layers.linen.state_in_gradients import NAME
from jfp8.optim.masters import init_masters
from jfp8.optim.stored_state import is_stored
from jfp8.optim.wrapping import has_master_weights
from jfp8.training.state import TrainState

__all__ = ["CheckpointChange", "upgrade"]


def upgrade(saved: Any, target: Any, *, strict: bool = False) -> Any:
    """`saved` as a tree with the structure, the shapes and the dtypes of `target`.

    What is the same on both sides is copied bit for bit. What differs only by FP8 is converted,
    with one warning for each kind of change:

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

    A moment in `Blocks` does not say whether it was stored with ``transform="sqrt"``; it is read as
    a plain one. Convert moments stored that way with their storage's own ``decode``.

    Args:
      saved: a state dict, such as `jfp8.checkpoint.load` returns, or any pytree.
      target: a training state, the collections of a model, an NNX state, or any pytree; of arrays
        or ``jax.ShapeDtypeStruct``. It determines what the result looks like, and where it is: on
        the host, or on the devices of its shardings. New states come from the target.
      strict: raise instead of changing anything.

    Returns:
      The new tree.

    Raises:
      ValueError: something that is not FP8 state is missing, is extra, or has another shape or kind
        of dtype; with `strict`, also instead of every warning. The message names the paths.

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
    state, wanted, leaves = nested(saved), nested(target), Leaves(Log())
    # A checkpoint that says nothing about the optimizer, for a training state.
    afresh = isinstance(target, TrainState | FlaxTrainState) and isinstance(state, dict)
    afresh = afresh and not {"step", "opt_state"} & set(state)
    _Walk(leaves, optimizer_states(target), afresh).node(wanted, state, ())
    leaves.log.close(strict)
    if afresh:
        return _with_fresh_optimizer(target, leaves.new, state.get("params", state))
    return rebuilt(target, leaves.new)


@dataclass(frozen=True)
class _Walk:
    """One walk over the target, with the checkpoint alongside.

    Attributes:
      leaves: get the new leaves.
      optimizers: the paths of the optimizer states in the target.
      afresh: the target is a training state that gets a new optimizer state afterwards.
    """

    leaves: Leaves
    optimizers: frozenset[Path]
    afresh: bool

    def node(self, target: Any, saved: Any, path: Path) -> None:
        """Whatever is at `path` of the target; `saved` is None if the checkpoint lacks it."""
        if path in self.optimizers:
            empty: Nested = {} if saved is None else saved
            fit_optimizer(target, empty, path, Parameters(), self.leaves)
        elif histories.is_product(target):
            self.leaves.new.update(histories.fitted(target, saved, path, self.leaves.log))
        elif histories.is_sink(target):
            self.leaves.zeros(target, path)
        elif saved is None and COLLECTION in path and path[-1] == NAME:
            self.leaves.log.change(histories.MISSING, path)
            self.leaves.zeros(target, path)
        elif not isinstance(target, dict):
            self.leaves.fit(target, saved, path)
        elif saved is not None and not isinstance(saved, dict):
            wanted, given = described(target), described(saved)
            self.leaves.log.problem(path, f"the target has {wanted}, the checkpoint {given}")
        elif "params" in target:
            self.model(target, saved or {}, path)
        else:
            self.entries(target, saved or {}, path, {})

    def entries(self, target: Nested, saved: Nested, path: Path, places: dict[str, Path]) -> None:
        """The entries of a dict at `path` or their `places`, and what only the checkpoint has."""
        for name, child in target.items():
            self.node(child, saved.get(name), places.get(name, (*path, name)))
        for name, child in saved.items():
            if name not in target:
                self.unexpected(child, places.get(name, (*path, name)))

    def unexpected(self, saved: Any, path: Path) -> None:
        """What only the checkpoint has: FP8 state is dropped, anything else is a problem."""
        if path in self.optimizers:
            fit_optimizer({}, saved, path, Parameters(), self.leaves)
        elif histories.is_product(saved):
            self.leaves.log.change(histories.DROPPED, path)
        elif histories.is_sink(saved):
            return
        elif isinstance(saved, dict):
            for name, child in saved.items():
                self.unexpected(child, (*path, name))
        else:
            found = f"the checkpoint has {described(saved)}, the target nothing"
            self.leaves.log.problem(path, found)

    def model(self, target: Nested, saved: Nested, path: Path) -> None:
        """Collections of a model, or a training state: both sides as collections."""
        log = self.leaves.log
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
            given["fp8"] = as_fp8(state, wanted, (*path, COLLECTION), log)

        before, after = (
            {} if optimizer is None else side.pop(optimizer, {}) for side in (given, wanted)
        )
        if self.afresh and path == ():
            log.change("Parameters alone: the step is 0, the optimizer starts afresh", path)
            given = {"step": 0, **given}
        elif optimizer is not None:
            params = Parameters(given.get("params", {}), masters(before))
            kept = masters(after)
            given["params"] = unmastered(wanted["params"], params, kept, places["params"], log)
            fit_optimizer(after, before, (*path, optimizer), params, self.leaves)
        self.entries(wanted, given, path, {**sources, **places})
        if "fp8" in wanted:
            fp8, place = wanted["fp8"], places["fp8"]
            follow_loss_scale(fp8, place, before, after, self.afresh, self.leaves)


def _collections(state: Nested, path: Path) -> tuple[Nested, dict[str, Path]]:
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


def _with_fresh_optimizer(target: Any, leaves: dict[Path, Any], saved: Any) -> Any:
    """A training state of new `leaves`, whose optimizer starts from the parameters.

    Masters start from the `saved` parameters, before they were quantized.
    """
    new: Any = rebuilt(target.replace(opt_state=()), leaves)
    create = type(target).create
    if isinstance(target, FlaxTrainState):
        fresh: Any = create(apply_fn=target.apply_fn, params=new.params, tx=target.tx)
        return new.replace(opt_state=fresh.opt_state)
    variables = {"params": new.params}
    fresh = create(apply_fn=target.apply_fn, variables=variables, tx=target.tx)
    opt_state = fresh.opt_state
    if has_master_weights(opt_state):
        wide = {
            place: floats(at(saved, place)) if is_stored(leaf) else leaf
            for place, leaf in walk(nested(new.params))
        }
        opt_state = init_masters(opt_state, rebuilt(new.params, wide))
    return new.replace(opt_state=opt_state)
