"""`Fp8Style`: how FP8 checkpoints for PyTorch store weights and their scales.

A weight ``W``, ``[out, in]``, is stored as FP8 bytes under its name, and its scales under this name
and a suffix. All scales multiply: ``W ~= bytes * scale``.

    DeepSeek-V3, Qwen3-FP8   W_scale_inv   one for each block of 128 x 128, the last ones cut short
    compressed-tensors       W_scale       one for the tensor, for each row (channel), or block
    modelopt, vLLM           W_scale       one for the tensor

``quantization_config`` in config.json says which. A scale of activations that was calibrated
(``input_scale``) is a tensor like any other here.

References:
  DeepSeek-V3, ``inference/kernel.py`` (``weight_dequant``) and its README_WEIGHTS.md; transformers,
  ``integrations/finegrained_fp8.py``; compressed-tensors, ``compressors/naive_quantized``;
  nvidia-modelopt, ``export_hf_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jfp8.checkpoint.state_dict import DTYPES
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.granularity import Block, ragged_block

Granularity = Literal["tensor", "channel", "block"]
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class Fp8Style:
    """How a checkpoint stores FP8 weights.

    Attributes:
      granularity: the elements that share a scale: a ``"tensor"``, a ``"channel"`` (a row of
        ``[out, in]``), or a ``"block"``.
      block: its rows and columns; only for ``"block"``.
      suffix: of the name of a scale, after that of its weight.
      scale_dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float8_e8m0fnu"``.
      scale_ndim: dimensions of a stored scale: 0 or 1 for ``"tensor"``, 1 or 2 for ``"channel"``.
        Those of blocks have as many as the weight.
      quantization_config: the dict of that name in config.json.
    """

    granularity: Granularity
    block: tuple[int, int] | None = None
    suffix: str = "_scale"
    scale_dtype: str = "float32"
    scale_ndim: int = 0
    quantization_config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def has_input_scales(self) -> bool:
        """Tell whether config.json promises calibrated scales of activations in the files."""
        groups = self.quantization_config.get("config_groups") or {}
        inputs = [group.get("input_activations") or {} for group in groups.values()]
        static = self.quantization_config.get("activation_scheme") == "static"
        return static or any(x.get("dynamic") is False for x in inputs)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored scale of a weight of this `shape`."""
        if self.granularity == "block":
            assert self.block is not None
            rows, columns = (-(-n // b) for n, b in zip(shape[-2:], self.block, strict=True))
            return (*shape[:-2], rows, columns)
        if self.granularity == "channel":
            return shape[:-1] if self.scale_ndim < len(shape) else (*shape[:-1], 1)
        return (1,) * self.scale_ndim

    def join(self, name: str, data: Any, scale: Any) -> ScaledArray:
        """Join a stored weight, `data`, and its stored `scale`; errors call the weight `name`.

        Raises:
          ValueError: a scale of another shape.
        """
        wanted = self.scale_shape(data.shape)
        if scale.shape != wanted:
            raise ValueError(
                f"{name!r} of shape {data.shape} has a scale of shape {scale.shape}, but "
                f"{self._in_words()} need {wanted}. Does config.json belong to these weights?"
            )
        scale = scale.astype(np.float32)
        if self.granularity == "tensor":
            return ScaledArray(data, scale.reshape(()))
        if self.granularity == "channel":
            return ScaledArray(data, scale.reshape(*data.shape[:-1], 1))
        assert self.block is not None
        whole = Block((1,) * (data.ndim - 2) + self.block)
        return ScaledArray(data, scale, ragged_block(whole, data.shape))

    def split(self, name: str, q: ScaledArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes and the scale of a weight `q`, ``[out, in]``, as stored under `name`.

        Raises:
          ValueError: scales that are laid out otherwise, or that `scale_dtype` would round.
        """
        if isinstance(q.scale, ScaledArray):
            raise ValueError(f"{name!r} has scales of two levels (NVFP4), which no style here has.")
        data, scale = np.asarray(q.data), np.asarray(q.scale, np.float32)
        if self.granularity == "tensor" and scale.size == 1:
            scale = scale.reshape((1,) * self.scale_ndim)
        elif self.granularity == "channel" and scale.shape == (*data.shape[:-1], 1):
            scale = scale.reshape(self.scale_shape(data.shape))
        empty = np.zeros(self.scale_shape(data.shape), np.float32)
        wanted = self.join(name, data, empty)
        laid_out = scale.shape == empty.shape
        if not laid_out or (scale.size > 1 and q.block_sizes() != wanted.block_sizes()):
            raise ValueError(
                f"{name!r} of shape {data.shape} has scales of shape {np.shape(q.scale)}, but "
                f"{self._in_words()} need {empty.shape}. Save it in another style, or quantize it "
                "so: jfp8.quantize_params(params, recipe)."
            )
        narrow = scale.astype(DTYPES[self.scale_dtype])
        if not np.array_equal(narrow.astype(np.float32), scale):
            raise ValueError(
                f"The scales of {name!r} are not numbers of {self.scale_dtype}, in which this "
                "style stores them. Use dataclasses.replace(style, scale_dtype='float32')."
            )
        return data, narrow

    def _in_words(self) -> str:
        of = "" if self.block is None else f" of {self.block[0]} x {self.block[1]}"
        return f"scales of each {self.granularity}{of}"


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
STYLES: dict[str, Fp8Style] = {
    "deepseek": Fp8Style(
        "block", (128, 128), "_scale_inv", "float32", 2, {**_FP8, "weight_block_size": [128, 128]}
    ),
    "compressed-tensors": Fp8Style(
        "channel",
        None,
        "_scale",
        "float32",
        2,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**_WEIGHTS, "strategy": "channel"},
                    "input_activations": {**_WEIGHTS, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "per-tensor": Fp8Style("tensor", None, "_scale", "float32", 0, _FP8),
}
"""Styles of new checkpoints, by name."""


def style_called(style: Fp8Style | str) -> Fp8Style:
    """Return the `Fp8Style` of that name; ``ValueError`` if there is none."""
    if isinstance(style, Fp8Style):
        return style
    if style not in STYLES:
        raise ValueError(
            f"style={style!r} is unknown. Allowed: {', '.join(map(repr, STYLES))}, or the Fp8Style "
            "that load_fp8_safetensors returned."
        )
    return STYLES[style]


def style_of(config: Mapping[str, Any], scales: Mapping[str, np.ndarray]) -> Fp8Style:
    """Return the style that a ``quantization_config`` describes.

    Args:
      config: the dict.
      scales: of weights, by the names of these and a suffix.

    Raises:
      ValueError: it describes something else; the message says what.
    """
    method = _known(config, "quant_method", tuple(_KNOWN))
    for key, allowed in _KNOWN[method].items():
        _known(config, key, allowed)
    if method == "compressed-tensors":
        granularity, block = _of_groups(config.get("config_groups", {}))
    else:
        block = config.get("weight_block_size") if method == "fp8" else None
        granularity = "tensor" if block is None else "block"
        block = None if block is None else _pair("weight_block_size", block)
    ndims = {x.ndim for x in scales.values() if granularity != "tensor" or x.size == 1} or {0}
    ndim = max(ndims) if granularity == "block" else _only("dimensions", ndims)
    dtype = _only("dtypes", {x.dtype.name for x in scales.values()})
    suffix = _only("suffixes", {name[name.rindex("_scale") :] for name in scales})
    if dtype not in _SCALE_DTYPES:
        allowed = ", ".join(_SCALE_DTYPES)
        raise ValueError(f"The scales of weights are {dtype}; known are {allowed}.")
    return Fp8Style(granularity, block, suffix, dtype, ndim, dict(config))


def _only(what: str, found: set[Any]) -> Any:
    if len(found) != 1:
        raise ValueError(f"The scales of weights have several {what}: {sorted(found)}.")
    return found.pop()


# Other entries of a config, by its method: "fp8" is that of DeepSeek, Qwen3, transformers and vLLM.
_KNOWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "scale_fmt": ("float", "ue8m0", None),
        "activation_scheme": ("dynamic", "static", None),
    },
    "compressed-tensors": {"format": ("float-quantized", "naive-quantized")},
    "modelopt": {"quant_algo": ("FP8",)},
}


def _of_groups(groups: Mapping[str, Any]) -> tuple[Granularity, tuple[int, int] | None]:
    """Return what has a scale in all groups of layers, and the sizes of blocks."""
    found = set()
    for group in groups.values():
        weights = group.get("weights") or {}
        _known(weights, "type", ("float",))
        _known(weights, "num_bits", (8,))
        strategy = _known(weights, "strategy", ("tensor", "channel", "block"))
        block = weights.get("block_structure")
        found.add((strategy, _pair("block_structure", block) if strategy == "block" else None))
    if len(found) != 1:
        raise ValueError(
            f"config_groups has {len(found)} kinds of weights, {sorted(found, key=str)}, but all "
            "FP8 weights of a checkpoint must be quantized alike here."
        )
    return found.pop()


def _known(config: Mapping[str, Any], key: str, allowed: Iterable[Any]) -> Any:
    """Return an entry of a config, if it is one of those that are read here."""
    if config.get(key) not in allowed:
        raise ValueError(
            f"{key}={config.get(key)!r} in quantization_config is not read here. Known: "
            f"{', '.join(map(repr, allowed))}."
        )
    return config.get(key)


def _pair(key: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"{key}={value!r} in quantization_config is not a list of two sizes.")
    return value[0], value[1]
