"""google/flax's examples: lm1b (Linen), and the stack of layers (NNX).

The checkout's ``examples`` and ``examples/lm1b`` must be on ``PYTHONPATH``.
"""

from __future__ import annotations

import functools
import importlib

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from harness import (
    VOCABULARY,
    Client,
    convert_linen,
    next_token_loss,
    run,
    tokens_of,
    train_linen,
    train_nnx,
)

import jfp8

lm1b = importlib.import_module("models")
stack = importlib.import_module("nnx_toy_examples.06_scan_over_layers")

LAYERS, WIDTH = 2, 32
CONFIG = lm1b.TransformerConfig(
    vocab_size=VOCABULARY,
    output_vocab_size=VOCABULARY,
    emb_dim=WIDTH,
    num_heads=4,
    num_layers=LAYERS,
    qkv_dim=WIDTH,
    mlp_dim=64,
    max_len=64,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
    deterministic=True,
)


def init(model, key):
    return model.init(key, tokens_of(0, 0))


def loss_fn(model, variables, tokens):
    return next_token_loss(model.apply(variables, tokens + 1)[..., :VOCABULARY], tokens)


def report(model):
    variables = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
    return jfp8.report(model, variables, tokens_of(0, 0))


def numbers_of(seed: int, step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs, and what the stack has to learn of them."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(seed), step), (64, WIDTH))
    return x, jax.nn.gelu(jnp.roll(x, 1, axis=1))


def stack_loss(model: nnx.Module, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


VERSION = f"flax {flax.__version__}, examples of 18f8f31"
run(
    Client(
        "Flax, lm1b",
        VERSION,
        lambda seed: lm1b.TransformerLM(CONFIG),
        report,
        functools.partial(train_linen, loss_fn, tokens_of, init),
        needed=LAYERS * 6,  # q, k, v, out; two of the feed-forward layer
        convert=convert_linen,
    ),
    Client(
        "Flax, NNX stack",
        VERSION,
        lambda seed: stack.ScanMLP(WIDTH, n_layers=LAYERS, rngs=nnx.Rngs(seed)),
        lambda model: jfp8.report(model, numbers_of(0, 0)[0]),
        functools.partial(train_nnx, stack_loss, numbers_of),
        needed=LAYERS,
    ),
)
