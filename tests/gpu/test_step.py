"""A whole step of a layer of today's language models, as people write it in NNX, for an H200.

Nothing is executed; elsewhere it is skipped: see `test_compiled`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jfp8
from support.gpu_programs import compile_for, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from support.interpreter import cudnn_known

BF16 = jnp.bfloat16
WIDTH, HEADS, KEY_HEADS, MLP = 4096, 32, 8, 14336


class Block(nnx.Module):
    """RMSNorm, grouped-query attention, SwiGLU: seven layers, three of them of one input."""

    def __init__(self, rngs):
        norm = partial(nnx.RMSNorm, WIDTH, dtype=BF16, param_dtype=BF16, rngs=rngs)
        how = {"use_bias": False, "dtype": BF16, "param_dtype": BF16, "rngs": rngs}
        keys = WIDTH // HEADS * KEY_HEADS
        self.norms = nnx.List([norm(), norm()])
        self.q, self.k, self.v, self.out = (
            nnx.Linear(WIDTH, n, **how) for n in (WIDTH, keys, keys, WIDTH)
        )
        self.gate, self.up = (nnx.Linear(WIDTH, MLP, **how) for _ in range(2))
        self.down = nnx.Linear(MLP, WIDTH, **how)

    def __call__(self, x):
        y, heads = self.norms[0](x), (*x.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (layer(y).reshape(heads) for layer in (self.q, self.k, self.v))
        how = {"is_causal": True, "implementation": "cudnn"}
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, **how).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize(("recipe", "small"), [("delayed", 36), ("current", 32)])
def test_block(recipe, small, recorded):
    """Histories are made together, and every scale is used as it is."""
    create = lambda: jfp8.convert(Block(nnx.Rngs(0)), recipe, exempt=())
    graphdef, state = nnx.split(nnx.eval_shape(create))

    def step(state, x, dy):
        model = nnx.merge(graphdef, state)
        loss = lambda model, x: jnp.sum(model(x).astype(jnp.float32) * dy)
        wrt = nnx.DiffState(0, nnx.Param), 1
        found = jfp8.nnx.value_and_grad(loss, argnums=wrt)(model, x)
        return found, nnx.state(model, nnx.Not(nnx.Param))

    x = jax.ShapeDtypeStruct((4, 2048, WIDTH), BF16)
    with cudnn_known():
        program = compile_for("h200", step, state, x, x)
    name = f"converted NNX block, 4×2048 tokens, 4096→14336, seven `nnx.Linear`, {recipe}"
    hlo = recorded(name, program).hlo
    assert len(hlo.f8_products) == len(hlo.fp8_products) == 21
    assert {i.target for i in hlo.other_products} == {
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    }
    assert hlo.f8_transposes == []
    assert hlo.rounded_scales == []
    assert len(hlo.small_kernels) <= small
