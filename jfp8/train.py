"""The step-level bookkeeping of state: one place for accumulation, overflow and histories. ::

    state = jfp8.TrainState.create(apply_fn=model.apply, variables=model.init(key, x), tx=tx)

    def loss_fn(variables, batch):
        return cross_entropy(model.apply(variables, batch["x"]), batch["y"]), {}

    @jax.jit
    def train_step(state, batch):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)
        return state.apply_gradients(grads), loss

Nothing here needs Flax's modules: it works on the collections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfp8.hoist import split
from jfp8.optim.loss_scaling import LossScaleState, all_squares_finite, find_loss_scale, keep_unless
from jfp8.optim.masters import (
    apply_updates,
    carriers,
    has_master_weights,
    with_carriers,
    without_stored,
)
from jfp8.scaling import printing
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import end_step, observe
from jfp8.scaling.sink import ROLES, WIDTH, decode_amax, max_of_sinks

Collections = dict[str, Any]


def advance(fp8: Collections, sink_cotangent: Collections) -> Collections:
    """Close an optimizer step: fold in the amaxes that the step saw, and roll every history once.

    For hand-written loops; `TrainState.apply_gradients` does it by itself. Differentiate the loss
    by the ``fp8_sink`` collection, accumulate and average its cotangent with the other gradients if
    you do that, and call this once per optimizer step. Skip the call when you skip the step.

    Args:
      fp8: the ``fp8`` collection: the one given to ``apply``, or the one it returned as mutated.
      sink_cotangent: the gradient by the ``fp8_sink`` collection. A product that is missing from it
        (a frozen layer) keeps what `fp8` itself recorded.

    Returns:
      The new ``fp8`` collection, of the same structure. Non-finite amaxes do not enter it, and a
      tensor that was all zero or did not take part keeps its history.

    Raises:
      ValueError: `sink_cotangent` has a product that `fp8` lacks.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> v = model.init(jax.random.key(0), x)
    >>> loss = lambda params, sink: model.apply({**v, "params": params, "fp8_sink": sink}, x).sum()
    >>> grads, cotangent = jax.grad(loss, argnums=(0, 1))(v["params"], v["fp8_sink"])
    >>> fp8 = jfp8.advance(v["fp8"], cotangent)
    >>> fp8["DotGeneral_0"]["lhs"]["amax_history"][:3]
    Array([1., 0., 0.], dtype=float32)
    """
    amaxes, _ = decode_all(_plain(sink_cotangent))
    return _advance(_plain(fp8), amaxes, ())


def decode_all(sinks: Collections) -> tuple[Collections, jax.Array]:
    """Every sink f32[..., 3, 2050] decoded to amaxes f32[..., 3], and whether any overflowed.

    All at once: hundreds of small programs of the same shape would take long to compile.
    """
    leaves, structure = jax.tree.flatten(sinks)
    if not leaves:
        return sinks, jnp.zeros((), bool)
    leading = [leaf.shape[:-2] for leaf in leaves]
    rows = jnp.concatenate([leaf.reshape(-1, len(ROLES), WIDTH) for leaf in leaves])
    amax, overflow = decode_amax(rows)
    ends = np.cumsum([math.prod(shape) for shape in leading]).tolist()
    parts = jnp.split(amax, ends[:-1])
    decoded = [part.reshape(*shape, len(ROLES)) for part, shape in zip(parts, leading, strict=True)]
    return jax.tree.unflatten(structure, decoded), jnp.any(overflow)


def _advance(fp8: Any, amaxes: Any, path: tuple[str, ...]) -> Any:
    if _is_product(fp8):
        new = dict(fp8)
        if "amax" in amaxes:
            for row, role in enumerate(ROLES):
                new[role] = observe(fp8[role], amaxes["amax"][..., row])
        return {role: end_step(state) for role, state in new.items()}
    unknown = sorted(set(amaxes) - set(fp8))
    if unknown:
        where = "/".join(path) or "the top"
        raise ValueError(
            f"sink_cotangent has {unknown} at {where}, which the fp8 collection lacks; it has "
            f"{sorted(fp8)}. Pass the two collections of the same model."
        )
    return {k: _advance(node, amaxes.get(k, {}), (*path, k)) for k, node in fp8.items()}


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, whatever mappings (Flax's FrozenDict, say) `tree` is made of."""
    return {k: _plain(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _is_product(node: Any) -> bool:
    """Whether `node` is the state of one product, rather than a module that holds some."""
    return set(node) == set(ROLES) and all("amax_history" in node[role] for role in ROLES)


def _map_products(function: Callable[[Any], Any], fp8: Any) -> Any:
    if _is_product(fp8):
        return function(fp8)
    return {name: _map_products(function, node) for name, node in fp8.items()}


def init_sinks(fp8: Collections) -> Collections:
    """The ``fp8_sink`` collection that belongs to an ``fp8`` collection: zeros, same paths.

    Leading axes of the histories (stacked layers) become leading axes of the sinks.
    """

    def zeros(product: Any) -> Any:
        leading = product[ROLES[0]]["amax_history"].shape[:-1]
        return {"amax": jnp.zeros((*leading, len(ROLES), WIDTH), jnp.float32)}

    return _map_products(zeros, fp8)


def rescale_grad_histories(fp8: Collections, ratio: jax.Array) -> Collections:
    """`fp8` with every gradient amax multiplied by `ratio` = new / old loss scale.

    Gradients carry the loss scale, so their history must follow it, or every growth saturates.
    """
    largest = np.float32(np.finfo(np.float32).max)

    def rescale(product: Any) -> Any:
        grad = jax.tree.map(lambda a: jnp.minimum(a * ratio, largest), product["grad"])
        return {**product, "grad": grad}

    return _map_products(rescale, fp8)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "fp8_sink", "collections"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Gradients:
    """What `value_and_grad` returns and `TrainState.apply_gradients` takes.

    Averaging it over devices (``jax.lax.pmean``) keeps it right, the amaxes included.

    Attributes:
      params: gradient by the parameters, of the unscaled loss (f32 if there is a loss scale). By
        the values of FP8 parameters it is f32, or ``optax.MaskedNode()`` if they are frozen.
      fp8_sink: gradient by the ``fp8_sink`` collection: amaxes, under the scaled loss.
      collections: new values of the other collections, such as ``batch_stats``.
    """

    params: Any
    fp8_sink: Collections
    collections: Collections

    def __repr__(self) -> str:
        """What is in it, by size."""
        parts = [f"params=({printing.tree(self.params)})"]
        if self.fp8_sink:
            parts.append(f"fp8_sink=({_spelled_products(self.fp8_sink)})")
        if self.collections:
            parts.append(f"collections=({_spelled_collections(self.collections)})")
        return f"Gradients({', '.join(parts)})"


class TrainState(flax.struct.PyTreeNode):
    """Parameters, amax histories and optimizer state, advanced together or not at all.

    Parameters that are stored in FP8 (`ScaledArray`) are trained if the optimizer has a
    `jfp8.optim.master_weights` in it. Otherwise they are frozen, and `tx` does not see them.

    Attributes:
      step: i32[], number of calls of `apply_gradients`, skipped ones included.
      params: the ``params`` collection.
      fp8: the ``fp8`` collection; ``{}`` for recipes without state.
      opt_state: state of `tx`.
      collections: all other collections, such as ``batch_stats``.
      apply_fn: ``model.apply``, kept for convenience.
      tx: the optimizer.
    """

    step: jax.Array
    params: Any
    fp8: Collections
    opt_state: optax.OptState
    collections: Collections
    apply_fn: Callable[..., Any] = flax.struct.field(pytree_node=False)
    tx: optax.GradientTransformation = flax.struct.field(pytree_node=False)

    def __repr__(self) -> str:
        """The step, and what is in the state by size."""
        parts = [f"step={printing.number(self.step)}", f"params=({_spelled_params(self.params)})"]
        if self.fp8:
            parts.append(f"fp8=({_spelled_products(self.fp8)})")
        parts.append(f"opt_state=({_spelled_optimizer(self.opt_state)})")
        if self.collections:
            parts.append(f"collections=({_spelled_collections(self.collections)})")
        lines = "".join(f"\n  {part}," for part in parts)
        return f"{type(self).__name__}({lines}\n)"

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        variables: Mapping[str, Any],
        tx: optax.GradientTransformation,
    ) -> TrainState:
        """The state before the first step.

        Args:
          apply_fn: ``model.apply``.
          variables: what ``model.init`` returned.
          tx: optimizer; it sees nothing but ``params``, and of those only what is trained.

        Raises:
          ValueError: `variables` has no ``params``, or its ``fp8_sink`` does not match its ``fp8``.
        """
        collections = _plain(variables)
        if "params" not in collections:
            raise ValueError(
                f"variables has the collections {sorted(collections)}, but no 'params'. Pass all "
                "that model.init(...) returned, not variables['params']."
            )
        params, fp8 = collections.pop("params"), collections.pop("fp8", {})
        sinks = collections.pop("fp8_sink", None)
        shapes = jax.tree.map(jnp.shape, jax.eval_shape(init_sinks, fp8))
        if sinks is not None and jax.tree.map(jnp.shape, sinks) != shapes:
            raise ValueError(
                "The 'fp8_sink' collection does not belong to the 'fp8' collection. Lift both "
                "alike, stacked along axis 0: nn.scan(..., variable_axes={'params': 0, 'fp8': 0, "
                "'fp8_sink': 0})."
            )
        opt_state = tx.init(without_stored(params))
        if has_master_weights(opt_state):
            opt_state = tx.init(params)
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            fp8=fp8,
            opt_state=opt_state,
            collections=collections,
            apply_fn=apply_fn,
            tx=tx,
        )

    @property
    def variables(self) -> Collections:
        """The collections for ``apply``: histories are read, nothing is recorded."""
        fp8 = {"fp8": self.fp8} if self.fp8 else {}
        return {"params": self.params, **fp8, **self.collections}

    def apply_gradients(self, grads: Gradients) -> TrainState:
        """The state after one optimizer step.

        If a gradient, or any operand of an FP8 product, held an Inf or NaN, or a gradient is beyond
        2^62, so that optimizers could not square it, the step is skipped: parameters, optimizer
        state, histories and other collections stay as they are, bit for bit; only `step` counts on
        and the loss scale falls. When the loss scale changes, the histories of gradients follow it.

        Args:
          grads: what `value_and_grad` returned, averaged over devices or not.

        Raises:
          TypeError: `grads` is not a `Gradients` although there are histories to keep up.
        """
        if not isinstance(grads, Gradients):
            if self.fp8:
                raise TypeError(
                    "apply_gradients needs the amaxes that belong to the gradients, to keep the "
                    f"fp8 histories up, but got {type(grads).__name__}. Compute the gradients with "
                    "jfp8.value_and_grad(loss_fn)(state, batch)."
                )
            grads = Gradients(_scaled(grads, find_loss_scale(self.opt_state), -1), {}, {})
        amaxes, overflow = decode_all(_plain(grads.fp8_sink))
        finite = all_squares_finite(grads.params) & ~overflow

        before = find_loss_scale(self.opt_state)
        # tx expects gradients of the scaled loss. NaN tells a loss scale in it of any overflow,
        # also of one that only the sink saw.
        scaled = _scaled(grads.params, before, +1)
        scaled = jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), scaled)
        tx = optax.with_extra_args_support(self.tx)
        trained = self.params if has_master_weights(self.opt_state) else without_stored(self.params)
        updates, opt_state = tx.update(scaled, self.opt_state, trained)
        opt_state = keep_unless(finite, opt_state, self.opt_state)
        params = keep_unless(finite, apply_updates(self.params, updates), self.params)

        fp8 = keep_unless(finite, _advance(self.fp8, amaxes, ()), self.fp8)
        after = find_loss_scale(opt_state)
        if before is not None and after is not None and fp8:
            fp8 = rescale_grad_histories(fp8, after.loss_scale / before.loss_scale)

        kept = {name: self.collections[name] for name in grads.collections}
        collections = keep_unless(finite, grads.collections, kept)
        return self.replace(
            step=self.step + 1,
            params=params,
            fp8=fp8,
            opt_state=opt_state,
            collections={**self.collections, **collections},
        )


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, micro_batches: int = 1
) -> Callable[[TrainState, Any], tuple[Any, Gradients]]:
    """Like ``jax.value_and_grad``, for a `TrainState` and one batch.

    The loss is multiplied by the loss scale, if the optimizer has one, and the returned loss and
    gradient are free of it. The amaxes of the backward pass travel along in the gradient.

    Args:
      loss_fn: ``(variables, batch) -> (loss, mutated)``, with `has_aux` ``(loss, mutated, aux)``.
        ``variables`` are the collections for ``model.apply``; ``mutated`` are the collections that
        it returned as mutated, ``{}`` if none. Of those, the ones that the state holds are carried
        over; return others, such as ``intermediates``, as ``aux``.
      has_aux: whether `loss_fn` returns a third value.
      micro_batches: split the batch's leading axis into this many parts, one after the other, and
        average losses and gradients: the same step in less memory. All parts see the same scales,
        and the histories get one entry, the largest amax. Weights are quantized once for all parts,
        and gradients are summed in f32, in place.

    Returns:
      ``(state, batch) -> (loss, grads)``, or ``((loss, aux), grads)`` with `has_aux`; with several
      micro-batches ``aux`` has a leading axis of that size.

    Raises:
      ValueError: `micro_batches` below 1 or not dividing the batch; `loss_fn` returns something
        else than described.

    >>> import jax, jax.numpy as jnp, jfp8, optax
    >>> model, x = jfp8.Dense(4), jnp.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))
    >>> loss_fn = lambda variables, x: (jnp.mean(model.apply(variables, x) ** 2), {})
    >>> loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
    >>> state.apply_gradients(grads).step
    Array(1, dtype=int32)
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be an int of at least 1, got {micro_batches!r}.")

    def compute(state: TrainState, batch: Any) -> tuple[Any, Gradients]:
        loss_scale = find_loss_scale(state.opt_state)
        sinks = init_sinks(state.fp8)
        by_values = has_master_weights(state.opt_state)
        differentiated = (carriers if by_values else without_stored)(state.params)

        def scaled_loss(differentiated, sinks, fp8, collections, batch):
            params = with_carriers(state.params, differentiated)
            fp8 = {"fp8": fp8, "fp8_sink": sinks} if fp8 else {}
            returned = loss_fn({"params": params, **fp8, **collections}, batch)
            loss, mutated, aux = _unpacked(returned, has_aux)
            if "fp8_sink" in mutated:
                raise ValueError(
                    "loss_fn made the 'fp8_sink' collection mutable, which cuts it off from the "
                    "gradient, and no history would be kept up. Name the collections that are "
                    "updated, e.g. model.apply(..., mutable=['batch_stats']), not mutable=True."
                )
            new = {name: mutated.get(name, value) for name, value in collections.items()}
            loss = jnp.asarray(loss)
            scaled = (
                loss if loss_scale is None else loss.astype(jnp.float32) * loss_scale.loss_scale
            )
            return scaled, (loss, new, aux)

        gradient = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
        if micro_batches == 1:
            (grads, sink), (loss, collections, aux) = gradient(
                differentiated, sinks, state.fp8, state.collections, batch
            )
        else:
            micro_batches_of = _split(batch, micro_batches)
            first = jax.tree.map(lambda x: x[0], micro_batches_of)
            # Weights are quantized here, once; the loop uses what is kept.
            kept, compute_rest = split(
                lambda known, varying: gradient(*known, *varying),
                (differentiated, sinks, state.fp8),
                (state.collections, first),
            )

            def accumulate(carry, micro_batch):
                total, sink_so_far, collections = carry
                (grads, sink), (loss, collections, aux) = compute_rest(
                    kept, (collections, micro_batch)
                )
                total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
                return (total, jax.tree.map(max_of_sinks, sink_so_far, sink), collections), (
                    loss,
                    aux,
                )

            zeros = jax.tree.map(
                lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)),
                differentiated,
            )
            carry = (zeros, sinks, state.collections)
            (grads, sink, collections), (losses, aux) = jax.lax.scan(
                accumulate, carry, micro_batches_of
            )
            grads = jax.tree.map(lambda g: g / micro_batches, grads)
            loss = jnp.mean(losses.astype(jnp.promote_types(losses.dtype, jnp.float32)))

        result = Gradients(_scaled(grads, loss_scale, -1), sink, collections)
        return ((loss, aux) if has_aux else loss), result

    return compute


def _unpacked(returned: Any, has_aux: bool) -> tuple[Any, Mapping[str, Any], Any]:
    """What `loss_fn` returned as (loss, mutated, aux), or an error that says what it should."""
    wanted = "(loss, mutated, aux)" if has_aux else "(loss, mutated)"
    if not isinstance(returned, tuple) or len(returned) != 2 + has_aux:
        given = (
            f"a tuple of {len(returned)}"
            if isinstance(returned, tuple)
            else type(returned).__name__
        )
        raise ValueError(
            f"loss_fn must return {wanted} when has_aux={has_aux}, but returned {given}. mutated "
            "are the collections that model.apply(..., mutable=[...]) returned, {} if none."
        )
    loss, mutated, aux = returned if has_aux else (*returned, None)
    if not isinstance(mutated, Mapping):
        raise ValueError(
            f"loss_fn must return {wanted} with a dict of collections as mutated ({{}} if none), "
            f"but that is {type(mutated).__name__}."
        )
    return loss, mutated, aux


def _split(batch: Any, parts: int) -> Any:
    def split(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0 or leaf.shape[0] % parts:
            raise ValueError(
                f"micro_batches={parts} must divide the leading axis of every array of the batch, "
                f"but one has shape {leaf.shape}."
            )
        return leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:])

    return jax.tree.map(split, batch)


def _scaled(grads: Any, loss_scale: Any, power: int) -> Any:
    """`grads` times (+1) or divided by (-1) the loss scale, in f32; exact, it is a power of two."""
    if loss_scale is None:
        return grads
    factor = loss_scale.loss_scale if power > 0 else 1.0 / loss_scale.loss_scale
    return jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads)


# What `repr` says. The trees may hold anything: shapes, shardings, placeholders.


def _spelled_params(params: Any) -> str:
    is_fp8 = lambda x: isinstance(x, ScaledArray)
    leaves = jax.tree.leaves(params, is_leaf=is_fp8)
    n = sum(math.prod(x.data.shape if is_fp8(x) else x.shape) for x in leaves if _has_shape(x))
    n_fp8 = sum(map(is_fp8, leaves))
    stored = f", {printing.counted(n_fp8, 'array')} in FP8" if n_fp8 else ""
    return f"{printing.counted(n, 'parameter')} in {printing.tree(params)}{stored}"


def _has_shape(x: Any) -> bool:
    return printing.is_arraylike(x.data if isinstance(x, ScaledArray) else x)


def _spelled_products(fp8: Any) -> str:
    """The products of an ``fp8`` or ``fp8_sink`` collection; stacked layers count each."""
    of_product = lambda path, role: [getattr(k, "key", None) for k in path[-2:]] == role
    leaves = jax.tree_util.tree_leaves_with_path(fp8)
    histories = [
        x
        for path, x in leaves
        if of_product(path, ["grad", "amax_history"]) and printing.is_arraylike(x)
    ]
    if not histories:
        return printing.tree(fp8)
    lengths = sorted({x.shape[-1] for x in histories})
    products = printing.counted(sum(math.prod(x.shape[:-1]) for x in histories), "product")
    return f"{products} with amax histories of {' or '.join(map(str, lengths))} steps"


def _spelled_optimizer(opt_state: Any) -> str:
    is_scale = lambda x: isinstance(x, LossScaleState)
    scales = filter(is_scale, jax.tree.leaves(opt_state, is_leaf=is_scale))
    spelled = [f"loss scale {printing.number(scale.loss_scale)}" for scale in scales]
    return "; ".join([printing.optimizer_state(opt_state), *spelled])


def _spelled_collections(collections: Any) -> str:
    return "; ".join(f"{name}: {printing.tree(value)}" for name, value in collections.items())
