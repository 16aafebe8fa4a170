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

from jfp8.matmul.planner import planner_of
from jfp8.products.explicit_sharding import in_mesh_of_arguments, with_result_like
from jfp8.products.flash import blocks, passes
from jfp8.products.flash import mask as masks
from jfp8.products.flash.mask import BLOCK, Visible
from jfp8.products.flash.numerics import for_both, numerics_of
from jfp8.products.flash.observe import shown
from jfp8.products.flash.plan import AttentionSpec, Reference
from jfp8.products.observers import OBSERVER
from jfp8.products.vjp import first_order_only
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.codes import as_float_array
from jfp8.scaling.history import AmaxState, check_states
from jfp8.scaling.sink import SINK_UNIT, check_sink, encode_amax
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import current_device, has_explicit_axes
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note

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
      scale: of the scores; None means ``1 / sqrt(H)``.
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


# Arguments that have a number for each sequence, or for each token.
OF_TOKENS = tuple(
    f"{of}_{what}" for what in ("seq_lengths", "segment_ids") for of in ("query", "key_value")
)


class AttentionOptions(NamedTuple):
    """Hold the arguments of `scaled_dot_product_attention` that are no arrays."""

    scale: float | None
    is_causal: bool
    window: int | tuple[int, int] | None
    recipe: Recipe | None  # None: nothing is quantized
    implementation: str | None
    unless_slower_on: Gpu | None = None  # stay in high precision if FP8 should be slower there


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
    tokens: tuple[Any, ...],
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
        spec = jax.typeof(jnp.asarray(arrays[0])).sharding.spec
        return with_result_like(spec, inside, arrays, tokens, state, sink, projections)[0]
    *operands, bias, mask, sinks = arrays
    scale, is_causal, window, recipe, implementation, gpu = options
    q, k, v = map(as_float_array, operands, ("query", "key", "value"))
    shape = q.shape
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
        ids = (None if x is None else jnp.asarray(x)[None] for x in tokens[2:])
        tokens = (*tokens[:2], *ids)
    _check_shapes(q, k, v)
    (batch, queries, heads, depth), (_, keys, kv_heads, _) = q.shape, k.shape
    of_scores = partial(masks.by_score, shape=(batch, heads, queries, keys), kv_heads=kv_heads)
    visible = Visible(
        (queries, keys),
        is_causal,
        masks.window_of(window),
        (
            masks.integers_of(tokens[0], OF_TOKENS[0], (batch,)),
            masks.integers_of(tokens[1], OF_TOKENS[1], (batch,)),
        ),
        of_scores(mask, "mask"),
        of_scores(bias, "bias"),
        masks.segments_of(tokens[2], tokens[3], batch, (queries, keys)),
        masks.by_head(sinks, heads, kv_heads),
        BLOCK if recipe is not None else _IN_HIGH_PRECISION,
    )
    _check_state(recipe, state, sink)
    factor = float(1 / math.sqrt(depth) if scale is None else scale)
    if implementation is None and OBSERVER.value is not None:
        implementation = "emulate"  # only the reference shows weights and gradients of scores
    device = current_device(q, k, v)
    spec = AttentionSpec(recipe, visible, depth, factor, q.dtype, device, implementation)
    if gpu is not None and recipe is not None:
        of_heads = batch * kv_heads, heads // kv_heads
        if why := planner_of(gpu).why_attention_is_slower(spec, *of_heads):
            with note("reason", why):
                plain = options._replace(recipe=None)
                return attention_of_projections(plain, arrays, tokens, None, None)
    by = planner_of(device, implementation).attention(spec)
    if by.whole is not None:
        return by.whole(q, k, v, spec).reshape(shape)
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, depth).transpose(0, 2, 3, 1, 4)
    inputs = _Inputs(q, k.swapaxes(1, 2), v.swapaxes(1, 2), projections, visible, None, None)
    out = _planned(spec, by, inputs, state, sink)
    return out.transpose(0, 3, 1, 2, 4).reshape(shape)


def _planned(
    spec: AttentionSpec, by: Reference, inputs: _Inputs, state: Any, sink: Any
) -> jax.Array:
    """Compute attention by the plan `by`, of `inputs` with this `state` and `sink`."""
    how = _How(spec.recipe, spec.scale, spec.dtype, by)
    if state is not None:
        state = {name: dict(state[name]) for name in ("scores", "context")}
    inputs = inputs._replace(state=state, sink=None if sink is None else dict(sink))
    return _attention(how, same_varying_axes(inputs))


@dataclass(frozen=True)
class _How:
    recipe: Recipe | None
    scale: float
    dtype: np.dtype
    by: Reference


class _Inputs(NamedTuple):
    """Inputs of the computation, or their cotangents.

    Attributes:
      query: ``[batch, heads, groups, queries, depth]``.
      key, value: ``[batch, heads, keys, depth]``.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    projections: Projections
    visible: Any
    state: Any
    sink: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, inputs: _Inputs) -> jax.Array:
    return _forward(how, inputs, and_backward=False)[0]


def _forward(
    how: _How, inputs: _Inputs, and_backward: bool = True
) -> tuple[jax.Array, tuple[Any, ...]]:
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
    q = for_both(query, numerics.query, history("scores", "lhs"), cast_heads=cast_query)
    k = for_both(key, numerics.key, history("scores", "rhs"), cast_heads=cast_key)
    of_value = {"folded": True, "cast_heads": cast_value}
    v = for_both(value, numerics.value, history("context", "rhs"), **of_value)
    q = shown("scores", "lhs", ("fprop", "wgrad"), numerics.query, query, q)
    k = shown("scores", "rhs", ("fprop", "dgrad"), numerics.key, key, k)
    v = shown("context", "rhs", ("fprop", "dgrad"), numerics.value, value, v)
    name = passes.forward_pass(q[0], k[0], v[0], visible, numerics).name
    compute = passes.called(name, _forward_pass)
    out, log_sum = compute(how, q[0], k[0], v[0], visible)
    grad_history = None if inputs.sink is None else history("context", "grad")
    like = jax.tree.map(lambda x: jnp.zeros((), x.dtype), inputs[:3])
    v = tuple(each._replace(transposed=None) for each in v)  # which is taken straight
    return out, (q, k, v, out, log_sum, visible, grad_history, inputs.sink, like)


def _backward(how: _How, residuals: tuple[Any, ...], grad: jax.Array) -> tuple[_Inputs]:
    q, k, v, out, log_sum, visible, history, sink, like = residuals
    grad = same_varying_axes((grad, out))[0]
    numerics = numerics_of(how.recipe)
    grad = first_order_only(grad, "scaled_dot_product_attention", "jax.nn.dot_product_attention")
    dot = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    g = for_both(grad, numerics.grad, history, cast_heads=how.by.cast_heads)
    g = shown("context", "grad", ("dgrad", "wgrad"), numerics.grad, grad, g)
    both = blocks.Both(q, k, v, g)
    name = passes.backward_pass(both, visible, numerics).name
    compute = passes.called(name, _backward_pass)
    dtype = how.dtype if {x.dtype for x in like} == {how.dtype} else np.dtype(np.float32)
    found = compute(replace(how, dtype=dtype), both, log_sum, dot, visible)
    d_sink = None
    if sink is not None:
        of_scores = jnp.stack([q[0].amax, k[0].amax, found.largest])
        of_context = jnp.stack([jnp.ones(()), v[0].amax, g[0].amax])
        amaxes = {"scores": of_scores, "context": of_context}
        d_sink = {name: encode_amax(amaxes[name]) * SINK_UNIT for name in sink}
    d_sinks = None
    if visible.sinks is not None:
        p = jnp.where(log_sum > -jnp.inf, jnp.exp(visible.sinks - log_sum), 0)
        d_sinks = -jnp.sum(p * dot, axis=(0, 3), keepdims=True)
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


def _check_state(recipe: Recipe | None, state: States | None, sink: Any) -> None:
    for name, given in (("state", state), ("sink", sink)):
        if given is not None and given.keys() != {"scores", "context"}:
            raise ValueError(
                f"{name} must have the entries 'scores' and 'context', one for each product of "
                f"attention; got {sorted(given)}."
            )
    for each in (state or {}).values():
        check_states(dict(each), recipe)
    for each in (sink or {}).values():
        check_sink(each)
