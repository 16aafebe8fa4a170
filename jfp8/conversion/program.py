"""The program of a function of weights and data, whoever wrote it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jfp8.conversion.weight_matmul import Data, Source
from jfp8.conversion.weight_walk import Walk
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.trees import is_scaled_array
from jfp8.tracing import interpreter
from jfp8.tracing.interpreter import Emitted, Value

_TRACED = (
    "jfp8.convert traces a model or function even where it is called without jax.jit, so its code "
    "cannot need the numbers of an array. Use jnp.where or jax.lax.cond there; or convert the part "
    "that does not need them: jfp8.convert(part, recipe)."
)


@dataclass(frozen=True)
class Program:
    """Hold a traced function, and the arguments that it was traced for.

    Attributes:
      closed: its jaxpr.
      arguments: arrays; weights first. One that is kept in FP8 has its values here.
      sources: the index of each weight; None for those that are no floating numbers.
      stored: by path, the weights that are kept in FP8.
      together: makes the result of the arrays in it.
    """

    closed: ClosedJaxpr
    arguments: Sequence[Any]
    sources: tuple[Source | None, ...]
    stored: dict[str, ScaledArray]
    together: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(
        cls, function: Callable[[Any, Any], Any], weights: Any, paths: Sequence[str], others: Any
    ) -> Program:
        """Trace ``function(weights, others)``, of pytrees; `paths` names all weights."""
        leaves, structure = jax.tree.flatten(weights, is_leaf=is_scaled_array)
        stored = {path: x for path, x in zip(paths, leaves, strict=True) if is_scaled_array(x)}
        values = [x.dequantize() if is_scaled_array(x) else x for x in leaves]
        given, whole_weights = arrays_apart(values)
        data, whole_others = arrays_apart(others)
        made: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            weights = structure.unflatten(whole_weights(arrays[: len(given)]))
            result = function(weights, whole_others(arrays[len(given) :]))
            found, together = arrays_apart(result, in_objects=True)
            made[:] = [together]
            return found

        arguments = [*given, *data]
        try:
            closed = jax.make_jaxpr(flat)(*arguments)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(_TRACED)
            raise
        named = [path for path, x in zip(paths, values, strict=True) if arrays_apart(x)[0]]
        is_number = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
        sources = tuple(
            Source(path) if is_number(x) else None for path, x in zip(named, given, strict=True)
        )
        return cls(closed, arguments, sources, stored, made[0])

    @staticmethod
    def leaves_with_path(weights: Any) -> list[tuple[Any, Any]]:
        """List the weights in a pytree as `of` counts them: one that is kept in FP8 is one."""
        return jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_scaled_array)

    def weights_read(self) -> set[str]:
        """Return the paths of the weights that the program reads."""
        top = interpreter.equations(self.closed.jaxpr, enters=lambda *_: False)
        read = {id(v) for eqn, _, _ in top for v in eqn.invars}
        named = zip(self.closed.jaxpr.invars, self.sources, strict=False)
        return {x.path for v, x in named if x is not None and id(v) in read}

    def run(self, walk: Walk, arguments: Sequence[Any], states: Any) -> tuple[list[Value], Emitted]:
        """Compute the arrays of the result as `walk` says, and return what it emits."""
        no_numbers = Data(None, origins=frozenset())
        weights = [no_numbers if x is None else x for x in self.sources]
        others = [Data(("argument", i)) for i in range(len(weights), len(arguments))]
        at = interpreter.Place(feeds=states)
        ins = map(Value, arguments, [*weights, *others])
        return interpreter.run(walk, self.closed.jaxpr, self.closed.consts, ins, at)


def arrays_apart(
    tree: Any, *, in_objects: bool = False
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays in `tree`, or their shapes, and a function that puts others in.

    Args:
      in_objects: also those in the attributes of objects that are no pytrees, which are copied.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = [_of_leaf(leaf, in_objects) for leaf in leaves]
    sizes, makes = [len(found) for found, _ in parts], [make for _, make in parts]

    def together(arrays: Sequence[Any]) -> Any:
        each = iter(arrays)
        given = ([next(each) for _ in range(n)] for n in sizes)
        return structure.unflatten(make(x) for make, x in zip(makes, given, strict=True))

    return [x for found, _ in parts for x in found], together


def _of_leaf(leaf: Any, in_objects: bool) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return `arrays_apart` of a leaf. The function holds no array, which may be of a trace."""
    if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return [leaf], lambda arrays: arrays[0]
    found, together = arrays_apart(getattr(leaf, "__dict__", {}) if in_objects else {})
    if not found:
        return [], lambda _: leaf
    blank = _with(leaf, together([None] * len(found)))
    return found, lambda arrays: _with(blank, together(arrays))


def _with(x: Any, attributes: dict[str, Any]) -> Any:
    new = copy.copy(x)
    vars(new).update(attributes)
    return new
