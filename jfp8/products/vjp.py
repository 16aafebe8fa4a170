"""A product of two quantized operands, of any kind, and its VJP.

    fprop  y  = q(lhs) . q(rhs)
    dgrad  dx = q(dy)  . q(rhs)^T
    wgrad  dw = q(lhs)^T . q(dy)

A tensor is quantized once if both of its products can use the result, otherwise once for each. The
f8 bytes and their scales are kept for the backward pass, not the operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jfp8.matmul.planner import planner_of
from jfp8.products.differentiated import CustomVjp, first_order_only, primals
from jfp8.products.observers import OBSERVER
from jfp8.products.operation import (
    Kind,
    Observed,
    Operand,
    Operation,
    Options,
    QuantizedOperand,
    State,
    Use,
    sums,
)
from jfp8.products.seeds import rotation_seed
from jfp8.products.shared_input import SharedInput
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_of, codes_to_format
from jfp8.scaling.formats import Format
from jfp8.scaling.granularity import PerAxis
from jfp8.scaling.history import AmaxState, as_dicts, check_states
from jfp8.scaling.random_bits import seed_of
from jfp8.scaling.scales import amax
from jfp8.scaling.sink import SINK_UNIT, check_sink, encode_amax
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import current_device
from jfp8.tracing.few_kernels import mergeable

# The names of products and rotations in jaxprs, compiled programs and profiles.
PRODUCT_NAME = "jfp8_"

# Names of the bytes that the backward pass keeps, for policies of ``jax.checkpoint``: under
# ``save_only_these_names("fp8_saved")`` those of activations are kept, and all else is computed
# again, so that weights are quantized, or gathered from other devices, a second time.
SAVED = "fp8_saved"
SAVED_WEIGHT = "fp8_saved_weight"
RESULT = "fp8_result"

Kept = ScaledArray | jax.Array | None


class How(NamedTuple):
    """Hold what is known of a product while JAX traces."""

    options: Options
    carried: bool  # rhs is a `ScaledArray` with a carrier
    rhs_dtype: jnp.dtype  # the dtype of rhs, or of its carrier


class Operands(NamedTuple):
    """The arrays from which a product is computed (see `scaled_dot_general`), or cotangents."""

    lhs: jax.Array | None
    rhs: Operand | None
    carrier: jax.Array | None = None  # receives the gradient of an rhs that is only kept in FP8
    histories: dict[str, AmaxState] | None = None
    sink: jax.Array | None = None
    seed: jax.Array | None = None  # uint32[2] for stochastic rounding, if a key was given
    q_lhs: Any = None  # if it was quantized for several layers: see `_with_shared_lhs`
    q_alone: Any = None  # the same for a forward pass alone


class Residuals(NamedTuple):
    """The inputs of the backward pass besides the gradient."""

    lhs: Kept  # wgrad's operand; None if there is none
    rhs: Kept  # dgrad's operand
    history: AmaxState | None  # the gradient's; None: its scale comes from its own amax
    seen: Observed | None  # in the forward pass, or in parts of it, if there is a sink
    seed: jax.Array | None
    rotation_seeds: tuple[jax.Array | None, jax.Array | None]  # dgrad's and wgrad's
    operation: Operation


class Planned(NamedTuple):
    """A product of which all is decided; its result is ``restore(y)``."""

    operation: Operation
    lhs: jax.Array
    rhs: Operand
    options: Options
    state: State
    restore: Callable[[jax.Array], jax.Array] = lambda y: y


def multiply_quantized(planned: Planned) -> tuple[jax.Array, Observed]:
    """Return the result of a product, and the amaxes of both operands.

    The amaxes have no gradient, and are zeros unless the product is differentiated. The gradient of
    an `rhs` that is a `ScaledArray` goes to its carrier, if it has one.
    """
    operation, (how, operands), shared = planned.operation, begin(planned), planned.state.shared
    if shared is not None:
        operands = _with_shared_lhs(shared, how, operation, operands)
    if jax.sharding.get_abstract_mesh().manual_axes:
        operation, operands = same_varying_axes((operation, operands))
    y, observed = _multiply(how, operation, operands)
    return planned.restore(y), lax.stop_gradient(observed)


def _with_shared_lhs(
    shared: SharedInput, how: How, operation: Operation, operands: Operands
) -> Operands:
    """Return `operands` with the history that the first product with this lhs has.

    If the product can share it, also with lhs quantized for fprop, and to be saved, and its amax;
    and quantized for fprop alone. The program drops one of both.
    """
    lhs, rhs, _, histories, *_ = operands
    assert lhs is not None
    recipe, key = how.options.recipe, operation.lhs_of_layers
    of_array = recipe, how.options.implementation, lhs.shape, lhs.dtype
    state = None
    if histories is not None:
        own = lax.stop_gradient(histories["lhs"])

        def first() -> AmaxState:
            planner, quantizer = planner_of(current_device(lhs)), recipe.resolved().fprop.lhs
            if shared.made_of:  # the kernel that makes the array finds it
                return own
            found = planner.amax_by_kernel(lax.stop_gradient(lhs), quantizer, own)
            return own if found is None else {**own, "found": found}

        state = shared.once((*of_array, own["amax_history"].shape), first)
        operands = operands._replace(histories={**histories, "lhs": state})
    frozen = isinstance(rhs, ScaledArray) and not how.carried
    if key is None or frozen or OBSERVER.value is not None:
        return operands

    def quantize() -> Any:
        products = recipe.resolved()
        (first, _), (second, _) = map(operation.contracting, ("fprop", "wgrad"))
        uses = (
            Use("fprop", products.fprop, products.fprop.lhs, first),
            Use("wgrad", products.wgrad, products.wgrad.lhs, second),
        )
        x = arranged = operation.arrange("lhs", lax.stop_gradient(lhs))
        if shared.made_of:
            make, *parts = shared.made_of
            x = operation.made("lhs", x, make, *lax.stop_gradient(parts))
        x = jax.tree.map(lambda x: x.reshape(*key[1][:-1], *x.shape[1:]), x)
        found = operation.quantize_for_both("lhs", x, *uses, state, None)
        # No codes, which each layer would decode by itself, and devices would receive for each.
        named = lambda tree: jax.tree.map(lambda x: checkpoint_name(x, SAVED), tree)
        if found is None:
            return None, None
        alone = QuantizedOperand("lhs", arranged, state, None, operation).quantized(uses[0], None)
        return (found[0], *map(named, found[1:])), alone

    of_state = None if state is None else state["amax_history"].shape
    q_lhs, q_alone = shared.once((*of_array, of_state, key), quantize)
    return operands._replace(q_lhs=q_lhs, q_alone=q_alone)


def begin(planned: Planned) -> tuple[How, Operands]:
    """Check the operands and the state of a product, for `forward` and `backward`."""
    _, lhs, rhs, options, state, _ = planned
    recipe, (histories, sink, key, _) = options.recipe, state
    if histories is not None:
        histories = as_dicts(histories) if isinstance(histories, Mapping) else histories
        check_states(histories, recipe)
    if sink is not None:
        check_sink(sink)
    seed = seed_of(key) if key is not None and recipe.resolved().stochastic else None
    carrier = None
    if isinstance(rhs, ScaledArray):
        carrier, rhs = rhs.carrier, lax.stop_gradient(replace(rhs, carrier=None))
    operands = Operands(lhs, rhs, carrier, histories, sink, seed)
    return How(options, carrier is not None, (rhs if carrier is None else carrier).dtype), operands


@partial(CustomVjp, nondiff_argnums=(0,))
def _multiply(how, operation, operands):
    alone = operands._replace(q_lhs=operands.q_alone)
    return forward(how, operation, alone, and_backward=False)[0]


def forward(
    how: How, operation: Operation, operands: Operands, *of: Any, and_backward: bool = True
) -> tuple[tuple[jax.Array, Observed], Residuals]:
    """Return fprop with the amaxes of its operands, and the residuals for `backward`.

    Without a backward pass the amaxes are zeros: only the forward rule observes, which runs where a
    derivative is taken. Nor is the history of a weight read, since that may have been updated or
    restored since. If lhs is made of other arrays, `of` has arguments of `Operation.made`.
    """
    options, carried, _ = how
    lhs, rhs, _, histories, sink, seed, q_lhs, _ = operands
    history: Any = (histories or {}).get
    products = options.recipe.resolved()
    fprop, dgrad, wgrad = products.fprop, products.dgrad, products.wgrad
    frozen = isinstance(rhs, ScaledArray) and not carried
    lhs = operation.arrange("lhs", first_order_only(lhs, options=options))
    rhs = operation.arrange("rhs", first_order_only(rhs, options=options))
    made = operation.made("lhs", lhs, *of) if of else None
    x = QuantizedOperand("lhs", lhs, history("lhs"), seed, operation, made=made)
    x_sum, w_sum = operation.contracting("fprop")
    x_free, _ = operation.contracting("wgrad")
    _, w_free = operation.contracting("dgrad")
    # For the backward pass: the same bytes, or those along the other direction.
    x_again = Use("wgrad", wgrad, wgrad.lhs, x_free) if and_backward and not frozen else None
    for_dgrad = Use("dgrad", dgrad, dgrad.rhs, w_free)
    w_again, of_weight = (for_dgrad, history("rhs")) if and_backward else (None, None)
    w = QuantizedOperand("rhs", rhs, of_weight, seed, operation, options.rhs_dtype)
    rotated_by = None if fprop.rotation is None else rotation_seed(fprop, "fprop", amax(lhs), seed)
    # Each by itself: micro-batches quantize a weight once, and layers with one input that input.
    w_use = Use("fprop", fprop, fprop.rhs, w_sum, rotation_seed=rotated_by)
    q_rhs, kept_rhs, rhs_amax = _saved(*w.quantized(w_use, w_again), SAVED_WEIGHT)
    x_use = Use("fprop", fprop, fprop.lhs, x_sum, rotation_seed=rotated_by)
    q_lhs, kept_lhs, lhs_amax = q_lhs or _saved(*x.quantized(x_use, x_again), SAVED)
    y = _matmul(operation, options, "fprop", q_lhs, q_rhs, seed, stored=frozen)
    y = checkpoint_name(y, RESULT)

    # Without a sink the gradient's amax would be lost, so its history is not updated.
    recorded = history("grad"), Observed(lhs_amax, rhs_amax)
    of_gradient, seen = (None, None) if sink is None else recorded
    observed = Observed(*(a if a.ndim == 0 else amax(a) for a in (lhs_amax, rhs_amax)))
    if not and_backward:  # XLA drops what nothing else needs
        observed = jax.tree.map(lambda a: jnp.where(False, a, 0), observed)
    seeds = (
        None if dgrad.rotation is None else rotation_seed(dgrad, "dgrad", rhs_amax, seed),
        None if wgrad.rotation is None else rotation_seed(wgrad, "wgrad", lhs_amax, seed),
    )
    kept = Residuals(kept_lhs, kept_rhs, of_gradient, seen, seed, seeds, operation)
    return (y, observed), kept


def backward(how: How, residuals: Residuals, dy: jax.Array, *of: Any) -> Operands:
    """Return the results of dgrad and wgrad, as cotangents; for `of` see `forward`."""
    options, carried, rhs_dtype = how
    lhs, rhs, history, seen, seed, seeds, operation = residuals
    products = options.recipe.resolved()
    dgrad, wgrad = products.dgrad, products.wgrad
    q_lhs = restore(lhs, getattr(wgrad.lhs, "fmt", None))
    q_rhs = restore(rhs, getattr(dgrad.rhs, "fmt", None))
    dy = operation.arrange("grad", first_order_only(dy, options=options))
    made = operation.made("grad", dy, *of) if of else None
    g = QuantizedOperand("grad", dy, history, seed, operation, made=made)
    g_sum, _ = operation.contracting("dgrad")
    _, g_sum_again = operation.contracting("wgrad")
    assert q_rhs is not None
    first = Use("dgrad", dgrad, dgrad.lhs, g_sum, q_rhs, seeds[0])
    second = None
    if q_lhs is not None:
        second = Use("wgrad", wgrad, wgrad.rhs, g_sum_again, q_lhs, seeds[1])
    q_dy, q_dy_again, grad_amax = g.quantized(first, second)
    d_lhs = _matmul(operation, options, "dgrad", q_dy, q_rhs, seed, stored=q_lhs is None)
    d_rhs = d_sink = None
    if q_lhs is not None:
        assert q_dy_again is not None
        d_rhs = _matmul(operation, options, "wgrad", q_lhs, q_dy_again, seed).astype(rhs_dtype)
    if seen is not None:
        d_sink = encode_amax(_largest(*seen, grad_amax)) * SINK_UNIT
    d_rhs, d_carrier = (None, d_rhs) if carried else (d_rhs, None)
    return Operands(d_lhs, d_rhs, d_carrier, sink=d_sink)


# Amaxes have no cotangent, so that `y` has one wherever this runs.
_multiply.defvjp(
    lambda how, *given: forward(how, *primals((how,), given, given[1:])),
    lambda how, residuals, cotangents: (None, backward(how, residuals, cotangents[0])),
    symbolic_zeros=True,
)


def _largest(*amaxes: jax.Array) -> jax.Array:
    """Reduce the amaxes of each tensor's parts, f32[tensors], in one kernel for all."""
    if not any(each.ndim for each in amaxes):
        return jnp.stack(amaxes)
    parts = max(each.size for each in amaxes)
    # Zeros change no amax. Tensors on several TPUs may be in different numbers of parts.
    by_tensor = jnp.stack([jnp.pad(each.reshape(-1), (0, parts - each.size)) for each in amaxes])
    return amax(mergeable(by_tensor), PerAxis(0))[:, 0]


def _saved(
    operand: Operand, kept: Operand | None, largest: jax.Array, name: str
) -> tuple[Operand, Kept, jax.Array]:
    """Name the operand of the forward product, the one that is kept, and the amax.

    If both are the same array, the product takes the named one: if a policy of ``jax.checkpoint``
    saves it, nothing has to be computed again.
    """
    saved, largest = save(kept, name), checkpoint_name(largest, name)
    if operand is not kept:
        return operand, saved, largest
    fmt = operand.format if isinstance(operand, ScaledArray) else None
    again = restore(saved, fmt)
    assert again is not None
    return again, saved, largest


def save(q: Kept, name: str) -> Kept:
    """Return `q` under a name, as uint8 codes: XLA:CPU stores f8 arrays as f16 across a loop."""
    if isinstance(q, ScaledArray):
        q = ScaledArray(codes_of(q.data), q.scale, q.block)
    return jax.tree.map(lambda x: checkpoint_name(x, name), q)


def restore(q: Kept, fmt: Format | None) -> Kept:
    """Undo `save` of data in `fmt`, which is None if it was no `ScaledArray`."""
    if not isinstance(q, ScaledArray) or q.data.dtype != jnp.uint8:
        return q
    assert fmt is not None
    return ScaledArray(codes_to_format(q.data, fmt), q.scale, q.block)


def _matmul(
    operation: Operation,
    options: Options,
    kind: Kind,
    first: Operand,
    second: Operand,
    seed: jax.Array | None,
    *,
    stored: bool = False,
) -> jax.Array:
    """Return one of the three results, computed under a name that jaxprs and profiles show.

    If `second` is `stored`, others may have made its bytes, with scales of any size.
    """
    multiply, spec = _called(kind, operation.terms(kind)), sums(options, kind)
    if stored:
        spec = replace(spec, powers_of_two=False)
    y = multiply(spec, first, second, operation)
    if (watching := OBSERVER.value) is not None:
        y = watching.multiplied(operation, kind, first, second, y)
    product: Product = getattr(options.recipe.resolved(), kind)
    return y if product.output is None else operation.stored(kind, product.output, y, seed)


@functools.cache
def _called(kind: Kind, terms: int | None) -> Callable[..., jax.Array]:
    """Return ``operation.multiply`` as a jitted function called ``jfp8_<kind>_<terms>``."""

    def multiply(spec, first, second, operation):
        return operation.multiply(kind, first, second, spec)

    multiply.__name__ = f"{PRODUCT_NAME}{kind}" + ("" if terms is None else f"_{terms}")
    return jax.jit(multiply, static_argnums=0)
