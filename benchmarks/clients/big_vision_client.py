"""google-research/big_vision (Linen): its ViT, in small. Its checkout must be on ``PYTHONPATH``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from harness import Client, convert_linen, images_of, run, train_linen
from stand_ins import stand_in_for

import jfp8

stand_in_for("tensorflow", "tensorflow_datasets", "big_vision.pp", "scipy.ndimage")
from big_vision.models import vit  # noqa: E402

LAYERS = 2


def make(seed: int):
    return vit.Model(
        num_classes=10, patch_size=(4, 4), width=32, depth=LAYERS, mlp_dim=64, num_heads=4
    )


def init(model, key):
    return model.init(key, images_of(0, 0)[0])


def loss_fn(model, variables, batch):
    images, classes = batch
    logits, _ = model.apply(variables, images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, classes))


def report(model):
    variables = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
    return jfp8.report(model, variables, images_of(0, 0)[0])


run(
    Client(
        "big_vision, ViT",
        "big_vision 0127fb6",
        make,
        report,
        functools.partial(train_linen, loss_fn, images_of, init),
        needed=LAYERS * 6,  # q, k, v, out; two of the feed-forward layer
        convert=convert_linen,
    )
)
