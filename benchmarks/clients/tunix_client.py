"""google/tunix (NNX): its Gemma, trained by its PeftTrainer: all weights, and Qwix's LoRA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from harness import STEPS, VOCABULARY, Client, Trained, run, timed, tokens_of, version_of
from stand_ins import stand_in_for

import jfp8

stand_in_for(
    *("metrax", "dialog", "huggingface_hub", "sentencepiece", "tensorflow", "grain", "wandb"),
    *("PIL", "pandas", "perfetto", "kagglehub", "psutil", "transformers"),
)
import qwix  # noqa: E402
from tunix.models.gemma import model as gemma  # noqa: E402
from tunix.sft import peft_trainer  # noqa: E402

LAYERS = 2
CONFIG = gemma.ModelConfig(
    num_layers=LAYERS,
    num_embed=VOCABULARY,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    final_logit_softcap=30.0,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    attention_types=(gemma.AttentionType.GLOBAL,) * LAYERS,
    remat_config=gemma.RematConfig.BLOCK,
)


def make(seed: int, config: gemma.ModelConfig = CONFIG) -> nnx.Module:
    """The model; its layers are made with zeros for weights of checkpoints to come."""
    model = gemma.Gemma(config, rngs=nnx.Rngs(seed))
    key = jax.random.key(seed)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if param.ndim >= 2:
            key, one = jax.random.split(key)
            scale = 0.1 if "input_embedding" in path else param.shape[-2] ** -0.5
            param[...] = scale * jax.random.normal(one, param.shape)
            nnx.update(model, nnx.State.from_flat_path({path: param}))
    return model


def inputs_of(tokens: jax.Array) -> dict[str, jax.Array]:
    batch, length = tokens.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    return {
        "input_tokens": tokens,
        "input_mask": jnp.ones_like(tokens, bool),
        "positions": jnp.broadcast_to(jnp.arange(length), (batch, length)),
        "attention_mask": jnp.broadcast_to(mask, (batch, length, length)),
    }


def arguments_of(tokens: jax.Array) -> tuple:
    x = inputs_of(tokens)
    return x["input_tokens"], x["positions"], None, x["attention_mask"]


def train(model: nnx.Module, seed: int, learning_rate: float = 3e-3) -> Trained:
    """By tunix's trainer, one step at a time."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**6, max_steps=STEPS)
    trainer = peft_trainer.PeftTrainer(model, optax.adam(learning_rate), config)
    trainer = trainer.with_gen_model_input_fn(lambda x: inputs_of(x.input_tokens))
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def steps():
        for i in range(STEPS):
            tokens = tokens_of(seed, i)
            mask = jnp.ones_like(tokens)
            yield step(peft_trainer.TrainingInput(input_tokens=tokens, input_mask=mask))[0]

    return timed(steps())


def with_lora(seed: int, config: gemma.ModelConfig = CONFIG) -> nnx.Module:
    """Qwix's adapters on all projections."""
    model = make(seed, config)
    provider = qwix.LoraProvider(module_path=".*(einsum|proj).*", rank=4, alpha=8.0)
    tokens = tokens_of(seed, 0)
    names = ("last_tokens", "positions", "cache", "attention_mask")
    inputs = dict(zip(names, arguments_of(tokens), strict=True))
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(seed), **inputs)


def report(model: nnx.Module) -> jfp8.Report:
    return jfp8.report(model, *arguments_of(tokens_of(0, 0)))


NO_REMAT = dataclasses.replace(CONFIG, remat_config=gemma.RematConfig.NONE)
NEEDED = LAYERS * 6  # q, kv, out; gate, up, down
VERSION = version_of("google-tunix")
run(
    Client(
        "tunix, SFT",
        VERSION,
        make,
        report,
        train,
        NEEDED,
        looked_at=lambda: make(0, NO_REMAT),
    ),
    Client(
        "tunix, Qwix's LoRA",
        f"{VERSION}, {version_of('qwix')}",
        with_lora,
        report,
        functools.partial(train, learning_rate=2e-2),
        NEEDED,
        looked_at=lambda: with_lora(0, NO_REMAT),
    ),
)
