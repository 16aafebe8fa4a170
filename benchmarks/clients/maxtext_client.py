"""MaxText's own train step on 8 virtual devices, in FP8 and in float32.

    python3.12 -m venv V && V/bin/pip install jax==0.11.2 flax==0.12.12 optax==0.2.8 \\
        orbax-checkpoint==0.12.8 pydantic omegaconf absl-py pyyaml psutil tabulate
    V/bin/pip install --no-deps maxtext==0.2.5 aqtp qwix tensorboardX .
    V/bin/python benchmarks/clients/maxtext_client.py

It writes benchmarks/results/maxtext.json. Data are sequences of a random Markov chain, new ones in
each step. Float32 is the same program with FP8 switched off by `jfp8.autocast`, which has the same
initial parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import maxtext_stand_ins  # noqa: F401  # before MaxText
import numpy as np
from count_products import in_both, products
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train as maxtext_train

import jfp8
from jfp8.integrations.maxtext import enabled

BASE = Path(maxtext_train.__file__).parents[2] / "configs" / "base.yml"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "maxtext.json"
VOCABULARY = 128
COMMON = {
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "enable_goodput_recording": False,
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "base_mlp_dim": 256,
    "base_moe_mlp_dim": 256,
    "base_num_decoder_layers": 3,
    "vocab_size": VOCABULARY,
    "max_target_length": 64,
    "per_device_batch_size": 2,
    "ici_fsdp_parallelism": 4,
    "ici_tensor_parallelism": 2,
    "attention": "dot_product",
    "dtype": "float32",
    "learning_rate": 3e-3,
    "log_period": 1000,
}
MODELS = {
    "llama": {},
    "mixture, dense products": {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sparse_matmul": False,
    },
    "mixture, grouped products": {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
# In float32 experts multiply without grouping: megablox is interpreted on CPUs, and the numbers are
# the same but for their rounding.
EXACT = {"sparse_matmul": False}
RECIPES = ("delayed", "current", "mxfp8")
TIMES: list[float] = []  # when the steps began


@dataclass
class Run:
    """The results of a training: losses by step, CPU seconds to compile and per step, the program.

    CPU seconds of all threads, because they do not depend on other load of the machine.
    """

    losses: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    step_s: float = 0.0
    jaxpr: Any = None
    state: Any = None


class MarkovChain:
    """MaxText's data: batches of random sequences over which each token allows 8 successors."""

    def __init__(self, config: Any, mesh: Any):
        self.random = np.random.default_rng(config.data_shuffle_seed)
        successors = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, 8))
        self.successors, self.config, self.mesh = successors, config, mesh
        TIMES.clear()

    def __iter__(self) -> MarkovChain:
        return self

    def __next__(self) -> dict[str, Any]:
        TIMES.append(time.process_time())
        batch, length = self.config.global_batch_size_to_load, self.config.max_target_length
        tokens = [self.random.integers(0, VOCABULARY, batch)]
        for _ in range(length):
            tokens.append(self.successors[tokens[-1], self.random.integers(0, 8, batch)])
        tokens = np.stack(tokens, axis=1).astype(np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
        ones = np.ones((batch, length), np.int32)
        both = {"position": positions, "segmentation": ones}
        named = {f"{of}_{k}": v for of in ("inputs", "targets") for k, v in both.items()}
        return named | {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(options: dict[str, Any], *, fp8: bool = True, data: Any = MarkovChain) -> Run:
    """Train by MaxText with `options` besides `COMMON`; not `fp8`: the same in high precision."""
    run = Run()

    def observe(config: Any, step: Any, arguments: Any) -> None:
        start = time.process_time()
        traced = step.trace(*arguments)
        traced.lower().compile()
        run.compile_s = time.process_time() - start
        run.jaxpr = traced.jaxpr.jaxpr

    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        own = {"run_name": "run", "base_output_directory": folder, "jax_cache_dir": folder}
        given = own | COMMON | options
        words = [f"{name}={value}" for name, value in given.items()]
        argv = [maxtext_train.__file__, str(BASE), *words, f"metrics_file={metrics}"]
        before = maxtext_train.maxtext_utils.maybe_dump_jaxpr
        iterator = input_pipeline_interface.SyntheticDataIterator
        maxtext_train.maxtext_utils.maybe_dump_jaxpr = observe
        input_pipeline_interface.SyntheticDataIterator = data or iterator
        try:
            with enabled(), jfp8.autocast(enabled=fp8):
                config, recorder = maxtext_train.initialize(argv)
                run.state = maxtext_train.train_loop(config, recorder)
        finally:
            maxtext_train.maxtext_utils.maybe_dump_jaxpr = before
            input_pipeline_interface.SyntheticDataIterator = iterator
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    run.losses = [line["learning/loss"] for line in lines]
    steps = [b - a for a, b in itertools.pairwise(TIMES[1:])]
    run.step_s = statistics.median(steps) if steps else math.nan
    return run


def counted(run: Run) -> dict[str, Any]:
    """Count matmuls of the train step with FP8 operands, and each of the others."""
    found = products(run.jaxpr)
    others = {f"{a} x {b}": n for (fp8, a, b), n in sorted(found.items()) if not fp8}
    return {"fp8": in_both(found), "others": others}


def interval(gaps: list[float]) -> tuple[float, float]:
    """Return the mean, and half of the 95 % t interval."""
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(gaps)]
    half = quantile * statistics.stdev(gaps) / len(gaps) ** 0.5
    return statistics.mean(gaps), half


def runs_of(model: str, name: str, seeds: int, steps: int) -> list[Run]:
    """Return a run for each seed, with a recipe of this name, or ``"float32"``."""
    fp8, runs = name != "float32", []
    given = MODELS[model] | {"quantization": f"jfp8_{name if fp8 else 'current'}", "steps": steps}
    for seed in range(seeds):
        seeded = {"init_weights_seed": seed, "data_shuffle_seed": seed}
        runs.append(train(given | seeded | ({} if fp8 else EXACT), fp8=fp8))
        print(model, name, seed, runs[-1].losses[-1], flush=True)
    return runs


def compared(model: str, recipes: list[str], seeds: int, steps: int) -> dict[str, Any]:
    """Compare float32 and every recipe from equal parameters, on equal data, for each seed."""
    last = max(1, steps // 6)
    rows: dict[str, Any] = {}
    for name in ["float32", *recipes]:
        runs = runs_of(model, name, seeds, steps)
        rows[name] = {
            "losses": [statistics.mean(run.losses[-last:]) for run in runs],
            "first_losses": [run.losses[0] for run in runs],
            "compile_cpu_s": runs[0].compile_s,  # later ones find parts of it in JAX's caches
            "step_cpu_s": statistics.median(run.step_s for run in runs),
            "products": counted(runs[0]),
        }
        exact = rows["float32"]["losses"]
        gaps = [100 * (a / b - 1) for a, b in zip(rows[name]["losses"], exact, strict=True)]
        if name != "float32":
            rows[name]["gap_percent"], rows[name]["half_interval_percent"] = interval(gaps)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile-only", action="store_true", help="measure that again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    results = json.loads(given.results.read_text()) if given.results.exists() else {}
    for model in given.models if given.compile_only else ():
        for name, row in results[model].items():
            row["compile_cpu_s"] = runs_of(model, name, 1, 2)[0].compile_s
            print(model, name, row["compile_cpu_s"], flush=True)
        given.results.write_text(json.dumps(results, indent=2) + "\n")
    for model in () if given.compile_only else given.models:
        rows = compared(model, given.recipes, given.seeds, given.steps)
        results[model] = rows
        given.results.write_text(json.dumps(results, indent=2) + "\n")
        exact = rows["float32"]
        print(f"{model}: float32 {statistics.mean(exact['losses']):.4f}")
        for name in given.recipes:
            row = rows[name]
            print(
                f"  {name:10} {row['gap_percent']:+.2f} ± {row['half_interval_percent']:.2f} %  "
                f"compile x {row['compile_cpu_s'] / exact['compile_cpu_s']:.2f}  "
                f"step x {row['step_cpu_s'] / exact['step_cpu_s']:.2f}  "
                f"products in FP8 {row['products']['fp8']}"
            )


if __name__ == "__main__":
    main()
