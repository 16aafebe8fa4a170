"""`scaled_dot_general`: three FP8 products and their VJP.

    fprop  y  = q(lhs) . q(rhs)
    dgrad  dx = q(dy)  . q(rhs)^T
    wgrad  dw = q(lhs)^T . q(dy)

Every tensor is quantized once. What the backward pass keeps is the f8 bytes and their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.arrays import ScaledArray
from jfp8.compat import same_varying_axes
from jfp8.formats import as_float_array
from jfp8.matmul import (
    Implementation,
    check_dimension_numbers,
    check_implementation,
    scaled_matmul,
)
from jfp8.recipes import DelayedScaling, Recipe, check_recipe
from jfp8.scaling import AmaxState, amax
from jfp8.sink import ROLES, WIDTH, encode_amax


class Observed(NamedTuple):
    """amax of the two operands of a product, f32[] each; NaN or Inf where the operand has one."""

    lhs: jax.Array
    rhs: jax.Array


@dataclass(frozen=True)
class _Product:
    """What is static about one product."""

    dimension_numbers: lax.DotDimensionNumbers
    recipe: Recipe
    implementation: Implementation
    out_dtype: np.dtype
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype


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
      key: random key for recipes that round stochastically; none of the present ones does.
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
    del key
    y, _ = observed_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        recipe=recipe,
        state=state,
        sink=sink,
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
    product = _Product(
        dimension_numbers,
        recipe,
        implementation,
        np.dtype(out_dtype),
        np.dtype(lhs.dtype),
        np.dtype(rhs.dtype),
    )
    return _dot(product, *same_varying_axes((lhs, rhs, lax.stop_gradient(state), sink)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product, lhs, rhs, state, sink):
    return _dot_fwd(product, lhs, rhs, state, sink)[0]


def _dot_fwd(product, lhs, rhs, state, sink):
    lhs, rhs = _first_order_only(lhs), _first_order_only(rhs)
    operands = product.recipe.operands()
    observed = Observed(amax(lhs), amax(rhs))
    q_lhs = operands.lhs(lhs, observed.lhs, state and state["lhs"])
    q_rhs = operands.rhs(rhs, observed.rhs, state and state["rhs"])
    y = scaled_matmul(  # fprop
        q_lhs,
        q_rhs,
        product.dimension_numbers,
        preferred_element_type=product.out_dtype,
        fast_accumulation=operands.fast_accumulation[0],
        implementation=product.implementation,
    )
    # Without a sink nobody would learn the gradient's amax, and its history is not kept up.
    grad_state = None if state is None or sink is None else state["grad"]
    seen = None if sink is None else observed
    return (y, observed), (_to_bytes(q_lhs), _to_bytes(q_rhs), grad_state, seen)


def _dot_bwd(product, residuals, cotangents):
    lhs_bytes, rhs_bytes, grad_state, seen = residuals
    dy = _first_order_only(cotangents[0])
    operands = product.recipe.operands()
    q_lhs = _from_bytes(lhs_bytes, operands.lhs.fmt.dtype)
    q_rhs = _from_bytes(rhs_bytes, operands.rhs.fmt.dtype)
    grad_amax = amax(dy)
    q_dy = operands.grad(dy, grad_amax, grad_state)

    lhs_numbers, lhs_order, rhs_numbers, rhs_order = _transposed_products(
        q_lhs.ndim, q_rhs.ndim, product.dimension_numbers
    )
    d_lhs = scaled_matmul(  # dgrad
        q_dy,
        q_rhs,
        lhs_numbers,
        preferred_element_type=product.lhs_dtype,
        fast_accumulation=operands.fast_accumulation[1],
        implementation=product.implementation,
    ).transpose(lhs_order)
    d_rhs = scaled_matmul(  # wgrad
        q_lhs,
        q_dy,
        rhs_numbers,
        preferred_element_type=product.rhs_dtype,
        fast_accumulation=operands.fast_accumulation[2],
        implementation=product.implementation,
    ).transpose(rhs_order)
    d_sink = None
    if seen is not None:
        d_sink = encode_amax(jnp.stack([seen.lhs, seen.rhs, grad_amax]))
    return d_lhs, d_rhs, None, d_sink


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


def _transposed_products(
    lhs_ndim: int, rhs_ndim: int, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[Any, tuple[int, ...], Any, tuple[int, ...]]:
    """Dimension numbers of dgrad and wgrad, each with the transposition that follows it.

    The output ``y`` has the batch dimensions first, then those free in lhs, then those free in rhs.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
        tuple(map(tuple, pair)) for pair in dimension_numbers
    )
    lhs_free = tuple(d for d in range(lhs_ndim) if d not in lhs_contract + lhs_batch)
    rhs_free = tuple(d for d in range(rhs_ndim) if d not in rhs_contract + rhs_batch)
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


def _to_bytes(q: ScaledArray) -> ScaledArray:
    return ScaledArray(lax.bitcast_convert_type(q.data, jnp.uint8), q.scale)


def _from_bytes(q: ScaledArray, dtype: np.dtype) -> ScaledArray:
    return ScaledArray(lax.bitcast_convert_type(q.data, dtype), q.scale)


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
