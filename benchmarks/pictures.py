"""Draw the pictures of the pages again: all, or the named ones.

    python benchmarks/pictures.py         # minutes
    python benchmarks/pictures.py memory roofline
    python benchmarks/pictures.py roofline --measured h200.jsonl   # from benchmarks/gpu.py

Each is written to docs/_static/NAME.png, and `loss` to docs/loss.png. Most show the records in
benchmarks/results. Pictures of notebooks are the stored outputs: run a changed notebook first.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import core_map
import flax.linen as nn
import jax
import jax.numpy as jnp
import long_run
import numpy as np
import optax
import parity
import png
from accumulation import multiply, operands
from error_against_bits import error_against_bits
from error_map import error_map
from gap_curves import gap_curve
from gap_rows import gap_rows
from matplotlib.figure import Figure
from on_gpu.records import load
from results_file import ROOT
from roofline import roofline

import jfp8
from jfp8.plot.style import AMBER, BLACK, BLUE, GRAY, GREEN, SKY, line, tidy

RESULTS = ROOT / "benchmarks/results"
WIDTH = 7.0  # inches


def figure_of(height: float, title: str) -> Figure:
    figure = Figure((WIDTH, height), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure


def errors_of_recipes() -> Figure:
    """Draw activations of one size, and with features that are much larger than the others."""
    normal = np.random.default_rng(0).normal(size=(512, 2048)).astype(np.float32)
    large = np.where(np.arange(2048) % 128 == 7, np.float32(2.0**15), np.float32(1.0))
    figure = figure_of(7.6, "")
    above, below = figure.subplots(2, 1, sharex=True)
    error_against_bits(above, normal)
    found = error_against_bits(below, normal * large)
    blocks, tensor = (f"{100 * found[name]:.1f} %" for name in ("mxfp8", "current"))
    finding = f"With outliers, MXFP8 has an error of {blocks}, one scale per tensor {tensor}"
    figure.suptitle(finding, fontsize="medium")
    for ax, title in (
        (above, "standard normal activations"),
        (below, "the same, one feature of 128 is 32,768 times larger"),
    ):
        ax.set_title(title, fontsize="small", loc="left")
        ax.set_ylim(1e-3, 0.6)
    above.set_xlabel("")
    return figure


def errors_of_layers() -> Figure:
    """Draw the model of the page on debugging: one input feature is 1e5 times larger."""
    x = jax.random.normal(jax.random.key(0), (64, 256)).at[:, 7].multiply(1e5)
    model = nn.Sequential([nn.Dense(128), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(8)])
    pairs = ("delayed", "mxfp8"), ("rowwise", "block"), ("nvfp4", "direct_e5m2")
    found = [jfp8.debug.compare(model, a, b, x) for a, b in pairs]
    figure = figure_of(
        4.6, "With an outlier in the input, delayed scaling and NVFP4 lose the first gradient"
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 6])
    error_map(above, found, "total")
    error_map(below, found, "gradient")
    above.set_xlabel("")
    return figure


def dead_gradients() -> Figure:
    """Draw an MLP without scales: its gradients shrink below the format's range."""
    hidden = [f for _ in range(6) for f in (jfp8.Dense(64, recipe="unscaled"), nn.tanh)]
    model = nn.Sequential([*hidden, nn.Dense(8)])
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (256, 64))
    y = jnp.tanh(x @ jax.random.normal(keys[1], (64, 8)) / 8)
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, 300))
    variables = model.init(keys[2], x)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    def train_step(state: jfp8.TrainState, batch: Any) -> tuple[jfp8.TrainState, jax.Array]:
        x, y = batch
        loss_fn = lambda variables, x: 0.02 * jnp.mean((model.apply(variables, x) - y) ** 2)
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads), loss

    record = jfp8.debug.Recorder(train_step, every=10)
    for _ in range(300):
        state, _ = record(state, (x, y))
    figure = figure_of(2.7, "Without scales, the gradients of the lower layers die during training")
    jfp8.plot.heat_map(record.rows, ax=figure.subplots())
    return figure


SUMS = {
    "f32": "full sums, f32",
    "hopper_every_128": "14 bits, promoted to f32 every 128 terms",
    "hopper": "fast sums, 14 bits (Hopper)",
}


def sums() -> Figure:
    """Draw the error of a matmul by accumulation, against the length of its sums."""
    lengths = 2 ** np.arange(6, 16)
    errors: dict[str, dict[str, list[float]]] = {}
    for k in lengths:
        for kind, (lhs, rhs) in operands(32, 32, int(k), seed=int(k)).items():
            a, b = (np.asarray(q.data).astype(np.float64) * float(q.scale) for q in (lhs, rhs))
            exact = a @ b.T
            found = {
                label: np.asarray(multiply(lhs, rhs, accumulation=how))
                for how, label in SUMS.items()
            }
            for label, product in found.items():
                error = np.linalg.norm(product - exact) / np.linalg.norm(exact)
                errors.setdefault(kind, {}).setdefault(label, []).append(float(error))
            errors[kind].setdefault(ROUNDING, []).append(_rounding(kind, int(k)))
    figure = figure_of(3.6, "Promotion every 128 terms stops the growth of errors in 14-bit sums")
    for ax, (kind, by_label) in zip(figure.subplots(1, 2, sharey=True), errors.items()):
        for i, (label, values) in enumerate(by_label.items()):
            style = line(i) if label != ROUNDING else {"color": GRAY, "linestyle": "--"}
            ax.plot(lengths, values, label=label, linewidth=1.8, **style)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths[1::3], [f"{n:,}" for n in lengths[1::3]])
        ax.minorticks_off()
        tidy(ax, "terms of a sum")
        title = "values of both signs" if kind == "normal" else "values of one sign"
        ax.set_title(title, fontsize="small", loc="left")
    figure.axes[0].set_ylabel("relative error, RMS")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False,
                  fontsize="small")  # fmt: skip
    return figure


ROUNDING = "rounding the operands to E4M3, to compare"


def _rounding(kind: str, k: int) -> float:
    """Return the error from rounding alone, for the same matmul."""
    keys = jax.random.split(jax.random.key(k))
    x, w = (np.asarray(jax.random.normal(key, (32, k)), np.float64) for key in keys)
    if kind != "normal":
        x, w = abs(x), abs(w)
    lhs, rhs = (np.asarray(jfp8.quantize(jnp.float32(a)).dequantize(), np.float64) for a in (x, w))
    return float(np.linalg.norm(lhs @ rhs.T - x @ w.T) / np.linalg.norm(x @ w.T))


def like_float32() -> Figure:
    """Draw gaps of one recipe per granularity of scales; the title counts equivalent ones."""
    names = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4", parity.CONTROL)
    found = parity.gaps(parity.read(RESULTS / "parity.json")["lm"]["runs"])
    told = {name: found[name]["loss_percent"] for name in names}
    equal = [name for name in names if told[name]["verdict"].startswith("equivalent")]
    margin = parity.MARGIN
    title = f"{len(equal)} FP8 recipes train like float32 (loss within {margin} %); 4 bits do not"
    figure = figure_of(3.4, title)
    ax = figure.subplots()
    rows = {parity.LABELS[n].replace("`", ""): list(told[n]["seeds"].values()) for n in names}
    gap_rows(ax, rows, margin=margin, confidence=parity.CONFIDENCE, limit=5 * margin)
    ax.set_xlabel("final loss, % above float32: 12 seeds, mean, 90 % interval")
    return figure


def pairs_of_runs(name: str) -> Figure:
    """Draw a task's losses under `DelayedScaling` and in float32, and the gap of every seed."""
    runs = parity.read(RESULTS / "parity.json")[name]["runs"]
    told = parity.gaps(runs)["delayed"]["loss_percent"]
    ends = [run["loss"] for run in runs[parity.REFERENCE].values()]
    fp8, exact = (
        np.array([runs[recipe][seed]["train_loss"] for seed in told["seeds"]])
        for recipe in ("delayed", parity.REFERENCE)
    )
    steps = parity.MEAN_OF * np.arange(1, 1 + exact.shape[1])
    equal = told["verdict"] == "equivalent"
    verdict = f"equivalent within {parity.MARGIN} %" if equal else "inconclusive"
    side = "above" if told["mean"] > 0 else "below"
    low, high = (f"{told[key]:+.2f}".replace("-", "−") for key in ("low", "high"))
    finding = (
        f"{parity.TASKS[name].title.capitalize()}: FP8 ends {abs(told['mean']):.2f} % {side} "
        f"float32 on average, {verdict}\n"
        f"{told['n']} seeds, 90 % interval {low} to {high} %; "
        f"float32 alone varies by {100 * (max(ends) / min(ends) - 1):.1f} % from seed to seed"
    )
    figure = figure_of(4.8, finding)
    above, below = figure.subplots(2, 1, sharex=True)
    above.fill_between(steps, exact.min(0), exact.max(0), color=GRAY, alpha=0.3, linewidth=0,
                       label="float32, lowest to highest seed")  # fmt: skip
    above.plot(steps, fp8.mean(0), color=BLUE, linewidth=1.8, label="FP8, mean")
    above.plot(steps, exact.mean(0), color=BLACK, linewidth=2.2, linestyle=(0, (1, 1.2)),
               label="float32, mean")  # fmt: skip
    tidy(above, "", f"training loss,\nmean of {parity.MEAN_OF} steps")
    below.plot(steps, 100 * (fp8 / exact - 1).T, color=GRAY, linewidth=0.6, alpha=0.7)
    below.lines[0].set_label("a seed")
    gap_curve(below, "mean, 90 % interval", fp8, exact, steps)
    tidy(below, "optimizer step", "above float32 of\nthe same seed (%)")
    for ax, place in ((above, "upper right"), (below, "lower left")):
        ax.legend(frameon=False, fontsize="small", loc=place, ncols=3)
    below.set_xlim(0, None)
    return figure


def memory() -> Figure:
    """Draw the results of benchmarks/training_state.py and saved_activations.py."""
    state = json.loads((RESULTS / "training_state.json").read_text())["bytes_per_parameter"]
    kept = json.loads((RESULTS / "saved_activations.json").read_text())["results"]["layer"]
    kept["f32, everything computed again"] = kept.pop("f32, everything computed again")  # last
    megabytes = np.array([row["temp_bytes"] for row in kept.values()]) / 1e6
    by_name = dict(zip(kept, megabytes))
    finding = (
        f"FP8 cuts the training state from {state['f32']['total']:.0f} to "
        f"{min(row['total'] for row in state.values()):.1f} bytes per parameter,\nand memory for "
        f"the gradient from {by_name['f32']:.0f} to "
        f"{by_name['the same, and only they are kept']:.0f} MB"
    )
    figure = figure_of(6.6, finding)
    above, below = figure.subplots(2, 1, height_ratios=[len(state), len(kept)])
    parts = (("weights", BLUE, ""), ("masters", SKY, "..."), ("moments", AMBER, "///"),
             ("gradients", GREEN, "\\\\\\"))  # fmt: skip
    left = np.zeros(len(state))
    for name, color, hatch in parts:
        widths = np.array([row[name] for row in state.values()])
        above.barh(list(state), widths, left=left, color=color, hatch=hatch, edgecolor="white",
                   linewidth=0, label=name)  # fmt: skip
        left += widths
    _bars(above, left, "bytes per parameter", 1)
    above.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize="small")
    below.barh(list(kept), megabytes, color=BLUE)
    _bars(below, megabytes, "MB for the gradient of 16 layers", 0)
    return figure


def _bars(ax: Any, ends: np.ndarray, unit: str, digits: int) -> None:
    for y, end in enumerate(ends):
        ax.text(end + 0.01 * ends.max(), y, f"{end:.{digits}f}", va="center", fontsize="small")
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.set_xlim(0, 1.1 * ends.max())
    ax.locator_params(axis="x", nbins=5, integer=True)
    tidy(ax, unit)
    ax.grid(visible=False)


# Where pictures come from

NOTEBOOKS = {  # with the number of the picture in it
    "formats": ("01_number_formats", 1),
    "without_scale": ("01_number_formats", 3),
    "with_scale": ("01_number_formats", 4),
    "outlier": ("02_choosing_scales", 1),
    "block_scales": ("02_choosing_scales", 2),
    "amax_history": ("03_amax_histories", 0),
}
DRAWN: dict[str, Callable[[], Figure]] = {
    "error_against_bits": errors_of_recipes,
    "error_map": errors_of_layers,
    "dead_gradients": dead_gradients,
    "sums": sums,
    "core": core_map.draw,
    "memory": memory,
    "roofline": roofline,
    "curves": lambda: parity.draw_curves(parity.read(RESULTS / "parity.json"), ["lm"]),
    "like_float32": like_float32,
    "gaps": lambda: parity.draw(parity.read(RESULTS / "parity.json")),
    "long_run": lambda: long_run.draw(long_run.read(RESULTS / "long_run.json")),
    "loss": partial(pairs_of_runs, "lm"),
    "experts": partial(pairs_of_runs, "moe"),
}
NAMES = (*NOTEBOOKS, *DRAWN)


def of_notebook(name: str) -> bytes:
    """Return the PNG in a notebook's stored outputs."""
    notebook, number = NOTEBOOKS[name]
    cells = json.loads((ROOT / f"notebooks/{notebook}.ipynb").read_text())["cells"]
    outputs = (output.get("data", {}) for cell in cells for output in cell.get("outputs", ()))
    return base64.b64decode([data["image/png"] for data in outputs if "image/png" in data][number])


def write(name: str, folder: Path) -> None:
    """Draw one picture into `folder`."""
    if name in NOTEBOOKS:
        (folder / f"{name}.png").write_bytes(of_notebook(name))
    else:
        where = folder.parent if name == "loss" else folder
        png.save(DRAWN[name](), where / f"{name}.png")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--measured", metavar="FILE", type=Path,
                        help="for the roofline: the file from benchmarks/gpu.py")  # fmt: skip
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}")
    if args.measured:
        DRAWN["roofline"] = partial(roofline, load(args.measured))
    for name in args.names or NAMES:
        write(name, ROOT / "docs/_static")
        print(name, flush=True)


if __name__ == "__main__":
    main()
