"""Flax Linen modules: Flax's own layers with an FP8 matmul inside.

State lives in two collections next to ``params``, both created by ``model.init``:

  * ``fp8/<path>/{lhs,rhs,grad}``: amax histories;
  * ``fp8_sink/<path>/amax``: zeros, whose gradient carries the amaxes of the backward pass.

What `apply` is given decides which tensors use delayed scaling. Without ``fp8``, all use current
scaling; with it, activations use their histories, and so do weights where a gradient is taken; with
``fp8_sink`` too, so do gradients. Without a sink, an `apply` that is differentiated updates a
mutable ``fp8``. With a sink, `jfp8.advance` updates it, once per optimizer step.

With ``state_collection="_overwrite_with_gradient"`` all state of a matmul is one variable of that
collection instead, and its gradient is its next value: for loops that replace the one by the
other, such as Flax's own ``TrainState``. `histories_in` reads it.

Recipes that round stochastically draw from the random stream ``fp8``, if `apply` is given one
(``rngs={"fp8": key}``), and otherwise from the data; see `jfp8.scaled_dot_general`.
"""

from jfp8.layers.linen.attention import EinsumProduct, MultiHeadDotProductAttention
from jfp8.layers.linen.dot_product_attention import DotProductAttention
from jfp8.layers.linen.fused import LayerNormDense, LayerNormMLP
from jfp8.layers.linen.layers import Conv, ConvTranspose, Dense, DenseGeneral, Einsum
from jfp8.layers.linen.moe import ExpertDense, MoE, RaggedDot
from jfp8.layers.linen.products import ConvGeneralDilated, DotGeneral
from jfp8.layers.linen.state_in_gradients import histories_in
from jfp8.layers.linen.transformer import RelativePositionBiases, TransformerLayer
from jfp8.layers.transformer_math import ClampedSwiglu
from jfp8.products.ragged.routing import Routing, route, routing_of
from jfp8.tracing.listing import listing

__all__ = [
    "ClampedSwiglu",
    "Conv",
    "ConvGeneralDilated",
    "ConvTranspose",
    "Dense",
    "DenseGeneral",
    "DotGeneral",
    "DotProductAttention",
    "Einsum",
    "EinsumProduct",
    "ExpertDense",
    "LayerNormDense",
    "LayerNormMLP",
    "MoE",
    "MultiHeadDotProductAttention",
    "RaggedDot",
    "RelativePositionBiases",
    "TransformerLayer",
    "histories_in",
    "Routing",
    "route",
    "routing_of",
]

__dir__ = listing(__all__)
