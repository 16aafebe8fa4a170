"""`TensorBoardWriter`: write statistics of tensors for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jfp8.debug.records import NUMBERS, TensorStats


class TensorBoardWriter:
    """Write statistics of tensors into a file that TensorBoard reads. ::

        scalars      underflow/decoder/Dense_0/lhs, ...   all numbers of a row, one tag for each
        histograms   exponent/decoder/Dense_0/lhs         elements in [2^e, 2^(e+1)), by e

    TensorBoard groups tags by their first part, so each group shows one number of all tensors. What
    is not finite (the SQNR of a tensor that lost nothing) is left out.
    """

    def __init__(self, logdir: str | Path) -> None:
        """Open a new file.

        Args:
          logdir: the folder that ``tensorboard --logdir`` shows.

        Raises:
          ImportError: tensorboardX is missing.
        """
        try:
            tensorboard = importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ImportError(
                "Writing statistics for TensorBoard needs tensorboardX, which is not installed: "
                "pip install tensorboardX. jfp8.debug.write_jsonl needs nothing."
            ) from error
        # File names contain seconds: two writers in the same second would share a file.
        suffix = f".{time.time_ns()}"
        self._writer = tensorboard.SummaryWriter(str(logdir), filename_suffix=suffix)

    def write(self, rows: Iterable[TensorStats]) -> None:
        """Write `rows`, such as ``Stats.rows(step)``; those without a step become step 0."""
        for row in rows:
            tag, step = _tag(row.name), row.step or 0
            for name in NUMBERS:
                value = getattr(row, name)
                if math.isfinite(value):
                    self._writer.add_scalar(f"{name}/{tag}", value, step)
            if row.exponents:
                histogram = _histogram(row) | {"global_step": step}
                self._writer.add_histogram_raw(f"exponent/{tag}", **histogram)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def write_tensorboard(logdir: str | Path, rows: Iterable[TensorStats]) -> None:
    """Write `rows` into a new file of a folder; for several calls use a `TensorBoardWriter`.

    Args:
      logdir: the folder that ``tensorboard --logdir`` shows.
      rows: of any steps, for example from `read_jsonl`.

    Raises:
      ImportError: tensorboardX is missing.
    """
    with contextlib.closing(TensorBoardWriter(logdir)) as writer:
        writer.write(rows)


def _tag(name: str) -> str:
    """Turn ``"blocks/Dense_0[3] lhs (fprop)"`` into ``"blocks/Dense_0_3/lhs_fprop"``."""
    layer, _, tensor = name.partition(" ")
    clean = lambda text: re.sub(r"[^-/\w.]+", "_", text).strip("_/")
    return "/".join(filter(None, (clean(layer), clean(tensor))))


def _histogram(row: TensorStats) -> dict[str, Any]:
    """Return counts with a bin for each exponent, empty bins in between included."""
    exponents = np.arange(min(row.exponents), max(row.exponents) + 1)
    counts = np.array([row.exponents.get(int(e), 0) for e in exponents])
    return {
        "min": float(exponents[0]),
        "max": float(exponents[-1] + 1),
        "num": int(counts.sum()),
        "sum": float(counts @ (exponents + 0.5)),
        "sum_squares": float(counts @ (exponents + 0.5) ** 2),
        "bucket_limits": (exponents + 1.0).tolist(),
        "bucket_counts": counts.tolist(),
    }
