"""What the pictures of `TensorStats` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jfp8.debug.records import TensorStats


def check_rows(rows: Iterable[Any], function: str) -> tuple[TensorStats, ...]:
    """`rows` as a tuple; ``TypeError`` for anything else, ``ValueError`` if there are none."""
    if isinstance(rows, TensorStats):
        return (rows,)
    rows = tuple(rows)
    for row in rows:
        if not isinstance(row, TensorStats):
            raise TypeError(
                f"jfp8.plot.{function} takes rows of statistics, jfp8.debug.TensorStats, but one "
                f"of them is a {type(row).__name__}. Rows come from Stats.rows(), Recorder.rows "
                "or jfp8.debug.read_jsonl(path)."
            )
    if not rows:
        raise ValueError(
            f"jfp8.plot.{function} got no rows. Recorder.rows is empty until a sampled step is "
            "over and the next one has begun; Stats.rows(), if nothing was computed in FP8."
        )
    return rows


def steps_of(rows: Iterable[TensorStats]) -> list[int]:
    """The steps that occur, in order; 0 alone if no row has one; ``ValueError`` if only some do."""
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
