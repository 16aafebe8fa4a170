"""Attention by cuDNN's FP8 kernel, forward: what it takes, and its call.

cuDNN has one scale for each tensor, and writes O in f8, with a scale that it is given beforehand::

    s = (q . k^T) q_scale k_scale scale     p = exp(s - m)     m: the running maximum
    w = cast(256 p)                         o = cast((w . v) v_scale / (256 l o_scale))

|O| is at most max |V|, which is at most 448 v_scale, and rounding P adds less than 1/16 to it:
``o_scale = 2 v_scale`` never saturates. A factor of two costs no precision of a floating format.

The backward pass is that of the kernels for Hopper, or of the reference. cuDNN has one in FP8, too,
but JAX hands it its scales in another order than XLA reads them in, dO has to be e4m3, and so are
dQ, dK and dV, with scales that have to be known before.

References:
  cuDNN frontend, test/python/sdpa/fp8_ref.py: these equations. Order of the scales: JAX 0.12,
  jax/_src/cudnn/fused_attention_stablehlo.py, ``_dot_product_attention_fp8_bwd_cuda_lowering``;
  XLA, xla/stream_executor/cuda/cuda_dnn.cc, ``GetCudnnFlashAttentionBackwardF8OperationGraph``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfp8.products.flash.blocks import Softmax
from jfp8.products.flash.mask import Visible
from jfp8.products.flash.numerics import Quantized, numerics_of, weights_factor
from jfp8.products.flash.plan import AttentionSpec
from jfp8.quantizers.quantizer import Delayed
from jfp8.scaling.formats import E4M3FN
from jfp8.scaling.scales import reciprocal
from jfp8.tracing import compat
from jfp8.tracing.devices import Gpu

LARGEST = {9: 256, 10: 128}  # heads, by major compute capability
_FIRST_VERSION, _BROKEN_VERSION = 90100, 91000


def refusal(spec: AttentionSpec, gpu: Gpu | None) -> str | None:
    """Why cuDNN does not compute this, on `gpu`; None if it does."""
    reason = _why_not_here(gpu)
    if reason is not None:
        return reason
    for name in ("mask", "bias", "window", "segments"):
        if getattr(spec.visible, name) is not None:
            return f"a {name}: cuDNN's attention in FP8 has is_causal only"
    if spec.visible.lengths != (None, None):
        return "lengths of sequences: cuDNN's attention in FP8 has is_causal only"
    depth = spec.depth
    largest = LARGEST[9] if gpu is None or gpu.capability is None else LARGEST[gpu.capability[0]]
    if depth % 16 or depth > largest:
        return f"heads of {depth} numbers: they must be a multiple of 16, and at most {largest}"
    numerics = numerics_of(spec.recipe)
    stored = numerics.query.first, numerics.key.first, numerics.value.first
    if not all(isinstance(q, Delayed) and q.fmt == E4M3FN for q in stored):
        return (
            "a recipe without amax histories for Q, K and V in E4M3FN: cuDNN has one scale for "
            "each tensor, which looks ahead unless it is from a history. Use DelayedScaling()"
        )
    if not spec.has_state:
        return (
            "attention without state: one scale for each tensor, from the tensor itself, looks "
            "ahead. Pass the amax histories as state"
        )
    return None


def _why_not_here(gpu: Gpu | None) -> str | None:
    if compat.cudnn_attention() is None:
        return f"JAX {jax.__version__}: it has no attention in FP8 by cuDNN, or not as it used to"
    if gpu is not None and gpu.capability is not None and gpu.capability[0] not in LARGEST:
        return f"{gpu.kind}: it is for Hopper and Blackwell (compute capability 9 and 10)"
    version = compat.cudnn_version()
    if version is not None and (version < _FIRST_VERSION or version == _BROKEN_VERSION):
        return f"cuDNN {version}: it needs 9.1 ({_FIRST_VERSION}) or later, and not 9.10.0"
    return None


def forward(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    visible: Visible,
    *,
    scale: float,
    dtype: jax.typing.DTypeLike,
) -> Softmax:
    """`blocks.forward` of operands with one scale each, with the result in `dtype`."""
    attention = compat.cudnn_attention()
    assert attention is not None
    batch, _, _, rows, size = q.data.shape
    # Tokens of zeros have a scale of their own, a smaller one.
    of_q, of_k, of_v = (jnp.max(x.scale).reshape(1, 1, 1, 1) for x in (q, k, v))
    of_out = 2 * of_v
    factor = jnp.full_like(of_q, weights_factor(E4M3FN))
    scales = of_q, of_k, of_v, reciprocal(factor), factor, reciprocal(of_out)
    data = q.data.reshape(batch, -1, rows, size), k.data, v.data
    out, log_sum = attention(*data, *scales, scale=scale, is_causal=visible.is_causal)
    out = (out.astype(jnp.float32) * of_out).astype(dtype)
    return Softmax(out.reshape(q.data.shape), log_sum.reshape(q.scale.shape))
