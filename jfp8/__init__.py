"""FP8 training for JAX and Flax.

The folders, in the order in which data passes through them: tracing, scaling, quantizers, matmul,
recipes, products, kernels, layers, collectives, optim, conversion, training, checkpoint, debug,
plot, integrations. A file imports only from its own folder and from those before it.
"""

from typing import TYPE_CHECKING

from jfp8 import (
    checkpoint,
    checkpoint_policies,
    collectives,
    debug,
    linen,
    nnx,
    optim,
    plot,
    quantizers,
    recipes,
    scaling,
)
from jfp8.conversion.function import Fp8Function
from jfp8.conversion.models import autocast, convert
from jfp8.conversion.product_report import Report
from jfp8.conversion.report import report
from jfp8.conversion.selection import EDGES, Edge
from jfp8.conversion.weights import quantize_params
from jfp8.debug.sizes import Summary, summary
from jfp8.linen import (
    Conv,
    ConvTranspose,
    Dense,
    DenseGeneral,
    Einsum,
    LayerNormDense,
    LayerNormMLP,
    MoE,
    MultiHeadDotProductAttention,
    TransformerLayer,
)
from jfp8.matmul.scaled_matmul import scaled_matmul
from jfp8.optim import loss_scale, scale_loss, skip_on_overflow
from jfp8.optim.loss_scale_state import LossScaleState
from jfp8.optim.state_shardings import shardings
from jfp8.products.conv import scaled_conv_general_dilated
from jfp8.products.dot_general import scaled_dot_general
from jfp8.products.flash.dot_product import scaled_dot_product_attention
from jfp8.products.ragged.dot import scaled_ragged_dot
from jfp8.products.saved_activations import save_in_fp8
from jfp8.scaling.arrays import ScaledArray, dequantize
from jfp8.scaling.casts import cast, round_to_format
from jfp8.scaling.formats import E2M1FN, E3M4, E4M3FN, E5M2, E8M0FNU, Format
from jfp8.scaling.granularity import Block, PerAxis, PerTensor
from jfp8.scaling.quantization import quantize
from jfp8.scaling.trees import dequantize_tree, is_scaled_array
from jfp8.tracing.backends import backends
from jfp8.tracing.device import for_platforms
from jfp8.tracing.listing import listing, missing
from jfp8.training.data_parallel import data_parallel
from jfp8.training.end_of_step import advance
from jfp8.training.gather_weights import gather_weights
from jfp8.training.initialize import initialize
from jfp8.training.metrics import metrics
from jfp8.training.state import Gradients, TrainState
from jfp8.training.step import value_and_grad

__version__ = "0.2.0"

__all__ = [
    "E2M1FN",
    "E3M4",
    "E4M3FN",
    "E5M2",
    "E8M0FNU",
    "Block",
    "Conv",
    "ConvTranspose",
    "Dense",
    "DenseGeneral",
    "EDGES",
    "Edge",
    "Einsum",
    "Format",
    "Fp8Function",
    "Gradients",
    "LayerNormDense",
    "LayerNormMLP",
    "LossScaleState",
    "MoE",
    "MultiHeadDotProductAttention",
    "PerAxis",
    "PerTensor",
    "Report",
    "ScaledArray",
    "Summary",
    "TrainState",
    "TransformerLayer",
    "__version__",
    "advance",
    "autocast",
    "backends",
    "cast",
    "checkpoint",
    "checkpoint_policies",
    "collectives",
    "convert",
    "data_parallel",
    "debug",
    "dequantize",
    "dequantize_tree",
    "for_platforms",
    "gather_weights",
    "initialize",
    "is_scaled_array",
    "linen",
    "loss_scale",
    "metrics",
    "nnx",
    "optim",
    "plot",
    "quantize",
    "quantize_params",
    "quantizers",
    "recipes",
    "report",
    "round_to_format",
    "save_in_fp8",
    "scale_loss",
    "scaled_conv_general_dilated",
    "scaled_dot_general",
    "scaled_dot_product_attention",
    "scaled_matmul",
    "scaled_ragged_dot",
    "scaling",
    "shardings",
    "skip_on_overflow",
    "summary",
    "value_and_grad",
]

__dir__ = listing(__all__)


_ELSEWHERE = {name: f"jfp8.recipes.{name}" for name in recipes.__all__} | {
    name: f"jfp8.nnx.{name} in NNX; Linen's layers are here, such as jfp8.Dense"
    for name in nnx.__all__
}
if not TYPE_CHECKING:  # or type checkers would accept any name
    __getattr__ = lambda name: missing(name, "jfp8", __all__, _ELSEWHERE)
