"""Train the language model of `train_lm.py` on 8 devices, sharded in three ways at once.

    python examples/train_sharded.py --compare

On a laptop the devices are virtual: 8 on one CPU. With GPUs it uses all of them.
Data, FSDP and tensor parallelism are shardings of arrays (`lm/sharding.py`) under `jax.jit`; the
FP8 layers are the same as on one device. `--compare` also trains on a single device, from the same
seed: the losses are equal except for the order in which numbers are summed, and for the rounding of
gradients if they are sent in FP8. More to try:

    train_sharded.py --data 1 --fsdp 8 --tensor 1      # any factors of the number of devices
    train_sharded.py --compare --recipe none           # float32
    train_sharded.py --fp8-gradients --fp8-gather --fp8-moments    # FP8 beyond the matmuls
    train_sharded.py --scan-layers                     # one block, looped over
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from compiled.sent import collective_bytes
from jax.sharding import Mesh, NamedSharding
from lm import corpus, options, report, sharding
from lm.model import Transformer

import jfp8

VIRTUAL_DEVICES = 8  # for a CPU; all GPUs are used if there are any


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 4, args.steps)
    adamw = jfp8.optim.adamw if args.fp8_moments else optax.adamw
    return optax.chain(optax.clip_by_global_norm(1.0), adamw(schedule, b2=0.98, weight_decay=0.05))


def make_state(args: argparse.Namespace, mesh: Mesh) -> jfp8.TrainState:
    """Create the state, each device its own shard: no device ever holds all of it.

    The random bits of a parameter do not depend on how it is sharded.
    """
    recipe = None if args.recipe == "none" else jfp8.recipes.get(args.recipe)
    model = Transformer(
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        max_length=args.seq_len,
        recipe=recipe,
        scan_layers=args.scan_layers,
        gather=partial(gather_block, mesh, recipe) if args.fp8_gather else None,
    )
    tx = make_optimizer(args)

    def create() -> jfp8.TrainState:
        tokens = np.zeros((1, args.seq_len), np.int32)
        variables = model.init(jax.random.key(args.seed), tokens)
        return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    return jax.jit(create, out_shardings=state_shardings(jax.eval_shape(create), mesh))()


def gather_block(mesh: Mesh, recipe: Any, params: Any) -> Any:
    """Gather the parameters of a block along the axis of FSDP: kernels are sent as FP8 bytes."""
    return jfp8.gather_weights(params, "fsdp", sharding.specs_of(params, mesh), recipe=recipe)


def state_shardings(state: jfp8.TrainState, mesh: Mesh) -> jfp8.TrainState:
    """Shard the moments of Adam like their parameters; replicate all other state."""
    params = sharding.of_parameters(state.params, mesh)
    opt_state = jfp8.optim.state_shardings(state.tx, state.params, params)
    return sharding.everywhere(state, mesh).replace(params=params, opt_state=opt_state)


def gradient_function(
    args: argparse.Namespace, mesh: Mesh, specs: Any
) -> Callable[[jfp8.TrainState, jax.Array], tuple[jax.Array, jfp8.Gradients]]:
    """Return ``(state, windows) -> (loss, grads)``: means over all shards of the batch."""

    def compute(state: jfp8.TrainState, windows: jax.Array):
        def loss_fn(variables, windows):
            logits = state.apply_fn(variables, windows[:, :-1])
            # Not by index, so that devices can hold shards of the vocabulary.
            targets = jax.nn.one_hot(windows[:, 1:], logits.shape[-1])
            return optax.softmax_cross_entropy(logits, targets).mean(), {}

        return jfp8.value_and_grad(loss_fn)(state, windows)

    if args.fp8_gradients:  # over the data axis; over the others jax.jit takes the mean
        return jfp8.data_parallel(compute, "data", mesh=mesh, specs=specs)
    return compute


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of a training run."""

    state: jfp8.TrainState
    losses: list[float]
    first_histories: Any  # amax histories after the first step, as NumPy arrays
    compiled: jax.stages.Compiled
    seconds_to_compile: float
    ms_per_step: float


def train(args: argparse.Namespace, mesh: Mesh, text: corpus.Corpus) -> Run:
    """Train for `args.steps` steps on `mesh`, compiled once."""
    state = make_state(args, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    of_batch = NamedSharding(mesh, sharding.BATCH)
    compute = gradient_function(args, mesh, sharding.specs_of(state.params, mesh))

    def train_step(state, windows):
        loss, grads = compute(state, windows)
        return state.apply_gradients(grads), loss

    step = jax.jit(
        train_step,
        in_shardings=(shardings, of_batch),
        out_shardings=(shardings, NamedSharding(mesh, sharding.EVERYWHERE)),
        donate_argnums=0,
    )
    start = time.perf_counter()
    shape = (args.batch_size, args.seq_len + 1)
    with report.compiling(), jax.set_mesh(mesh):
        compiled = step.lower(state, jax.ShapeDtypeStruct(shape, np.int32)).compile()
    seconds_to_compile = time.perf_counter() - start

    losses, first_histories = [], None
    start = time.perf_counter()
    with report.progress_bar(0, args.steps) as bar:
        for i in range(args.steps):
            batch = text.train_batch(args.seed, i, args.batch_size)
            # Each device gets its rows, and each process needs only the rows of its own devices.
            windows = jax.make_array_from_callback(shape, of_batch, lambda rows: batch[rows])  # noqa: B023
            state, loss = compiled(state, windows)
            losses.append(float(loss))
            if i == 0:
                first_histories = sharding.of_one_device(state.fp8)
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    ms_per_step = 1000 * (time.perf_counter() - start) / args.steps
    return Run(state, losses, first_histories, compiled, seconds_to_compile, ms_per_step)


def compare(run: Run, single: Run) -> dict[str, Any]:
    """Return the largest relative differences between two runs from the same seed.

    Another order of summation changes the last bits, and FP8 amplifies some changes: a value
    near the middle between two FP8 values goes to the other one, 1/16 or 1/8 away.
    """
    losses, of_single = np.array(run.losses), np.array(single.losses)
    differences = np.abs(losses / of_single - 1)
    last = sharding.of_one_device(run.state.fp8), sharding.of_one_device(single.state.fp8)
    return {
        "losses": single.losses,
        "first_loss_differs_by": differences[0],
        "any_loss_differs_by": differences.max(),
        "first_histories_differ_by": largest_difference(
            run.first_histories, single.first_histories
        ),
        "last_histories_differ_by": largest_difference(*last),
    }


def largest_difference(histories: Any, others: Any) -> float:
    """Return the largest difference of amax histories, relative to a history's amax.

    The ``"check"`` of a matmul is left out: a hash, which the last bit of an amax changes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(histories)
    relative = [
        np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1.0)
        for (path, a), b in zip(leaves, jax.tree.leaves(others), strict=True)
        if jax.tree_util.keystr(path[-1:], simple=True) != "check"
    ]
    return float(np.max(relative, initial=0.0))


def bytes_on_the_wire(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Return bytes sent by a device in a step, by collective and dtype, in the compiled program."""
    sent = collections.Counter()
    for c in collective_bytes(compiled).collectives:
        sent[f"{c.op} {c.dtype}"] += c.bytes
    return dict(sent.most_common())


def make_parser() -> argparse.ArgumentParser:
    parser = options.parser_of("train_sharded.py", __doc__)
    # fmt: off
    group = parser.add_argument_group("shardings; their product is the number of devices")
    group.add_argument("--data", type=options.positive_int, help="the batch (remaining devices)")
    group.add_argument("--fsdp", type=options.positive_int, default=2,
                       help="the batch, and every parameter (%(default)s)")
    group.add_argument("--tensor", type=options.positive_int, default=2,
                       help="the columns or rows of every kernel (%(default)s)")

    group = parser.add_argument_group("what to train")
    group.add_argument("--recipe", choices=options.RECIPES, default="delayed",
                       help="where FP8 scales come from; none is float32 (%(default)s)")
    group.add_argument("--fp8-gradients", action="store_true",
                       help="averaged over the data axis as FP8 bytes (jfp8.data_parallel)")
    group.add_argument("--fp8-gather", action="store_true",
                       help="kernels gathered for use as FP8 bytes (jfp8.gather_weights)")
    group.add_argument("--fp8-moments", action="store_true",
                       help="Adam's moments in FP8 (jfp8.optim.adamw)")
    group.add_argument("--scan-layers", action="store_true", help="one block, looped over")
    group.add_argument("--text", metavar="PATH",
                       help="a text file or a folder of text files (Python's standard library)")

    group = parser.add_argument_group("size")
    group.add_argument("--width", type=options.positive_int, default=128, help="(%(default)s)")
    group.add_argument("--layers", type=options.positive_int, default=2, help="(%(default)s)")
    group.add_argument("--heads", type=options.positive_int, default=4, help="(%(default)s)")
    group.add_argument("--seq-len", type=options.positive_int, default=128, help="(%(default)s)")
    group.add_argument("--batch-size", type=options.positive_int, default=16, help="(%(default)s)")
    group.add_argument("--steps", type=options.positive_int, default=20, help="(%(default)s)")
    group.add_argument("--lr", type=options.positive_float, default=3e-3, help="(%(default)s)")
    group.add_argument("--seed", type=options.natural_int, default=0, help="(%(default)s)")
    # fmt: on
    return parser


def mesh_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Mesh:
    """Return the requested mesh, or exit with a message that names valid ones."""
    devices = jax.device_count()
    rest = args.fsdp * args.tensor
    data = args.data or max(devices // rest, 1)
    if data * rest != devices:
        parser.error(
            f"--data {data} --fsdp {args.fsdp} --tensor {args.tensor} needs {data * rest} devices, "
            f"but there are {devices} ({jax.devices()[0].device_kind}): type three factors of "
            f"{devices}, for example --data {devices} --fsdp 1 --tensor 1"
        )
    if args.batch_size % (data * args.fsdp):
        parts = data * args.fsdp
        parser.error(
            f"--batch-size {args.batch_size} does not divide into --data {data} times --fsdp "
            f"{args.fsdp}: type --batch-size {math.ceil(args.batch_size / parts) * parts}"
        )
    if args.width % args.heads or args.heads % args.tensor:
        parser.error(
            f"--width {args.width} does not divide into --heads {args.heads}, or those into "
            f"--tensor {args.tensor}: each device takes whole heads, each an equal share of the "
            f"width. Type --heads {args.tensor} and a --width that is a multiple of it"
        )
    if args.fp8_gather and args.recipe == "none":
        parser.error(
            "--fp8-gather with --recipe none would round the weights of a float32 model: omit "
            "--fp8-gather, or name an FP8 recipe, for example --recipe delayed"
        )
    return sharding.make_mesh(data, args.fsdp, args.tensor)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = make_parser()
    parser.add_argument("--compare", action="store_true",
                        help="train on a single device as well, from the same seed")  # fmt: skip
    options.add_out(parser, "train_sharded.py", "loss.png and result.json")
    args = parser.parse_args(argv)
    mesh = mesh_of(parser, args)
    out = Path(args.out)
    try:
        text = corpus.load(args.text, args.seq_len, "--text")
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    run = train(args, mesh, text)
    kind = jax.devices()[0].device_kind
    agree = sharding.assert_same_on_every_device(run.state.fp8)
    parts = {
        "parameters": run.state.params,
        "optimizer state": run.state.opt_state,
        "amax histories": run.state.fp8,
    }
    held = {
        name: {"one_device": sharding.bytes_on_one_device(tree), "all": sharding.bytes_of(tree)}
        for name, tree in parts.items()
    }
    wire = bytes_on_the_wire(run.compiled)
    result = {
        "mesh": dict(mesh.shape),
        "device": kind,
        "bytes": held,
        "bytes_sent_by_one_device": wire,
        "losses": run.losses,
        "ms_per_step": round(run.ms_per_step, 1),
        "devices_with_equal_histories": agree,
    }
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(f"{sizes}: {mesh.size} devices ({kind})")
    print(f"compiled in {run.seconds_to_compile:.1f} s, {run.ms_per_step:.0f} ms per step")
    for name, b in held.items():
        print(f"  {name:16} {b['one_device']:>11,} of {b['all']:>11,} bytes on one device")
    print(f"sent by one device in a step: {sum(wire.values()):,.0f} bytes")
    for name, sent in wire.items():
        print(f"  {name:22} {sent:>12,.0f}")
    if agree:
        print(f"amax histories equal to the last bit on {agree} devices")
    print(f"loss {run.losses[0]:.6f} at first, {run.losses[-1]:.6f} after {args.steps} steps")

    if args.compare:
        single = train(args, sharding.make_mesh(1, 1, 1, jax.devices()[:1]), text)
        result["single_device"] = apart = compare(run, single)
        print(f"  on one device {single.losses[0]:.6f} and {single.losses[-1]:.6f}")
        print("largest relative difference to one device")
        for name, key in (
            ("loss of the first step", "first_loss_differs_by"),
            ("loss of any step", "any_loss_differs_by"),
            ("amaxes of the first step", "first_histories_differ_by"),
            ("amaxes of the last steps", "last_histories_differ_by"),
        ):
            if agree or "loss" in key:
                print(f"  {name:26} {apart[key]:.1e}")
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    curves = {"devices": run.losses}
    labels = {"devices": f"{mesh.size} devices: {sizes}"}
    figures = {"devices": mesh.size, "mesh": "x".join(map(str, mesh.shape.values()))}
    if args.compare:
        curves["single"], labels["single"] = single.losses, "one device"
        figures |= {
            "single_device": single.losses[-1],
            "first_loss_differs_by": float(apart["first_loss_differs_by"]),
            "any_loss_differs_by": float(apart["any_loss_differs_by"]),
        }
    title = "One program on one device and on several"
    reference = ("single", "one device")
    report.draw(out / "loss.png", curves, labels, title, labels, reference=reference)
    print(f"written to {out}: loss.png, result.json")
    figures |= {"steps": args.steps, "seed": args.seed}
    line = report.result_line("train_sharded", metric="train_loss", loss=run.losses[-1], **figures)
    print(line)
    return result


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)  # before JAX looks for devices
    main()
