"""Checkpoints for PyTorch in FP8 and FP4, read and written without dequantizing: see `Fp8Style`.

Arrays are mapped from files and unpacked where they are read; files are written one at a time.
`serving_tensors` makes what is written, one array at a time, from the weights of a model.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jfp8.checkpoint import atomic
from jfp8.checkpoint.fp8_style import Fp8Style, Stored, layouts_in, styles
from jfp8.checkpoint.safetensors_file import parsed, read_arrays, write_arrays
from jfp8.checkpoint.state_dict import short
from jfp8.checkpoint.torch_layout import Names, Tensors, from_flax_params, on_this_host, places
from jfp8.checkpoint.weight_layout import WeightLayout
from jfp8.conversion.selection import Recipes, select
from jfp8.quantizers.quantizer import Context, Current
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.scales import amax
from jfp8.tracing.caller import user_level

Arrays = dict[str, np.ndarray]
_OF_INPUTS = ("input_scale", "input_global_scale", "act_scale")  # the last in older files for vLLM
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
    calibrated = any(name.endswith(_OF_INPUTS) for name in arrays)
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


@dataclass(frozen=True)
class ServingTensors:
    """Iterate over ``(name, array)``: names, shapes and bytes of an engine's checkpoint.

    An array is made when the iteration reaches it, and is not kept. Every iteration reads the
    weights again. If weights are sharded over several processes, all of these must iterate.

    Attributes:
      tensors: arrays and instances of `ScaledArray` by name, in PyTorch's layout.
      style: how they are stored.
    """

    tensors: Mapping[str, Any]
    style: Fp8Style

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield from stored(self, name)[0].items()

    def config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of config.json, for which all weights are read."""
        layers = {k: v for name in self.tensors for k, v in stored(self, name)[1].items()}
        return self.style.config(layers)


def stored(serving: ServingTensors, name: str) -> tuple[Arrays, dict[str, Stored | None]]:
    """Return the arrays that store one of the tensors, and its layer's entry for the config."""
    tensors = serving.tensors
    x, layer = on_this_host(tensors[name]), name.removesuffix(".weight")
    if not isinstance(x, ScaledArray):
        is_weight = x.ndim >= (2 if layer != name else 3)  # stacked experts have no ".weight"
        return {name: x}, {layer: None} if is_weight else {}
    layout, arrays = serving.style.split(name, x)
    if taken := arrays.keys() & tensors.keys() - {name}:
        raise ValueError(f"{min(taken)!r} is taken by the scale of {name!r}.")
    calibrated = any(f"{layer}.{scale}" in tensors for scale in _OF_INPUTS)
    return arrays, {layer: (layout, calibrated)}


def serving_tensors(
    tensors: Any,
    style: Fp8Style | str,
    *,
    names: Names | None = None,
    recipe: Recipes | None = None,
) -> ServingTensors:
    """Return the tensors that `save_fp8_safetensors` writes, to send them to an engine instead.

    Args:
      tensors: arrays and instances of `ScaledArray` by name, in PyTorch's layout ``[out, in]``; or
        with `names` the parameters of a Flax model.
      style: the original's; or ``"deepseek"``, ``"compressed-tensors"``, ``"modelopt"``,
        ``"gpt-oss"`` or ``"per-tensor"``, see `Fp8Style`. A weight keeps its format.
      names: see `from_flax_params`.
      recipe: quantizes matrices that are none yet as this recipe quantizes weights in the forward
        product: one recipe, or some by patterns of paths, ``{"*/mlp/*": "nvfp4", "*": "rowwise"}``,
        as for `jfp8.convert`; None leaves a layer as it is. Paths are the parameters' paths, or
        without `names` the tensors' names.

    Returns:
      An iterable of ``(name, array)`` whose `config()` is the ``quantization_config``.

    Raises:
      ValueError: scales that the style does not have, or would round; names that collide; an
        unknown style; no scales of activations where the style says that there are.

    >>> import jax.numpy as jnp, jfp8
    >>> params, names = {"up": {"kernel": jnp.ones((64, 32))}}, {"up.weight": "up/kernel"}
    >>> stream = jfp8.checkpoint.serving_tensors(params, "modelopt", names=names, recipe="nvfp4")
    >>> for name, array in stream:
    ...     print(name, array.dtype, array.shape)
    up.weight uint8 (32, 32)
    up.weight_scale float8_e4m3fn (32, 4)
    up.weight_scale_2 float32 ()
    """
    if not isinstance(style, Fp8Style):
        if style not in styles():
            raise ValueError(
                f"style={style!r} is unknown. Allowed: {', '.join(map(repr, styles()))}, or the "
                "Fp8Style that load_fp8_safetensors returned."
            )
        style = styles()[style]
    found = tensors if names is None else from_flax_params(tensors, names)
    if recipe is not None:
        found = _quantized(found, names, recipe)
    if style.input_scales and not any(name.endswith(_OF_INPUTS) for name in found):
        raise ValueError(
            "The style's quantization_config says that the files have calibrated scales of "
            "activations (input_scale), but there are none among the tensors. Add those that "
            'load_fp8_safetensors returned, or write another style, such as "per-tensor".'
        )
    return ServingTensors(found, style)


def _quantized(tensors: Mapping[str, Any], names: Names | None, recipe: Recipes) -> Tensors:
    """Return `tensors`, of which those that are kernels are quantized where they are read."""
    paths = {n: n[: -len(".weight")].replace(".", "/") for n in tensors if n.endswith(".weight")}
    if names is not None:
        matrices = {n: p for n, p in places(names).items() if p.axes or p.path.endswith("kernel")}
        paths = {name: place.path.rpartition("/")[0] for name, place in matrices.items()}
    selection = select(recipe, (), None)
    selection.check_patterns(paths.values())

    def made(name: str) -> Any:
        x = on_this_host(tensors[name])
        if names is None and name not in paths and np.ndim(x) > 2:
            warnings.warn(
                f"The stack {name!r}, of shape {x.shape}, stays in {x.dtype}: without names=, only "
                'tensors called ".weight" are known to be [out, in]. Split it into matrices with '
                "such names, or pass Flax parameters and names=.",
                stacklevel=user_level(),
            )
        chosen = selection.decide(paths[name], x, None).recipe if name in paths else None
        if chosen is None or isinstance(x, ScaledArray) or x.ndim < 2:
            return x
        quantizer, x = chosen.products().fprop.rhs or Current(E4M3FN), jnp.asarray(x)
        return quantizer(x, Context((x.ndim - 1,), amax(x), None, None))

    return Tensors({name: partial(made, name) for name in tensors})


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
