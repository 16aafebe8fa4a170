"""Flax NNX modules: Flax's own layers with an FP8 matmul inside.

Each matmul holds its amax histories in a Variable of type `Fp8State`; the
``nnx.Param`` state of a model is the same as without FP8. There are two ways to train:

  * any loop, with ``nnx.grad`` or ``nnx.value_and_grad``: calls that are differentiated update the
    histories of activations and weights. Gradients use current scaling, because their amaxes are
    not recorded;
  * `jfp8.nnx.value_and_grad` instead: gradients use their histories too, and every history gets one
    entry per step.

Recipes that round stochastically draw from the data; see `jfp8.scaled_dot_general`.
"""

from typing import TYPE_CHECKING

from jfp8.layers.nnx.attention import DotProductAttention, MultiHeadAttention
from jfp8.layers.nnx.fused import LayerNormLinear, LayerNormMLP
from jfp8.layers.nnx.layers import Conv, ConvTranspose, Einsum, Linear, LinearGeneral
from jfp8.layers.nnx.moe import ExpertDense, MoE, RaggedDot, RouterBias
from jfp8.layers.nnx.products import (
    ConvGeneralDilated,
    DotGeneral,
    EinsumOp,
    Fp8Sink,
    Fp8State,
    Product,
)
from jfp8.layers.nnx.transformer import RelativePositionBiases, TransformerLayer
from jfp8.layers.transformer_math import ClampedSwiglu
from jfp8.products.ragged.routing import Routing, route, routing_of
from jfp8.tracing.listing import listing, missing
from jfp8.training.nnx_optimizer import Optimizer
from jfp8.training.nnx_step import value_and_grad

__all__ = [
    "ClampedSwiglu",
    "Conv",
    "ConvGeneralDilated",
    "ConvTranspose",
    "DotGeneral",
    "DotProductAttention",
    "Einsum",
    "EinsumOp",
    "ExpertDense",
    "Fp8Sink",
    "Fp8State",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearGeneral",
    "MoE",
    "MultiHeadAttention",
    "Optimizer",
    "Product",
    "RaggedDot",
    "RelativePositionBiases",
    "RouterBias",
    "TransformerLayer",
    "Routing",
    "route",
    "routing_of",
    "value_and_grad",
]

__dir__ = listing(__all__)

_LINEN = {"Dense": "Linear", "DenseGeneral": "LinearGeneral", "TrainState": "Optimizer"}
if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__ = lambda name: missing(name, "jfp8.nnx", __all__, _LINEN)
