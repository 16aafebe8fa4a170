"""Print values in short form: without defaults, and arrays by shape instead of contents.

A ``repr`` may be called anywhere: while JAX traces, on trees that hold shapes, shardings or
placeholders instead of arrays, in a debugger. So nothing here computes with JAX, and anything that
is not an array is named by its type.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jfp8.scaling.formats import E3M4, FORMATS, Format

# The most elements for which `scaled_array` computes the range of values.
_MOST_PRINTED = 1 << 20
_SHORT = {"int": "i", "uint": "u", "float": "f", "bfloat": "bf"}
_FORMAT_NAMES = {np.dtype(fmt.dtype): fmt.name for fmt in FORMATS if fmt.dtype != np.uint8}


def changes(value: Any) -> str:
    """Return a dataclass as the call that makes it: ``DelayedScaling(margin=1)``.

    Fields with their default are left out, and a single one without a default needs no name.
    Formats are spelled ``E4M3FN``, so that the text can be evaluated with the names of `jfp8`.
    """
    fields = [f for f in dataclasses.fields(value) if f.init and f.repr]
    required = [f for f in fields if _default(f) is dataclasses.MISSING]
    parts = []
    for field in fields:
        given, default = getattr(value, field.name), _default(field)
        if default is dataclasses.MISSING or given != default:
            spelled = _spelled(given)
            alone = [field] == required and not field.kw_only
            parts.append(spelled if alone else f"{field.name}={spelled}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _spelled(value: Any) -> str:
    if isinstance(value, Format):
        return value.name
    return repr(str(value)) if isinstance(value, np.dtype) else repr(value)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def listed(items: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """List up to `most` items, and count the others."""
    more = f"{between.rstrip(', ')} and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(items[:most]) + more


def is_arraylike(x: Any) -> bool:
    """Return True if `x` has a shape and a dtype: arrays, tracers, ``jax.ShapeDtypeStruct``."""
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype")


def array(x: Any) -> str:
    """Return ``f32[8,64]``; for anything but an array, its type."""
    if not is_arraylike(x):
        return str(x) if x is None or isinstance(x, (bool, int, float)) else type(x).__name__
    return f"{dtype(x.dtype)}[{','.join(map(str, x.shape))}]"


def dtype(given: Any) -> str:
    """Return ``f32``, ``i32``, ``E4M3FN``: short names of JAX and of formats."""
    if given in _FORMAT_NAMES:
        return _FORMAT_NAMES[np.dtype(given)]
    found = re.fullmatch(r"(u?int|b?float)(\d+)", str(given))
    return _SHORT[found[1]] + found[2] if found else str(given)


def on_host(x: Any) -> np.ndarray | None:
    """Return the contents of an array; None where they need a computation."""
    if isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer) or x.is_deleted() or not x.is_fully_addressable:
            return None
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # random keys
            return None
        return np.asarray(x)
    if isinstance(x, (np.ndarray, np.generic, bool, int, float)):
        return np.asarray(x)
    return None


def number(x: Any) -> str:
    """Return a scalar by its value, if it has one: ``32768``, ``True``; else as `array`."""
    value = on_host(x)
    if value is None or value.ndim or value.dtype == object:
        return array(x)
    if value.dtype.kind in "biu":
        return str(value[()])
    whole = np.isfinite(value) and float(value).is_integer() and abs(float(value)) < 1e15
    return str(int(value)) if whole else f"{float(value):.4g}"


def n_bytes(x: Any) -> int:
    """Count the bytes of an array; 0 of anything else. Formats of 4 bits take a byte, as in JAX."""
    return math.prod(x.shape) * x.dtype.itemsize if is_arraylike(x) else 0


def natural(name: Any) -> str:
    """Return a key to sort by: "Block_10" comes after "Block_2"."""
    return re.sub(r"\d+", lambda n: n[0].zfill(9), str(name))


def si(n: float) -> str:
    """Return a number with a prefix of units, in powers of 1000: ``"1.02 k"``, ``"14 "``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {prefix}"
    return f"{n:.0f} "


def byte_size(n: float) -> str:
    """Return ``"14 B"``, ``"3.4 MB"``."""
    return f"{si(n)}B"


def counted(n: int, what: str) -> str:
    """Return ``"1 product"``, ``"16 products"``."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def tree(x: Any) -> str:
    """Describe a tree in a few words: ``"14 arrays, 3.4 MB"``, and the types of other leaves."""
    leaves = jax.tree.leaves(x)
    if not leaves:
        return "empty"
    arrays = [leaf for leaf in leaves if is_arraylike(leaf)]
    others = sorted({type(leaf).__name__ for leaf in leaves if not is_arraylike(leaf)})
    size = byte_size(sum(map(n_bytes, arrays)))
    return ", ".join([*([f"{counted(len(arrays), 'array')}, {size}"] if arrays else []), *others])


def state_types(x: Any) -> str:
    """Return the named tuples of an optimizer's state that hold something, outermost first.

    ``"LossScaleState(ScaleByAdamState)"`` of ``loss_scale(adam(...))``.
    """
    if not isinstance(x, (tuple, list)) or not jax.tree.leaves(x):
        return ""
    inside = ", ".join(filter(None, (state_types(x[i]) for i in range(len(x)))))
    if not hasattr(x, "_fields"):
        return inside
    return type(x).__name__ + (f"({inside})" if inside else "")


def optimizer_state(x: Any) -> str:
    """Return an optimizer's state by its types and its size."""
    return ": ".join(filter(None, (state_types(x), tree(x))))


def named_state(state: Any) -> str:
    """Return a named tuple with its scalars by value, and what else is in it by type and size."""
    parts = []
    for name, value in zip(type(state)._fields, state, strict=True):
        alone = not isinstance(value, (tuple, list, dict))
        parts.append(f"{name}={number(value) if alone else f'({optimizer_state(value)})'}")
    return f"{type(state).__name__}({', '.join(parts)})"


def scaled_array(
    data: Any, scale: Any, outer: Any, sizes: tuple[int, ...] | None, carrier: Any
) -> str:
    """Return a `ScaledArray`: format, shape, scales, and the range of the values if available.

    `outer` is the scale of scales, or None. `sizes` has the elements that share a scale in each
    dimension, ``()`` if all do; None if `data` and `scale` do not belong together.
    """
    kind = array(data)
    if is_arraylike(data) and data.dtype == E3M4.dtype:
        kind = kind.replace("u8", E3M4.name)
    scales = _host_scales(scale, outer)
    parts = [
        kind,
        _spelled_scale(scale, outer, scales, sizes),
        _spelled_values(data, scales, sizes),
    ]
    if carrier is not None:
        parts.append(f"carrier {array(carrier)}")
    return f"ScaledArray({', '.join(filter(None, parts))})"


def _spelled_scale(
    scale: Any, outer: Any, scales: np.ndarray | None, sizes: tuple[int, ...] | None
) -> str:
    whole = "" if outer is None else f" x {number(outer)}"
    if not is_arraylike(scale) or not scale.shape:
        return f"scale {number(scale)}{whole}"
    text = f"scales {array(scale)}"
    if sizes is not None:
        text += f" for [{','.join(map(str, sizes))}] each"
    return text + (whole if scales is None or not scales.size else f", {_spelled_range(scales)}")


def _spelled_values(data: Any, scales: np.ndarray | None, sizes: tuple[int, ...] | None) -> str:
    codes = on_host(data)
    if codes is None or scales is None or sizes is None:
        return ""
    if not codes.size or codes.size > _MOST_PRINTED:
        return ""
    for axis, b in enumerate(sizes):
        scales = np.repeat(scales, b, axis).take(range(codes.shape[axis]), axis)
    with np.errstate(over="ignore"):
        return f"values {_spelled_range(_decoded(codes) * scales)}"


def _spelled_range(x: np.ndarray) -> str:
    known = x[~np.isnan(x)]
    missing = x.size - known.size
    if not known.size:
        return "all NaN"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    text = f"all {low}" if low == high else f"{low} to {high}"
    return f"{text} and {missing} NaN" if missing else text


def _host_scales(scale: Any, outer: Any) -> np.ndarray | None:
    """Return the scales as f32, None if they are not available."""
    found = on_host(scale)
    if found is None or found.dtype == object:
        return None
    if outer is None:
        return found.astype(np.float32)
    factor = on_host(outer)
    return None if factor is None or factor.ndim else _decoded(found) * factor


def _decoded(data: np.ndarray) -> np.ndarray:
    if data.dtype != E3M4.dtype:
        return data.astype(np.float32)
    pattern = data.astype(np.uint16)
    halves = ((pattern & 0x80) << 8 | (pattern & 0x7F) << 6).view(np.float16)  # see `casts.decode`
    values = halves.astype(np.float32) * np.float32(2.0 ** (15 - E3M4.bias))
    return np.where(data & 0x7F == E3M4.nan_code, np.float32(np.nan), values)
