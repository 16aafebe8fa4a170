"""Quantize a matrix for both directions of contraction in one read, by Pallas kernels.

A tensor is an operand of two matmuls, one of which sums over its rows and one over its columns.
Tensor cores want the contraction last in both, so one takes ``q`` and the other ``q^T``. XLA would
read the tensor for each, and again for its amax; a kernel writes everything from one tile. It may
also cast the tile first, or compute it from others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.operands import Paired
from jfp8.kernels.partitioning import Combine, divided
from jfp8.kernels.scales_in_kernels import scale_and_inverse
from jfp8.matmul.spec import HARDWARE_FORMATS, scale_products
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Context, Current, Delayed, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.codes import codes_to_format
from jfp8.scaling.formats import E8M0FNU
from jfp8.scaling.granularity import Block, ragged_block
from jfp8.scaling.history import AmaxState, history_amax, only_amaxes
from jfp8.scaling.scales import amax, reciprocal, scale_from_amax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Made:
    """A matrix that a kernel may compute while it reads the matrix's inputs."""

    array: jax.Array  # the matrix, [m, n], as computed by XLA
    parts: list[jax.Array]  # each [m, projections, n], the last one of a `Gradient` [m, n]
    # Elementwise function of f32 arrays. Caches identify it by its ``str``.
    make: Callable[..., Any] = field(metadata={"static": True})


def made_of(role: str, x: jax.Array, make: Callable[..., Any], *parts: jax.Array) -> Made:
    """Return the matrix with the rows of `x`; see `Operation.made` for the arguments."""
    kept = (-2, -1) if role == "grad" else (-2,) * len(parts)
    rows = [part.reshape(-1, *part.shape[d:]) for part, d in zip(parts, kept, strict=True)]
    return Made(x.reshape(-1, x.shape[-1]), rows, make if role == "lhs" else Gradient(make))


@dataclass(frozen=True)
class Gradient:
    """The gradients of `make` as a function of its arguments and of a cotangent.

    XLA's may differ in the sign of zeros: JAX sums the gradients of slices of an array.
    """

    make: Callable[..., jax.Array]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        *arguments, cotangent = arrays
        return jax.vjp(self.make, *arguments)[1](cotangent)


Matrix: TypeAlias = jax.Array | Made

# The scales, f32[], of the other operands: in sums over n, and over m. None if they are
# unknown, or are more than one.
Meets: TypeAlias = tuple[jax.Array | None, jax.Array | None]


class BothWays(NamedTuple):
    """A matrix ``x[m, n]``, quantized. Operands are `Paired` if the other scale is known.

    With one scale, `m` may be several dimensions.
    """

    straight: ScaledArray  # [m, n], for sums over n
    transposed: ScaledArray  # [n, m], for sums over m
    amax: jax.Array  # f32[] of x, or of slices of x


def has_kernel(quantizer: Quantizer) -> bool:
    """Return True if a kernel computes the results of `quantizer`, bit for bit."""
    fits = quantizer.block in _BLOCKS
    if quantizer.block is None:
        fits = getattr(quantizer, "scale_rounding", None) in _ROUNDINGS
    is_known = type(quantizer) in _KERNELS and quantizer.fmt in HARDWARE_FORMATS
    return is_known and quantizer.rounding == "nearest_even" and fits


# Kernels are slow to compile, so each is compiled once for all layers of the same shapes.
@partial(jax.jit, static_argnums=(0, 1))
def quantize_both_ways(
    quantizer: Quantizer,
    dtype: np.dtype | None,
    x: Matrix,
    state: AmaxState | None,
    meets: Meets = (None, None),
) -> BothWays:
    """Return `x`, cast to `dtype`, quantized for both directions by a `quantizer` with a kernel."""
    kernel = _KERNELS[type(quantizer)]
    if isinstance(x, Made) and not _makes(quantizer, x, state):
        x = x.array
    if quantizer.block is not None or isinstance(quantizer, Rowwise):
        meets = None, None
    by_kernel = lambda x, state, meets: kernel(quantizer, _read(x, dtype), state, meets)

    def by_quantizer(x, state, meets):
        values = _read(x, dtype).values()
        largest, shape = amax(values), values.shape
        values = values.reshape(-1, shape[-1])

        def along(d, met):
            q = quantizer(values, Context((d,), largest, state))
            factor = None if met is None else scale_products((jnp.asarray(q.scale),), (met,))[0]
            q = q if d else q.T
            q = replace(q, data=q.data.reshape(shape if d else _turned(shape)))
            return q if factor is None else Paired(q.data, q.scale, factor=factor)

        parts = jax.eval_shape(by_kernel, x, state, meets).amax.shape
        largest_of = jnp.broadcast_to(largest, parts)
        return BothWays(along(1, meets[0]), along(0, meets[1]), largest_of)

    return on_platform("cuda", by_kernel, by_quantizer, x, state, meets)


class _Read(NamedTuple):
    """Describe how a kernel reads a matrix."""

    x: Matrix
    arrays: list[jax.Array]  # in memory: [m, n], or [m, projections, n] and maybe [m, n]
    dims: str  # the names of their dimensions, for `divided`
    rows: str  # names of the dimensions m
    columns: str  # names of the columns of the matrix
    what: str  # the options in words, for the name of the kernel
    options: dict[str, Any]  # arguments of the kernel

    def by(self, kernel: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `kernel` as a function of these arrays, and of others."""
        count, of_rows = len(self.arrays), len(self.rows.split())

        def function(*arrays: jax.Array) -> Any:
            x = [a.reshape(-1, *a.shape[of_rows:]) for a in arrays[:count]]
            x = x[0] if count == 1 else x
            return kernel(x, *arrays[count:], **self.options, **options)

        return function

    def values(self) -> jax.Array:
        """Return the matrix as computed by XLA."""
        if isinstance(self.x, Made):
            return self.x.array
        dtype = self.options["dtype"]
        return self.x if dtype is None else self.x.astype(dtype)


def _read(x: Matrix, dtype: np.dtype | None) -> _Read:
    rows = " ".join("i" * d for d in range(1, jnp.ndim(x.array if isinstance(x, Made) else x)))
    if isinstance(x, Made):
        options = f"{x.make} in {x.array.dtype}", {"make": x.make}
        if not isinstance(x.make, Gradient):
            dims = ", ".join([f"{rows} PROJECTION j"] * len(x.parts))
            return _Read(x, x.parts, dims, rows, "j", *options)
        columns = "j" if x.parts[0].shape[-2] == 1 else "PROJECTION j"
        return _Read(x, x.parts, f"{rows} PROJECTION j, {rows} j", rows, columns, *options)
    return _Read(x, [x], f"{rows} j", rows, "j", f"{dtype}", {"dtype": dtype})


def _makes(quantizer: Quantizer, x: Made, state: AmaxState | None) -> bool:
    """Return True if the kernel of `quantizer` can also compute the matrix.

    Not if it needs amaxes beforehand: their input would be read twice. Nor if its blocks
    would cross from one projection into the next.
    """
    if not isinstance(quantizer, Blockwise):  # True if the kernel also computes the amaxes
        return isinstance(quantizer, Unit) or (isinstance(quantizer, Delayed) and state is not None)
    projections, n = x.parts[0].shape[-2:]
    return not isinstance(x.make, Gradient) or projections == 1 or n % quantizer.block_size[0] == 0


# One function for each kind of quantizer that has a kernel. Each returns the quantizer's result,
# bit for bit.


def _unit(quantizer: Unit, read: _Read, _: AmaxState | None, meets: Meets) -> BothWays:
    ones: Any = lambda: (np.float32(1.0),) * 2
    q, q_t, amaxes = _with_one_scale(quantizer, read, {}, ones, meets)
    one = jnp.ones((), jnp.float32)  # by a constant XLA multiplies nothing
    return BothWays(replace(q, scale=one), replace(q_t, scale=one), amaxes)


def _current(quantizer: Current | Delayed, read: _Read, _: Any, meets: Meets) -> BothWays:
    """Quantize by a scale from the matrix's amax, which XLA computes along with the matrix."""
    largest = amax(read.values())
    scale_of = lambda known: _scale(quantizer, known[0])
    return _with_one_scale(quantizer, read, {"ONE": largest.reshape(1)}, scale_of, meets, largest)


def _delayed(quantizer: Delayed, read: _Read, state: AmaxState | None, meets: Meets) -> BothWays:
    from jfp8.kernels.hopper.sweep import largest_of

    if state is None:
        return _current(quantizer, read, None, meets)
    find = partial(found_in, quantizer.algo, read.options.get("dtype"), read.x)
    found = state["found"] if "found" in state else find(state["amax_history"])
    largest = lambda own, found: jnp.maximum(largest_of(found), only_amaxes(own[0]))
    scale_of = lambda *known: _scale(quantizer, largest(*known))
    known = {"ONE": state["amax"].reshape(1), "FOUND": found}
    return _with_one_scale(quantizer, read, known, scale_of, meets)


# Not in `quantize_both_ways`: layers with one input find this once, and so quantize it once.
@partial(jax.jit, static_argnums=(0, 1))
def found_in(algo: str, dtype: np.dtype | None, x: Matrix, history: jax.Array) -> jax.Array:
    """Return the amax that `history` predicts, as bits; if it is empty amaxes of slices of `x`."""
    from jfp8.kernels.hopper import quantize

    def by_kernel(x: Matrix, history: jax.Array) -> jax.Array:
        read, entries = _read(x, dtype), history.size if algo == "max" else 1
        if entries > _LONG:
            history, entries = history_amax(history, algo).reshape(1), 1
        find = read.by(quantize.tensor_amax, entries=entries)
        name = f"tensor_amax, {entries}, {read.what}"
        return divided(name, find, f"{read.dims}, STEP -> FOUND", "max")(*read.arrays, history)

    nothing = lambda x, history: jnp.zeros((quantize.BLOCKS,), jnp.int32)
    return on_platform("cuda", by_kernel, nothing, x, history)


def _scale(quantizer: Current | Delayed, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    rounding, margin = quantizer.scale_rounding, getattr(quantizer, "margin", 0)
    return scale_and_inverse(amax, quantizer.fmt, rounding, margin=margin, poison=False)


def _with_one_scale(
    quantizer: Quantizer,
    read: _Read,
    known: Mapping[str, jax.Array],
    scale_of: Callable[..., tuple[jax.Array, jax.Array]],
    meets: Meets,
    largest: jax.Array | None = None,
) -> BothWays:
    """Quantize by ``scale_of(*known)``, computed inside the kernel.

    Args:
      known: vectors, by the names of their dimensions.
      largest: the amax of the matrix; None if the kernel computes it from its slices.
    """
    from jfp8.kernels.hopper import quantize

    shape = read.values().shape
    others = [scale.reshape(1) for scale in meets if scale is not None]
    kernel = read.by(
        quantize.quantize_tensor,
        fmt=quantizer.fmt,
        scale_of=scale_of,
        with_amax=largest is None,
        meets=len(others),
    )
    ones = ["ONE"] * len(others)
    operands = [read.dims, *known, *ones]
    parts = ["PART"] * (largest is None)  # on several devices, only for the next step's scale
    results = [f"{read.rows} {read.columns}", f"{read.columns} {read.rows}", "ONE", *ones]
    combine: list[Combine] = [*["alike"] * len(results), *["max later"] * len(parts)]
    rule = f"{', '.join(operands)} -> {', '.join([*results, *parts])}"
    name = f"quantize_tensor, {quantizer}, {read.what}"

    def with_rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, q_t, *numbers = kernel(*arrays)
        rows = arrays[0].shape[: len(shape) - 1]
        return q.reshape(*rows, *q.shape[1:]), q_t.reshape(*q_t.shape[:-1], *rows), *numbers

    by_parts = divided(name, with_rows, rule, combine)
    q, q_t, *numbers = by_parts(*read.arrays, *known.values(), *others)
    q, q_t = q.reshape(shape), q_t.reshape(_turned(shape))
    if largest is None:
        largest = lax.bitcast_convert_type(numbers.pop(), jnp.float32)
    # Matmuls reshape their factor, and back. XLA would move this reshape to between the two.
    scale, *factors = lax.optimization_barrier([number.reshape(()) for number in numbers])
    of = [None if met is None else factors.pop(0) for met in meets]
    straight, other = (Paired(x, scale, factor=f) for x, f in zip((q, q_t), of, strict=True))
    return BothWays(straight, other, largest)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[-1:] + shape[:-1]


def _rowwise(quantizer: Rowwise, read: _Read, *_: Any) -> BothWays:
    from jfp8.kernels.hopper import quantize

    name, maximum = f"row_and_column_amax, {read.what}", read.by(quantize.row_and_column_amax)
    maxima = divided(name, maximum, "i j -> i, j", combine="max")(*read.arrays)
    rows, columns = (
        scale_from_amax(m, quantizer.fmt, scale_rounding=quantizer.scale_rounding) for m in maxima
    )
    both = read.by(quantize.quantize_lines, fmt=quantizer.fmt)
    by_lines = divided(f"quantize_lines, {read.what}", both, "i j, i, j -> i j, j i")
    q, q_t = by_lines(*read.arrays, reciprocal(rows), reciprocal(columns))
    straight, other = ScaledArray(q, rows[:, None]), ScaledArray(q_t, columns[:, None])
    return BothWays(straight, other, amax(maxima[0]))


def _blockwise(quantizer: Blockwise, read: _Read, *_: Any) -> BothWays:
    from jfp8.kernels.hopper import quantize

    along, across = quantizer.block_size
    m, n = read.values().shape
    fmt, rounding, columns = quantizer.fmt, quantizer.scale_rounding, read.columns
    how = {"fmt": fmt, "scale_rounding": rounding}
    if across > 1:
        name, kernel = "quantize_tiles", read.by(quantize.quantize_tiles, **how)
        rule = f"{read.dims} -> i {columns}, {columns} i, i/{along} {columns}/{along}"
    else:
        name = f"quantize_rows_in_blocks_{along}"
        kernel = read.by(quantize.quantize_rows_in_blocks, block=along, **how)
        rule = f"{read.dims} -> i {columns}, {columns}/{along} i, {columns} i, i/{along} {columns}"
    found = divided(f"{name}, {rounding}, {read.what}", kernel, rule)(*read.arrays)
    if across > 1:
        q, q_t, s = found
        scales = s.reshape(len(s), -1), s.reshape(len(s), -1).T
    else:
        q, s, q_t, s_t = found
        scales = s.reshape(-1, s.shape[-1]).T, s_t.reshape(len(s_t), -1).T
    q, q_t = q.reshape(m, n), q_t.reshape(n, m)
    if scales[0].dtype == jnp.uint8:
        scales = tuple(codes_to_format(s, E8M0FNU) for s in scales)
    blocks = (ragged_block(Block((across, along)), shape) for shape in ((m, n), (n, m)))
    straight, other = map(ScaledArray, (q, q_t), scales, blocks)
    return BothWays(straight, other, amax(read.values()))


_LONG = 64  # entries of a history; a kernel reads one after the other
_ROUNDINGS = (None, "power_of_two")  # roundings of scales, except block scales
_BLOCKS = {(128, 1), (128, 128), (32, 1)}
_KERNELS: dict[type[Quantizer], Callable[..., BothWays]] = {
    Unit: _unit,
    Current: _current,
    Delayed: _delayed,
    Rowwise: _rowwise,
    Blockwise: _blockwise,
}
