"""One tensor, quantized for both of the products that it takes part in."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.products.observers import OBSERVER
from jfp8.products.operation import Kind, Operand, Operation, Use
from jfp8.quantizers.quantizer import Context
from jfp8.recipes.product import Product
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.history import AmaxState
from jfp8.scaling.random_bits import fold_in
from jfp8.scaling.scales import amax

ROTATION_NAME = "jfp8_rotation"


@dataclass(frozen=True)
class QuantizedOperand:
    """One tensor that takes part in two of the three products."""

    role: str
    x: Operand
    state: AmaxState | None
    seed: jax.Array | None
    operation: Operation

    def quantized(
        self, first: Use, second: Use | None
    ) -> tuple[Operand, Operand | None, jax.Array]:
        """The tensor as its first product takes it, as its second one does, and its amax."""
        if not isinstance(self.x, ScaledArray) and OBSERVER.value is None:
            at_once = self.operation.quantize_for_both(self.role, self.x, first, second, self.state)
            if at_once is not None:
                return at_once
        largest = amax(scaled_values(self.x) if isinstance(self.x, ScaledArray) else self.x)
        for_both = second is not None and _same(first, second)
        kinds = f"{first.kind}+{second.kind}" if for_both else first.kind
        q = self._quantized(first, largest, kinds)
        again = None
        if second is not None:
            again = q if for_both else self._quantized(second, largest, second.kind)
            again = self.operation.laid_out(again, second.contracting)
        return self.operation.laid_out(q, first.contracting), again, largest

    def _quantized(self, use: Use, largest: jax.Array, kinds: str) -> Operand:
        """The tensor as one product takes it; in high precision if `use.quantizer` is None.

        One that comes quantized stays so where the format is the same and there is one scale, which
        serves any direction. Otherwise its values are quantized like any others.
        """
        _, product, quantizer, contracting = use
        x, of_tensor = self.x, largest
        if isinstance(x, ScaledArray):
            as_it_is = _with_one_scale(x)
            if as_it_is is not None and quantizer is not None and product.rotation is None:
                if quantizer.fmt == x.format:
                    return as_it_is
            x = scaled_values(x)
        if product.rotation is not None:
            (axis,) = contracting
            with jax.named_scope(ROTATION_NAME):
                x = product.rotation(x, axis)
            largest = amax(x)
        if quantizer is None:
            return x
        seed = None
        if quantizer.stochastic:
            seed = _seed_for(f"{self.role}{contracting}", of_tensor, self.seed)
        at = Context(contracting, largest, self.state, seed)
        q = self.operation.quantize(self.role, x, quantizer, at)
        watching = OBSERVER.value
        return q if watching is None else watching.quantized(self.role, kinds, quantizer, x, q)


def _same(first: Use, second: Use) -> bool:
    """Whether both products take the same bytes."""
    rotated = first.product.rotation is not None or second.product.rotation is not None
    any_direction = first.quantizer is None or first.quantizer.one_for_both
    return first.quantizer == second.quantizer and any_direction and not rotated


def _seed_for(use: str, amax: jax.Array, seed: jax.Array | None) -> jax.Array:
    """A seed of its own for each `use` of each tensor, step, scan iteration, batch and device.

    Nothing has to be threaded through transformations for that: the data differs wherever a seed
    must, and its amax tells. The seed given by the user keeps equal data apart.
    """
    if seed is None:
        seed = jnp.zeros((2,), jnp.uint32)
    word = np.uint32(zlib.crc32(use.encode()))
    return fold_in(seed, lax.bitcast_convert_type(amax, jnp.uint32) ^ word)


def quantized_output(
    kind: Kind, product: Product, role: str, y: jax.Array, seed: jax.Array | None
) -> jax.Array:
    """A result of a product, rounded to what its recipe stores results in."""
    if product.output is None:
        return y
    largest = amax(y)
    bits = _seed_for(f"{role}()", largest, seed) if product.output.stochastic else None
    q = product.output(y, Context((), largest, None, bits))
    if (watching := OBSERVER.value) is not None:
        q = watching.quantized(role, kind, product.output, y, q)
    return scaled_values(q).astype(y.dtype)


def _with_one_scale(q: ScaledArray) -> ScaledArray | None:
    """`q` with a 0-d scale, if it has no more than one scale."""
    if isinstance(q.scale, ScaledArray) or jnp.size(q.scale) != 1:
        return None
    return ScaledArray(q.data, q.scale.reshape(()))
