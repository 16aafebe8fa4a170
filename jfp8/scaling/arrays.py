"""`ScaledArray`: stored bytes and the scale that gives them their values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax import lax

from jfp8.scaling import printing
from jfp8.scaling.casts import codes_to_format, decode, encode, straight_through
from jfp8.scaling.formats import E3M4, E8M0FNU, Format, format_of

# Elements of which `repr` computes the values.
_MOST_PRINTED = 1 << 20


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale", "carrier"],
    meta_fields=["block"],
)
@dataclass(frozen=True)
class ScaledArray:
    """An array in a narrow format together with its scale.

    ``x ~= data * scale``: `scale` multiplies stored bytes to give values (the reciprocal of what
    Transformer Engine, torchao and MS-AMP store).

    Invariants, checked where the array is used (a transformed pytree may hold anything):
      * ``data.dtype`` stores the codes of one `jfp8.Format`;
      * ``scale`` is 0-d, or has ``data.ndim`` dimensions. Element ``i`` of a dimension belongs to
        scale ``i // b``, where ``b`` is the entry of `block`, or ``n / m`` if `block` is None: the
        ``m`` scales of a dimension of size ``n`` then have to divide it;
      * ``scale`` is float32, or E8M0FNU, or itself a `ScaledArray` (two-level scales).

    Attributes:
      data: f8 (or f4) array of any shape.
      scale: f32 or e8m0 array, or a `ScaledArray`.
      block: elements that share a scale, for each dimension; only needed where the last block of a
        dimension is shorter than the others, ``ceil(n / b) == m``.
      carrier: None, or a floating array of the shape of `data` that nobody reads: the gradient by
        the values goes to it, in its dtype. So bytes that were gathered from other devices can be
        trained (`jfp8.gather_weights`). Products give an array without it no gradient.

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
    def format(self) -> Format:
        """Format of the stored data."""
        return format_of(self.data.dtype)

    def __getitem__(self, index: Any) -> ScaledArray:
        """``q[...]`` is `q`, which NNX asks of parameters. Parts may cut blocks: there are none."""
        if index is not Ellipsis:
            raise TypeError(
                "A ScaledArray has no parts, since blocks of elements share a scale: take those of "
                "its values, q.dequantize()[...]."
            )
        return self

    def __repr__(self) -> str:
        """Format, shape, scales, and the range of the values where there are any to look at."""
        data = printing.array(self.data)
        if printing.is_arraylike(self.data) and self.data.dtype == E3M4.dtype:
            data = data.replace("u8", E3M4.name)
        parts = [data, _spelled_scale(self), _spelled_values(self)]
        if self.carrier is not None:
            parts.append(f"carrier {printing.array(self.carrier)}")
        return f"ScaledArray({', '.join(filter(None, parts))})"

    def block_sizes(self) -> tuple[int, ...]:
        """Elements that share a scale, for each dimension; the scale must not be 0-d."""
        if self.block is not None:
            return self.block
        shape = jnp.shape(_innermost(self.scale))
        return tuple(n // max(m, 1) for n, m in zip(self.shape, shape, strict=True))

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """``data * scale`` in `dtype`; see `jfp8.dequantize`."""
        return dequantize(self, dtype)


def is_scaled_array(node: Any) -> bool:
    """For trees in which a `ScaledArray` counts as one leaf: ``is_leaf=is_scaled_array``."""
    return isinstance(node, ScaledArray)


def dequantize(q: ScaledArray, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """The values ``data * scale``, multiplied in f32 and rounded once to `dtype`.

    Exact for E8M0 scales, f32 subnormals included. The gradient is straight-through: the cotangent
    of ``data`` is that of the values, saturated and rounded to the stored format, because JAX gives
    a cotangent the dtype of its primal. The scale gets none. Differentiate `round_to_format` or
    `scaled_dot_general` where that is too coarse. If there is a `ScaledArray.carrier`, the
    cotangent goes there instead, as it is.

    Args:
      q: what `quantize` returned.
      dtype: floating dtype of the result.

    Returns:
      Array of `dtype` and of ``q.shape``.

    Raises:
      TypeError: `q` is no `ScaledArray`, its data is not of a known format, or `dtype` is not a
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
    """``data * scale`` in f32 arithmetic, which takes f32 subnormals for zero on some devices."""
    values = decode(q.data)
    for scale in scale_as_f32_pair(q):
        values = apply_scale(values, scale, q.block)
    return values


def _with_subnormal_results(
    values: jax.Array, data: jax.Array, scale: jax.Array, block: tuple[int, ...] | None
) -> jax.Array:
    """`values`, with those below 2^-126 put together from integers.

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
    """The scale of `q` as f32 factors to multiply by, one after the other.

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


def split_e8m0(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """2^(c-127) = 2^a * 2^b with both factors normal; code 255 gives NaN."""
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    half = code >> 1  # c - 127 = (half - 63) + (code - half - 64)
    first = lax.bitcast_convert_type((half + np.uint32(64)) << 23, jnp.float32)
    second = lax.bitcast_convert_type((code - half + np.uint32(63)) << 23, jnp.float32)
    # XLA:CPU multiplies constant factors with each other first; the barrier keeps it from that.
    return lax.optimization_barrier((jnp.where(code == 255, jnp.nan, first), second))


def check_scale_shape(q: ScaledArray) -> None:
    """Raise unless the scale of `q` is 0-d or fits its data dimension by dimension."""
    shape, scale_shape = jnp.shape(q.data), jnp.shape(_innermost(q.scale))
    if not scale_shape:
        return
    if q.block is None:
        fits = len(scale_shape) == len(shape) and not any(
            n % m if m else n for m, n in zip(scale_shape, shape, strict=True)
        )
        rule = "the scale must be 0-d, or have as many dimensions as the data, each dividing the "
        rule += "data's"
    else:
        fits = len(q.block) == len(shape) and scale_shape == tuple(
            -(-n // b) for n, b in zip(shape, q.block, strict=True)
        )
        rule = "each dimension needs ceil(size / block) scales"
    if not fits:
        blocks = "" if q.block is None else f" in blocks of {q.block}"
        raise ValueError(
            f"A ScaledArray with data of shape {shape}{blocks} cannot have a scale of shape "
            f"{scale_shape}: {rule}. (An array that was quantized under jax.vmap has to be used "
            "under jax.vmap.)"
        )


def _innermost(scale: Any) -> Any:
    """The scale that varies with the blocks: of two levels the stored one."""
    return scale.data if isinstance(scale, ScaledArray) else scale


def apply_scale(
    values: jax.Array, scale: jax.Array, block: tuple[int, ...] | None = None
) -> jax.Array:
    """``values * scale`` with each scale element covering its block of `values`."""
    if scale.ndim == 0 or all(m in (1, n) for m, n in zip(scale.shape, values.shape, strict=True)):
        return values * scale
    if block is not None:
        return values * expand_scale(scale, values.shape, block)
    blocked, expanded = [], []
    for n, m in zip(values.shape, scale.shape, strict=True):
        blocked += [m, n // max(m, 1)]
        expanded += [m, 1]
    return (values.reshape(blocked) * scale.reshape(expanded)).reshape(values.shape)


def expand_scale(
    scale: jax.Array, shape: tuple[int, ...], block: tuple[int, ...] | None
) -> jax.Array:
    """A scale of ``len(shape)`` dimensions, with blocks of several elements spelled out.

    Dimensions over which it does not vary keep the size 1.
    """
    for axis, n in enumerate(shape):
        m = scale.shape[axis]
        if m not in (1, n):
            b = n // m if block is None else block[axis]
            scale = lax.slice_in_dim(jnp.repeat(scale, b, axis=axis), 0, n, axis=axis)
    return scale


# Printing: numpy, since JAX would trace what is computed while it traces something else.


def _spelled_scale(q: ScaledArray) -> str:
    inner = _innermost(q.scale)
    whole = f" x {printing.number(q.scale.scale)}" if isinstance(q.scale, ScaledArray) else ""
    if not printing.is_arraylike(inner) or not inner.shape:
        return f"scale {printing.number(inner)}{whole}"
    text = f"scales {printing.array(inner)}"
    if _fits(q):
        text += f" for [{','.join(map(str, q.block_sizes()))}] each"
    values = _host_scale(q)
    if values is None or not values.size:
        return text + whole
    return f"{text}, {_spelled_range(values)}"


def _spelled_values(q: ScaledArray) -> str:
    data, scale = printing.on_host(q.data), _host_scale(q)
    if data is None or scale is None or not data.size or data.size > _MOST_PRINTED or not _fits(q):
        return ""
    for axis, b in enumerate(q.block_sizes() if scale.ndim else ()):
        scale = np.repeat(scale, b, axis).take(range(data.shape[axis]), axis)
    with np.errstate(over="ignore"):
        return f"values {_spelled_range(_decoded_on_host(data) * scale)}"


def _spelled_range(x: np.ndarray) -> str:
    known = x[~np.isnan(x)]
    missing = x.size - known.size
    if not known.size:
        return "all NaN"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    text = f"all {low}" if low == high else f"{low} to {high}"
    return f"{text} and {missing} NaN" if missing else text


def _fits(q: ScaledArray) -> bool:
    """Whether the shapes belong together. (Of an array made under vmap they do not, outside.)"""
    if not printing.is_arraylike(q.data):
        return False
    try:
        check_scale_shape(q)
    except (ValueError, TypeError):
        return False
    return True


def _host_scale(q: ScaledArray) -> np.ndarray | None:
    """The scales as f32, None if they are not at hand."""
    scale = q.scale
    if isinstance(scale, ScaledArray):
        data, outer = printing.on_host(scale.data), printing.on_host(scale.scale)
        if data is None or outer is None or outer.ndim:
            return None
        return _decoded_on_host(data) * outer
    found = printing.on_host(scale)
    return None if found is None or found.dtype == object else found.astype(np.float32)


def _decoded_on_host(data: np.ndarray) -> np.ndarray:
    if data.dtype != E3M4.dtype:
        return data.astype(np.float32)
    pattern = data.astype(np.uint16)
    halves = ((pattern & 0x80) << 8 | (pattern & 0x7F) << 6).view(np.float16)  # see `decode`
    values = halves.astype(np.float32) * np.float32(2.0 ** (15 - E3M4.bias))
    return np.where(data & 0x7F == E3M4.nan_code, np.float32(np.nan), values)


# Flax's own serialization (msgpack) knows arrays and the containers registered with it.


def _to_state_dict(q: ScaledArray) -> dict[str, Any]:
    # With the block, a checkpoint can be read without a target that knows it.
    block = {} if q.block is None else {"block": np.asarray(q.block, np.int32)}
    return {"data": q.data, "scale": serialization.to_state_dict(q.scale), **block}


def _from_state_dict(q: ScaledArray, state: dict[str, Any]) -> ScaledArray:
    block = tuple(np.asarray(state["block"]).tolist()) if "block" in state else q.block
    if block != q.block:
        raise ValueError(
            f"The checkpoint has a ScaledArray in blocks of {block}, the target one in blocks of "
            f"{q.block}, so that scales would belong to other elements. Restore into a target with "
            "the same recipe and optimizer, and dequantize()."
        )
    scale: Any = serialization.from_state_dict(q.scale, state["scale"], name="scale")
    return replace(q, data=state["data"], scale=scale)


serialization.register_serialization_state(ScaledArray, _to_state_dict, _from_state_dict)
