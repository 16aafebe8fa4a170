"""A matmul of a traced program, one operand of which is a weight or was made of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.tracing.compat import evaluate

Place: TypeAlias = tuple[int, ...]
"""The index of an equation, after the indices of the equations around it."""


@dataclass(frozen=True)
class Source:
    """Say which weight a value was made of, and how."""

    path: str
    parts: tuple[Any, ...] = ()  # slices that were taken of it, at indices that are known
    gathered: bool = False  # rows were taken at computed indices, as an embedding does
    loops: tuple[tuple[Place, int], ...] = ()  # scans that slice it, outermost first; their lengths
    in_f32: Any = None  # the value before it was cast to fewer bits, if that can be had


@dataclass(frozen=True)
class WeightMatmul:
    """Hold a matmul of `x` and `weight`, which is a weight or was made of one."""

    source: Source  # of the weight; with the path "" where neither operand is one
    eqn: Any
    x: jax.Array
    weight: jax.Array
    swapped: bool = False  # the weight is the first operand
    others: tuple[jax.Array, ...] = ()  # operands after these two: the sizes of groups
    states: Mapping[str, jax.Array] = field(default_factory=dict)  # in this turn of all loops

    @property
    def primitive(self) -> str:
        """Return ``"dot_general"``, ``"conv_general_dilated"`` or ``"ragged_dot_general"``."""
        return self.eqn.primitive.name

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what two uses of a weight share if they share their amax history."""
        summed: Any = None
        if self.primitive == "dot_general":
            summed = self.eqn.params["dimension_numbers"][0][0 if self.swapped else 1]
        source = self.source
        shape = np.shape(self.weight)
        return source.path, source.parts, source.loops, self.primitive, shape, summed

    def plain(self) -> jax.Array:
        """Compute it as the program does."""
        operands = (self.weight, self.x) if self.swapped else (self.x, self.weight)
        return evaluate(self.eqn, [*operands, *self.others])[0]

    def by(self, dot_general: Callable[..., jax.Array], weight: jax.Array) -> jax.Array:
        """Compute a ``dot_general`` by another function, whose second operand is the `weight`."""
        numbers = self.eqn.params["dimension_numbers"]
        return weight_second(dot_general, self.x, weight, numbers, self.swapped)


def weight_second(
    dot_general: Callable[..., jax.Array], x: Any, weight: Any, numbers: Any, swapped: bool
) -> jax.Array:
    """Compute a product by ``dot_general(x, weight)``, also where the `weight` is the first."""
    (first, second), (first_batch, second_batch) = numbers
    if not swapped:
        return dot_general(x, weight, ((first, second), (first_batch, second_batch)))
    y = dot_general(x, weight, ((second, first), (second_batch, first_batch)))
    # The batch, the rest of x, the rest of the weight; the program has these two exchanged.
    n = len(first_batch)
    x_end = x.ndim - len(first)
    return y.transpose(*range(n), *range(x_end, y.ndim), *range(n, x_end))


def is_ordinary(eqn: Any, *operands: Any) -> bool:
    """Tell whether an equation multiplies real numbers of 16 or 32 bits, in the usual way."""
    dtypes = [jnp.result_type(x) for x in operands]
    if not all(jnp.issubdtype(t, jnp.floating) and t.itemsize in (2, 4) for t in dtypes):
        return False
    if eqn.primitive.name == "conv_general_dilated":
        return eqn.params["batch_group_count"] == 1
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        usual = numbers.dot_dimension_numbers == (((1,), (1,)), ((), ()))
        rows = tuple(numbers.lhs_ragged_dimensions) == (0,)
        return usual and rows and tuple(numbers.rhs_group_dimensions) == (0,)
    return eqn.primitive.name == "dot_general"
