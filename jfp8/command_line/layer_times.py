"""Time layers on this card, forward and backward: the gains by which planners choose.

The time of a call is the difference between a long and a short program, since the host needs the
same time to start either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jfp8 import recipes
from jfp8.layers.linen.layers import Dense

BF16 = "bf16"  # in place of a recipe: Flax's layer
CALLS, RUNS = (4, 12), 11


def layer(recipe: str, m: int, n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the forward and backward pass of a layer of ``n x n``, and arguments of `m` tokens."""
    options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16}
    model = nn.Dense(n, **options)
    if recipe != BF16:
        model = Dense(n, recipe=recipes.get(recipe), **options)
    # Not zeros, on which tensor cores run faster.
    x = jax.random.normal(jax.random.key(0), (m, n), jnp.bfloat16)
    both = lambda variables, x, dy: jax.vjp(model.apply, variables, x)[1](dy)
    return both, (model.init(jax.random.key(0), x), x, x)


def microseconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Return the time of a call, the median of several runs."""
    # Each call has parameters of its own, so that XLA does not merge them.
    program = jax.jit(lambda sets: [function(*arguments) for arguments in sets])
    few, many = (
        partial(program.lower(sets).compile(), sets)
        for sets in ([arguments] * count for count in CALLS)
    )
    times = [seconds(many) - seconds(few) for _ in range(RUNS)][1:]
    return max(1e6 * float(np.median(times)) / (CALLS[1] - CALLS[0]), 1e-3)


def seconds(run: Callable[[], Any]) -> float:
    """Return the time of one run."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
