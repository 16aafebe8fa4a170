"""Record statistics of a training step every n calls."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jfp8.conversion.product_report import Report
from jfp8.debug.records import TensorStats, write_jsonl
from jfp8.debug.stats import Stats, has_nnx, stats


class Recorder:
    """Call `train_step`, return its results, and take statistics every n calls. ::

        record = jfp8.debug.Recorder(train_step, every=10, jsonl="stats.jsonl")
        for batch in batches:
            state, loss = record(state, batch)
        print(jfp8.debug.advice(record.rows))

    Calls that are not sampled run `train_step` itself. The statistics of a sampled call stay on the
    device until the next call has started, so that no step waits for them.

    Attributes:
      step: number of the next call.
      products: every product of the step, and why some are not FP8; None before the first sample.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        *,
        every: int = 10,
        jsonl: str | Path | None = None,
        write: Callable[[tuple[TensorStats, ...]], object] | None = None,
        start: int = 0,
        keep: int = 200,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> None:
        """Wrap a training step; nothing is compiled before it is called.

        Args:
          train_step: the result of ``jax.jit`` or ``nnx.jit``, or a function to compile here.
          every: calls whose number is a multiple of this are sampled; so is the first, number 0.
          jsonl: a file that rows are appended to, one JSON object per line; see `read_jsonl`.
          write: a function that is called with the rows of each sample, for TensorBoard and others.
          start: number of the first call, when training is resumed.
          keep: how many of the latest samples `rows` keeps. Files get all.
          static_argnums, donate_argnums: options of ``jax.jit`` for the program with statistics,
            and for the other one if `train_step` is not compiled yet.

        Raises:
          ValueError: `every` or `keep` is not a positive int.
        """
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
        self._train_step = train_step
        self._options = {"static_argnums": static_argnums, "donate_argnums": donate_argnums}
        self._programs: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._every = every
        to_file = None if jsonl is None else functools.partial(write_jsonl, jsonl)
        self._writers = [each for each in (to_file, write) if each is not None]
        self._pending: tuple[int, Stats] | None = None
        self._samples: collections.deque[tuple[TensorStats, ...]] = collections.deque(maxlen=keep)
        self.step = start
        self.products: Report | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``train_step(*args, **kwargs)``."""
        if self._programs is None:
            self._programs = self._compiled(of_nnx=has_nnx((args, kwargs)))
        plain, sampled = self._programs
        step, self.step = self.step, self.step + 1
        if step % self._every:
            return plain(*args, **kwargs)
        results, seen = sampled(*args, **kwargs)
        for vector in seen.vectors:
            vector.copy_to_host_async()
        self.flush()
        self._pending, self.products = (step, seen), seen.products
        return results

    def _compiled(self, of_nnx: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return both programs. Only ``nnx.jit`` lets a step change modules."""
        compiled: Any = functools.partial(nnx.jit if of_nnx else jax.jit, **self._options)
        given = self._train_step
        return given if hasattr(given, "lower") else compiled(given), compiled(stats(given))

    def flush(self) -> None:
        """Take the last sample from the device and write it, if that has not been done."""
        if self._pending is None:
            return
        step, seen = self._pending
        self._pending = None
        rows = seen.rows(step)
        self._samples.append(rows)
        for write in self._writers:
            write(rows)

    @property
    def rows(self) -> list[TensorStats]:
        """Return the statistics of the last `keep` samples, oldest first; wait for the last."""
        self.flush()
        return [row for sample in self._samples for row in sample]
