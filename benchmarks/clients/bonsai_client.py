"""jax-ml/bonsai (NNX): its ViT, in small. Its checkout must be on ``PYTHONPATH``."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import optax
from flax import nnx
from harness import Client, images_of, run, train_nnx
from stand_ins import stand_in_for

import jfp8

stand_in_for("PIL", "torch", "transformers", "safetensors", "huggingface_hub")
from bonsai.models.vit import modeling  # noqa: E402

LAYERS = 2
CONFIG = modeling.ModelConfig(
    image_size=(16, 16),
    patch_size=(4, 4),
    num_channels=3,
    hidden_dim=32,
    attn_dropout_prob=0.0,
    dropout_prob=0.0,
    num_heads=4,
    mlp_dim=64,
    eps=1e-6,
    num_layers=LAYERS,
    num_labels=10,
)


def make(seed: int) -> nnx.Module:
    return modeling.ViTClassificationModel(CONFIG, rngs=nnx.Rngs(seed))


def loss_fn(model: nnx.Module, batch):
    images, classes = batch
    logits = model(images, rngs=None)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, classes))


run(
    Client(
        "bonsai, ViT",
        "bonsai 3628425",
        make,
        lambda model: jfp8.report(model, images_of(0, 0)[0], rngs=None),
        functools.partial(train_nnx, loss_fn, images_of),
        needed=LAYERS * 6,  # q, k, v, out; two of the feed-forward layer
    )
)
