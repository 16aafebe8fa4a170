"""A matmul of a traced program, one operand of which is a weight or was made of weights alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.tracing import interpreter
from jfp8.tracing.compat import evaluate

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
"""The primitives that multiply."""

Place: TypeAlias = tuple[int, ...]
"""The index of an equation, after the indices of the equations around it."""


@dataclass(frozen=True)
class Source:
    """Say which weight a value was made of, and how.

    Attributes:
      path: the weight's; of several ``"a+b"`` if they were joined, else the largest one's.
      parts: slices that were taken of it, at known indices.
      repeats: ``"broadcast"``; or ``"rows"``, if these were taken of it at computed indices, as an
        embedding does. Next to a weight it then is an activation.
      loops: scans that slice it, outermost first, and their lengths.
      in_f32: the value before it was cast to fewer bits, where that can be had.
      is_whole: it is the weight itself, maybe in another dtype.
    """

    path: str
    parts: tuple[Any, ...] = ()
    repeats: Literal["", "broadcast", "rows"] = ""
    loops: tuple[tuple[Place, int], ...] = ()
    in_f32: Any = None
    is_whole: bool = True

    @property
    def first(self) -> str:
        """Return the path of the weight, of several that were joined the first one's."""
        return self.path.partition("+")[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of the scans that slice it."""
        return tuple(length for _, length in self.loops)


INPUTS: frozenset[Any] = frozenset(["inputs"])
"""The origin of data that is not the result of a matmul with a weight."""


@dataclass(frozen=True)
class Data:
    """Say of a value that is no weight which one it is, whatever its dtype and shape.

    Attributes:
      key: the same for one value in other dtypes and shapes; None if it is not known.
      factor: ``(key of a matmul, features, rank)`` if the value is the result of that matmul.
      origins: the keys of all matmuls whose results it was computed from, element by element; and
        `INPUTS`, if from anything else but weights.
      group: the place of the call of a group that computes it, in whatever dtype and shape.
    """

    key: Any
    factor: tuple[Any, int, int] | None = None
    origins: frozenset[Any] = INPUTS
    group: Place | None = None


@dataclass(frozen=True)
class WeightMatmul:
    """Hold a matmul of `x` and `weight`, which is a weight or was made of some."""

    source: Source  # the weight's; with the path "" where neither operand is one
    eqn: Any
    x: jax.Array
    weight: jax.Array
    swapped: bool  # the weight is the first operand
    others: tuple[jax.Array, ...]  # operands after these two: the sizes of groups
    at: interpreter.Place
    data: Data | None = None

    @property
    def primitive(self) -> str:
        """Return ``"dot_general"``, ``"conv_general_dilated"`` or ``"ragged_dot_general"``."""
        return self.eqn.primitive.name

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what two uses of a weight share if they share their amax history."""
        source, shape = self.source, np.shape(self.weight)
        return source.parts, source.lengths, self.primitive, shape, self.summed, self.name

    @property
    def name(self) -> str:
        """Return the path of its weight; of a matmul of two activations the scope that it is in."""
        return self.source.path or self.scope

    @property
    def summed(self) -> tuple[int, ...] | None:
        """Return the dimensions of the weight that a ``dot_general`` sums over."""
        if self.primitive != "dot_general":
            return None
        return self._numbers[0][0 if self.swapped else 1]

    @property
    def scope(self) -> str:
        """Return the named scopes that it is in, and its primitive."""
        return "/".join(filter(None, [str(self.eqn.source_info.name_stack), self.primitive]))

    @property
    def sizes(self) -> tuple[int, int]:
        """Return how many terms each element of the result sums, and how many features it has."""
        if self.primitive == "dot_general":
            summed, batch = (dims[0 if self.swapped else 1] for dims in self._numbers)
            sizes = {i: n for i, n in enumerate(np.shape(self.weight)) if i not in batch}
            terms = int(np.prod([sizes.pop(i) for i in summed]))
            return terms, int(np.prod(list(sizes.values())))
        features = np.shape(self.weight)[-1]
        return int(np.prod(np.shape(self.weight))) // max(features, 1), features

    @property
    def _numbers(self) -> Any:
        return self.eqn.params["dimension_numbers"]

    def abstract(self) -> WeightMatmul:
        """Return it with shapes in place of arrays, which may belong to a trace."""
        shape_of: Any = lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))
        source, at = replace(self.source, in_f32=None), interpreter.Place(self.at.path)
        x, weight = shape_of(self.x), shape_of(self.weight)
        return replace(self, source=source, x=x, weight=weight, others=(), at=at)

    def plain(self) -> jax.Array:
        """Compute it as the program does."""
        operands = (self.weight, self.x) if self.swapped else (self.x, self.weight)
        return evaluate(self.eqn, [*operands, *self.others])[0]

    def by(self, dot_general: Callable[..., jax.Array], weight: Any) -> jax.Array:
        """Compute a ``dot_general`` by another function, whose second operand is the `weight`."""
        (first, second), (first_batch, second_batch) = self._numbers
        if not self.swapped:
            return dot_general(self.x, weight, self._numbers)
        y = dot_general(self.x, weight, ((second, first), (second_batch, first_batch)))
        # The batch, the rest of x, the rest of the weight; the program has these two exchanged.
        n = len(first_batch)
        x_end = self.x.ndim - len(first)
        return y.transpose(*range(n), *range(x_end, y.ndim), *range(n, x_end))


def is_ordinary(eqn: Any, *operands: Any) -> bool:
    """Return whether an equation multiplies real numbers of 16 or 32 bits, in the usual way."""
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
