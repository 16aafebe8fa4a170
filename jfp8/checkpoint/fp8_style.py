"""`Fp8Style`: the formats that a library reads, and what it has to know of them in config.json."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jfp8.checkpoint.weight_layout import WeightLayout
from jfp8.scaling.arrays import ScaledArray

# Where a library that mixes formats says which, and what it calls several.
_MIXED = {
    "compressed-tensors": ("format", "mixed-precision"),
    "modelopt": ("quant_algo", "MIXED_PRECISION"),
}
Stored = tuple[WeightLayout, bool]
"""How a layer is stored, and if it has calibrated scales of activations."""


@dataclass(frozen=True)
class Fp8Style:
    """The format of a checkpoint's quantized weights. serving_formats.toml lists new formats.

    Attributes:
      library: the ``quant_method`` of its config.json.
      layouts: those that a weight may have. One that repeats no scale is taken, if there is one.
      quantization_config: the dict of that name in config.json, of files read. If None, it
        is made of the tensors that are saved, and names every layer in high precision.
      input_scales: the files have calibrated scales of activations.
      outer: stored outer scales, by weight, which their reciprocals in memory would not give back.
    """

    library: str
    layouts: tuple[WeightLayout, ...]
    quantization_config: Mapping[str, Any] | None = field(default=None, hash=False)
    input_scales: bool = False
    outer: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    def split(self, name: str, q: ScaledArray) -> tuple[WeightLayout, dict[str, np.ndarray]]:
        """Return the layout of a weight `q`, ``[out, in]``, and its tensors, stored under `name`.

        Raises:
          ValueError: no layout has its scales, or one would round them.
        """
        if found := self._held(name, q):
            scales = lambda layout, tensors: tensors[layout.tensors(name)[1]].size
            layout, tensors = min(found, key=lambda held: (not held[0].is_mx, scales(*held)))
            if name in self.outer and layout.is_outer_scale(self.outer[name], q):
                tensors[layout.tensors(name)[2]] = self.outer[name]
            return layout, tensors
        others = [key for key, style in styles().items() if style._holds_exactly(name, q)]
        raise ValueError(
            f"{name!r}, {q!r}, cannot be stored in this style, which has (FP8 in E4M3 alone) "
            f"{', '.join(layout.in_words() for layout in self.layouts)}. Save it in another style"
            f"{' (' + ', '.join(map(repr, others)) + ')' if others else ''}, or quantize it so: "
            "jfp8.quantize_params(params, recipe)."
        )

    def _held(self, name: str, q: ScaledArray) -> list[tuple[WeightLayout, dict[str, np.ndarray]]]:
        fitted = [layout.fitted(q) for layout in self.layouts]
        splits = [(layout, layout.split(name, q)) for layout in fitted]
        return [(layout, tensors) for layout, tensors in splits if tensors is not None]

    def _holds_exactly(self, name: str, q: ScaledArray) -> bool:
        try:
            return bool(self._held(name, q))
        except ValueError:  # would round its scales
            return False

    def config(self, layers: Mapping[str, Stored | None]) -> dict[str, Any]:
        """Return the ``quantization_config`` of config.json.

        Args:
          layers: how each layer is stored, by name, or None for high precision.

        Raises:
          ValueError: several formats, or none, in a style that has one.
        """
        if self.quantization_config is not None:
            return dict(self.quantization_config)
        layers = {"lm_head": None, **layers}
        groups: dict[Stored, list[str]] = {}
        for name in sorted(layers):
            if stored := layers[name]:
                groups.setdefault(stored, []).append(name)
        kept = sorted(name for name, stored in layers.items() if stored is None)
        entries = [_entry(*stored, names[0]) for stored, names in groups.items()]
        config: dict[str, Any] = {"quant_method": self.library}
        both = {key: value for entry in entries for key, value in entry.items()}
        if not groups or (self.library not in _MIXED and any(x | both != both for x in entries)):
            raise ValueError(
                f"This style has one format of weights, and not {len(groups)}. Pass ScaledArrays, "
                "or arrays and recipe=, all with an input_scale or none."
            )
        if self.library not in _MIXED:
            return {**config, **both, "modules_to_not_convert": kept}
        mixed = _mixed(*_MIXED[self.library], entries, list(groups.values()))
        return {**config, **mixed, "ignore": kept}


def _mixed(key: str, several: str, entries: list[Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return the config of groups of layers, for a library that mixes formats."""
    found = [entry[key] for entry in entries]
    config: dict[str, Any] = {key: found[0] if len(set(found)) == 1 else several}
    if key == "format":
        config["quantization_status"] = "compressed"
    elif len(groups) > 1:
        pairs = zip(found, groups, strict=True)
        config["quantized_layers"] = {name: {key: x} for x, names in pairs for name in names}
    for entry, names in zip(entries, groups, strict=True):
        entry["targets"] = ["Linear"] if len(groups) == 1 else names
    return {**config, "config_groups": {f"group_{i}": entry for i, entry in enumerate(entries)}}


def _entry(layout: WeightLayout, calibrated: bool, layer: str) -> dict[str, Any]:
    """Return what config.json says of a group of layers, one of which errors call `layer`."""
    more = layout.calibrated if calibrated else layout.group
    if more is None:
        which, cure = ("with", "leave it out") if calibrated else ("without", "add it")
        raise ValueError(
            f"{layer!r} is {layout.kind} {which} a calibrated scale of activations (input_scale), "
            f'which this library has not: {cure}, or save in the style "compressed-tensors".'
        )
    entry = {**(layout.group or {}), **more}
    if "block_structure" in entry.get("weights", {}):
        rows, columns = layout.block
        entry["weights"] = entry["weights"] | {"block_structure": [rows, columns]}
        entry["input_activations"] = entry["input_activations"] | {"group_size": columns}
    return entry


@cache
def styles() -> dict[str, Fp8Style]:
    """Return the styles of new checkpoints, by name."""
    text = Path(__file__).with_name("serving_formats.toml").read_text("utf-8")
    found = {}
    for name, rows in tomllib.loads(text).items():
        library, layouts = rows.pop("library", name), []
        for kind, row in rows.items():
            fields: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
            layouts.append(WeightLayout(kind, **fields))
        found[name] = Fp8Style(library, tuple(layouts))
    return found


# Other entries of a config that have to be known: "fp8" is that of DeepSeek, Qwen3 and vLLM.
_KNOWN = {
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None),
    "activation_scheme": ("dynamic", "static", None),
    "expert_dtype": ("fp8", "fp4", None),
}


def layouts_in(config: Mapping[str, Any]) -> list[WeightLayout]:
    """Return the layouts of the weights that a ``quantization_config`` describes, or raise."""
    method = _known(config, "quant_method", sorted({x.library for x in styles().values()}))
    layouts = [x for style in styles().values() if style.library == method for x in style.layouts]
    if method == "fp8":
        return _fp8_layouts(config, {layout.kind: layout for layout in layouts})
    if method == "modelopt":
        return _modelopt_layouts(config, layouts)
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        return list(dict.fromkeys(_layout_of(x.get("weights") or {}, layouts) for x in groups))
    return layouts


def _fp8_layouts(config: Mapping[str, Any], layouts: dict[str, WeightLayout]) -> list[WeightLayout]:
    """Return the layouts of weights of DeepSeek, Qwen3 and vLLM, with all names of scales."""
    for key, allowed in _KNOWN.items():
        _known(config, key, allowed)
    layout, sizes = layouts["fp8-tensor"], config.get("weight_block_size")
    if sizes is not None:
        layout = replace(layouts["fp8-block"], block=_pair("weight_block_size", sizes))
    scales = ("_scale_inv", "_scale", ".scale")
    return [replace(x, suffixes=("", s)) for x in (layouts["mxfp4"], layout) for s in scales]


def _modelopt_layouts(config: Mapping[str, Any], layouts: list[WeightLayout]) -> list[WeightLayout]:
    both = [(x, layout) for layout in layouts for x in (layout.group, layout.calibrated) if x]
    named = {x["quant_algo"]: layout for x, layout in both if "quant_algo" in x}
    layers = list((config.get("quantized_layers") or {}).values()) or [config]
    return list(dict.fromkeys(named[_known(x, "quant_algo", named)] for x in layers))


def _layout_of(weights: Mapping[str, Any], layouts: list[WeightLayout]) -> WeightLayout:
    keys = ("type", "num_bits", "strategy", "group_size")
    asked = lambda given: {key: given[key] for key in keys if given.get(key) is not None}
    rows = [asked((layout.group or {})["weights"]) for layout in layouts]
    layout = layouts[rows.index(_known({"weights": asked(weights)}, "weights", rows))]
    if layout.kind != "fp8-block":
        return layout
    return replace(layout, block=_pair("block_structure", weights.get("block_structure")))


def _known(config: Mapping[str, Any], key: str, allowed: Iterable[Any]) -> Any:
    """Return an entry of a config, if it is one of those that are read here."""
    if config.get(key) not in list(allowed):
        raise ValueError(
            f"{key}={config.get(key)!r} in quantization_config is not read here. Known: "
            f"{', '.join(map(repr, allowed))}. Dequantize the checkpoint with the library that "
            "wrote it, and quantize its values: jfp8.quantize_params(params, recipe)."
        )
    return config.get(key)


def _pair(key: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"{key}={value!r} in quantization_config is not a list of two sizes.")
    return value[0], value[1]
