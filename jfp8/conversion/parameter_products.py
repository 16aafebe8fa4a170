"""Find products of modules that multiply by their parameters themselves: einsum, dot, matmul, @.

All of these are ``dot_general`` in the end. While a method of such a module runs, a `Follower` gets
each operation of JAX, and recognises a parameter of the module, also cast, transposed, reshaped,
sliced, or joined with others, by its identity. Nothing is patched, and the values are JAX's own.

A product inside ``jax.checkpoint``, ``jax.lax.scan`` or the like is not found, if the module calls
that itself; one inside ``remat``, ``scan``, ``vmap`` of Flax or ``jax.jit`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jfp8.conversion.weight_walk import JOINED, SAME
from jfp8.tracing.compat import interposed, interposing
from jfp8.tracing.notes import layer_noted


@dataclass(frozen=True)
class Parameter:
    """Say where a parameter is.

    Attributes:
      module: that has it.
      place: the path of the module, ``"Block_0/attn"``.
      name: of the parameter in it.
    """

    module: Any
    place: str
    name: str

    @property
    def path(self) -> str:
        """Return ``"Block_0/attn/w"``."""
        return f"{self.place}/{self.name}".lstrip("/")


@dataclass(frozen=True)
class ParameterProduct:
    """Hold a ``dot_general`` of `x` and `weight`, which is a parameter or was made of one.

    Attributes:
      parameter: the parameter.
      nth: 1, or more for those that sum over other dimensions of the weight than the first did.
      swapped: whether the weight is the first operand.
      bind: computes it, from both operands in their order.
      params: of the primitive.
    """

    parameter: Parameter
    nth: int
    x: jax.Array
    weight: jax.Array
    swapped: bool
    bind: Callable[..., jax.Array]
    params: Mapping[str, Any]

    def plain(self) -> jax.Array:
        """Compute the product as the module does by itself."""
        operands = (self.weight, self.x) if self.swapped else (self.x, self.weight)
        return self.bind(*operands, **self.params)

    def staying(self, reason: str) -> jax.Array:
        """Compute `plain`, with the reason for that in reports."""
        with layer_noted(self.parameter.place, type(self.parameter.module).__name__, reason):
            return self.plain()

    def by(self, dot_general: Callable[..., jax.Array]) -> jax.Array:
        """Compute the product by `dot_general`, whose second operand is the weight."""
        (first, second), (first_batch, second_batch) = self.params["dimension_numbers"]
        numbers = (first, second), (first_batch, second_batch)
        if self.swapped:
            numbers = (second, first), (second_batch, first_batch)
        precision, dtype = self.params["precision"], self.params["preferred_element_type"]
        y = dot_general(self.x, self.weight, numbers, precision, dtype)
        if not self.swapped:
            return y
        # The batch, the rest of x, the rest of the weight; the module expects these two exchanged.
        n, both = len(first_batch), len(first_batch) + len(first)
        x_end = n + self.x.ndim - both
        return y.transpose(*range(n), *range(x_end, y.ndim), *range(n, x_end))


@dataclass(frozen=True)
class Follower:
    """Follow the parameters of modules through every operation under `interposed`.

    Attributes:
      modules: those whose parameters it follows.
      parameter_of: the parameter of one of them that an array is, if it is one.
      found: what each product of a parameter with something else becomes.
      enters: whether to follow into a ``jit`` that is given these values.
      known: values made of a parameter, by identity; kept, so that no other value gets that.
      sums: for each parameter, the shapes of weights with the dimensions that are summed over, in
        the order in which products are seen.
    """

    modules: Sequence[Any]
    parameter_of: Callable[[Any], Parameter | None]
    found: Callable[[ParameterProduct], jax.Array]
    enters: Callable[[Any], bool]
    known: dict[int, tuple[Any, Parameter]] = field(default_factory=dict)
    sums: dict[str, list[Any]] = field(default_factory=dict)

    def __call__(self, primitive: Any, values: Any, params: Mapping[str, Any]) -> Any:
        sources = [self.source(value) for value in values]
        if primitive.name == "dot_general":
            return self.product(primitive, values, params, sources)
        if primitive.name in ("jit", "pjit"):
            body = params["jaxpr"]
            constants = map(self.source, getattr(body, "consts", ()))
            if (any(sources) or any(constants)) and self.enters(values):
                with interposed(self):  # what is inside passes by here
                    return jaxpr_as_fun(body)(*values)
        result = primitive.bind(*values, **params)
        parts: Any = sources if primitive.name == "concatenate" else sources[:1]  # no indices
        if parts and None not in parts and primitive.name in SAME | JOINED:
            for value in result if primitive.multiple_results else [result]:
                # One that is repeated is an activation, such as queries that are learned.
                if np.size(value) <= np.size(values[0]) or primitive.name in JOINED:
                    self.known[id(value)] = (value, parts[0])
        return result

    def product(self, primitive: Any, values: Any, params: Any, sources: Any) -> jax.Array:
        """Compute ``dot_general`` of the `values`, which are made of the parameters `sources`."""
        first, second = sources
        dtypes = [jax.numpy.result_type(value) for value in values]
        wide = [dtype.itemsize in (2, 4) for dtype in dtypes]
        ordinary = all(wide) and all(jax.numpy.issubdtype(t, jax.numpy.floating) for t in dtypes)
        if (first is None) == (second is None) or not ordinary or params.get("out_sharding"):
            return primitive.bind(*values, **params)
        swapped = first is not None
        x, weight = values[::-1] if swapped else values
        parameter = first or second
        seen = self.sums.setdefault(parameter.path, [])
        sums = np.shape(weight), params["dimension_numbers"][0][0 if swapped else 1]
        if sums not in seen:
            seen.append(sums)
        nth = seen.index(sums) + 1
        return self.found(
            ParameterProduct(parameter, nth, x, weight, swapped, primitive.bind, params)
        )

    def derived(self, values: Any, results: Any) -> None:
        """Follow through a custom derivative that makes numbers of bytes (dequantize)."""
        found = self.source(values[0]) if values else None
        narrow = found is not None and jax.numpy.result_type(values[0]).itemsize == 1
        if narrow and [np.shape(x) for x in results] == [np.shape(values[0])]:
            self.known[id(results[0])] = (results[0], found)

    def source(self, value: Any) -> Parameter | None:
        """Return the parameter that `value` is made of."""
        if np.ndim(value) < 2:
            return None
        if id(value) in self.known:
            return self.known[id(value)][1]
        return self.parameter_of(value)


def followed_modules() -> tuple[Any, ...]:
    """Return the modules whose parameters are followed here."""
    outer = interposing()
    return tuple(outer.modules) if isinstance(outer, Follower) else ()


def following(
    modules: Sequence[Any],
    parameter_of: Callable[[Any], Parameter | None],
    found: Callable[[ParameterProduct], jax.Array],
    enters: Callable[[Any], bool] = lambda values: True,
) -> AbstractContextManager[None]:
    """Follow parameters in this context; for the arguments see `Follower`."""
    outer = interposing()
    log: Any = (outer.known, outer.sums) if isinstance(outer, Follower) else ()
    return interposed(Follower(modules, parameter_of, found, enters, *log))
