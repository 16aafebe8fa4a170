"""Plot a training run of experts: losses, and next to them the share of tokens of each expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import report

plt = report.plt
HEIGHT = 1.0  # inches of a panel of eight experts


def shares(numbers: list[dict[str, Any]]) -> np.ndarray:
    """Return f64[steps, layers, experts], in percent; each layer's shares sum to 100."""
    tokens = np.array([n["tokens"] for n in numbers], np.float64)
    return 100 * tokens / tokens.sum(axis=-1, keepdims=True)


def draw(
    numbers: report.Numbers,
    path: Path,
    losses: dict[str, Any],
    labels: dict[str, str],
    title: str,
    legend: dict[str, str],
) -> None:
    """Draw the plot of `report.draw`; on the right a panel per layer and run, a row per expert.

    Colors are means over as many steps as the losses.
    """
    of_runs = {run: shares(numbers[run]) for run in labels}
    steps, layers, experts = next(iter(of_runs.values())).shape
    window = report.smoothed_over(steps)
    smooth = {
        run: np.lib.stride_tricks.sliding_window_view(of_run, window, axis=0).mean(axis=-1)
        for run, of_run in of_runs.items()
    }
    even = 100 / experts

    figure = plt.figure(figsize=(6 + 3 * len(labels), max(6.0, HEIGHT * layers + 2)),
                        layout="constrained")  # fmt: skip
    figure.suptitle(title)
    left, right = figure.subfigures(1, 2, width_ratios=(5.5, 0.5 + 3 * len(labels)))
    left.suptitle("Loss", fontsize="medium")
    report.draw_losses(left, losses, labels, legend)
    right.suptitle("Which experts the tokens go to", fontsize="medium")
    panels = right.subplots(layers, len(labels), sharex=True, sharey=True, squeeze=False)
    for column, (run, label) in enumerate(labels.items()):
        for layer in range(layers):
            ax = panels[layer, column]
            colors = ax.imshow(
                smooth[run][:, layer].T, aspect="auto", cmap="cividis", vmin=0, vmax=2 * even,
                interpolation="nearest", extent=(window - 0.5, steps + 0.5, experts + 0.5, 0.5),
            )  # fmt: skip
            ax.set_yticks([1, experts])
            ax.tick_params(labelsize="small")
            if column == 0:
                ax.set_ylabel(f"layer {layer + 1}\nexpert")
        panels[0, column].set_title(label, fontsize="medium")
        panels[-1, column].set_xlabel("optimizer step")
    bar = right.colorbar(colors, ax=panels, extend="max", aspect=40, pad=0.02)
    mean = f", mean of {window} steps" if window > 1 else ""
    bar.set_label(f"share of the layer's tokens (%){mean}; even: {even:g} %")
    bar.ax.axhline(even, color="white", linewidth=1.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)
