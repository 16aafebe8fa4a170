"""A product: a bilinear operation, and the operands that are quantized for it.

There are three products, fprop, dgrad and wgrad, and each tensor takes part in two of them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.choice import Implementation, check_implementation
from jfp8.products.cast_later import CastLater, as_array
from jfp8.products.made import Made
from jfp8.products.observers import OBSERVER
from jfp8.quantizers.quantizer import Context, Quantizer
from jfp8.recipes.product import Product
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.arrays import ScaledArray, check_scale_shape, dequantize, scaled_values
from jfp8.scaling.casts import as_float_array
from jfp8.scaling.history import AmaxState
from jfp8.scaling.random_bits import fold_in
from jfp8.scaling.scales import amax
from jfp8.tracing.context import Tpu

Kind = Literal["fprop", "dgrad", "wgrad"]
Operand = ScaledArray | jax.Array


class State(NamedTuple):
    """A product's amax histories, sink and random key; for the fields see `scaled_dot_general`.

    Attributes:
      histories: called ``state`` there.
    """

    histories: dict[str, AmaxState] | None = None
    sink: jax.Array | None = None
    key: jax.Array | None = None


@dataclass(frozen=True)
class How:
    """How products of any kind are computed.

    Attributes:
      recipe, implementation: see `scaled_dot_general`.
      rhs_dtype: to which rhs is cast before all else, see `CastLater`. Its gradient keeps its own.

    Raises:
      TypeError: `recipe` is not a recipe.
      ValueError: unknown `implementation`.
    """

    recipe: Recipe
    implementation: Implementation = None
    rhs_dtype: np.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            check_recipe(self.recipe)  # raises, and lists the known recipes
        check_implementation(self.implementation)


class Observed(NamedTuple):
    """amax of the two operands of a product; NaN or Inf where the operand has one.

    f32[]; on the way to the backward pass also f32[n] of n parts of an operand.
    """

    lhs: jax.Array
    rhs: jax.Array


class Use(NamedTuple):
    """One of the two products that a tensor takes part in.

    Attributes:
      kind: which one.
      product: the recipe's settings for it.
      quantizer: the recipe's quantizer for this operand; None leaves it in high precision.
      contracting: the dimensions of the tensor that the product sums over.
      other: the product's other operand, if it is quantized before this one.
      turn: the seed of a random rotation, if the other operand was rotated before this one; see
        `turn_of`.
    """

    kind: Kind
    product: Product
    quantizer: Quantizer | None
    contracting: tuple[int, ...]
    other: Operand | None = None
    turn: jax.Array | None = None

    @property
    def other_scale(self) -> jax.Array | None:
        """The only scale of `other`, f32[]; None if there is none, or more."""
        scale = self.other.scale if isinstance(self.other, ScaledArray) else None
        if not isinstance(scale, jax.Array) or scale.ndim or scale.dtype != jnp.float32:
            return None
        return scale


class Sums(NamedTuple):
    """How one of the three products is summed; see `Job`."""

    accumulation: str = "f32"
    fast_accumulation: bool = False
    powers_of_two: bool = False
    parts: np.dtype | None = None
    tpu: Tpu | None = None
    bias: jax.Array | None = None


@dataclass(frozen=True)
class Operation:
    """A bilinear operation ``y = lhs . rhs`` on arrays of certain shapes: a pytree.

    Its operands are `ScaledArray`s, or plain arrays where a recipe leaves them in high precision:
    ``(lhs, rhs)`` for fprop, ``(grad, rhs)`` for dgrad, ``(lhs, grad)`` for wgrad. Its leaves, if
    it has any, are further arrays that it needs, neither quantized nor differentiated.

    Attributes:
      shapes: of lhs and rhs.
      dtypes: of lhs, rhs and y.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype, np.dtype]

    def dtype_of(self, kind: Kind) -> np.dtype:
        """The dtype of one product's result: that of y, or of the operand whose gradient it is."""
        return self.dtypes[{"fprop": 2, "dgrad": 0, "wgrad": 1}[kind]]

    def contracting(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions of both operands that the product sums over."""
        raise NotImplementedError

    def terms(self, kind: Kind) -> int | None:
        """The number of products that each element of a result sums, for `jfp8.report`.

        None: `jfp8.report` reads it from the ``dot_general`` or ``conv_general_dilated`` itself.
        """
        del kind
        return None

    def quantize(self, role: str, x: jax.Array, quantizer: Quantizer, at: Context) -> ScaledArray:
        """One operand, ``lhs``, ``rhs`` or ``grad``, as its quantizer says."""
        del role
        return quantizer(x, at)

    def quantize_for_both(
        self,
        role: str,
        x: jax.Array | CastLater | Made,
        first: Use,
        second: Use | None,
        state: AmaxState | None,
    ) -> tuple[Operand, Operand | None, jax.Array] | None:
        """One operand as both of its products take it, and its amax, if one step can do that.

        It may also give the amaxes of parts of the operand, f32[n].

        Otherwise None, and it is quantized for one product after the other. Without a backward pass
        there is no second product.
        """
        del role, x, first, second, state
        return None

    def sent(self, role: str, q: Operand) -> Operand:
        """An operand as quantized for its first product, where the products take it.

        If it travels there, what arrives is all that its second product has of it.
        """
        del role
        return q

    def laid_out(self, role: str, operand: Operand, contracting: tuple[int, ...]) -> Operand:
        """A quantized operand as `multiply` takes it, for a sum over `contracting`."""
        del role, contracting
        return operand

    def multiply(self, kind: Kind, first: Operand, second: Operand, sums: Sums) -> jax.Array:
        """One of the three products, in the dtype and layout of y or of the operand it is for."""
        raise NotImplementedError


ROTATION_NAME = "jfp8_rotation"


@dataclass(frozen=True)
class QuantizedOperand:
    """One tensor that takes part in two of the three products."""

    role: str
    x: Operand | CastLater | Made
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
        if isinstance(self.x, CastLater | Made):
            return replace(self, x=as_array(self.x)).quantized(first, second)
        largest = amax(scaled_values(self.x) if isinstance(self.x, ScaledArray) else self.x)
        for_both = second is not None and _same(first, second)
        kinds = f"{first.kind}+{second.kind}" if for_both else first.kind
        made = self._quantized(first, largest, kinds)
        q = self.operation.sent(self.role, made)
        again = None
        if second is not None:
            source = self if q is made else replace(self, x=q)
            again = q if for_both else source._quantized(second, largest, second.kind)
            again = self.operation.laid_out(self.role, again, second.contracting)
        return self.operation.laid_out(self.role, q, first.contracting), again, largest

    def _quantized(self, use: Use, largest: jax.Array, kinds: str) -> Operand:
        """The tensor as one product takes it; in high precision if `use.quantizer` is None.

        A quantized tensor is used unchanged if the format is the same and it has one scale, which
        serves any direction, or scales laid out as the quantizer would. Otherwise its values are
        quantized like any others.
        """
        product, quantizer, contracting = use.product, use.quantizer, use.contracting
        x, of_tensor = self.x, largest
        assert not isinstance(x, CastLater | Made)  # see `quantized`
        if isinstance(x, ScaledArray):
            if quantizer is not None and product.rotation is None and quantizer.fmt == x.format:
                as_it_is = _with_one_scale(x)
                if as_it_is is not None and quantizer.block is None:
                    return as_it_is
                quantize = functools.partial(self.operation.quantize, self.role)
                if has_scales_of(quantizer, x, contracting, quantize):
                    return x
            x = scaled_values(x)
        if product.rotation is not None:
            (axis,) = contracting
            turn = use.turn
            if turn is None:  # of the two operands this is the first
                turn = turn_of(product, use.kind, of_tensor, self.seed)
            with jax.named_scope(ROTATION_NAME):
                x = product.rotation(x, axis, turn)
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


def has_scales_of(
    quantizer: Quantizer,
    q: ScaledArray,
    contracting: tuple[int, ...],
    quantize: Callable[[jax.Array, Quantizer, Context], ScaledArray],
) -> bool:
    """Whether the scales of `q` are laid out as those that `quantize` would make."""
    if not jnp.ndim(q.scale.data if isinstance(q.scale, ScaledArray) else q.scale):
        return False

    def quantized(x: jax.Array) -> ScaledArray:
        seed = jnp.zeros((2,), jnp.uint32)
        return quantize(x, quantizer, Context(contracting, amax(x), None, seed))

    wanted = jax.eval_shape(quantized, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    bare = [replace(each, block=None, carrier=None) for each in (q, wanted)]
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in bare]
    return shapes[0] == shapes[1] and q.block_sizes() == wanted.block_sizes()


def _same(first: Use, second: Use) -> bool:
    """Whether both products take the same bytes."""
    rotated = first.product.rotation is not None or second.product.rotation is not None
    any_direction = first.quantizer is None or first.quantizer.one_for_both
    return first.quantizer == second.quantizer and any_direction and not rotated


def _seed_for(use: str, amax: jax.Array, seed: jax.Array | None) -> jax.Array:
    """A separate seed for each `use` of each tensor, step, scan iteration, batch and device.

    No counter has to be threaded through transformations for that: wherever seeds must differ, the
    data does, and so does its amax. The user's seed separates cases of equal data.
    """
    if seed is None:
        seed = jnp.zeros((2,), jnp.uint32)
    word = np.uint32(zlib.crc32(use.encode()))
    return fold_in(seed, lax.bitcast_convert_type(amax, jnp.uint32) ^ word)


def turn_of(
    product: Product, kind: Kind, amax: jax.Array, seed: jax.Array | None
) -> jax.Array | None:
    """The seed of the random rotation of both operands, uint32[2]; None if there is none.

    Args:
      product: the recipe's settings for the product.
      kind: which one.
      amax: f32[], of the operand that is quantized first.
      seed: the user's.
    """
    if product.rotation is None or not product.rotation.random:
        return None
    return _seed_for(f"{kind} rotation", amax, seed)


def quantized_output(
    kind: Kind, product: Product, role: str, y: jax.Array, seed: jax.Array | None
) -> jax.Array:
    """The result of a product, rounded to the format in which its recipe stores results."""
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


# The operands that users pass.


def as_lhs(x: jax.typing.ArrayLike) -> jax.Array:
    """`x` as a floating array, or an error."""
    if isinstance(x, ScaledArray):
        raise TypeError(
            "lhs is a ScaledArray, but only rhs may be one: a weight that is kept in FP8. Pass "
            "lhs.dequantize(), or multiply two ScaledArrays with jfp8.scaled_matmul."
        )
    return as_float_array(x, "lhs")


def as_operand(x: jax.typing.ArrayLike | ScaledArray, what: str) -> Operand:
    """`x`, if it is a `ScaledArray` whose scale fits; else as a floating array, or an error."""
    if not isinstance(x, ScaledArray):
        return as_float_array(x, what)
    check_scale_shape(x)
    return x


def values_of(x: Operand) -> jax.Array:
    """`x` as an array: the values of a `ScaledArray`, whose bytes get no gradient."""
    if not isinstance(x, ScaledArray):
        return x
    return dequantize(replace(x, data=lax.stop_gradient(x.data)))


def value_dtype(x: Operand) -> np.dtype:
    """The dtype of the gradient with respect to the values of `x`."""
    if not isinstance(x, ScaledArray):
        return np.dtype(x.dtype)
    return np.dtype(np.float32) if x.carrier is None else np.dtype(x.carrier.dtype)


def check_out_dtype(
    preferred: jax.typing.DTypeLike | None, lhs: jax.Array, rhs: Operand, how: How
) -> np.dtype:
    """The dtype of a product: `preferred`, which must be floating, or that of the operands."""
    of_rhs = [] if isinstance(rhs, ScaledArray) else [how.rhs_dtype or rhs]
    out_dtype = preferred or jnp.result_type(lhs, *of_rhs)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating dtype, got {np.dtype(out_dtype)}."
        )
    return np.dtype(out_dtype)
