"""Data parallelism under ``jax.jit`` with gradients sent in FP8.

Under plain ``jit`` with a sharded batch, XLA adds the all-reduce of the gradients after
differentiation, in f32, where nothing can change it. So the gradient function runs once per device
here, on its part of the batch, in a ``jax.shard_map`` over that one axis of the mesh; other axes
stay with XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfp8.collectives import exchange as collectives
from jfp8.collectives.wire import AxisName
from jfp8.layers.nnx.products import Fp8State
from jfp8.products.explicit_sharding import check_divided
from jfp8.scaling.sink import BINS, ROLES, SMALL, WIDTH, decode_amax, encode_amax
from jfp8.tracing.shardings import explicit_sharding
from jfp8.training.end_of_step import rescale_grad_histories, rescaled
from jfp8.training.micro_batches import without_batch_axis
from jfp8.training.model_histories import Collections
from jfp8.training.nnx_step import training_products
from jfp8.training.state import Gradients, TrainState


def data_parallel(
    grad_fn: Callable[[Any, Any], tuple[Any, Any]],
    axis_name: AxisName = "data",
    *,
    mesh: Mesh | AbstractMesh | None = None,
    specs: Any = None,
    batch_axes: Mapping[str, None] | None = None,
    mean: Callable[[Any, AxisName], Any] = collectives.pmean,
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Run `grad_fn` on every device's part of the batch, and average gradients in FP8. ::

        loss = mean_i loss_i          in f32, exact
        gradient = mean_i gradient_i  at a quarter of the bytes, the same bits on all devices
        amax = max_i amax_i           exact

    Use it inside ``jax.jit``: ::

        compute = jfp8.data_parallel(jfp8.value_and_grad(loss_fn), "data", mesh=mesh)

        @jax.jit
        def train_step(state, batch):
            loss, grads = compute(state, batch)
            return state.apply_gradients(grads), loss

    The loss has to be a mean over the batch, so that the mean over devices is the mean of the whole
    batch. The histories of a `TrainState`, wherever it is in the state, refer to the loss of the
    whole batch: they are the same as in a run on one device, and fit any number of devices. An
    overflow on one device skips the step on all.

    The state may be an NNX model, with `grad_fn` of `jfp8.nnx.value_and_grad`. It is updated as if
    `grad_fn` had been called with the whole batch.

    The state, with its random keys, is the same on all devices along `axis_name` (what is sharded
    along it is gathered first). `grad_fn` may call ``jax.lax.axis_index(axis_name)``.

    Args:
      grad_fn: ``(state, batch) -> (loss, grads)`` or ``((loss, aux), grads)``: what
        `jfp8.value_and_grad` or ``jax.value_and_grad`` return, or such gradients in a tree.
      axis_name: axis of the mesh that divides the batch, or a tuple of axes.
      mesh: the mesh; default: the one of ``jax.set_mesh``.
      specs: how parameters, and so gradients, are sharded along other axes of the mesh (tensor
        parallelism): a tree of ``PartitionSpec`` like theirs, or one for all. Every device then
        sends its shards. Without it XLA gathers gradients along those axes before they are sent:
        the same values, but more bytes.
      batch_axes: arrays of the batch that every device gets whole, by the name of a key:
        ``{"class_weights": None}``. Scalars need no name.
      mean: how gradients are averaged: ``functools.partial(collectives.pmean, block=64)``, or
        ``jax.lax.pmean`` for f32.

    Returns:
      ``(state, batch) -> (loss, grads)``, or ``((loss, aux), grads)``. The batch's arrays are
      divided along their leading axis; scalars go to every device. ``aux`` is averaged, as are the
      floating arrays of collections such as ``batch_stats``. Integers, and arrays with an entry for
      each example, cannot be averaged and are refused.

    Raises:
      TypeError: the state contains an NNX model, but is none.
      ValueError: there is no mesh, or none with `axis_name`; the number of devices does not divide
        the leading axis of an array of the batch, or those axes differ; an ``aux`` that cannot be
        averaged.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> loss = lambda w, batch: jnp.mean((batch @ w) ** 2)
    >>> compute = jfp8.data_parallel(jax.value_and_grad(loss), "data", mesh=mesh)
    >>> jax.jit(compute)(jnp.ones(2), jnp.ones((4, 2)))
    (Array(4., dtype=float32), Array([4., 4.], dtype=float32))
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)

    def mean_of_gradients(grads: Any) -> Any:
        if specs is None:
            return mean(grads, axis_name)
        shard_specs, others = _without(specs, names)
        return jax.shard_map(
            lambda grads: mean(grads, axis_name),
            in_specs=(shard_specs,),
            out_specs=shard_specs,
            axis_names=others,
            check_vma=False,
        )(grads)

    def compute(state: Any, batch: Any) -> tuple[Any, Any]:
        is_model = lambda node: isinstance(node, nnx.Module)
        model = state if is_model(state) else None
        for node in filter(is_model, jax.tree.leaves(state, is_leaf=is_model)):
            if node is model:
                break
            raise TypeError(
                f"data_parallel takes arrays or one NNX model as its state, but got a tree with a "
                f"{type(node).__name__}. Pass the model itself: compute(model, batch)."
            )
        here = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        n = _device_count(here, names)
        call = f"data_parallel(grad_fn, {axis_name!r}"
        whole = without_batch_axis(batch, batch_axes or {}, n, call)
        check_divided(here, names, batch, whole)
        of_batch = jax.tree.map(lambda w: PartitionSpec() if w else PartitionSpec(axis_name), whole)
        function, state = (grad_fn, state) if model is None else _on_arrays(grad_fn, model, n)
        # Without check_vma, since loops in `grad_fn` need not know of the axis; and so nothing is
        # summed over devices but what is summed below.
        value, grads = jax.shard_map(
            partial(_on_one_device, function, mean_of_gradients, axis_name, n, whole),
            mesh=mesh,
            in_specs=(PartitionSpec(), of_batch),
            out_specs=PartitionSpec(),
            axis_names=set(names),
            check_vma=False,
        )(jax.tree.map(partial(_whole, names), state), batch)
        return value, grads if model is None else _put_into(model, grads)

    return compute


def _on_one_device(
    grad_fn: Callable[[Any, Any], tuple[Any, Any]],
    mean: Callable[[Any], Any],
    axis_name: AxisName,
    n: int,
    whole: Any,
    state: Any,
    batch: Any,
) -> tuple[Any, Any]:
    # The mean over 1 / n of the batch has n times the gradients of the mean over all of it.
    def in_units_of_this_device(node: Any) -> Any:
        if not isinstance(node, TrainState):
            return node
        return node.replace(fp8=rescale_grad_histories(node.fp8, jnp.float32(n)))

    def combined(grads: Any, params: Any) -> Any:
        average = partial(_mean_of_state, axis_name)
        if isinstance(grads, _OfModel):
            return _OfModel(params, grads.histories, jax.tree.map(average, grads.others))
        if not isinstance(grads, Gradients):
            return params
        return replace(
            grads,
            params=params,
            fp8_sink=_max_of_sinks(grads.fp8_sink, axis_name, n),
            collections=jax.tree.map(average, dict(grads.collections)),
            loss=average(jnp.asarray(grads.loss)),
        )

    is_state = lambda node: isinstance(node, TrainState)
    state = jax.tree.map(in_units_of_this_device, state, is_leaf=is_state)
    try:
        value, grads = grad_fn(state, batch)
    except TypeError as error:
        made = "jfp8.data_parallel(jfp8.value_and_grad(loss_fn), axis_name)"
        error.add_note(f"data_parallel takes what returns (loss, grads), such as {made}.")
        raise
    parts = zip(jax.tree.leaves(batch), jax.tree.leaves(whole), strict=True)
    _check_value(value, {leaf.shape[0] for leaf, w in parts if not w}, axis_name)
    value = jax.tree.map(partial(_mean_of_value, axis_name), value)
    is_gradients = lambda node: isinstance(node, Gradients | _OfModel)
    params_of = lambda node: node.params if is_gradients(node) else node
    params = mean(jax.tree.map(params_of, grads, is_leaf=is_gradients))
    return value, jax.tree.map(combined, grads, params, is_leaf=is_gradients)


def _check_value(value: Any, examples: set[int], axis_name: AxisName) -> None:
    """Raise ``ValueError`` for a value that has no meaningful mean over devices."""
    for path, x in jax.tree_util.tree_leaves_with_path(value):
        name, shape = f"(loss, aux){jax.tree_util.keystr(path)}", jnp.shape(x)
        if isinstance(x, bool | int | float):
            continue  # the same on all devices
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise ValueError(
                f"data_parallel averages what grad_fn returns over devices, but {name} is "
                f"{jnp.result_type(x)}, and a mean is not. Return the mean over the batch as "
                f"float32; or sum it over devices in the loss function, and return "
                f"jax.lax.psum(x, {axis_name!r}).astype(jnp.float32), which no mean changes."
            )
        # With micro-batches a leading axis of those stands in front.
        if examples & {shape[:1] and shape[0], shape[1:] and shape[0] * shape[1]}:
            raise ValueError(
                f"data_parallel averages what grad_fn returns over devices, but {name} has shape "
                f"{shape}, which looks like one entry for each of the {sorted(examples)} examples "
                "of a device: their mean over devices would mix examples. Return a mean over the "
                f"batch, or gather them in the loss function: jax.lax.all_gather(x, {axis_name!r}, "
                "tiled=True). If it is no entry for each example, return x[None]."
            )


def _without(specs: Any, names: tuple[Any, ...]) -> tuple[Any, set[Any]]:
    """Return `specs` without the axes in `names`, and the axes that are left."""
    left: set[Any] = set()

    def strip(spec: PartitionSpec) -> PartitionSpec:
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        kept = [tuple(axis for axis in e if axis not in (None, *names)) for e in entries]
        left.update(*kept)
        return PartitionSpec(*(axes or None for axes in kept))

    stripped = jax.tree.map(strip, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return stripped, left


def _whole(names: tuple[Any, ...], x: Any) -> Any:
    """Gather `x` along the explicit axes in `names`, which shard_map leaves as they are."""
    if (sharding := explicit_sharding(x)) is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, _without(sharding.spec, names)[0]))


def _mean_of_value(axis_name: AxisName, x: Any) -> jax.Array:
    """Average in f32."""
    x = jnp.asarray(x)
    mean = lax.pmean(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis_name)
    return mean.astype(x.dtype)


def _mean_of_state(axis_name: AxisName, x: jax.Array) -> jax.Array:
    """Average floating arrays; anything else (counters, keys) is the same on all devices."""
    return _mean_of_value(axis_name, x) if _is_floating(x) else x


def _max_of_sinks(sinks: Collections, axis_name: AxisName, n: int) -> Collections:
    """Return sinks with the largest amaxes of all devices; gradients' amaxes are divided by `n`.

    A sum of the sinks would read as a bound of them, and be thousands of times as long.
    """
    if not jax.tree.leaves(sinks):
        return sinks
    flat, unflatten = ravel_pytree(sinks)  # one array takes one collective
    rows = flat.reshape(-1, len(ROLES), WIDTH)
    amax, overflow = decode_amax(rows)
    seen = jnp.any(rows[..., :BINS] > 0, axis=-1)
    # All finite, so that the maximum drops no NaN.
    flags = [amax, overflow.astype(jnp.float32), seen.astype(jnp.float32)]
    amax, overflow, seen = lax.pmax(jnp.stack(flags), axis_name)
    unit = jnp.array([1.0 / n if role == "grad" else 1.0 for role in ROLES], jnp.float32)
    rows = jnp.where(seen[..., None] > 0, encode_amax(amax * unit[None]), 0.0)
    rows = rows.at[..., BINS - 1].max(overflow)  # the bin of NaN
    return unflatten(rows.ravel() * SMALL)


def _device_count(mesh: Mesh | AbstractMesh, names: tuple[Any, ...]) -> int:
    missing = [name for name in names if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"data_parallel divides the batch over the mesh axes {names}, but the mesh has "
            f"{tuple(mesh.shape)}, not {missing}. Pass an axis name of the mesh, and the "
            "mesh: jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)); or "
            "set it with jax.set_mesh(mesh)."
        )
    return int(np.prod([mesh.shape[name] for name in names]))


# The state of an NNX model: copied to every device, and put together from all.

_OTHERS = nnx.Not((nnx.Param, Fp8State))


class _OfModel(NamedTuple):
    """Hold the results of a step of a model."""

    params: Any  # gradients
    histories: Any  # the new `Fp8State`, the same on all devices
    others: Any  # for other Variables the change, or the new value if it is not floating


def _on_arrays(
    grad_fn: Callable[[Any, Any], tuple[Any, Any]], model: nnx.Module, n: int
) -> tuple[Callable[[Any, Any], tuple[Any, _OfModel]], Any]:
    """Return `grad_fn` as a function of the arrays of `model`, and these arrays.

    Its gradients are `n` times those of the whole batch, to which the model's histories refer.
    """
    graphdef, arrays = nnx.split(model)

    def compute(arrays: Any, batch: Any) -> tuple[Any, _OfModel]:
        here = nnx.merge(graphdef, arrays)
        before = nnx.as_pure(nnx.state(here, _OTHERS))
        _rescale_histories(here, jnp.float32(n))
        value, grads = grad_fn(here, batch)
        _rescale_histories(here, 1 / jnp.float32(n))
        change = lambda new, old: new - old if _is_floating(new) else new
        others = jax.tree.map(change, nnx.as_pure(nnx.state(here, _OTHERS)), before)
        return value, _OfModel(grads, nnx.state(here, Fp8State), others)

    return compute, arrays


def _put_into(model: nnx.Module, step: _OfModel) -> Any:
    """Update `model` with the state of a step, and return the gradients."""
    before = nnx.as_pure(nnx.state(model, _OTHERS))
    add = lambda x, change: x + change if _is_floating(x) else change
    nnx.update(model, step.histories, jax.tree.map(add, before, step.others))
    return step.params


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _rescale_histories(model: nnx.Module, factor: Any) -> None:
    for product in training_products((model,)).values():
        product.set_histories({"grad": rescaled(product._intact_histories()["grad"], factor)})
