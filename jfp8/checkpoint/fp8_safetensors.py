"""Checkpoints for PyTorch in FP8 and FP4, read and written without dequantizing: see `Fp8Style`.

Arrays are mapped from files and unpacked where they are read; files are written one at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jfp8.checkpoint import atomic
from jfp8.checkpoint.fp8_style import Fp8Style, Stored, layouts_in
from jfp8.checkpoint.safetensors_file import parsed, read_arrays, write_arrays
from jfp8.checkpoint.serving import OF_INPUTS, Arrays, ServingTensors, serving_tensors, stored
from jfp8.checkpoint.state_dict import short
from jfp8.checkpoint.torch_layout import Names, Tensors
from jfp8.checkpoint.weight_layout import WeightLayout
from jfp8.conversion.selection import Recipes

_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_UNFINISHED = ".model-{:05}.safetensors"
_CODES = ("float8_e4m3fn", "uint8", "int8")


def load_fp8_safetensors(path: str | os.PathLike[str]) -> tuple[Tensors, Fp8Style]:
    """Read the tensors of an FP8 or FP4 checkpoint for PyTorch, and the style that it has.

    Each weight in one of the formats of `Fp8Style` becomes a `ScaledArray` of the stored codes, in
    PyTorch's layout ``[out, in]``. Other tensors, scales of activations (``input_scale``) included,
    stay arrays.

    Args:
      path: a folder with config.json and model.safetensors, or several files and
        model.safetensors.index.json.

    Returns:
      Tensors by their names in the files, mapped into memory and unpacked where they are read; and
      the style, for `save_fp8_safetensors`.

    Raises:
      ValueError: a damaged file; a format that is not read here; an FP8 weight without a scale.
      FileNotFoundError: a file is missing.

    >>> import jax.numpy as jnp, jfp8, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> w = jfp8.quantize(jnp.ones((256, 200)), granularity=jfp8.Block((128, 128)))
    >>> jfp8.checkpoint.save_fp8_safetensors(folder, {"up.weight": w}, "deepseek")
    >>> tensors, style = jfp8.checkpoint.load_fp8_safetensors(folder)
    >>> tensors["up.weight"].scale.shape, style.layouts[0].kind
    ((2, 2), 'fp8-block')
    """
    folder = Path(path)
    arrays = _arrays(folder)
    config = _json(folder / _CONFIG).get("quantization_config")
    if not isinstance(config, dict):
        raise ValueError(
            f"{folder / _CONFIG} has no quantization_config, which says what the scales belong to."
        )
    try:
        weights = _weights(arrays, layouts_in(config))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    makers: dict[str, Any] = {name: partial(arrays.__getitem__, name) for name in arrays}
    for name, layout in weights.items():
        makers[name] = partial(layout.join, *(makers.pop(x)() for x in layout.tensors(name)))
    calibrated = any(name.endswith(OF_INPUTS) for name in arrays)
    layouts = tuple(dict.fromkeys(weights.values()))
    outer = {n: arrays[x.tensors(n)[2]] for n, x in weights.items() if x.reciprocal}
    return Tensors(makers), Fp8Style(config["quant_method"], layouts, config, calibrated, outer)


def _weights(arrays: Arrays, layouts: list[WeightLayout]) -> dict[str, WeightLayout]:
    found: dict[str, WeightLayout] = {}
    misfits: dict[str, str] = {}
    for layout in layouts:
        for name in layout.names_in(arrays):
            data, scale, *outer = (arrays[tensor] for tensor in layout.tensors(name))
            stored = layout.stored_as(scale)
            if stored.holds(data, scale, *outer):
                found.setdefault(name, stored)
            needed = stored.scale_shape(layout.shape_of(data))
            misfits[name] = (
                f"{short(name)}, {data.dtype}{list(data.shape)}, has a scale {scale.dtype}"
                f"{list(scale.shape)}, but {layout.in_words()} need {layout.codes_dtype} and a "
                f"scale {list(needed)}. Does config.json belong to these weights?"
            )
    for name in sorted(misfits.keys() - found.keys()):
        raise ValueError(misfits[name])
    known = {tensor for name, layout in found.items() for tensor in layout.tensors(name)}
    endings = {" and ".join(map(repr, layout.suffixes[1:])) for layout in layouts}
    for name in sorted(arrays.keys() - known):
        if arrays[name].dtype.name in _CODES and arrays[name].ndim > 1:
            raise ValueError(
                f"The weight {short(name)} needs its scales, which have its name and the ending "
                f"{' or '.join(sorted(endings))}."
            )
    if not found:
        raise ValueError("there are no quantized weights. jfp8.checkpoint.load reads other files.")
    return found


def save_fp8_safetensors(
    path: str | os.PathLike[str],
    tensors: Any,
    style: Fp8Style | str,
    *,
    names: Names | None = None,
    recipe: Recipes | None = None,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write an FP8 or FP4 checkpoint for PyTorch, which `load_fp8_safetensors` reads.

    Codes and scales are written as they are: a checkpoint of one file becomes the same file again.
    An existing config.json keeps everything but its ``quantization_config``: copy the model's own
    into the folder first. All processes of a run call this with the same tensors; each writes some
    of the files, and the first one the index and config.json.

    Args:
      path: the folder.
      tensors, style, names, recipe: see `serving_tensors`, which gives the arrays of the files.
      max_shard_size: bytes of a file.

    Raises:
      ValueError: see `serving_tensors`.
    """
    folder = Path(path)
    serving = serving_tensors(tensors, style, names=names, recipe=recipe)
    layers: dict[str, Stored | None] = {}
    files: list[list[str]] = []
    size = 0
    try:
        for shard in _shards(serving, layers, max_shard_size):
            folder.mkdir(parents=True, exist_ok=True)
            files.append(list(shard))
            size += sum(x.nbytes for x in shard.values())
            if (len(files) - 1) % jax.process_count() == jax.process_index():
                file = folder / _UNFINISHED.format(len(files))
                atomic.replace_file(file, partial(write_arrays, shard))
            del shard
        config = serving.style.config(layers)
    except BaseException:
        for number in range(1, 1 + len(files)):
            (folder / _UNFINISHED.format(number)).unlink(missing_ok=True)
        raise
    _finish(folder, files, {"total_size": size}, config)


def _shards(
    serving: ServingTensors, layers: dict[str, Stored | None], most: int
) -> Iterator[Arrays]:
    """Yield the contents of files of at most `most` bytes, and note in `layers` how each is stored.

    A weight and its scales share a file.
    """
    shard: Arrays = {}
    size = 0
    for name in serving.tensors:
        arrays, layer = stored(serving, name)
        layers |= layer
        more = sum(x.nbytes for x in arrays.values())
        if shard and size + more > most:
            yield shard
            shard, size = {}, 0
        shard, size = shard | arrays, size + more
    yield shard


def _finish(folder: Path, files: list[list[str]], metadata: Any, config: dict[str, Any]) -> None:
    """Give all files their names, once all are there, and write the index and config.json."""
    n = len(files)
    names = [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, 1 + n)]
    names = names if n > 1 else [_SINGLE]
    multihost_utils.sync_global_devices(f"files of {folder}")
    if jax.process_index() == 0:
        for number, name in enumerate(names, 1):
            os.replace(folder / _UNFINISHED.format(number), folder / name)
        index = {name: file for file, shard in zip(names, files, strict=True) for name in shard}
        if n > 1:
            _write_json(folder / _INDEX, {"metadata": metadata, "weight_map": index})
        else:
            (folder / _INDEX).unlink(missing_ok=True)
        old = _json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
        _write_json(folder / _CONFIG, old | {"quantization_config": config})
    multihost_utils.sync_global_devices(f"names of {folder}")


def _arrays(folder: Path) -> Arrays:
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


def _json(path: Path) -> dict[str, Any]:
    return parsed(path.read_bytes(), str(path))


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    text = json.dumps(tree, indent=2).encode() + b"\n"
    atomic.replace_file(path, lambda file: file.write(text))
