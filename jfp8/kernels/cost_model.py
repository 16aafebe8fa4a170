"""Model the time of a matmul on a GPU, to decide when FP8 pays off.

A matmul is a third of a linear layer, forward and backward: the layer's three matmuls have the
same three sizes in another order, and equal times in this model. With ``e = m k + k n + m n``, the
elements of the layer's tensors, each of which is an operand twice and a result once::

    fp8      =  multiply in FP8   +  quantize  +  start kernels
    rounded  =  multiply in bf16  +  quantize  +  start kernels
    bf16     =  multiply in bf16

    multiply  =  launch + |(2 (m n k + ramp e / 3) / peak, bytes of operands and result / memory)|
    quantize  =  bytes per element * e / 3 / bandwidth

``|(x, y)|`` is the root of the sum of squares. ``rounded`` multiplies the values stored in FP8
with the tensor cores of bf16: the only other way to the results of a recipe. ``bf16`` is a layer
that is not converted. Launch, peak, memory, ramp and bandwidth are from `rates`; the kernels
and bytes next to the matmuls are from compiled programs. On an H100, gains are within 8 % of those
that we measured.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple, TypeAlias

from jfp8.kernels.rates import MatmulRate, Rates
from jfp8.matmul.planner import Scales, Times, Work

LAUNCH = 2e-6  # minimum seconds of a small kernel

Kernel = Literal["bf16", "fp8", "rows", "blocks", "nvfp4"]


class _Cost(NamedTuple):
    """The overhead of a layer next to its three matmuls."""

    bytes: float  # per element of its three tensors
    launches: int  # kernels, including the three matmuls
    kernel: Kernel  # name of the rate of the kernel that multiplies


Costs: TypeAlias = dict[Scales, _Cost]

# Counted in compiled programs: `Dense` of 1024^3, and of 512^3 where XLA makes fewer kernels of
# small arrays; for a B200 "mx" of 2304^3 and "nvfp4" of 3072^3. "one" is the mean of current
# scaling and of delayed scaling with an entry in its history, which reads each tensor once less.
BY_XLA: Costs = {
    "one": _Cost(5.0, 22, "fp8"),
    "rows": _Cost(12.0, 21, "fp8"),
    "blocks": _Cost(7.7, 28, "blocks"),
    "mx": _Cost(11.0, 29, "blocks"),
    "nvfp4": _Cost(29.0, 58, "nvfp4"),
}
ROUNDED: Costs = {
    "one": _Cost(6.0, 20, "bf16"),
    "rows": _Cost(7.0, 21, "bf16"),
    "blocks": _Cost(9.0, 17, "bf16"),
    "mx": _Cost(11.0, 19, "bf16"),
    "nvfp4": _Cost(23.0, 35, "bf16"),
}
# Without kernels that multiply blocks. XLA's FP8 matmuls are the same as on Hopper.
ON_ADA: Costs = ROUNDED | {"one": BY_XLA["one"], "rows": BY_XLA["rows"]}
# If kernels quantize, and compute one scale, too. On Blackwell XLA lays out the scales of blocks.
ON_HOPPER: Costs = ROUNDED | {
    "one": _Cost(5.0, 12, "fp8"),
    "rows": _Cost(6.2, 21, "rows"),
    "blocks": _Cost(4.1, 8, "blocks"),
}
ON_BLACKWELL: Costs = BY_XLA | {
    "blocks": _Cost(4.3, 17, "blocks"),
    "mx": _Cost(4.3, 18, "blocks"),
}


def costs_on(capability: tuple[int, int] | None, has_kernels: bool = True) -> Costs:
    """Return the cost of quantizing on a GPU; `has_kernels`, which needs a recent JAX."""
    major = 0 if capability is None else capability[0]
    known = {(9, True): ON_HOPPER, (10, True): ON_BLACKWELL, (10, False): BY_XLA}
    return known.get((major, has_kernels), ON_ADA)


def work_of(sizes: tuple[int, int, int], devices: int = 1) -> Work:
    """Return the work of ``(m, n, k)``, divided evenly among `devices`."""
    m, n, k = sizes
    return Work(m * n * k / devices, (m * k + k * n + m * n) / devices)


def scales_of(blocks: Collection[tuple[int, int]]) -> Scales:
    """Return the kind of scales of operands by their blocks, along and across the contraction.

    0 stands for all elements.
    """
    smallest = min((along for along, _ in blocks if along), default=0)
    if smallest == 0:
        return "rows" if any(across for _, across in blocks) else "one"
    return "blocks" if smallest >= 128 else "mx" if smallest >= 32 else "nvfp4"


def expected(work: Work, rates: Rates, scales: Scales, costs: Costs) -> Times:
    """Return the times of a matmul. `costs` depend on which code quantizes: see `BY_XLA`."""

    def multiply(kernel: Kernel) -> float:
        rate: MatmulRate | None = getattr(rates, kernel)
        if rate is None:  # no tensor cores for it
            kernel, rate = "bf16", rates.bf16
        moved = (2 * _WIDTHS[kernel] + 2) * work.elements / 3
        return float(rate.seconds(work.multiplications, work.elements / 3, moved))

    def quantized(cost: _Cost) -> float:
        moved = cost.bytes * work.elements / 3 / (1e12 * rates.cast)
        return multiply(cost.kernel) + moved + (cost.launches - 3) * LAUNCH / 3

    return Times(quantized(costs[scales]), quantized(ROUNDED[scales]), multiply("bf16"))


_WIDTHS: dict[Kernel, float] = {"bf16": 2, "fp8": 1, "rows": 1, "blocks": 1, "nvfp4": 0.5}  # bytes
