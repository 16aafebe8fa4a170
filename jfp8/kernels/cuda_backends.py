"""The choice of a backend for an NVIDIA GPU: the only file that ranks them.

A backend is a value in `BACKENDS`, which holds what it does and what it supports. To add one, write
a file or folder with such a value, and list it here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import AxisType

from jfp8.kernels import cost_model
from jfp8.kernels.backend import REFERENCE, Backend, Choice, Facts, facts_of, first_that_can
from jfp8.kernels.blackwell import backend as blackwell
from jfp8.kernels.cost_model import scales_of
from jfp8.kernels.hopper import backend as hopper
from jfp8.kernels.rates import RATES, Rates, rates_of
from jfp8.kernels.verdicts import measured_gains
from jfp8.kernels.xla import bf16_dot, f8_dot
from jfp8.matmul.explained import explained
from jfp8.matmul.planner import Planner, Scales, Times, Work
from jfp8.matmul.spec import MatmulSpec
from jfp8.quantizers.quantizer import Quantizer
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.formats import E5M2
from jfp8.tracing.devices import Device, Gpu

# The first that supports the product is used; those that are `first_for` its scales come before all
# others.
BACKENDS = (
    hopper.BACKEND,
    blackwell.MX_BACKEND,
    blackwell.NVFP4_BACKEND,
    *blackwell.ON_GEFORCE,
    f8_dot.BACKEND,
    bf16_dot.BACKEND,
    REFERENCE,
)
WITHOUT_F8 = (bf16_dot.BACKEND, REFERENCE)


def known_gpu(device: Device) -> Gpu | None:
    """Return the GPU, if its kind is known."""
    return device if isinstance(device, Gpu) and device.kind else None


def choose(facts: Facts, gpu: Gpu | None) -> Choice:
    """Return the backend for a matmul on an NVIDIA GPU, or on an unknown one if `gpu` is None.

    1. Formats that tensor cores do not support: bf16, in which all stored values are exact.
    2. If the GPU is known: bf16 also for products that are faster in it by the model of
       `cost_model`, and for GPUs without FP8.
    3. One scale per operand: cuBLASLt, by XLA. Scales by row, and in blocks of 128: Pallas kernels
       on Hopper. In blocks of 32, and powers of two in larger ones: cuDNN on Blackwell.
    4. Otherwise scales by row after cuBLASLt's product, and blocks in bf16.
    """
    facts = replace(facts, accumulation="f32")  # hardware sums are promoted on the way
    refused: dict[str, str] = {}
    why_no_f8 = _why_no_f8(facts, gpu)
    if why_no_f8 is not None:
        known, refused = [*WITHOUT_F8], {"f8": why_no_f8}
    else:
        # A backend that lacks a format is not the only one: see `_why_no_f8`.
        known = [b for b in BACKENDS if b.formats.issuperset(facts.formats)]
        known = [b for b in known if gpu is not None or b.gpus is None]
        known = [b for b in known if b.proof is None or b.is_for(gpu)]
    return first_that_can(_ranked(known, facts, gpu), refused)


class Explained(Planner):
    """Compute by the reference, and note for a report on a CPU what an NVIDIA GPU would choose."""

    def multiply(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        backend = spec.implementation or str(choose(facts_of(lhs, rhs, spec), None))
        with explained(backend, lhs, rhs):
            return super().multiply(lhs, rhs, spec)


def _ranked(
    backends: Iterable[Backend], facts: Facts, gpu: Gpu | None
) -> Iterator[tuple[Backend, str | None]]:
    """Give backends, the best first, with why they do not multiply; None if they do."""
    for backend in sorted(backends, key=lambda b: facts.granularity not in b.first_for):
        reason = backend.why_not(facts, gpu)
        if reason is None and facts.formats == (E5M2, E5M2):
            reason = backend.why_not_e5m2
        yield backend, reason


def _why_no_f8(facts: Facts, gpu: Gpu | None) -> str | None:
    if not any(b.formats.issuperset(facts.formats) for b in _made_for(gpu)):
        return "no tensor cores for {} x {}".format(*(fmt.name for fmt in facts.formats))
    if gpu is not None and not gpu.multiplies_f8:
        return f"{gpu.kind} has no FP8 tensor cores"
    blocks = facts.blocks if facts.granularity == "blocks" else ()
    scales = scales_of([block for block in blocks if block is not None])
    if facts.granularity == "rows":
        scales = "rows"
    if gpu is not None and _faster_in_bf16(facts.sizes, gpu, scales):
        return "FP8 does not pay for a product this small"
    return None


def _made_for(gpu: Gpu | None) -> list[Backend]:
    """Return the backends for narrow formats on `gpu`, or on every GPU if it is None."""
    return [b for b in BACKENDS if b not in WITHOUT_F8 and b.is_for(gpu)]


def _faster_in_bf16(sizes: tuple[int, int, int], gpu: Gpu, scales: Scales) -> bool:
    """Return whether bf16 multiplies quantized operands faster; unlisted GPUs count as H100."""
    rates = rates_of(gpu.kind) or RATES["H100"]
    times = times_of(cost_model.work_of(sizes, devices()), rates, scales, gpu)
    return times.rounded < times.fp8


def times_of(work: Work, rates: Rates, scales: Scales, gpu: Gpu) -> Times:
    """Return the expected times. Where this card was timed, FP8's are the model's, corrected.

    The correction is ``measured gain / expected gain`` of the layers that were timed, weighted by
    the inverse square of their distance in size and narrowness. The model keeps what it knows of
    other shapes: narrow layers move more bytes.
    """
    costs = cost_model.ON_HOPPER
    if hopper.BACKEND.why_not_on(gpu) is not None:
        costs = cost_model.costs_on(gpu.capability, hopper.why_no_quantizing(gpu) is None)
    expected = lambda work: cost_model.expected(work, rates, scales, costs)
    times, measured = expected(work), measured_gains(gpu.kind, scales)
    if not measured:
        return times
    corrections, weights = [], []
    for (m, n), gain in measured.items():
        timed = cost_model.work_of((m, n, n))
        layer = expected(timed)
        corrections.append(gain * layer.fp8 / layer.bf16)
        apart = np.subtract(_coordinates(work), _coordinates(timed))
        weights.append(1 / (np.sum(apart**2) + 1e-9))  # finite where the layer itself was timed
    return replace(times, fp8=times.fp8 / float(np.average(corrections, weights=weights)))


def _coordinates(work: Work) -> tuple[float, float]:
    """Return the logarithms of the edge of a cube with as much work, and of how narrow it is."""
    size = math.log(max(work.multiplications, 1.0)) / 3
    return size, math.log(max(work.elements, 1.0)) - 2 * size


def devices() -> int:
    """Return the number of devices over which the mesh in effect shards a matmul, or 1."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in axes if kind != AxisType.Manual)


def quantizing_k_major(
    recipe: Recipe, sizes: tuple[int, int, int], gpu: Gpu | None, implementation: str | None
) -> bool | None:
    """Return True if kernels quantize matrices with the contraction last, False if XLA does.

    None for products of formats or blocks that the GPU's tensor cores do not take, or that do not
    pay. A GPU that is not known counts as a Hopper. `sizes` are ``(m, n, k)``.
    """
    if implementation != "mosaic_gpu" and (gpu is None or not gpu.multiplies_f8):
        return None
    if implementation == "mosaic_gpu" and hopper.BACKEND.why_not_on(gpu) is not None:
        return None  # and the product says why
    if 0 in sizes or recipe.accumulation.startswith("hopper"):
        return None
    quantizers = recipe.resolved().quantizers()
    scales = scales_in(quantizers)
    # On Blackwell those in blocks: of one scale cuBLASLt takes any layout, so XLA writes only one.
    families = None if scales in ("blocks", "mx") else hopper.HOPPER
    kernels = implementation != "xla" and hopper.why_no_quantizing(gpu, families) is None
    if implementation is None and gpu is not None and _faster_in_bf16(sizes, gpu, scales):
        return None
    return kernels if are_taken(quantizers, gpu) else None


def may_go_by_rounds(recipe: Recipe, gpu: Gpu | None) -> bool:
    """Return whether `backend_in_rounds` may choose the backend of a grouped matmul."""
    if gpu is None or not gpu.multiplies_f8 or recipe.accumulation.startswith("hopper"):
        return False
    return are_taken(recipe.resolved().quantizers(), gpu)


def backend_in_rounds(facts: Facts, gpu: Gpu | None) -> Backend | None:
    """Return the backend that multiplies a tile of each group at a time, in a narrow format.

    None if there is none. Small ones too: bf16 moves two to three times as many bytes.
    """
    if gpu is None or not gpu.multiplies_f8 or facts.accumulation.startswith("hopper"):
        return None
    facts = replace(facts, accumulation="f32")
    refusals = _ranked(_made_for(gpu), facts, gpu)
    return next((backend for backend, reason in refusals if reason is None), None)


def scales_in(quantizers: Collection[Quantizer]) -> Scales:
    """Return the kind of the scales of quantizers."""
    in_rows = {(0, 1) for q in quantizers if q.spans_rows}
    return scales_of({q.block for q in quantizers if q.block} | in_rows)


def are_taken(quantizers: Collection[Quantizer], gpu: Gpu | None) -> bool:
    """Return whether backends for this GPU, by default Hopper, take all formats and blocks."""
    blocks = {q.block for q in quantizers if q.block}
    multiplying = [hopper.BACKEND] if gpu is None else _made_for(gpu)
    in_blocks = [b for b in multiplying if "blocks" in b.granularities]
    known = frozenset().union(*(b.formats for b in multiplying))
    taken = all(any(b.takes(block) for b in in_blocks) for block in blocks)
    return taken and known.issuperset(q.fmt for q in quantizers)
