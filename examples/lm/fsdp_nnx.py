"""Train any NNX model on several devices by FSDP: a mesh, shardings and a step.

Each device has its sequences of the batch, and its shard of every parameter and moment, by the rule
`spec_of`. `jax.jit` inserts the communication; weights are gathered as FP8 bytes if a GPU's
kernels support them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8

AXIS = "fsdp"
SMALL = 2**16  # elements; smaller arrays are replicated: norms, histories, counters


def make_mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])


def by_sequence(x: jax.Array) -> jax.Array:
    """Return the sharding of ``[batch, ...]`` by sequences."""
    return jax.lax.with_sharding_constraint(x, P(AXIS))


def spec_of(x: Any, devices: int) -> P:
    """Shard the larger of the last two axes, if possible; an axis before them counts layers."""
    places = [axis for axis in range(x.ndim)[-2:] if x.shape[axis] % devices == 0]
    if x.size < SMALL or not places:
        return P()
    largest = max(places, key=lambda axis: x.shape[axis])
    return P(*(AXIS if axis == largest else None for axis in range(x.ndim)))


def placed(state: Any, mesh: Mesh) -> Any:
    """Return the shapes of `state`, with shardings."""
    place = lambda x: NamedSharding(mesh, spec_of(x, mesh.size))
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x))
    return jax.tree.map(shape, state)


def loss_fn(model: nnx.Module, windows: jax.Array) -> jax.Array:
    """Return the mean loss, in nats, of predicting every token from the tokens before it."""
    logits = model(windows[:, :-1]).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_step(
    graphdef: Any, value_and_grad: Callable[..., Any] = jfp8.nnx.value_and_grad
) -> Callable[[Any, jax.Array], tuple[Any, dict[str, jax.Array]]]:
    """Return ``(state, windows) -> (state, numbers)``, for a state from `nnx.split`."""

    def step(state: Any, windows: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = value_and_grad(loss_fn)(model, windows)
        optimizer.update(model, grads)
        numbers = {"loss": loss, "skipped": optimizer.skipped_steps[...]}
        return nnx.state((model, optimizer)), numbers

    return step
