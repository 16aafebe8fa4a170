"""`gather_weights`: gather sharded weights at one byte per element.

    shard w  --quantize-->  bytes  --all-gather-->  whole bytes  --> matmuls, unchanged
    shard dw <------------------ reduce-scatter ------------------- whole dw

Matmuls get the same operand as from the whole weight in high precision, because the weight is only
quantized before it is sent instead of after. The whole weight never exists in high precision; its
gradient is returned through `ScaledArray.carrier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jfp8.collectives.exchange import reduce_scatter
from jfp8.conversion.selection import Choice, Recipes, Selection, select
from jfp8.conversion.weights import is_kernel
from jfp8.quantizers.quantizer import Context, Current, Quantizer
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_of, codes_to_format
from jfp8.scaling.formats import E8M0FNU, Format
from jfp8.scaling.scales import amax
from jfp8.scaling.trees import is_scaled_array
from jfp8.tracing.compat import vary_like

Axes = str | tuple[str, ...]


def gather_weights(
    params: Any,
    axis_name: Axes,
    specs: Any = None,
    *,
    recipe: Recipes = DelayedScaling(),
    exempt: Choice | Sequence[Choice] = (),
    only: Choice | Sequence[Choice] | None = None,
    gradients_as: Format | jax.typing.DTypeLike | None = None,
) -> Any:
    """Gather `params` onto every device of `axis_name`, kernels at one byte per element (FSDP).

    Call it inside the function that is differentiated, on the parameters that are about to be used,
    such as one layer's in the body of a ``lax.scan`` over layers. The gradient is sharded
    like `params`, summed over the devices by a reduce-scatter. The mesh in effect
    (``jax.set_mesh``, ``jax.shard_map``) and the type of this axis in it determine if this uses a
    collective, ``jax.sharding.reshard`` or sharding constraints for the compiler.

    A kernel is returned as a `ScaledArray`. If the recipe has one scale for each tensor
    (``delayed``, ``current``, ``direct_e5m2``), the matmuls of jfp8's layers and of converted
    models use it unchanged. The results are then bitwise identical to those without this function
    if the scales agree, as they do under current scaling. Under delayed scaling, too, a weight here
    gets its current scale, because the whole weight is known. Other recipes quantize the gathered
    values once more, in their own blocks. Exempt kernels, kernels under `QuantizationAware`, and
    parameters that are not kernels are sent in high precision. Kernels stored in FP8
    (`ScaledArray`, see `jfp8.optim.master_weights`) are sent unchanged; a 0-d scale has to be
    equal on all devices.

    The whole weights are saved for the backward pass, one byte per element. To save nothing and
    gather a second time instead, use
    ``jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("fp8_saved"))``.

    Args:
      params: pytree of arrays: the ``params`` of a Linen model, or ``nnx.state(model, nnx.Param)``.
      axis_name: axis of the mesh, or several, over which they are sharded.
      specs: ``PartitionSpec`` (or ``NamedSharding``) of each, or of whole subtrees. Not needed for
        an axis of type ``Explicit``, because the types of arrays include it. Other axes in it, such
        as for tensor parallelism, are unchanged.
      recipe: the recipe of the model, or the recipes of its layers.
      exempt, only: layers whose kernels are gathered in high precision, or the only layers whose
        kernels are gathered in FP8; see `jfp8.quantize_params`.
      gradients_as: a dtype (``jnp.bfloat16``) to which gradients are rounded before they are sent;
        or, inside ``jax.shard_map``, a `Format`, for `jfp8.collectives.reduce_scatter`. None for
        their own dtype, which XLA:CPU also uses instead of bf16.

    Returns:
      The same tree, with a `ScaledArray` for each kernel that was gathered in FP8.

    Raises:
      TypeError: `recipe` is not a recipe.
      ValueError: `specs` are missing but needed; the axis is not in the mesh; a recipe
        whose scales have scales (``nvfp4``); `gradients_as` a format outside ``jax.shard_map``.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("fsdp",))
    >>> model, x = jfp8.Dense(4, recipe="current"), jnp.ones((2, 8))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> def loss(shards):
    ...     whole = jfp8.gather_weights(shards, "fsdp", {"kernel": P("fsdp"), "bias": P()})
    ...     return model.apply({"params": whole}, x).sum()
    >>> with jax.set_mesh(mesh):
    ...     jax.tree.map(jnp.shape, jax.jit(jax.grad(loss))(params))
    {'bias': (4,), 'kernel': (8, 4)}
    """
    selection = select(recipe, exempt, only)
    with_paths, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_scaled_array)
    leaves = [x for _, x in with_paths]
    way_of = partial(_way, axis_name=axis_name, gradients_as=gradients_as)
    ways = list(map(way_of, leaves, _specs_of(params, specs)))
    quantizers = _quantizers(selection, with_paths, ways)
    # One maximum over the devices for all of them.
    amaxes = {i: amax(leaves[i]) for i in quantizers}
    if amaxes:
        way = ways[next(iter(amaxes))]
        assert way is not None
        together = way.max_over_devices(jnp.stack(list(amaxes.values())))
        amaxes = dict(zip(amaxes, together, strict=True))
    gathered = []
    for i, (x, way) in enumerate(zip(leaves, ways, strict=True)):
        if way is None:
            gathered.append(x)
        elif isinstance(x, ScaledArray):
            gathered.append(_gather_stored(x, way))
        elif i in amaxes:
            gathered.append(_gather_bytes(x, way, amaxes[i], quantizers[i]))
        else:
            gathered.append(way.gather(x))
    return structure.unflatten(gathered)


def _quantizers(selection: Selection, with_paths: Any, ways: list[Any]) -> dict[int, Quantizer]:
    """Find the quantizers of kernels that are gathered in FP8, by their index among the leaves."""
    kernels = {}  # the layers that they belong to
    for i, (path, x) in enumerate(with_paths):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layer, _, leaf = name.removesuffix("/value").rpartition("/")
        if is_kernel(leaf, x):
            kernels[i] = layer, x
    selection.check_patterns([layer for layer, _ in kernels.values()])
    found = {}
    for i, (layer, x) in kernels.items():
        chosen = selection.decide(layer, x, None).recipe
        if chosen is None or chosen.exact_export:  # a shard may have other scales than the whole
            continue
        quantizer = chosen.products().fprop.rhs
        if quantizer is not None and ways[i] is not None and not is_scaled_array(x):
            found[i] = quantizer
    return found


def _way(x: jax.Array | ScaledArray, spec: Any, axis_name: Axes, gradients_as: Any) -> _Way | None:
    """Choose the collective that gathers `x`; None if `x` is not sharded."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    types = {t for name, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in names}
    if AxisType.Explicit in types:
        spec = jax.typeof(x.data if isinstance(x, ScaledArray) else x).sharding.spec
    if spec is None:
        raise ValueError(
            f"gather_weights needs specs= to know which parameters are sharded over {axis_name!r}: "
            "a tree like the parameters, of jax.sharding.PartitionSpec."
        )
    if not isinstance(spec, NamedSharding) and not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh in effect, which has "
            f"{mesh.axis_names}. Enter the mesh first, with jax.set_mesh(mesh): or jax.shard_map, "
            "or give specs of type jax.sharding.NamedSharding."
        )
    entries = _entries(spec)
    axes = [d for d, entry in enumerate(entries) if set(entry) & set(names)]
    if not axes:
        return None
    if len(axes) > 1:
        raise ValueError(
            f"An array with the spec {spec} is sharded over {axis_name!r} along several of its "
            "dimensions; gather_weights takes one."
        )
    if not isinstance(gradients_as, Format | None):
        gradients_as = np.dtype(gradients_as)
    if AxisType.Manual in types:
        (axis,) = axes
        if entries[axis] != names:
            raise ValueError(
                "Inside jax.shard_map a dimension is gathered over exactly the axes that it is "
                f"sharded over, {entries[axis]}, not {names}. Name these, or keep the other axes "
                "of the mesh automatic and out of it."
            )
        return _ByCollectives(axis, gradients_as, names)
    return _by_layout(spec, names, gradients_as, AxisType.Explicit in types)


def _by_layout(spec: Any, names: tuple[str, ...], gradients_as: Any, explicit: bool) -> _ByLayout:
    if isinstance(gradients_as, Format):
        raise ValueError(
            f"gradients_as={gradients_as} needs jax.shard_map: elsewhere the compiler sums the "
            "gradients, in their own dtype. Use gradients_as=jnp.bfloat16 or None."
        )
    entries = _entries(spec)
    left = [tuple(n for n in entry if n not in names) for entry in entries]
    spread, whole = PartitionSpec(*entries), PartitionSpec(*left)
    if isinstance(spec, NamedSharding):
        spread, whole = NamedSharding(spec.mesh, spread), NamedSharding(spec.mesh, whole)
    return _ByLayout(gradients_as, spread, whole, explicit)


def _entries(spec: PartitionSpec | NamedSharding) -> list[tuple[str, ...]]:
    """List the axes of the mesh for each dimension."""
    entries = spec.spec if isinstance(spec, NamedSharding) else spec
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]


def _specs_of(params: Any, specs: Any) -> list[Any]:
    """Return the spec of each leaf of `params`; None if there are no `specs`."""
    is_spec = lambda node: node is None or isinstance(node, PartitionSpec | NamedSharding)
    if specs is None:
        return [None] * len(jax.tree.leaves(params, is_leaf=is_scaled_array))
    of_leaves = lambda spec, part: jax.tree.map(lambda _: spec, part, is_leaf=is_scaled_array)
    spread = jax.tree.map(of_leaves, specs, params, is_leaf=is_spec)
    return jax.tree.leaves(spread, is_leaf=is_spec)


def _gather_bytes(x: jax.Array, way: _Way, largest: jax.Array, quantizer: Quantizer) -> ScaledArray:
    if x.ndim != 2 and not quantizer.one_for_both:
        quantizer = Current(quantizer.fmt)
    context = Context((0,), largest, None, None)
    source = lax.stop_gradient(x)
    q = quantizer(source, context)
    if q.block is not None:  # a shard with an incomplete block fits no whole
        q = Current(quantizer.fmt)(source, context)
    scale = q.scale
    if isinstance(scale, ScaledArray):
        raise ValueError(
            f"{quantizer} has scales of scales, for the whole weight, which devices that hold "
            "shards of it cannot compute separately. Use another recipe, such as 'mxfp8', or send "
            "the weights in high precision: leave gather_weights out."
        )
    return _gather_stored(replace(q, carrier=x), way)


def _gather_stored(q: ScaledArray, way: _Way) -> ScaledArray:
    """Gather `q` as it is stored; its gradient is returned to the shard's."""
    scale = q.scale
    if isinstance(scale, ScaledArray) or q.block is not None:
        raise ValueError(
            f"A ScaledArray of shape {q.shape} in shards has incomplete blocks, or scales "
            "of scales, and its shards do not fit together. Quantize it with one scale, or in "
            "blocks that divide each shard."
        )
    if scale.dtype == E8M0FNU.dtype:
        scale = codes_to_format(way.gather_scale(codes_of(scale)), E8M0FNU)
    else:
        scale = way.gather_scale(scale)
    codes = way.gather(codes_of(q.data))
    carrier = None if q.carrier is None else _carrier(way, q.carrier)
    return ScaledArray(codes_to_format(codes, q.format), scale, None, carrier)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _carrier(way: _Way, x: jax.Array) -> jax.Array:
    """Return zeros of the shape of the whole weight; only their cotangent is used."""
    return way.zeros(x)


_carrier.defvjp(
    lambda way, x: (way.zeros(x), None),
    lambda way, residuals, whole: (way.scatter(whole),),
)


# How a shard becomes the whole, and the cotangent of the whole the shard's.


@dataclass(frozen=True)
class _ByCollectives:
    """Gather over axes of the mesh in ``jax.shard_map``, where arrays are this device's shards."""

    axis: int  # the array's
    gradients_as: Format | np.dtype | None
    names: tuple[str, ...]

    def max_over_devices(self, amaxes: jax.Array) -> jax.Array:
        """Take the maximum of f32[n], none of them negative."""
        # Integers, since XLA:CPU drops NaN from the maximum of floats over devices.
        bits = lax.pmax(lax.bitcast_convert_type(amaxes, jnp.uint32), self.names)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def zeros(self, x: jax.Array) -> jax.Array:
        shape = list(x.shape)
        shape[self.axis] *= lax.axis_size(self.names)
        return vary_like(jnp.zeros(shape, x.dtype), x)

    def gather(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.names, axis=self.axis, tiled=True)

    def gather_scale(self, scale: jax.Array) -> jax.Array:
        return self.gather(scale) if scale.ndim else scale

    def scatter(self, whole: jax.Array) -> jax.Array:
        how = {"scatter_dimension": self.axis}
        if isinstance(self.gradients_as, Format):
            return reduce_scatter(whole, self.names, fmt=self.gradients_as, **how)
        rounded = whole if self.gradients_as is None else whole.astype(self.gradients_as)
        part = lax.psum_scatter(rounded, self.names, tiled=True, **how)
        return part.astype(whole.dtype)


@dataclass(frozen=True)
class _ByLayout:
    """Gather outside it, where arrays are global, and each device has a shard of them."""

    gradients_as: np.dtype | None
    spread: PartitionSpec | NamedSharding  # before
    whole: PartitionSpec | NamedSharding  # after
    explicit: bool  # the sharding is part of the type of an array, else the compiler chooses it

    def max_over_devices(self, amaxes: jax.Array) -> jax.Array:
        return amaxes

    def zeros(self, x: jax.Array) -> jax.Array:
        zeros = jnp.zeros(x.shape, x.dtype)
        return self._laid_out(zeros, self.whole) if self.explicit else zeros

    def gather(self, x: jax.Array) -> jax.Array:
        if not self.explicit:  # with only the other the compiler would gather first, then cast
            x = self._laid_out(x, self.spread)
        return self._laid_out(x, self.whole)

    def gather_scale(self, scale: jax.Array) -> jax.Array:
        return scale  # small, and sent where it is needed

    def scatter(self, whole: jax.Array) -> jax.Array:
        rounded = whole if self.gradients_as is None else whole.astype(self.gradients_as)
        return self._laid_out(rounded, self.spread).astype(whole.dtype)

    def _laid_out(self, x: jax.Array, spec: PartitionSpec | NamedSharding) -> jax.Array:
        place = jax.sharding.reshard if self.explicit else lax.with_sharding_constraint
        return place(x, spec)


_Way = _ByCollectives | _ByLayout
