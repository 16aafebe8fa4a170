"""The output of a run: a line of metrics per step, a plot, and a summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax

import jfp8
from jfp8 import plot

try:
    import matplotlib
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    message = f"this example needs {missing.name}: type  pip install 'jfp8[examples]'"
    raise SystemExit(message) from None

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

SMOOTHED_OVER = 20  # steps, or a tenth of all


Numbers = dict[str, list[dict[str, Any]]]  # for each run, one {"loss": ..., "ms": ...} per step


class Metrics:
    """Write `metrics.jsonl`, a line per step: {"step": 1, "loss": {"fp8": 5.6, ...}, "ms": ...}.

    A resumed run starts with the lines of its checkpoint.
    """

    def __init__(self, path: Path, lines: list[dict[str, Any]]):
        self.path = path
        self.lines = []
        path.write_text("")
        self._write(lines)

    def append(self, first_step: int, numbers: Numbers) -> None:
        """Write the steps from `first_step` on."""
        lines = []
        for i, of_step in enumerate(zip(*numbers.values(), strict=True)):
            line = {"step": first_step + i}
            for key in of_step[0]:
                line[key] = {run: n[key] for run, n in zip(numbers, of_step, strict=True)}
            lines.append(line)
        self._write(lines)

    def median(self, key: str) -> dict[str, float]:
        """Return the median over all steps, for each run."""
        runs = self.lines[0][key]
        return {run: float(np.median([line[key][run] for line in self.lines])) for run in runs}

    def _write(self, lines: list[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.lines += lines


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Print a message during compilation, and its duration afterwards."""
    start = time.perf_counter()
    print("compiling ...", end=" ", flush=True)
    yield
    print(f"{time.perf_counter() - start:.1f} s")


def progress_bar(step: int, steps: int) -> tqdm:
    """Return a bar of elapsed and remaining time, with room for the losses from `advance`."""
    return tqdm(
        initial=step,
        total=steps,
        dynamic_ncols=True,
        bar_format="{percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]",
    )


def advance(bar: tqdm, step: int, numbers: Numbers) -> None:
    """Move the bar to `step`, with the latest loss and ms per step of every run side by side."""
    last = {run: of_run[-1] for run, of_run in numbers.items()}
    bar.set_postfix_str(
        "  ".join(f"{run} {n['loss']:.3f} ({n['ms']:.0f} ms)" for run, n in last.items()),
        refresh=False,
    )
    bar.update(step - bar.n)


def median_ms(numbers: Numbers) -> dict[str, float]:
    """Return milliseconds per step of each run; steps with compilation have none."""
    return {
        run: float(np.median([n["ms"] for n in of_run if "ms" in n]))
        for run, of_run in numbers.items()
    }


def relative_gap(losses: dict[str, float], run: str = "fp8") -> float | None:
    """Return how far the loss of `run` is above the float32 loss, in percent."""
    if "f32" not in losses or run not in losses:
        return None
    return 100 * (losses[run] - losses["f32"]) / losses["f32"]


AGAIN = "f32_again"  # float32 from the same parameters, on other batches


def noise_note(losses: dict[str, float]) -> str:
    """Return a note that compares the gap of one pair of runs with the noise of float32."""
    return (
        f"  Noise: on other batches, float32 ends {abs(relative_gap(losses, AGAIN)):.2f} % away. A "
        "smaller gap between\n"
        "  two runs shows nothing about FP8; benchmarks/parity.py compares several seeds."
    )


def headline(title: str, losses: dict[str, float]) -> str:
    """Return the title of a picture, with the finding if FP8 and float32 were trained."""
    gap = relative_gap(losses)
    return title if gap is None else f"{title}: FP8 ends {gap:+.2f} % from float32"


def table(
    labels: dict[str, str],
    losses: dict[str, float],
    ms: dict[str, float],
    what: str = "validation loss",
    **more: dict[str, str],
) -> str:
    """Return a row per run, with loss, gap to float32, milliseconds per step and `more`.

    A note about noise follows, if float32 was trained again.
    """
    rows = [["", what, "relative gap", "ms per step", *more]]
    for run, label in labels.items():
        gap = None if run == "f32" else relative_gap(losses, run)
        cells = [f"{losses[run]:.4f}", "" if gap is None else f"{gap:+.2f} %", f"{ms[run]:.0f}"]
        rows.append([label, *cells, *(column[run] for column in more.values())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    )
    note = [noise_note(losses)] if AGAIN in losses else []
    return "\n".join([*(f"  {line}".rstrip() for line in lines), *note])


def result_line(example: str, **figures: Any) -> str:
    """Return a line for `grep RESULT`: ``RESULT example=train_lm metric=validation_loss ...``.

    Numbers have six digits, texts no spaces, and None is omitted.
    """
    text = lambda v: f"{v:.6g}" if isinstance(v, float) else str(v).replace(" ", "_")
    known = (f"{name}={text(v)}" for name, v in figures.items() if v is not None)
    return " ".join(["RESULT", f"example={example}", *known])


def environment() -> dict[str, Any]:
    """Return the environment that results depend on, besides the program and its options."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {m.__name__: m.__version__ for m in (jfp8, jax, flax, optax)},
    }


def finish(
    example: str,
    title: str,
    args: argparse.Namespace,
    labels: dict[str, str],
    numbers: Numbers,
    validation: dict[str, float],
    *,
    picture: Callable[..., None] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Write the output of a script that trained language models: files, table, and results.

    Args:
      labels, numbers, validation: name, steps and final loss of each run.
        The gap of the first run to float32 is the script's, and `AGAIN` shows its noise.
      picture: function that draws `loss.png` from the first arguments of `draw`; None for `draw`.
      more: figures of this script only, for `result.json` and the line of results.

    Returns:
      the content of `result.json`.
    """
    out = Path(args.out)
    losses = {run: [n["loss"] for n in of_run] for run, of_run in numbers.items()}
    ms = median_ms(numbers)
    summary = table(labels, validation, ms)
    noise = relative_gap(validation, AGAIN)
    validation = {run: loss for run, loss in validation.items() if run != AGAIN}
    result = {
        "validation_loss": validation,
        "gap_percent": relative_gap(validation, next(iter(labels))),
        "noise_percent": noise,
        **more,
        "ms_per_step": ms,
        **environment(),
        "arguments": vars(args),
        "train_loss": losses,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    title = headline(title, validation)
    (picture or draw)(out / "loss.png", losses, labels, title, legend_of(labels, validation))
    print(summary)
    print(f"written to {out}: loss.png, result.json")
    gaps = {name: result[name] for name in ("gap_percent", "noise_percent")}
    figures = {**gaps, **more, "steps": args.steps, "seed": args.seed}
    print(result_line(example, metric="validation_loss", **validation, **figures))
    return result


def legend_of(labels: dict[str, str], validation: dict[str, float]) -> dict[str, str]:
    """Return the label of each run, with its final loss."""
    return {run: f"{label}: validation loss {validation[run]:.4f}" for run, label in labels.items()}


def draw(
    path: Path,
    losses: dict[str, Any],
    labels: dict[str, str],
    title: str,
    legend: dict[str, str],
    *,
    unit: str = "nats per byte",
    reference: tuple[str, str] = ("f32", "float32"),
) -> None:
    """Draw the training loss of every run; below it, its gap to the loss of `reference`."""
    two = len(labels) > 1 and reference[0] in labels
    figure = plt.figure(figsize=(8, 6.5 if two else 5), layout="constrained")
    draw_losses(figure, losses, labels, legend, unit=unit, reference=reference).set_title(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def smoothed_over(steps: int) -> int:
    """Return the number of steps over which a curve is smoothed."""
    return max(1, min(SMOOTHED_OVER, steps // 10))


def draw_losses(
    figure: Any,
    losses: dict[str, Any],
    labels: dict[str, str],
    legend: dict[str, str],
    *,
    unit: str = "nats per byte",
    reference: tuple[str, str] = ("f32", "float32"),
) -> Any:
    """Draw the plot of `draw` on a figure or subfigure; return the axes of the losses."""
    steps = np.arange(1, len(next(iter(losses.values()))) + 1)
    window = smoothed_over(len(steps))
    base, name = reference
    others = [run for run in labels if run != base] if base in labels else []

    axes = figure.subplots(
        1 + bool(others), squeeze=False, sharex=True, height_ratios=(3, 1) if others else None
    )
    top = axes[0, 0]
    mean = f", mean of {window} steps" if window > 1 else ""
    plot.loss_curves(
        {legend[run]: losses[run] for run in labels}, steps=steps, window=window, ax=top
    )
    top.set(xlabel="", ylabel=f"training loss ({unit}){mean}")

    for run in others:
        bottom = axes[1, 0]
        smooth, exact = (
            np.convolve(losses[r], np.full(window, 1 / window), "valid") for r in (run, base)
        )
        curve = top.lines[list(labels).index(run)]
        bottom.plot(
            steps[window - 1 :], 100 * (smooth / exact - 1),
            color=curve.get_color(), linestyle=curve.get_linestyle(), linewidth=1.5,
        )  # fmt: skip
        bottom.axhline(0, color="0.5", linewidth=1)
        bottom.set_ylabel(f"above\n{name} (%)")
        bottom.grid(alpha=0.3)
        bottom.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("optimizer step")
    return top
