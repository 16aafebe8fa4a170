"""`ScaledArray`: stored bytes and the scale that gives them their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.scaling import printing
from jfp8.scaling.by_values import ByValues
from jfp8.scaling.casts import straight_through
from jfp8.scaling.codes import codes_to_format, decode, encode
from jfp8.scaling.formats import E8M0FNU, Format, format_of
from jfp8.scaling.parts import apply_scale, index_of_scales, rule_of_scales, split_e8m0
from jfp8.scaling.reshaping import reshaped


@dataclass(frozen=True, eq=False)
class ScaledArray(ByValues):
    """An array in a narrow format together with its scale.

    ``x ~= data * scale``: `scale` multiplies stored bytes to give values (the reciprocal of what
    Transformer Engine, torchao and MS-AMP store).

    Invariants, checked where the array is used (a transformed pytree may hold anything):
      * ``data.dtype`` stores the codes of one `jfp8.Format`;
      * ``scale`` is 0-d, or has ``data.ndim`` dimensions. Element ``i`` of a dimension belongs to
        scale ``i // b``, where ``b`` is the entry of `block`. If `block` is None, ``b = n / m``:
        the number of scales ``m`` must divide the size of the dimension ``n``;
      * ``scale`` is float32, or E8M0FNU, or itself a `ScaledArray` (two-level scales).

    Attributes:
      data: f8 (or f4) array of any shape.
      scale: f32 or e8m0 array, or a `ScaledArray`.
      block: elements that share a scale along each dimension; only needed where the last block of a
        dimension is shorter than the others, ``ceil(n / b) == m``.
      carrier: None, or a floating array of the shape of `data` whose contents are never read: it
        receives the gradient with respect to the values, in its dtype. This makes bytes that were
        gathered from other devices trainable (`jfp8.gather_weights`). Without a carrier, products
        give the array no gradient.

    >>> import jax.numpy as jnp, jfp8
    >>> q = jfp8.quantize(jnp.array([1.0, 2.0, 3.5]))
    >>> q
    ScaledArray(E4M3FN[3], scale 0.007812, values 1 to 3.5)
    >>> q.shape, q.format, q.dequantize()
    ((3,), Format(E4M3FN), Array([1. , 2. , 3.5], dtype=float32))
    """

    data: jax.Array
    scale: jax.Array | ScaledArray
    block: tuple[int, ...] | None = None
    carrier: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the values."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Return float32, the dtype of `dequantize` and ``np.asarray``."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored: data, scales and, if there is one, the carrier."""
        return sum(map(printing.n_bytes, jax.tree.leaves(self)))

    @property
    def format(self) -> Format:
        """Format of the stored data."""
        return format_of(self.data.dtype)

    @property
    def T(self) -> ScaledArray:
        """Return the transpose: dimensions of data and scales in reverse order."""
        return self.transpose()

    def transpose(self, *axes: Any) -> ScaledArray:
        """Permute the dimensions of values and scales by `axes`; default: reverse."""
        order = axes[0] if axes and not isinstance(axes[0], int) else axes
        order = tuple(order) or tuple(reversed(range(self.ndim)))
        move = lambda x: x.transpose(order) if jnp.ndim(_innermost(x)) else x
        block = None if self.block is None else tuple(self.block[d] for d in order)
        carrier = None if self.carrier is None else self.carrier.transpose(order)
        return ScaledArray(self.data.transpose(order), move(self.scale), block, carrier)

    def reshape(self, *shape: Any) -> ScaledArray:
        """Return the same bits in `shape`; ``ValueError`` if blocks would be cut."""
        check_scale_shape(self)
        return reshaped(self, shape if not shape or isinstance(shape[0], int) else shape[0])

    def __getitem__(self, index: Any) -> ScaledArray:
        """Index without a change of bits: anything with one scale, else elements or whole blocks.

        ``q[...]`` is `q`, as NNX requires of parameters.
        """
        if index is Ellipsis:
            return self
        scale, block = self.scale, None
        if scale_shape := jnp.shape(_innermost(scale)):
            check_scale_shape(self)
            at, block = index_of_scales(index, self.shape, scale_shape, self.block)
            scale = scale[at]
        carrier = None if self.carrier is None else self.carrier[index]
        return ScaledArray(self.data[index], scale, block, carrier)

    def __setitem__(self, index: Any, value: Any) -> None:
        instead = "variable.set_value(jfp8.quantize_params({'kernel': new}, recipe)['kernel'])"
        raise TypeError(f"New values need new scales: replace it as a whole, in NNX by {instead}.")

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("A ScaledArray without dimensions has no length.")
        return self.shape[0]

    def __iter__(self) -> Iterator[ScaledArray]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: Any) -> Any:
        """Compare the values element by element; one bool for trees of shapes or shardings."""
        if not isinstance(other, ScaledArray):
            comparable = _has_values(self) and isinstance(other, jax.typing.ArrayLike)
            return super().__eq__(other) if comparable else NotImplemented
        if _has_values(self) and _has_values(other):
            return super().__eq__(other)
        if _has_values(self) or _has_values(other):
            return False
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    def __ne__(self, other: Any) -> Any:
        equal = self.__eq__(other)
        if isinstance(equal, bool):
            return not equal
        return equal if equal is NotImplemented else jnp.logical_not(equal)

    def __repr__(self) -> str:
        """Describe format, shape, scales, and the range of the values where available."""
        q: Any = self.scale
        scale, outer = (q.data, q.scale) if isinstance(q, ScaledArray) else (q, None)
        sizes = None
        if printing.is_arraylike(self.data) and _fits(self):
            sizes = self.block_sizes() if jnp.shape(scale) else ()
        return printing.scaled_array(self.data, scale, outer, sizes, self.carrier)

    def block_sizes(self) -> tuple[int, ...]:
        """Count the elements that share a scale along each dimension; not of a 0-d scale."""
        if self.block is not None:
            return self.block
        shape = jnp.shape(_innermost(self.scale))
        return tuple(n // max(m, 1) for n, m in zip(self.shape, shape, strict=True))

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Return ``data * scale`` in `dtype`; see `jfp8.dequantize`."""
        return dequantize(self, dtype)


# The pytree that `register_dataclass` would make, plus a check of the leaves when it is rebuilt.
_LEAVES = ("data", "scale", "carrier")


def _flatten_with_keys(q: ScaledArray) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    return tuple((jax.tree_util.GetAttrKey(f), getattr(q, f)) for f in _LEAVES), q.block


def _unflatten(block: tuple[int, ...] | None, leaves: Iterable[Any]) -> ScaledArray:
    data, scale, carrier = leaves
    _check_leaves(data, scale)
    return ScaledArray(data, scale, block, carrier)


jax.tree_util.register_pytree_with_keys(ScaledArray, _flatten_with_keys, _unflatten)


def dequantize(q: ScaledArray, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Return the values ``data * scale``, multiplied in f32 and rounded once to `dtype`.

    Exact for E8M0 scales, including f32 subnormals. The gradient is straight-through: the cotangent
    of ``data`` is the values' cotangent, saturated and rounded to the stored format, because JAX
    gives a cotangent the dtype of its primal. The scale gets none. If this rounding is too coarse,
    differentiate `round_to_format` or `scaled_dot_general`. If there is a `ScaledArray.carrier`,
    the cotangent goes there instead, in the carrier's dtype.

    Args:
      q: the array, such as `quantize` returns.
      dtype: floating dtype of the result.

    Returns:
      Array of `dtype` and of ``q.shape``.

    Raises:
      TypeError: `q` is not a `ScaledArray`, its data is not of a known format, or `dtype` is not a
        floating dtype.
      ValueError: the shape of the scale does not fit the shape of the data.

    >>> import jax.numpy as jnp, jfp8
    >>> jfp8.dequantize(jfp8.quantize(jnp.array([1.0, -0.5])), jnp.bfloat16)
    Array([1, -0.5], dtype=bfloat16)
    """
    if not isinstance(q, ScaledArray):
        raise TypeError(f"dequantize takes a ScaledArray, got {type(q).__name__}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating dtype, got {np.dtype(dtype)}.")
    _ = q.format  # raises for data of any other dtype
    check_scale_shape(q)
    scale = q.scale
    if isinstance(scale, ScaledArray):
        scale = dequantize(scale)
    scale = lax.stop_gradient(jnp.asarray(scale))
    if q.carrier is None:
        return _dequantize(np.dtype(dtype), q.block, q.data, scale)
    values = _dequantize(np.dtype(dtype), q.block, lax.stop_gradient(q.data), scale)
    return straight_through(q.carrier, values)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dequantize(
    dtype: np.dtype, block: tuple[int, ...] | None, data: jax.Array, scale: jax.Array
) -> jax.Array:
    q = ScaledArray(data, scale, block)
    values = scaled_values(q)
    if scale.dtype == E8M0FNU.dtype:
        values = _with_subnormal_results(values, data, scale, block)
    return values.astype(dtype)


def _dequantize_fwd(dtype, block, data, scale):
    empty = jnp.zeros((0,), data.dtype)  # remembers the format
    return _dequantize(dtype, block, data, scale), (empty, scale)


def _dequantize_bwd(dtype, block, residuals, ct):
    empty, scale = residuals
    fmt = format_of(empty.dtype)
    ct_data = codes_to_format(encode(ct, fmt), fmt)
    if not jnp.issubdtype(ct_data.dtype, jnp.floating):  # E3M4's bytes have no gradient
        ct_data = np.zeros(ct_data.shape, jax.dtypes.float0)
    return ct_data, jnp.zeros_like(scale)


_dequantize.defvjp(_dequantize_fwd, _dequantize_bwd)


def scaled_values(q: ScaledArray) -> jax.Array:
    """Return ``data * scale`` in f32 arithmetic; some devices flush f32 subnormals to zero."""
    values = decode(q.data)
    for scale in scale_as_f32_pair(q):
        values = apply_scale(values, scale, q.block)
    return values


def _with_subnormal_results(
    values: jax.Array, data: jax.Array, scale: jax.Array, block: tuple[int, ...] | None
) -> jax.Array:
    """Return `values`, with those below 2^-126 built from integers.

    Such a value is ``|data| * 2^(c-127) = k * 2^-149``, where ``k = |data| * 2^(c+22)`` is an
    integer below 2^23, and that integer is its f32 pattern. With codes of 32 and more nothing is
    subnormal: the smallest value of any format, 2^-16, gives 2^-111.
    """
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    small = jnp.minimum(code, np.uint32(31))
    factor = lax.bitcast_convert_type((small + np.uint32(22 + 127)) << 23, jnp.float32)
    factor = jnp.where(code == 255, jnp.nan, factor)
    decoded = decode(data)
    k = apply_scale(jnp.abs(decoded), factor, block)
    subnormal = k < np.float32(2.0**23)
    sign = lax.bitcast_convert_type(decoded, jnp.uint32) & np.uint32(0x80000000)
    pattern = sign | jnp.where(subnormal, k, 0.0).astype(jnp.uint32)
    return jnp.where(subnormal, lax.bitcast_convert_type(pattern, jnp.float32), values)


def scale_as_f32_pair(q: ScaledArray) -> tuple[jax.Array, ...]:
    """Return the scale of `q` as f32 factors to multiply by, one after the other.

    E8M0 scales become two powers of two: 2^-127 alone is an f32 subnormal, which XLA:CPU reads as
    zero, and so is the product of a small code with a small element.
    """
    check_scale_shape(q)
    if isinstance(q.scale, ScaledArray):
        return (dequantize(q.scale),)
    scale = jnp.asarray(q.scale)
    if scale.dtype == E8M0FNU.dtype:
        return split_e8m0(scale)
    return (scale.astype(jnp.float32),)


def check_scale_shape(q: ScaledArray) -> None:
    """Raise unless the scale of `q` is 0-d or fits its data dimension by dimension."""
    shape, scale_shape = jnp.shape(q.data), jnp.shape(_innermost(q.scale))
    if scale_shape and (rule := rule_of_scales(shape, scale_shape, q.block)):
        blocks = "" if q.block is None else f" in blocks of {q.block}"
        raise ValueError(
            f"A ScaledArray with data of shape {shape}{blocks} cannot have a scale of shape "
            f"{scale_shape}: {rule}. (An array that was quantized under jax.vmap has to be used "
            "under jax.vmap.)"
        )


def _has_values(q: Any) -> bool:
    """Return True if `q` is a `ScaledArray` of arrays, not of shapes or other placeholders."""
    return isinstance(q, ScaledArray) and isinstance(q.data, jax.Array | np.ndarray)


def _fits(q: ScaledArray) -> bool:
    """Return whether shapes fit; outside ``vmap``, an array made under it does not fit."""
    try:
        check_scale_shape(q)
    except (ValueError, TypeError):
        return False
    return True


def _innermost(scale: Any) -> Any:
    """Return the scale that varies with the blocks: for two levels, the stored one."""
    return scale.data if isinstance(scale, ScaledArray) else scale


# Arithmetic on the leaves. Data and scale are leaves of a pytree, so that
# ``jax.tree.map(lambda leaf: 2 * leaf, q)`` gives four times the values. This shows only where `q`
# is rebuilt, and only in part: floats wider than the stored ones come from a cast, and while a
# function is traced, arrays know the operation that made them. In eager mode they do not.

# Only a function of leaves does this in FP8: jfp8 decodes values first.
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "pow", "integer_pow", "reduce_sum"})


def _check_leaves(data: Any, scale: Any) -> None:
    """Raise if `data` and `scale` were computed separately from leaves of a `ScaledArray`.

    Placeholders of any type pass, and so do scalars, which may stand for a leaf: a mask, a learning
    rate.
    """
    is_array = isinstance(data, jax.Array | np.ndarray)
    if not is_array or not data.ndim or not jnp.issubdtype(data.dtype, jnp.floating):
        return
    if data.dtype.itemsize > 1:
        raise _refusal("data", f"came back as {printing.array(data)}, not in FP8")
    if not isinstance(scale, jax.Array | np.ndarray):
        return
    if scale.dtype.itemsize == 2 and jnp.issubdtype(scale.dtype, jnp.floating):
        raise _refusal("scale", f"came back as {printing.array(scale)}, not in float32 or E8M0FNU")
    made_by = _primitive_of(data)
    if made_by in _ARITHMETIC and _primitive_of(scale) in _ARITHMETIC:
        raise _refusal("data", f"was computed in FP8, by `{made_by}`, and so was its scale")


def _refusal(name: str, what: str) -> TypeError:
    return TypeError(
        f"The {name} of a ScaledArray {what}: a function of leaves, such as jax.tree.map's, "
        "changed data and scale separately, which does not change the values in the same way. "
        "Pass it the whole array, jax.tree.map(function, tree, is_leaf=jfp8.is_scaled_array), or "
        "values: jfp8.dequantize_tree(tree)."
    )


def _primitive_of(x: Any) -> str | None:
    """Return the operation that made the tracer `x`, such as ``"mul"``; None if unknown."""
    for name in ("val", "primal"):  # the array that `vmap` and `jvp` wrap
        inner = getattr(x, name, None)
        x = inner if isinstance(inner, jax.core.Tracer) else x
    return getattr(getattr(getattr(x, "parent", None), "primitive", None), "name", None)
