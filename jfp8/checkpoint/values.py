"""One array of a checkpoint, in the form and the dtype that the target keeps it in. ::

    plain array        f32, bf16, f16, integers, random keys
    `ScaledArray`      FP8 parameters, moments in `Blocks`
    `HalfArray`        moments in `ScaledFloat16`
    `ExpandedArray`    moments in ``Blocks(transform="expand")``

The form of both sides follows from their structure: in a state dict ``{"data", "scale"}`` and
``{"data", "amax", "power"}`` stand for one array each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.tree import Path, described, walk
from jfp8.optim.blocks import Blocks, ExpandedArray
from jfp8.optim.storage import HalfArray, ScaledFloat16, Storage
from jfp8.optim.stored_state import is_stored
from jfp8.scaling.arrays import ScaledArray, check_scale_shape
from jfp8.scaling.formats import E8M0FNU, FORMATS, format_of
from jfp8.scaling.granularity import Block, PerTensor, ragged_block
from jfp8.scaling.quantization import quantize, two_level_scale
from jfp8.scaling.scales import amax, quantize_with_scale

_DATA = tuple(fmt.dtype for fmt in FORMATS if fmt is not E8M0FNU)


@dataclass(frozen=True)
class Leaves:
    """The leaves of a new tree, as far as they have been made.

    Attributes:
      log: what was changed to make them, and what does not fit.
      new: the leaves, by their paths in the target.
    """

    log: Log
    new: dict[Path, Any] = field(default_factory=dict)

    def fit(self, target: Any, saved: Any, path: Path) -> None:
        """Make the leaf at `path` of `saved`, None if the checkpoint lacks it."""
        if saved is None:
            self.log.problem(path, f"is missing; the target has {described(target)}")
            return
        try:
            self.new[path] = fitted(target, saved, path, self.log)
        except ValueError as error:
            self.log.problem(path, str(error))

    def zeros(self, target: Any, path: Path) -> None:
        """Make zeros for every leaf of `target`, which is at `path`."""
        for place, leaf in walk(target, path):
            zero = np.zeros(np.shape(leaf), getattr(leaf, "dtype", None) or type(leaf))
            self.fit(leaf, zero, place)


def fitted(target: Any, saved: Any, path: Path, log: Log) -> Any:
    """`saved`, of whichever form, with the form, shape and dtype of `target`, and on its devices.

    `log` is told of changes. A ``ValueError`` says why `saved` cannot be made to fit, not where.
    """
    saved = _stored_form(saved)
    if is_stored(target):
        if isinstance(target, ScaledArray):
            target = replace(target, carrier=None)
        if _same_form(target, saved):
            return _moved(target, saved)
        values = _decoded(saved, path, log) if is_stored(saved) else _floats(target, saved)
        _check_shape(target, values)
        given = f"as {_kind(saved)}" if is_stored(saved) else f"in {np.asarray(saved).dtype}"
        log.change(f"Arrays saved {given} are stored as {_kind(target)}", path)
        return _moved(target, _encoded(target, values, path, log))
    if is_stored(saved):
        if not hasattr(target, "dtype") or not _is_wide_float(target.dtype):
            raise ValueError(f"the target has {described(target)}, the checkpoint {_kind(saved)}")
        values = _decoded(saved, path, log)
        _check_shape(target, values)
        log.change(f"Arrays saved as {_kind(saved)} become {target.dtype}", path)
        return placed(np.asarray(values).astype(target.dtype), target)
    return _plain(target, saved, path, log)


def floats(saved: Any) -> np.ndarray:
    """The f32 values of an array of a checkpoint, whatever its form."""
    saved = _stored_form(saved)
    return np.asarray(_decoded(saved, (), Log()) if is_stored(saved) else saved, np.float32)


def _stored_form(saved: Any) -> Any:
    """`saved` as what it was before it became a state dict; ``ValueError`` if it was no array."""
    if isinstance(saved, ScaledArray):
        return replace(saved, carrier=None)
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
    dtypes = {name: getattr(leaf, "dtype", None) for name, leaf in node.items()}
    data = dtypes.pop("data")
    if dtypes == {"amax": jnp.bfloat16, "power": jnp.bfloat16} and data in (*_DATA, E8M0FNU.dtype):
        return ExpandedArray(node["data"], node["amax"], node["power"])
    if dtypes == {"scale": jnp.float32} and data == jnp.float16 and node["scale"].ndim == 0:
        return HalfArray(node["data"], node["scale"])
    if set(dtypes) in ({"scale"}, {"scale", "block"}) and data in _DATA:
        scale = from_fields(node["scale"]) if dtypes["scale"] is None else node["scale"]
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


def _decoded(saved: Any, path: Path, log: Log) -> jax.Array:
    """The f32 values that a stored array stands for."""
    storage = _storage(saved, path, log)
    saved = jax.tree.map(jnp.asarray, saved)
    return saved.dequantize() if storage is None else storage.decode(saved)


def _encoded(target: Any, values: jax.typing.ArrayLike, path: Path, log: Log) -> Any:
    """f32 `values` in the form of `target`, rounded to nearest."""
    storage, x = _storage(target, path, log), jnp.asarray(values, jnp.float32)
    if storage is None:
        return replace(_quantized(target, x), block=target.block)
    return storage.encode(x, jnp.zeros((2,), jnp.uint32))


def _storage(stored: Any, path: Path, log: Log) -> Storage | None:
    """What encodes arrays of this form; None for a `ScaledArray`."""
    if isinstance(stored, HalfArray):
        return ScaledFloat16()
    if isinstance(stored, ExpandedArray):
        block = _only_block(stored, path, log)
        return Blocks(format_of(stored.data.dtype), block, transform="expand")
    return None


def _quantized(target: ScaledArray, values: jax.Array) -> ScaledArray:
    fmt, scale = format_of(target.data.dtype), target.scale
    if isinstance(scale, ScaledArray):
        if jnp.shape(scale.scale) or len(scale.shape) != len(target.shape):
            raise ValueError(
                f"the target keeps {_kind(target)} for several layers at once, each with a scale "
                "of its own. Restore into the original parameters, and quantize those: "
                "jfp8.quantize_params(params, recipe, stacked=...)"
            )
        granularity = _granularity(target)
        largest = amax(values, granularity)
        scales, inverse = two_level_scale(largest, fmt, format_of(scale.data.dtype))
        block = ragged_block(granularity, values.shape)
        return quantize_with_scale(values, scales, fmt, block=block, inverse=inverse)
    rounding = "rceil" if scale.dtype == E8M0FNU.dtype else _f32_rounding(scale)
    granularity = _granularity(target) if scale.shape else PerTensor()
    return quantize(values, fmt, granularity=granularity, scale_rounding=rounding)


def _granularity(stored: ScaledArray) -> Block:
    return Block(tuple(max(b, 1) for b in stored.block_sizes()))


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
    if jax.tree.structure(target) != jax.tree.structure(saved):
        return False
    pairs = zip(jax.tree.leaves(target), jax.tree.leaves(saved), strict=True)
    return all(t.shape == s.shape and t.dtype == s.dtype for t, s in pairs)


def _moved(target: Any, stored: Any) -> Any:
    """`stored`, of the form of `target`, on its devices."""
    leaves, form = jax.tree.flatten(target)
    return form.unflatten(map(placed, jax.tree.leaves(stored), leaves))


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
    host, too_large = np.asarray(saved), f"saved as {given} with values that {wanted} does not hold"
    if given.kind in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if host.size and not limits.min <= int(host.min()) <= int(host.max()) <= limits.max:
            raise ValueError(too_large)
        return placed(host.astype(wanted), target)
    if not (_is_wide_float(given) and _is_wide_float(wanted)):
        raise _other_kind(target, saved)
    with np.errstate(over="ignore"):
        new = host.astype(wanted)
    if np.any(np.isfinite(host) & ~np.isfinite(new)):
        raise ValueError(too_large)
    if jnp.promote_types(given, wanted) != wanted:
        log.change(f"Arrays saved in {given} are rounded to {wanted}", path)
    return placed(new, target)


def _number(target: Any, saved: Any) -> Any:
    """A leaf of Python's own: a number, or whatever it is if the checkpoint has the same type."""
    if type(saved) is type(target):
        return saved
    kinds = {bool: "b", int: "iu", float: "f"}.get(type(target), "")
    if getattr(saved, "shape", None) == () and np.dtype(saved.dtype).kind in kinds:
        return type(target)(saved.item())
    raise _other_kind(target, saved)


def _array(target: Any, saved: Any) -> Any:
    """`saved`, an array or a number, as an array."""
    if isinstance(saved, bool | int):
        return np.asarray(saved)
    if isinstance(saved, float):
        return np.asarray(saved, np.float32)
    if isinstance(saved, jax.Array):
        return saved
    if not isinstance(saved, np.ndarray | np.generic) or saved.dtype.hasobject or saved.dtype.names:
        raise _other_kind(target, saved)
    return saved


def _floats(target: Any, saved: Any) -> np.ndarray:
    """The values that are to be stored like `target`, f32."""
    saved = _array(target, saved)
    if not _is_wide_float(np.dtype(saved.dtype)):
        raise _other_kind(target, saved)
    return np.asarray(saved).astype(np.float32)


def _key(target: Any, saved: Any) -> jax.Array:
    """Random keys, which checkpoints hold as their bits."""
    saved = _array(target, saved)
    if not _is_key(saved):
        bits = jax.eval_shape(jax.random.key_data, target)
        if saved.dtype != bits.dtype or saved.shape != bits.shape:
            raise _other_kind(target, saved)
        saved = jax.random.wrap_key_data(saved, impl=jax.random.key_impl(target))
    _check_shape(target, saved)
    if saved.dtype != target.dtype:
        raise _other_kind(target, saved)
    return placed(saved, target)


def _other_kind(target: Any, saved: Any) -> ValueError:
    return ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")


def placed(value: Any, like: Any) -> Any:
    """`value` where `like` is: on the host, on the devices of its sharding, or on the default."""
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(value)
    sharding = getattr(like, "sharding", None)
    if sharding is not None and getattr(like, "committed", True):
        return jax.device_put(value, sharding)
    return jnp.asarray(value)


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


def _is_wide_float(dtype: Any) -> bool:
    """Whether `dtype` is a floating one that needs no scale."""
    return (
        not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        and jnp.issubdtype(dtype, jnp.floating)
        and dtype.itemsize > 1
    )
