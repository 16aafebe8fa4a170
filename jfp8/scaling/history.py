"""The amax history of one tensor: its amaxes in earlier steps, from which delayed scales follow.

A step is *under way* from the first amax that is seen in it until it is `ended`. However often the
tensor is used in between, the step gets one entry, the largest amax. The scale covers that entry
too: a step that is never ended costs precision, but values up to that amax do not saturate.

All functions take stacked states, too (leading axes from ``nn.scan`` or ``vmap``).

Histories lie in trees that people average, scale and cast, and the mean of two amaxes is no amax.
So the histories of a matmul come with a check, a `fingerprint` of their bits, which any arithmetic
contradicts: `intact` then returns empty histories, and scales follow from the data.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.tracing.compat import axes_apart

AmaxState: TypeAlias = dict[str, jax.Array]
"""One operand's state: ``{"amax_history": f32[H], newest first, 0 = empty slot,
"amax": f32[], running maximum of the step under way, 0 if there is none}``. A negative running
maximum is an entry already, the newest one: see `resume_recorded`."""


def as_dicts(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` as nested dicts, whatever mappings (Flax's FrozenDict, say) it is made of."""
    return {k: as_dicts(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def init_amax_state(history_len: int) -> AmaxState:
    """Return an empty history, and no amax seen in this step.

    Args:
      history_len: number of steps that it remembers.

    Returns:
      An `AmaxState` of zeros.
    """
    return {
        "amax_history": jnp.zeros((history_len,), jnp.float32),
        "amax": jnp.zeros((), jnp.float32),
    }


CHECK = "check"
"""The name of the `fingerprint` next to the histories of a matmul."""


@jax.jit
def fingerprint(histories: Any) -> jax.Array:
    """Return a hash of the bits of all histories and running maxima of a matmul.

    The leading 24 bits of ``sum_i mix(bits_i c_i) mod 2^32``, with odd constants ``c_i``.

    Args:
      histories: a tree of arrays f32[..., H] and f32[...].

    Returns:
      f32[...], an integer below 2^24; 0 for empty histories.
    """
    arrays = jax.tree.leaves(histories)
    axis = max(x.ndim for x in arrays) - 1
    wide = [x if x.ndim > axis else lax.expand_dims(x, [axis]) for x in arrays]
    bits = lax.bitcast_convert_type(lax.concatenate(wide, axis), jnp.uint32)
    odd = np.arange(1, 2 * bits.shape[-1], 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
    mixed = bits * jnp.broadcast_to(odd, bits.shape)
    hashed = jnp.sum(mixed ^ (mixed >> 15), axis=-1, dtype=jnp.uint32)
    return (hashed >> 8 | jnp.minimum(hashed, np.uint32(1))).astype(jnp.float32)


def choose(flag: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` where `flag`, bool[...], is True, else `old`; all arrays begin with its axes."""
    along = lambda x: lax.expand_dims(flag, range(flag.ndim, x.ndim)) if flag.ndim else flag
    return jax.tree.map(lambda x, y: jnp.where(along(x), x, y), new, old)


@jax.jit
def intact(histories: Any, check: jax.Array) -> Any:
    """Return `histories` if `check` is their fingerprint, else empty ones: f32 zeros.

    Args:
      histories: a tree of arrays f32[..., H] and f32[...].
      check: f32[...]; 0, which it is before the first step, vouches for any: what is set by hand.
    """
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), histories)
    if any(x.dtype != jnp.float32 for x in jax.tree.leaves(histories)):
        return empty
    return choose((fingerprint(histories) == check) | (check == 0), histories, empty)


def intact_states(product: Mapping[str, Any]) -> dict[str, AmaxState]:
    """Return the states of a matmul's tensors, if they are `intact`.

    Args:
      product: ``{"lhs", "rhs", "grad"}: AmaxState``, and the check. Without one, as in state of
        before there were checks, they are taken as they are.
    """
    states = {role: state for role, state in product.items() if role != CHECK}
    return intact(states, product[CHECK]) if CHECK in product else states


def sealed(states: Mapping[str, AmaxState]) -> dict[str, Any]:
    """Return the states of a matmul's tensors, in f32, and the check that they are intact."""
    new = {r: jax.tree.map(jnp.float32, state) for r, state in states.items() if r != CHECK}
    return {**new, CHECK: fingerprint(new)}


def only_amaxes(x: jax.Array) -> jax.Array:
    """Return `x` with 0, an empty slot, in place of Inf, NaN and negative numbers."""
    return jnp.where((x > 0) & (x < jnp.inf), x, 0.0)


def history_amax(history: jax.Array, algo: str) -> jax.Array:
    """Return the amax that a history predicts, from `only_amaxes`; 0 if it is empty.

    Args:
      history: ``f32[..., H]``, newest first.
      algo: ``"max"`` of it, or its ``"most_recent"`` entry.

    Returns:
      ``f32[...]``.
    """
    amaxes = only_amaxes(history)
    return jnp.max(amaxes, axis=-1) if algo == "max" else amaxes[..., 0]


def push_amax(history: jax.Array, amax: jax.Array) -> jax.Array:
    """Return `history` (newest first) with `amax` in front and the oldest entry dropped.

    Zero and non-finite values are left out: they predict nothing, and one Inf would freeze the
    scale for as long as it stayed in the window.

    Args:
      history: ``f32[..., H]``, newest first.
      amax: ``f32[...]``.

    Returns:
      Array of the shape of `history`.
    """
    amax = amax[..., None].astype(history.dtype)
    pushed = jnp.concatenate([amax, history[..., :-1]], axis=-1)
    return jnp.where((amax > 0) & jnp.isfinite(amax), pushed, history)


def running_amax(state: AmaxState) -> jax.Array:
    """Return the largest amax of the step under way, f32[...]; 0 if there is no such step."""
    return only_amaxes(state["amax"])


def observe(state: AmaxState, amax: jax.Array) -> AmaxState:
    """Fold `amax` into the maximum of the step under way, if it is `seen`."""
    largest = jnp.maximum(running_amax(state), seen(amax, state["amax_history"]))
    return {"amax_history": state["amax_history"], "amax": largest}


def seen(amax: jax.Array, history: jax.Array) -> jax.Array:
    """Return an `amax` as it may enter `history`: constant, and 0 if it is not finite.

    Devices that see parts of the tensor, in ``jax.shard_map`` or ``jax.pmap``, agree on the largest
    amax of all. Where JAX keeps track of what varies over the axes of the mesh, a history that
    itself varies over one (each device has its own layer) is left to its device.
    """
    finite = lax.stop_gradient(jnp.where(jnp.isfinite(amax), amax, 0.0))
    return largest_of_devices(finite, history)


OUTGROWN = 8.0  # An amax that is larger than all others in a history by this factor is a jump.


def believed(history: jax.Array) -> jax.Array:
    """Return `history`, f32[..., H], without a jump, and empty if that is the newest entry.

    A tensor that jumps may jump again, or back. So the next step takes the scale from the tensor
    itself, and no later step makes room for a single spike.
    """
    amaxes, zero = only_amaxes(history), np.float32(0)
    largest, second = lax.reduce(
        (amaxes, jnp.zeros_like(amaxes)),
        (zero, zero),
        lambda a, b: (lax.max(a[0], b[0]), lax.max(lax.min(a[0], b[0]), lax.max(a[1], b[1]))),
        (history.ndim - 1,),
    )
    jumped = ((second > 0) & (largest > OUTGROWN * second))[..., None]
    is_jump = amaxes == largest[..., None]
    return jnp.where(jumped & (is_jump | is_jump[..., :1]), 0.0, amaxes)


@jax.jit
def foreseen(history: jax.Array, other: jax.Array) -> jax.Array:
    """Return the history of a weight with the amax that it will have in this step, if it grows.

    Weights that began as zeros, as LoRA's do, double in a step, then grow by a half, and so on;
    a history one step behind would cut them. So if the newest entry is above the one before by more
    than 1/16, which rounding may take anyway, it grows as much again, at most twofold.

    Args:
      history: f32[..., H], newest first, of the weight.
      other: the state of lhs, with as many entries unless the weight was zero.
    """
    if min(history.shape[-1], other.shape[-1]) < 2:
        return history
    newest, before = history[..., 0], history[..., 1]
    was_zero = jnp.where((before == 0) & (other[..., 1] > 0), 2.0, 1.0)
    factor = jnp.where(before > 0, newest / jnp.where(before > 0, before, 1.0), was_zero)
    factor = jnp.where(factor > 1 + 2**-4, jnp.minimum(factor, 2.0), 1.0)
    return lax.concatenate([(newest * factor)[..., None], history[..., 1:]], history.ndim - 1)


@jax.jit
def as_read(histories: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the histories of a matmul as a training step reads them, for its scales.

    Only what is `believed`, and the growth of the weight is `foreseen`. Other calls, such as
    evaluations, read the histories, ``{"lhs", "rhs", "grad"}: f32[..., H]``, as they are.
    """
    read = {role: believed(history) for role, history in histories.items()}
    return {**read, "rhs": foreseen(read["rhs"], histories["lhs"])}


def largest_of_devices(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return the maximum of `x` over the devices that share `like`; see `seen`."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return x
    axes = axes_apart(x, like)
    return lax.pmax(x, axes) if axes else x


def record(
    product: Mapping[str, Any],
    states: Mapping[str, AmaxState],
    amaxes: Mapping[str, jax.Array],
    *,
    at_once: bool,
) -> dict[str, Any]:
    """Return the state of a matmul after a use of it.

    Args:
      product: the state as it is kept, which is returned if all `amaxes` are 0: nothing was seen.
        Without a check, as before there were checks, it gets none.
      states: the state as the use read it: ``{"lhs", "rhs", "grad"}``.
      amaxes: f32[...] of some of these tensors, which are folded in if they are `seen`.
      at_once: whether the maxima become entries at once, in a loop that may never end a step.
    """
    new, largest = dict(states), []
    for role, amax in amaxes.items():
        largest.append(seen(amax, states[role]["amax_history"]))
        new[role] = observe(states[role], amax)
        if at_once:
            history, running = new[role].values()
            new[role] = {"amax_history": push_amax(history, running), "amax": -running}
    new = sealed(new) if CHECK in product else new
    return choose(jnp.maximum(*largest) > 0, new, dict(product))


def resume_recorded(state: AmaxState) -> AmaxState:
    """Return `state` with its step under way even if its maximum is an entry already."""
    history, amax = state["amax_history"], state["amax"]
    older = jnp.concatenate([history[..., 1:], jnp.zeros_like(history[..., :1])], axis=-1)
    history = jnp.where(amax[..., None] < 0, older, history)
    return {"amax_history": history, "amax": jnp.abs(amax)}


@jax.custom_batching.custom_vmap
def largest_of_examples(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x`; under ``vmap`` of a `like` that all examples share, the largest of theirs."""
    return x


@largest_of_examples.def_vmap
def _largest_of_examples(
    axis_size: int, in_batched: list[bool], x: jax.Array, like: jax.Array
) -> tuple[jax.Array, bool]:
    is_batched, has_own = in_batched
    x = jnp.max(x, axis=0) if is_batched and not has_own else x
    return largest_of_examples(x, like), is_batched and has_own


@jax.jit
def ended(state: AmaxState) -> AmaxState:
    """End the step under way, if there is one: its maximum becomes the newest entry."""
    history = push_amax(state["amax_history"], state["amax"])
    return {"amax_history": history, "amax": jnp.zeros_like(state["amax"])}


@functools.cache
def state_shapes(recipe: Any) -> dict[str, Any] | None:
    """Return the shapes of ``recipe.init_state()``; None if the recipe keeps no state."""
    return jax.eval_shape(recipe.init_state)


def check_states(state: dict[str, AmaxState], recipe: Any) -> None:
    """Raise ``ValueError`` if `state` is not what ``recipe.init_state()`` would give."""
    expected = state_shapes(recipe)
    if expected is None:
        raise ValueError(
            f"{recipe!r} keeps no state, but a state was given: it belongs to another recipe. Pass "
            "state=None (in a model: leave the 'fp8' collection out)."
        )
    given, needed = (
        [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in leaves]
        for leaves in map(jax.tree.leaves_with_path, (state, expected))
    )
    if given == needed and jax.tree.structure(state) == jax.tree.structure(expected):
        return
    if [shape for _, shape in given] == [shape for _, shape in needed]:
        raise ValueError(
            f"The state has the shapes that {recipe!r} needs, but another structure: it has "
            f"{given[0][0]} where {needed[0][0]} is needed. If arrays are in boxes of metadata, "
            "such as nn.Partitioned, take them out: flax.linen.meta.unbox(state)."
        )
    raise ValueError(
        f"The state belongs to another recipe than {recipe!r}: it has shapes {dict(given)}, but "
        f"{dict(needed)} are needed. Make a new one with recipe.init_state()."
    )
