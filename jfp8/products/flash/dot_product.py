"""`scaled_dot_product_attention`: ``jax.nn.dot_product_attention`` with FP8 operands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.products.explicit_sharding import in_mesh_of_arguments, with_layout_of
from jfp8.products.flash import blocks, passes
from jfp8.products.flash.mask import BLOCK, Visible, integers_of, segments_of, window_of
from jfp8.products.flash.numerics import Quantized, for_both, numerics_of
from jfp8.products.flash.observe import shown
from jfp8.products.flash.plan import AttentionSpec, plan_attention
from jfp8.products.observers import OBSERVER
from jfp8.products.operation import Observed
from jfp8.products.undifferentiated_uses import ProductUse, begin_use, end_use
from jfp8.products.vjp import first_order_only
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.codes import as_float_array
from jfp8.scaling.history import AmaxState, check_states
from jfp8.scaling.sink import SINK_UNIT, check_sink, encode_amax
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import current_device, has_explicit_axes

States = Mapping[str, Mapping[str, AmaxState]]


def scaled_dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: jax.typing.ArrayLike | None = None,
    key_value_segment_ids: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    recipe: RecipeLike = DelayedScaling(),
    state: States | None = None,
    sink: Mapping[str, jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``softmax(Q K^T scale + bias) V`` with all six products, forward and backward, in FP8. ::

        S = q(Q) q(K)^T scale + bias     dP = q(dO) q(V)^T
        O = q(P) q(V)                    dQ = q(dS) q(K) scale
        dV = q(P)^T q(dO)                dK = q(dS)^T q(Q) scale

    Computed over blocks of 64 queries and 128 keys with a running softmax in f32, without an array
    of ``[T, S]``. See `jfp8.products.flash.blocks` for the equations of a block.

    Q, K, V and dO have a scale for each token and head, or that of an amax history with an entry; P
    is multiplied by a power of two, since it is at most 1; dS is scaled block by block. So no
    result depends on a key that its query may not see, or on another sequence. The format of all of
    them is that of forward operands under `recipe`, e4m3 instead of four bits; nothing is rotated
    or rounded stochastically.

    Args:
      query: ``f32 | bf16 | f16 [B, T, N, H]``, or ``[T, N, H]``.
      key, value: ``[B, S, K, H]``. N is a multiple of K: ``N / K`` heads share a head of keys.
      bias: added to the scores, floating; broadcasts to ``[B, N, T, S]``. It gets a gradient.
      mask: bool; False hides a key from a query; broadcasts likewise.
      scale: of the scores; None: ``1 / sqrt(H)``.
      is_causal: query ``t`` sees keys ``s <= t`` only.
      query_seq_lengths, key_value_seq_lengths: int32[B]; tokens from there on are padding.
      local_window_size: keys that a query sees before and after its own position.
      query_segment_ids, key_value_segment_ids: int32[B, T] and int32[B, S], for several sequences
        packed into one: a query sees only keys with its own id.
      sinks: floating[N], a logit of each head that the softmax has in its denominator beside those
        of the keys (the attention sinks of gpt-oss). They get a gradient.
      recipe: an object or its name.
      state: amax histories, ``{"scores": recipe.init_state(), "context": recipe.init_state()}``:
        of Q and K in ``scores``, of V and dO in ``context``; they are read, never written.
      sink: ``{"scores": init_sink(), "context": init_sink()}``; see `scaled_dot_general`.
      implementation: ``"emulate"``: the reference, on any device. ``"mosaic_gpu"``: Pallas kernels
        for Hopper, which compute the same, and ``"mosaic_gpu_blackwell"``: for Blackwell. None:
        these where they can, else the reference.
        ``"cudnn"``: cuDNN's kernel, forward, for Hopper and Blackwell, delayed scaling with a
        `state`, and `is_causal` or all keys. It has one scale for each tensor, which looks ahead
        until each history has an entry, and rounds O to e4m3.

    Returns:
      Array of the shape and dtype of `query`; 0 for a query that sees no key.

    Raises:
      TypeError: operands that are not floating, a mask that is not bool.
      ValueError: shapes that do not fit; a `state` of another recipe; an `implementation` that is
        unknown, or does not compute this: the message says why.

    References:
      FlashAttention-3, arXiv 2407.08608, for FP8; `jax.nn.dot_product_attention` for the interface.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> q = jnp.ones((1, 5, 4, 64))
    >>> k = v = jnp.ones((1, 5, 2, 64))
    >>> jfp8.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 4, 64)
    """
    recipe = check_recipe(recipe)
    options = AttentionOptions(scale, is_causal, local_window_size, recipe, implementation)
    tokens = query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids
    arrays = query, key, value, bias, mask, sinks
    return attention_of_projections(options, arrays, tokens, state, sink)


OF_TOKENS = (
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
)


class AttentionOptions(NamedTuple):
    """Hold the arguments of `scaled_dot_product_attention` that are no arrays."""

    scale: float | None
    is_causal: bool
    window: int | tuple[int, int] | None
    recipe: Recipe | None  # None: nothing is quantized
    implementation: str | None


# Of query, key and value: the projection ``[batch, tokens, groups, heads of a group, depth]`` that
# contains the operand, or None. A group holds the heads of the query, then the key head, then the
# value head.
Projections: TypeAlias = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
SEPARATE: Projections = (None, None, None)
_FIRST_IN_GROUP = (0, -2, -1)
_IN_HIGH_PRECISION = 256, 512  # queries and keys of a block: no scales depend on it


@in_mesh_of_arguments
def attention_of_projections(
    options: AttentionOptions,
    arrays: tuple[Any, ...],
    tokens: tuple[Any, Any, Any, Any],
    state: States | None,
    sink: Mapping[str, jax.Array] | None,
    projections: Projections = SEPARATE,
) -> jax.Array:
    """Compute `scaled_dot_product_attention` of slices of projections.

    Args:
      arrays: query, key, value, bias, mask and sinks; all gradients are with respect to these.
      tokens: those of `OF_TOKENS`, or None.
      projections: the same values where a projection wrote them; a kernel can quantize from there.
    """
    if has_explicit_axes():
        inside = lambda *arrays: (attention_of_projections(options, *arrays), ())
        like = jnp.asarray(arrays[0])
        return with_layout_of(like, inside, arrays, tokens, state, sink, projections)[0]
    *operands, bias, mask, sinks = arrays
    scale, is_causal, window, recipe, implementation = options
    q, k, v = map(as_float_array, operands, ("query", "key", "value"))
    without_batch = q.ndim == 3
    if without_batch:
        q, k, v = q[None], k[None], v[None]
        ids = (None if x is None else jnp.asarray(x)[None] for x in tokens[2:])
        tokens = (*tokens[:2], *ids)
    _check_shapes(q, k, v)
    (batch, queries, heads, depth), (_, keys, kv_heads, _) = q.shape, k.shape
    visible = Visible(
        (queries, keys),
        is_causal,
        window_of(window),
        (
            integers_of(tokens[0], OF_TOKENS[0], (batch,)),
            integers_of(tokens[1], OF_TOKENS[1], (batch,)),
        ),
        _by_score(mask, "mask", (batch, heads, queries, keys), kv_heads),
        _by_score(bias, "bias", (batch, heads, queries, keys), kv_heads),
        segments_of(*tokens[2:], batch, (queries, keys)),
        _by_head(sinks, heads, kv_heads),
        BLOCK if recipe is not None else _IN_HIGH_PRECISION,
    )
    _check_state(recipe, state, sink)
    uses = {name: begin_use(zeros) for name, zeros in (sink or {}).items()}
    noted = {name: use for name, use in uses.items() if use is not None}
    factor = float(1 / math.sqrt(depth) if scale is None else scale)
    device = current_device(q, k, v)
    spec = AttentionSpec(recipe, visible, depth, factor, q.dtype, state is not None, device)
    if implementation is None and OBSERVER.value is not None:
        implementation = "emulate"  # only the reference shows weights and gradients of scores
    by = plan_attention(spec, implementation)
    if by.whole is not None:
        out = by.whole(q, k, v, spec)
        return out[0] if without_batch else out
    how = _How(recipe, factor, q.dtype, by, tuple(noted.values()))
    inputs = _Inputs(
        q.reshape(batch, queries, kv_heads, heads // kv_heads, depth).transpose(0, 2, 3, 1, 4),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        projections,
        visible,
        None if state is None else {name: dict(state[name]) for name in ("scores", "context")},
        None if sink is None else dict(sink),
    )
    out, observed = _attention(how, same_varying_axes(inputs))
    for name, use in noted.items():
        end_use(use, *observed[name])
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
    return out[0] if without_batch else out


@dataclass(frozen=True)
class _How:
    recipe: Recipe | None
    scale: float
    dtype: np.dtype
    by: Any
    uses: tuple[ProductUse, ...] = ()


class _Inputs(NamedTuple):
    """Of the computation; also their cotangents.

    Attributes:
      query: ``[batch, heads, groups, queries, depth]``.
      key, value: ``[batch, heads, keys, depth]``.
      projections: see `attention_of_projections`; they get no gradient.
      visible: with the bias, which gets a gradient.
      state, sink: see `scaled_dot_product_attention`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    projections: Projections
    visible: Any
    state: Any
    sink: Any


class _Residuals(NamedTuple):
    query: tuple[Quantized, Quantized]
    key: tuple[Quantized, Quantized]
    value: tuple[Quantized, Quantized]
    out: jax.Array
    log_sum: jax.Array
    visible: Visible
    history: AmaxState | None
    sink: Any
    like: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, inputs: _Inputs) -> tuple[jax.Array, dict[str, Observed]]:
    return _forward(how, inputs, and_backward=False)[0]


def _forward(
    how: _How, inputs: _Inputs, and_backward: bool = True
) -> tuple[tuple[jax.Array, dict[str, Observed]], _Residuals]:
    for use in how.uses if and_backward else ():
        use.linearized = True
    what = ("scaled_dot_product_attention", "jax.nn.dot_product_attention")
    query, key, value = (first_order_only(x, *what) for x in inputs[:3])
    visible, state = inputs.visible, inputs.state
    numerics = numerics_of(how.recipe)
    history = lambda which, role: None if state is None else state[which][role]
    cast_query, cast_key, cast_value = (
        # Forward alone, each is taken in one direction.
        partial(how.by.cast_heads, projection=projection, first=first)
        if how.by.cast_heads is not None and and_backward
        else None
        for projection, first in zip(inputs.projections, _FIRST_IN_GROUP, strict=True)
    )
    stored = partial(for_both, together=how.by.uses_one_scale)
    q = stored(query, numerics.query, history("scores", "lhs"), cast_heads=cast_query)
    k = stored(key, numerics.key, history("scores", "rhs"), cast_heads=cast_key)
    v = stored(value, numerics.value, history("context", "rhs"), folded=True, cast_heads=cast_value)
    q = shown("scores", "lhs", ("fprop", "wgrad"), numerics.query, query, q)
    k = shown("scores", "rhs", ("fprop", "dgrad"), numerics.key, key, k)
    v = shown("context", "rhs", ("fprop", "dgrad"), numerics.value, value, v)
    name = passes.forward_pass(q[0], k[0], v[0], visible, numerics).name
    compute = passes.called(name, _forward_pass)
    out, log_sum = compute(replace(how, uses=()), q[0], k[0], v[0], visible)
    grad_history = None if inputs.sink is None else history("context", "grad")
    like = jax.tree.map(lambda x: jnp.zeros((), x.dtype), inputs[:3])
    observed = {
        "scores": Observed(q[0].amax, k[0].amax),
        "context": Observed(jnp.ones_like(v[0].amax), v[0].amax),
    }
    first, second = (each._replace(transposed=None) for each in v)  # which takes it straight
    residuals = _Residuals(
        q, k, (first, second), out, log_sum, visible, grad_history, inputs.sink, like
    )
    return (out, observed), residuals


def _backward(how: _How, residuals: _Residuals, cotangents: Any) -> tuple[_Inputs]:
    for use in how.uses:
        use.differentiated = True
    grad, _ = cotangents
    q, k, v, out, log_sum, visible, history, sink, like = residuals
    grad = same_varying_axes((grad, out))[0]
    numerics = numerics_of(how.recipe)
    grad = first_order_only(grad, "scaled_dot_product_attention", "jax.nn.dot_product_attention")
    dot = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    g = for_both(grad, numerics.grad, history, cast_heads=how.by.cast_heads_of_gradient)
    g = shown("context", "grad", ("dgrad", "wgrad"), numerics.grad, grad, g)
    both = blocks.Both(q, k, v, g)
    name = passes.backward_pass(both, visible, numerics).name
    compute = passes.called(name, _backward_pass)
    dtype = how.dtype if {x.dtype for x in like} == {how.dtype} else np.dtype(np.float32)
    found = compute(replace(how, uses=(), dtype=dtype), both, log_sum, dot, visible)
    d_sink = None
    if sink is not None:
        of_scores = jnp.stack([q[0].amax, k[0].amax, found.largest])
        of_context = jnp.stack([jnp.ones(()), v[0].amax, g[0].amax])
        amaxes = {"scores": of_scores, "context": of_context}
        d_sink = {name: encode_amax(amaxes[name]) * SINK_UNIT for name in sink}
    d_sinks = blocks.gradient_of_sinks(visible.sinks, log_sum, dot)
    nothing: dict[str, Any] = {"lengths": (None, None), "mask": None, "segments": None}
    d_visible = replace(visible, **nothing, bias=found.bias, sinks=d_sinks)
    cotangents = _Inputs(
        found.query.astype(like[0].dtype),
        found.key.astype(like[1].dtype),
        found.value.astype(like[2].dtype),
        SEPARATE,
        d_visible,
        None,
        d_sink,
    )
    return (cotangents,)


_attention.defvjp(_forward, _backward)


def _forward_pass(how: _How, *arrays: Any) -> blocks.Softmax:
    sinks = arrays[-1].sinks
    dtype = how.dtype if sinks is None else np.dtype(np.float32)  # rounded once, below

    def reference(*arrays: Any) -> blocks.Softmax:
        found = blocks.forward(*arrays, scale=how.scale, numerics=numerics_of(how.recipe))
        return found._replace(out=found.out.astype(dtype))

    found = how.by.forward(reference, *arrays, scale=how.scale, dtype=dtype)
    found = blocks.with_sinks(found, sinks)
    return found._replace(out=found.out.astype(how.dtype))


def _backward_pass(how: _How, operands: blocks.Both, *arrays: Any) -> blocks.Gradients:
    numbers: dict[str, Any] = {"scale": how.scale, "numerics": numerics_of(how.recipe)}

    def reference(*arrays: Any) -> blocks.Gradients:
        found = blocks.backward(*arrays, **numbers)
        in_dtype = {n: getattr(found, n).astype(how.dtype) for n in ("query", "key", "value")}
        return found._replace(**in_dtype)

    return how.by.backward(reference, operands, *arrays, **numbers, dtype=how.dtype)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape and 0 not in q.shape + k.shape
    if fits:
        fits = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and not q.shape[2] % k.shape[2]
    if not fits:
        raise ValueError(
            "query must have the shape [B, T, N, H], key and value [B, S, K, H] with N a multiple "
            f"of K and no size 0 (or all of them without B); got {q.shape}, {k.shape} and "
            f"{v.shape}."
        )


def _by_score(
    x: jax.typing.ArrayLike | None, name: str, shape: tuple[int, ...], kv_heads: int
) -> jax.Array | None:
    """Return a mask or bias as ``[batch | 1, heads | 1, groups | 1, queries | 1, keys | 1]``."""
    if x is None:
        return None
    x = jnp.asarray(x)
    wanted = jnp.bool_ if name == "mask" else jnp.floating
    if not jnp.issubdtype(x.dtype, wanted):
        raise TypeError(
            f"{name} must be {'bool' if name == 'mask' else 'floating'}, got {x.dtype}. "
            "A mask hides keys where it is False; a bias is added to the scores."
        )
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if x.ndim != 4 or any(n not in (1, whole) for n, whole in zip(x.shape, shape, strict=True)):
        raise ValueError(f"{name} of shape {x.shape} does not broadcast to [B, N, T, S] = {shape}.")
    heads = (kv_heads, shape[1] // kv_heads) if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _by_head(sinks: Any, heads: int, kv_heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = as_float_array(sinks, "sinks")
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks must have the shape {(heads,)}, one for each head; got {sinks.shape}."
        )
    return sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)


def _check_state(recipe: Recipe | None, state: States | None, sink: Any) -> None:
    for name, given in (("state", state), ("sink", sink)):
        if given is not None and set(given) != {"scores", "context"}:
            raise ValueError(
                f"{name} must have the entries 'scores' and 'context', one for each product of "
                f"attention; got {sorted(given)}."
            )
    for which in ("scores", "context"):
        if state is not None:
            check_states(dict(state[which]), recipe)
        if sink is not None:
            check_sink(sink[which])
