"""The two forms of an array in a checkpoint, plain and `ScaledArray`, converted into each other.

In a state dict ``{"data", "scale"}`` stands for a `ScaledArray`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jfp8.checkpoint.changes import Log
from jfp8.checkpoint.state_dict import Path
from jfp8.checkpoint.tree import described
from jfp8.scaling.arrays import ScaledArray, check_scale_shape
from jfp8.scaling.formats import E8M0FNU, FORMATS, format_of
from jfp8.scaling.granularity import Block, PerTensor
from jfp8.scaling.quantization import quantize, two_level_scale
from jfp8.scaling.scales import amax, quantize_with_scale

_DATA = tuple(fmt.dtype for fmt in FORMATS if fmt is not E8M0FNU)


def fitted(target: Any, saved: Any, path: Path, log: Log) -> Any:
    """Return `saved` in the form, shape and dtype of `target`, and on its devices.

    `log` records changes, and knows where forms may not change. A ``ValueError`` gives the reason
    why `saved` cannot fit, not the path.
    """
    saved = stored_form(saved)
    if isinstance(target, ScaledArray):
        target = replace(target, carrier=None)
    elif not hasattr(target, "dtype"):
        return _number(target, saved)
    if not isinstance(saved, ScaledArray):
        saved = _array(target, saved)
    wanted = tuple(target.shape)
    if wanted != tuple(saved.shape):
        raise ValueError(f"the target has shape {wanted}, the checkpoint {tuple(saved.shape)}")
    if not _same_form(target, saved):
        saved = _converted(target, saved, path, log)
    leaves, form = jax.tree.flatten(target)
    return form.unflatten(map(placed, jax.tree.leaves(saved), leaves))


def _converted(target: Any, saved: Any, path: Path, log: Log) -> Any:
    new, plain = None, not isinstance(target, ScaledArray) and not isinstance(saved, ScaledArray)
    if not plain and log.in_optimizer(path):
        raise _other_kind(target, saved)
    if isinstance(target, ScaledArray) or _is_wide_float(target.dtype):
        values = decoded(saved)
        new = None if values is None else _encoded(target, values)
    elif plain and {saved.dtype.kind, target.dtype.kind} <= set("iu"):
        host = np.asarray(saved)
        new = host.astype(target.dtype)
        if np.any((new.astype(host.dtype) != host) | ((new < 0) != (host < 0))):
            raise _too_large(saved, target)
    if new is None:
        raise _other_kind(target, saved)
    exact = plain and (
        saved.dtype.kind in "iu" or jnp.promote_types(saved.dtype, target.dtype) == target.dtype
    )
    if not exact:
        log.change(f"Arrays saved as {_kind(saved)} become {_kind(target)}", path)
    return new


def decoded(saved: Any) -> np.ndarray | None:
    """Return the values of an array of a checkpoint in any form; None if they are not floats."""
    saved = stored_form(saved)
    if isinstance(saved, ScaledArray):
        return np.asarray(jax.tree.map(jnp.asarray, saved).dequantize())
    return np.asarray(saved) if _is_wide_float(saved.dtype) else None


def _encoded(target: Any, values: np.ndarray) -> Any:
    """Encode `values` in the form of `target`, rounding to nearest."""
    if not isinstance(target, ScaledArray):
        with np.errstate(over="ignore"):
            new = values.astype(target.dtype)
        if np.any(np.isfinite(values) & ~np.isfinite(new)):
            raise _too_large(values, target)
        return new
    x = jnp.asarray(values.astype(np.float32))
    return replace(_quantized(target, x), block=target.block)


def stored_form(saved: Any) -> Any:
    """Return the `ScaledArray` with the state dict `saved`; ``ValueError`` for other dicts."""
    if not isinstance(saved, dict):
        return saved
    found = from_fields(saved)
    if found is None:
        raise ValueError(f"the target has an array here, the checkpoint {described(saved)}")
    check_scale_shape(found)
    return found


def from_fields(node: Any) -> ScaledArray | None:
    """Return the `ScaledArray` with the state dict `node`; None for other dicts."""
    if not isinstance(node, dict) or "data" not in node:
        return None
    dtypes = {name: _dtype(leaf) for name, leaf in node.items()}
    data = dtypes.pop("data")
    if set(dtypes) in ({"scale"}, {"scale", "block"}) and data in _DATA:
        scale: Any = from_fields(node["scale"]) if dtypes["scale"] is None else node["scale"]
        inner = scale.scale if isinstance(scale, ScaledArray) else scale
        if _dtype(inner) in (jnp.float32, E8M0FNU.dtype):
            return ScaledArray(node["data"], scale, _block(node.get("block")))
    return None


def _block(block: Any) -> tuple[int, ...] | None:
    if block is None:
        return None
    sizes = np.asarray(block)
    if sizes.dtype.kind not in "iu" or sizes.ndim != 1 or not np.all(sizes > 0):
        raise ValueError(f"blocks of an array are {described(sizes)}, not sizes above 0")
    return tuple(sizes.tolist())


def _quantized(target: ScaledArray, values: jax.Array) -> ScaledArray:
    fmt, scale = format_of(target.data.dtype), target.scale
    granularity: Block | PerTensor = PerTensor()
    if scale.shape:
        granularity = Block(tuple(max(b, 1) for b in target.block_sizes()))
    if not isinstance(scale, ScaledArray):
        rounding = "rceil" if scale.dtype == E8M0FNU.dtype else None
        # Scales that are all powers of two are so on purpose; shapes alone do not show that.
        if not rounding and not isinstance(scale, jax.ShapeDtypeStruct):
            mantissas, _ = np.frexp(np.asarray(scale))
            rounding = "power_of_two" if np.all(mantissas == 0.5) else None
        return quantize(values, fmt, granularity=granularity, scale_rounding=rounding)
    if jnp.shape(scale.scale) or len(scale.shape) != len(target.shape):
        raise ValueError(
            f"the target stores {_kind(target)} for several layers at once, each with its own "
            "scale. Restore into the original parameters, and quantize those: "
            "jfp8.quantize_params(params, recipe, stacked=...)"
        )
    largest = amax(values, granularity)
    scales, inverse = two_level_scale(largest, fmt, format_of(scale.data.dtype))
    return quantize_with_scale(values, scales, fmt, block=target.block, inverse=inverse)


def _same_form(target: Any, saved: Any) -> bool:
    """Return True if `saved` can be used unchanged, bit for bit."""
    if jax.tree.structure(target) != jax.tree.structure(saved):
        return False
    pairs = zip(jax.tree.leaves(target), jax.tree.leaves(saved), strict=True)
    return all((t.shape, t.dtype) == (s.shape, s.dtype) for t, s in pairs)


def _number(target: Any, saved: Any) -> Any:
    """Return a Python object as a leaf: a number, or anything of the same type."""
    if type(saved) is type(target):
        return saved
    kinds = {bool: "b", int: "iu", float: "f"}.get(type(target), "")
    if getattr(saved, "shape", None) == () and np.dtype(saved.dtype).kind in kinds:
        return type(target)(saved.item())
    raise _other_kind(target, saved)


def _array(target: Any, saved: Any) -> Any:
    """Return an array, a number of Python's, or the bits of random keys as an array or keys."""
    if isinstance(saved, bool | int | float):
        saved = np.asarray(saved, np.float32 if isinstance(saved, float) else None)
    if not isinstance(saved, jax.Array | np.ndarray | np.generic) or saved.dtype == object:
        raise _other_kind(target, saved)
    if _is_key(target) and not _is_key(saved):
        bits = jax.eval_shape(jax.random.key_data, target)
        if (saved.dtype, saved.shape) == (bits.dtype, bits.shape):
            saved = jnp.asarray(saved)
            impl = jax.random.key_impl(jnp.zeros((), target.dtype))  # a shape has none
            saved = jax.random.wrap_key_data(saved, impl=impl)
    if (_is_key(target) or _is_key(saved)) and saved.dtype != target.dtype:
        raise _other_kind(target, saved)
    return saved


def _other_kind(target: Any, saved: Any) -> ValueError:
    return ValueError(f"the target has {described(target)}, the checkpoint {described(saved)}")


def _too_large(saved: Any, target: Any) -> ValueError:
    return ValueError(f"saved as {saved.dtype} with values that {target.dtype} does not hold")


def placed(value: Any, like: Any) -> Any:
    """Place `value` like `like`: on the host, on its devices, or on the default device."""
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(value)
    sharding: Any = getattr(like, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        # Shapes from jax.eval_shape under jax.set_mesh: JAX finds the devices in the mesh set here.
        placing = any(sharding.spec) or not jax.sharding.get_mesh().empty
        sharding = sharding.spec if placing else None
    if sharding is not None and getattr(like, "committed", True):
        return jax.device_put(value, sharding)
    return jnp.asarray(value)


def _kind(stored: Any) -> str:
    """Name the form of an array."""
    if not isinstance(stored, ScaledArray):
        return str(stored.dtype)
    scale = stored.scale
    if isinstance(scale, ScaledArray):
        return f"{stored.data.dtype} with scales of two levels"
    many = f"{scale.dtype} scales" if scale.shape else "one scale"
    return f"{stored.data.dtype} with {many}"


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _is_key(x: Any) -> bool:
    return _dtype(x) is not None and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_wide_float(dtype: Any) -> bool:
    """Return True if `dtype` is a floating dtype that needs no scale."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
