"""Adam and Muon with few bits of state: updates under stress, bytes, and training loss.

    python benchmarks/optimizer_states.py --stress            # five minutes: no training
    python benchmarks/optimizer_states.py --lm --seeds 12 --jobs 2    # may be interrupted
    python benchmarks/optimizer_states.py --table             # what has been run so far
    python benchmarks/optimizer_states.py --muon --stress     # any of these, of Muon

`polar_factors.py` measures Muon's matmuls in FP8 by themselves.

The stresses are from `adam_under_stress.py`.

``--lm``: the model of `examples/train_lm.py` trains in float32 with its AdamW, and again from the
same parameters on the same batches with the moments stored. With ``--muon`` Muon moves the kernels
of the blocks, and AdamW the rest, in a model of half the width. Each run is a process on one core.
It is written to the results file when it ends, with the interval of the gaps so far, and the next
command does not repeat it. A seed is finished for all optimizers before the next one begins.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jfp8
from jfp8.optim.adam import DEFAULT, PRESETS, Moments, adamw
from jfp8.optim.block_storage import Blocks
from jfp8.optim.muon import muon
from jfp8.optim.storage import Float

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

from adam_under_stress import POINTS, STRESSES, compared, updates  # noqa: E402
from common import environment  # noqa: E402
from equivalence import equivalence  # noqa: E402

REFERENCE = "float32"
LOT = Blocks(transform="expand", rounding="stochastic")
MOMENTS: dict[str, Moments] = {
    REFERENCE: Moments(Float(), Float()),
    "default": DEFAULT,
    **PRESETS,
    # Others, which only the stresses try unless they are named.
    "m to nearest": Moments(Blocks(), DEFAULT.nu),
    "m not expanded": Moments(Blocks(rounding="stochastic"), DEFAULT.nu),
    "v in E4M3": Moments(DEFAULT.mu, LOT),
}
# Arguments of `jfp8.optim.muon`.
MUON: dict[str, dict[str, Any]] = {
    REFERENCE: {"mu": Float(), "nu": Float()},
    "default": {},
    "bf16 matmuls": {"mu": Float(), "nu": Float(), "products": "bf16"},
    "FP8 matmuls": {"mu": Float(), "nu": Float(), "products": "current"},
    "default, bf16 matmuls": {"products": "bf16"},
    "default, FP8 matmuls": {"products": "current"},
    "m not expanded": {"mu": Blocks(rounding="stochastic")},
    "blocks of 32": {"mu": Blocks(block=32, transform="expand", rounding="stochastic")},
    "m in E3M4": {"mu": Blocks(jfp8.E3M4, rounding="stochastic")},
}
STEPS = max(POINTS)


# ---- training


def make_optimizer(
    args: argparse.Namespace, name: str, of_muon: bool
) -> optax.GradientTransformation:
    """Return `train_lm.make_optimizer`'s optimizer with stored moments; or Muon and AdamW."""
    start, warm = 0.0, min(30, args.steps // 2)
    schedule = lambda peak: optax.warmup_cosine_decay_schedule(start, peak, warm, args.steps)
    common = {"weight_decay": 0.05, "seed": args.seed}
    if of_muon:
        tx = muon(
            schedule(0.02),
            **common,
            adam_b2=0.98,
            adam_weight_decay=0.05,
            adam_learning_rate=schedule(args.lr),
            muon_weight_dimension_numbers=kernels_of_blocks,
            **MUON[name],
        )
    else:
        mu, nu = MOMENTS[name]
        tx = adamw(schedule(args.lr), b2=0.98, mu=mu, nu=nu, **common)
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def kernels_of_blocks(params: Any) -> Any:
    """Return the kernels that Muon updates."""

    def numbers(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        in_block = "block_" in jax.tree_util.keystr(path) and leaf.ndim == 2
        return optax.contrib.MuonDimensionNumbers() if in_block else None

    return jax.tree_util.tree_map_with_path(numbers, params)


def train(name: str, seed: int, steps: int, of_muon: bool) -> dict[str, float]:
    """Return validation loss, state and time of one run."""
    import train_lm
    from lm import corpus, options

    sizes = ["--steps", str(steps), *(["--width", "64"] if of_muon else [])]
    args = options.make_parser().parse_args(["--recipe", "none", "--seed", str(seed), *sizes])
    text = corpus.load(args.data, args.seq_len)
    state = train_lm.make_state(args, "f32")
    if of_muon or name != REFERENCE:
        state = jfp8.TrainState.create(
            apply_fn=state.apply_fn,
            variables=state.variables,
            tx=make_optimizer(args, name, of_muon),
        )
    parameters = sum(p.size for p in jax.tree.leaves(state.params))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    batches = [text.train_batch(seed, step, args.batch_size) for step in range(steps)]
    step = {"f32": train_lm.compile_step(args, state, batches[0])}
    states, ms = {"f32": state}, []
    for start in range(0, steps, 50):
        states, numbers = train_lm.take_steps(step, states, batches[start : start + 50])
        ms += [of_step["ms"] for of_step in numbers["f32"]]
    validation = text.validation_batches(args.batch_size, args.eval_batches)
    return {
        "loss": train_lm.validation_loss(states["f32"], validation),
        "state_bytes_per_parameter": round(state_bytes / parameters, 4),
        "ms_per_step": round(statistics.median(ms), 1),
    }


def train_apart(
    name: str, seed: int, steps: int, of_muon: bool, cores: queue.SimpleQueue
) -> dict[str, float]:
    """Run `train` in a separate process, on one of the free `cores`."""
    core = cores.get()
    try:
        command = [sys.executable, __file__, "--one", name, str(seed), "--steps", str(steps)]
        command += ["--muon"] if of_muon else []
        done = subprocess.run(
            [*command, "--core", str(core)], check=True, stdout=subprocess.PIPE, text=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        cores.put(core)


def train_all(
    runs: list[tuple[str, int]], steps: int, of_muon: bool, jobs: int
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield all of `runs`, `jobs` at a time, each as soon as it ends."""
    cores: queue.SimpleQueue = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:jobs]:
        cores.put(core)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        of_run = {pool.submit(train_apart, *run, steps, of_muon, cores): run for run in runs}
        try:
            for done in concurrent.futures.as_completed(of_run):
                yield (*of_run[done], done.result())
        finally:
            pool.shutdown(cancel_futures=True)


def gaps(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return each loss's gap to float32 of the same seed, in percent, and their interval."""
    reference, found = runs.get(REFERENCE, {}), {}
    for name, of_seeds in runs.items():
        paired = sorted(of_seeds.keys() & reference.keys(), key=int)
        if name == REFERENCE or not paired:
            continue
        values = [100 * (of_seeds[s]["loss"] / reference[s]["loss"] - 1) for s in paired]
        found[name] = {"seeds": {s: round(v, 3) for s, v in zip(paired, values, strict=True)}}
        if len(values) > 2:
            result = equivalence(values)
            found[name] |= {k: round(getattr(result, k), 3) for k in ("mean", "low", "high")}
            found[name]["verdict"] = result.verdict
    return found


# ---- stress


def stress(name: str, of_muon: bool) -> dict[str, Any]:
    """Return, in percent per stress, the worst mean update and noise, and means at `POINTS`."""
    if of_muon:
        all_updates = compared(muon(-1.0, **MUON[name]), optax.contrib.muon(-1.0), STEPS)
    else:
        all_updates = updates(MOMENTS[name], STEPS)
    found = {}
    for name, of_stress in all_updates.items():
        bias, noise = 100 * of_stress["bias"], 100 * of_stress["noise"]
        step, group = np.unravel_index(np.argmax(np.abs(bias)), bias.shape)
        found[name] = {
            "bias": round(float(bias[step, group]), 2),
            "at_step": int(step) + 1,
            "noise": round(float(noise.max()), 1),
            "odd": {str(p): round(float(bias[p - 1, 0]), 2) for p in POINTS},
            "even": {str(p): round(float(bias[p - 1, 1]), 2) for p in POINTS},
        }
    return found


# ---- the results file


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"runs": {}, "gaps_percent": {}, "stress": {}}
    return json.loads(path.read_text())


def write(path: Path, results: dict[str, Any]) -> None:
    """Write next to `path`, then rename: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(results, indent=2) + "\n")
    os.replace(temporary, path)


def table(results: dict[str, Any], names: Iterable[str]) -> str:
    """Return Markdown, a row for each of the `names`."""
    head = ["moments", *STRESSES, "bytes per parameter", "LM loss above float32's, %"]
    lines = [head, ["---"] * len(head)]
    for name in names:
        runs, of_stress = results["runs"].get(name, {}), results["stress"].get(name)
        if name == REFERENCE or not (runs or of_stress):
            continue
        row = [name]
        for s in STRESSES:
            row.append(_percent(of_stress[s]["bias"]) if of_stress else "")
        row.append(", ".join({f"{run['state_bytes_per_parameter']:.2f}" for run in runs.values()}))
        row.append(_interval(results["gaps_percent"].get(name, {})))
        lines.append(row)
    return "\n".join(f"| {' | '.join(cells)} |".replace("-0.0 ", "0.0 ") for cells in lines)


def _interval(gap: dict[str, Any]) -> str:
    """Return the mean gap with its interval and verdict; "" for too few seeds."""
    if "mean" not in gap:
        return ""
    interval = f"{gap['mean']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}]"
    return f"{interval} ({len(gap['seeds'])} seeds): {gap['verdict']}"


def _percent(value: float) -> str:
    """Return two digits, with the sign."""
    return f"{value:+.1f}" if abs(value) < 10 else f"{value:+,.0f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # fmt: off
    parser.add_argument("--stress", action="store_true", help="measure updates under stress")
    parser.add_argument("--lm", action="store_true", help="train the language model")
    parser.add_argument("--table", action="store_true", help="print the table")
    parser.add_argument("--muon", action="store_true", help="of Muon instead of Adam")
    parser.add_argument("--optimizers", nargs="+",
                        help="of --stress and --lm; float32 is always among those of --lm")
    parser.add_argument("--seeds", type=int, default=12, help="of --lm: how many, from 0 on")
    parser.add_argument("--steps", type=int, help="of --lm (450; with --muon 200)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument("--results", metavar="PATH", type=Path,
                        help="benchmarks/results/optimizer_states.json, or muon.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    # fmt: on
    args = parser.parse_args(argv)
    args.steps = args.steps or (200 if args.muon else 450)
    file = "muon.json" if args.muon else "optimizer_states.json"
    args.results = args.results or ROOT / "benchmarks/results" / file
    known = MUON if args.muon else MOMENTS
    if unknown := {*(args.optimizers or ())} - {*known}:
        parser.error(f"--optimizers: {sorted(unknown)} unknown; allowed: {list(known)}")
    if args.one:
        os.sched_setaffinity(0, {args.core})  # before JAX counts cores
        print(json.dumps(train(args.one[0], int(args.one[1]), args.steps, args.muon)))
        return
    results = read(args.results)
    if args.stress:
        for name in args.optimizers or known:
            results["stress"][name] = stress(name, args.muon)
            write(args.results, results)
    if args.lm:
        names = args.optimizers or ["default", *([] if args.muon else PRESETS)]
        train_what_is_missing(args, [n for n in known if n in {REFERENCE, *names}], results)
    print(table(results, known))


def train_what_is_missing(
    args: argparse.Namespace, names: list[str], results: dict[str, Any]
) -> None:
    made = {"steps": args.steps, **environment()}
    if results["runs"] and results["made"] != made:
        raise SystemExit(
            f"{args.results} holds runs with other settings ({results['made']}), which cannot "
            "be compared with new ones: name another file with --results"
        )
    results["made"] = made
    wanted = [(name, seed) for seed, name in itertools.product(range(args.seeds), names)]
    missing = [(n, seed) for n, seed in wanted if str(seed) not in results["runs"].get(n, {})]
    for name, seed, run in train_all(missing, args.steps, args.muon, args.jobs):
        results["runs"].setdefault(name, {})[str(seed)] = run
        results["gaps_percent"] = gaps(results["runs"])
        write(args.results, results)
        print(f"{name}, seed {seed}: {run}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
