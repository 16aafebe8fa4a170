"""`Planner`: the reference, with which every chip must agree, and the door to the chips.

The reference is f32 arithmetic on any device. Sums over the contraction are in f32, or as in
hardware, see `chunked_sums`. Modules of chips are imported when programs are traced for them.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jfp8.matmul.chunked_sums import dot_in_chunks
from jfp8.matmul.known_scales import varies_along_sum
from jfp8.matmul.one_quantized import multiply_dequantized
from jfp8.matmul.spec import (
    HARDWARE_FORMATS,
    Implementation,
    MatmulSpec,
    factors_of,
    has_one_scale,
    plain_dot,
)
from jfp8.quantizers.quantizer import Quantizer
from jfp8.scaling.arrays import ScaledArray, scaled_values
from jfp8.scaling.codes import decode
from jfp8.scaling.history import AmaxState
from jfp8.tracing.backends import ALLOWED, first_allowed
from jfp8.tracing.device import PLANNERS
from jfp8.tracing.devices import Device
from jfp8.tracing.notes import EXPLAINING

# The planners of implementations that can be asked for by name; "emulate" is the reference.
NAMED = {
    "emulate": None,
    "bf16": "jfp8.kernels.cuda.Cuda",
    "xla": "jfp8.kernels.cuda.Cuda",
    "mosaic_gpu": "jfp8.kernels.cuda.Cuda",
    "mosaic_tpu": "jfp8.kernels.tpu.dot.Mosaic",
}

# "one": one for each operand. "rows": none varies along the contraction, but others do. Along the
# contraction "blocks" has blocks of 128, "mx" of 32, and "nvfp4" of 16.
Scales = Literal["one", "rows", "blocks", "mx", "nvfp4"]

Plan = TypeVar("Plan")
Each = TypeVar("Each")
Plan_co = TypeVar("Plan_co", covariant=True)


class Spec(Protocol[Plan_co]):
    """The static description of an operation, such as `DotSpec`, with the plan of the core."""

    def reference(self) -> Plan_co: ...


class Work(NamedTuple):
    """The work of a matmul."""

    multiplications: float  # m * n * k
    elements: float  # both operands and the result: m * k + k * n + m * n


@dataclass(frozen=True)
class Times:
    """Hold the expected seconds of one matmul: see `jfp8.kernels.cost_model`."""

    fp8: float
    rounded: float
    bf16: float

    @property
    def gain(self) -> float:
        """Return the speedup of a layer over the same layer without conversion."""
        return self.bf16 / min(self.fp8, self.rounded)


@dataclass(frozen=True)
class Planner:
    """Compute by the reference. A chip overrides what it does better.

    To add a chip, write a subclass in `jfp8.kernels`, and name it in `jfp8.tracing.device.PLANNERS`
    by JAX's name of the platform, or in `NAMED` by the name of an implementation. Its results
    may differ from the results of ``super()`` in summation order only. A public name that this
    class lacks is a ``TypeError``: a misspelt method would never be called.
    """

    device: Device = None  # for which programs are traced
    rated: ClassVar[tuple[str, ...]] = ()  # names of the devices with `expected_times`

    def __init_subclass__(cls) -> None:
        known = [name for name in vars(Planner) if not name.startswith("_")]
        for name in vars(cls):
            if not name.startswith("_") and name not in known:
                (nearest,) = difflib.get_close_matches(name, known, 1, 0.0)
                raise TypeError(
                    f"{cls.__qualname__}.{name} overrides nothing of Planner. Did you mean "
                    f"{nearest!r}? Names that only this chip needs begin with an underscore."
                )

    def multiply(self, lhs: ScaledArray, rhs: ScaledArray, spec: MatmulSpec) -> jax.Array:
        """Return the matmul of two quantized operands; raise if a named backend does not."""
        one_scale = has_one_scale(lhs) and has_one_scale(rhs)
        if spec.accumulation != "f32":
            how = {"accumulation": spec.accumulation, "exact": dot_in_f32}
            if varies_along_sum(lhs, rhs, spec):
                return dot_in_chunks(lhs, rhs, spec.dimension_numbers, **how).astype(spec.dtype)
            one = jnp.ones((), jnp.float32)
            data = ScaledArray(lhs.data, one), ScaledArray(rhs.data, one)
            product = dot_in_chunks(*data, spec.dimension_numbers, **how)
        elif not one_scale and varies_along_sum(lhs, rhs, spec):
            values = scaled_values(lhs), scaled_values(rhs)
            product = plain_dot(*values, spec.dimension_numbers, lax.Precision.HIGHEST)
            return product.astype(spec.dtype)
        else:
            product = dot_in_f32(lhs.data, rhs.data, spec.dimension_numbers)
        for factor in factors_of(lhs, rhs, spec):
            product = product * factor
        return product.astype(spec.dtype)

    def plan(self, spec: Spec[Plan]) -> Plan:
        """Return the operation for the spec of a matmul, convolution or grouped matmul."""
        return spec.reference()

    def grouped_in_high_precision(self, reference: type[Plan]) -> type[Plan]:
        """Return the operation of grouped matmuls that are not quantized."""
        return reference

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return ``x + y``, where `y` is the result of a matmul."""
        return x + y

    def over_stacked(self, function: Callable[..., Each], arguments: Sequence[Any]) -> list[Each]:
        """Apply `function`, which supports leading axes, to each of `arguments`."""
        # One by one, so that programs shared by all layers are compiled once.
        return [function(*each) for each in arguments]

    def merged(self, tree: Any) -> Any:
        """Return `tree`, small arrays, so that few kernels compute them."""
        return tree

    def quantizes_by_kernels(self) -> bool:
        """Return True if kernels that quantize may also compute an activation."""
        return False

    def amax_by_kernel(
        self, x: jax.Array, quantizer: Quantizer | None, state: AmaxState
    ) -> jax.Array | None:
        """Return the amax of `x` if a kernel finds it before others quantize `x`, else None."""
        return None

    def expected_times(self, work: Work, scales: Scales) -> Times | None:
        """Return the times of a matmul on all devices together; None if they are not `rated`."""
        return None

    def expected_pass(self, moved: float) -> float | None:
        """Return the seconds in which all devices together move so many bytes; None as above."""
        return None

    def expected_gain(self, work: Work, quantizers: Collection[Quantizer], in_f8: bool) -> float:
        """Return the speedup of a layer over bf16; unless `in_f8`, its matmuls are in bf16, too.

        1 where none is known.
        """
        return 1.0


def planner_of(device: Device, implementation: str | None = None) -> Planner:
    """Return the planner for a named implementation or else a device: the reference if none is."""
    path = None if device is None else PLANNERS.get(device.platform)
    if implementation is not None:
        check_implementation(implementation)
        path = NAMED[implementation]
    if path is None and EXPLAINING.value is None:
        return Planner(device)
    path = path or "jfp8.kernels.cuda_backends.Explained"
    module, _, name = path.rpartition(".")
    planner: type[Planner] = getattr(importlib.import_module(module), name)
    return planner(device)


def allowed_planner(device: Device, implementation: str | None) -> Planner:
    """Return `planner_of` a matmul; raise if `jfp8.backends` leaves out all that it would use."""
    is_known = device is not None and device.platform in PLANNERS
    if ALLOWED.value is not None and (implementation or not is_known):
        used = implementation or "emulate"
        first_allowed(f"what only {used!r} computes here", used)
    return planner_of(device, implementation)


def check_implementation(
    implementation: str | None, known: Collection[str] = get_args(Implementation)[1:]
) -> None:
    """Raise ``ValueError`` unless `implementation` is None or among the `known` ones."""
    if implementation is not None and implementation not in known:
        allowed = ", ".join(map(repr, known))
        raise ValueError(
            f"implementation={implementation!r} is unknown. Allowed: {allowed}, or None, which "
            "picks one for the platform."
        )


def multiply(
    lhs: ScaledArray | jax.Array,
    rhs: ScaledArray | jax.Array,
    spec: MatmulSpec,
    sum_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Return the matmul of two operands, as the planner for the device computes it.

    Sums are in `sum_dtype` if one of them is not quantized.
    """
    if not isinstance(lhs, ScaledArray) or not isinstance(rhs, ScaledArray):
        if isinstance(lhs, ScaledArray) or isinstance(rhs, ScaledArray):
            return multiply_dequantized(lhs, rhs, spec, sum_dtype)
        common = jnp.promote_types(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.astype(common), rhs.astype(common)
        y = plain_dot(lhs, rhs, spec.dimension_numbers, dtype=sum_dtype)
        return y.astype(spec.dtype)
    if spec.accumulation.startswith("hopper"):
        if not HARDWARE_FORMATS.issuperset((lhs.format, rhs.format)):
            raise ValueError(
                f"accumulation={spec.accumulation!r} models tensor cores that multiply E4M3FN and "
                f"E5M2, but the operands are {lhs.format.name} and {rhs.format.name}. Use "
                "accumulation='f32'."
            )
        if spec.implementation is None:  # models of hardware are emulated everywhere
            return Planner().multiply(lhs, rhs, spec)
    return allowed_planner(spec.device, spec.implementation).multiply(lhs, rhs, spec)


def dot_in_f32(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
) -> jax.Array:
    """Multiply two f8 arrays, not yet scaled, with sums in f32.

    A product of two f8 values is exact in f32, so only the order of the additions is undefined. (It
    is exact in bf16 operands with f32 sums as well, and some processors are twice as fast at that;
    but XLA:CPU fails at run time on such products for some dimension numbers.)
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_contract, lhs_batch = tuple(lhs_contract), tuple(lhs_batch)
    # XLA:CPU is fastest if the contraction is the last dimension of lhs, and would otherwise
    # transpose 4-byte values; the barrier prevents it from merging this transposition back in.
    free = [d for d in range(lhs.ndim) if d not in lhs_contract + lhs_batch]
    order = [*lhs_batch, *free, *lhs_contract]
    if order != sorted(order):
        lhs = lax.optimization_barrier(lhs.transpose(order))
        lhs_batch = tuple(range(len(lhs_batch)))
        lhs_contract = tuple(range(lhs.ndim - len(lhs_contract), lhs.ndim))
    # HIGHEST: on accelerators the default would round the operands or the sums to fewer bits.
    return lax.dot_general(
        decode(lhs),
        decode(rhs),
        ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
