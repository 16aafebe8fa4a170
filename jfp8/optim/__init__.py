"""Optax transformations for training in FP8."""

from jfp8.optim.loss_scaling import LossScaleState, loss_scale, scale_loss, skip_on_overflow
from jfp8.optim.stochastic_rounding import StochasticRoundingState, stochastic_rounding

__all__ = [
    "LossScaleState",
    "StochasticRoundingState",
    "loss_scale",
    "scale_loss",
    "skip_on_overflow",
    "stochastic_rounding",
]
