"""Train a language model of a named size on several devices: ``train_nnx_lm.py --size``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8

from . import checkpoint, fsdp_nnx, options, report, speed, training
from .corpus import Corpus
from .llama_nnx import SIZES, LanguageModel, Size

LOG_EVERY = 10  # steps


def add_options(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    group = parser.add_argument_group("a larger model, on several devices")
    group.add_argument("--size", choices=SIZES, help="gives other defaults to the options above")
    group.add_argument("--devices", type=options.positive_int, metavar="N",
                       help="GPUs, or virtual CPU devices, that share the model and the batch (1)")
    group.add_argument("--remat", action="store_true",
                       help="save less for the backward pass, and recompute it")
    group.add_argument("--checkpoint-every", type=options.positive_int, metavar="N",
                       help="steps between checkpoints in --out, besides one at the end")
    group.add_argument("--resume", action="store_true",
                       help="resume from the newest one, with the results of an uninterrupted run")
    # fmt: on


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message that names the given value, and a correction."""
    names = ("devices", "remat", "checkpoint_every", "resume")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    given += ["--recipe none"] * (args.recipe == "none")
    if given and not args.size:
        parser.error(f"{given[0]} is for a model of a named size: type --size tiny as well")
    args.devices, there = args.devices or 1, jax.device_count()
    if args.devices > there:
        parser.error(f"--devices {args.devices}, but there are {there}: type --devices {there}")
    if more := -args.batch_size % args.devices:
        parser.error(
            f"--batch-size {args.batch_size} does not divide into --devices {args.devices}: type "
            f"--batch-size {args.batch_size + more}"
        )
    if args.size and args.resume != bool(checkpoints(args)):
        has = "no checkpoint: omit --resume" if args.resume else "checkpoints: type --resume"
        parser.error(f"--out {args.out} has {has}, or another --out")


def defaults(name: str) -> dict[str, Any]:
    """Return defaults of the options, for a model of this size."""
    size, others = SIZES[name]
    return dataclasses.asdict(size) | others


def size_of(args: argparse.Namespace) -> Size:
    return Size(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Size)})


def create(
    args: argparse.Namespace, attention: str | None = None
) -> tuple[nnx.Module, jfp8.nnx.Optimizer]:
    """Create the model and its optimizer: replace these by yours."""
    how: Any = {"attention": attention, "remat": args.remat, "rngs": nnx.Rngs(args.seed)}
    model = LanguageModel(size_of(args), **how)
    if args.recipe != "none":
        model = jfp8.convert(model, args.recipe)
    return model, jfp8.nnx.Optimizer(model, training.make_optimizer(args.lr, args.steps))


def train(
    args: argparse.Namespace, text: Corpus, validation: np.ndarray
) -> tuple[report.Numbers, dict[str, float]]:
    """Return the metrics of every step, and the loss on held-out text."""
    run, mesh = args.recipe, fsdp_nnx.make_mesh(args.devices)
    shape, sharding = (args.batch_size, args.seq_len + 1), NamedSharding(mesh, P(fsdp_nnx.AXIS))
    put = lambda batch: jax.make_array_from_callback(shape, sharding, lambda rows: batch[rows])
    make = lambda: create(args, "cudnn" if jax.default_backend() == "gpu" else None)
    names = ("size", "devices", "stock_gradient", *options.CHANGES_NUMBERS)
    config = {name: getattr(args, name) for name in names if hasattr(args, name)}
    config["text"] = text.digest
    differentiate = nnx.value_and_grad if args.stock_gradient else jfp8.nnx.value_and_grad
    with jax.set_mesh(mesh):
        model, optimizer = nnx.eval_shape(make)
        describe(args, model)
        graphdef, state = nnx.split((model, optimizer))
        like, first, lines = fsdp_nnx.placed(state, mesh), 0, []
        places = jax.tree.map(lambda x: x.sharding, like)
        if args.resume:
            first, lines, state = resumed(args, config, like)
        else:  # each device creates its shard
            state = jax.jit(lambda: nnx.state(make()), out_shardings=places)()
        step = fsdp_nnx.make_step(graphdef, differentiate)
        step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        with report.compiling():
            step = step.lower(state, put(validation[0])).compile()
        log = report.Metrics(Path(args.out, "log.jsonl"), lines)
        for start, end in itertools.pairwise(stops(args, first)):
            at = range(start, end)
            batches = [put(text.train_batch(args.seed, i, args.batch_size)) for i in at]
            states, numbers = training.take_steps({run: step}, {run: state}, batches)
            state = states[run]
            tell(args, end, numbers[run])
            log.append(start + 1, numbers)
            if end == args.steps or end % (args.checkpoint_every or args.steps) == 0:
                save(args, end, state, config)
        model, _ = nnx.merge(graphdef, state)
        held_out = nnx.jit(fsdp_nnx.loss_fn)
        losses = [float(held_out(model, put(batch))) for batch in validation]
    steps = [{key: line[key][run] for key in ("loss", "ms")} for line in log.lines]
    return {run: steps}, {run: float(np.mean(losses))}


def describe(args: argparse.Namespace, model: nnx.Module) -> None:
    """Print the size of the model, its FP8 layers and its expected speed, before training."""
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    tokens = jax.ShapeDtypeStruct((args.batch_size, args.seq_len), jnp.int32)
    found, kind = jfp8.report(model, tokens), jax.devices()[0].device_kind
    print(f"model: {parameters:,} parameters on {args.devices} devices ({kind})")
    print(found.summary())
    pace = speed.expected(found, size_of(args), tokens.size, args.devices, kind)
    known = f"no time model for {kind}" if pace is None else f"at most {pace:,.0f} tokens/s"
    print(f"expected, not measured: {known}")


def tell(args: argparse.Namespace, step: int, numbers: list[dict[str, Any]]) -> None:
    """Add the speed to the metrics of some steps, and print the metrics of the last one."""
    pace = round(1000 * args.batch_size * args.seq_len / numbers[-1]["ms"], 1)
    mfu = speed.mfu(pace, size_of(args), args.devices, jax.devices()[0].device_kind)
    for of_step in numbers:
        of_step |= {"tokens_per_s": pace, "mfu": mfu}
    of_peak = "-" if mfu is None else f"{100 * mfu:.1f} %"
    last = f"loss {numbers[-1]['loss']:.4f}, {pace:,.0f} tokens/s, MFU {of_peak}"
    print(f"step {step}: {last}, {numbers[-1]['skipped']} skipped", flush=True)


def stops(args: argparse.Namespace, first: int) -> list[int]:
    """Yield the steps, from `first` on, after which metrics are printed or state is saved."""
    every = (LOG_EVERY, args.checkpoint_every or args.steps, args.steps)
    return [first, *(i for i in range(first + 1, args.steps + 1) if any(i % n == 0 for n in every))]


def checkpoints(args: argparse.Namespace) -> list[Path]:
    """List the complete folders, the newest last."""
    return sorted(Path(args.out).glob("step_" + 8 * "[0-9]"))


def save(args: argparse.Namespace, step: int, state: Any, config: dict[str, Any]) -> None:
    """Write a checkpoint; keep the newest two."""
    tree = {"state": state, "config": json.dumps(config)}
    jfp8.checkpoint.save(Path(args.out, f"step_{step:08}"), tree)
    for old in checkpoints(args)[:-2]:
        shutil.rmtree(old)


def resumed(
    args: argparse.Namespace, config: dict[str, Any], like: Any
) -> tuple[int, list[dict[str, Any]], Any]:
    """Return the step of the newest checkpoint, the log until then, and its state."""
    path = checkpoints(args)[-1]
    saved = jfp8.checkpoint.load(path)
    try:
        checkpoint.check_same(json.loads(saved["config"]), config, str(path))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    first = int(path.name.removeprefix("step_"))
    lines = Path(args.out, "log.jsonl").read_text().splitlines()[:first]
    print(f"resuming from {path}")
    return first, list(map(json.loads, lines)), jfp8.checkpoint.upgrade(saved["state"], like)
