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

from collections.abc import Mapping
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
      granularity: what has a scale: a ``"tensor"``, a ``"channel"`` (a row of ``[out, in]``), or a
        ``"block"``.
      block: its rows and columns; only for ``"block"``.
      suffix: what follows the name of a weight in that of its scale.
      scale_dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float8_e8m0fnu"``.
      scale_ndim: dimensions of a stored scale: 0 or 1 for ``"tensor"``, 1 or 2 for ``"channel"``.
        Those of blocks have as many as the weight.
      quantization_config: what config.json says about it.
    """

    granularity: Granularity
    block: tuple[int, int] | None = None
    suffix: str = "_scale"
    scale_dtype: str = "float32"
    scale_ndim: int = 0
    quantization_config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def has_input_scales(self) -> bool:
        """Whether config.json says that scales of activations were calibrated, and are stored."""
        groups = self.quantization_config.get("config_groups") or {}
        inputs = [group.get("input_activations") or {} for group in groups.values()]
        static = self.quantization_config.get("activation_scheme") == "static"
        return static or any(x.get("dynamic") is False for x in inputs)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored scale of a weight of this `shape`."""
        if self.granularity == "block":
            assert self.block is not None
            rows, columns = (-(-n // b) for n, b in zip(shape[-2:], self.block, strict=True))
            return (*shape[:-2], rows, columns)
        if self.granularity == "channel":
            return shape[:-1] if self.scale_ndim < len(shape) else (*shape[:-1], 1)
        return (1,) * self.scale_ndim

    def join(self, name: str, data: Any, scale: Any) -> ScaledArray:
        """A stored weight, `data`, and its stored `scale` in one; errors call it `name`.

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
        """The bytes and the scale of a weight `q`, ``[out, in]``, as they are stored under `name`.

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
    """The `Fp8Style` of that name.

    Raises:
      ValueError: there is none.
    """
    if isinstance(style, Fp8Style):
        return style
    if style not in STYLES:
        raise ValueError(
            f"style={style!r} is unknown. Allowed: {', '.join(map(repr, STYLES))}, or the Fp8Style "
            "that load_fp8_safetensors returned."
        )
    return STYLES[style]


def style_of(config: Mapping[str, Any], scales: Mapping[str, np.ndarray]) -> Fp8Style:
    """The style that a ``quantization_config`` describes.

    Args:
      config: the dict.
      scales: of weights by the names of these and a suffix, which tell the rest.

    Raises:
      ValueError: it describes something else; the message says what.
    """
    method = config.get("quant_method")
    if method not in _READERS:
        raise ValueError(
            f"quant_method={method!r} is not read here. Known: "
            f"{', '.join(map(repr, _READERS))}, with FP8 weights."
        )
    granularity, block = _READERS[method](config)
    dtypes = {x.dtype.name for x in scales.values()}
    ndims = {x.ndim for x in scales.values()}
    suffixes = {name[name.rindex("_scale") :] for name in scales}
    if granularity == "tensor":
        ndims = {x.ndim for x in scales.values() if x.size == 1} or {0}
    for what, found in (("dtypes", dtypes), ("suffixes", suffixes), ("dimensions", ndims)):
        if len(found) != 1 and (what != "dimensions" or granularity != "block"):
            raise ValueError(f"The scales of weights have several {what}: {sorted(found)}.")
    (dtype,), (suffix,) = dtypes, suffixes
    if dtype not in _SCALE_DTYPES:
        allowed = ", ".join(_SCALE_DTYPES)
        raise ValueError(f"The scales of weights are {dtype}; known are {allowed}.")
    return Fp8Style(granularity, block, suffix, dtype, max(ndims), dict(config))


def _of_fp8(config: Mapping[str, Any]) -> tuple[Granularity, tuple[int, int] | None]:
    """DeepSeek, Qwen3, transformers and vLLM."""
    _check(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    _check(config, "scale_fmt", ("float", "ue8m0", None))
    _check(config, "activation_scheme", ("dynamic", "static", None))
    block = config.get("weight_block_size")
    return ("tensor", None) if block is None else ("block", _pair("weight_block_size", block))


def _of_compressed_tensors(
    config: Mapping[str, Any],
) -> tuple[Granularity, tuple[int, int] | None]:
    _check(config, "format", ("float-quantized", "naive-quantized"))
    groups = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    found = set()
    for weights in groups:
        _check(weights, "type", ("float",))
        _check(weights, "num_bits", (8,))
        _check(weights, "strategy", ("tensor", "channel", "block"))
        block = weights.get("block_structure")
        is_block = weights["strategy"] == "block"
        found.add((weights["strategy"], _pair("block_structure", block) if is_block else None))
    if len(found) != 1:
        raise ValueError(
            f"config_groups has {len(found)} kinds of weights, {sorted(found, key=str)}, but all "
            "FP8 weights of a checkpoint must be quantized alike here."
        )
    return found.pop()


def _of_modelopt(config: Mapping[str, Any]) -> tuple[Granularity, tuple[int, int] | None]:
    _check(config, "quant_algo", ("FP8",))
    return "tensor", None


_READERS = {
    "fp8": _of_fp8,
    "compressed-tensors": _of_compressed_tensors,
    "modelopt": _of_modelopt,
}


def _check(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    if config.get(key) not in allowed:
        raise ValueError(
            f"{key}={config.get(key)!r} in quantization_config is not read here. Known: "
            f"{', '.join(map(repr, allowed))}."
        )


def _pair(key: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"{key}={value!r} in quantization_config is not a list of two sizes.")
    return value[0], value[1]
