"""Attention in high precision on GPUs: cuDNN's flash attention, as JAX calls it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jfp8.products.flash.mask import padded
from jfp8.products.flash.plan import AttentionSpec, Reference
from jfp8.tracing.compat import cudnn_version
from jfp8.tracing.devices import Gpu


class FlashAttention(Reference):
    """Plan attention by ``jax.nn.dot_product_attention``, which is differentiated as a whole."""

    @staticmethod
    def whole(  # pyrefly: ignore[bad-override]
        q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec
    ) -> jax.Array:
        """Compute attention of ``[batch, tokens, heads, depth]``."""
        visible, (rows, keys) = spec.visible, spec.visible.sizes
        by_score = lambda x: None if x is None else x.reshape(len(x), -1, *x.shape[3:])
        lengths = visible.lengths
        if rows % 2 or keys % 2:  # JAX differentiates even numbers of tokens only
            even = lambda x: padded(x, 1, x.shape[1] + x.shape[1] % 2)
            all_of = (jnp.full(len(q), n, jnp.int32) for n in visible.sizes)
            given = zip(lengths, all_of, strict=True)
            lengths = [whole if n is None else n for n, whole in given]
            q, k, v = even(q), even(k), even(v)
        out = jax.nn.dot_product_attention(
            *(q, k, v, by_score(visible.bias), by_score(visible.mask)),
            scale=spec.scale,
            is_causal=visible.is_causal,
            query_seq_lengths=lengths[0],
            key_value_seq_lengths=lengths[1],
            local_window_size=visible.window,
            implementation="cudnn",
        )[:, :rows]
        if visible.mask is None and visible.lengths == (None, None):
            return out
        # cuDNN gives the mean of all values to a query that sees none.
        seen = replace(visible, largest=visible.sizes).of_block(jnp.int32(0), jnp.int32(0))
        seen = jnp.any(seen, axis=-1, keepdims=True)
        seen = seen.reshape(len(seen), -1, *seen.shape[3:]).swapaxes(1, 2)
        return jnp.where(seen, out, 0)


def refusal(spec: AttentionSpec, gpu: Gpu | None) -> str | None:
    """Tell why cuDNN does not compute this on `gpu`, by the installed JAX; None if it does."""
    if gpu is None or gpu.capability is None or gpu.capability < (8, 0):
        return "no GPU of compute capability 8.0 or later is known"
    if reason := refusal_anywhere(spec, gpu.capability):
        return reason
    if cudnn_version() is None:
        return "cuDNN is not installed"
    if spec.depth > 128 and jax.default_backend() != "gpu":
        return "heads of more than 128 numbers: JAX asks the GPU that is there"
    return None


def refusal_anywhere(spec: AttentionSpec, capability: tuple[int, int] | None) -> str | None:
    """Tell why cuDNN does not compute this on any such GPU; None if it does."""
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{spec.dtype}: cuDNN's flash attention is for bf16 and f16"
    largest = 256 if capability is not None and capability >= (9, 0) else 128
    if spec.depth % 8 or spec.depth > largest:
        return f"heads of {spec.depth} numbers: a multiple of 8 is needed, at most {largest}"
    visible = spec.visible
    for name in ("segments", "sinks"):
        if getattr(visible, name) is not None:
            return f"{name}: cuDNN's flash attention has none"
    if visible.window is not None and visible.window[1] and not visible.is_causal:
        return "a window of later keys"
    by_score = visible.mask is not None or visible.bias is not None
    if by_score and any(n % 2 for n in visible.sizes):
        return "a mask or bias with an odd number of tokens"
    return None
