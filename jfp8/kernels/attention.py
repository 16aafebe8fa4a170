"""The planner of attention on GPUs: Pallas kernels, or cuDNN in high precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax

from jfp8.kernels.cost_model import PASSES
from jfp8.kernels.cuda_backends import expected_attention, known_gpu
from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.pallas_attention import BLACKWELL, HOPPER, Pallas
from jfp8.kernels.partitioning import divided
from jfp8.kernels.xla import cudnn_flash
from jfp8.kernels.xla.cudnn_flash import FlashAttention
from jfp8.matmul.spec import HARDWARE_FORMATS
from jfp8.products.flash.numerics import numerics_of
from jfp8.products.flash.plan import AttentionSpec
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import Format
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note

PALLAS = {kernels.name: kernels for kernels in (HOPPER, BLACKWELL)}


@dataclass(frozen=True)
class AttentionByKernels:
    """Plan attention on a GPU, with the methods of the core's `Reference`."""

    kernels: Pallas | None  # None: the reference
    named: bool  # whether it was asked for: then nothing else computes
    reason: str = ""  # of the reference: why no kernels were chosen
    whole = None

    @property
    def cast_heads(self) -> Callable[..., Any] | None:
        """Quantizes heads for kernels that take operands straight and transposed."""
        return cast_heads if self.kernels else None

    def forward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute ``reference(*operands)``, or what the kernels make of `operands`."""
        return self._compute("forward", self.reason, reference, operands, options)

    def backward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute the same of the backward pass; the first of `operands` is a `blocks.Both`."""
        reason: str | None = self.reason
        if self.kernels:
            depth = operands[0].query[0].data.shape[-1]
            reason = self.kernels.refusal_backward(options["numerics"], depth)
        return self._compute("backward", reason, reference, operands, options)

    def _compute(
        self, which: str, why_none: str | None, reference: Any, operands: Any, options: Any
    ) -> Any:
        if self.kernels is None or why_none:
            with note("cuda", f"bf16: {why_none}"):
                return reference(*operands)
        reason = (
            f"implementation={self.kernels.name!r} runs on CUDA, and this program is compiled for "
            "another platform. Use implementation=None or 'emulate'."
        )
        elsewhere, compute = reason if self.named else reference, getattr(self.kernels, which)
        with note("cuda", self.kernels.name):
            return on_platform("cuda", partial(compute, **options), elsewhere, *operands)


def plan(spec: AttentionSpec, implementation: str | None) -> AttentionByKernels | FlashAttention:
    """Return the implementation that is asked for, or the best that computes what `blocks` does.

    Raises:
      ValueError: it is unknown, or does not compute this.
    """
    gpu = known_gpu(spec.device)
    if spec.recipe is None:
        reason = cudnn_flash.refusal(spec, gpu)
        return AttentionByKernels(None, False, reason=reason) if reason else FlashAttention()
    if implementation is None:
        kernels, reason = _kernels_for(spec, gpu)
        if gpu is not None and kernels is None:
            first_allowed("this attention", "bf16", "emulate", refused=reason)
        return AttentionByKernels(kernels, named=False, reason=reason)
    if implementation not in PALLAS:
        allowed = ", ".join(map(repr, ("emulate", *PALLAS)))
        raise ValueError(
            f"implementation={implementation!r} is unknown. Allowed: {allowed}, or None, which "
            "picks one for the platform."
        )
    reason = PALLAS[implementation].refusal(spec, gpu)
    if reason is not None:
        raise ValueError(
            f"implementation={implementation!r} does not support {reason}. "
            "Use implementation=None or 'emulate'."
        )
    return AttentionByKernels(PALLAS[implementation], named=True)


def _kernels_for(spec: AttentionSpec, gpu: Gpu | None) -> tuple[Pallas | None, str]:
    """Return the kernels that compute this forward on `gpu`, or why there are none."""
    if gpu is None:
        return None, "no GPU is known"
    major = gpu.capability and gpu.capability[0]
    own = [kernels for kernels in PALLAS.values() if kernels.gpus == major]
    reasons = {kernels: kernels.refusal(spec, gpu) for kernels in own or PALLAS.values()}
    can = [kernels for kernels, reason in reasons.items() if reason is None]
    return (can[0], "") if can else (None, "; ".join(dict.fromkeys(filter(None, reasons.values()))))


def why_attention_is_slower(spec: AttentionSpec, heads: int, groups: int, gpu: Gpu) -> str:
    """Explain why attention stays in high precision; ``""`` if FP8 is no slower on `gpu`.

    Args:
      heads, groups: of keys in all sequences, and the heads of queries that share each.
    """
    assert spec.recipe is not None
    if cudnn_flash.refusal_anywhere(spec, gpu.capability):
        return ""  # a loop over blocks would compute it in high precision, too
    kernels, reason = _kernels_for(spec, gpu)
    if kernels:
        reason = kernels.refusal_backward(numerics_of(spec.recipe), spec.depth)
    if not reason:
        sizes = heads, groups, *spec.visible.sizes, spec.depth
        times = [expected_attention(x, sizes, spec.visible.is_causal, gpu) for x in PASSES]
        known = [each for each in times if each is not None]
        gain = sum(t.bf16 for t in known) / sum(t.fp8 for t in known) if known else 1.0
        speed = f"{spec.recipe.name} has {gain:.2f} of the speed of bf16 on {gpu.kind}"
        reason = speed if gain < 1 else ""
    return f"exempt: 'slower' ({reason})" if reason else ""


# Heads, straight and transposed.
Pair: TypeAlias = tuple[jax.Array, jax.Array]


def cast_heads(
    x: jax.Array,
    inverse: jax.Array,
    fmt: Format,
    projection: jax.Array | None = None,
    first: int = 0,
) -> Pair | None:
    """Return `_cast_heads` of these arguments; None if there is no kernel.

    The kernel writes each head straight and transposed, from one read of the result of a
    projection; XLA would transpose heads and tokens first.
    """
    *_, tokens, depth = x.shape
    if tokens % 128 or depth not in (64, 128, 256) or fmt not in HARDWARE_FORMATS:
        return None
    if projection is None:
        in_groups = x.reshape(*x.shape[:2], -1, tokens, depth)
        projection, first = in_groups.transpose(0, 3, 1, 2, 4), 0
    return _cast_heads(x, inverse, fmt, projection, first % projection.shape[-2])


# Kernels are slow to compile, so each is compiled once for all layers of the same shapes.
@partial(jax.jit, static_argnums=(2, 4))
def _cast_heads(
    x: jax.Array, inverse: jax.Array, fmt: Format, projection: jax.Array, first: int
) -> Pair:
    """Return ``cast(x * inverse[..., None], fmt)``, straight and transposed.

    `x` is ``[batch, groups, heads of a group, tokens, depth]``, the third of which may be missing,
    for 1. `projection`, ``[batch, tokens, groups, heads of a group, depth]``, contains it, from
    head `first` of each group on.
    """
    each = x.shape[:-2]

    def by_kernel(x: jax.Array, inverse: jax.Array, projection: jax.Array) -> Pair:
        from jfp8.kernels.hopper.quantize import quantize_heads

        kernel = partial(quantize_heads, first=first, fmt=fmt)
        rule = "b T g R H, b g N T -> b g N T H, b g N H T"
        quantize = divided(f"quantize_heads, {fmt}, {first}", kernel, rule)
        inverse = inverse.reshape(*each[:2], -1, inverse.shape[-1])
        q, q_t = same_varying_axes((quantize(projection, inverse), x))[0]
        return q.reshape(*each, *q.shape[-2:]), q_t.reshape(*each, *q_t.shape[-2:])

    def by_cast(x: jax.Array, inverse: jax.Array, projection: jax.Array) -> Pair:
        del projection
        q = cast(x * inverse[..., None], fmt)
        return q, q.swapaxes(-1, -2)

    return on_platform("cuda", by_kernel, by_cast, x, inverse, projection)
