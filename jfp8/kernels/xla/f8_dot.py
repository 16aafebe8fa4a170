"""``dot_general`` of f8 arrays, which XLA compiles to cuBLASLt's FP8 matmul on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jfp8.kernels.backend import Backend
from jfp8.kernels.operands import Paired, dtype_of_partial_sums, factors_by_kernels
from jfp8.kernels.partitioning import divided_sum
from jfp8.kernels.verdicts import why_failed
from jfp8.kernels.xla.bf16_dot import exact_product
from jfp8.matmul.as_matrices import as_matrices
from jfp8.matmul.spec import HARDWARE_FORMATS, MatmulSpec, Numbers, free_dims, layout_of, times
from jfp8.scaling.arrays import ScaledArray
from jfp8.tracing.devices import Gpu

# cuBLASLt requires all sizes of an FP8 matmul to be multiples of this.
ALIGNMENT = 16
# XLA may split such sums of such results, and add the parts in f32 in a kernel that also scales.
LONG_SUM, FEW_TILES = 2 * 768, 222 * 64 * 128  # elements; on up to 148 multiprocessors


def f8_by_xla(lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
    """Return the matmul of f8 operands by XLA: FP8 tensor cores on CUDA.

    On CUDA a dot algorithm is named. Without one, XLA's GPU compiler may pick a kernel that always
    accumulates fast and ignores ``precision``. Other compilers refuse the name, and multiply f8
    arrays with their own algorithm.
    """
    is_cuda = isinstance(spec.device, Gpu) and spec.device.platform == "cuda"
    factors = factors_by_kernels(lhs, rhs, spec)
    if not is_cuda:
        return elsewhere(lhs.data, rhs.data, factors, spec)
    copies = {i: q.transposed for i, q in enumerate((lhs, rhs)) if isinstance(q, Paired)}
    copies = {i: copy for i, copy in copies.items() if copy is not None}
    return cuda(lhs.data, rhs.data, factors, spec, *([copies] if copies else []))


def elsewhere(
    lhs: jax.Array, rhs: jax.Array, factors: Sequence[jax.Array], spec: MatmulSpec
) -> jax.Array:
    """Compute ``dot_general(lhs, rhs) * factors`` of two f8 arrays by the compiler's algorithm."""
    dtype = dtype_of_partial_sums(spec)
    y = lax.dot_general(lhs, rhs, spec.dimension_numbers, preferred_element_type=dtype)
    return times(y, factors).astype(spec.dtype)


def cuda(
    lhs: jax.Array,
    rhs: jax.Array,
    factors: Sequence[jax.Array],
    spec: MatmulSpec,
    copies: Mapping[int, jax.Array] | None = None,
) -> jax.Array:
    """Return ``dot_general(lhs, rhs) * factors`` of two f8 arrays by one call of cuBLASLt.

    The call also scales by 0-d factors, and adds a bias, if the matmul has the dtype of the
    result, sizes that are multiples of 16, and its scale is a single multiplication in that dtype.
    XLA takes the scale itself in f32: it removes roundings that are undone at once. A result in f16
    could overflow before it is scaled, so it is computed in f32.

    Devices that lack parts of an operand receive its transpose, if that is in `copies`.

    No tensor core multiplies e5m2 by e5m2: these are multiplied in bf16, which is exact.
    """
    if lhs.dtype == rhs.dtype == jnp.float8_e5m2:
        return exact_product(lhs, rhs, spec.dimension_numbers, factors, spec.dtype)
    copies = copies or {}
    fast = "_FAST_ACCUM" if spec.fast_accumulation else ""
    algorithm = lax.DotAlgorithmPreset[f"ANY_F8_ANY_F8_F32{fast}"]
    single, numbers = [factor for factor in factors if not factor.ndim], spec.dimension_numbers

    def scaled(dtype, lhs, rhs, *given):
        def product(lhs, rhs, numbers):
            scales, layout = given[: len(single)], layout_of(lhs.shape, rhs.shape, numbers)
            in_parts = layout.sizes[2] >= LONG_SUM and math.prod(layout.shape) < FEW_TILES
            first = dtype if dtype == jnp.bfloat16 and not in_parts else np.float32
            if scales and not numbers[1][0] and lhs.dtype == jnp.float8_e4m3fn:
                # An activation may be in several matmuls, which XLA would merge if they are small,
                # and round their scales to bf16. Weights and gradients are in one matmul each.
                lhs, *scales = lax.optimization_barrier([lhs, *scales])
            y = lax.dot_general(
                lhs, rhs, numbers, precision=algorithm, preferred_element_type=first
            )
            for factor in scales:
                y = y * factor.astype(first)
            return y.astype(dtype) if in_parts else y

        return aligned(lhs, rhs, numbers, product)

    if isinstance(spec.device, Gpu) and not spec.device.kind:
        # `jax.export` cannot store a rule for the compiler.
        y = scaled(spec.dtype, lhs, rhs, *single)
    else:
        # If a sum is sharded over devices, each scales its share, in the call, not after the sum.
        rule = rule_of_product(numbers, (lhs.ndim, rhs.ndim), len(single), copies)
        name = f"dot_general, {algorithm.name}"
        multiply = divided_sum(name, scaled, rule, spec.dtype, spec.partial_dtype)
        y = multiply(lhs, rhs, *single, *copies.values())
    return times(y, [f for f in factors if f.ndim]).astype(spec.dtype)


def rule_of_product(
    numbers: Numbers, ndims: tuple[int, int], scales: int, copies: Iterable[int]
) -> str:
    """Return the rule for ``dot_general``, see `divided`: ``"m0 k0, n0 k0, -> m0 n1"``, 1 scale."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    names = ({d: f"m{d}" for d in range(ndims[0])}, {d: f"n{d}" for d in range(ndims[1])})
    for kind, left, right in (("k", lhs_contract, rhs_contract), ("b", lhs_batch, rhs_batch)):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            names[0][a] = names[1][b] = f"{kind}{i}"
    operands = [list(of_dims.values()) for of_dims in names]
    swapped = lambda dims: sorted(dims, key=lambda name: name[0] == dims[0][0])
    others = [*[""] * scales, *(f"({' '.join(swapped(operands[i]))})" for i in copies)]
    free = (
        [of_dims[d] for d in free_dims(ndim, contract, batch)]
        for of_dims, ndim, contract, batch in zip(names, ndims, *numbers, strict=True)
    )
    result = [names[0][d] for d in lhs_batch] + [name for names in free for name in names]
    return f"{', '.join([*map(' '.join, operands), *others])} -> {' '.join(result)}"


def aligned(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: Numbers,
    product: Callable[[jax.Array, jax.Array, Numbers], jax.Array],
) -> jax.Array:
    """Compute `product` of matrices, padded with zeros to sizes that are multiples of 16.

    XLA would pad, too, but then neither scale nor bias would be part of the call.
    """
    layout = layout_of(lhs.shape, rhs.shape, numbers)
    lhs, rhs, numbers = as_matrices(lhs, rhs, numbers)
    if not any(size % ALIGNMENT for size in layout.sizes):
        return product(lhs, rhs, numbers).reshape(layout.shape)
    by = lambda shape: [(0, 0)] * (len(shape) - 2) + [(0, -n % ALIGNMENT) for n in shape[-2:]]
    y = product(jnp.pad(lhs, by(lhs.shape)), jnp.pad(rhs, by(rhs.shape)), numbers)
    m, n, _ = layout.sizes
    return lax.slice(y, [0] * y.ndim, [*y.shape[:-2], m, n]).reshape(layout.shape)


BACKEND = Backend(
    "xla",
    f8_by_xla,
    formats=HARDWARE_FORMATS,
    granularities=frozenset({"tensor", "rows"}),
    accumulations=("f32",),
    why_not_e5m2="XLA has no matmul of e5m2 by e5m2",
    first_for=frozenset({"tensor"}),
    why_not_on=partial(why_failed, {"cuBLASLt products"}),
)
