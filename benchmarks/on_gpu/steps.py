"""Training steps of Transformer layers: several in turn, and each program alone for seconds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import jfp8
from on_gpu.cases import Case, Group, Settings, Timed
from on_gpu.harness import running
from on_gpu.linear import KERNELS, QUANTIZE_BYTES
from on_gpu.products import flax_op
from on_gpu.records import Record
from on_gpu.timing import described, memory, random, save


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a Transformer layer, and of its batch: as in Llama if `gated`, else as in GPT."""

    width: int
    mlp: int
    heads: int
    batch: int
    length: int
    gated: bool = True

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        del sizes["gated"]
        return ", ".join(f"{name} {size}" for name, size in sizes.items())


LLAMA_7B = Layer(width=4096, mlp=11008, heads=32, batch=4, length=2048)
# The layer of Transformer Engine's JAX quickstart, without its dropout.
GPT = Layer(width=4096, mlp=16384, heads=32, batch=8, length=2048, gated=False)


def _sized(layer: Layer, settings: Settings) -> Layer:
    if not settings.smoke:
        return layer
    return dataclasses.replace(layer, width=64, mlp=128, heads=2, batch=2, length=32)


class Block(nn.Module):
    """Attention and an MLP, both behind a normalization and with residuals.

    Attributes:
      layer: its sizes and kind.
      dense: makes a linear layer from its number of features and its name.
      attention: implementation of ``jax.nn.dot_product_attention``.
    """

    layer: Layer
    dense: Callable[..., nn.Module]
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, mlp, gated = self.layer.width, self.layer.mlp, self.layer.gated
        dense = functools.partial(self.dense, use_bias=not gated, dtype=jnp.bfloat16)
        norm = functools.partial(nn.RMSNorm if gated else nn.LayerNorm, dtype=jnp.bfloat16)
        *leading, _ = x.shape
        qkv = dense(3 * width, name="qkv")(norm(name="attention_norm")(x))
        q, k, v = jnp.split(qkv.reshape(*leading, self.layer.heads, -1), 3, axis=-1)
        how: dict[str, Any] = {"is_causal": True, "implementation": self.attention}
        y = jax.nn.dot_product_attention(q, k, v, **how)
        x = x + dense(width, name="out")(y.reshape(x.shape))
        h = dense((1 + gated) * mlp, name="wi")(norm(name="mlp_norm")(x))
        if gated:
            gate, up = jnp.split(h, 2, axis=-1)
            h = jax.nn.silu(gate) * up
        else:
            h = jax.nn.gelu(h)
        return x + dense(width, name="wo")(h)


VARIANTS: dict[str, tuple[str, Any]] = {
    "bf16": ("plain", None),
    "delayed": ("jfp8", "delayed"),
    "current": ("jfp8", "current"),
    "block": ("jfp8", "block"),
    "rowwise": ("jfp8", "rowwise"),
    "Flax Fp8DirectDotGeneralOp": ("flax", "Fp8DirectDotGeneralOp"),
    "mxfp8": ("jfp8", "mxfp8"),
    "Flax Fp8DotGeneralOp": ("flax", "Fp8DotGeneralOp"),
}
_OTHERS = ("Flax Fp8DirectDotGeneralOp", "mxfp8", "Flax Fp8DotGeneralOp")


def block(settings: Settings) -> Iterator[Group]:
    """Section: forward, backward and AdamW of a block of a 7B model, all in turn."""
    layer = _sized(LLAMA_7B, settings)
    ours = [name for name in VARIANTS if name not in _OTHERS]
    for variants in (ours, ["bf16", *_OTHERS]):  # the slowest last: they heat the device
        cases = [_case(layer, name, True, settings) for name in variants]
        yield Group(str(layer), cases, "bf16")


def alone(settings: Settings) -> Iterator[Group]:
    """Section: each program for five seconds, at a clock and with a power of its own."""
    seconds = 0.1 if settings.smoke else 5.0
    for label, layer, with_optimizer in (
        ("7B block, step", LLAMA_7B, True),
        ("7B block, forward and backward", LLAMA_7B, False),
        ("GPT layer, forward and backward", GPT, False),
    ):
        for name in ("bf16", "delayed", "block", "current"):
            case = _case(_sized(layer, settings), name, with_optimizer, settings)
            yield Group(label, [case], seconds=seconds)


def _case(layer: Layer, name: str, with_optimizer: bool, settings: Settings) -> Case:
    prepare = functools.partial(_timed, layer, name, with_optimizer, settings)
    return Case(name, prepare, KERNELS.get(VARIANTS[name][1] or "", ()))


def _timed(layer: Layer, name: str, with_optimizer: bool, settings: Settings) -> Timed:
    """Compile a step, and return repetitions of it; without an optimizer, of one gradient."""
    model, variables, batch = _model(layer, name, settings)
    tx = optax.adamw(1e-4) if with_optimizer else optax.set_to_zero()
    state, gradient, update = training(model, variables, VARIANTS[name][0], tx)

    def step(state, x):
        loss, grads = gradient(state, x)
        return update(state, grads) if with_optimizer else grads, loss

    donated = (0,) if with_optimizer else ()
    compiled = jax.jit(step, donate_argnums=donated).lower(state, batch).compile()
    if settings.hlo:
        kind = "step" if with_optimizer else "gradient"
        save(compiled, settings.hlo, f"block-{kind}-{layer}-{name}")
    if not with_optimizer:  # amaxes are known, as in the middle of training
        state = jax.jit(update)(state, compiled(state, batch)[0])
    latest = [state]  # donated to each step in turn

    def run(steps: int) -> jax.Array:
        for _ in range(steps):
            new, loss = compiled(latest[0], batch)
            if with_optimizer:
                latest[0] = new
        return loss

    running()
    loss = float(jax.block_until_ready(run(1)))
    if not math.isfinite(loss):
        raise AssertionError(f"the loss is {loss}")
    facts = {
        "program": described(compiled),
        "memory": memory(compiled),
        "attention": model.attention,
        "first_loss": loss,
        **_work(layer, name, with_optimizer),
    }
    if settings.smoke:
        return Timed(functools.partial(run, 1), 1, facts)
    return Timed(functools.partial(run, 2), 2, facts, functools.partial(run, 1), 1)


def _model(layer: Layer, name: str, settings: Settings) -> tuple[Block, Any, jax.Array]:
    """Return a block, its variables and a batch."""
    kind, what = VARIANTS[name]
    if kind == "jfp8":
        dense = functools.partial(jfp8.Dense, recipe=jfp8.recipes.get(what))
    elif kind == "flax":
        dense = functools.partial(nn.Dense, dot_general_cls=functools.partial(flax_op, what))
    else:
        dense = nn.Dense
    model = Block(layer, dense, "xla" if settings.smoke else _attention(layer))
    batch = random((layer.batch, layer.length, layer.width), jnp.bfloat16)
    return model, jax.jit(model.init)(jax.random.key(0), batch), batch


def training(model: Block, variables: Any, kind: str, tx: Any) -> tuple[Any, Any, Any]:
    """Return a state, ``(state, batch) -> (loss, grads)`` and ``(state, grads) -> state``."""

    def loss_of(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    if kind == "jfp8":
        state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
        ours = jfp8.value_and_grad(lambda v, x: (loss_of(v, x), {}))
        return state, ours, lambda state, grads: state.apply_gradients(grads)
    # All collections, since Flax hands out the state of its FP8 operations as gradients.
    params = dict(variables) if len(variables) > 1 else variables["params"]
    pack = (lambda p: p) if len(variables) > 1 else (lambda p: {"params": p})
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    gradient = jax.value_and_grad(lambda p, x: loss_of(pack(p), x))
    update = lambda state, grads: state.apply_gradients(grads=grads)
    return state, lambda state, x: gradient(state.params, x), update


def _work(layer: Layer, name: str, with_optimizer: bool) -> Record:
    """Operations and bytes that a step takes at least, for `Timed.facts`."""
    width, tokens = layer.width, layer.batch * layer.length
    hidden = (1 + layer.gated) * layer.mlp  # features of `wi`
    weights = 4 * width**2 + width * (hidden + layer.mlp)
    products = 6 * weights * tokens
    # Two products, causal, and 2.5 times as much backward, where scores are recomputed.
    attention = int(3.5 * 2 * layer.batch * layer.length**2 * width)
    # AdamW in f32: gradient read, parameter and two moments read and written.
    traffic = 28 * weights if with_optimizer else 0
    if name == "bf16":
        return {"flops_bf16": products + attention, "bytes": traffic}
    kind, recipe = VARIANTS[name]
    per_element = QUANTIZE_BYTES[recipe if kind == "jfp8" else "delayed"]
    # The inputs and the gradients of outputs of the four layers, and their weights.
    activations = tokens * ((width + 3 * width) + 2 * width + (width + hidden) + layer.mlp + width)
    quantize = per_element * (weights + activations)
    return {"flops_f8": products, "bytes": int(traffic + quantize), "flops_bf16": attention}


@functools.cache
def _attention(layer: Layer) -> str:
    """Return ``"cudnn"`` where that compiles for a layer's sizes, else ``"xla"``."""
    shape = (layer.batch, layer.length, layer.heads, layer.width // layer.heads)
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def attend(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    try:
        jax.jit(jax.grad(attend, argnums=(0, 1, 2))).lower(q, q, q).compile()
    except Exception as error:  # whatever cuDNN, or its absence, raises
        print(f"Attention without cuDNN: {error}", flush=True)
        return "xla"
    return "cudnn"
