"""Which backend computes a product: the only file that looks at the device and ranks backends.

A backend is a value in `ON_CUDA` or `ON_TPU`, which holds what it does and what it supports. To add
one, write a file or folder with such a value, and list it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, Literal

import jax
from jax.sharding import AxisType

from jfp8.kernels.backend import Backend, Blocks, Choice, Facts, check_not_refused, facts_of
from jfp8.kernels.blackwell import backend as blackwell
from jfp8.kernels.cost_model import (
    BY_XLA,
    ON_BLACKWELL,
    ON_HOPPER,
    RATES,
    Costs,
    Scales,
    Times,
    Work,
    expected,
    rates_of,
    scales_of,
    work_of,
)
from jfp8.kernels.hopper import backend as hopper
from jfp8.kernels.platforms import by_platform
from jfp8.kernels.tpu import backend as tpu
from jfp8.kernels.xla import bf16_dot as bf16
from jfp8.kernels.xla import f8_dot as xla
from jfp8.matmul import emulate
from jfp8.matmul.spec import HARDWARE_FORMATS, Job, plus_bias
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E5M2, Format
from jfp8.tracing.compat import kernels_are_interpreted
from jfp8.tracing.context import Gpu, Tpu, current_gpu, current_tpu, note

Implementation = Literal[None, "emulate", "xla", "mosaic_gpu", "mosaic_tpu"]
Quantizing = Literal["kernels", "xla"]

# The first that supports the product is used; those that are `first_for` its scales come before all
# others.
ON_CUDA = (
    hopper.BACKEND,
    blackwell.MX_BACKEND,
    blackwell.NVFP4_BACKEND,
    xla.BACKEND,
    bf16.BACKEND,
)
ON_TPU = (tpu.BACKEND, tpu.BLOCK_BACKEND, xla.BACKEND, bf16.BACKEND)
BY_NAME = {
    "emulate": (emulate.BACKEND,),
    "xla": (xla.BACKEND,),
    "mosaic_gpu": (hopper.BACKEND,),
    "mosaic_tpu": (tpu.BACKEND, tpu.BLOCK_BACKEND),
}


def choose(facts: Facts, gpu: Gpu | None) -> Choice:
    """The backend for a product on an NVIDIA GPU; None: a GPU that is not known.

    1. Formats that tensor cores do not support: bf16, in which all stored values are exact.
    2. If the GPU is known: bf16 also for products that are faster in it by the model of
       `pays_off`, and for GPUs without FP8.
    3. One scale per operand: cuBLASLt, by XLA. Scales by row, and in blocks of 128: Pallas kernels
       on Hopper. In blocks of 32, and powers of two in larger ones: cuDNN on Blackwell.
    4. Otherwise scales by row after cuBLASLt's product, and blocks in bf16.

    Models of hardware sums are emulated everywhere.
    """
    if facts.accumulation.startswith("hopper"):
        return Choice(emulate.BACKEND, {})
    facts = replace(facts, accumulation="f32")  # of hardware sums, promoted on the way
    why_no_f8 = _why_no_f8(facts, gpu)
    if why_no_f8 is not None:
        return Choice(bf16.BACKEND, {"f8": why_no_f8})
    refused: dict[str, str] = {}
    for backend in sorted(ON_CUDA, key=lambda b: facts.granularity not in b.first_for):
        if gpu is None and backend.gpus is not None:
            continue
        if not backend.formats.issuperset(facts.formats):
            continue  # another one has them: see `_why_no_f8`
        reason = backend.why_not(facts, gpu)
        if reason is None and facts.formats == (E5M2, E5M2):
            reason = backend.why_not_e5m2
        if reason is None:
            return Choice(backend, refused)
        refused[backend.name] = reason
    raise AssertionError("bf16 takes everything")


def choose_on_tpu(facts: Facts, device: Tpu | None) -> Choice:
    """The backend for a product on a TPU; None: for any, by XLA.

    1. The Pallas kernel, which takes f8 codes with scales for tensors, rows and columns, and
       dequantizes blocks with powers of two to bf16 as it reads them.
    2. By XLA: f8 arrays, which TPU7x multiplies, and others convert to bf16 on the way. What has
       scales that vary along the sum, in bf16.
    """
    if facts.accumulation.startswith("hopper"):
        return Choice(emulate.BACKEND, {})
    facts = replace(facts, accumulation="f32")
    refused: dict[str, str] = {}
    for backend in ON_TPU if device is not None else ON_TPU[2:]:
        if facts.granularity not in backend.granularities and backend in ON_TPU[:2]:
            continue  # the same kernel takes them in another way
        reason = backend.why_not(facts, device)
        if reason is None:
            return Choice(backend, refused)
        refused[backend.name] = reason
    raise AssertionError("bf16 takes everything")


def _why_no_f8(facts: Facts, gpu: Gpu | None) -> str | None:
    if not any(b.formats.issuperset(facts.formats) for b in _made_for(gpu)):
        return "no tensor cores for {} x {}".format(*(fmt.name for fmt in facts.formats))
    if gpu is not None and not gpu.multiplies_f8:
        return f"{gpu.kind} has no FP8 tensor cores"
    blocks = facts.blocks if facts.granularity == "blocks" else ()
    scales = scales_of(block[0] for block in blocks if block is not None)
    if gpu is not None and _faster_in_bf16(facts.sizes, gpu, scales):
        return "FP8 does not pay for a product this small"
    return None


def _made_for(gpu: Gpu | None) -> list[Backend]:
    """The backends for narrow formats on such a GPU; None: those that work on any."""
    major = None if gpu is None or gpu.capability is None else gpu.capability[0]
    return [b for b in ON_CUDA if b is not bf16.BACKEND and b.gpus in (None, major)]


def _faster_in_bf16(sizes: tuple[int, int, int], gpu: Gpu, scales: Scales) -> bool:
    """Whether quantized operands are multiplied faster in bf16; GPUs not listed count as H100."""
    rates = rates_of(gpu.kind) or RATES["H100"]
    times = expected(work_of(sizes, _devices()), rates, scales, _costs(gpu))
    return times.rounded < times.fp8


def _quantized_by_kernels(gpu: Gpu | None, scales: Scales) -> bool:
    """Whether Pallas kernels quantize for products on this GPU.

    On Blackwell those in blocks. Of operands with one scale, cuBLASLt takes any layout there, and
    XLA moves less by not writing them in two.
    """
    if scales in ("blocks", "mx"):
        return hopper.why_no_quantizing(gpu) is None
    return hopper.BACKEND.why_not_on(gpu) is None


def _costs(gpu: Gpu) -> Costs:
    """What quantizing costs on this GPU; see `pays_off`."""
    if hopper.BACKEND.why_not_on(gpu) is None:
        return ON_HOPPER
    return ON_BLACKWELL if hopper.why_no_quantizing(gpu) is None else BY_XLA


def _devices() -> int:
    """The number of devices that divide a product: those of the mesh in effect, or 1."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in axes if kind != AxisType.Manual)


def expected_times(work: Work, scales: Scales) -> Times | None:
    """What the model of `pays_off` expects of a product of all devices together.

    None unless JAX traces for a GPU whose rates the model has.
    """
    gpu = current_gpu()
    rates = None if gpu is None else rates_of(gpu.kind)
    if gpu is None or rates is None:
        return None
    n = _devices()
    work = Work(work.multiplications / n, work.elements / n)
    return expected(work, rates, scales, _costs(gpu))


def product(
    lhs: ScaledArray, rhs: ScaledArray, job: Job, implementation: Implementation
) -> jax.Array:
    """A product by the named backend, or by the best one for the platform it is compiled for.

    Raises:
      ValueError: a model of a tensor core, for formats that it does not multiply.
      NotImplementedError: the named backend cannot compute it.
    """
    facts, gpu = facts_of(lhs, rhs, job), current_gpu()
    modelled = job.accumulation.startswith("hopper")
    if modelled and not HARDWARE_FORMATS.issuperset(facts.formats):
        raise ValueError(
            f"accumulation={job.accumulation!r} models tensor cores that multiply E4M3FN and E5M2, "
            f"but the operands are {lhs.format.name} and {rhs.format.name}. Use accumulation='f32'."
        )
    device = job.tpu or current_tpu(lhs.data, rhs.data)
    if implementation is not None:
        named = BY_NAME[implementation]
        backend = next((b for b in named if facts.granularity in b.granularities), named[0])
        check_not_refused(implementation, backend.why_not(facts, device or gpu))
        with note("cuda", implementation):
            return _plus_bias(backend.multiply, job)(lhs, rhs)
    choice, choice_on_tpu = choose(facts, gpu), choose_on_tpu(facts, device)
    reference = _plus_bias(emulate.emulated, job)
    by_xla = _plus_bias(xla.f8_elsewhere, job)
    if choice.backend is emulate.BACKEND:
        return reference(lhs, rhs)
    return by_platform(
        _plus_bias(choice.backend.multiply, job),
        str(choice),
        reference,
        lhs,
        rhs,
        # AMD's compiler takes f8 arrays, and multiplies them as well as the chip can.
        rocm=reference if xla.BACKEND.why_not(facts, gpu) else by_xla,
        tpu=_plus_bias(choice_on_tpu.backend.multiply, job),
        why_on_tpu=str(choice_on_tpu),
    )


def _plus_bias(
    multiply: Callable[[ScaledArray, ScaledArray, Job], jax.Array], job: Job
) -> Callable[[ScaledArray, ScaledArray], jax.Array]:
    """`multiply` for a `job`. Only the kernel for TPUs adds its bias by itself."""
    if job.bias is None or multiply is tpu.BACKEND.multiply:
        return lambda lhs, rhs: multiply(lhs, rhs, job)
    return lambda lhs, rhs: plus_bias(multiply(lhs, rhs, job), job.bias)


def contraction_last(
    sizes: tuple[int, int, int],
    formats: Set[Format],
    blocks: Set[Blocks],
    accumulation: str,
    implementation: Implementation,
) -> Quantizing | None:
    """What quantizes matrices with the contraction last, for the tensor cores of the current GPU.

    None for products of formats or blocks that they do not take, or that do not pay.

    Args:
      sizes: ``(m, n, k)``.
      formats: those of all quantized tensors.
      blocks: those of scales that vary along the sum.
      accumulation, implementation: see `scaled_matmul`.
    """
    gpu = current_gpu()
    if implementation != "mosaic_gpu":
        if implementation in ("emulate", tpu.BACKEND.name) or gpu is None or not gpu.multiplies_f8:
            return None
    if implementation == "mosaic_gpu" and hopper.BACKEND.why_not_on(gpu) is not None:
        return None  # and the product says why
    if 0 in sizes:
        return None
    scales = scales_of(along for along, _ in blocks)
    kernels = implementation != "xla" and _quantized_by_kernels(gpu, scales)
    if implementation is None and gpu is not None and _faster_in_bf16(sizes, gpu, scales):
        return None
    if accumulation.startswith("hopper") or not _taken(formats, blocks, gpu):
        return None
    return "kernels" if kernels else "xla"


def _taken(formats: Set[Format], blocks: Set[Blocks], gpu: Gpu | None) -> bool:
    """Whether backends for this GPU take all formats and blocks; for Hopper, if none is known."""
    multiplying = [hopper.BACKEND] if gpu is None else _made_for(gpu)
    in_blocks = [b for b in multiplying if "blocks" in b.granularities]
    known = frozenset().union(*(b.formats for b in multiplying))
    return formats <= known and all(any(b.takes(block) for b in in_blocks) for block in blocks)


def quantizing_tpu(x: jax.Array, implementation: Implementation) -> Tpu | None:
    """The TPU on which the operands of a product are quantized in its own way; None: none."""
    device = current_tpu(x)
    if implementation == tpu.BACKEND.name:
        return Tpu("TPU") if device is None and kernels_are_interpreted() else device
    return device if implementation is None else None


def why_not_here(why_not: Callable[[Gpu | None], str | None], *, named: bool) -> str | None:
    """Why kernels do not compute something besides a product; None: they do.

    Args:
      why_not: why they cannot compute it on a given GPU, or None.
      named: whether they are requested. Else they must know the GPU.
    """
    gpu = current_gpu()
    return "no GPU is known" if gpu is None and not named else why_not(gpu)


def may_quantize_by_kernels() -> bool:
    """Whether Pallas kernels quantize anything on the GPU at hand, or are interpreted."""
    interpreted = kernels_are_interpreted()
    return why_not_here(hopper.why_no_quantizing, named=interpreted) is None


def traced_for_gpu() -> bool:
    """Whether the program is traced for an NVIDIA GPU, which likes other orders of operations."""
    return current_gpu() is not None


def made_for_this_gpu(gpus: Mapping[str, int | None]) -> list[str]:
    """The names whose major compute capability is that of the GPU; all if it is that of none."""
    gpu = current_gpu()
    major = gpu and gpu.capability and gpu.capability[0]
    return [name for name, made_for in gpus.items() if made_for == major] or list(gpus)


def grouped_kernels(
    why_not: Callable[[Gpu | None], str | None], implementation: Implementation
) -> bool:
    """Whether Hopper's kernels compute a grouped product.

    Small ones too: the ways in bf16 move two to three times as many bytes.

    Args:
      why_not: see `why_not_here`.
      implementation: see `scaled_ragged_dot`.

    Raises:
      NotImplementedError: they are requested, but cannot compute it.
    """
    if implementation not in (None, hopper.BACKEND.name):
        return False
    reason = why_not_here(why_not, named=implementation is not None)
    if implementation is not None:
        check_not_refused(implementation, reason)
    return reason is None


def may_go_by_rounds(
    formats: Set[Format],
    blocks: Set[Blocks],
    accumulation: str,
    implementation: Implementation,
) -> bool:
    """Whether a grouped product of these may have a backend of `in_rounds`; see `_taken`."""
    gpu = current_gpu()
    if implementation is not None or accumulation.startswith("hopper"):
        return False
    return gpu is not None and gpu.multiplies_f8 and _taken(formats, blocks, gpu)


def in_rounds(facts: Facts) -> Backend | None:
    """The backend that multiplies a tile of each group at a time, in a narrow format.

    None if there is none. Small ones too: see `grouped_kernels`.
    """
    gpu = current_gpu()
    if gpu is None or not gpu.multiplies_f8 or facts.accumulation.startswith("hopper"):
        return None
    facts = replace(facts, accumulation="f32")
    for backend in sorted(_made_for(gpu), key=lambda b: facts.granularity not in b.first_for):
        twice_e5m2 = facts.formats == (E5M2, E5M2) and backend.why_not_e5m2
        if backend.why_not(facts, gpu) is None and not twice_e5m2:
            return backend
    return None


def tiles_or_groups(
    by_tiles: Callable[..., jax.Array],
    by_groups: Callable[..., jax.Array],
    *operands: Any,
    accumulation: str,
    implementation: Implementation,
    by_rounds: tuple[Backend, Callable[..., jax.Array]] | None = None,
) -> jax.Array:
    """A grouped product without kernels for it.

    A loop over tiles, JAX's own product, in bf16, or a tile of each group at a time by a backend.
    """
    if implementation is None and by_rounds is not None:
        backend, function = by_rounds
        return by_platform(
            function, f"{backend.name}: a tile of each group at a time", by_tiles, *operands
        )
    if implementation == "emulate" or (implementation is None and accumulation != "f32"):
        return by_tiles(*operands)
    if implementation is None:
        why = "bf16: no FP8 kernel for these groups on this GPU"
        return by_platform(by_groups, why, by_tiles, *operands)
    check_not_refused(implementation, xla.BACKEND.why_not_sums(accumulation))
    with note("cuda", "bf16: JAX's own ragged product"):
        return by_groups(*operands)


def check_implementation(implementation: str | None) -> None:
    """Raise ``ValueError`` unless `implementation` is None or names a backend."""
    if implementation is not None and implementation not in BY_NAME:
        allowed = ", ".join(map(repr, BY_NAME))
        raise ValueError(
            f"implementation={implementation!r} is unknown. Allowed: {allowed}, or None, which "
            "picks one for the platform."
        )
