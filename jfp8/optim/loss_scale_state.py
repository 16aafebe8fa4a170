"""`LossScaleState`: the numbers of a loss scale, and a note of its use.

A loss scale has two halves. The loss is multiplied by S where it is differentiated, and the
gradients are divided by S in the optimizer. The second without the first acts like a learning rate
that is 32768 times too small, and nothing in the numbers shows it. So each state carries a `Mark`.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import optax

from jfp8.optim.wrapping import AnyScaleState, states_of
from jfp8.scaling import printing
from jfp8.tracing.caller import user_level


class Mark:
    """The identity of one `loss_scale`, which all of its states share: static data of a pytree.

    All marks compare equal, so that two structures never differ by them. `multiplied` is True once
    `loss_scale_in` has handed out S of a state with this mark, outside ``jit`` or while a function
    was traced; and always for states that were made by hand or loaded from a file. `least` is the
    bound to which S can fall from its first value, None if it cannot or if that is unknown.
    """

    __slots__ = ("least", "multiplied")

    def __init__(self, multiplied: bool, least: float | None = None) -> None:
        self.multiplied, self.least = multiplied, least

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark)

    def __hash__(self) -> int:
        return hash(Mark)

    def __repr__(self) -> str:
        return "Mark()"

    def __reduce__(self) -> tuple[type[Mark], tuple[bool, float | None]]:
        return Mark, (True, self.least)


class _Fields(NamedTuple):
    loss_scale: jax.Array
    growth_tracker: jax.Array
    grads_finite: jax.Array
    overflow_count: jax.Array
    inner_state: Any


class LossScaleState(_Fields):
    """State of `loss_scale`; ``optax.tree.get(opt_state, "loss_scale")`` finds it in any chain.

    Attributes:
      loss_scale: f32[], the factor on the loss; a power of two.
      growth_tracker: i32[], finite steps since the scale last changed. With a hysteresis above 1
        i32[2]: also the overflows since it last grew.
      grads_finite: bool[], whether the last gradients were all finite.
      overflow_count: i32[], number of steps whose gradients were not all finite.
      inner_state: state of the wrapped transformation, ``()`` without one.
    """

    mark = Mark(multiplied=True)  # the mark of a state made by hand

    def marked(self, mark: Mark) -> LossScaleState:
        """Return the same numbers with `mark`."""
        new = LossScaleState(*self)
        new.mark = mark
        return new

    def _replace(self, **fields: Any) -> LossScaleState:
        return super()._replace(**fields).marked(self.mark)

    __repr__ = printing.named_state


def _with_names(state: LossScaleState) -> tuple[Any, Mark]:
    keys = map(jax.tree_util.GetAttrKey, LossScaleState._fields)
    return tuple(zip(keys, state, strict=True)), state.mark


jax.tree_util.register_pytree_with_keys(
    LossScaleState,
    _with_names,
    lambda mark, fields: LossScaleState(*fields).marked(mark),
    lambda state: (tuple(state), state.mark),
)


def find_loss_scale(opt_state: optax.OptState) -> LossScaleState | None:
    """Return the `LossScaleState` inside `opt_state`, None if there is none; raise for several."""
    found = states_of(LossScaleState, opt_state)
    nested = [x for outer in found for x in states_of(LossScaleState, outer.inner_state)]
    if (n := len(found) + len(nested)) > 1:
        raise ValueError(
            f"opt_state holds {n} loss scales; the loss can only be multiplied by one. "
            "Put a single loss_scale() around or in front of all optimizers."
        )
    if found:
        _misplaced(opt_state)
    return found[0] if found else None


def loss_scale_in(opt_state: optax.OptState) -> jax.Array | None:
    """Return S of `find_loss_scale` to multiply a loss by, and note that; None if there is none."""
    state = find_loss_scale(opt_state)
    if state is None:
        return None
    state.mark.multiplied = True
    return state.loss_scale


def warn_if_not_multiplied(state: LossScaleState) -> None:
    """Warn if it seems that no loss was multiplied by the scale in `state`.

    Not an error: gradients made up to try an optimizer, for example, need no loss.
    """
    if not state.mark.multiplied:
        warnings.warn(_NOT_MULTIPLIED, UserWarning, stacklevel=user_level())


_NOT_MULTIPLIED = """\
loss_scale() divides the gradients by its scale S (32768 at first), but nothing has multiplied the \
loss by S: gradients would be that much too small. In your loop differentiate
    jfp8.scale_loss(loss, opt_state)
instead of loss; or compute gradients with jfp8.value_and_grad(loss_fn)(state, batch) for a \
jfp8.TrainState; or those of an NNX model with
    scale = jfp8.scale_loss(1.0, optimizer.opt_state)
    jfp8.nnx.value_and_grad(loss_fn, loss_scale=scale)(model, batch)
In float32 and bfloat16, recipes that scale gradients, as the default does, need no loss scale: \
then leave loss_scale() out. Ignore this if a function multiplies the loss by S that was compiled \
for another optimizer of the same structure, which cannot be detected here."""


def warn_if_misplaced(opt_state: optax.OptState) -> None:
    """Warn if something in front of the loss scale may depend on the size of gradients."""
    if find_loss_scale(opt_state) is not None:
        for message in _misplaced(opt_state):
            warnings.warn(message, UserWarning, stacklevel=user_level())


def _misplaced(node: Any, rest_is_frozen: bool = False) -> list[str]:
    """List the places where gradients of the scaled loss may reach more than the loss scale."""
    if isinstance(node, LossScaleState):
        return []
    parts = _children(node.inner_states if hasattr(node, "inner_states") else node)
    here = next(i for i, part in enumerate(parts) if states_of(LossScaleState, part))
    others = parts[:here] + parts[here + 1 :]
    if hasattr(node, "inner_states"):
        if not all(map(_is_frozen, others)):
            raise ValueError(
                "The loss scale covers only one group of a multi_transform, and the other groups "
                "would train with gradients of the scaled loss. Put it in front of all: "
                "optax.chain(jfp8.loss_scale(), optax.multi_transform(...))."
            )
        return _misplaced(*_children(parts[here]))
    found = []
    if type(node) is tuple and any(map(_may_depend_on_scale, parts[:here])):
        found.append(
            "Another transformation stands in front of loss_scale() (its state is "
            f"{' and '.join(type(part).__name__ for part in parts[:here])}) and sees gradients of "
            "the scaled loss: a clip there leaves updates thousands of times too small. Put "
            "loss_scale() first: optax.chain(jfp8.loss_scale(), optax.clip_by_global_norm(1.0), "
            "...). If its effect does not depend on the scale, like that of a mean over devices, "
            "ignore this."
        )
    if isinstance(node, optax.MaskedState) and not rest_is_frozen:
        found.append(
            "loss_scale() is inside an optax.masked: parameters that the mask leaves out keep "
            "gradients of the scaled loss. Put it in front: optax.chain(jfp8.loss_scale(), "
            "optax.masked(...))."
        )
    return found + _misplaced(parts[here], rest_is_frozen=any(map(_is_frozen, others)))


def _children(node: Any) -> list[Any]:
    return jax.tree.leaves(node, is_leaf=lambda part: part is not node)


def _is_frozen(state: Any) -> bool:
    """Return True for the state of an optax.set_to_zero behind a mask."""
    return isinstance(state, optax.MaskedState) and type(state.inner_state) is optax.EmptyState


def _may_depend_on_scale(state: Any) -> bool:
    if type(state) is tuple:
        return any(map(_may_depend_on_scale, state))
    return isinstance(state, tuple) and not isinstance(state, AnyScaleState)
