"""The roofline of FP8 and bf16 on three GPUs, with a linear layer on it: see `pictures.py`.

A linear layer of n tokens, n inputs and n outputs, forward and backward, in bf16 or in FP8 with
delayed scaling. Its bytes are from the page on GPUs: the quantize kernels move 4 for each
element, the products read one byte of each operand (bf16: two) and write two. Kernels run one after
the other, each as fast as its arithmetic or its bytes allow, so that a layer in FP8 lies below the
roof. Starting kernels takes no time here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from on_gpu.linear import QUANTIZE_BYTES

from jfp8.kernels.rates import PEAKS, Peak
from jfp8.plot.style import AMBER, BLUE, GRAY, VERMILION, tidy

SIZES = (512, 1024, 2048, 4096, 8192)
QUANTIZING = QUANTIZE_BYTES["delayed"]  # per element: read two, write q and q transposed
GPUS = ("H100", "H200", "B200")
LOOKS = {"FP8": (BLUE, "o", "-"), "bf16": (AMBER, "s", "--")}


def traffic(m: int, n: int, k: int, precision: str) -> float:
    """Return bytes of a layer of m tokens, k inputs and n outputs."""
    elements = m * k + k * n + m * n
    operands = 2 * elements * (1 if precision == "FP8" else 2)  # each is in two matmuls
    return operands + 2 * elements + (QUANTIZING * elements if precision == "FP8" else 0)


def rate(gpu: Peak, n: int, precision: str) -> float:
    """Return TFLOP/s of the layer of n x n x n by the model."""
    peak, elements = (gpu.fp8 if precision == "FP8" else gpu.bf16), 3 * n * n
    products = traffic(n, n, n, precision) - (QUANTIZING * elements if precision == "FP8" else 0)
    memory = 1e12 * gpu.memory
    seconds = max(6 * n**3 / (1e12 * peak), products / memory)
    if precision == "FP8":
        seconds += QUANTIZING * elements / memory
    return 6 * n**3 / seconds / 1e12


def roofline(measured: Mapping[str, Any] | None = None) -> Figure:
    """Draw a panel for each GPU; with the linears of `measured`, a result of benchmarks/gpu.py."""
    figure = Figure((7.0, 3.9), layout="constrained")
    what = "modelled, not measured" if measured is None else "modelled, and measured (crosses)"
    small, large = (
        max(rate(PEAKS[gpu], n, "FP8") / rate(PEAKS[gpu], n, "bf16") for gpu in GPUS)
        for n in (SIZES[0], SIZES[-1])
    )
    figure.suptitle(
        f"FP8 reaches {small:.1f} times the rate of bf16 in linear layers of {SIZES[0]}³, "
        f"{large:.1f} times in {SIZES[-1]:,}³:\n{what}, forward and backward",
        fontsize="medium",
    )
    intensity = np.geomspace(64, 4096, 200)
    for ax, name in zip(figure.subplots(1, len(GPUS), sharex=True, sharey=True), GPUS, strict=True):
        gpu, points = PEAKS[name], {}
        for precision, (color, marker, style) in LOOKS.items():
            peak = gpu.fp8 if precision == "FP8" else gpu.bf16
            roof = np.minimum(peak, intensity * gpu.memory)
            ax.plot(intensity, roof, style, color=color, label=f"{precision} roof")
            at = [6 * n**3 / traffic(n, n, n, precision) for n in SIZES]
            rates = [rate(gpu, n, precision) for n in SIZES]
            points[precision] = list(zip(at, rates, strict=True))
            ax.plot(at, rates, marker, color=color, ms=5, mec="white", label=f"{precision} layer")
        for n, fast, plain in zip(SIZES, points["FP8"], points["bf16"], strict=True):
            ax.plot(*zip(fast, plain), color=GRAY, linewidth=0.8, zorder=1)
            ax.annotate(f"{n // 1024}k" if n >= 1024 else f"{n}", plain, (3, -11), ha="center",
                        textcoords="offset points", fontsize="x-small")  # fmt: skip
        if measured and name in str(measured["device"]["kind"]):
            _measured(ax, measured)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_ylim(200, 6000)
        ax.set_xticks([100, 1000], ["100", "1,000"])
        ax.set_yticks([250, 500, 1000, 2000, 4000], ["250", "500", "1,000", "2,000", "4,000"])
        ax.minorticks_off()
        tidy(ax, "FLOP per byte")
        ax.set_title(f"{name}, {gpu.memory:g} TB/s", fontsize="small")
    figure.axes[0].set_ylabel("TFLOP/s")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False,
                  fontsize="small")  # fmt: skip
    return figure


def _measured(ax: Any, result: Mapping[str, Any]) -> None:
    for record in result["records"]:
        precision = {"bf16": "bf16", "delayed": "FP8"}.get(record["name"])
        if record["section"] == "linear" and precision and "ms" in record:
            m, k, n = map(int, record["group"].split("x"))
            flops = 6 * m * n * k
            point = flops / traffic(m, n, k, precision), flops / record["ms"] / 1e9
            look = {"color": VERMILION if precision == "FP8" else "black", "zorder": 4}
            ax.plot(*point, "x", ms=7, mew=2, **look)
