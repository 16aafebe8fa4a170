"""Attention by the Pallas kernels for Blackwell: what they take, and their calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfp8.matmul.job import HARDWARE_FORMATS
from jfp8.products.flash.blocks import Both, Gradients, Softmax
from jfp8.products.flash.numerics import Numerics, Quantized, format_of
from jfp8.products.flash.visible import Visible
from jfp8.scaling.formats import E4M3FN
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.context import Gpu, why_not_divided
from jfp8.tracing.divided import divided
from jfp8.tracing.refusal import on_cuda_only

NAME = "mosaic_gpu_blackwell"
SIZES = (64, 128)  # of a head


def refusal(
    numerics: Numerics, visible: Visible, depth: int, scale: float, gpu: Gpu | None
) -> str | None:
    """Why the kernels do not compute the reference's forward pass on `gpu`; None if they do."""
    reason = _why_not_on(gpu)
    if reason is not None:
        return reason
    for name in ("mask", "bias"):
        if getattr(visible, name) is not None:
            return f"a {name}: the kernels know is_causal, local_window_size and lengths"
    if depth not in SIZES:
        return f"heads of {depth} numbers: the kernels are for 64 and 128"
    if not scale > 0:
        return f"scale={scale}: the kernels are for positive ones; negate the queries"
    stored = numerics.query.first, numerics.key.first, numerics.value.first
    if not _multiplied(map(format_of, stored)) or numerics.weights[0] != E4M3FN:
        return "a recipe whose forward products are not of E4M3FN and E5M2, with P in E4M3FN"
    return None


def refusal_backward(numerics: Numerics, depth: int) -> str | None:
    """Why there are no kernels for the backward pass of what `refusal` does not refuse."""
    of = numerics
    stored = of.query.second, of.key.second, of.value.second, of.grad.first, of.grad.second
    if not _multiplied([*map(format_of, stored), *of.scores]) or of.weights[1] != E4M3FN:
        return "a recipe whose backward products are not of E4M3FN and E5M2, with P in E4M3FN"
    return None


def _multiplied(formats: Any) -> bool:
    return all(fmt in HARDWARE_FORMATS for fmt in formats)


def _why_not_on(gpu: Gpu | None) -> str | None:
    if jax.__version_info__ < (0, 11, 2):
        return (
            f"JAX {jax.__version__}: the Mosaic GPU kernels need 0.11.2 or later, and with it "
            "Python 3.12"
        )
    if kernels_are_interpreted() or gpu is None:
        return None
    if gpu.capability is None or gpu.capability[0] != 10:
        return f"{gpu.kind}: these kernels are for Blackwell (compute capability 10.x)"
    return why_not_divided(gpu)


def run(kernel: Callable[..., Any], *operands: Any) -> Any:
    """``kernel(*operands)`` on CUDA, or interpreted; an error if compiled for another platform."""
    if kernels_are_interpreted():
        return kernel(*operands)
    reason = (
        f"implementation={NAME!r} runs on CUDA, and this program is compiled for another "
        "platform. Use implementation=None or 'emulate', which give the same numbers."
    )
    return on_cuda_only(kernel, reason, *operands)


def forward(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    visible: Visible,
    *,
    scale: float,
    dtype: jax.typing.DTypeLike,
) -> Softmax:
    """`blocks.forward`, with the result in `dtype`."""
    from jfp8.matmul.blackwell.attention import attention_forward, division

    groups, rows = q.data.shape[2:4]
    options = _options(groups, visible, scale, dtype)
    lengths, (of_queries, _) = _key_lengths(k, visible), visible.lengths
    scales = _heads(q.scale), k.scale, v.scale
    rule = division(groups, with_lengths=bool(lengths))
    attend = divided(f"attention_blackwell, {options}", partial(attention_forward, **options), rule)
    out, log_sum = attend(_heads(q.data), k.data, v.data.swapaxes(2, 3), *scales, *lengths)
    if of_queries is not None:
        real = jnp.arange(rows)[None, None] < of_queries[:, None, None]
        out = jnp.where(real[..., None], out, 0)
        log_sum = jnp.where(real, log_sum, -jnp.inf)
    return Softmax(out.reshape(q.data.shape), log_sum.reshape(q.scale.shape))


def backward(
    operands: Both,
    log_sum: jax.Array,
    dot: jax.Array,
    visible: Visible,
    *,
    scale: float,
    numerics: Numerics,
    dtype: jax.typing.DTypeLike,
) -> Gradients:
    """`blocks.backward`, with the results in `dtype`."""
    from jfp8.matmul.blackwell.attention_backward import attention_backward, division
    from jfp8.matmul.hopper.attention_backward import Stored, Vectors

    (q, q_2), (k, k_2), (_, v), (grad, grad_2) = operands
    groups, lengths = q.data.shape[2], _key_lengths(k, visible)
    transposed = lambda x: x.data.swapaxes(-1, -2)
    stored = Stored(
        _heads(q.data),
        k.data,
        v.data,
        _heads(grad.data),
        _heads(transposed(q_2)),
        transposed(k_2),
        _heads(transposed(grad_2)),
    )
    of_queries = map(_heads, (q.scale, grad.scale, q_2.scale, grad_2.scale, log_sum, dot))
    q_scale, grad_scale, q_2_scale, grad_2_scale, log_sum, dot = of_queries
    vectors = Vectors(
        q_scale, k.scale, v.scale, grad_scale, q_2_scale, k_2.scale, grad_2_scale, log_sum, dot
    )
    options = _options(groups, visible, scale, dtype) | {"formats": numerics.scores}

    def differentiate(*x: jax.Array) -> tuple[jax.Array, ...]:
        n, m = len(stored), len(stored) + len(vectors)
        return attention_backward(Stored(*x[:n]), Vectors(*x[n:m]), *x[m:], **options)

    rule = division(groups, with_lengths=bool(lengths))
    by_parts = divided(f"attention_backward_blackwell, {options}", differentiate, rule)
    dq, dk, dv, largest = by_parts(*stored, *vectors, *lengths)
    return Gradients(dq.reshape(q.data.shape), dk, dv, None, jnp.max(largest))


def _heads(x: jax.Array) -> jax.Array:
    """``[batch, heads, groups, ...]`` as ``[batch, heads * groups, ...]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _options(
    groups: int, visible: Visible, scale: float, dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    return {
        "groups": groups,
        "scale": scale,
        "is_causal": visible.is_causal,
        "window": visible.window,
        "out_dtype": jnp.dtype(dtype),
    }


def _key_lengths(k: Quantized, visible: Visible) -> list[jax.Array]:
    """None or one array: the number of keys of each head that are not padding."""
    lengths = visible.lengths[1]
    if lengths is None:
        return []
    return [jnp.broadcast_to(lengths[:, None], k.data.shape[:2]).astype(jnp.int32)]
