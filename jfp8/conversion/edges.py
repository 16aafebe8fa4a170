"""Find the layers at the edges of a model, in a jaxpr where layers are marked by name.

A function that calls a layer passes its input and its output through `mark_input` and
`mark_output`; `edge_layers` then reads the jaxpr of the function.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from jfp8.conversion.weight_matmul import PRODUCTS, WeightMatmul
from jfp8.recipes.in_effect import Region
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.tracing import interpreter
from jfp8.tracing.compat import params_of, primitive_name
from jfp8.tracing.interpreter import Computed, Reader, Value, notes_in, without_arrays

# The region while a model is looked at: no cached trace of another is mistaken for this one.
LOOKING = Region(DelayedScaling(), enabled=False, models=("looking for the layers at the edges",))

_INPUT, _OUTPUT = "jfp8 input of ", "jfp8 output of "
# What a value may be made of besides results of layers, which are strings.
_PARAMETER, _OTHER = 0, 1


def mark_input(x: jax.Array, path: str) -> jax.Array:
    """Mark `x` as the input of the layer at `path`."""
    return checkpoint_name(x, _INPUT + path)


def mark_output(y: jax.Array, path: str) -> jax.Array:
    """Mark `y` as the output of the layer at `path`."""
    return checkpoint_name(y, _OUTPUT + path)


def mark_product(product: WeightMatmul, path: str) -> jax.Array:
    """Compute a matmul as it is, with both ends marked."""
    marked = dataclasses.replace(product, x=mark_input(product.x, path))
    return mark_output(marked.plain(), path)


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


def edge_layers(
    closed: ClosedJaxpr, n_parameters: int, *, of_loss: bool = False
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of the layers that read only inputs, and of those that give a result.

    A layer gives a result of the model if no residual or other product comes after it, and no other
    layer reads its output. Parameters that scale or shift the result make no difference.

    The first `n_parameters` inputs of the model `closed` are parameters. The first result may be a
    loss (`of_loss`), in which targets and terms of other layers meet the result of the model.
    """
    sources = _Sources()
    n = len(closed.jaxpr.invars) - n_parameters
    ins = without_arrays([{_PARAMETER}] * n_parameters + [{_OTHER}] * n)
    results, _ = interpreter.run(sources, closed.jaxpr, closed.consts, ins)
    outs = notes_in(results)
    ends = {next(iter(found)) for s in outs if len(found := s - {_PARAMETER}) == 1}
    ends = outs[0] - {_PARAMETER} if of_loss else ends
    paths = ends - sources.used - {_OTHER}
    return frozenset(sources.first), frozenset(str(path) for path in paths)


class _Sources(Reader):
    """Note the sources of each value: results of layers, parameters, or anything else."""

    computes = False

    def __init__(self) -> None:
        self.used: set[Any] = set()  # layers whose results go into other layers or products
        self.first: set[str] = set()  # layers into which no other layer's result goes

    def equation(self, eqn: Any, ins: list[Value], at: Any) -> Computed:
        """Read the marks, and note the operands of products."""
        name, mark = primitive_name(eqn), str(params_of(eqn).get("name", ""))
        if name == "name" and mark.startswith(_OUTPUT):
            return without_arrays([{mark.removeprefix(_OUTPUT)}]), []
        is_input = name == "name" and mark.startswith(_INPUT)
        if not is_input and name not in PRODUCTS:
            return None
        together = self.together(notes_in(ins))
        if is_input and together <= {_PARAMETER, _OTHER}:
            self.first.add(mark.removeprefix(_INPUT))
        return without_arrays([{_OTHER}] * len(eqn.outvars)), []

    def together(self, notes: Sequence[set[Any]]) -> set[Any]:
        """Return the sources of values that go into something that is looked at as a whole."""
        self.used.update(*notes)
        return {_OTHER}.union(*notes)

    def constant(self, x: Any) -> set[Any]:
        return set()

    def flow(self, eqn: Any, ins: Sequence[Value]) -> list[set[Any]]:
        return [set().union(*notes_in(ins))] * len(eqn.outvars)

    def closed_to(self, eqn: Any, ins: Sequence[Value], at: Any) -> list[Value]:
        return without_arrays([self.together(notes_in(ins))] * len(eqn.outvars))

    def in_loop(self, eqn: Any, notes: list[Any], at: Any, n_fixed: int, n: int) -> list[set[Any]]:
        return [self.together(notes)] * len(notes)  # one iteration's results go into the next

    def after(self, eqn: Any, inside: list[Any], results: list[list[Any]]) -> Sequence[Any]:
        if eqn.primitive.name not in ("scan", "while", "cond"):
            return super().after(eqn, inside, results)
        return [self.together(inside)] * len(eqn.outvars)
