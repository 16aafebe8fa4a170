"""A training step of the 1B model of `examples/train_nnx_lm.py`, compiled for eight H200."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jfp8
from gpu_programs import compile_divided, why_not
from support.scripts import imported

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from support.interpreter import cudnn_known

llama_nnx, fsdp_nnx = (imported(f"lm.{name}", "examples") for name in ("llama_nnx", "fsdp_nnx"))
SIZE, BATCH = llama_nnx.SIZES["1b"][0], 64
KERNELS = 20 * (2048 * (2048 + 2 * 512) + 2048**2 + 3 * 2048 * 6144)  # elements
TABLES = 2 * 32_768 * 2048  # embeddings and logits, which stay in high precision


def compiled_step(recipe):
    def create():
        model = llama_nnx.LanguageModel(SIZE, attention="cudnn", rngs=nnx.Rngs(0))
        model = jfp8.convert(model, recipe) if recipe else model
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        return model, jfp8.nnx.Optimizer(model, tx)

    graphdef, state = nnx.split(nnx.eval_shape(create))
    params = jax.tree.leaves(nnx.state(nnx.merge(graphdef, state)[0], nnx.Param))
    norms = (2 * SIZE.layers + 1) * SIZE.width
    assert sum(x.size for x in params) == KERNELS + TABLES + norms
    specs = jax.tree.map(lambda x: fsdp_nnx.spec_of(x, 8), state)
    windows = jax.ShapeDtypeStruct((BATCH, SIZE.seq_len + 1), jnp.int32)
    step = fsdp_nnx.make_step(graphdef)
    results = specs, {"loss": P(), "skipped": P()}
    with cudnn_known():
        inputs = (state, windows), (specs, P("fsdp"))
        return compile_divided("h200", {"fsdp": 8}, step, *inputs, results, donated=(0,))


def sent(program):
    """Bytes that a device sends, by operation and type; without scales, amaxes and norms."""
    found = Counter()
    for c in program.exchanged.collectives:
        found[c.op, c.dtype] += c.bytes if c.bytes > 4e6 else 0
    return +found


def test_1b_in_fp8(recorded):
    """Weights are gathered as bytes, forward and backward; gradients are scattered in bf16."""
    name = "8 GPUs, FSDP: `train_nnx_lm.py --size 1b`, delayed"
    program = recorded(name, compiled_step("delayed"))
    # Four layers, forward and backward; XLA takes one backward pass out of the loop over layers.
    assert len(program.hlo.f8_products) == len(program.hlo.fp8_products) == 12 + 8
    kinds = Counter(i.target for i in program.hlo.other_products)
    backward = "__cudnn$fmhaSoftmaxBackward"
    assert kinds == {"": 3, "__cudnn$fmhaSoftmax": 1, backward: 2}  # logits, and attention
    assert sent(program) == pytest.approx(
        {
            ("all-gather", "f8e4m3fn"): 2 * KERNELS * 7 / 8,
            ("all-gather", "bf16"): 2 * TABLES * 7 / 8,
            ("reduce-scatter", "bf16"): 2 * (KERNELS + TABLES) * 7 / 8,
        },
        rel=0.01,
    )
    assert program.memory < 24e9
