"""Matmuls with one lhs, such as the projections to q, k and v: they quantize it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

T = TypeVar("T")


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class SharedInput:
    """One array that several matmuls take as lhs, and what these have computed from it.

    The matmuls read the amax history that the first of them has, so that their scales are one, and
    the array is quantized once. XLA would merge equal kernels, but not what devices are sent of
    their results.

    The caller that has the array makes one, passes it as `State.shared` to each of the matmuls, in
    one trace, and drops it. Inside a function that is traced by itself it is empty.

    Attributes:
      made_of: arguments of `Operation.made` by which a kernel may compute the array itself.

    >>> import jax.numpy as jnp
    >>> from jfp8.products.dot_general import observed_dot_general
    >>> from jfp8.products.operation import Options, State
    >>> from jfp8.recipes import DelayedScaling
    >>> x, shared = jnp.ones((2, 3)), SharedInput()
    >>> product = lambda w: observed_dot_general(
    ...     x, w, (((1,), (0,)), ((), ())), Options(DelayedScaling()), State(shared=shared)
    ... )[0]
    >>> q, k = product(jnp.ones((3, 4))), product(jnp.ones((3, 5)))
    """

    made_of: tuple[Any, ...] = ()
    found: dict[Any, Any] = field(default_factory=dict, init=False)

    def once(self, key: Any, compute: Callable[[], T]) -> T:
        """Return ``compute()`` of the first call with this hashable `key`."""
        if key not in self.found:
            self.found[key] = compute()
        return self.found[key]

    def tree_flatten(self) -> tuple[tuple[()], None]:
        """Return no leaves: its arrays belong to one trace."""
        return (), None

    @classmethod
    def tree_unflatten(cls, structure: None, leaves: tuple[()]) -> SharedInput:
        """Return an empty one."""
        return cls()


def shared_inputs(*arrays: Any) -> list[SharedInput]:
    """Return a `SharedInput` for each of `arrays`, the same one for the same array."""
    made = {id(array): SharedInput() for array in arrays}
    return [made[id(array)] for array in arrays]
