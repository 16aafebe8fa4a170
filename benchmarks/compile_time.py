"""CPU seconds until a training step can run: tracing, lowering and compiling, against peers.

    python benchmarks/compile_time.py --repeats 5
    python benchmarks/compile_time.py --programs lm --runs f32 delayed

Programs: ``dense``, twelve `Dense(64)` with Adam, each in its native loop; and
``lm``, the training step of `examples/train_lm.py`. Every figure comes from a separate process,
without a cache of compiled programs; runs alternate, and figures are medians. CPU seconds, because
XLA compiles in several threads and other programs share the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

import jfp8

ROOT = Path(__file__).resolve().parents[1]
RECIPES = [recipe.name for recipe in jfp8.recipes.RECIPES]
FLAX_FP8 = "flax fp8"
RUNS = {"dense": ["f32", FLAX_FP8, *RECIPES], "lm": ["f32", *RECIPES]}
BASELINE = {"dense": FLAX_FP8, "lm": "f32"}

# A jitted function, and its arguments, created by another function that is called first.
Program = tuple[Callable[[], Any], Callable[..., Any]]


class Dense(nn.Module):
    """Twelve layers, one after the other."""

    run: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(12):
            if self.run == "f32":
                x = nn.Dense(64)(x)
            elif self.run == FLAX_FP8:
                x = nn.Dense(64, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)
            else:
                x = jfp8.Dense(64, recipe=self.run)(x)
            x = nn.relu(x)
        return x


def dense(run: str) -> Program:
    model, x = Dense(run), jnp.ones((32, 64))
    mean_square = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)

    def of_flax() -> Any:
        variables = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-3)), x

    def of_ours() -> Any:
        variables = model.init(jax.random.key(0), x)
        tx = optax.adam(1e-3)
        return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx), x

    def step_of_flax(state: TrainState, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mean_square)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    def step_of_ours(state: jfp8.TrainState, x: jax.Array) -> Any:
        loss, grads = jfp8.value_and_grad(lambda v, x: (mean_square(v, x), {}))(state, x)
        return state.apply_gradients(grads), loss

    ours = run in RECIPES
    return (of_ours, step_of_ours) if ours else (of_flax, step_of_flax)


def lm(run: str) -> Program:
    sys.path.insert(0, str(ROOT / "examples"))
    import train_lm
    from lm import options, training

    recipe = "none" if run == "f32" else run
    args = options.make_parser("").parse_args(["--recipe", recipe])
    kind = "f32" if run == "f32" else "fp8"
    batch = jnp.zeros((args.batch_size, args.seq_len + 1), jnp.int32)
    return lambda: (train_lm.make_state(args, kind), batch), training.train_step


PROGRAMS = {"dense": dense, "lm": lm}


def one(program: str, run: str) -> dict[str, float]:
    """Return seconds in this process, after a small warm-up compilation."""
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))))
    warnings.simplefilter("ignore")
    make, step = PROGRAMS[program](run)
    clock = [time.process_time()]
    arguments = make()
    clock.append(time.process_time())
    traced = jax.jit(step).trace(*arguments)
    clock.append(time.process_time())
    lowered = traced.lower()
    clock.append(time.process_time())
    compiled = lowered.compile()
    clock.append(time.process_time())
    names = ("init_s", "trace_s", "lower_s", "compile_s")
    times = {name: end - begin for name, begin, end in zip(names, clock, clock[1:])}
    times["step_s"] = clock[-1] - clock[1]
    return times | {
        "stablehlo_lines": lowered.as_text().count("\n"),
        "hlo_lines": compiled.as_text().count("\n"),
    }


def measure(program: str, runs: list[str], repeats: int) -> dict[str, dict[str, float]]:
    command = [sys.executable, __file__, "--one", program]
    results: dict[str, list[dict[str, float]]] = {run: [] for run in runs}
    for _ in range(repeats):
        for run, found in results.items():
            out = subprocess.run([*command, run], check=True, capture_output=True, text=True)
            found.append(json.loads(out.stdout))
    return {
        run: {name: round(median(f[name] for f in found), 2) for name in found[0]}
        for run, found in results.items()
    }


def table(program: str, medians: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(medians.values())))
    base = medians.get(BASELINE[program])
    ratio = f"step_s / {BASELINE[program]}'s"
    lines = [f"| {' | '.join([program, *names, ratio])} |", "| --- " * (len(names) + 2) + "|"]
    for run, of_run in medians.items():
        cells = [run, *(f"{of_run[name]:g}" for name in names)]
        cells.append(f"{of_run['step_s'] / base['step_s']:.2f}" if base else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", choices=PROGRAMS, nargs="+", default=list(PROGRAMS))
    parser.add_argument("--runs", nargs="+", help="runs of each program (all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # `measure` passes it
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    for program in args.programs:
        runs = [run for run in RUNS[program] if args.runs is None or run in args.runs]
        if unknown := set(args.runs or ()) - set(sum(RUNS.values(), [])):
            parser.error(f"no such runs: {sorted(unknown)}; there are {RUNS[program]}")
        print(table(program, measure(program, runs, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
