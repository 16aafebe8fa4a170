"""Taps: points of a program where an observer can look at values.

While a function is traced in the context `observing`, matmuls pass their operands to an `Observer`,
which marks values with `tap`. A tap is the identity and changes nothing in any program. The marked
values can be found in a traced program (see `jfp8.debug`). Programs traced outside the
context contain no taps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jfp8.scaling.arrays import ScaledArray


class Observer:
    """Base class of observers of the matmuls of a program. Hashable."""

    def quantized(
        self, role: str, kinds: str, quantizer: Any, x: jax.Array, q: ScaledArray
    ) -> ScaledArray:
        """Receive a tensor and its quantized form; the program uses the returned value.

        Args:
          role: ``"lhs"``, ``"rhs"`` or ``"grad"``; or a result, ``"y"``, ``"d_lhs"``, ``"d_rhs"``.
          kinds: the matmuls that use it, such as ``"fprop+wgrad"``.
          quantizer: the quantizer, see `jfp8.quantizers.Quantizer`.
          x: the input of the quantizer.
          q: its quantized form.
        """
        del role, kinds, quantizer, x
        return q

    def multiplied(
        self, operation: Any, kind: str, first: Any, second: Any, y: jax.Array
    ) -> jax.Array:
        """Receive the result ``y`` of a matmul and its plan; the returned value is used."""
        del operation, kind, first, second
        return y


OBSERVER = jax.make_user_context(None)
"""Its ``value`` is the current `Observer` or None; every matmul reads it."""


def observing(observer: Observer) -> AbstractContextManager[object]:
    """Return a context in which `observer` sees every matmul. Earlier traces are not reused."""
    return OBSERVER(observer)


def tap(x: jax.Array, *others: jax.Array, measure: Any, batched: int = 0) -> jax.Array:
    """Return `x`, marked: the reader of the program calls ``measure(x, *others)``.

    A tap whose result is not used is dropped. `measure` is hashable, and `batched` the number of
    leading dimensions that ``vmap`` added.
    """
    return TAP.bind(x, *others, measure=measure, batched=batched)


TAP = Primitive("jfp8_tap")
TAP.def_impl(lambda x, *others, **static: x)
TAP.def_abstract_eval(lambda x, *others, **static: x)
mlir.register_lowering(TAP, lambda ctx, x, *others, **static: [x])


def _batch(values: Any, dims: Any, *, measure: Any, batched: int) -> tuple[jax.Array, int]:
    (size,) = {x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None}
    front = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(values, dims, strict=True)
    ]
    return tap(*front, measure=measure, batched=batched + 1), 0


batching.primitive_batchers[TAP] = _batch
