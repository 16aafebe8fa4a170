"""Checkpoints: saving so that nothing is lost, and loading into models with and without FP8.

`load` and `save` handle files, `upgrade` and `downgrade` handle models, and `restore` does both.
The others import amax histories of other libraries.
"""

from jfp8.checkpoint.changes import CheckpointChange
from jfp8.checkpoint.downgrade import downgrade
from jfp8.checkpoint.files import load, restore, save
from jfp8.checkpoint.flax_fp8_ops import from_flax_fp8_ops
from jfp8.checkpoint.transformer_engine import from_transformer_engine
from jfp8.checkpoint.upgrade import upgrade

__all__ = [
    "CheckpointChange",
    "downgrade",
    "from_flax_fp8_ops",
    "from_transformer_engine",
    "load",
    "restore",
    "save",
    "upgrade",
]
