"""Attention by the Pallas kernels for Hopper: what they take, and their calls."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jfp8.matmul.hopper.product import why_no_kernels
from jfp8.matmul.job import HARDWARE_FORMATS
from jfp8.products.flash.blocks import Softmax
from jfp8.products.flash.numerics import Numerics, Quantized, format_of
from jfp8.products.flash.visible import Visible
from jfp8.quantizers.quantizer import Quantizer
from jfp8.scaling.formats import E4M3FN
from jfp8.tracing.context import Gpu
from jfp8.tracing.divided import divided

SIZES = (64, 128, 256)  # of a head


def refusal(
    numerics: Numerics, visible: Visible, depth: int, scale: float, gpu: Gpu | None
) -> str | None:
    """Why the kernels do not compute what the reference does, on `gpu`; None if they do."""
    reason = why_no_kernels(gpu)
    if reason is not None:
        return reason
    for name in ("mask", "bias"):
        if getattr(visible, name) is not None:
            return f"a {name}: the kernels know is_causal, local_window_size and lengths"
    if depth not in SIZES:
        return f"heads of {depth} numbers: the kernels are for 64, 128 and 256"
    if not scale > 0:
        return f"scale={scale}: the kernels are for positive ones; negate the queries"
    stored = numerics.query.first, numerics.key.first, numerics.value.first
    if not all(map(_known, stored)) or numerics.weights[0] != E4M3FN:
        return "a recipe whose forward products are not of E4M3FN and E5M2, with P in E4M3FN"
    return None


def _known(quantizer: Quantizer | None) -> bool:
    return format_of(quantizer) in HARDWARE_FORMATS


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
    from jfp8.matmul.hopper.attention import attention_forward, division

    batch, heads, groups, rows, size = q.data.shape
    of_queries, of_keys = visible.lengths
    lengths = []
    if of_keys is not None:
        lengths = [jnp.broadcast_to(of_keys[:, None], (batch, heads)).astype(jnp.int32)]
    options = {
        "groups": groups,
        "scale": scale,
        "is_causal": visible.is_causal,
        "window": visible.window,
        "out_dtype": jnp.dtype(dtype),
    }
    scales = q.scale.reshape(batch, -1, rows), k.scale, v.scale
    rule = division(groups, *scales, with_lengths=bool(lengths))
    attend = divided(f"attention, {options}", partial(attention_forward, **options), rule)
    data = q.data.reshape(batch, -1, rows, size), k.data, v.data.swapaxes(2, 3)
    out, log_sum = attend(*data, *scales, *lengths)
    if of_queries is not None:
        real = jnp.arange(rows)[None, None] < of_queries[:, None, None]
        out = jnp.where(real[..., None], out, 0)
        log_sum = jnp.where(real, log_sum, -jnp.inf)
    return Softmax(out.reshape(q.data.shape), log_sum.reshape(q.scale.shape))
