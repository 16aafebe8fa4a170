"""Uses of matmuls that the loss is not differentiated through, such as behind ``stop_gradient``.

Their amaxes do not come back through the sink, because JAX omits their backward pass. While a
loss is traced for differentiation, each use is noted; afterwards the uses without a backward pass
are known. Their amaxes are then returned next to the loss, and programs without such uses
contain nothing extra. The notes also tell which layers have an input in common.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jfp8.matmul.spec import planner_of
from jfp8.products.operation import State
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.sink import encode_amax
from jfp8.tracing.device import current_device


@dataclass(eq=False)
class ProductUse:
    """A matmul that was traced with a sink."""

    sink: jax.Array
    layer: str | None  # its path in the model; "" if unknown, None if it records by itself
    amaxes: jax.Array | None = None  # of lhs and rhs, but not from the body of a ``scan``
    is_foreign: bool = False  # the loss is not differentiated with respect to its sink
    linearized: bool = False  # JAX has traced the residuals of its backward pass
    differentiated: bool = False  # JAX has traced its backward pass


@dataclass(frozen=True, eq=False)
class Input:
    """An lhs, for which other uses of it by one model are looked up, and what they share."""

    lhs: jax.Array
    like: Any  # equal for uses that share
    model: Any  # whose id is in `like`
    history: Any  # None: there is none
    found: Any  # see `State`
    quantized: dict[Any, Any] = field(default_factory=dict)  # by `Operation.lhs_of_layers`


@dataclass(eq=False)
class Uses:
    """The uses of matmuls in one loss, in the order of tracing."""

    sinks: list[jax.Array]  # tracers, with respect to which the loss is differentiated
    trace: Any  # of the loss
    found: list[ProductUse] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)

    def may_record(self, sink: jax.Array | None) -> bool:
        """Return False if the loss is known not to be differentiated with respect to `sink`."""
        inside = get_opaque_trace_state() != self.trace  # where sinks are other tracers
        return sink is not None and (inside or any(sink is known for known in self.sinks))

    def amaxes(self) -> list[jax.Array]:
        """Return the amaxes that can be returned next to the loss, f32[2] each."""
        return [use.amaxes for use in self.found if use.amaxes is not None]

    def into(self, cotangents: Any, amaxes: Sequence[jax.Array]) -> Any:
        """Return `cotangents` of sinks, with the `amaxes` that the backward pass did not return."""
        leaves, structure = jax.tree.flatten(cotangents)
        able = [use for use in self.found if use.amaxes is not None]
        self._warn_of_lost()
        for use, seen in zip(able, amaxes, strict=True):
            if not use.differentiated:
                (i,) = (i for i, sink in enumerate(self.sinks) if sink is use.sink)
                leaves[i] = leaves[i].at[:2].add(encode_amax(seen))
        return structure.unflatten(leaves)

    def _warn_of_lost(self) -> None:
        left = [use for use in self.found if use.amaxes is None and not use.differentiated]
        layers_of = lambda uses: {use.layer for use in uses if use.layer is not None}
        if lost := layers_of(use for use in left if use.linearized and not use.is_foreign):
            warnings.warn(
                f"The amax histories of {sorted(lost)} are not updated by uses that the loss is "
                "not differentiated through (behind stop_gradient, or without effect on the "
                "loss), because they are inside nn.scan, nn.remat or the like. Record them in "
                "the forward pass: y, mutated = model.apply(variables, x, mutable=['fp8']), and "
                "return mutated from the loss function.",
                stacklevel=2,
            )
        if foreign := layers_of(use for use in left if use.is_foreign):
            warnings.warn(
                f"The amax histories of {sorted(foreign)} are not updated by uses with a sink that "
                "the loss is not differentiated with respect to, as after stop_gradient of all "
                "variables. Stop the gradient of variables['params'] alone; for a model that is "
                "not trained here, leave 'fp8_sink' out of its variables.",
                stacklevel=2,
            )


_noting: ContextVar[Uses | None] = ContextVar("jfp8_uses", default=None)
_layer: ContextVar[str | None] = ContextVar("jfp8_layer", default="")
_input: ContextVar[Input | None] = ContextVar("jfp8_input", default=None)


@contextlib.contextmanager
def noting_uses(sinks: Any) -> Iterator[Uses]:
    """Return a context that notes the uses of matmuls with one of these `sinks`."""
    uses = Uses(jax.tree.leaves(sinks), get_opaque_trace_state())
    token = _noting.set(uses)
    try:
        yield uses
    finally:
        _noting.reset(token)


def are_noted() -> bool:
    """Return True while uses are noted: inside a loss that this library differentiates."""
    return _noting.get() is not None


@contextlib.contextmanager
def uses_of(
    layer: str | None, lhs: jax.Array, recipe: Recipe, state: State, model: Any = None
) -> Iterator[State]:
    """Return a context whose uses belong to `layer`; None if the layer records by itself.

    It gives the state to quantize with: layers of one `model` with one `lhs` read the history that
    the first of them has, so that their scales are one, and the array is quantized once.
    Only histories that this step records are shared, not, for example, a frozen teacher's.
    """
    uses, histories, given = _noting.get(), state.histories, None
    if uses is not None and (histories is None or uses.may_record(state.sink)):
        own = None if histories is None else histories["lhs"]
        shape = None if own is None else jax.typeof(own["amax_history"])
        like = get_opaque_trace_state(), id(model), recipe, shape
        given = next((use for use in uses.inputs if use.lhs is lhs and use.like == like), None)
        if given is None:
            find = getattr(planner_of(current_device(lhs)), "amax_if_needed", None)
            found = own and find and find(jax.lax.stop_gradient(lhs), recipe, own)
            given = Input(lhs, like, model, own, found)
            uses.inputs.append(given)
        if histories is not None:
            state = state._replace(histories={**histories, "lhs": given.history}, found=given.found)
    tokens = _layer.set(layer), _input.set(given)
    try:
        yield state
    finally:
        _layer.reset(tokens[0])
        _input.reset(tokens[1])


def quantized_once(lhs: jax.Array, key: Any, quantize: Callable[[], Any]) -> Any:
    """Return ``quantize()``, once for all layers with this `lhs` and `key`; None if not noted.

    XLA would merge equal kernels, but not what devices are sent of their results.
    """
    given = _input.get()
    if given is None or given.lhs is not lhs:
        return None
    if key not in given.quantized:
        given.quantized[key] = quantize()
    return given.quantized[key]


def begin_use(sink: jax.Array) -> ProductUse | None:
    """Return a use of a matmul with this `sink`, if uses are noted."""
    if (uses := _noting.get()) is None:
        return None
    uses.found.append(ProductUse(sink, _layer.get()))
    return uses.found[-1]


def end_use(use: ProductUse, lhs: jax.Array, rhs: jax.Array) -> None:
    """Note the amaxes of the operands of a use, f32[] each."""
    if (uses := _noting.get()) is None or get_opaque_trace_state() != uses.trace:
        return
    use.is_foreign = all(sink is not use.sink for sink in uses.sinks)
    if not use.is_foreign:
        use.amaxes = jax.lax.stop_gradient(jnp.stack([lhs, rhs]))
