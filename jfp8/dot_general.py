"""`scaled_dot_general`: three FP8 products and their VJP.

    fprop  y  = q(lhs) . q(rhs)
    dgrad  dx = q(dy)  . q(rhs)^T
    wgrad  dw = q(lhs)^T . q(dy)

A tensor is quantized once if both of its products can use the result, else once for each. What the
backward pass keeps is the f8 bytes and their scales, not the operands.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.accumulation import free_dims, multiply
from jfp8.arrays import ScaledArray, scaled_values
from jfp8.compat import same_varying_axes
from jfp8.formats import as_float_array, codes_of, codes_to_format
from jfp8.matmul import (
    Implementation,
    check_dimension_numbers,
    check_implementation,
    scaled_matmul,
)
from jfp8.quantizers import Context, Quantizer
from jfp8.random_bits import fold_in, seed_of
from jfp8.recipes import DelayedScaling, Product, Recipe, check_recipe
from jfp8.scaling import AmaxState, amax
from jfp8.sink import ROLES, WIDTH, encode_amax


class Observed(NamedTuple):
    """amax of the two operands of a product, f32[] each; NaN or Inf where the operand has one."""

    lhs: jax.Array
    rhs: jax.Array


@dataclass(frozen=True)
class _Call:
    """What is static about one call."""

    dimension_numbers: lax.DotDimensionNumbers
    recipe: Recipe
    implementation: Implementation
    out_dtype: np.dtype
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype

    @property
    def products(self) -> tuple[Product, Product, Product]:
        products = self.recipe.products()
        return products.fprop, products.dgrad, products.wgrad

    def multiply(
        self,
        how: Product,
        lhs: ScaledArray | jax.Array,
        rhs: ScaledArray | jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        dtype: np.dtype,
    ) -> jax.Array:
        """One of the three products; operands that are plain arrays are in high precision."""
        if isinstance(lhs, ScaledArray) and isinstance(rhs, ScaledArray):
            accumulation = self.recipe.accumulation
            if accumulation == "hopper" and not how.fast_accumulation:
                accumulation = "hopper_every_128"
            return scaled_matmul(
                lhs,
                rhs,
                dimension_numbers,
                preferred_element_type=dtype,
                accumulation=accumulation,
                fast_accumulation=how.fast_accumulation,
                implementation=self.implementation,
            )
        precision = None
        if isinstance(lhs, ScaledArray):
            lhs, precision = scaled_values(lhs), lax.Precision.HIGHEST
        if isinstance(rhs, ScaledArray):
            rhs, precision = scaled_values(rhs), lax.Precision.HIGHEST
        common = jnp.promote_types(lhs.dtype, rhs.dtype)
        y = multiply(lhs.astype(common), rhs.astype(common), dimension_numbers, precision)
        return y.astype(dtype)


@dataclass(frozen=True)
class _Operand:
    """One tensor that takes part in two of the three products."""

    role: str
    x: jax.Array
    amax: jax.Array
    state: AmaxState | None
    seed: jax.Array | None

    def quantized(
        self, quantizer: Quantizer | None, product: Product, contracting: tuple[int, ...]
    ) -> ScaledArray | jax.Array:
        """The tensor as `product` takes it; in high precision if `quantizer` is None."""
        x, largest = self.x, self.amax
        if product.rotation is not None:
            (axis,) = contracting
            x = product.rotation(x, axis)
            largest = amax(x)
        if quantizer is None:
            return x
        seed = None
        if quantizer.stochastic:
            seed = _seed_for(f"{self.role}{contracting}", self.amax, self.seed)
        return quantizer(x, Context(contracting, largest, self.state, seed))

    def quantized_again(
        self,
        quantizer: Quantizer | None,
        product: Product,
        contracting: tuple[int, ...],
        first: ScaledArray | jax.Array,
        first_quantizer: Quantizer | None,
        first_product: Product,
    ) -> ScaledArray | jax.Array:
        """`quantized`, or `first`, what another product took, where that is the same."""
        rotated = product.rotation is not None or first_product.rotation is not None
        any_direction = quantizer is None or quantizer.one_for_both
        if quantizer == first_quantizer and any_direction and not rotated:
            return first
        return self.quantized(quantizer, product, contracting)


def _seed_for(use: str, amax: jax.Array, seed: jax.Array | None) -> jax.Array:
    """A seed of its own for each `use` of each tensor, step, scan iteration, batch and device.

    Nothing has to be threaded through transformations for that: the data differs wherever a seed
    must, and its amax tells. The seed given by the user keeps equal data apart.
    """
    if seed is None:
        seed = jnp.zeros((2,), jnp.uint32)
    word = np.uint32(zlib.crc32(use.encode()))
    return fold_in(seed, lax.bitcast_convert_type(amax, jnp.uint32) ^ word)


def _quantized_output(
    product: Product, role: str, y: jax.Array, seed: jax.Array | None
) -> jax.Array:
    """A result of a product, rounded to what its recipe stores results in."""
    if product.output is None:
        return y
    q = _Operand(role, y, amax(y), None, seed).quantized(product.output, Product(None, None), ())
    assert isinstance(q, ScaledArray)
    return scaled_values(q).astype(y.dtype)


def scaled_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: Recipe = DelayedScaling(),
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """``jax.lax.dot_general`` with FP8 operands, forward and backward.

    High precision in and out: operands and the incoming gradient are quantized as `recipe` says,
    multiplied with f32 accumulation, scaled in f32 and rounded once. The gradient is
    straight-through. NaN and Inf in an operand or gradient come out as NaN.

    Args:
      lhs, rhs: ``f32 | bf16 | f16`` arrays.
      dimension_numbers: as for ``jax.lax.dot_general``.
      recipe: which quantizer each operand gets.
      state: amax histories of this product, ``{"lhs", "rhs", "grad"}`` as `Recipe.init_state` makes
        them; read, never written. None: current scaling.
      sink: ``f32[3, 2050]`` zeros (`jfp8.sink.init_sink`), whose cotangent carries the amaxes of
        lhs, rhs and grad out of the backward pass, for `advance`. With it (and `state`) gradients
        use their history; without it current scaling.
      key: random key for recipes that round stochastically. The bits are made from it and from the
        largest magnitude of the tensor that is rounded, so that one key serves all layers, steps,
        scan iterations and devices. None: from the data alone, which is reproducible, but rounds
        the same tensor in the same way every time.
      preferred_element_type: floating dtype of the result; default: that of the promoted operands.
      implementation: see `scaled_matmul`.

    Returns:
      Array with the shape that ``jax.lax.dot_general`` gives.

    Raises:
      TypeError: operands that are not real floating arrays of at most 32 bits; no recipe.
      ValueError: dimension numbers or sizes that do not match; a `state` of another recipe; a
        `sink` of another shape; unknown `implementation`.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 2.0)
    >>> loss = lambda w: jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ()))).sum()
    >>> jax.grad(loss)(w).shape
    (3, 4)
    """
    y, _ = observed_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        recipe=recipe,
        state=state,
        sink=sink,
        key=key,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    return y


def observed_dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: Recipe,
    state: dict[str, AmaxState] | None = None,
    sink: jax.Array | None = None,
    key: jax.Array | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Observed]:
    """`scaled_dot_general`, and the amaxes it saw on the way; they have no gradient."""
    check_recipe(recipe)
    check_implementation(implementation)
    lhs, rhs = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    _check_state(recipe, state)
    if sink is not None and (sink.shape != (len(ROLES), WIDTH) or sink.dtype != jnp.float32):
        raise ValueError(
            f"sink must be float32 zeros of shape {(len(ROLES), WIDTH)} (jfp8.sink.init_sink()), "
            f"got {sink.dtype} of shape {sink.shape}."
        )
    out_dtype = preferred_element_type or jnp.result_type(lhs, rhs)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type must be a floating dtype, got {np.dtype(out_dtype)}."
        )
    products = recipe.products()
    out_shape = _out_shape(lhs.shape, rhs.shape, dimension_numbers)
    if products.matrices:
        lhs, rhs, dimension_numbers = _as_matrices(lhs, rhs, dimension_numbers)
    call = _Call(
        dimension_numbers,
        recipe,
        implementation,
        np.dtype(out_dtype),
        np.dtype(lhs.dtype),
        np.dtype(rhs.dtype),
    )
    seed = None if key is None or not products.stochastic else seed_of(key)
    operands = (lhs, rhs, lax.stop_gradient(state), sink, seed)
    y, observed = _dot(call, *same_varying_axes(operands))
    return y.reshape(out_shape), observed


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(call, lhs, rhs, state, sink, seed):
    return _dot_fwd(call, lhs, rhs, state, sink, seed)[0]


def _dot_fwd(call, lhs, rhs, state, sink, seed):
    lhs, rhs = _first_order_only(lhs), _first_order_only(rhs)
    fprop, dgrad, wgrad = call.products
    observed = Observed(amax(lhs), amax(rhs))
    x = _Operand("lhs", lhs, observed.lhs, state and state["lhs"], seed)
    w = _Operand("rhs", rhs, observed.rhs, state and state["rhs"], seed)
    (x_sum, w_sum), (x_batch, w_batch) = call.dimension_numbers
    q_lhs, q_rhs = x.quantized(fprop.lhs, fprop, x_sum), w.quantized(fprop.rhs, fprop, w_sum)
    y = call.multiply(fprop, q_lhs, q_rhs, call.dimension_numbers, call.out_dtype)
    y = _quantized_output(fprop, "y", y, seed)

    # For the backward pass: the same bytes, or those along the other direction.
    x_free, w_free = free_dims(lhs.ndim, x_sum, x_batch), free_dims(rhs.ndim, w_sum, w_batch)
    kept_lhs = x.quantized_again(wgrad.lhs, wgrad, x_free, q_lhs, fprop.lhs, fprop)
    kept_rhs = w.quantized_again(dgrad.rhs, dgrad, w_free, q_rhs, fprop.rhs, fprop)
    # Without a sink nobody would learn the gradient's amax, and its history is not kept up.
    grad_state = None if state is None or sink is None else state["grad"]
    seen = None if sink is None else observed
    return (y, observed), (_to_bytes(kept_lhs), _to_bytes(kept_rhs), grad_state, seen, seed)


def _dot_bwd(call, residuals, cotangents):
    lhs_bytes, rhs_bytes, grad_state, seen, seed = residuals
    dy = _first_order_only(cotangents[0])
    _, dgrad, wgrad = call.products
    q_lhs = _from_bytes(lhs_bytes, wgrad.lhs)
    q_rhs = _from_bytes(rhs_bytes, dgrad.rhs)
    grad_amax = amax(dy)
    g = _Operand("grad", dy, grad_amax, grad_state, seed)

    lhs_numbers, lhs_order, rhs_numbers, rhs_order = _transposed_products(
        q_lhs.ndim, q_rhs.ndim, call.dimension_numbers
    )
    for_dgrad, for_wgrad = lhs_numbers[0][0], rhs_numbers[0][1]
    q_dy = g.quantized(dgrad.lhs, dgrad, for_dgrad)
    d_lhs = call.multiply(dgrad, q_dy, q_rhs, lhs_numbers, call.lhs_dtype)
    q_dy = g.quantized_again(wgrad.rhs, wgrad, for_wgrad, q_dy, dgrad.lhs, dgrad)
    d_rhs = call.multiply(wgrad, q_lhs, q_dy, rhs_numbers, call.rhs_dtype)
    d_lhs = _quantized_output(dgrad, "d_lhs", d_lhs, seed)
    d_rhs = _quantized_output(wgrad, "d_rhs", d_rhs, seed)
    d_sink = None
    if seen is not None:
        d_sink = encode_amax(jnp.stack([seen.lhs, seen.rhs, grad_amax]))
    return d_lhs.transpose(lhs_order), d_rhs.transpose(rhs_order), None, d_sink, None


_dot.defvjp(_dot_fwd, _dot_bwd)


@jax.custom_jvp
def _first_order_only(x: jax.Array) -> jax.Array:
    """`x`, where only a second derivative would differentiate it: that of f8 bytes is zero."""
    return x


@_first_order_only.defjvp
def _refuse_second_order(primals, tangents):
    raise TypeError(
        "Second derivatives of FP8 products are not supported: the backward pass works on f8 "
        "bytes, through which nothing can be differentiated. Use nn.Dense where you need them."
    )


def _out_shape(
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    dimension_numbers: lax.DotDimensionNumbers,
) -> tuple[int, ...]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = free_dims(len(lhs_shape), lhs_contract, lhs_batch)
    rhs_free = free_dims(len(rhs_shape), rhs_contract, rhs_batch)
    batch = tuple(lhs_shape[d] for d in lhs_batch)
    return (*batch, *(lhs_shape[d] for d in lhs_free), *(rhs_shape[d] for d in rhs_free))


def _as_matrices(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[jax.Array, jax.Array, lax.DotDimensionNumbers]:
    """Operands with one batch dimension at most, one free and one contracting dimension.

    Blocks of scales run over the rows and columns of the matrices that are multiplied, across the
    borders of the dimensions that make them up.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = free_dims(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs.ndim, rhs_contract, rhs_batch)
    lhs, lhs_k = _grouped(lhs, lhs_batch, lhs_free, lhs_contract)
    rhs, rhs_k = _grouped(rhs, rhs_batch, rhs_free, rhs_contract)
    batch = ((0,), (0,)) if lhs_batch else ((), ())
    return lhs, rhs, (((lhs_k,), (rhs_k,)), batch)


def _grouped(
    x: jax.Array, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]
) -> tuple[jax.Array, int]:
    """`x` with each of three groups of dimensions merged into one, and where `contract` went.

    The batch dimension comes first, or is missing if there is none; the other two are left in the
    order that they have, and made if they are missing. Nothing is transposed unless a group is not
    in order or not in one piece.
    """
    matrix = sorted((tuple(free), tuple(contract)))
    groups = [tuple(batch), *matrix] if batch else matrix
    order = [d for group in groups for d in group]
    x = x if order == sorted(order) else x.transpose(order)
    sizes = iter(x.shape)
    x = x.reshape([math.prod(next(sizes) for _ in group) for group in groups])
    return x, len(groups) - 1 if groups[-1] == tuple(contract) else len(groups) - 2


def _transposed_products(
    lhs_ndim: int, rhs_ndim: int, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[Any, tuple[int, ...], Any, tuple[int, ...]]:
    """Dimension numbers of dgrad and wgrad, each with the transposition that follows it.

    The output ``y`` has the batch dimensions first, then those free in lhs, then those free in rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
        tuple(map(tuple, pair)) for pair in dimension_numbers
    )
    lhs_free = free_dims(lhs_ndim, lhs_contract, lhs_batch)
    rhs_free = free_dims(rhs_ndim, rhs_contract, rhs_batch)
    n_batch, n_lhs, n_rhs = len(lhs_batch), len(lhs_free), len(rhs_free)
    y_batch = tuple(range(n_batch))
    y_lhs = tuple(range(n_batch, n_batch + n_lhs))
    y_rhs = tuple(range(n_batch + n_lhs, n_batch + n_lhs + n_rhs))

    # dgrad contracts what is free in rhs and gives: batch, lhs free, rhs contracting in rhs' order.
    # wgrad contracts what is free in lhs and gives: batch, lhs contracting in lhs' order, rhs free.
    by_rhs = np.argsort(rhs_contract).tolist()
    by_lhs = np.argsort(lhs_contract).tolist()
    d_lhs_dims = lhs_batch + lhs_free + tuple(lhs_contract[i] for i in by_rhs)
    d_rhs_dims = rhs_batch + tuple(rhs_contract[i] for i in by_lhs) + rhs_free
    return (
        ((y_rhs, rhs_free), (y_batch, rhs_batch)),
        tuple(np.argsort(d_lhs_dims).tolist()),
        ((lhs_free, y_lhs), (lhs_batch, y_batch)),
        tuple(np.argsort(d_rhs_dims).tolist()),
    )


# Residuals travel as uint8: where XLA:CPU stores f8 arrays across a loop it widens them to f16.


def _to_bytes(q: ScaledArray | jax.Array) -> ScaledArray | jax.Array:
    if not isinstance(q, ScaledArray):
        return q
    return ScaledArray(codes_of(q.data), q.scale, q.block)


def _from_bytes(q: ScaledArray | jax.Array, quantizer: Quantizer | None) -> ScaledArray | jax.Array:
    if not isinstance(q, ScaledArray):
        return q
    assert quantizer is not None
    return ScaledArray(codes_to_format(q.data, quantizer.fmt), q.scale, q.block)


def _check_state(recipe: Recipe, state: dict[str, AmaxState] | None) -> None:
    """Raise ``ValueError`` if `state` is not what ``recipe.init_state()`` would give."""
    if state is None:
        return
    expected = jax.eval_shape(recipe.init_state)
    if expected is None:
        raise ValueError(
            f"{recipe} keeps no state, but a state was given: it belongs to another recipe. "
            "Pass state=None (in a model: leave the 'fp8' collection out)."
        )
    if jax.tree.structure(state) != jax.tree.structure(expected) or any(
        jnp.shape(a) != b.shape
        for a, b in zip(*map(jax.tree.leaves, (state, expected)), strict=True)
    ):
        given = jax.tree.map(jnp.shape, state)
        raise ValueError(
            f"The state belongs to another recipe than {recipe}: it has shapes {given}, but "
            f"{jax.tree.map(lambda leaf: leaf.shape, expected)} are needed. "
            "Make a new one with recipe.init_state()."
        )
