"""`names_for`: the names of a model's tensors in files for PyTorch, and their places in Flax."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes

from jfp8.checkpoint.torch_layout import Place, places


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the tables of name_maps.toml: for each tensor of a model, its place."""
    data = tomllib.loads(Path(__file__).with_name("name_maps.toml").read_text("utf-8"))
    found: dict[str, dict[str, str]] = {}
    for table, parts in data["tables"].items():
        rows = [row for part in parts for row in data["rows"][part].items()]
        found[table] = {f"{data['tensors'][name]}.weight": place for name, place in rows}
    return found


def names_for(table: str | Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Place]:
    """Return the places of all tensors of a model, for `to_flax_params` and `from_flax_params`.

    Args:
      table: the name of a table here, such as ``"tunix/qwen3"``; or your own: for each tensor, with
        ``{i}`` for the number of its layer and ``{j}`` for its expert's number, its place as in
        `to_flax_params`, where ``heads``, ``kv_heads`` and ``depth`` have the sizes in `config`.
      config: config.json of the model, or its ``"text_config"``.

    Returns:
      A `Place` for each name of a tensor.

    Raises:
      ValueError: an unknown table.

    >>> import jfp8
    >>> config = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    >>> table = {"h.{i}.q.weight": "layers_{i}/query/kernel: (heads depth) in -> in heads depth"}
    >>> jfp8.checkpoint.names_for(table, config)["h.0.q.weight"].axes
    '(heads=4 depth=16) in -> in heads depth'
    """
    if isinstance(table, str) and table not in tables():
        raise ValueError(
            f"table={table!r} is unknown. Allowed: {', '.join(map(repr, tables()))}, or your own, "
            '{"model.layers.{i}.mlp.up_proj.weight": "layers/{i}/up/kernel", ...}.'
        )
    given = {"hidden_size": 0, "num_experts": config.get("num_local_experts", 1)} | dict(config)
    heads, width = given["num_attention_heads"], given["hidden_size"]
    depth = given.get("head_dim") or width // heads or 1
    sizes = {"heads": heads, "depth": depth, "kv_heads": given.get("num_key_value_heads", heads)}
    factors = {"depth**-0.5": depth**-0.5, "width**0.5": float(ml_dtypes.bfloat16(width**0.5))}
    found = {}
    for name, row in (tables()[table] if isinstance(table, str) else table).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if isinstance(row, str):
            for factor, value in factors.items():
                row = row.replace(factor, repr(value))
        place = places({"": row})[""]
        layers = range(given["num_hidden_layers"] if "{i}" in name else 1)
        experts = range(given["num_experts"] if "{j}" in name else 1)
        for i, j in itertools.product(layers, experts):
            axes = place.axes and _with_sizes(place.axes.format(i=i, j=j), sizes)
            path = place.path.format(i=i, j=j)
            found[name.format(i=i, j=j)] = replace(place, path=path, axes=axes)
    return found


def _with_sizes(axes: str, sizes: Mapping[str, int]) -> str:
    left, arrow, right = axes.partition("->")
    names = rf"\b({'|'.join(sizes)})\b(?!=)"
    return re.sub(names, lambda name: f"{name[0]}={sizes[name[0]]}", left) + arrow + right
