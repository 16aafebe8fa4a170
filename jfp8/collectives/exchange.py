"""Mean, sum and gather over devices that exchange records of bytes; see `jfp8.collectives`."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.collectives.wire import FINEST, MIN_SIZE, AxisName, Wire
from jfp8.scaling.casts import Rounding
from jfp8.scaling.formats import Format
from jfp8.scaling.random_bits import fold_in
from jfp8.scaling.sink import is_sink
from jfp8.tracing.compat import varying_axes

_Leaves = dict[int, jax.Array]  # some of a tree, by their places in it


def pmean(
    tree: Any,
    axis_name: AxisName,
    *,
    fmt: Format | tuple[Format, Format] = FINEST,
    block: int = 128,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
    min_size: int = MIN_SIZE,
) -> Any:
    """``jax.lax.pmean`` of gradients, at a little over a quarter of its bytes. ::

        q_i = quantize(x_i);   y = quantize(sum_i dequantize(q_i) / n)        in blocks

    Every device gets the same bits. An Inf or a NaN on one of them makes its block NaN on all.
    Works in ``jax.shard_map``, with ``check_vma`` or without, and wherever else axes have names.
    With ``check_vma`` the result does not vary over `axis_name`, so that it fits ``out_specs=P()``.

    Differentiate on every device separately, so that there is something to average. With
    ``check_vma``, JAX itself sums the gradient of parameters that do not vary over `axis_name`, in
    f32; make them vary first: ``jax.lax.pcast(params, axis_name, to="varying")``.
    (`jfp8.data_parallel` does so.) An array that does not vary is its own mean, and is returned
    unchanged.

    Derivatives are as for ``jax.lax.pmean``, straight through the rounding.

    Args:
      tree: arrays of any shapes. ``jax.lax.pmean`` is used for arrays that are not floating, have
        64 bits, or have at most about ``block / 4`` elements, and for gradients of ``fp8_sink``.
      axis_name: one name, or a tuple of names.
      fmt: 8-bit format on the wire: `jfp8.E4M3FN`, `E2M5`, ..., or a pair, such as `FINEST`.
      block: number of elements that share a scale; it adds ``4 / block`` bytes per element on the
        wire.
      rounding: see `jfp8.cast`. Rounded to nearest, the mean is off by at most half a step in each
        of the two roundings; ``"stochastic"`` is unbiased instead.
      key: JAX random key for ``"stochastic"``, the same on all devices.
      min_size: with fewer elements than this in total, ``jax.lax.pmean`` in f32 is used for all.

    Returns:
      Arrays of the shapes and dtypes of `tree`; sums are in f32.

    Raises:
      TypeError: `fmt` is not an 8-bit format, nor a pair of them.
      ValueError: unknown `rounding`, a bad `block`, or stochastic rounding without `key`.

    References:
      ZeRO++, arXiv 2306.10209, section 4.3 (quantized gradient reduction by all-to-all); FP8-LM,
      arXiv 2310.18313, section 2.1, for the alternative: sums in FP8 with one scale per tensor.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> g = jnp.array([[1.0, 2.0, 3.0] * 64, [3.0, 2.0, 1.0] * 64])
    >>> mean = lambda g: jfp8.collectives.pmean({"w": g}, "data", min_size=0)
    >>> jax.vmap(mean, axis_name="data")(g)["w"][:, :3].round(1)
    Array([[2., 2., 2.],
           [2., 2., 2.]], dtype=float32)
    """
    wire = Wire(axis_name, fmt, block, rounding)
    seed = wire.seed(key)
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    result = [_mean_at_hand(leaf, axis_name) for leaf in leaves]
    wanted = {i: leaf for i, leaf in enumerate(leaves) if result[i] is None}
    for group in _groups(wire, wanted, min_size):
        for i, mean in zip(group, _pmean(wire, list(group.values()), seed), strict=True):
            result[i] = mean
            del wanted[i]
    for i, mean in zip(wanted, _exact_pmean(list(wanted.values()), axis_name), strict=True):
        result[i] = mean
    return jax.tree.unflatten(structure, result)


def _groups(wire: Wire, leaves: _Leaves, min_size: int) -> list[_Leaves]:
    """Choose the `leaves` that are worth rounding, together with others.

    Arrays that vary over different axes of the mesh must not be mixed: their means would vary, too.
    """
    groups: defaultdict[frozenset[str], _Leaves] = defaultdict(dict)
    for i, leaf in leaves.items():
        # In a block with many uses, the use with the largest amax would be rounded to zero.
        rounds = _is_float(leaf) and not is_sink(leaf)
        if rounds and wire.pays([leaf.size]):
            groups[varying_axes(leaf)][i] = leaf
    sizes = [[leaf.size for leaf in group.values()] for group in groups.values()]
    if sum(map(sum, sizes)) < min_size or wire.devices == 1:
        return []
    return [g for g, own in zip(groups.values(), sizes) if wire.pays(own, wire.devices)]


def reduce_scatter(
    x: jax.Array,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    mean: bool = False,
    fmt: Format | tuple[Format, Format] = FINEST,
    block: int = 128,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
    min_size: int = MIN_SIZE,
) -> jax.Array:
    """``jax.lax.psum_scatter(..., tiled=True)`` at a little over a quarter of its bytes.

    The first half of `pmean`: every device gets its part of the sum, computed in f32, so that each
    value is rounded once before the dtype of `x`. An Inf or a NaN makes its block NaN. The
    derivatives are as for ``jax.lax.psum_scatter``: cotangents are gathered in their own dtype.

    Args:
      x: array, such as a gradient.
      axis_name: one name, or a tuple of names.
      scatter_dimension: dimension of `x` to scatter over the devices.
      mean: divide the sum by the number of devices.
      fmt, block, rounding, key: see `pmean`.
      min_size: with fewer elements than this, ``jax.lax.psum_scatter`` in f32 is used; also for
        arrays that are not floating.

    Returns:
      Array of the dtype of `x`, and of its shape, except that `scatter_dimension` is divided by the
      number of devices.

    Raises:
      TypeError, ValueError: see `pmean`; also if the number of devices does not divide
        `scatter_dimension`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> scatter = lambda g: jfp8.collectives.reduce_scatter(g, "data", min_size=0)
    >>> jax.vmap(scatter, axis_name="data")(jnp.ones((2, 512))).shape
    (2, 256)
    """
    wire = Wire(axis_name, fmt, block, rounding)
    seed = wire.seed(key)
    x = jnp.asarray(x)
    _check_axis("scatter_dimension", scatter_dimension, x.ndim)
    dimension = scatter_dimension % x.ndim
    n = wire.devices
    if x.shape[dimension] % n:
        raise ValueError(
            f"reduce_scatter divides scatter_dimension={scatter_dimension} among {n} devices, but "
            f"x has shape {x.shape}, and {n} does not divide {x.shape[dimension]}. Choose another "
            "dimension, or pad this one."
        )
    if n > 1 and x.size >= min_size and _is_float(x) and wire.pays([x.size // n] * n):
        total = _psum_scatter(wire, dimension, x, seed)
    else:
        total = _exact_psum_scatter(x, axis_name, dimension)
    return (total / n if mean else total).astype(x.dtype)


def all_gather(
    x: jax.Array,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: Literal["varying", "invarying"] = "varying",
    fmt: Format | tuple[Format, Format] = FINEST,
    block: int = 128,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
    min_size: int = MIN_SIZE,
) -> jax.Array:
    """``jax.lax.all_gather`` at a little over a quarter of its bytes.

    Blocks are runs of `block` elements of `x` in row-major order. Every device gets the same bits,
    even of its own part. An Inf or a NaN makes its block NaN. The derivatives are those of
    ``jax.lax.all_gather``: cotangents are summed and scattered in their own dtype.

    Args:
      x: array, of the same shape on all devices.
      axis_name: one name, or a tuple of names.
      axis: dimension along which the parts are put: one of `x` if `tiled`, else a new one.
      tiled: concatenate the parts, rather than stack them.
      to: see ``jax.lax.all_gather``: ``"invarying"`` tells ``check_vma`` that the result is the
        same on all devices.
      fmt, block, rounding, key: see `pmean`.
      min_size: an `x` with fewer elements than this is gathered unquantized; also if it is not
        floating.

    Returns:
      Array of the dtype of `x`.

    Raises:
      TypeError, ValueError: see `pmean`; also if there is no such `axis`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> gather = lambda w: jfp8.collectives.all_gather(w, "data", tiled=True, min_size=0)
    >>> jax.vmap(gather, axis_name="data")(jnp.ones((2, 256))).shape
    (2, 512)
    """
    wire = Wire(axis_name, fmt, block, rounding)
    seed = wire.seed(key)
    x = jnp.asarray(x)
    ndim = x.ndim if tiled else x.ndim + 1
    _check_axis("axis", axis, ndim)
    if to not in ("varying", "invarying"):
        raise ValueError(f"to={to!r} is unknown. Allowed: 'varying', 'invarying'.")
    if not _is_checked(axis_name):
        to = "varying"  # It is not tracked here, and vmap refuses anything else.
    axis = axis % ndim
    if wire.devices > 1 and x.size >= min_size and _is_float(x) and wire.pays([x.size]):
        return _all_gather(wire, axis, tiled, to, x, seed)
    return lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to=to)


# The functions below have the derivatives of the collectives that they approximate. Where these
# send cotangents, JAX knows the transposes, with check_vma and without.


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pmean(wire: Wire, leaves: list[jax.Array], seed: jax.Array | None) -> list[jax.Array]:
    """Means of floating arrays that vary over the same axes."""
    n = wire.devices
    seeds = [None if seed is None else fold_in(seed, np.uint32(i)) for i in range(len(leaves) + 1)]
    written = [wire.write(leaf.reshape(-1), s) for leaf, s in zip(leaves, seeds)]
    records = jnp.concatenate(written)
    records = jnp.pad(records, [(0, -len(records) % n), (0, 0)])
    received = wire.exchange(records.reshape(n, -1, wire.record))
    mean = jnp.sum(wire.read(received), axis=0) / n
    to = "invarying" if _is_checked(wire.axis_name) else "varying"
    records = lax.all_gather(wire.write(mean, seeds[-1]), wire.axis_name, tiled=True, to=to)

    means, start = [], 0
    for leaf, own in zip(leaves, written, strict=True):
        part = lax.slice_in_dim(records, start, start + len(own))
        means.append(wire.read(part)[: leaf.size].reshape(leaf.shape).astype(leaf.dtype))
        start += len(own)
    return means


@_pmean.defjvp
def _pmean_jvp(wire, primals, tangents):
    return _pmean(wire, *primals), _exact_pmean(tangents[0], wire.axis_name)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _psum_scatter(wire: Wire, dimension: int, x: jax.Array, seed: jax.Array | None) -> jax.Array:
    """The sum of `x`, in f32; every device gets its part along `dimension`."""
    n = wire.devices
    before, size, after = x.shape[:dimension], x.shape[dimension], x.shape[dimension + 1 :]
    part = (*before, size // n, *after)
    parts = jnp.moveaxis(x.reshape(*before, n, size // n, *after), dimension, 0)
    received = wire.exchange(wire.write(parts.reshape(n, -1), seed))
    return jnp.sum(wire.read(received), axis=0)[: math.prod(part)].reshape(part)


@_psum_scatter.defjvp
def _psum_scatter_jvp(wire, dimension, primals, tangents):
    tangent = _exact_psum_scatter(tangents[0], wire.axis_name, dimension)
    return _psum_scatter(wire, dimension, *primals), tangent


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _all_gather(
    wire: Wire, axis: int, tiled: bool, to: str, x: jax.Array, seed: jax.Array | None
) -> jax.Array:
    records = lax.all_gather(wire.write(x.reshape(-1), seed), wire.axis_name, to=to)
    parts = wire.read(records)[:, : x.size].astype(x.dtype).reshape(-1, *x.shape)
    stacked = jnp.moveaxis(parts, 0, axis)
    return stacked if not tiled else lax.collapse(stacked, axis, axis + 2)


@_all_gather.defjvp
def _all_gather_jvp(wire, axis, tiled, to, primals, tangents):
    tangent = lax.all_gather(tangents[0], wire.axis_name, axis=axis, tiled=tiled, to=to)
    return _all_gather(wire, axis, tiled, to, *primals), tangent


def _exact_pmean(leaves: list[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """``lax.pmean``, with 16-bit arrays summed in f32."""
    means = lax.pmean([_widened(leaf) for leaf in leaves], axis_name) if leaves else []
    return [
        mean.astype(leaf.dtype) if _is_float(leaf) else mean
        for mean, leaf in zip(means, leaves, strict=True)
    ]


def _exact_psum_scatter(x: jax.Array, axis_name: AxisName, dimension: int) -> jax.Array:
    """``lax.psum_scatter``, with 16-bit arrays summed, and returned, in f32."""
    return lax.psum_scatter(_widened(x), axis_name, scatter_dimension=dimension, tiled=True)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if _is_float(x) else x


def _is_float(x: jax.Array) -> bool:
    """Return whether f32 holds the values of `x`."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4


def _is_checked(axis_name: AxisName) -> bool:
    """Return whether ``check_vma`` tracks variation over the axes."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def _mean_at_hand(x: jax.Array, axis_name: AxisName) -> jax.Array | None:
    """The mean over devices of an array known to be the same on all, or empty; otherwise None."""
    if x.size == 0:  # XLA may crash on an empty reduction.
        return jnp.zeros(x.shape, x.dtype)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return x if _is_checked(axis_name) and not varying_axes(x) & set(names) else None


def _check_axis(argument: str, axis: int, ndim: int) -> None:
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{argument}={axis} does not exist: there are {ndim} dimensions, so allowed are "
            f"{-ndim} to {ndim - 1}."
        )
