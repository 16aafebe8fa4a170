"""FP8 checkpoints for PyTorch, read and written without dequantizing: see `Fp8Style`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jfp8.checkpoint import atomic
from jfp8.checkpoint.fp8_style import Fp8Style, style_called, style_of
from jfp8.checkpoint.safetensors_file import parsed, read_arrays, write_arrays
from jfp8.checkpoint.state_dict import short
from jfp8.scaling.arrays import ScaledArray

_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_SCALES = ("_scale_inv", "_scale")
_OF_INPUTS = ("input_scale", "act_scale")  # the second in older files for vLLM
_FP8 = ("float8_e4m3fn", "float8_e5m2")
Tensors = dict[str, ScaledArray | np.ndarray]


def load_fp8_safetensors(path: str | os.PathLike[str]) -> tuple[Tensors, Fp8Style]:
    """Read the tensors of an FP8 checkpoint for PyTorch, and the style in which it stores them.

    Reads DeepSeek-V3's and Qwen3's blocks of 128 x 128 (``weight_scale_inv``), compressed-tensors'
    FP8 (per tensor, channel or block) and modelopt's and vLLM's per tensor; see `Fp8Style`. Each
    FP8 weight becomes a `ScaledArray` of the stored bytes, in PyTorch's layout ``[out, in]``.
    Other tensors, scales of activations (``input_scale``) included, stay arrays. Arrays are mapped
    from the files and read where they are used.

    Args:
      path: a folder with config.json and model.safetensors, or several files and
        model.safetensors.index.json.

    Returns:
      Tensors by their names in the files; and the style, for `save_fp8_safetensors`.

    Raises:
      ValueError: a damaged file; a format that is not read here; an FP8 weight without a scale.
      FileNotFoundError: a file is missing.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> w = jfp8.quantize(jnp.ones((256, 200)), granularity=jfp8.Block((128, 128)))
    >>> jfp8.checkpoint.save_fp8_safetensors(folder, {"up.weight": w}, "deepseek")
    >>> tensors, style = jfp8.checkpoint.load_fp8_safetensors(folder)
    >>> tensors["up.weight"].scale.shape, style.granularity
    ((2, 2), 'block')
    """
    folder = Path(path)
    arrays = _arrays(folder)
    scales = {n: _scale_name(n, arrays) for n, x in arrays.items() if x.dtype.name in _FP8}
    if not scales:
        raise ValueError(f"{folder} has no FP8 weights. jfp8.checkpoint.load reads other files.")
    for name in arrays:
        of = next((name.removesuffix(s) for s in _SCALES if name.endswith(s)), name)
        if of != name and of in arrays and of not in scales:
            raise ValueError(
                f"{short(of)} has the scale {short(name)}, but it is {arrays[of].dtype}, not FP8. "
                "Formats of other widths are not read here."
            )
    config = _json(folder / _CONFIG).get("quantization_config")
    if not isinstance(config, dict):
        raise ValueError(
            f"{folder / _CONFIG} has no quantization_config, which says what the scales belong to."
        )
    try:
        style = style_of(config, {scale: arrays[scale] for scale in scales.values()})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    tensors: Tensors = {
        name: style.join(name, x, arrays[scales[name]]) if name in scales else x
        for name, x in arrays.items()
        if name not in scales.values()
    }
    return tensors, style


def save_fp8_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    style: Fp8Style | str,
    *,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write an FP8 checkpoint for PyTorch, which `load_fp8_safetensors` reads.

    Bytes and scales are written as they are: a checkpoint of one file becomes the same file again.
    An existing config.json keeps everything but its ``quantization_config``: copy the model's own
    into the folder first.

    Args:
      path: the folder.
      tensors: arrays and instances of `ScaledArray` by name, in PyTorch's layout ``[out, in]``.
      style: of the original; or ``"deepseek"`` (blocks of 128 x 128), ``"compressed-tensors"`` (per
        channel) or ``"per-tensor"``.
      max_shard_size: bytes of a file.

    Raises:
      ValueError: scales that the style does not have, or would round; names that collide; an
        unknown style; no scales of activations where the style says that there are.
    """
    style, folder = style_called(style), Path(path)
    if style.has_input_scales and not any(name.endswith(_OF_INPUTS) for name in tensors):
        raise ValueError(
            "The style's quantization_config says that the files have calibrated scales of "
            "activations (input_scale), but there are none among the tensors. Add those that "
            'load_fp8_safetensors returned, or write another style, such as "per-tensor".'
        )
    arrays: dict[str, np.ndarray] = {}
    for name, x in tensors.items():
        if isinstance(x, ScaledArray):
            data, scale = style.split(name, x)
            if name + style.suffix in tensors:
                raise ValueError(f"{name + style.suffix!r} is taken by the scale of {name!r}.")
            arrays |= {name: data, name + style.suffix: scale}
        else:
            arrays[name] = np.asarray(x)
    shards = _shards(arrays, max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    names = [_SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, 1 + len(shards))]
    for name, shard in zip(names, shards, strict=True):
        atomic.replace_file(folder / name, partial(write_arrays, shard))
    if len(shards) > 1:
        files = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        size = sum(x.nbytes for x in arrays.values())
        _write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": files})
    config = _json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
    _write_json(folder / _CONFIG, config | {"quantization_config": dict(style.quantization_config)})


def _shards(arrays: Mapping[str, np.ndarray], max_shard_size: int) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, x in arrays.items():
        if shards[-1] and sum(y.nbytes for y in shards[-1].values()) + x.nbytes > max_shard_size:
            shards.append({})
        shards[-1][name] = x
    return shards


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a checkpoint, from one file or several."""
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}.")
        return read_arrays(folder / _SINGLE)
    files = _json(folder / _INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError(f"{folder / _INDEX} has no weight_map of names to files.")
    if strange := [f for f in files.values() if Path(f).name != f]:
        raise ValueError(f"{folder / _INDEX} names files elsewhere: {short(strange[0])}.")
    found = {file: read_arrays(folder / file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in found[file]:
            raise ValueError(f"{short(name)} is not in {file}, where {_INDEX} says it is.")
    return {name: found[file][name] for name, file in files.items()}


def _scale_name(name: str, arrays: Mapping[str, np.ndarray]) -> str:
    found = [name + suffix for suffix in _SCALES if name + suffix in arrays]
    if len(found) != 1:
        tried = " and ".join(repr(name + suffix) for suffix in _SCALES)
        raise ValueError(
            f"The FP8 weight {short(name)} needs one scale, but of {tried} there are {len(found)}."
        )
    return found[0]


def _json(path: Path) -> dict[str, Any]:
    return parsed(path.read_bytes(), str(path))


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    text = json.dumps(tree, indent=2).encode() + b"\n"
    atomic.replace_file(path, lambda file: file.write(text))
