"""Attention on GPUs by Pallas kernels, or by cuDNN in high precision."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jfp8.kernels.backend import check_not_refused
from jfp8.kernels.cost_model import PASSES
from jfp8.kernels.cuda_backends import known_gpu
from jfp8.kernels.flash.problem import Stored, Vectors
from jfp8.kernels.hopper.backend import HOPPER as FAMILIES
from jfp8.kernels.hopper.backend import why_none_for
from jfp8.kernels.on_platform import on_platform
from jfp8.kernels.partitioning import divided
from jfp8.kernels.xla import cudnn_flash
from jfp8.kernels.xla.cudnn_flash import FlashAttention
from jfp8.matmul.planner import Planner
from jfp8.matmul.spec import HARDWARE_FORMATS
from jfp8.products.flash.blocks import Both, Gradients, Softmax
from jfp8.products.flash.mask import Visible
from jfp8.products.flash.numerics import Numerics, Quantized, format_of, numerics_of
from jfp8.products.flash.plan import AttentionSpec, Reference
from jfp8.scaling.casts import cast
from jfp8.scaling.formats import E4M3FN, Format
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.compat import same_varying_axes
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note

SIZES_BACKWARD = (64, 128)


@dataclass(frozen=True)
class Pallas:
    """Hold the kernels for a kind of GPU."""

    name: str  # of the implementation
    folder: str  # that has them; JAX before 0.11.2 cannot import it
    gpus: int  # the major compute capability that they are for
    family: str  # of these GPUs
    sizes: tuple[int, ...]  # of a head
    masks: bool  # whether they take some

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"jfp8.kernels.{self.folder}.attention")

    def refusal(self, spec: AttentionSpec, gpu: Gpu | None) -> str | None:
        """Tell why they do not compute the reference's forward pass on `gpu`; None if they do."""
        numerics = numerics_of(spec.recipe)
        if reason := why_none_for(gpu, {self.gpus: self.family}, "attention"):
            return reason
        known = "masks, segments, is_causal" if self.masks else "is_causal"
        for name in ("bias",) if self.masks else ("mask", "segments", "bias"):
            if getattr(spec.visible, name) is not None:
                return f"{name}: the kernels know {known}, local_window_size, lengths and sinks"
        if spec.depth not in self.sizes:
            return f"heads of {spec.depth} numbers: the kernels are for {_listed(self.sizes)}"
        if not spec.scale > 0:
            return f"scale={spec.scale}: the kernels are for positive ones; negate the queries"
        stored = numerics.query.first, numerics.key.first, numerics.value.first
        if {*map(format_of, stored)} - HARDWARE_FORMATS or numerics.weights[0] != E4M3FN:
            return "a recipe whose forward products are not of E4M3FN and E5M2, with P in E4M3FN"
        return None

    def refusal_backward(self, numerics: Numerics, depth: int) -> str | None:
        """Tell why there are none for the backward pass of what `refusal` does not refuse."""
        if depth not in SIZES_BACKWARD:
            sizes = _listed(SIZES_BACKWARD)
            return f"heads of {depth} numbers: the kernels of the backward pass are for {sizes}"
        of = numerics
        stored = of.query.second, of.key.second, of.value.second, of.grad.first, of.grad.second
        if {*map(format_of, stored), *of.scores} - HARDWARE_FORMATS or of.weights[1] != E4M3FN:
            return "a recipe whose backward products are not of E4M3FN and E5M2, with P in E4M3FN"
        return None

    def forward(
        self,
        q: Quantized,
        k: Quantized,
        v: Quantized,
        visible: Visible,
        *,
        scale: float,
        dtype: jax.typing.DTypeLike,
    ) -> Softmax:
        """Compute `blocks.forward`, with the result in `dtype`."""
        groups, rows = q.data.shape[2:4]
        options = _options(groups, visible, scale, dtype)
        hidden, (of_queries, _) = _hidden(k, visible), visible.lengths

        def attend(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self._module.attention_forward(*x[:6], **_with_mask(hidden, x[6:]), **options)

        operands = _heads(q.data), k.data, v.turned(), _heads(q.scale), k.scale, v.scale
        rule = forward_rule(groups, **hidden)
        by_parts = divided(f"attention, {self.name}, {options}", attend, rule)
        out, log_sum = by_parts(*operands, *hidden.values())
        if of_queries is not None:
            real = jnp.arange(rows)[None, None] < of_queries[:, None, None]
            out = jnp.where(real[..., None], out, 0)
            log_sum = jnp.where(real, log_sum, -jnp.inf)
        return Softmax(out.reshape(q.data.shape), log_sum.reshape(q.scale.shape))

    def backward(
        self,
        operands: Both,
        log_sum: jax.Array,
        dot: jax.Array,
        visible: Visible,
        *,
        scale: float,
        numerics: Numerics,
        dtype: jax.typing.DTypeLike,
    ) -> Gradients:
        """Compute `blocks.backward`, with the results in `dtype`."""
        (q, q_2), (k, k_2), (_, v), (grad, grad_2) = operands
        groups, hidden = q.data.shape[2], _hidden(k, visible)
        matrices = map(_heads, (q.data, grad.data, q_2.turned(), grad_2.turned()))
        q_data, grad_data, q_t, grad_t = matrices
        stored = Stored(q_data, k.data, v.data, grad_data, q_t, k_2.turned(), grad_t)
        of_queries = map(_heads, (q.scale, grad.scale, q_2.scale, grad_2.scale, log_sum, dot))
        q_scale, grad_scale, q_t, grad_t, *others = of_queries
        vectors = Vectors(q_scale, k.scale, v.scale, grad_scale, q_t, k_2.scale, grad_t, *others)
        options = _options(groups, visible, scale, dtype) | {"formats": numerics.scores}

        def differentiate(*x: jax.Array) -> tuple[jax.Array, ...]:
            n, m = len(stored), len(stored) + len(vectors)
            more = _with_mask(hidden, x[m:])
            operands = Stored(*x[:n]), Vectors(*x[n:m])
            return self._module.attention_backward(*operands, **more, **options)

        rule = backward_rule(groups, **hidden)
        by_parts = divided(f"attention_backward, {self.name}, {options}", differentiate, rule)
        dq, dk, dv, largest = by_parts(*stored, *vectors, *hidden.values())
        return Gradients(dq.reshape(q.data.shape), dk, dv, None, jnp.max(largest))


HOPPER = Pallas("mosaic_gpu", "hopper", 9, FAMILIES[9], (64, 128, 256), masks=True)
_FAMILY = "Blackwell (compute capability 10.x)"
BLACKWELL = Pallas("mosaic_gpu_blackwell", "blackwell", 10, _FAMILY, (64, 128), masks=False)


def _listed(sizes: tuple[int, ...]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}"


def _heads(x: jax.Array) -> jax.Array:
    """Return ``[batch, heads, groups, ...]`` as ``[batch, heads * groups, ...]``."""
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


def _hidden(k: Quantized, visible: Visible) -> dict[str, jax.Array]:
    found: dict[str, jax.Array] = {}
    if (lengths := visible.lengths[1]) is not None:
        lengths = jnp.broadcast_to(lengths[:, None], k.data.shape[:2])
        found["key_lengths"] = lengths.astype(jnp.int32)
    if visible.mask is not None:
        found["mask"] = _heads(visible.mask)
    if visible.segments is not None:
        of_query, of_key = visible.segments
        found |= {"query_segments": of_query[:, 0, 0, :, 0], "key_segments": of_key[:, 0, 0, 0]}
    return found


def _with_mask(hidden: dict[str, jax.Array], given: Sequence[jax.Array]) -> dict[str, Any]:
    """Return the parts of `hidden` that a device has, with segments as a mask, to become bits."""
    found: dict[str, Any] = dict(zip(hidden, given, strict=True))
    if "query_segments" in found:
        of_query, of_key = found.pop("query_segments"), found.pop("key_segments")
        same = of_query[:, None, :, None] == of_key[:, None, None]
        found["mask"] = same & found["mask"] if "mask" in found else same
    return found


# Rules for `partitioning.divided`: devices may divide sequences and heads of ``[B, N, T, H]``. They
# have the dimensions of what `_hidden` returns.


def forward_rule(groups: int, **hidden: jax.Array | None) -> str:
    """Return the rule of `attention_forward`."""
    k = _of_keys(groups)
    matrices, scales = ["b n T H", f"{k} S H", f"{k} H S"], ["b n T", f"{k} S", f"{k} S"]
    operands = [*matrices, *scales, *_of_hidden(groups, hidden)]
    return f"{', '.join(operands)} -> b n T H, b n T"


def backward_rule(groups: int, **hidden: jax.Array | None) -> str:
    """Return the rule of `attention_backward`, with the leaves of its operands."""
    q, k = "b n", _of_keys(groups)
    tokens = [f"{k} S" if name[0] in "kv" else f"{q} T" for name in Stored._fields]
    matrices = [
        f"{axes[:-1]}H {axes[-1]}" if name.endswith("_t") else f"{axes} H"
        for name, axes in zip(Stored._fields, tokens, strict=True)
    ]
    operands = [*matrices, *tokens, f"{q} T", f"{q} T", *_of_hidden(groups, hidden)]
    return f"{', '.join(operands)} -> {q} T H, {k} S H, {k} S H, {q} T"


def _of_keys(groups: int) -> str:
    return "b n" if groups == 1 else f"b n/{groups}"


def _of_hidden(groups: int, hidden: dict[str, jax.Array | None]) -> list[str]:
    """Name the dimensions of each mask in `hidden`. No device splits dimensions of size 1."""
    names = {"key_lengths": _of_keys(groups), "query_segments": "b T", "key_segments": "b S"}
    if hidden.get("mask") is not None:
        each = zip("bnTS", ("B", "N", "Q", "K"), hidden["mask"].shape, strict=True)
        names["mask"] = " ".join(name if size > 1 else one for name, one, size in each)
    return [names[name] for name, x in hidden.items() if x is not None]


PALLAS = {kernels.name: kernels for kernels in (HOPPER, BLACKWELL)}


@dataclass(frozen=True)
class AttentionByKernels(Reference):
    """Plan attention on a GPU: if it is named, nothing else computes."""

    kernels: Pallas | None = None  # None: the reference
    reason: str = ""  # of the reference: why no kernels were chosen

    @property
    def cast_heads(self) -> Callable[..., Any] | None:  # pyrefly: ignore[bad-override]
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
        elsewhere = self.kernels.name if self.named else reference
        compute = getattr(self.kernels, which)
        with note("cuda", self.kernels.name):
            return on_platform("cuda", partial(compute, **options), elsewhere, *operands)


def plan_attention(spec: AttentionSpec) -> Reference:
    """Return the implementation that is asked for, or the best that computes what `blocks` does.

    Raises:
      ValueError: the one that is asked for does not compute this.
    """
    gpu, implementation = known_gpu(spec.device), spec.implementation
    if implementation == "bf16":
        return spec.reference()
    if spec.recipe is None:
        reason = cudnn_flash.refusal(spec, gpu)
        return AttentionByKernels(reason=reason) if reason else FlashAttention()
    if implementation is None:
        kernels, reason = _kernels_for(spec, gpu)
        if gpu is not None and kernels is None:
            first_allowed("this attention", "bf16", "emulate", refused=reason)
        return AttentionByKernels(False, kernels, reason)
    check_not_refused(implementation, PALLAS[implementation].refusal(spec, gpu), ValueError)
    return AttentionByKernels(True, PALLAS[implementation])


def _kernels_for(spec: AttentionSpec, gpu: Gpu | None) -> tuple[Pallas | None, str]:
    """Return the kernels that compute this forward on `gpu`, or why there are none."""
    if gpu is None:
        return None, "no GPU is known"
    major = gpu.capability and gpu.capability[0]
    own = [kernels for kernels in PALLAS.values() if kernels.gpus == major]
    reasons = {kernels: kernels.refusal(spec, gpu) for kernels in own or PALLAS.values()}
    can = [kernels for kernels, reason in reasons.items() if reason is None]
    return (can[0], "") if can else (None, "; ".join(dict.fromkeys(filter(None, reasons.values()))))


def why_attention_is_slower(spec: AttentionSpec, heads: int, groups: int, planner: Planner) -> str:
    """Explain why attention is slower in FP8 on a GPU: see `Planner.why_attention_is_slower`."""
    gpu: Any = planner.device
    assert spec.recipe is not None
    if cudnn_flash.refusal_anywhere(spec, gpu.capability):
        return ""  # a loop over blocks would compute it in high precision, too
    kernels, reason = _kernels_for(spec, gpu)
    if kernels:
        reason = kernels.refusal_backward(numerics_of(spec.recipe), spec.depth)
    if not reason:
        sizes = heads, groups, *spec.visible.sizes, spec.depth
        times = [planner.expected_attention(x, sizes, spec.visible.is_causal) for x in PASSES]
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
