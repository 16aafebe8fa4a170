"""The planner for NVIDIA GPUs, and on any device for ``implementation="xla"`` and ``"bf16"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfp8.kernels import rates as rates
from jfp8.kernels.attention import why_attention_is_slower as why_attention_is_slower
from jfp8.kernels.backend import check_not_refused, facts_of
from jfp8.kernels.cuda_backends import choose, known_gpu, may_go_by_rounds
from jfp8.kernels.cuda_backends import expected_attention as expected_attention
from jfp8.kernels.cuda_backends import expected_gain as expected_gain
from jfp8.kernels.cuda_backends import expected_times as expected_times
from jfp8.kernels.grouped import GroupedKernels, why_not_grouped_kernels
from jfp8.kernels.hopper import backend as hopper
from jfp8.kernels.k_major import k_major
from jfp8.kernels.on_platform import on_cuda
from jfp8.kernels.partitioning import divided
from jfp8.kernels.quantize_and_transpose import found_in, has_kernel
from jfp8.kernels.xla import bf16_dot, f8_dot
from jfp8.kernels.xla.grouped import GroupedByXla
from jfp8.matmul.emulate import emulated
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.conv import Convolution, ConvSpec
from jfp8.products.dot_general import DotSpec
from jfp8.products.ragged.dot import TILE, GroupedPlan, GroupedSpec, tile_height
from jfp8.quantizers.quantizer import Delayed
from jfp8.recipes.recipe import Recipe
from jfp8.scaling.arrays import ScaledArray
from jfp8.scaling.history import AmaxState
from jfp8.tracing.backends import first_allowed
from jfp8.tracing.device import current_gpu, explicit_mesh_of, has_explicit_axes
from jfp8.tracing.devices import Gpu
from jfp8.tracing.notes import note

NAMED = {backend.name: backend for backend in (hopper.BACKEND, f8_dot.BACKEND, bf16_dot.BACKEND)}
# For matmuls that are not quantized.
GROUPED_IN_HIGH_PRECISION = GroupedByXla


def multiply(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the matmul of two operands by the named backend, or by the best one for the GPU."""
    facts, gpu = facts_of(lhs, rhs, spec), known_gpu(spec.device)
    if spec.implementation is not None:
        backend = NAMED[spec.implementation]
        if backend is bf16_dot.BACKEND and facts.accumulation == "f32_every_128":
            facts = replace(facts, accumulation="f32")
        check_not_refused(backend.name, backend.why_not(facts, gpu))
        with note("cuda", backend.name):
            return backend.multiply(lhs, rhs, spec)
    choice = choose(facts, gpu)
    compute = lambda lhs, rhs: choice.backend.multiply(lhs, rhs, spec)
    reference = lambda lhs, rhs: emulated(lhs, rhs, spec)
    return on_cuda(compute, reference, lhs, rhs, why=str(choice))


def plan(spec: Any) -> Any:
    """Return the operation for `spec`; None to use the reference."""
    options = spec.options
    if options.implementation in ("xla", "bf16") and not isinstance(options.device, Gpu):
        is_grouped = isinstance(spec, GroupedSpec)
        return GroupedPlan(spec.reference().height, GroupedByXla) if is_grouped else None
    if isinstance(spec, DotSpec):
        return k_major(spec)
    if isinstance(spec, ConvSpec):
        if first_allowed("this convolution", "bf16", "emulate") == "emulate":
            return None
        # XLA has no FP8 convolution. Every f8 value is a bf16 value, so bf16 is exact.
        return Convolution(spec.shapes, spec.dtypes, spec.window, np.dtype(jnp.bfloat16))
    assert isinstance(spec, GroupedSpec)
    return _grouped(spec)


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
    at_once = options.implementation is None and may_go_by_rounds(options.recipe, gpu)
    height = spec.height or tile_height(options.recipe, spec.rows, spec.groups, at_once=at_once)
    return GroupedPlan(height, GroupedByXla)


def quantizes_by_kernels() -> bool:
    """Return True if Pallas kernels quantize anything on the GPU that the program is traced for."""
    return hopper.why_no_quantizing(current_gpu()) is None


def amax_if_needed(x: jax.Array, recipe: Recipe, state: AmaxState) -> jax.Array | None:
    """Return the amax of lhs that kernels find before they quantize it; None if there are none."""
    quantizer = recipe.resolved().fprop.lhs
    is_delayed = isinstance(quantizer, Delayed) and has_kernel(quantizer)
    is_matrix = x.ndim > 1 and x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    is_explicit = has_explicit_axes() or explicit_mesh_of(x) is not None
    if is_explicit or not (is_delayed and is_matrix and quantizes_by_kernels()):
        return None
    return found_in(quantizer.algo, None, x, state["amax_history"])


def residual_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return ``x + y``, where `y` is the result of a matmul.

    cuBLASLt adds `x` itself while it writes `y`. Its results are matrices, so the sum is one:
    otherwise XLA would copy `x` first, to overwrite it.
    """
    if has_explicit_axes() or known_gpu(current_gpu()) is None:
        return x + y

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        rows = lambda x: x.reshape(-1, x.shape[-1])
        return (rows(x) + rows(y)).reshape(x.shape)

    dims = " ".join(f"d{i}" for i in range(x.ndim))
    return divided("residual_sum", add, f"{dims}, {dims} -> {dims}")(x, y)


def over_stacked(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Apply `function`, which supports leading axes, to each of `arguments`, stacking if alike.

    A model then has one set of small kernels, not one for each matmul.
    """
    alike: dict[Any, list[int]] = {}
    for i, each in enumerate(arguments):
        leaves, structure = jax.tree.flatten(each)
        # The class determines what `vmap` maps: stacked with it, all would be mapped.
        alike.setdefault((structure, *((type(x), jax.typeof(x)) for x in leaves)), []).append(i)
    results: dict[int, Any] = {}
    for places in alike.values():
        group = [arguments[i] for i in places]
        if len(group) == 1:
            results[places[0]] = function(*group[0])
            continue
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *group)
        found, structure = jax.tree.flatten(function(*stacked))
        rows = zip(*map(jnp.unstack, found), strict=True)
        results |= zip(places, map(structure.unflatten, rows), strict=True)
    return [results[i] for i in range(len(arguments))]
