"""Convert a model without editing it, and train it next to the original, on a CPU in a minute.

    python examples/convert_model.py

`jfp8.convert` makes the layers of any Flax model compute in FP8 when they are called. The model
here is `lm/plain_gpt.py`, written with Flax alone: blocks under `nn.scan` and `nn.remat`, Flax's
attention. The script lists all its matmuls and why some are not FP8, then trains both models on
the source code of Python's standard library, from the same parameters. More to try:

    convert_model.py --model llama           # the Llama of transformers: pip install 'jfp8[models]'
    convert_model.py --recipe mxfp8          # another recipe
    convert_model.py --exempt '*Dense_1'     # leave the layers at these paths in high precision
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from lm import options, report, training
from lm.plain_gpt import GPT

import jfp8


def gpt(args: argparse.Namespace) -> nn.Module:
    return GPT(width=args.width, layers=args.layers, heads=args.heads, max_length=args.seq_len)


def llama(args: argparse.Namespace) -> nn.Module:
    """Create rotary positions, RMS norms, gated feed-forward layers; as released, unmodified."""
    try:
        from transformers.models.llama import modeling_flax_llama as released
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"--model llama needs {missing.name}: type  pip install 'jfp8[models]'"
        ) from None
    config = released.LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.seq_len,
    )
    return released.FlaxLlamaForCausalLMModule(config)


def gpt_inputs(tokens: jax.Array) -> tuple[jax.Array, ...]:
    return (tokens,)


def llama_inputs(tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Return tokens, a mask without padding, positions."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tokens, jnp.ones_like(tokens), positions


MODELS = {  # its constructor, its inputs, its name for readers
    "gpt": (gpt, gpt_inputs, "A GPT written with Flax alone"),
    "llama": (llama, llama_inputs, "The Llama of transformers"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = options.lm_parser("convert_model.py", __doc__, steps=200)
    # fmt: off
    parser.add_argument("--model", choices=MODELS, default="gpt", help="(%(default)s)")
    parser.add_argument("--recipe", choices=options.RECIPES[:-1], default="delayed",
                        help="where FP8 scales come from (%(default)s)")
    parser.add_argument("--exempt", action="append", metavar="PATTERN", default=[],
                        help="paths of layers to leave unchanged, besides first convolutions and "
                        "final logits; may be given several times")
    # fmt: on
    return parser


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `result.json`."""
    parser = make_parser()
    args, text, validation = options.parse(parser, argv)
    make_model, inputs_of, name = MODELS[args.model]
    tokens = np.zeros((args.batch_size, args.seq_len), np.int32)
    try:
        model = make_model(args)
        exempt = (*jfp8.EDGES, *args.exempt)
        converted = jfp8.convert(model, jfp8.recipes.get(args.recipe), exempt=exempt)
        shapes = jax.eval_shape(converted.init, jax.random.key(0), *inputs_of(tokens))
    except ValueError as error:
        parser.error(str(error))
    products = jfp8.report(converted, shapes, *inputs_of(tokens))
    print(products)

    labels = {"fp8": f"converted, {args.recipe}", "f32": "unconverted, float32"}
    states = {}
    for run, m in (("fp8", converted), ("f32", model)):
        variables = jax.jit(m.init)(jax.random.key(args.seed), *inputs_of(tokens))
        states[run] = jfp8.TrainState.create(
            apply_fn=lambda variables, tokens, m=m: logits_of(
                m.apply(variables, *inputs_of(tokens))
            ),
            variables=variables,
            tx=training.make_optimizer(args.lr, args.steps),
        )
    same = jax.tree.map(np.array_equal, states["fp8"].params, states["f32"].params)
    equal = jax.tree.all(same)
    print(f"parameters of both: {'equal' if equal else 'NOT equal'} in names, shapes and values")

    batch_at = lambda step: text.train_batch(args.seed, step, args.batch_size)
    steps = dict.fromkeys(states, training.train_step)
    states, numbers = training.train(steps, states, batch_at, args.steps)
    losses = {run: training.validation_loss(s, validation) for run, s in states.items()}
    title = f"{name}, converted by one call"
    more = {"model": args.model, "fp8_percent_of_flops": 100 * products.fp8_fraction}
    return report.finish("convert_model", title, args, labels, numbers, losses, **more)


def logits_of(output: Any) -> jax.Array:
    """Return the logits, which models of transformers return as one of several fields."""
    return getattr(output, "logits", output)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", "runs/compiled")  # compiled once, and cached
    main()
