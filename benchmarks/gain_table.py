"""Write the tables of docs/benchmarks.md that come from the model of time: see `fit_rates.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jfp8.kernels.cost_model import Costs, Scales, Times, costs_on, expected, work_of
from jfp8.kernels.rates import RATES
from jfp8.tracing.device import current_gpu

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
LARGEST = 2**15
# Cards that were not timed. GeForce cards sum f32 at half the rate of an RTX PRO 6000.
SCALED_FROM = {"GB200": "B200", "RTX 4090": "RTX PRO 6000", "RTX 5090": "RTX PRO 6000"}
RECIPES: dict[Scales, str] = {
    "one": "`delayed`, `current`",
    "rows": "`rowwise`",
    "blocks": "`block`",
    "mx": "`mxfp8`",
    "nvfp4": "`nvfp4`",
}


def times(gpu: str, scales: Scales, n: int) -> Times:
    """Return the expected times of a matmul of n x n x n, with a JAX that has the kernels."""
    return expected(work_of((n, n, n)), RATES[gpu], scales, costs_of(gpu))


@functools.cache
def costs_of(gpu: str) -> Costs:
    """Return the cost of quantizing on a card."""
    device = AbstractDevice(device_kind=f"NVIDIA {gpu}", num_cores=1, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        found = current_gpu()
    assert found is not None
    return costs_on(found.capability)


def pays_from(gpu: str, scales: Scales) -> int | None:
    """Return the first multiple of 32 from which on a layer is faster; None if none is."""
    slower = (n for n in range(LARGEST, 0, -32) if times(gpu, scales, n).gain <= 1)
    first = next(slower, 0) + 32
    return first if first <= LARGEST else None


def gains() -> Iterator[str]:
    """Give the table of sizes from which on FP8 layers are faster than unconverted ones.

    It leaves out cards that were not timed. A dash stands for recipes that are never faster.
    """
    gpus = [gpu for gpu in RATES if gpu not in SCALED_FROM]
    yield f"| n from which FP8 is faster | {' | '.join(gpus)} |"
    yield f"|---|{'---|' * len(gpus)}"
    for scales, recipe in RECIPES.items():
        sizes = (pays_from(gpu, scales) for gpu in gpus)
        yield f"| {recipe} | {' | '.join(f'{n:,}' if n else '–' for n in sizes)} |"


def write(name: str, lines: Iterator[str]) -> None:
    """Put a table between its marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: benchmarks/fit_rates.py -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    after = rest[rest.index(end) :]
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{begin}\n{table}\n\n{after}", encoding="utf-8")


def write_table() -> None:
    """Write the expected gains."""
    write("gains", gains())
