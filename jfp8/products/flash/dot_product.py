"""`scaled_dot_product_attention`: ``jax.nn.dot_product_attention`` with FP8 operands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfp8.matmul.planner import check_implementation
from jfp8.products.differentiated import first_order_only
from jfp8.products.explicit_sharding import with_result_like
from jfp8.products.flash import blocks, passes
from jfp8.products.flash import mask as masks
from jfp8.products.flash.high_precision import attend_in_high_precision
from jfp8.products.flash.mask import Visible
from jfp8.products.flash.numerics import Numerics, for_both, numerics_of
from jfp8.products.flash.observe import shown
from jfp8.products.operation import in_mesh_of_arguments
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import RecipeLike, check_recipe
from jfp8.scaling.codes import as_float_array
from jfp8.scaling.history import AmaxState, check_states
from jfp8.scaling.sink import SINK_UNIT, check_sink, encode_amax
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.device import explicit_mesh
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
    recipe: RecipeLike | None = DelayedScaling(),
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
      query: ``f32 | bf16 | f16 [B, T, N, H]``, or ``[T, N, H]``; f64 with ``recipe=None``.
      key, value: ``[B, S, K, H]``. N is a multiple of K: ``N / K`` heads share a head of keys.
      bias: added to the scores, floating; broadcasts to ``[B, N, T, S]``. It gets a gradient.
      mask: bool; False hides a key from a query; broadcasts likewise.
      scale: factor on the scores; None means ``1 / sqrt(H)``.
      is_causal: query ``t`` sees keys ``s <= t`` only.
      query_seq_lengths, key_value_seq_lengths: int32[B]; tokens from there on are padding.
      local_window_size: keys that a query sees before and after its own position.
      query_segment_ids, key_value_segment_ids: int32[B, T] and int32[B, S], for several sequences
        packed into one: a query sees only keys with its own id.
      sinks: floating[N], a logit of each head that the softmax has in its denominator beside those
        of the keys (the attention sinks of gpt-oss). They get a gradient.
      recipe: an object or its name. None: ``jax.nn.dot_product_attention`` in high precision.
      state: amax histories, ``{"scores": recipe.init_state(), "context": recipe.init_state()}``:
        of Q and K in ``scores``, of V and dO in ``context``; they are read, never written.
      sink: ``{"scores": init_sink(), "context": init_sink()}``; see `scaled_dot_general`.
      implementation: ``"emulate"``: FP8, on any device. ``"xla"`` or ``"cudnn"``, only in high
        precision: see ``jax.nn.dot_product_attention``. None: in high precision, cuDNN where it
        computes this.

    Returns:
      Array of the shape and dtype of `query`; 0 for a query that sees no key.

    Raises:
      TypeError: operands that are not floating, a mask that is not bool.
      ValueError: shapes that do not fit; a `state` of another recipe; an `implementation` that is
        unknown, or does not compute FP8.

    References:
      FlashAttention-3, arXiv 2407.08608, for FP8; `jax.nn.dot_product_attention` for the interface.

    >>> import jax, jax.numpy as jnp, jfp8
    >>> q = jnp.ones((1, 5, 4, 64))
    >>> k = v = jnp.ones((1, 5, 2, 64))
    >>> jfp8.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (1, 5, 4, 64)
    """
    recipe = None if recipe is None else check_recipe(recipe)
    options = AttentionOptions(scale, is_causal, local_window_size, recipe, implementation)
    tokens = query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids
    return attention(options, (query, key, value, bias, mask, sinks), tokens, state, sink)


# Arguments that have a number for each sequence, or for each token.
OF_TOKENS = tuple(
    f"{of}_{what}" for what in ("seq_lengths", "segment_ids") for of in ("query", "key_value")
)


class AttentionOptions(NamedTuple):
    """Hold the arguments of `scaled_dot_product_attention` that are no arrays."""

    scale: float | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    recipe: Recipe | None = None  # None: nothing is quantized
    implementation: str | None = None
    dropout_rate: float = 0.0  # drops weights, only in high precision


@in_mesh_of_arguments
def attention(
    options: AttentionOptions,
    arrays: tuple[Any, ...],
    tokens: tuple[Any, ...] = (None,) * 4,
    state: States | None = None,
    sink: Mapping[str, jax.Array] | None = None,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Compute `scaled_dot_product_attention`; in high precision also of float64.

    Args:
      arrays: query, key, value, bias, mask and sinks; all gradients are with respect to these.
      tokens: the arguments in `OF_TOKENS`, or None.
      dropout_key: random key with which weights are dropped, only in high precision; None: none.
    """
    if explicit_mesh() is not None:
        inside = lambda *arrays: (attention(options, *arrays), ())
        spec = jax.typeof(jnp.asarray(arrays[0])).sharding.spec
        return with_result_like(spec, inside, arrays, tokens, state, sink, dropout_key)[0]
    *operands, bias, mask, sinks = arrays
    numerics = numerics_of(options.recipe)
    in_high_precision = numerics == Numerics()
    names = "query", "key", "value"
    q, k, v = (_floating(x, n, in_high_precision) for x, n in zip(operands, names, strict=True))
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
        options.is_causal,
        masks.window_of(options.local_window_size),
        (
            masks.integers_of(tokens[0], OF_TOKENS[0], (batch,)),
            masks.integers_of(tokens[1], OF_TOKENS[1], (batch,)),
        ),
        of_scores(mask, "mask"),
        of_scores(bias, "bias"),
        masks.segments_of(tokens[2], tokens[3], batch, (queries, keys)),
        masks.by_head(sinks, heads, kv_heads),
    )
    _check_state(options.recipe, state, sink)
    scale = float(1 / math.sqrt(depth) if options.scale is None else options.scale)
    _check_implementation(options.implementation, numerics)
    if in_high_precision:
        by = None if options.implementation == "emulate" else options.implementation
        why = "" if options.recipe is None else "the recipe keeps attention in high precision"
        with note("reason", why):
            dropout = options.dropout_rate, dropout_key
            return attend_in_high_precision(q, k, v, visible, scale, by, *dropout).reshape(shape)
    first_allowed("attention in FP8", "bf16", "emulate")
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, depth).transpose(0, 2, 3, 1, 4)
    state = None if state is None else {name: dict(state[name]) for name in ("scores", "context")}
    sink = None if sink is None else dict(sink)
    inputs = _Inputs(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible, state, sink)
    out = _attention(blocks.How(numerics, scale), same_varying_axes(inputs))
    return out.transpose(0, 3, 1, 2, 4).reshape(shape)


class _Inputs(NamedTuple):
    """Inputs of the computation, or their cotangents.

    Attributes:
      query: ``[batch, heads, groups, queries, depth]``.
      key, value: ``[batch, heads, keys, depth]``.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    visible: Any
    state: Any
    sink: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: blocks.How, inputs: _Inputs) -> jax.Array:
    return _forward(how, inputs)[0]


def _forward(how: blocks.How, inputs: _Inputs) -> tuple[jax.Array, tuple[Any, ...]]:
    what = ("scaled_dot_product_attention", "jax.nn.dot_product_attention")
    query, key, value = (first_order_only(x, *what) for x in inputs[:3])
    visible, state, numerics = inputs.visible, inputs.state, how.numerics
    history = lambda which, role: None if state is None else state[which][role]
    q = for_both(query, numerics.query, history("scores", "lhs"))
    k = for_both(key, numerics.key, history("scores", "rhs"))
    v = for_both(value, numerics.value, history("context", "rhs"), folded=True)
    q = shown("scores", "lhs", ("fprop", "wgrad"), numerics.query, query, q)
    k = shown("scores", "rhs", ("fprop", "dgrad"), numerics.key, key, k)
    v = shown("context", "rhs", ("fprop", "dgrad"), numerics.value, value, v)
    name = passes.forward_pass(q[0], k[0], v[0], visible, numerics).name
    found = passes.called(name, blocks.forward)(how, q[0], k[0], v[0], visible)
    found = found._replace(out=found.out.astype(query.dtype))
    grad_history = None if inputs.sink is None else history("context", "grad")
    like = jax.tree.map(lambda x: jnp.zeros((), x.dtype), inputs[:3])
    return found.out, (q, k, v, found, visible, grad_history, inputs.sink, like)


def _backward(how: blocks.How, residuals: tuple[Any, ...], grad: jax.Array) -> tuple[_Inputs]:
    q, k, v, softmax, visible, history, sink, like = residuals
    grad, numerics = same_varying_axes((grad, softmax.out))[0], how.numerics
    grad = first_order_only(grad, "scaled_dot_product_attention", "jax.nn.dot_product_attention")
    dot = jnp.sum(grad.astype(jnp.float32) * softmax.out.astype(jnp.float32), axis=-1)
    g = for_both(grad, numerics.grad, history)
    g = shown("context", "grad", ("dgrad", "wgrad"), numerics.grad, grad, g)
    both = blocks.Both(q, k, v, g)
    name = passes.backward_pass(both, visible, numerics).name
    found = passes.called(name, blocks.backward)(how, both, softmax, dot, visible)
    d_sink = None
    if sink is not None:
        of_scores = jnp.stack([q[0].amax, k[0].amax, found.largest])
        of_context = jnp.stack([jnp.ones(()), v[0].amax, g[0].amax])
        amaxes = {"scores": of_scores, "context": of_context}
        d_sink = {name: encode_amax(amaxes[name]) * SINK_UNIT for name in sink}
    d_sinks = None
    if visible.sinks is not None:
        d_sinks = blocks.gradients_of_sinks(softmax, visible.sinks, dot)
    nothing: dict[str, Any] = {"lengths": (None, None), "mask": None, "segments": None}
    d_visible = replace(visible, **nothing, bias=found.bias, sinks=d_sinks)
    operands = zip((found.query, found.key, found.value), like, strict=True)
    dq, dk, dv = (x.astype(y.dtype) for x, y in operands)
    return (_Inputs(dq, dk, dv, d_visible, None, d_sink),)


_attention.defvjp(_forward, _backward)


def _check_implementation(implementation: str | None, numerics: Numerics) -> None:
    check_implementation(implementation, ("emulate", "xla", "cudnn"))
    if implementation in ("xla", "cudnn") and numerics != Numerics():
        raise ValueError(
            f"implementation={implementation!r} computes attention in high precision only. Pass "
            "recipe=None as well, or leave out the implementation: FP8 has one for all devices."
        )


def _floating(x: Any, name: str, in_high_precision: bool) -> jax.Array:
    x = jnp.asarray(x)
    is_wide = in_high_precision and x.dtype == jnp.float64
    return x if is_wide else as_float_array(x, name, codes=False)


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
