"""Command lines, and checks of their options before any work is done."""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jfp8

from . import corpus

RECIPES = (*(recipe.name for recipe in jfp8.recipes.RECIPES), "none")

# A checkpoint can only be resumed with the same values of these: each affects the results.
CHANGES_NUMBERS = (
    "recipe", "backward_recipe", "recipe_of", "compare", "fp8_head", "attention_recipe",
    "recipe_fields", "steps", "batch_size", "micro_batches", "seq_len", "width", "layers", "heads",
    "lr", "seed", "loss_multiplier", "loss_scale",
)  # fmt: skip


DESCRIPTION = """\
Train a byte-level Transformer in FP8 on the source code of Python's standard library. With
--compare, train the same model in float32 next to it."""


def make_parser(description: str = DESCRIPTION) -> argparse.ArgumentParser:
    """Return the parser of `train_lm.py`."""
    parser = parser_of("train_lm.py", description)
    # fmt: off
    group = parser.add_argument_group("what to train")
    add_recipe(group)
    group.add_argument("--backward-recipe", choices=RECIPES[:-1],
                       help="of the two matmuls of each layer's backward pass (--recipe)")
    group.add_argument("--recipe-of", type=layers_and_recipe, nargs="+", default=[],
                       metavar="PATTERN=RECIPE",
                       help="of layers whose paths match, 'block_0/*=none'; the first match wins")
    group.add_argument("--recipe-fields", type=name_and_value, nargs="+", default=[],
                       metavar="NAME=VALUE",
                       help="of the recipes of layers, such as wgrad_dtype=bfloat16")
    group.add_argument("--fp8-head", action="store_true", help="the logits head in FP8 as well")
    group.add_argument("--attention-recipe", choices=RECIPES, default="none",
                       help="of attention itself, between its projections (%(default)s)")
    add_text(group)
    add_size(parser)

    group = parser.add_argument_group("training")
    add_training(group, steps=450)
    group.add_argument("--micro-batches", type=positive_int, default=1,
                       help="number of micro-batches that a batch is split into (%(default)s)")
    add_loss(group)

    group = parser.add_argument_group("files")
    group.add_argument("--out", metavar="DIR", default="runs/train_lm",
                       help="for metrics.jsonl, loss.png and result.json (%(default)s)")
    group.add_argument("--checkpoint", metavar="PATH",
                       help="save the state at the end in this file, *.safetensors")
    group.add_argument("--checkpoint-every", type=positive_int, metavar="N",
                       help="and after every N steps")
    group.add_argument("--stop-at", type=positive_int, metavar="STEP",
                       help="save the state after this step, and exit")
    group.add_argument("--resume", action="store_true",
                       help="resume from --checkpoint, with the results of an uninterrupted run")
    # fmt: on
    return parser


# Groups of options that several scripts share. `parser` may be a group, too.


def parser_of(script: str, description: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows `description`, including examples, with its line breaks."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=script, description=description, formatter_class=kind)


def lm_parser(
    script: str, description: str, *, steps: int, files: str = "loss.png and result.json"
) -> argparse.ArgumentParser:
    """Return the options of all scripts that train a language model, by default `steps` steps."""
    parser = parser_of(script, description)
    add_text(parser)
    add_size(parser)
    add_training(parser.add_argument_group("training"), steps=steps)
    add_out(parser, script, files)
    return parser


def add_recipe(parser: Any) -> None:
    # fmt: off
    parser.add_argument("--recipe", choices=RECIPES, default="delayed",
                        help="where FP8 scales come from; none is float32 (%(default)s)")
    parser.add_argument("--compare", action="store_true",
                        help="train in float32 as well, from the same seed and on the same batches")
    # fmt: on


def add_loss(parser: Any) -> None:
    # fmt: off
    parser.add_argument("--loss-scale", action="store_true", help="wrap AdamW with jfp8.loss_scale")
    parser.add_argument("--loss-multiplier", type=positive_float, default=1.0, metavar="M",
                        help="differentiate M * loss: AdamW does not mind, unscaled FP8 does (1)")
    # fmt: on


def add_text(parser: Any) -> None:
    # fmt: off
    parser.add_argument("--data", metavar="PATH",
                        help="a text file or a folder of text files (Python's standard library)")
    # fmt: on


def add_size(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    group = parser.add_argument_group("size")
    group.add_argument("--width", type=positive_int, default=128, help="features (%(default)s)")
    group.add_argument("--layers", type=positive_int, default=4, help="(%(default)s)")
    group.add_argument("--heads", type=positive_int, default=4, help="(%(default)s)")
    group.add_argument("--seq-len", type=positive_int, default=128, help="in bytes (%(default)s)")
    # fmt: on


def add_training(parser: Any, *, steps: int) -> None:
    # fmt: off
    parser.add_argument("--steps", type=positive_int, default=steps, help="(%(default)s)")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="(%(default)s)")
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="at its peak (%(default)s)")
    parser.add_argument("--seed", type=natural_int, default=0, help="(%(default)s)")
    parser.add_argument("--eval-batches", type=positive_int, default=64,
                        help="held-out batches at the end (%(default)s)")
    # fmt: on


def add_out(parser: Any, script: str, files: str) -> None:
    folder = "runs/" + script.removesuffix(".py")
    parser.add_argument("--out", metavar="DIR", default=folder, help=f"for {files} (%(default)s)")


def parse(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    load: Callable[[str | None, int], corpus.Corpus] = corpus.load,
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = lambda *_: None,
) -> tuple[argparse.Namespace, corpus.Corpus, np.ndarray]:
    """Return the options of an `lm_parser`, its text, and batches of the held-out text.

    Creates the folder for the results. Errors, including those that `check` finds, end the program
    with a message.
    """
    args = parser.parse_args(argv)
    check_size(parser, args)
    check(parser, args)
    try:
        text = load(args.data, args.seq_len)
        validation = text.validation_batches(args.batch_size, args.eval_batches)
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args, text, validation


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message that names the given and allowed values, and a correction."""
    o = options
    check_size(parser, o)
    if o.batch_size % o.micro_batches:
        parser.error(
            f"--batch-size {o.batch_size} does not divide into --micro-batches {o.micro_batches}: "
            f"type --batch-size {math.ceil(o.batch_size / o.micro_batches) * o.micro_batches}"
        )
    check_compare(parser, o)
    asked = {
        "--fp8-head": o.fp8_head,
        "--attention-recipe": o.attention_recipe != "none",
        "--backward-recipe": o.backward_recipe,
        "--recipe-of": o.recipe_of,
        "--recipe-fields": o.recipe_fields,
    }
    for flag in (flag for flag, given in asked.items() if given and o.recipe == "none"):
        parser.error(
            f"{flag} with --recipe none would add FP8 to a float32 model: omit "
            f"{flag}, or name an FP8 recipe, for example --recipe delayed"
        )
    if o.recipe_fields:
        try:
            jfp8.recipes.get(o.recipe, **dict(o.recipe_fields))
        except (TypeError, ValueError) as error:
            parser.error(f"--recipe-fields: {error}")
    if o.recipe_of and o.attention_recipe != "none":
        parser.error(
            "--recipe-of converts a model whose attention is in high precision, so "
            f"--attention-recipe {o.attention_recipe} would have no effect: omit one of them"
        )
    for name in ("resume", "checkpoint_every", "stop_at"):
        if getattr(o, name) and not o.checkpoint:
            flag = "--" + name.replace("_", "-")
            parser.error(
                f"{flag} needs a file for the state: add --checkpoint {o.out}/state.safetensors"
            )
    if o.checkpoint and not o.checkpoint.endswith(".safetensors"):
        parser.error(f"--checkpoint {o.checkpoint} needs a name that ends in .safetensors")


def check_compare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.compare and options.recipe == "none":
        parser.error(
            "--compare with --recipe none would train float32 twice: omit --compare, or name "
            "an FP8 recipe, for example --recipe delayed"
        )


def check_size(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    width, heads = options.width, options.heads
    if width % heads:
        allowed = ", ".join(str(h) for h in range(1, width + 1) if width % h == 0)
        parser.error(
            f"--width {width} does not divide into --heads {heads}: each head takes an equal "
            f"share of the width. Type --heads with one of {allowed}"
        )


def layers_and_recipe(text: str) -> tuple[str, str]:
    pattern, _, recipe = text.rpartition("=")
    if not pattern or recipe not in RECIPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is given, but it must be a pattern of paths and a recipe, such as "
            f"block_0/*=none; recipes: {', '.join(RECIPES)}"
        )
    return pattern, recipe


def name_and_value(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def positive_int(text: str) -> int:
    return _number(text, int, 1, "a whole number of 1 or more")


def natural_int(text: str) -> int:
    return _number(text, int, 0, "a whole number of 0 or more")


def positive_float(text: str) -> float:
    return _number(text, float, math.nextafter(0.0, 1.0), "a finite number above 0")


def natural_float(text: str) -> float:
    return _number(text, float, 0.0, "a finite number of 0 or more")


def _number(text, kind, least, allowed):
    try:
        value = kind(text)
    except ValueError:
        value = -math.inf
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is given, but it must be {allowed}")
    return value
