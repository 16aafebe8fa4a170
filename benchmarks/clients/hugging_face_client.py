"""transformers' Flax GPT-2 and diffusers' Flax UNet (Linen), in small."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from diffusers import FlaxUNet2DConditionModel
from flax.traverse_util import flatten_dict
from harness import (
    VOCABULARY,
    Client,
    convert_linen,
    next_token_loss,
    run,
    tokens_of,
    train_linen,
    version_of,
)
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import jfp8

LAYERS = 2
CONFIG = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=64,
    n_embd=32,
    n_layer=LAYERS,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def gpt2(seed: int):
    return FlaxGPT2LMHeadModel(CONFIG, _do_init=False).module


def inputs_of(tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tokens, jnp.ones_like(tokens), positions


def init(model, key):
    return model.init(key, *inputs_of(tokens_of(0, 0)))


def loss_fn(model, variables, tokens):
    return next_token_loss(model.apply(variables, *inputs_of(tokens)).logits, tokens)


def report(model):
    variables = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
    return jfp8.report(model, variables, *inputs_of(tokens_of(0, 0)))


def unet(seed: int):
    return FlaxUNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 32),
        layers_per_block=1,
        attention_head_dim=8,
        cross_attention_dim=32,
        dropout=0.0,
    )


def noised(seed: int, step: int):
    """Latents with noise, how much, a caption, and the noise, which is to be found."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 3)
    noise, caption = jax.random.normal(keys[0], (4, 4, 8, 8)), jnp.ones((4, 6, 32))
    latents = jnp.cumsum(0.3 * jax.random.normal(keys[1], (4, 4, 8, 8)), axis=-1)
    t = jax.random.randint(keys[2], (4,), 0, 1000)
    share = (t / 1000.0)[:, None, None, None]
    return (jnp.sqrt(1 - share) * latents + jnp.sqrt(share) * noise, t, caption), noise


def unet_init(model, key):
    return model.init(key, *noised(0, 0)[0])


def kernels_of(model) -> int:
    variables = jax.eval_shape(functools.partial(unet_init, model), jax.random.key(0))
    return sum(path[-1] == "kernel" for path in flatten_dict(variables["params"]))


def unet_loss(model, variables, batch):
    inputs, noise = batch
    return jnp.mean((model.apply(variables, *inputs).sample - noise) ** 2)


def unet_report(model):
    variables = jax.eval_shape(functools.partial(unet_init, model), jax.random.key(0))
    return jfp8.report(model, variables, *noised(0, 0)[0])


run(
    Client(
        "transformers, GPT-2",
        version_of("transformers"),
        gpt2,
        report,
        functools.partial(train_linen, loss_fn, tokens_of, init),
        needed=LAYERS * 4,  # q, k and v in one, out; two of the feed-forward layer
        convert=convert_linen,
    ),
    Client(
        "diffusers, UNet",
        version_of("diffusers"),
        unet,
        unet_report,
        functools.partial(train_linen, unet_loss, noised, unet_init),
        needed=kernels_of(unet(0)) - 2,  # the first and the last convolution
        convert=convert_linen,
    ),
)
