"""Histories after a gradient: nothing else records any."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jfp8.nnx import Fp8State


def square_of(y):
    """Return a loss that depends on all results, in f32."""
    floating = [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(jnp.mean(leaf.astype(jnp.float32) ** 2) for leaf in floating)


def recorded(model, variables, *args, **options):
    """Return the ``fp8`` collection of a Linen `model`, as ``{"fp8": ...}``, after one gradient."""
    others = {name: value for name, value in variables.items() if name != "params"}

    def loss(params):
        both = {"params": params, **others}
        y, mutated = model.apply(both, *args, mutable=["fp8"], **options)
        return square_of(y), {"fp8": mutated["fp8"]}

    return jax.jit(jax.grad(loss, has_aux=True))(variables["params"])[1]


def record(model, *args, **options):
    """Record in an NNX `model`, by ``nnx.grad``."""
    loss = lambda model, *args: square_of(model(*args, **options))
    nnx.jit(nnx.grad(loss))(model, *args)


def histories(model):
    """Return every history of an NNX `model`, by the path of its matmul and its role."""
    flat = nnx.to_flat_state(nnx.state(model, Fp8State))
    found = {(*path[:-2], path[-1]): np.asarray(v.get_value()) for path, v in flat}
    return {path: history for path, history in found.items() if path[-1] != "check"}
