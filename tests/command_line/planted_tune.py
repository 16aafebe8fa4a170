"""Tuning, where a candidate of Hopper's products multiplies nothing, and so is the fastest."""

import jax.numpy as jnp

from jfp8.command_line import tune

right = tune.kernel


def kernel(name):
    def planted(a, b, row, column, out, *, tiles, **options):
        if tiles.group == 16:
            return jnp.ones((len(a), len(b)), out)
        return right(name)(a, b, row, column, out, tiles=tiles, **options)

    return planted


tune.kernel = kernel
tried = tune.tried
