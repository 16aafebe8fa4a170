"""What pictures of training runs share: several seeds of each, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes


def curves_of(runs: Mapping[str, jax.typing.ArrayLike]) -> dict[str, np.ndarray]:
    """Return the losses of each run as ``f64[n_seeds, n_steps]``."""
    return {name: np.atleast_2d(np.asarray(losses, np.float64)) for name, losses in runs.items()}


def numbered(steps: jax.typing.ArrayLike | None, n_steps: int) -> np.ndarray:
    """Return the number of each step: `steps`, or counted from 0."""
    steps = np.arange(n_steps) if steps is None else np.asarray(steps)
    if steps.shape != (n_steps,):
        raise ValueError(f"The runs have {n_steps} steps, but steps has the shape {steps.shape}.")
    return steps


def label_of(name: str, finite: np.ndarray) -> str:
    """Name a run, with the number of seeds that end; `finite` is ``bool[n_seeds, n_steps]``."""
    lost = int((~finite).any(axis=1).sum())
    return name + (f" ({lost} of {len(finite)} not finite)" if lost else "")


def mark_end(ax: Axes, step: float, height: float, color: str) -> None:
    """Draw a cross at the last step of a curve that ends."""
    ax.plot(step, height, "X", color=color, ms=8, mec="white")
