"""What a run leaves behind: a line of numbers per step, a picture, and a summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from tqdm import tqdm

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

# Okabe and Ito's palette, which stays distinct for colour-blind readers; the dashes do so in print.
STYLES = {"fp8": ("#0072B2", "-"), "f32": ("#D55E00", "--")}
SMOOTHED_OVER = 20  # steps


Numbers = dict[str, list[dict[str, float]]]  # of each run, one {"loss": ..., "ms": ...} per step


class Metrics:
    """`metrics.jsonl`: one line per step, {"step": 1, "loss": {"fp8": 5.6, "f32": 5.6}, "ms": ...}.

    A resumed run begins with the lines that its checkpoint kept.
    """

    def __init__(self, path: Path, lines: list[dict[str, Any]]):
        self.path = path
        self.lines = []
        path.write_text("")
        self._write(lines)

    def append(self, first_step: int, numbers: Numbers) -> None:
        """Writes the steps from `first_step` on."""
        lines = []
        for i, of_step in enumerate(zip(*numbers.values(), strict=True)):
            line = {"step": first_step + i}
            for key in of_step[0]:
                line[key] = {run: n[key] for run, n in zip(numbers, of_step, strict=True)}
            lines.append(line)
        self._write(lines)

    def median(self, key: str) -> dict[str, float]:
        """For each run, the median over all steps."""
        runs = self.lines[0][key]
        return {run: float(np.median([line[key][run] for line in self.lines])) for run in runs}

    def _write(self, lines: list[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.lines += lines


def progress_bar(step: int, steps: int) -> tqdm:
    """Time gone and time left, with room for the losses that `advance` puts in."""
    return tqdm(
        initial=step,
        total=steps,
        dynamic_ncols=True,
        bar_format="{percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]",
    )


def advance(bar: tqdm, step: int, numbers: Numbers) -> None:
    """Moves the bar to `step`, with the latest loss and ms per step of every run side by side."""
    last = {run: of_run[-1] for run, of_run in numbers.items()}
    bar.set_postfix_str(
        "  ".join(f"{run} {n['loss']:.3f} ({n['ms']:.0f} ms)" for run, n in last.items()),
        refresh=False,
    )
    bar.update(step - bar.n)


def relative_gap(losses: dict[str, float]) -> float | None:
    """How far the FP8 loss lies above the float32 loss, in percent."""
    if len(losses) < 2:
        return None
    return 100 * (losses["fp8"] - losses["f32"]) / losses["f32"]


def draw(
    path: Path, lines: list[dict[str, Any]], labels: dict[str, str], validation: dict[str, float]
) -> None:
    """The training loss of every run; below it, for two runs, their difference."""
    steps = np.array([line["step"] for line in lines])
    losses = {name: np.array([line["loss"][name] for line in lines]) for name in labels}
    smooth = {name: _moving_average(values) for name, values in losses.items()}
    both = len(labels) == 2

    figure, axes = plt.subplots(
        1 + both, figsize=(8, 6.5 if both else 5), squeeze=False, sharex=True, layout="constrained",
        height_ratios=(3, 1) if both else None,
    )  # fmt: skip
    top = axes[0, 0]
    for name, label in labels.items():
        color, dashes = STYLES[name]
        top.plot(steps, losses[name], color=color, linewidth=0.6, alpha=0.25)
        top.plot(steps, smooth[name], color=color, linestyle=dashes, linewidth=2,
                 label=f"{label}: validation loss {validation[name]:.4f}")  # fmt: skip
    top.set_title("Byte-level Transformer language model")
    top.set_ylabel("training loss (nats per byte)")
    top.legend(title=f"mean of {min(SMOOTHED_OVER, len(steps))} steps; faint: every step")
    if both:
        bottom = axes[1, 0]
        gap = 100 * (smooth["fp8"] - smooth["f32"]) / smooth["f32"]
        bottom.axhline(0, color="0.5", linewidth=1)
        bottom.plot(steps, gap, color="black", linewidth=1.5)
        bottom.set_ylabel("FP8 above f32 (%)")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("optimizer step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _moving_average(values: np.ndarray) -> np.ndarray:
    """The mean over about SMOOTHED_OVER steps around each step; over fewer near the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    before = np.minimum(SMOOTHED_OVER // 2, i)
    after = np.minimum(before, i[::-1])  # as many as before, so that the steep start has no lag
    return (total[i + after + 1] - total[i - before]) / (before + after + 1)
