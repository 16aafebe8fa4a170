"""The planner for NVIDIA GPUs, and on any device for ``implementation="xla"`` and ``"bf16"``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels import cuda_backends as backends
from jfp8.kernels.backend import check_not_refused, facts_of
from jfp8.kernels.cuda_backends import known_gpu
from jfp8.kernels.grouped_kernels import GroupedKernels, why_not_grouped_kernels
from jfp8.kernels.hopper import backend as hopper
from jfp8.kernels.k_major import k_major
from jfp8.kernels.on_platform import on_cuda
from jfp8.kernels.partitioning import divided
from jfp8.kernels.quantize_and_transpose import found_in, has_kernel
from jfp8.kernels.rates import PEAKS, RATES, name_of, rates_of
from jfp8.kernels.xla import bf16_dot, f8_dot
from jfp8.kernels.xla.grouped_by_xla import GroupedByXla
from jfp8.matmul.planner import Planner, Scales, Times, Work
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.conv import ConvSpec
from jfp8.products.dot_general import DotSpec
from jfp8.products.ragged.dot import TILE, GroupedPlan, GroupedSpec, tile_height
from jfp8.quantizers.quantizer import Delayed, Quantizer
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.device import explicit_mesh
from jfp8.tracing.devices import Gpu
from jfp8.tracing.few_kernels import mergeable
from jfp8.tracing.notes import note

# States that are stacked at once. XLA's time to compile kernels of many parameters is quadratic in
# them: a training step of 12 unrolled Llama layers, 84 matmuls, takes half as long with eight.
STACKED = 8
OF_PEAK = 0.9  # memory bandwidth of elementwise kernels of an H100, relative to its data sheet
NAMED = {backend.name: backend for backend in (hopper.BACKEND, f8_dot.BACKEND, bf16_dot.BACKEND)}


class Cuda(Planner):
    """Compute by the best backend for an NVIDIA GPU, or by the one that is named."""

    device: Any = None  # a `Gpu`, unless an implementation is named elsewhere
    rated = tuple(RATES)

    def multiply(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        facts, gpu = facts_of(lhs, rhs, spec), known_gpu(spec.device)
        if spec.implementation is not None:
            backend = NAMED[spec.implementation]
            if backend is bf16_dot.BACKEND and facts.accumulation == "f32_every_128":
                facts = replace(facts, accumulation="f32")
            check_not_refused(backend.name, backend.why_not(facts, gpu))
            with note("cuda", backend.name):
                return backend.multiply(lhs, rhs, spec)
        choice, emulate = backends.choose(facts, gpu), super().multiply
        compute = lambda lhs, rhs: choice.backend.multiply(lhs, rhs, spec)
        reference = lambda lhs, rhs: emulate(lhs, rhs, spec)
        return on_cuda(compute, reference, lhs, rhs, why=str(choice))

    def plan(self, spec: Any) -> Any:
        options = spec.options
        if options.implementation in ("xla", "bf16") and not isinstance(self.device, Gpu):
            reference = super().plan(spec)
            is_grouped = isinstance(spec, GroupedSpec)
            return replace(reference, operation=GroupedByXla) if is_grouped else reference
        if isinstance(spec, DotSpec):
            return k_major(spec) or super().plan(spec)
        if isinstance(spec, GroupedSpec):
            return _grouped(spec)
        assert isinstance(spec, ConvSpec)
        if first_allowed("this convolution", "bf16", "emulate") == "emulate":
            return super().plan(spec)
        # XLA has no FP8 convolution. Every f8 value is a bf16 value, so bf16 is exact.
        return replace(spec.reference(), narrow=np.dtype(jnp.bfloat16))

    def grouped_in_high_precision(self, reference: Any) -> Any:
        return GroupedByXla

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return ``x + y``.

        cuBLASLt adds `x` itself while it writes `y`. Its results are matrices, so the sum is one:
        otherwise XLA would copy `x` first, to overwrite it.
        """
        if explicit_mesh() is not None or known_gpu(self.device) is None:
            return x + y

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            rows = lambda x: x.reshape(-1, x.shape[-1])
            return (rows(x) + rows(y)).reshape(x.shape)

        dims = " ".join(f"d{i}" for i in range(x.ndim))
        return divided("residual_sum", add, f"{dims}, {dims} -> {dims}")(x, y)

    def over_stacked(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """Apply `function` to stacks of `arguments`, if alike: in few sets of small kernels."""
        alike: dict[Any, list[int]] = {}
        for i, each in enumerate(arguments):
            leaves, structure = jax.tree.flatten(each)
            # The class determines what `vmap` maps: stacked with it, all would be mapped.
            alike.setdefault((structure, *((type(x), jax.typeof(x)) for x in leaves)), []).append(i)
        results: dict[int, Any] = {}
        for all_places in alike.values():
            for start in range(0, len(all_places), STACKED):
                places = all_places[start : start + STACKED]
                group = [arguments[i] for i in places]
                if len(group) == 1:
                    results[places[0]] = function(*group[0])
                    continue
                stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *group)
                found, structure = jax.tree.flatten(function(*stacked))
                rows = zip(*map(jnp.unstack, found), strict=True)
                results |= zip(places, map(structure.unflatten, rows), strict=True)
        return [results[i] for i in range(len(arguments))]

    def merged(self, tree: Any) -> Any:
        return mergeable(tree)

    def quantizes_by_kernels(self) -> bool:
        return hopper.why_no_quantizing(self.device) is None

    def amax_by_kernel(
        self, x: jax.Array, quantizer: Quantizer | None, state: AmaxState
    ) -> jax.Array | None:
        is_matrix = x.ndim > 1 and x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        if explicit_mesh(x) is not None or not is_matrix:
            return None
        if not isinstance(quantizer, Delayed) or not has_kernel(quantizer):
            return None
        found = lambda: found_in(quantizer.algo, None, x, state["amax_history"])
        return found() if self.quantizes_by_kernels() else None

    def expected_times(self, work: Work, scales: Scales) -> Times | None:
        rates = rates_of(self.device.kind)
        if rates is None:
            return None
        work = Work(*(each / backends.devices() for each in work))
        return backends.times_of(work, rates, scales, self.device)

    def expected_pass(self, moved: float) -> float | None:
        if (name := name_of(self.device.kind)) is None:
            return None
        return moved / (backends.devices() * 1e12 * OF_PEAK * PEAKS[name].memory)

    def expected_gain(self, work: Work, quantizers: Collection[Quantizer], in_f8: bool) -> float:
        times = self.expected_times(work, backends.scales_in(quantizers))
        if times is None:
            return super().expected_gain(work, quantizers, in_f8)
        has_products = in_f8 and backends.are_taken(quantizers, self.device)
        return times.gain if has_products else times.bf16 / times.rounded


def _grouped(spec: GroupedSpec) -> GroupedPlan:
    options, gpu = spec.options, known_gpu(spec.options.device)
    named = options.implementation == hopper.BACKEND.name
    if named or (options.implementation is None and gpu is not None):
        # Small ones, too: bf16 moves two to three times as many bytes.
        reason = why_not_grouped_kernels(options.recipe, spec.has_quantized_rhs, gpu)
        if named:
            check_not_refused(options.implementation, reason)
        if reason is None and spec.height in (None, TILE):
            return GroupedPlan(TILE, GroupedKernels)
    at_once = options.implementation is None and backends.may_go_by_rounds(options.recipe, gpu)
    height = spec.height or tile_height(options.recipe, spec.rows, spec.groups, at_once=at_once)
    return GroupedPlan(height, GroupedByXla)
