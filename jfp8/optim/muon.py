"""Optax's Muon, with its momentum in about one byte per parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers

from jfp8.optim.adam import chosen_moments
from jfp8.optim.storage import Storage
from jfp8.optim.stored_state import store_state
from jfp8.products.dot_general import scaled_dot_general
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.tracing.shardings import automatic, sharded_like, trimmed

Matmul = Callable[[jax.Array, jax.Array], jax.Array]
NORMS = {"frobenius": "fro", "spectral": 2, "aol": None, "schatten": None}  # to divide by at first


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    mu: Storage | None = None,
    nu: Storage | None = None,
    products: RecipeLike | Literal["bf16"] | None = None,
    sharding: NamedSharding | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.contrib.muon`` with its momentum in 1.03 bytes per parameter instead of 4. ::

        m = beta * decode(m') + (1 - beta) * g
        p <- p - lr * (scale of the shape * polar factor of the momentum + weight_decay * p)
        m' <- encode(m)

    The update is computed from ``m`` before it is rounded. Adam updates parameters that are not
    matrices, with moments stored as by `adam`. Arrays of fewer than two dimensions or 4096 elements
    keep f32 moments. With ``mu=Float(), nu=Float()`` and f32 matmuls, parameters are bitwise
    identical to optax's under ``jit``.

    The polar factor takes ``ns_steps`` of three matmuls each. docs/memory.md has the errors of
    `products`, and the bytes that devices exchange for each `sharding`. Results are those of one
    device, up to summation order.

    Args:
      learning_rate, ..., consistent_rms: see ``optax.contrib.muon``.
      mu_dtype: shorthand for ``mu=Float(mu_dtype)``.
      mu, nu: how to store momentum and first moments, and second moments; default: as `adam`.
      products: precision of the matmuls: None for f32, ``"bf16"``, or a recipe, by which
        `scaled_dot_general` quantizes them; ``"rowwise"`` may diverge where rows are alike. The
        momentum and the polar factor are then rounded to bf16.
      sharding: sharding of stacks ``[matrices, rows, columns]`` while they are orthogonalized, on
        meshes with auto axes. ``P("fsdp")`` is the cheapest; where the axis does not divide their
        number, and with ``P()``, each device computes all of them. With None the compiler chooses.
      seed: int or i32[], for stochastic rounding.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with state `StoredState`.

    Raises:
      TypeError, ValueError: arguments as of `adam`, optax, or `scaled_dot_general` for `products`.

    References:
      Jordan et al., "Muon", 2024; Liu et al., arXiv 2502.16982.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> state = jfp8.optim.muon(0.02).init({"w": jnp.ones((64, 256))})
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / (64 * 256)
    1.03271484375
    """
    if preconditioning not in NORMS:
        raise ValueError(f"muon(preconditioning={preconditioning!r}): allowed are {[*NORMS]}.")
    numbers = partial(_numbers, muon_weight_dimension_numbers)
    # In no steps, and not divided by a norm: what would be orthogonalized.
    nothing: Any = {"ns_steps": 0, "preconditioning": "aol"}
    momentum = optax.contrib.scale_by_muon(
        **nothing, beta=beta, nesterov=nesterov, weight_dimension_numbers=numbers
    )
    method = _coefficients(ns_coeffs, ns_steps), preconditioning, eps, matmul_in(products)
    send = partial(_sent, sharding, None if products is None else jnp.bfloat16)
    polar = lambda x: send(orthogonalize(send(x), *method, shifted=products is not None))
    moved = partial(_moved, polar=polar, adaptive=adaptive, consistent_rms=consistent_rms)
    move = lambda x, of: sharded_like(x, partial(moved, numbers=of), x)
    # Optax traces matmuls of no steps, too.
    in_types: Any = lambda *given: sharded_like(given[:2], momentum.update, *given)
    matrices = optax.chain(
        optax.GradientTransformation(momentum.init, in_types),
        optax.stateless(lambda m, _: jax.tree.map(move, m, numbers(m))),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    moments = adam_b1, adam_b2, eps, adam_eps_root
    others = optax.adamw(rate, *moments, weight_decay=adam_weight_decay, nesterov=nesterov)
    label = lambda _, of: "adam" if of is None else "muon"
    labels = lambda tree: jax.tree.map(label, tree, numbers(tree))
    inner = optax.partition({"muon": matrices, "adam": others}, labels)
    return store_state(inner, chosen_moments("muon", None, mu, nu, mu_dtype), seed=seed)


def _numbers(given: Any, tree: Any) -> Any:
    """Return the numbers of each leaf of `tree`, or None for Adam, as `given` to `muon`."""
    if given is None:
        return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, tree)
    is_one = lambda node: node is None or isinstance(node, MuonDimensionNumbers)
    spread = lambda one, part: jax.tree.map(lambda _: one, part)
    return jax.tree.map(spread, given(tree) if callable(given) else given, tree, is_leaf=is_one)


def _coefficients(ns_coeffs: Any, ns_steps: int) -> np.ndarray:
    """Return the coefficients of each step, f32[steps, 3], which optax checks."""
    with jax.ensure_compile_time_eval():
        state = optax.contrib.muon(0.0, ns_coeffs, ns_steps).init({"": jnp.zeros((1, 1))})
        coeffs = np.asarray(optax.tree.get(state, "ns_coeffs"), np.float32)
    return coeffs if coeffs.ndim == 2 else np.broadcast_to(coeffs, (ns_steps, 3))


def _sent(sharding: NamedSharding | None, rounded_to: Any, x: jax.Array) -> jax.Array:
    """Return `x` in this sharding, rounded to the dtype in which devices exchange it."""
    if rounded_to is not None:  # not by casts: XLA may leave out pairs of them
        x = lax.reduce_precision(x, 8, 7)
    if sharding is None:
        return x
    y = x if rounded_to is None else x.astype(rounded_to)
    wanted = trimmed(sharding, y.shape)
    wanted = wanted.update(mesh=automatic(wanted.mesh))  # `sharded_like` calls this function
    return lax.with_sharding_constraint(y, wanted).astype(x.dtype)


def _moved(
    x: jax.Array,
    numbers: MuonDimensionNumbers,
    polar: Callable[[jax.Array], jax.Array],
    adaptive: bool,
    consistent_rms: jax.typing.ArrayLike | None,
) -> jax.Array:
    """Return the polar factors of the matrices in `x`, scaled by their shape."""
    groups = [(n,) if isinstance(n, int) else n for n in numbers]
    rows, columns = (tuple(i % x.ndim for i in group) for group in groups)
    fan_in, fan_out = (math.prod(x.shape[i] for i in group) for group in (rows, columns))
    stack = tuple(i for i in range(x.ndim) if i not in rows + columns)
    # Two dimensions optax takes as they are, whichever of them it is to reduce.
    order = stack + rows + columns if x.ndim > 2 else (0, 1)
    turned = x.transpose(order)
    matrices = turned.reshape(-1, fan_in, fan_out) if x.ndim > 2 else turned[None]
    y = polar(matrices).reshape(turned.shape).transpose(np.argsort(order).tolist())
    if adaptive:
        y = jnp.sum(x * y) * y
    if consistent_rms is None:
        return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * y
    return jnp.sqrt(jnp.maximum(fan_in, fan_out)) * consistent_rms * y


def matmul_in(products: RecipeLike | Literal["bf16"] | None) -> Matmul:
    """Return the matmul of stacks of f32 matrices that `products` names: see `optim.muon`."""
    numbers = (((2,), (1,)), ((0,), (0,)))
    f32 = {"preferred_element_type": jnp.float32}
    if products is None:
        return jnp.matmul
    if products == "bf16":
        half = lambda x: x.astype(jnp.bfloat16)
        return lambda x, y: jax.lax.dot_general(half(x), half(y), numbers, **f32)
    recipe = check_recipe(products)
    return lambda x, y: scaled_dot_general(x, y, numbers, recipe=recipe, **f32)


def orthogonalize(
    x: jax.Array,
    coeffs: np.ndarray,
    preconditioning: str,
    eps: jax.typing.ArrayLike,
    matmul: Matmul,
    *,
    shifted: bool,
) -> jax.Array:
    """Return nearly ``U V^T`` of each ``x = U S V^T``, f32[stack, m, n], as optax's Muon does. ::

        x <- x / |x|;    a = x x^T;    x <- c0 x + (c1 a + c2 a a) x

    Close to the end ``c1 a`` and ``c2 a a`` are large and cancel, but not the errors of matmuls in
    few bits. For these `shifted` writes the same polynomial in ``r = 1 - a``, which is small then::

        x <- (c0 + c1 + c2) x + (c2 r r - (c1 + 2 c2) r) x
    """
    turned = x.shape[1] > x.shape[2]
    x = x.swapaxes(1, 2) if turned else x
    if (order := NORMS[preconditioning]) is not None:
        norm = partial(jnp.linalg.norm, ord=order, axis=(1, 2), keepdims=True)
        size = norm(x)
        # Squares of large entries overflow.
        largest = jnp.max(jnp.abs(x), axis=(1, 2), keepdims=True)
        size = jnp.where(size < jnp.inf, size, largest * norm(x / largest))
        x = x / (size + eps)
    for i, (c0, c1, c2) in enumerate(coeffs):
        a = matmul(x, x.swapaxes(1, 2))
        if i == 0:
            x, a = _preconditioned(x, a, preconditioning)
        if shifted:
            r = jnp.eye(a.shape[-1], dtype=a.dtype)[None] - a
            b = c2 * matmul(r, r) - (c1 + 2 * c2) * r
            x = (c0 + c1 + c2) * x + matmul(b, x)
        else:
            b = c1 * a + matmul(c2 * a, a)
            x = c0 * x + matmul(b, x)
    return x.swapaxes(1, 2) if turned else x


def _preconditioned(x: jax.Array, a: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    if name == "aol":
        s = jax.lax.rsqrt(jnp.maximum(jnp.abs(a).sum(axis=-1, keepdims=True), 1e-8))
        return x * s, a * s * s.swapaxes(1, 2)
    if name == "schatten":
        s = jax.lax.rsqrt(jnp.maximum(jnp.linalg.norm(a, axis=(1, 2), keepdims=True), 1e-8))
        return x * s, a * s**2
    return x, a
