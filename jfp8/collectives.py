"""Means, sums and gathers over devices that send one byte per element.

No collective adds in FP8: 448 + 448 is NaN in E4M3FN, and a ring rounds again at every hop. So a
mean is two exchanges of bytes around a sum in f32, as in an all-reduce of two steps: ::

    device i:   blocks of x_i, quantized  --all_to_all-->  block j of all x_i, on device j
    device j:   y = sum_i decode(x_i[j]) / n in f32, quantized again  --all_gather-->  y

Every element is summed on one device, so that all devices end with the same bits, and each value is
rounded twice, whatever their number. Stopping half-way gives `reduce_scatter`.

What travels is a record for every block of elements: their codes, then the four bytes of their f32
scale. Scales in a collective of their own would be one more to wait for, as long as the codes' own
for all but the largest models; and XLA:CPU widens arrays of f8 types on the wire to 16 bits, but
leaves bytes alone.

Records never cross the border between two arrays, and each array is quantized by itself: a small
gradient does not share a scale with a large one, and no copy of all gradients in f32 is made. An
array so small that its record would be longer than its elements in f32 travels in f32.

Nothing on the wire is multiplied, so that no hardware has to know its format. E4M3FN rounds every
element by at most 1/16 of itself, over a range of 2^18, whatever else is in its block. That is a
noise of -31.5 dB (twice: -28.8 dB) unless a few elements have all the energy, however well blocks
are scaled. `E2M5` has four times finer steps, but rounds to zero what is below 1/504 of the
largest element of its block. The default, `FINEST`, writes every block in the one of the two that
is nearer to it: 40 dB for Gaussian blocks of any magnitudes, and for heavy tails.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling.bits import codes_of, codes_to_format, decode
from jfp8.scaling.casts import ROUNDINGS, Rounding
from jfp8.scaling.formats import E4M3FN, FORMATS, Format
from jfp8.scaling.granularity import Block
from jfp8.scaling.quantization import block_scale, quantize_with_scale
from jfp8.scaling.random_bits import fold_in, hash_bits, seed_of
from jfp8.tracing.compat import varying_axes

__all__ = ["E2M5", "FINEST", "all_gather", "pmean", "reduce_scatter"]

AxisName: TypeAlias = Any
"""What `jax.lax` takes: the name of a mapped axis, or a tuple of several."""

E2M5 = Format("E2M5", np.dtype(np.uint8), 2, 5, 1, 7.75, 0x7E, 0x7F)
"""Two bits of exponent and five of mantissa: -31.5 dB become -43. Only for the wire."""

FINEST: tuple[Format, Format] = (E4M3FN, E2M5)
"""As `fmt` of a collective: the better one for every block."""

MIN_SIZE = 2**12
"""Below 16 KiB of f32, the time of a collective is that of its start, not of its bytes."""

SCALE_BYTES = 4

_ON_WIRE = (*(f for f in FORMATS if f.bits == 8 and f.signed), E2M5)


@dataclass(frozen=True)
class Wire:
    """How the elements of an array are written into records.

    Attributes:
      axis_name: the devices that take part.
      fmt: format of the codes, of 8 bits; of two, every block is written in the one that is nearer
        to it, and the sign of its scale tells which: that of the second is negative.
      block: elements in a record; they share a scale.
      rounding: see `jfp8.cast`.
    """

    axis_name: AxisName
    fmt: Format | tuple[Format, Format] = FINEST
    block: int = 128
    rounding: Rounding = "nearest_even"

    def __post_init__(self) -> None:
        formats = self.formats
        if len(formats) not in (1, 2) or not all(
            isinstance(f, Format) and f in _ON_WIRE for f in formats
        ):
            allowed = ", ".join(f.name for f in _ON_WIRE)
            raise TypeError(
                f"fmt must be a format of one byte with a sign, one of {allowed}, or two of them; "
                f"got {self.fmt!r}. A collective sends whole bytes."
            )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(
                f"block={self.block!r} must be a positive int: the number of elements that share "
                "a scale, for example 128."
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding={self.rounding!r} is unknown. Allowed: {', '.join(ROUNDINGS)}."
            )

    @property
    def formats(self) -> tuple[Format, ...]:
        """`fmt` as a tuple."""
        return self.fmt if isinstance(self.fmt, tuple) else (self.fmt,)

    @property
    def devices(self) -> int:
        """How many devices take part."""
        return lax.axis_size(self.axis_name)

    @property
    def record(self) -> int:
        """Bytes in a record."""
        return self.block + SCALE_BYTES

    def pays(self, sizes: list[int], multiple: int = 1) -> bool:
        """Whether arrays of `sizes`, in a multiple of some number of records, are below f32."""
        records = sum(-(-size // self.block) for size in sizes)
        return -(-records // multiple) * multiple * self.record < 4 * sum(sizes)

    def seed(self, key: jax.Array | None) -> jax.Array | None:
        """Another seed on every device, if the rounding needs any: uint32[2]."""
        if self.rounding != "stochastic":
            return None
        if key is None:
            raise ValueError(
                "rounding='stochastic' needs random bits, but key is None. Pass "
                "key=jax.random.key(seed), a new one for every call and the same on all devices."
            )
        return fold_in(seed_of(key), lax.axis_index(self.axis_name).astype(jnp.uint32))

    def write(self, x: jax.Array, seed: jax.Array | None) -> jax.Array:
        """The records of `x`, float[..., k]: uint8[..., ceil(k / block), record]."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.block)])
        x = x.reshape(*x.shape[:-1], -1, self.block)
        bits = None if seed is None else hash_bits(seed, x.shape)
        codes, scale = self._codes(x, self.formats[0], self.rounding, bits)
        for other in self.formats[1:]:
            other_codes, other_scale = self._codes(x, other, self.rounding, bits)
            nearer = self._error(x, other) < self._error(x, self.formats[0])
            codes = jnp.where(nearer, other_codes, codes)
            scale = jnp.where(nearer, -other_scale, scale)
        scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8)[..., 0, :]
        return jnp.concatenate([codes, scale_bytes], axis=-1)

    def _codes(
        self, x: jax.Array, fmt: Format, rounding: str, bits: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Codes of x, float[..., block], and its scale, f32[..., 1]."""
        # A block with an Inf or a NaN becomes NaN, by its scale, and so does what it is added to.
        scale, _, inverse = block_scale(x, fmt, Block((self.block,)))
        q = quantize_with_scale(x, scale, fmt, rounding, bits, inverse=inverse)
        return codes_of(q.data), scale

    def _error(self, x: jax.Array, fmt: Format) -> jax.Array:
        """Squares of what rounding x, float[..., block], to nearest loses: f32[..., 1].

        In units of the largest element, so that none underflows. Stochastic rounding goes by it,
        too: a choice that knew what was drawn would be biased.
        """
        codes, scale = self._codes(x, fmt, "nearest_even", None)
        largest = scale * np.float32(fmt.max)
        error = _values(codes, fmt) / np.float32(fmt.max) - x.astype(jnp.float32) / largest
        return jnp.sum(error * error, axis=-1, keepdims=True)

    def read(self, records: jax.Array) -> jax.Array:
        """The values of uint8[..., records, record]: f32[..., records * block]."""
        codes, scale_bytes = records[..., : self.block], records[..., self.block :]
        scale = lax.bitcast_convert_type(scale_bytes, jnp.float32)[..., None]
        values = _values(codes, self.formats[0])
        for other in self.formats[1:]:
            values = jnp.where(scale < 0, _values(codes, other), values)
        return (values * jnp.abs(scale)).reshape(*records.shape[:-2], -1)

    def exchange(self, records: jax.Array) -> jax.Array:
        """Part ``j`` of uint8[devices, ...] goes to device ``j``; what came from all, in order."""
        return lax.all_to_all(records, self.axis_name, 0, 0, tiled=True)


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

    Every device gets the same bits. An Inf or a NaN on one of them makes its block NaN on all. In
    ``jax.shard_map``, with ``check_vma`` or without, and wherever else axes have names. With
    ``check_vma`` the result does not vary over `axis_name`, so that it fits ``out_specs=P()``.

    To have something to average, differentiate on every device by itself. With ``check_vma``, JAX
    sums the gradient by parameters that do not vary over `axis_name` by itself, in f32; make
    them vary first: ``jax.lax.pcast(params, axis_name, to="varying")``. (`jfp8.data_parallel` does
    so.) What does not vary is its own mean: it is returned as it is.

    The derivatives are those of ``jax.lax.pmean``, straight through the rounding.

    Args:
      tree: arrays of any shapes. Arrays that are not floating, or of 64 bits, and those of at most
        ``block / 4`` elements or so are left to ``jax.lax.pmean``.
      axis_name: one name, or a tuple of names.
      fmt: format on the wire, of 8 bits: one of `jfp8.formats`, `E2M5`, or two, such as `FINEST`.
      block: elements that share a scale; ``4 / block`` bytes per element more on the wire.
      rounding: see `jfp8.cast`. Rounded to nearest, the mean is off by half a step at most in
        either rounding; ``"stochastic"`` is right on average over draws instead.
      key: JAX random key for ``"stochastic"``, the same on all devices.
      min_size: with fewer elements than that in all, ``jax.lax.pmean`` in f32 is used for all.

    Returns:
      Arrays of the shapes and dtypes of `tree`; sums are in f32.

    Raises:
      TypeError: `fmt` is no format of 8 bits.
      ValueError: unknown `rounding`, a bad `block`, or stochastic rounding without `key`.

    References:
      ZeRO++, arXiv 2306.10209, section 4.3 (quantized gradient reduction by all-to-all); FP8-LM,
      arXiv 2310.18313, section 2.1, for what it replaces: sums in FP8 with one scale per tensor.

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

    # Arrays that vary over different axes of the mesh must not be mixed: their means would, too.
    groups = defaultdict(list)
    for i, leaf in enumerate(leaves):
        if result[i] is None and _is_float(leaf) and wire.pays([leaf.size]):
            groups[varying_axes(leaf)].append(i)
    total = sum(leaves[i].size for members in groups.values() for i in members)
    for members in groups.values():
        sizes = [leaves[i].size for i in members]
        if total >= min_size and wire.devices > 1 and wire.pays(sizes, wire.devices):
            means = _pmean(wire, [leaves[i] for i in members], seed)
            for i, mean in zip(members, means, strict=True):
                result[i] = mean
    rest = [i for i, mean in enumerate(result) if mean is None]
    for i, mean in zip(rest, _exact_pmean([leaves[i] for i in rest], axis_name), strict=True):
        result[i] = mean
    return jax.tree.unflatten(structure, result)


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

    The first half of `pmean`: every device gets its part of the sum, in f32 until the dtype of `x`,
    so that each value is rounded once. An Inf or a NaN makes its block NaN. The derivatives are
    those of ``jax.lax.psum_scatter``: cotangents are gathered in their own dtype.

    Args:
      x: array, a gradient for example.
      axis_name: one name, or a tuple of names.
      scatter_dimension: dimension of `x` that is divided among the devices.
      mean: divide the sum by the number of devices.
      fmt, block, rounding, key: as for `pmean`.
      min_size: with fewer elements than that, ``jax.lax.psum_scatter`` in f32 is used; also for
        arrays that are not floating.

    Returns:
      Array of the dtype of `x`, and of its shape but for `scatter_dimension`, of which a device
      gets one part of as many as there are devices.

    Raises:
      TypeError, ValueError: as for `pmean`; also if the devices do not divide `scatter_dimension`.

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
            "dimension, or pad it."
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
    also of its own part. An Inf or a NaN makes its block NaN. The derivatives are those of
    ``jax.lax.all_gather``: cotangents are summed and scattered in their own dtype.

    Args:
      x: array, of the same shape on all devices.
      axis_name: one name, or a tuple of names.
      axis: where the parts are put: along this dimension of `x` if `tiled`, else along a new one.
      tiled: concatenate the parts, rather than stack them.
      to: as for ``jax.lax.all_gather``: ``"invarying"`` for what ``check_vma`` is to know as the
        same on all devices.
      fmt, block, rounding, key: as for `pmean`.
      min_size: an `x` of fewer elements than that is gathered as it is; also if it is not floating.

    Returns:
      Array of the dtype of `x`.

    Raises:
      TypeError, ValueError: as for `pmean`; also if there is no such `axis`.

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
        to = "varying"  # Nobody keeps account of it, and vmap refuses anything else.
    axis = axis % ndim
    if wire.devices > 1 and x.size >= min_size and _is_float(x) and wire.pays([x.size]):
        return _all_gather(wire, axis, tiled, to, x, seed)
    return lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to=to)


def _values(codes: jax.Array, fmt: Format) -> jax.Array:
    """f32 values of ``uint8`` codes."""
    if fmt is not E2M5:
        return decode(codes_to_format(codes, fmt))
    magnitude = codes & np.uint8(0x7F)
    exponent, mantissa = magnitude >> 5, (magnitude & np.uint8(31)).astype(jnp.uint32)
    # In steps of 2^-5: subnormals below 32, then 32 of them for each power of two.
    hidden = (mantissa + np.uint32(32)) << (jnp.maximum(exponent, 1) - 1).astype(jnp.uint32)
    steps = jnp.where(exponent == 0, mantissa, hidden)
    values = steps.astype(jnp.float32) * np.float32(1 / 32)
    values = jnp.where(magnitude == fmt.nan_code, jnp.nan, values)
    return jnp.where(codes > magnitude, -values, values)


# The functions below have the derivatives of what they approximate. Where these send cotangents,
# JAX knows the transposes, with check_vma and without.


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
    """The sum of `x`, in f32, of which every device gets its part of `dimension`."""
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
    """Whether f32 holds the values of `x`."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4


def _is_checked(axis_name: AxisName) -> bool:
    """Whether ``check_vma`` keeps account of what varies over the axes."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def _mean_at_hand(x: jax.Array, axis_name: AxisName) -> jax.Array | None:
    """The mean over devices of what is known to be the same on all, or empty; None of all else."""
    if x.size == 0:  # XLA may crash on a reduction of nothing.
        return jnp.zeros(x.shape, x.dtype)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return x if _is_checked(axis_name) and not varying_axes(x) & set(names) else None


def _check_axis(argument: str, axis: int, ndim: int) -> None:
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{argument}={axis} does not exist: there are {ndim} dimensions, so allowed are "
            f"{-ndim} to {ndim - 1}."
        )
