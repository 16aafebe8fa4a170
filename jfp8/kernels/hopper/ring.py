"""Pass blocks of operands through a ring of slots in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def copy_each(
    steps: Any, stages: int, empty: Any, copy: Callable[[Any, Any], None], before: Any = None
) -> None:
    """Call ``copy(i, slot)`` for each step, after `before` others, when its slot is free."""

    @pl.loop(0, steps)
    def _(i):
        step = i if before is None else before + i
        slot = lax.rem(step, stages)

        @pl.when(step >= stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        copy(i, slot)


def drain(steps: jax.Array, stages: int, empty: Any) -> None:
    """Wait for the last slots: a block must not end before all threads arrive at its barriers."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
