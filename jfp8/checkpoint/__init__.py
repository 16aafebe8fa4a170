"""Checkpoints: saving so that nothing is lost, and loading into models with and without FP8.

`load` and `save` handle files, `upgrade` and `downgrade` handle models, and `restore` does both.
`load_fp8_safetensors` and `save_fp8_safetensors` exchange FP8 and FP4 weights with PyTorch and
engines that serve models, to which `serving_tensors` sends them without a file; `names_for` has
the names of several models. The others import amax histories of other libraries.
"""

from jfp8.checkpoint.changes import CheckpointChange
from jfp8.checkpoint.files import load, restore, save
from jfp8.checkpoint.flax_fp8_ops import from_flax_fp8_ops
from jfp8.checkpoint.fp8_safetensors import (
    load_fp8_safetensors,
    save_fp8_safetensors,
    serving_tensors,
)
from jfp8.checkpoint.name_maps import names_for
from jfp8.checkpoint.torch_layout import Place, from_flax_params, to_flax_params
from jfp8.checkpoint.transformer_engine import from_transformer_engine
from jfp8.checkpoint.upgrade import downgrade, upgrade
from jfp8.tracing.listing import listing

__all__ = [
    "CheckpointChange",
    "Place",
    "downgrade",
    "from_flax_fp8_ops",
    "from_flax_params",
    "from_transformer_engine",
    "load",
    "load_fp8_safetensors",
    "names_for",
    "restore",
    "save",
    "save_fp8_safetensors",
    "serving_tensors",
    "to_flax_params",
    "upgrade",
]

__dir__ = listing(__all__)
