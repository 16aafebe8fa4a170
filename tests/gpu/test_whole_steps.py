"""Whole steps of a block of today's language models, compiled for one H200 and for eight.

`jfp8.debug.audit` counts what layers alone do not show: FLOPs, kernels, exchanges, operands that
are quantized more than once, and the time that compiling takes. Nothing is executed; elsewhere it
is skipped: see `test_compiled`.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jfp8
from support.gpu_programs import Program, compile_divided, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from support.interpreter import cudnn_known

BF16 = jnp.bfloat16
WIDTH, HEADS, KEY_HEADS, MLP, TOKENS = 4096, 32, 8, 14336, 8192
KERNELS = 2 * WIDTH * (WIDTH + WIDTH // HEADS * KEY_HEADS) + 3 * WIDTH * MLP  # elements
FORWARD_AND_BACKWARD = 6 * TOKENS * KERNELS  # operations, without attention


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


@dataclass(frozen=True)
class Step:
    """Where a step runs: axes, layouts of kernels that widen and narrow, parts of a batch."""

    axes: dict[str, int]
    wide: Any = P()
    narrow: Any = P()
    micro_batches: int = 1

    def spec(self, path: Any, leaf: Any) -> P:
        """The layout of an array of the state, or of a result."""
        name = jax.tree_util.keystr(path)
        if leaf.ndim == 2 and leaf.size > 2**20:
            return self.narrow if "out" in name or "down" in name else self.wide
        return P("data") if leaf.ndim == 3 and "data" in self.axes else P()


STEPS = {
    "one GPU": Step({"x": 1}),
    "4 micro-batches": Step({"x": 1}, micro_batches=4),
    "8 GPUs, FSDP": Step({"data": 8}, P("data"), P("data")),
    "8 GPUs, FSDP×TP 2×4": Step({"data": 2, "tp": 4}, P("data", "tp"), P("tp", "data")),
}


@functools.cache
def compiled(name: str, recipe: str | None) -> tuple[Program, float]:
    """The program of a step, and the seconds of this process that tracing and compiling took."""
    step, began = STEPS[name], time.process_time()
    create = lambda: Block(nnx.Rngs(0))
    if recipe is not None:
        create = lambda: jfp8.convert(Block(nnx.Rngs(0)), recipe, exempt=())
    graphdef, state = nnx.split(nnx.eval_shape(create))

    def run(state, x, dy):
        model = nnx.merge(graphdef, state)
        loss = lambda model, x, dy: jnp.sum(model(x).astype(jnp.float32) * dy)
        parts = {"micro_batches": step.micro_batches}
        found = jfp8.nnx.value_and_grad(loss, **parts)(model, x, dy)
        return found, nnx.state(model, nnx.Not(nnx.Param))

    batch = 4 * step.axes.get("data", 1) * step.micro_batches
    x = jax.ShapeDtypeStruct((batch, TOKENS // 4, WIDTH), BF16)
    with cudnn_known():
        results = jax.eval_shape(run, state, x, x)
        args = (state, x, x)
        specs, out = (jax.tree.map_with_path(step.spec, tree) for tree in (args, results))
        program = compile_divided("h200", step.axes, run, args, specs, out)
    return program, time.process_time() - began


@dataclass(frozen=True)
class Bounds:
    """The most of what costs time besides matmuls and bytes.

    Attributes:
      small: kernels below 1 MB.
      transposes: of f8 arrays. FSDP gathers parts of a weight one after the other that must lie
        side by side.
      exchanges: collectives below 1 MB.
      kernels: Pallas kernels that are compiled: one of each shape and type for amaxes, and one that
        quantizes.
      rounded: scales. XLA splits small results along long sums, and rounds the scale of the sum.
      compiling: seconds over those of bf16.
    """

    small: int
    transposes: int = 0
    exchanges: int = 0
    kernels: int = 18
    rounded: int = 0
    compiling: float = 12


BOUNDS = {
    ("one GPU", "delayed"): Bounds(34),
    ("one GPU", "current"): Bounds(31),
    ("4 micro-batches", "delayed"): Bounds(325),
    ("8 GPUs, FSDP", "delayed"): Bounds(96, transposes=7, exchanges=10),
    ("8 GPUs, FSDP×TP 2×4", "delayed"): Bounds(
        100, transposes=9, exchanges=14, kernels=24, rounded=4
    ),
}


@pytest.mark.parametrize(("name", "recipe"), BOUNDS)
def test_step(name, recipe, recorded):
    """All that bf16 multiplies is in FP8, no more is sent, and little is done besides."""
    plain, plain_seconds = compiled(name, None)
    program, seconds = compiled(name, recipe)
    recorded(f"{name}: converted NNX block, 4096→14336, seven `nnx.Linear`, {recipe}", program)
    bf16, audit, step, most = plain.audit, program.audit, STEPS[name], BOUNDS[name, recipe]
    print(name, recipe, f"compiled in {seconds:.1f} s, bf16 in {plain_seconds:.1f} s")
    print(audit, f"kernels compiled: {len(program.kernels)}", sep="\n")
    assert {m.kind: m.count for m in audit.matmuls} == {
        "FP8, cuBLASLt": 21 * step.micro_batches,
        "attention, cuDNN": 2 * step.micro_batches,
    }
    share = step.micro_batches / step.axes.get("tp", 1)
    assert audit.flops == pytest.approx(FORWARD_AND_BACKWARD * share)
    assert audit.flops == pytest.approx(bf16.flops)
    assert audit.is_exact
    # Weights are gathered twice in one byte, where bf16 gathers once in two.
    assert audit.sent.total <= 1.01 * bf16.sent.total
    assert audit.small_launches <= most.small
    assert audit.f8_transposes <= most.transposes
    assert audit.small_collectives <= most.exchanges
    assert len(program.kernels) <= most.kernels
    assert audit.rounded_scales <= most.rounded
    assert seconds <= most.compiling * plain_seconds
    # Delayed scaling has a history for each layer, so that layers with one input quantize it each.
    again = sorted(times for _, times in audit.quantized_again)
    assert again == ([2, 3] if recipe == "delayed" else [])
