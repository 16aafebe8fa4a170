"""google-deepmind/gemma (Linen): its Transformer, as released, in small."""

from __future__ import annotations

import functools

import jax
import optax
from flax.traverse_util import path_aware_map
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
from stand_ins import stand_in_for

import jfp8

stand_in_for("kauldron.kd", "kauldron.kontext")
stand_in_for("dialog", "clu", "sentencepiece", "tensorflow", "PIL")
from gemma import gm  # noqa: E402
from gemma.gm.nn import _config, _modules  # noqa: E402

LAYERS, WIDTH = 2, 32
ADAM = optax.adam(1e-2)
CONFIG = _config.TransformerConfig(
    num_embed=VOCABULARY,
    embed_dim=WIDTH,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    final_logit_softcap=30.0,
    attention_types=(_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL),
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    attn_logits_soft_cap=50.0,
    sliding_window_size=16,
)


def make(seed: int):
    return gm.nn.Transformer(config=CONFIG, dtype="float32")


def init(model, key):
    """With weights as large as trained ones: from gemma's own, of 0.01, seeds differ much."""
    variables = model.init(key, tokens_of(0, 0))

    def larger(path, x):
        if "lora" in path or x.ndim < 2:
            return x
        return x * (10 if "embedder" in path else 100 * WIDTH**-0.5)

    return {**variables, "params": path_aware_map(larger, variables["params"])}


def loss_fn(model, variables, tokens):
    return next_token_loss(model.apply(variables, tokens).logits, tokens)


def report(model):
    variables = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
    return jfp8.report(model, variables, tokens_of(0, 0))


def with_lora(seed: int):
    return gm.nn.LoRA(rank=4, model=make(seed), dtype="float32")


def convert_lora(model, recipe):
    """The base in FP8, the adapters as they are."""
    exempt = (*jfp8.EDGES, "*/lora")
    where = "_overwrite_with_gradient"
    return jfp8.convert(model, recipe, exempt=exempt, state_collection=where)


def only_adapters(variables):
    """Labels for `optax.multi_transform`."""
    label = lambda path, _: "adapter" if "lora" in path else "frozen"
    return path_aware_map(label, variables)


run(
    Client(
        "gemma",
        version_of("gemma"),
        make,
        report,
        functools.partial(train_linen, loss_fn, tokens_of, init, tx=ADAM),
        needed=LAYERS * 5,  # q, kv, out; gate and up in one, down
        convert=convert_linen,
    ),
    Client(
        "gemma, its LoRA",
        version_of("gemma"),
        with_lora,
        report,
        functools.partial(
            train_linen,
            loss_fn,
            tokens_of,
            init,
            tx=optax.multi_transform(
                {"adapter": ADAM, "frozen": optax.set_to_zero()}, only_adapters
            ),
        ),
        needed=LAYERS * 5,
        convert=convert_lora,
    ),
)
