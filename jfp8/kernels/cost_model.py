"""How long a product takes on a GPU, by a model: when FP8 pays off.

A product is a third of a linear layer, forward and backward: the layer's three products have the
same three sizes in another order, and the same times here. With ``e = m k + k n + m n``, the
elements of the layer's tensors, of which each is an operand twice and a result once::

    fp8      =  multiply in FP8   +  quantize  +  start kernels
    rounded  =  multiply in bf16  +  quantize  +  start kernels
    bf16     =  multiply in bf16               +  start one kernel

    multiply  =  max(2 m n k / achieved peak, bytes of operands and result / bandwidth)
    quantize  =  bytes per element * e / 3 / bandwidth

``rounded`` multiplies the values that FP8 stores with the tensor cores of bf16: the only other way
to the numbers of a recipe. ``bf16`` is a layer that is not converted. Nothing here was measured by
running jfp8 on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias


@dataclass(frozen=True)
class Rates:
    """Hold peaks that NVIDIA publishes, dense: half of what is printed with sparsity."""

    bf16: float  # multiplications and additions per second
    fp8: float
    memory: float  # bytes per second
    fp4: float | None = None  # of NVFP4 operands; None: there are no such tensor cores


# Data sheets: NVIDIA H100 and H200 (SXM boards), DGX B200 (an eighth), L40S.
RATES = {
    "H100": Rates(989.5e12, 1979e12, 3.35e12),
    "H200": Rates(989.5e12, 1979e12, 4.8e12),
    "B200": Rates(2250e12, 4500e12, 8.0e12, fp4=9000e12),
    "L40S": Rates(362e12, 733e12, 0.864e12),
}
# The parts of the peaks that programs achieve. torchao's roofline has 0.78 for FP8; on an H200 bf16
# products of 8192^3 took 0.78 to 0.81 of it, and copies 0.9 of the bandwidth, both in PyTorch.
OF_PEAK, OF_BANDWIDTH = 0.78, 0.9
LAUNCH = 2e-6  # seconds: what a small kernel takes at least


class _Cost(NamedTuple):
    """What a layer of three products has beside them."""

    bytes: float  # per element of its three tensors
    launches: int  # of all kernels, the three products included


# "one": none varies along the sum. "blocks": blocks of 128. "mx": of 32. "nvfp4": of 16.
Scales = Literal["one", "blocks", "mx", "nvfp4"]

Costs: TypeAlias = dict[Scales, _Cost]

# As compiled: `Dense` of 1024^3, and of 512^3 where XLA makes fewer kernels of small arrays; for
# a B200 "mx" of 2304^3 and "nvfp4" of 3072^3. "one" is the mean of current scaling and of delayed
# scaling with an entry in its history, which reads each tensor once less.
BY_XLA: Costs = {
    "one": _Cost(5.0, 22),
    "blocks": _Cost(7.7, 28),
    "mx": _Cost(11.0, 29),
    "nvfp4": _Cost(29.0, 58),
}
# Where kernels quantize. Those for one scale make it, too. On Blackwell XLA lays the scales of
# blocks out for the tensor cores.
ON_HOPPER: Costs = BY_XLA | {"one": _Cost(5.0, 12), "blocks": _Cost(4.1, 8)}
ON_BLACKWELL: Costs = BY_XLA | {"blocks": _Cost(4.3, 17), "mx": _Cost(4.3, 18)}
ROUNDED: Costs = {
    "one": _Cost(6.0, 20),
    "blocks": _Cost(9.0, 17),
    "mx": _Cost(11.0, 19),
    "nvfp4": _Cost(23.0, 35),
}


class Work(NamedTuple):
    """What one device computes of a product."""

    multiplications: float  # m * n * k
    elements: float  # of both operands and the result, m * k + k * n + m * n


def work_of(sizes: tuple[int, int, int], devices: int = 1) -> Work:
    """Of ``(m, n, k)``, divided evenly among `devices`."""
    m, n, k = sizes
    return Work(m * n * k / devices, (m * k + k * n + m * n) / devices)


@dataclass(frozen=True)
class Times:
    """Expected seconds of one product: see the top of this file."""

    fp8: float
    rounded: float
    bf16: float


def rates_of(kind: str) -> Rates | None:
    """The rates of a device of this kind, such as ``"NVIDIA H200"``; None if it is not listed."""
    found = [rates for name, rates in RATES.items() if re.search(rf"\b{name}\b", kind)]
    return found[0] if found else None


def scales_of(along: Iterable[int]) -> Scales:
    """The kind of scales that are shared by so many elements each along the sum, 0 if by all."""
    smallest = min(filter(None, along), default=0)
    if smallest == 0:
        return "one"
    return "blocks" if smallest >= 128 else "mx" if smallest >= 32 else "nvfp4"


def expected(work: Work, rates: Rates, scales: Scales, costs: Costs) -> Times:
    """Return the times of a product. `costs` depend on who quantizes: see `BY_XLA`."""
    bandwidth = OF_BANDWIDTH * rates.memory

    def multiply(peak: float, width: float) -> float:
        moved = (2 * width + 2) * work.elements / 3
        return max(2 * work.multiplications / (OF_PEAK * peak), moved / bandwidth)

    def beside(cost: _Cost) -> float:
        return (cost.bytes * work.elements / bandwidth + cost.launches * LAUNCH) / 3

    in_bf16 = in_fp8 = multiply(rates.bf16, 2)
    if scales != "nvfp4":
        in_fp8 = multiply(rates.fp8, 1)
    elif rates.fp4 is not None:
        in_fp8 = multiply(rates.fp4, 0.5)
    return Times(
        fp8=in_fp8 + beside(costs[scales]),
        rounded=in_bf16 + beside(ROUNDED[scales]),
        bf16=in_bf16 + LAUNCH,
    )
