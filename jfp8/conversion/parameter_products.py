"""Products of Linen modules that multiply by their parameters themselves: einsum, dot, matmul, @.

All of these are ``dot_general`` in the end. While a method of such a module runs, the operations of
JAX pass by here, one by one, and a value that is a parameter of the module, or one of them cast,
transposed, reshaped or sliced, is recognised by its identity. Nothing is patched, and the values
are those that JAX has anyway.

A product inside of ``jax.checkpoint``, ``jax.lax.scan`` or the like is not seen, if the module
calls that itself; one inside of ``nn.remat``, ``nn.scan``, ``nn.vmap`` or ``jax.jit`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jfp8.conversion.nothing import is_known
from jfp8.layers.linen.products import ProductOf
from jfp8.tracing.compat import interposed, interposing, not_interposed
from jfp8.tracing.context import note

# What gives the same numbers, or some of them, in another order or dtype.
_SAME = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "mesh_cast",
    "name",
    "pvary",
    "reduce_precision",
    "reshape",
    "reshard",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
}


_GATHERED = {"all_gather", "all_gather_invariant"}  # from the devices that hold a part of each


@dataclass(frozen=True)
class ParameterProduct:
    """``dot_general`` of `x` and `weight`, which is a parameter or was made of one.

    Attributes:
      module: that has the parameter.
      name: of the parameter.
      nth: 1, or more for those that sum over other dimensions of the weight than the first did.
      swapped: whether the weight is the first operand.
      bind: computes it, from both operands in their order.
      params: of the primitive.
    """

    module: nn.Module
    name: str
    nth: int
    x: jax.Array
    weight: jax.Array
    swapped: bool
    bind: Callable[..., jax.Array]
    params: Mapping[str, Any]

    @property
    def path(self) -> str:
        """``"Block_0/attn/w"``."""
        return "/".join((*self.module.path, self.name))

    def plain(self) -> jax.Array:
        """What the module computes by itself."""
        operands = (self.weight, self.x) if self.swapped else (self.x, self.weight)
        return self.bind(*operands, **self.params)

    def by_choice(self, chosen: ProductOf | str) -> jax.Array:
        """Computed by a product, or plain and with the reason for that."""
        if not isinstance(chosen, str):
            return self.by(chosen)
        with (
            note("path", "/".join(self.module.path)),
            note("layer", type(self.module).__name__),
            note("reason", chosen),
        ):
            return self.plain()

    def by(self, product: ProductOf) -> jax.Array:
        """Computed by `product`, with its state beside the parameter, as ``DotGeneral_<name>``.

        If the module differentiates, its own dgrad is another product, ``DotGeneral_<name>_2``: the
        amaxes of gradients have nothing to do with those of activations.
        """
        scope = self.module.scope
        assert scope is not None
        name = f"DotGeneral_{self.name}" + (f"_{self.nth}" if self.nth > 1 else "")
        dot_general = product(parent=scope.push(name, reuse=True))
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


def find_products(found: Callable[[ParameterProduct], jax.Array]) -> Callable[..., Any]:
    """An interceptor under which each such product is what `found` gives for it."""

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        if module.scope is None:
            return next_fun(*args, **kwargs)
        if is_known(type(module)) or is_known(context.orig_method.func):
            with not_interposed():  # layers have products of their own
                return next_fun(*args, **kwargs)
        outer = interposing()
        follower = _Follower((module,), found)
        if isinstance(outer, _Follower):
            follower = _Follower((module, *outer.modules), found, outer.known, outer.sums)
        with interposed(follower):
            return next_fun(*args, **kwargs)

    return intercept


@dataclass(frozen=True)
class _Follower:
    """Sees every operation, and follows the parameters of modules through them.

    Attributes:
      modules: those that are running, the innermost first.
      found: see `find_products`.
      known: values made of a parameter, by identity; kept, so that no other value gets that.
      sums: for each parameter, the shapes of weights with the dimensions that are summed over, in
        the order in which products are seen.
    """

    modules: tuple[nn.Module, ...]
    found: Callable[[ParameterProduct], jax.Array]
    known: dict[int, tuple[Any, nn.Module, str]] = field(default_factory=dict)
    sums: dict[tuple[str, ...], list[Any]] = field(default_factory=dict)

    def __call__(self, primitive: Any, values: Any, params: Mapping[str, Any]) -> Any:
        sources = [self.source(value) for value in values]
        if primitive.name == "dot_general":
            return self.product(primitive, values, params, sources)
        if primitive.name in ("jit", "pjit"):
            body = params["jaxpr"]
            constants = map(self.source, getattr(body, "consts", ()))
            if any(sources) or any(constants):
                with interposed(self):  # what is inside passes by here
                    return jaxpr_as_fun(body)(*values)
        result = primitive.bind(*values, **params)
        if sources and sources[0] is not None and primitive.name in _SAME | _GATHERED:
            for value in result if primitive.multiple_results else [result]:
                # One that is repeated is an activation, such as queries that are learned.
                if np.size(value) <= np.size(values[0]) or primitive.name in _GATHERED:
                    self.known[id(value)] = (value, *sources[0])
        return result

    def product(self, primitive: Any, values: Any, params: Any, sources: Any) -> jax.Array:
        """A ``dot_general`` of the `values`, which are made of the parameters `sources`."""
        first, second = sources
        ordinary = all(_is_wide_float(value) for value in values)
        if (first is None) == (second is None) or not ordinary or params.get("out_sharding"):
            return primitive.bind(*values, **params)
        swapped = first is not None
        x, weight = values[::-1] if swapped else values
        module, name = first or second
        seen = self.sums.setdefault((*module.path, name), [])
        sums = np.shape(weight), params["dimension_numbers"][0][0 if swapped else 1]
        if sums not in seen:
            seen.append(sums)
        nth = seen.index(sums) + 1
        return self.found(
            ParameterProduct(module, name, nth, x, weight, swapped, primitive.bind, params)
        )

    def source(self, value: Any) -> tuple[nn.Module, str] | None:
        """The parameter that `value` is made of: its module and name."""
        if np.ndim(value) < 2:
            return None
        if id(value) in self.known:
            return self.known[id(value)][1:]
        for module in self.modules:
            scope = module.scope
            assert scope is not None
            for name, collections in list(scope.reservations.items()):
                if "params" not in collections or not scope.has_variable("params", name):
                    continue
                stored = scope.get_variable("params", name)
                leaves = [stored] if stored is value else jax.tree.leaves(stored)  # of a box
                if any(leaf is value for leaf in leaves):
                    return module, name
        return None


def _is_wide_float(x: Any) -> bool:
    dtype = jax.numpy.result_type(x)
    return jax.numpy.issubdtype(dtype, jax.numpy.floating) and dtype.itemsize in (2, 4)
