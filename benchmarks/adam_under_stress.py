"""Compare updates from stored moments to exact ones, for gradients that are hard to store.

Half of the elements of every block, the odd ones, belong to one group and the rest to the other;
all of a group have the same exact update, or one that chance alone varies. After each step the mean
update of a group is compared with `optax.scale_by_adam` in f32 on the same gradients. `E`
is step 200, `n` normal noise:

  decay    1, and from E on 0.1 for the odd
  noisy    the same, times 1 + n
  scales   1 + n, and for the odd times 1e-4
  far      1 + n, and for the odd times 1e-6
  spike    1 + n / 2, and for the odd in step E alone times 1000
  flood    1 + n / 2, and for all in step E alone times 1000
  sparse   1 + n / 2 in every 50th step, in between 0; another step for every second row
  weak     0.1 + n: a signal of a tenth of the noise
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfp8.optim.adam import Moments, scale_by_adam

STRESSES = ("decay", "noisy", "scales", "far", "spike", "flood", "sparse", "weak")
EVENT = 200
POINTS = (10, 30, 100, 200, 201, 203, 210, 230, 300, 500, 1200, 4200)  # steps that were taken
SHAPE = (8, 512)
ODD = np.broadcast_to(np.arange(SHAPE[1]) % 2 == 1, SHAPE)


def gradients(step: jax.Array) -> jax.Array:
    """Return the gradients of `step`, from 0, of all stresses: f32[len(STRESSES), *SHAPE]."""
    n = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), SHAPE)
    one, after = jnp.ones(SHAPE), step >= EVENT
    fallen = jnp.where(ODD & after, 0.1, one)
    spike = jnp.where(step == EVENT, 1000.0, one)
    turn = np.arange(SHAPE[0])[:, None] % 2 * 25
    of = {
        "decay": fallen,
        "noisy": fallen * (1 + n),
        "scales": jnp.where(ODD, 1e-4, one) * (1 + n),
        "far": jnp.where(ODD, 1e-6, one) * (1 + n),
        "spike": jnp.where(ODD, spike, one) * (1 + n / 2),
        "flood": spike * (1 + n / 2),
        "sparse": jnp.where(step % 50 == turn, 1 + n / 2, 0.0),
        "weak": 0.1 + n,
    }
    return jnp.stack([of[name] for name in STRESSES])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _statistics(
    stored: optax.GradientTransformation, exact: optax.GradientTransformation, steps: int
) -> jax.Array:
    def step(states: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        g = gradients(i)
        ours, first = jax.vmap(stored.update)(g, states[0], zeros)
        theirs, second = jax.vmap(exact.update)(g, states[1], zeros)
        found = jnp.stack([ours, theirs, (ours - theirs) ** 2, theirs**2])
        found = jnp.mean(found.reshape(*found.shape[:2], -1, 2), axis=2)
        return (first, second), found[..., ::-1]  # the odd first

    zeros = jnp.zeros((len(STRESSES), *SHAPE))
    start = jax.vmap(stored.init)(zeros), jax.vmap(exact.init)(zeros)
    return jax.lax.scan(step, start, jnp.arange(steps))[1]


def updates(moments: Moments, steps: int, b2: float = 0.999) -> dict[str, dict[str, np.ndarray]]:
    """Return `compared` for `scale_by_adam` with its moments stored."""
    stored = scale_by_adam(b2=b2, mu=moments.mu, nu=moments.nu)
    return compared(stored, optax.scale_by_adam(b2=b2), steps)


def compared(
    stored: optax.GradientTransformation, exact: optax.GradientTransformation, steps: int
) -> dict[str, dict[str, np.ndarray]]:
    """Return ``"bias"`` and ``"noise"`` of each stress, [steps, group], odd elements first.

    The bias is the mean update over the exact mean, less 1; the noise the root mean square
    difference over the root mean square update.
    """
    found = np.asarray(_statistics(stored, exact, steps), np.float64)  # [step, 4, stress, group]
    mean, exact_mean, squares, of_exact = np.moveaxis(found, 1, 0)
    return {
        name: {
            "bias": mean[:, i] / exact_mean[:, i] - 1,
            "noise": np.sqrt(squares[:, i] / of_exact[:, i]),
        }
        for i, name in enumerate(STRESSES)
    }
