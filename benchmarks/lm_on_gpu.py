"""Train a Llama-like model of bytes in bf16 and in FP8, beside each other, on one device.

    python benchmarks/lm_on_gpu.py --minutes 3 --out runs/lm.jsonl     # 135M parameters
    python benchmarks/lm_on_gpu.py --minutes 5 --width 2048 --layers 8 # 362M: FP8 gains more
    python benchmarks/lm_on_gpu.py --smoke                             # tiny, on a CPU
    python benchmarks/lm_on_gpu.py --digest gpu.json                   # 20 steps of a small model
    python benchmarks/lm_on_gpu.py --compare cpu.json gpu.json         # and how far they differ

All runs start from the same parameters, take the same batches and alternate in chunks of steps, so
that a change of clock affects all alike. They differ by `jfp8.convert` alone: bf16 has the same
gradient function and optimizer. The text is the source code of Python's standard library. `--out`
gets a line of JSON as soon as there is something to say.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import environment
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_digest import compare, digest

import jfp8

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from lm import corpus, fsdp_nnx, speed
from lm.llama_nnx import LanguageModel, Size

CALLS = {"cublaslt_f8": "__cublas$lt$matmul$f8", "cudnn": "__cudnn", "mosaic": "mosaic_gpu"}
SIZES = (
    ("--width", 1024, "a multiple of 128"),
    ("--layers", 12, "of attention and MLP"),
    ("--seq-len", 1024, "bytes"),
    ("--batch-size", 32, "sequences"),
    ("--chunk", 50, "steps in a chunk"),
    ("--steps", 10**6, "of each run, at most"),
)
SMOKE = {"width": 128, "layers": 2, "seq_len": 128, "batch_size": 4, "chunk": 3, "steps": 12}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    # fmt: off
    parser.add_argument("--recipes", default="delayed", help="separated by commas (%(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="in all, compiling included")
    parser.add_argument("--out", default="runs/lm_on_gpu.jsonl", help="(%(default)s)")
    for option, default, what in SIZES:
        parser.add_argument(option, type=int, default=default, help=f"{what} (%(default)s)")
    parser.add_argument("--lr", type=float, default=6e-4, help="after 100 steps (%(default)s)")
    parser.add_argument("--attention", choices=["cudnn", "xla"], help="default: cudnn on a GPU")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--digest", metavar="FILE", help="write losses and checksums here instead")
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="compare two digests instead")
    # fmt: on
    return parser


def size_of(width: int, layers: int, seq_len: int) -> Size:
    """Return a model with heads of 128 features, and 8/3 of the width in an MLP, rounded up."""
    heads, mlp = width // 128, -(-8 * width // (3 * 256)) * 256
    return Size(width, layers, heads, max(1, heads // 4), mlp, seq_len, vocabulary=256)


def create(
    size: Size, recipe: Any, attention: str, lr: float
) -> tuple[nnx.Module, jfp8.nnx.Optimizer]:
    """Create a model and its optimizer; one seed gives all recipes the same parameters."""
    model: nnx.Module = LanguageModel(size, attention=attention, rngs=nnx.Rngs(0))
    if recipe != "bf16":
        model = jfp8.convert(model, recipe)
    warm_up = optax.linear_schedule(0.0, lr, 100)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm_up, weight_decay=0.05))
    return model, jfp8.nnx.Optimizer(model, tx)


def make_step(graphdef: Any) -> Callable[..., Any]:
    """Return ``(state, chunk of batches, number of the batch) -> (state, numbers)``."""
    step = fsdp_nnx.make_step(graphdef)
    return lambda state, batches, i: step(state, batches[i])


def make_validation(graphdef: Any) -> Callable[..., jax.Array]:
    """Return ``(state, batch) -> f32[]``, the loss of the model in `state`."""

    def loss(state: Any, batch: jax.Array) -> jax.Array:
        model, _ = nnx.merge(graphdef, state)
        return fsdp_nnx.loss_fn(model, batch)

    return loss


@dataclass
class Run:
    """A model in training, its compiled functions, and what they have found."""

    state: Any
    step: Any
    validate: Any
    losses: list[float] = field(default_factory=list)
    pace: list[float] = field(default_factory=list)  # tokens per second of each chunk

    def take(self, batches: jax.Array, indices: list[jax.Array], tokens: int) -> dict[str, Any]:
        """Take a step with each batch; the host waits for the device once, at the end."""
        start, pending = time.perf_counter(), []
        for i in indices:
            self.state, numbers = self.step(self.state, batches, i)
            pending.append(numbers)
        jax.block_until_ready((self.state, pending))
        seconds = time.perf_counter() - start
        losses = [float(numbers["loss"]) for numbers in jax.device_get(pending)]
        self.losses += losses
        self.pace.append(len(indices) * tokens / seconds)
        skipped = int(pending[-1]["skipped"])
        return {"tokens_per_s": round(self.pace[-1], 1), "losses": losses, "skipped": skipped}

    def validation_loss(self, batches: list[jax.Array]) -> float:
        return float(np.mean([self.validate(self.state, batch) for batch in batches]))


def prepare(
    recipe: str, args: argparse.Namespace, mesh: Mesh, example: tuple[Any, ...], held_out: Any
) -> tuple[Run, dict[str, Any]]:
    """Create and compile a run; return what is known of it, too."""
    start, size = time.perf_counter(), size_of(args.width, args.layers, args.seq_len)
    make = lambda: create(size, recipe, args.attention, args.lr)
    graphdef, state = nnx.split(nnx.eval_shape(make))
    places = jax.tree.map(lambda x: x.sharding, fsdp_nnx.placed(state, mesh))
    state = jax.jit(lambda: nnx.state(make()), out_shardings=places)()
    step = jax.jit(make_step(graphdef), donate_argnums=0, out_shardings=(places, None))
    compiled = step.lower(state, *example).compile()
    validate = jax.jit(make_validation(graphdef)).lower(state, held_out).compile()
    of: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    params = nnx.state(nnx.merge(graphdef, state)[0], nnx.Param)
    known = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "seconds_to_compile": round(time.perf_counter() - start, 1),
        "planned_bytes": {"state": of.argument_size_in_bytes, "temporary": of.temp_size_in_bytes},
        "calls": {name: text.count(f'target="{target}') for name, target in CALLS.items()},
    }
    return Run(state, compiled, validate), known


def train(args: argparse.Namespace) -> None:
    """Train all runs until the time is over."""
    deadline = time.monotonic() + 60 * args.minutes
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)

    def tell(line: str, **what: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"line": line, **what}) + "\n")
        print(line, json.dumps(what)[:400], flush=True)

    mesh = fsdp_nnx.make_mesh(1)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    tell("run", date=now, **environment(), settings=vars(args))
    text, tokens = corpus.load(None, args.seq_len), args.batch_size * args.seq_len
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def batches_from(step: int) -> jax.Array:
        of = (text.train_batch(0, step + i, args.batch_size) for i in range(args.chunk))
        return jax.block_until_ready(put(np.stack(list(of)), None, fsdp_nnx.AXIS))

    indices = [put(np.int32(i)) for i in range(args.chunk)]
    held_out = [put(b, fsdp_nnx.AXIS) for b in text.validation_batches(args.batch_size, 8)]
    example = batches_from(0), indices[0]
    with jax.set_mesh(mesh):
        runs: dict[str, Run] = {}
        for name in ("bf16", *args.recipes.split(",")):
            try:
                runs[name], known = prepare(name, args, mesh, example, held_out[0])
                tell("compiled", run=name, **known)
            except Exception as error:  # the others still have their time on the device
                tell("error", run=name, error=f"{type(error).__name__}: {error}"[:4000])
        start = time.monotonic()
        first = {name: r.validation_loss(held_out) for name, r in runs.items()}
        tell("validation", step=0, losses=first)
        reserve, longest, step = 2 * (time.monotonic() - start) + 5, 0.0, 0
        while runs and step < args.steps and time.monotonic() + 1.1 * longest + reserve < deadline:
            start, batches = time.monotonic(), batches_from(step)
            order = list(runs) if step // args.chunk % 2 == 0 else list(runs)[::-1]
            found = {name: runs[name].take(batches, indices, tokens) for name in order}
            step += args.chunk
            tell("chunk", step=step, order=order, warm_up=step == args.chunk, runs=found)
            longest = max(longest, time.monotonic() - start)
        if not step:
            raise SystemExit(f"nothing was compiled within --minutes {args.minutes}")
        last = {name: r.validation_loss(held_out) for name, r in runs.items()}
    stats = jax.devices()[0].memory_stats() or {}
    memory = {k: stats[k] for k in ("peak_bytes_in_use", "bytes_limit") if k in stats}
    tell("result", steps=step, validation=last, **paces(args, runs), memory=memory)


def paces(args: argparse.Namespace, runs: dict[str, Run]) -> dict[str, Any]:
    """Return median, 10th and 90th percentile of all chunks but the first."""
    spread = lambda x: [round(v, 4) for v in np.percentile(x, (50, 10, 90)).tolist()]
    steady = {name: np.array(run.pace[1:] or run.pace) for name, run in runs.items()}
    found: dict[str, Any] = {"last_chunk": {}, "tokens_per_s": {}, "over_bf16": {}, "mfu": {}}
    size, kind = size_of(args.width, args.layers, args.seq_len), jax.devices()[0].device_kind
    for name, pace in steady.items():
        found["last_chunk"][name] = float(np.mean(runs[name].losses[-args.chunk :]))
        found["tokens_per_s"][name] = spread(pace)
        found["mfu"][name] = speed.mfu(float(np.median(pace)), size, 1, kind)  # over bf16's peak
        if "bf16" in steady:
            found["over_bf16"][name] = spread(pace / steady["bf16"])
    return found


def main() -> None:
    parser = make_parser()
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    args.attention = args.attention or ("cudnn" if jax.default_backend() == "gpu" else "xla")
    if args.compare:
        compare(*args.compare)
    elif args.digest:
        digest(args.digest)
    else:
        train(args)


if __name__ == "__main__":
    main()
