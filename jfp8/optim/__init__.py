"""Optax transformations for FP8 training."""

from jfp8.optim.adam import adam, adamw, scale_by_adam
from jfp8.optim.block_storage import Blocks
from jfp8.optim.fp8_gradients import fp8_gradients
from jfp8.optim.fp8_params import apply_updates, carriers, with_carriers
from jfp8.optim.loss_scaling import loss_scale, scale_loss, skip_on_overflow
from jfp8.optim.masters import (
    init_masters,
    master_weights,
    stochastic_rounding,
)
from jfp8.optim.muon import muon
from jfp8.optim.state_shardings import state_shardings
from jfp8.optim.storage import Float, ScaledFloat16, Storage
from jfp8.optim.stored_state import store_state
from jfp8.optim.wrapping import MasterWeightsState
from jfp8.tracing.listing import listing

__all__ = [
    "Blocks",
    "Float",
    "MasterWeightsState",
    "ScaledFloat16",
    "Storage",
    "adam",
    "adamw",
    "apply_updates",
    "carriers",
    "fp8_gradients",
    "init_masters",
    "loss_scale",
    "master_weights",
    "muon",
    "scale_by_adam",
    "scale_loss",
    "skip_on_overflow",
    "state_shardings",
    "stochastic_rounding",
    "store_state",
    "with_carriers",
]

__dir__ = listing(__all__)
