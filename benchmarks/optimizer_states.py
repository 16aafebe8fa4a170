"""Adam with few bits of state: training loss beside float32's, bytes, and the tests that break it.

    python benchmarks/optimizer_states.py                # an hour on two cores, may be interrupted
    python benchmarks/optimizer_states.py --optimizers default torchao --seeds 0
    python benchmarks/optimizer_states.py --stress       # two minutes: no training
    python benchmarks/optimizer_states.py --table        # what has been run so far, in Markdown

The model of `examples/train_lm.py` trains in float32 with its AdamW, and again from the same
parameters on the same batches with the moments stored. Every run is written to the results file
when it ends, and is not repeated by the next command.

The stress tests look at storages alone:
  decay   a second moment of 1 decays to 0.0281 (b2 = 0.999, 4000 steps, squared gradients of 0.01)
          beside one in the same block that stays at 1. Rounded to nearest it freezes.
  scales  squared gradients of 1e-8 beside such of 1 in one block: 9.8e-9 after 4000 steps. A zero
          would make the update infinite.
  update  moments of gradients whose sizes differ from 128 elements to the next, stored once:
          relative mean square error of the update, m / (sqrt(v) + 1e-8).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jfp8
from jfp8.optim.adam import DEFAULT, PRESETS, Moments, adamw
from jfp8.optim.blocks import Blocks
from jfp8.optim.storage import Float, Storage
from jfp8.scaling.random_bits import fold_in

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

from common import environment  # noqa: E402

REFERENCE = "float32"
M = Blocks()
MOMENTS: dict[str, Moments] = {
    REFERENCE: Moments(Float(), Float()),
    "default": DEFAULT,
    **PRESETS,
    # Others, which only the stress tests try unless they are named.
    "v e5m2 stochastic": Moments(M, Blocks(jfp8.E5M2, rounding="stochastic")),
    "v root stochastic": Moments(M, Blocks(transform="sqrt", rounding="stochastic")),
    "v e4m3 stochastic": Moments(M, Blocks(rounding="stochastic")),
    "v expanded nearest": Moments(M, Blocks(transform="expand")),
    "m stochastic": Moments(Blocks(rounding="stochastic"), DEFAULT.nu),
    "m expanded": Moments(Blocks(transform="expand"), DEFAULT.nu),
    "m expanded stochastic": Moments(DEFAULT.nu, DEFAULT.nu),
}


# ---- training


def make_optimizer(args: argparse.Namespace, moments: Moments) -> optax.GradientTransformation:
    """That of `train_lm.make_optimizer`, with the moments kept as told."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.lr, min(30, args.steps // 2), args.steps
    )
    mu, nu = moments
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        adamw(schedule, b2=0.98, weight_decay=0.05, mu=mu, nu=nu, seed=args.seed),
    )


def train(name: str, seed: int, steps: int) -> dict[str, float]:
    """Validation loss, state and time of one run."""
    import train_lm
    from lm import corpus, options

    args = options.make_parser().parse_args(
        ["--recipe", "none", "--seed", str(seed), "--steps", str(steps)]
    )
    text = corpus.load(args.data, args.seq_len)
    state = train_lm.make_state(args, "f32")
    if name != REFERENCE:
        state = jfp8.TrainState.create(
            apply_fn=state.apply_fn,
            variables=state.variables,
            tx=make_optimizer(args, MOMENTS[name]),
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


def gaps(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """How far each loss is above float32's of the same seed, in percent."""
    reference = runs.get(REFERENCE, {})
    return {
        name: {
            seed: round(100 * (run["loss"] / reference[seed]["loss"] - 1), 3)
            for seed, run in sorted(of_seeds.items())
            if seed in reference
        }
        for name, of_seeds in runs.items()
        if name != REFERENCE
    }


# ---- stress


@functools.partial(jax.jit, static_argnums=0)
def second_moment(storage: Storage, v: jax.Array, squares: jax.Array, seed: jax.Array) -> jax.Array:
    """`v` after 4000 steps of ``v = 0.999 v + 0.001 g^2``, stored and read back in between."""

    def step(kept: Any, i: jax.Array) -> tuple[Any, None]:
        v = np.float32(0.999) * storage.decode(kept) + np.float32(0.001) * squares
        return storage.encode(v, fold_in(seed, i)), None

    kept = storage.encode(v, seed)
    return storage.decode(jax.lax.scan(step, kept, jnp.arange(1, 4001, dtype=jnp.uint32))[0])


def stress(moments: Moments) -> dict[str, float]:
    """The three tests, see above."""
    seed = jnp.asarray([0, 0], jnp.uint32)
    odd = np.broadcast_to(np.arange(256) % 2 == 1, (16, 256))
    ones = jnp.ones(odd.shape)
    decayed = second_moment(
        moments.nu, ones, jnp.asarray(np.where(odd, 0.01, 1.0), jnp.float32), seed
    )
    small = second_moment(
        moments.nu, 0 * ones, jnp.asarray(np.where(odd, 1e-8, 1.0), jnp.float32), seed
    )
    decayed, small = np.asarray(decayed)[odd], np.asarray(small)[odd]
    return {
        "decay_mean": float(decayed.mean()),
        "decay_sd": float(decayed.std()),
        "scales_mean": float(small.mean()),
        "scales_zeros_percent": float(100 * np.mean(small == 0)),
        "update_error": one_update(moments),
    }


def one_update(moments: Moments) -> float:
    """Relative mean square error of the update from moments that were stored once."""
    rng = np.random.default_rng(0)
    size = np.repeat(10.0 ** rng.uniform(-5, 0, (64, 8)), 128, axis=1)
    m, v = np.zeros_like(size), np.zeros_like(size)
    for _ in range(200):
        g = size * rng.normal(size=size.shape)
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g**2
    kept = [
        storage.decode(storage.encode(jnp.asarray(x, jnp.float32), jnp.asarray([i, 7], jnp.uint32)))
        for i, (storage, x) in enumerate(zip(moments, (m, v), strict=True))
    ]
    exact = m / (np.sqrt(v) + 1e-8)
    m, v = (np.asarray(x, np.float64) for x in kept)
    return float(np.sum((m / (np.sqrt(v) + 1e-8) - exact) ** 2) / np.sum(exact**2))


# ---- the results file


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"runs": {}, "gaps_percent": {}, "stress": {}}
    return json.loads(path.read_text())


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes beside `path`, then renames: a crash leaves the old file or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(results, indent=2) + "\n")
    os.replace(temporary, path)


def table(results: dict[str, Any]) -> str:
    """Markdown, a row for each way to keep the moments."""
    lines = [
        "| moments | bytes per parameter | loss above float32's, % per seed | decay (0.0281) | "
        "scales (9.8e-9) | zeros, % | update error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in MOMENTS:
        runs, of_stress = results["runs"].get(name, {}), results["stress"].get(name)
        if not runs and not of_stress:
            continue
        bytes_ = {f"{run['state_bytes_per_parameter']:.2f}" for run in runs.values()}
        found = ", ".join(f"{gap:+.2f}" for gap in results["gaps_percent"].get(name, {}).values())
        cells = [name, ", ".join(bytes_), found.replace("-", "−")]
        if of_stress:
            cells += [
                f"{of_stress['decay_mean']:.4f} ± {of_stress['decay_sd']:.4f}",
                f"{of_stress['scales_mean']:.1e}",
                f"{of_stress['scales_zeros_percent']:.0f}",
                f"{of_stress['update_error']:.1e}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", choices=MOMENTS, nargs="+", default=["default", *PRESETS],
                        help="float32 is always among them")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--results", metavar="PATH", type=Path,
                        default=ROOT / "benchmarks/results/optimizer_states.json")  # fmt: skip
    parser.add_argument("--stress", action="store_true", help="train nothing")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    args = parser.parse_args(argv)

    results = read(args.results)
    if args.table:
        print(table(results))
        return
    made = {"steps": args.steps, **environment()}
    if results.setdefault("made", made) != made:
        raise SystemExit(
            f"{args.results} holds runs that were made otherwise ({results['made']}), which cannot "
            "be compared with new ones: name another file with --results"
        )
    for name in MOMENTS:
        results["stress"][name] = stress(MOMENTS[name])
    write(args.results, results)
    chosen = [name for name in MOMENTS if name in {REFERENCE, *args.optimizers}]
    for name in [] if args.stress else chosen:
        of_seeds = results["runs"].setdefault(name, {})
        for seed in args.seeds:
            if str(seed) not in of_seeds:
                print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
                of_seeds[str(seed)] = train(name, seed, args.steps)
                results["gaps_percent"] = gaps(results["runs"])
                write(args.results, results)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
