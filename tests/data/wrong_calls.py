"""Calls for type checkers (see test_signatures.py): lines that end in "refused" are wrong."""

import jax
import jax.numpy as jnp
from flax import nnx

import jfp8

rngs, x = nnx.Rngs(0), jnp.ones((2, 3))


def train(optimizer: jfp8.nnx.Optimizer[nnx.Linear], model: nnx.Linear) -> None:
    optimizer.update(model, jfp8.nnx.value_and_grad(lambda m: m(x).sum())(model)[1])
    optimizer.update(3, model)  # refused


jfp8.nnx.Linear(3, 4, kernel_init=nnx.initializers.zeros, recipe="current", rngs=rngs)
jfp8.nnx.Linear(3, 4, recipe=jfp8.recipes.MXFP8BlockScaling(), rngs=rngs)
jfp8.nnx.Linear("three", 4, rngs=rngs)  # refused
jfp8.nnx.Linear(3, 4, kernal_init=nnx.initializers.zeros, rngs=rngs)  # refused
jfp8.nnx.Linear(3, 4, recipe="delaid", rngs=rngs)  # refused
jfp8.nnx.Linear(3, 4, implementation="cuda", rngs=rngs)  # refused
jfp8.nnx.Linear(3, 4, dot_general=jax.lax.dot_general, rngs=rngs)  # refused
jfp8.nnx.Linear(3, 4)  # refused
jfp8.nnx.LinearGeneral((3, 4), 5, axis=(-2, -1), rngs=rngs)
jfp8.nnx.LinearGeneral(3, 4, axis="last", rngs=rngs)  # refused
jfp8.nnx.Conv(3, 4, (3, 3), padding=[(1, 1), (1, 1)], rngs=rngs)
jfp8.nnx.Conv(3, 4, rngs=rngs)  # refused
jfp8.nnx.ConvTranspose(3, 4, 3, kernel_dilation=2, rngs=rngs)
jfp8.nnx.ConvTranspose(3, 4, 3, input_dilation=2, rngs=rngs)  # refused
jfp8.nnx.Einsum("ab,bc->ac", (3, 4), rngs=rngs)
jfp8.nnx.Einsum("ab,bc->ac", 3, rngs=rngs)  # refused
jfp8.nnx.MultiHeadAttention(2, 8, decode=False, attention_products=True, rngs=rngs)
jfp8.nnx.MultiHeadAttention(2, 8, atention_products=True, rngs=rngs)  # refused
jfp8.nnx.LayerNormLinear(3, 4, layernorm_type="rmsnorm", recipe="mxfp8", rngs=rngs)
jfp8.nnx.LayerNormLinear(3, 4, layernorm_type="batchnorm", rngs=rngs)  # refused
jfp8.nnx.LayerNormMLP(3, 4, activation="swiglu", use_bias=False, rngs=rngs)
jfp8.nnx.LayerNormMLP(3, 4, precision=None, rngs=rngs)  # refused
jfp8.nnx.TransformerLayer(8, 32, num_attention_heads=2, recipe="nvfp4", rngs=rngs)
jfp8.nnx.TransformerLayer(8, 32, layer_type="both", rngs=rngs)  # refused
jfp8.nnx.TransformerLayer(8, 32)  # refused
jfp8.nnx.MoE(8, 4, 16, capacity_factor=1.5, rngs=rngs)
jfp8.nnx.MoE(8, 4, 16, capacity=1.5, rngs=rngs)  # refused
jfp8.nnx.DotGeneral(recipe="rowwise")
jfp8.nnx.DotGeneral(recipe=3)  # refused

jfp8.Dense(4, recipe="current", state_collection="fp8")
jfp8.Dense("four")  # refused
jfp8.Dense(4, kernal_init=nnx.initializers.zeros)  # refused
jfp8.Dense(4, recipe="delaid")  # refused
jfp8.LayerNormMLP(16, activation="swiglu", recipe="mxfp8")
jfp8.LayerNormMLP()  # refused
jfp8.TransformerLayer(8, 32, layernorm_type="batchnorm")  # refused

jfp8.convert(nnx.Linear(3, 4, rngs=rngs), recipe={"decoder/*": None, "*": "mxfp8"})
jfp8.convert(nnx.Linear(3, 4, rngs=rngs), recipe="mxfp9")  # refused
jfp8.scaled_dot_general(x, x, (((1,), (1,)), ((), ())), recipe="delaid")  # refused
with jfp8.autocast("delaid"):  # refused
    pass
jfp8.convert(3)  # refused
jfp8.quantize(x, fmt=3)  # refused
jfp8.loss_scale(init_scale="x")  # refused
jfp8.nope()  # refused

jfp8.recipes.DelayedScaling()
jfp8.recipes.Float8CurrentScaling()
jfp8.recipes.RowwiseScaling()
jfp8.recipes.Float8BlockScaling()
jfp8.recipes.MXFP8BlockScaling()
jfp8.recipes.MXFP4BlockScaling()
jfp8.recipes.NVFP4BlockScaling()
jfp8.recipes.NVFP4FourOverSix()
jfp8.recipes.NVFP4RowScaling()
jfp8.recipes.QuantizationAware()
jfp8.recipes.DirectE5M2()
jfp8.recipes.Hybrid()
jfp8.recipes.Unscaled()
jfp8.recipes.DelayedScaling(amax_history=3)  # refused
jfp8.recipes.DelayedScaling(margin="x")  # refused
jfp8.recipes.DelayedScaling(fp8_format="E5M3")  # refused
