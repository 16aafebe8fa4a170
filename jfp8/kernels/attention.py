"""The planner of attention on GPUs: Pallas kernels, or cuDNN in high precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jfp8.kernels.cast_heads import cast_heads
from jfp8.kernels.cuda_backends import known_gpu
from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.pallas_attention import BLACKWELL, HOPPER
from jfp8.kernels.xla import cudnn_flash
from jfp8.kernels.xla.cudnn_flash import FlashAttention
from jfp8.products.flash.numerics import Numerics
from jfp8.products.flash.plan import AttentionSpec
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.notes import note

PALLAS = {kernels.name: kernels for kernels in (HOPPER, BLACKWELL)}


@dataclass(frozen=True)
class AttentionByKernels:
    """Plan attention on a GPU, with the methods of the core's `Reference`."""

    kernels: str | None  # one of `PALLAS`; None: the reference
    named: bool  # whether it was asked for: then nothing else computes
    reason: str = ""  # of the reference: why no kernels were chosen
    whole = None

    @property
    def cast_heads(self) -> Callable[..., Any] | None:
        """Quantizes heads for kernels that take operands straight and transposed."""
        return cast_heads if self.kernels in PALLAS else None

    def forward(self, reference: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Compute ``reference(*operands)``, or what the kernels make of `operands`."""
        kernels = None if self.kernels is None else PALLAS[self.kernels].forward
        return self._compute(reference, kernels, operands, options)

    def backward(
        self, reference: Callable[..., Any], *operands: Any, numerics: Numerics, **options: Any
    ) -> Any:
        """Compute the same of the backward pass; the first of `operands` is a `blocks.Both`."""
        by, kernels = self, None
        if by.kernels is not None:
            kernels = PALLAS[by.kernels].backward
            depth = operands[0].query[0].data.shape[-1]
            reason = PALLAS[by.kernels].refusal_backward(numerics, depth)
            if reason is not None:
                by = AttentionByKernels(None, named=True, reason=reason)
        return by._compute(reference, kernels, operands, options | {"numerics": numerics})

    def _compute(
        self,
        reference: Callable[..., Any],
        kernels: Callable[..., Any] | None,
        operands: Any,
        options: dict[str, Any],
    ) -> Any:
        if self.kernels is None or kernels is None:
            with note("cuda", f"bf16: {self.reason}" if self.reason else "emulate"):
                return reference(*operands)
        reason = (
            f"implementation={self.kernels!r} runs on CUDA, and this program is compiled for "
            "another platform. Use implementation=None or 'emulate'."
        )
        elsewhere = reason if self.named else reference
        with note("cuda", self.kernels):
            return on_platform("cuda", partial(kernels, **options), elsewhere, *operands)


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
        if gpu is None:
            return AttentionByKernels(None, named=False, reason="no GPU is known")
        major = gpu.capability and gpu.capability[0]
        own = [kernels for kernels in PALLAS.values() if kernels.gpus == major]
        reasons = {kernels.name: kernels.refusal(spec, gpu) for kernels in own or PALLAS.values()}
        can = [name for name, reason in reasons.items() if reason is None]
        if can:
            return AttentionByKernels(can[0], named=False)
        different = dict.fromkeys(filter(None, reasons.values()))
        reason = "; ".join(different)
        first_allowed("this attention", "bf16", "emulate", refused=reason)
        return AttentionByKernels(None, named=False, reason=reason)
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
    return AttentionByKernels(implementation, named=True)
