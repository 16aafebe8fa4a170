"""Checks of rows of statistics that are drawn."""

from __future__ import annotations

from collections.abc import Iterable

from jfp8.debug.records import TensorStats, check_rows


def some_rows(rows: Iterable[TensorStats], function: str) -> list[TensorStats]:
    """Return `rows` as a list; raise ``TypeError`` for anything else, ``ValueError`` for none."""
    found = check_rows(rows, f"jfp8.plot.{function}")
    if not found:
        raise ValueError(
            f"jfp8.plot.{function} got no rows. Recorder.rows is empty until a sampled step is "
            "over and the next one has begun; Stats.rows(), if nothing was computed in FP8."
        )
    return found


def steps_of(rows: Iterable[TensorStats]) -> list[int]:
    """Return the steps that occur, in order; [0] if no row has one. Raise if only some do."""
    steps = {row.step for row in rows}
    if steps == {None}:
        return [0]
    numbers = sorted(step for step in steps if step is not None)
    if len(numbers) < len(steps):
        raise ValueError(
            "Only some rows have a step, so their order is unknown. Give all of them one: "
            "Stats.rows(step=...)."
        )
    return numbers
