"""One array of a checkpoint, in the form and the dtype that the target keeps it in. ::

    plain array        f32, bf16, f16, integers, random keys
    `ScaledArray`      FP8 parameters, moments in `Blocks`
    `HalfArray`        moments in `ScaledFloat16`
    `ExpandedArray`    moments in ``Blocks(transform="expand")``

The form of both sides follows from their structure: in a state dict ``{"data", "scale"}`` and
``{"data", "amax", "power"}`` stand for one array each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.tree import Path, described
from jfp8.optim.blocks import Blocks, ExpandedArray
from jfp8.optim.storage import HalfArray, ScaledFloat16
from jfp8.optim.stored_state import is_stored
from jfp8.scaling.arrays import ScaledArray, check_scale_shape
from jfp8.scaling.formats import E8M0FNU, FORMATS, format_of
from jfp8.scaling.granularity import Block, ragged_block
from jfp8.scaling.quantization import quantize, quantize_with_scale, two_level_scale
from jfp8.scaling.scales import amax

_DATA = tuple(fmt.dtype for fmt in FORMATS if fmt is not E8M0FNU)


def fitted(target: Any, saved: Any, path: Path, log: Log) -> Any:
    """`saved` as the target keeps it.

    Args:
      target: a leaf of the target: an array or its shape, one of the forms above, a number.
      saved: what a checkpoint has in its place: an array, one of the forms above, or its fields.
      path: of the leaf.
      log: is told what was changed, if anything was.

    Returns:
      A leaf of the type, shape and dtype of `target`, on its devices.

    Raises:
      ValueError: it cannot be made to fit; the message says why, not where.
    """
    saved = stored_form(saved)
    if is_stored(target):
        if _same_form(target, saved):
            return _moved(target, saved)
        values = decoded(saved, path, log) if is_stored(saved) else _floats(target, saved)
        _check_shape(target, values)
        if is_stored(saved):
            log.change(f"Arrays saved as {_kind(saved)} are stored as {_kind(target)}", path)
        else:
            given = np.asarray(saved).dtype
            log.change(f"Arrays saved in {given} are stored as {_kind(target)}", path)
        return _moved(target, encoded(target, values, path, log))
    if is_stored(saved):
        if not hasattr(target, "dtype") or not _is_wide_float(target.dtype):
            raise ValueError(f"the target has {described(target)}, the checkpoint {_kind(saved)}")
        values = decoded(saved, path, log)
        _check_shape(target, values)
        log.change(f"Arrays saved as {_kind(saved)} become {target.dtype}", path)
        return placed(np.asarray(values).astype(target.dtype), target)
    return _plain(target, saved, path, log)


def floats(saved: Any, path: Path, log: Log) -> np.ndarray:
    """The f32 values of an array of a checkpoint, whatever its form."""
    saved = stored_form(saved)
    return np.asarray(decoded(saved, path, log) if is_stored(saved) else saved, np.float32)


def stored_form(saved: Any) -> Any:
    """`saved` as what it was before it became a state dict; as it is if it was no dict.

    Raises:
      ValueError: a dict that stands for no array, or for one whose parts do not fit.
    """
    if not isinstance(saved, dict):
        return saved
    found = from_fields(saved)
    if found is None:
        raise ValueError(f"the target has an array here, the checkpoint {described(saved)}")
    if isinstance(found, ScaledArray):
        check_scale_shape(found)
    return found


def from_fields(node: Any) -> Any:
    """The stored array whose state dict `node` is; None if it is that of none."""
    if not isinstance(node, dict) or "data" not in node:
        return None
    dtype = {name: getattr(leaf, "dtype", None) for name, leaf in node.items()}
    fields = set(node)
    if fields == {"data", "amax", "power"} and dtype["data"] in _DATA:
        if dtype["amax"] == dtype["power"] == jnp.bfloat16:
            return ExpandedArray(node["data"], node["amax"], node["power"])
    if fields == {"data", "scale"} and dtype["data"] == jnp.float16:
        if dtype["scale"] == jnp.float32 and node["scale"].ndim == 0:
            return HalfArray(node["data"], node["scale"])
    if fields in ({"data", "scale"}, {"data", "scale", "block"}) and dtype["data"] in _DATA:
        scale = from_fields(node["scale"]) if dtype["scale"] is None else node["scale"]
        inner = scale.scale if isinstance(scale, ScaledArray) else scale
        if getattr(inner, "dtype", None) in (jnp.float32, E8M0FNU.dtype):
            return ScaledArray(node["data"], scale, _block(node.get("block")))
    return None


def _block(block: Any) -> tuple[int, ...] | None:
    if block is None:
        return None
    sizes = np.asarray(block)
    if sizes.dtype.kind not in "iu" or sizes.ndim != 1 or not np.all(sizes > 0):
        raise ValueError(f"blocks of an array are {described(sizes)}, not sizes above 0")
    return tuple(sizes.tolist())


def decoded(saved: Any, path: Path, log: Log) -> jax.Array:
    """The f32 values that a stored array stands for."""
    if isinstance(saved, HalfArray):
        return ScaledFloat16().decode(_on_device(saved))
    if isinstance(saved, ExpandedArray):
        block = _only_block(saved, path, log)
        storage = Blocks(format_of(saved.data.dtype), block, transform="expand")
        return storage.decode(_on_device(saved))
    return _on_device(replace(saved, carrier=None)).dequantize()


def encoded(target: Any, values: jax.typing.ArrayLike, path: Path, log: Log) -> Any:
    """f32 `values` in the form of `target`, rounded to nearest."""
    x = jnp.asarray(values, jnp.float32)
    if isinstance(target, HalfArray):
        return ScaledFloat16().encode(x, jnp.zeros((2,), jnp.uint32))
    if isinstance(target, ExpandedArray):
        block = _only_block(target, path, log)
        storage = Blocks(format_of(target.data.dtype), block, transform="expand")
        return storage.encode(x, jnp.zeros((2,), jnp.uint32))
    q = _quantized(target, x)
    return replace(q, block=target.block)


def _quantized(target: ScaledArray, values: jax.Array) -> ScaledArray:
    fmt, scale = format_of(target.data.dtype), target.scale
    if isinstance(scale, ScaledArray):
        if jnp.shape(scale.scale) or len(scale.shape) != len(target.shape):
            raise ValueError(
                f"the target keeps {_kind(target)} for several layers at once, each with a scale "
                "of its own. Restore into the original parameters, and quantize those: "
                "jfp8.quantize_params(params, recipe, stacked=...)"
            )
        granularity = Block(tuple(max(b, 1) for b in target.block_sizes()))
        scales, inverse = two_level_scale(
            amax(values, granularity), fmt, format_of(scale.data.dtype)
        )
        block = ragged_block(granularity, values.shape)
        return quantize_with_scale(values, scales, fmt, block=block, inverse=inverse)
    rounding = "rceil" if scale.dtype == E8M0FNU.dtype else _f32_rounding(scale)
    if not scale.shape:
        return quantize(values, fmt, scale_rounding=rounding)
    granularity = Block(tuple(max(b, 1) for b in target.block_sizes()))
    return quantize(values, fmt, granularity=granularity, scale_rounding=rounding)


def _f32_rounding(scale: Any) -> Any:
    """Scales that are all powers of two are so on purpose; of shapes alone nobody knows."""
    if isinstance(scale, jax.ShapeDtypeStruct):
        return None
    mantissas, _ = np.frexp(np.asarray(scale))
    return "power_of_two" if np.all(mantissas == 0.5) else None


def _only_block(stored: ExpandedArray, path: Path, log: Log) -> int | None:
    """Elements of a block of an array that does not say it: scales alone have to tell.

    The size of the dimension divided by the number of scales, or the only power of two that gives
    as many scales.
    """
    shape, scales = tuple(stored.data.shape), tuple(stored.amax.shape)
    if not scales:
        return None
    if scales[:-1] != shape[:-1] or stored.power.shape != scales or len(scales) != len(shape):
        raise ValueError(f"data of shape {shape} cannot have an amax of shape {scales}")
    n, m = shape[-1], scales[-1]
    if n == 0 or m == 1:
        return max(n, 1)
    possible = {n // m} if m and n % m == 0 else set()
    possible |= {1 << i for i in range(n.bit_length()) if -(-n // (1 << i)) == m}
    if len(possible) != 1:
        choices = " or ".join(map(str, sorted(possible))) or "no number"
        raise ValueError(
            f"{m} scales for {n} elements are those of blocks of {choices}, and a checkpoint does "
            "not say which. Restore into a target with the optimizer that was saved, and decode "
            "the moments by its storage: Blocks(block=..., transform='expand').decode(moment)"
        )
    (block,) = possible
    log.change(f"Moments are taken to be in blocks of {block}", path)
    return block


def _same_form(target: Any, saved: Any) -> bool:
    """Whether `saved` can be taken as it is, bit for bit."""
    if type(target) is not type(saved):
        return False
    if not isinstance(target, ScaledArray):
        return all(map(_alike, target, saved))
    if target.block != saved.block or not _alike(target.data, saved.data):
        return False
    if isinstance(target.scale, ScaledArray) or isinstance(saved.scale, ScaledArray):
        return _same_form(target.scale, saved.scale)
    return _alike(target.scale, saved.scale)


def _alike(target: Any, saved: Any) -> bool:
    return target.shape == saved.shape and target.dtype == saved.dtype


def _moved(target: Any, stored: Any) -> Any:
    """`stored`, of the form of `target`, on its devices."""
    if isinstance(stored, ScaledArray):
        scale = stored.scale
        moved = _moved if isinstance(scale, ScaledArray) else lambda t, s: placed(s, t)
        return replace(
            stored,
            data=placed(stored.data, target.data),
            scale=moved(target.scale, scale),
            carrier=None,
        )
    return type(stored)(*(placed(s, t) for t, s in zip(target, stored, strict=True)))


def _plain(target: Any, saved: Any, path: Path, log: Log) -> Any:
    if not hasattr(target, "dtype"):
        return _number(target, saved)
    if _is_key(target):
        return _key(target, saved)
    saved = _array(target, saved)
    _check_shape(target, saved)
    given, wanted = np.dtype(saved.dtype), np.dtype(target.dtype)
    if given == wanted:
        return placed(saved, target)
    host = np.asarray(saved)
    if _is_integer(given) and _is_integer(wanted):
        limits = np.iinfo(wanted)
        if host.size and not limits.min <= int(host.min()) <= int(host.max()) <= limits.max:
            raise ValueError(f"saved as {given} with values that {wanted} does not hold")
        return placed(host.astype(wanted), target)
    if not (_is_wide_float(given) and _is_wide_float(wanted)):
        raise ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")
    with np.errstate(over="ignore"):
        new = host.astype(wanted)
    if np.any(np.isfinite(host) & ~np.isfinite(new)):
        raise ValueError(f"saved as {given} with values that {wanted} does not hold")
    if jnp.promote_types(given, wanted) != wanted:
        log.note(f"Arrays saved in {given} are rounded to {wanted}", path)
    return placed(new, target)


def _number(target: Any, saved: Any) -> Any:
    """A leaf of Python's own: a number, or whatever it is if the checkpoint has the same type."""
    if type(saved) is type(target):
        return saved
    kinds = {bool: "b", int: "iu", float: "f"}.get(type(target), "")
    if getattr(saved, "shape", None) == () and np.dtype(saved.dtype).kind in kinds:
        return type(target)(saved.item())
    raise ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")


def _array(target: Any, saved: Any) -> Any:
    """`saved`, an array or a number, as an array."""
    if isinstance(saved, bool | int):
        return np.asarray(saved)
    if isinstance(saved, float):
        return np.asarray(saved, np.float32)
    if not isinstance(saved, np.ndarray | np.generic | jax.Array) or _is_object(saved):
        raise ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")
    return saved


def _floats(target: Any, saved: Any) -> np.ndarray:
    """The values that are to be stored like `target`, f32."""
    saved = _array(target, saved)
    if not _is_wide_float(np.dtype(saved.dtype)):
        raise ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")
    return np.asarray(saved).astype(np.float32)


def _key(target: Any, saved: Any) -> jax.Array:
    """Random keys, which checkpoints hold as their bits."""
    saved = _array(target, saved)
    if not _is_key(saved):
        implementation = jax.random.key_impl(target)
        bits = jax.eval_shape(jax.random.key_data, target)
        if saved.dtype != bits.dtype or saved.shape != bits.shape:
            raise ValueError(
                f"the target has {described(target)}, the checkpoint {described(saved)}"
            )
        saved = jax.random.wrap_key_data(saved, impl=implementation)
    _check_shape(target, saved)
    if saved.dtype != target.dtype:
        raise ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")
    return placed(saved, target)


def placed(value: Any, like: Any) -> Any:
    """`value` where `like` is: on the host, on the devices of its sharding, or on the default."""
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(value)
    sharding = getattr(like, "sharding", None)
    if sharding is not None and getattr(like, "committed", True):
        return jax.device_put(value, sharding)
    return jnp.asarray(value)


def _on_device(stored: Any) -> Any:
    return jax.tree.map(jnp.asarray, stored)


def _check_shape(target: Any, values: Any) -> None:
    wanted = tuple(target.data.shape if is_stored(target) else target.shape)
    if wanted != tuple(values.shape):
        raise ValueError(f"the target has shape {wanted}, the checkpoint {tuple(values.shape)}")


def _kind(stored: Any) -> str:
    """The form of a stored array, in words."""
    if isinstance(stored, HalfArray):
        return "float16 with one scale"
    if isinstance(stored, ExpandedArray):
        return f"{stored.data.dtype} in expanded blocks"
    scale = stored.scale
    if isinstance(scale, ScaledArray):
        return f"{stored.data.dtype} with scales of two levels"
    many = f"{scale.dtype} scales" if scale.shape else "one scale"
    return f"{stored.data.dtype} with {many}"


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _is_object(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and (x.dtype.hasobject or bool(x.dtype.names))


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iu"


def _is_wide_float(dtype: Any) -> bool:
    """Whether `dtype` is a floating one that needs no scale."""
    return (
        not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        and jnp.issubdtype(dtype, jnp.floating)
        and dtype.itemsize > 1
    )
