"""Whole training steps of models of today, for one GPU and for eight, in bf16 and converted."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jfp8
from gpu_programs import Program, compile_divided, device_of, forward_and_backward
from support.interpreter import cudnn_known

BF16 = jnp.bfloat16
ADAMW = optax.adamw(1e-4)
TOKENS = 2048  # in a sequence; a device has four sequences, or parts of them


def placed(x, spec):
    """Shard `x` as `spec` says, if there is a mesh."""
    no_mesh = jax.sharding.get_abstract_mesh().empty
    return x if no_mesh else jax.lax.with_sharding_constraint(x, spec)


class Block(nnx.Module):
    """RMSNorm, grouped-query attention, SwiGLU: seven layers, three of them of one input."""

    # How arrays lie between attention and MLP, and inside both; None: as the compiler likes.
    outside: P | None = None
    inside: P | None = None

    def __init__(self, width: int, mlp: int, rngs: nnx.Rngs):
        norm = partial(nnx.RMSNorm, width, dtype=BF16, param_dtype=BF16, rngs=rngs)
        how = {"use_bias": False, "dtype": BF16, "param_dtype": BF16, "rngs": rngs}
        keys = max(width // 4, 128)
        self.norms = nnx.List([norm(), norm()])
        self.q, self.k, self.v, self.out = (
            nnx.Linear(width, n, **how) for n in (width, keys, keys, width)
        )
        self.gate, self.up = (nnx.Linear(width, mlp, **how) for _ in range(2))
        self.down = nnx.Linear(mlp, width, **how)

    def __call__(self, x):
        whole, columns = (
            (lambda x: x) if spec is None else partial(placed, spec=spec)
            for spec in (self.outside, self.inside)
        )
        y, heads = whole(self.norms[0](x)), (*x.shape[:2], -1, 128)
        q, k, v = (columns(layer(y)).reshape(heads) for layer in (self.q, self.k, self.v))
        how = {"is_causal": True, "implementation": "cudnn"}
        y = columns(jax.nn.dot_product_attention(q, k, v, **how).reshape(x.shape))
        x = x + whole(self.out(y))
        y = whole(self.norms[1](x))
        return x + whole(self.down(nnx.silu(columns(self.gate(y))) * columns(self.up(y))))


class SequenceParallelBlock(Block):
    """The same, with parts of each sequence outside of attention and MLP."""

    outside, inside = P("data", "tp"), P("data", None, "tp")


class LanguageModel(nnx.Module):
    """Two blocks between an embedding and a head of 32003 tokens, an odd vocabulary."""

    def __init__(self, width: int, mlp: int, rngs: nnx.Rngs):
        how = {"dtype": BF16, "param_dtype": BF16, "rngs": rngs}
        self.embedding = nnx.Embed(32003, width, **how)
        self.blocks = nnx.List([Block(width, mlp, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 32003, use_bias=False, **how)

    def __call__(self, tokens):
        x = placed(self.embedding(tokens), P("data"))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Step:
    """Where a step of a model runs: axes, layouts of kernels that widen and narrow, parts."""

    axes: dict[str, int]
    wide: Any = P()
    narrow: Any = P()
    micro_batches: int = 1
    width: int = 4096
    model: type[nnx.Module] = Block
    exempt: tuple[str, ...] = ()
    trains: bool = False  # with AdamW, in the buffers of the state

    def spec(self, path: Any, leaf: Any) -> P:
        """Return the layout of an array of the state, of the batch, or of a result."""
        name = jax.tree_util.keystr(path)
        if leaf.ndim == 2 and leaf.dtype != jnp.int32 and leaf.size > 2**15:
            if "embedding" in name or "head" in name:  # whose vocabulary is odd
                return P(None, "data") if "embedding" in name else P("data")
            return self.narrow if "out" in name or "down" in name else self.wide
        if leaf.ndim == 3 and self.model is SequenceParallelBlock:
            return self.model.outside
        is_batch = leaf.ndim == 3 or leaf.dtype == jnp.int32 and leaf.ndim == 2
        return P("data") if is_batch and "data" in self.axes else P()

    def compile(self, recipe: str | None) -> Program:
        """Compile loss, gradients and states of a model, converted unless `recipe` is None.

        Or the new model and optimizer, if it `trains`.
        """

        def whole():
            model = self.model(self.width, self.width * 7 // 2, nnx.Rngs(0))
            if recipe is not None:
                model = jfp8.convert(model, recipe, exempt=self.exempt)
            return (model, jfp8.nnx.Optimizer(model, ADAMW)) if self.trains else model

        gpu = AbstractMesh((), (), abstract_device=device_of("h200"))
        with jax.sharding.use_abstract_mesh(gpu):
            graphdef, state = nnx.split(nnx.eval_shape(whole))
        shape = 4 * self.axes.get("data", 1) * self.micro_batches, TOKENS
        x = jax.ShapeDtypeStruct((*shape, self.width), BF16)
        if self.model is LanguageModel:
            x = jax.ShapeDtypeStruct(shape, jnp.int32)

        def loss(model, x, dy):
            y = model(x).astype(jnp.float32)
            if dy.ndim == y.ndim:
                return jnp.sum(y * dy)
            logits = jax.nn.log_softmax(y)
            return -jnp.mean(jnp.take_along_axis(logits, dy[..., None], axis=-1))

        def run(state, x, dy):
            merged = nnx.merge(graphdef, state)
            model = merged[0] if self.trains else merged
            parts = {"micro_batches": self.micro_batches}
            found = jfp8.nnx.value_and_grad(loss, **parts)(model, x, dy)
            if self.trains:
                merged[1].update(model, found[1])
                return nnx.state(merged), found[0]
            return found, nnx.state(model, nnx.Not(nnx.Param))

        args = state, x, x
        specs = jax.tree.map_with_path(self.spec, args)
        with cudnn_known():
            out = jax.tree.map_with_path(self.spec, jax.eval_shape(run, *args))
            where = self.axes, run, args, specs, out
            how = {"donated": (0,) * self.trains, "dumped": False}  # because benchmarks time it
            return compile_divided("h200", *where, **how)


@dataclass(frozen=True)
class FusedLayer:
    """A `TransformerLayer` on one GPU."""

    def compile(self, recipe: str | None) -> Program:
        """Compile the result and all gradients, in bf16 if `recipe` is None."""
        options = {"hidden_size": 4096, "mlp_hidden_size": 14336, "num_attention_heads": 32}
        options |= {"num_gqa_groups": 8, "mlp_activation": "swiglu", "layernorm_type": "rmsnorm"}
        options |= {"self_attn_mask_type": "causal", "use_bias": False, "recipe": recipe}
        region = jfp8.autocast(enabled=False) if recipe is None else contextlib.nullcontext()
        with region, cudnn_known():
            layer = jfp8.linen.TransformerLayer(**options, dtype=BF16, param_dtype=BF16)
            f, args = forward_and_backward(layer, (4, TOKENS, 4096))
            everywhere = jax.tree.map(lambda _: P(), args)
            return compile_divided("h200", {"x": 1}, f, args, everywhere, dumped=False)


FSDP = {"data": 8}, P("data"), P("data")
BOTH = {"data": 2, "tp": 4}, P("data", "tp"), P("tp", "data")
PROGRAMS: dict[str, Step | FusedLayer] = {
    "one GPU": Step({"x": 1}),
    "one GPU, AdamW": Step({"x": 1}, trains=True),
    "8 GPUs, FSDP": Step(*FSDP),
    "8 GPUs, FSDP×TP 2×4": Step(*BOTH),
    "8 GPUs, FSDP×TP 2×4, parts of sequences": Step(*BOTH, model=SequenceParallelBlock),
    "TransformerLayer": FusedLayer(),
    "4 micro-batches": Step({"x": 1}, micro_batches=4),
    "width 512": Step({"x": 1}, width=512),
    "width 1024": Step({"x": 1}, width=1024),
    "width 1024, 8 GPUs, FSDP": Step(*FSDP, width=1024),
    "width 512, exempt: slower": Step({"x": 1}, width=512, exempt=("slower",)),
    "width 1024, exempt: slower": Step({"x": 1}, width=1024, exempt=("slower",)),
    "LM, vocabulary 32003, 8 GPUs, FSDP": Step(*FSDP, model=LanguageModel, exempt=("head",)),
}
