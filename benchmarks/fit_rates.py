"""Fit the rates in `jfp8/kernels/rates.toml` to published timings of GPUs, and judge them.

Rates of the cards in `MEASURED` are from our own timings, as rates.toml says, and stay as they are.

    python benchmarks/fit_rates.py TIMINGS               # fit half of the shapes, judge others
    python benchmarks/fit_rates.py TIMINGS --write       # and fit all, into rates.toml and the page
    python benchmarks/fit_rates.py TIMINGS --judge       # rates.toml; nothing is fitted
    python benchmarks/fit_rates.py --table               # expected gains, into docs/benchmarks.md

TIMINGS is a folder with `gemm.csv.gz` and `quantize.csv.gz`, which ai-dynamo/aiconfigurator
(Apache-2.0) publishes: TensorRT-LLM's kernels, timed by their authors. A shape is on one side of
the split for all cards and formats. The error of a model is the median of ``|model / timing - 1|``,
its bias the median of ``model / timing``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gain_table import SCALED_FROM, write_table
from pass_rates import PASS_RATES, Pass
from scipy.optimize import least_squares

from jfp8.kernels import rates as committed
from jfp8.kernels.rates import PEAKS, MatmulRate, Rates

KERNELS = "trtllm_1.3.0rc20"
MEASURED = ("H100", "H200")
COLUMNS = {"bf16": "bf16_ms", "fp8": "fp8_ms", "blocks": "fp8_block_ms", "nvfp4": "nvfp4_ms"}
BYTES = {"bf16": 2.0, "fp8": 1.0, "blocks": 1.0, "nvfp4": 0.5}  # per element of an operand
PASSES = {"amax": (2.0, "amax_and_scale_ms"), "cast": (3.0, "cast_ms")}  # bytes per element
# Where a fit begins, and between what it stays: launch in µs, TFLOP/s, TB/s, terms of a sum, TB/s;
# and launch, TB/s, TB/s, MB.
MATMUL = np.log([(4, 1000, 3, 100, 3), (0.5, 50, 0.3, 1, 0.3), (60, 1e4, 30, 3000, 30)])
PASS = np.log([(3, 2, 4, 60), (0.5, 0.3, 0.3, 20), (60, 30, 30, 300)])


@dataclass(frozen=True)
class Timings:
    """Hold the timed shapes of one card: arrays of sizes and of seconds, NaN where not timed."""

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    seconds: dict[str, np.ndarray]  # by format; "fp8" excludes the passes that quantize
    passes: dict[str, np.ndarray]  # seconds of "amax" and "cast" of the activation ``[m, k]``

    def at(self, which: np.ndarray) -> Timings:
        """Return these shapes."""
        inside = lambda arrays: {name: x[which] for name, x in arrays.items()}
        m, n, k = (x[which] for x in (self.m, self.n, self.k))
        return Timings(m, n, k, inside(self.seconds), inside(self.passes))

    def timed(self, fmt: str) -> Timings:
        """Return the shapes that are timed in this format."""
        return self.at(np.isfinite(self.seconds[fmt]))


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """Read the rows of TensorRT-LLM's kernels."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from (row for row in csv.DictReader(file) if row["kernels"] == KERNELS)


def load(folder: Path) -> dict[str, Timings]:
    """Read the timings of each card."""
    quantizing = {
        (row["gpu"], row["m"], row["k"]): [seconds(row[name]) for _, name in PASSES.values()]
        for row in rows_of(folder / "quantize.csv.gz")
    }
    found: dict[str, list[list[float]]] = {}
    for row in rows_of(folder / "gemm.csv.gz"):
        passes = quantizing.get((row["gpu"], row["m"], row["k"]), [np.nan] * 2)
        times = [seconds(row[name]) for name in COLUMNS.values()]
        times[1] -= sum(passes)
        sizes = [float(row[name]) for name in "mnk"]
        found.setdefault(row["gpu"], []).append([*sizes, *times, *passes])
    cards = {}
    for gpu, rows in found.items():
        m, n, k, *times = np.array(rows).T
        by_format = dict(zip(COLUMNS, times, strict=False))
        cards[gpu] = Timings(m, n, k, by_format, dict(zip(PASSES, times[4:], strict=True)))
    return cards


def seconds(text: str) -> float:
    """Read milliseconds, which may be missing."""
    return 1e-3 * float(text) if text else np.nan


def matmul_seconds(rate: MatmulRate, cast: Pass, shapes: Timings, fmt: str) -> np.ndarray:
    """Return the expected seconds of matmuls as timed: some with their activation's cast."""
    m, n, k = shapes.m, shapes.n, shapes.k
    moved = BYTES[fmt] * (m * k + k * n) + 2 * m * n
    time = rate.seconds(m * n * k, m * n, moved)
    if rate.activation is None:
        return time
    return time + 1e-6 * cast.launch + 3 * m * k / (1e12 * rate.activation)


def pass_seconds(rate: Pass, shapes: Timings, name: str) -> np.ndarray:
    """Return the expected seconds of a pass over activations."""
    return rate.seconds(PASSES[name][0] * shapes.m * shapes.k)


def fit_matmul(shapes: Timings, cast: Pass, fmt: str) -> MatmulRate:
    """Fit the rate of a format; the timings of two formats include the cast of the activation."""
    shapes, casts = shapes.timed(fmt), fmt in ("blocks", "nvfp4")

    def rate(logs: np.ndarray) -> MatmulRate:
        launch, peak, memory, ramp, activation = np.exp(logs)
        return MatmulRate(launch, peak, memory, ramp, activation if casts else None)

    distance = lambda logs: np.log(
        matmul_seconds(rate(logs), cast, shapes, fmt) / shapes.seconds[fmt]
    )
    return rounded(rate(robust(distance, MATMUL)))


def fit_pass(shapes: Timings, name: str) -> Pass:
    """Fit the rate of a pass over activations."""
    shapes = shapes.at(shapes.passes[name] > 0)  # some are below what the clock shows
    distance = lambda logs: np.log(
        pass_seconds(Pass(*np.exp(logs)), shapes, name) / shapes.passes[name]
    )
    return rounded(Pass(*np.exp(robust(distance, PASS))))


def robust(distance: Any, given: np.ndarray) -> np.ndarray:
    """Minimize distances; distances beyond a few per cent count linearly."""
    start, *bounds = given
    return least_squares(distance, start, bounds=bounds, loss="soft_l1", f_scale=0.03).x


def rounded(rate: Any) -> Any:
    """Return a rate with three significant digits."""
    return type(rate)(*(None if x is None else float(f"{x:.3g}") for x in rate))


def fit(shapes: Timings) -> dict[str, Any]:
    """Fit all rates of one card."""
    formats = [fmt for fmt in COLUMNS if np.isfinite(shapes.seconds[fmt]).any()]
    passes = {name: fit_pass(shapes, name) for name in PASSES}
    return {fmt: fit_matmul(shapes, passes["cast"], fmt) for fmt in formats} | passes


def judge(rates: Mapping[str, Any], shapes: Timings) -> dict[str, tuple[float, float]]:
    """Return error and bias of each format and each pass."""
    ratios = {}
    for fmt in COLUMNS:
        timed = shapes.timed(fmt)
        if timed.m.size and rates.get(fmt) is not None:
            expected = matmul_seconds(rates[fmt], rates["cast"], timed, fmt)
            ratios[fmt] = expected / timed.seconds[fmt]
    for name in PASSES:
        timed = shapes.at(shapes.passes[name] > 0)
        ratios[name] = pass_seconds(rates[name], timed, name) / timed.passes[name]
    return {
        name: (float(np.median(abs(ratio - 1))), float(np.median(ratio)))
        for name, ratio in ratios.items()
        if ratio.size
    }


def right_answers(rates: Mapping[str, Any], shapes: Timings) -> dict[str, float]:
    """Return the share of shapes for which the rates tell if FP8, quantizing included, pays."""
    shares = {}
    for fmt in ("fp8", "blocks", "nvfp4"):
        timed = shapes.timed(fmt).timed("bf16")
        if not timed.m.size or rates.get(fmt) is None:
            continue
        expected, plain = (matmul_seconds(rates[f], rates["cast"], timed, f) for f in (fmt, "bf16"))
        measured = timed.seconds[fmt]
        if fmt == "fp8":
            measured = measured + sum(timed.passes.values())
            expected = expected + sum(pass_seconds(rates[p], timed, p) for p in PASSES)
        known = np.isfinite(measured)
        right = (expected < plain) == (measured < timed.seconds["bf16"])
        shares[fmt] = float(np.mean(right[known]))
    return shares


def without_a_size(shapes: Timings) -> dict[str, float]:
    """Return the largest error, for each format, of shapes whose m is not in the fit."""
    worst: dict[str, float] = {}
    for m in np.unique(shapes.m):
        rates = fit(shapes.at(shapes.m != m))
        for name, (error, _) in judge(rates, shapes.at(shapes.m == m)).items():
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def lines(rates: Mapping[str, Any], shapes: Timings, gpu: str, unseen: Any = None) -> Iterator[str]:
    """Print error and bias of each format, and the share of right answers."""
    right = right_answers(rates, shapes)
    for name, (error, bias) in judge(rates, shapes).items():
        line = f"{gpu:14}{name:8}{100 * error:7.1f} %{bias:8.2f}"
        line += f"{100 * right[name]:10.1f} %" if name in right else " " * 12
        yield line + (f"{100 * unseen[name]:10.1f} %" if unseen else "")


def halves(cards: Mapping[str, Timings], seed: int) -> Iterator[tuple[str, Any, Timings]]:
    """Give each card, rates of half of the shapes, and the other shapes."""
    every = sorted({shape for t in cards.values() for shape in zip(t.m, t.n, t.k, strict=True)})
    drawn = np.random.default_rng(seed).random(len(every)) < 0.5
    fitted = {shape for shape, is_drawn in zip(every, drawn, strict=True) if is_drawn}
    for gpu, t in cards.items():
        is_fitted = np.array([shape in fitted for shape in zip(t.m, t.n, t.k, strict=True)])
        yield gpu, fit(t.at(is_fitted)), t.at(~is_fitted)


def report(cards: Mapping[str, Timings], seed: int) -> Iterator[str]:
    """Fit each card on half of the shapes, and judge the others."""
    yield f"seed {seed} draws the half of the shapes that is fitted; the others are judged"
    yield f"{'GPU':14}{'':8}{'error':>9}{'bias':>8}{'pays?':>12}{'unseen m':>12}"
    for gpu, rates, others in halves(cards, seed):
        yield from lines(rates, others, gpu, without_a_size(cards[gpu]))


def errors(cards: Mapping[str, Timings], seed: int) -> Iterator[str]:
    """Give a table of errors, which the page on GPUs sums up."""
    columns = {"bf16": "bf16", "fp8": "FP8", "blocks": "FP8, blocks", "nvfp4": "NVFP4"}
    heads = [f"error, {name}" for name in (*columns.values(), "cast")]
    heads += [f"right, {name}" for name in list(columns.values())[1:]]
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for gpu, rates, others in halves(cards, seed):
        judged, right = judge(rates, others), right_answers(rates, others)
        found = [judged[name][0] if name in judged else None for name in (*columns, "cast")]
        found += [right.get(name) for name in list(columns)[1:]]
        cells = ("–" if x is None else f"{100 * x:.1f} %" for x in found)
        yield f"| {gpu} | {' | '.join(cells)} |"


def scaled(rates: Rates, timed: str, name: str) -> Rates:
    """Return the rates of a card that reaches the same shares of its peaks as a `timed` one."""
    peak, whole = PEAKS[name], PEAKS[timed]
    memory = peak.memory / whole.memory

    def matmul(rate: MatmulRate, share: float) -> MatmulRate:
        return rounded(rate._replace(peak=share * rate.peak, memory=memory * rate.memory))

    in_f4 = None
    if rates.nvfp4 is not None and peak.nvfp4:
        in_f4 = matmul(rates.nvfp4, peak.nvfp4 / whole.nvfp4)
    return Rates(
        bf16=matmul(rates.bf16, peak.bf16 / whole.bf16),
        fp8=matmul(rates.fp8, peak.fp8 / whole.fp8),
        blocks=matmul(rates.blocks, peak.fp8 / whole.fp8),
        cast=float(f"{memory * rates.cast:.3g}"),
        nvfp4=in_f4,
    )


def scaled_pass(rate: Pass, timed: str, name: str) -> Pass:
    """Return the rate of a pass on a card with another memory than a `timed` one."""
    return rounded(rate._replace(memory=PEAKS[name].memory / PEAKS[timed].memory * rate.memory))


def write(cards: Mapping[str, Timings]) -> None:
    """Write the rates of all shapes into `rates.toml` and `pass_rates.py`."""
    matmuls, passes = {}, {}
    for gpu, shapes in cards.items():
        found = fit(shapes)
        passes[gpu] = {name: found.pop(name) for name in PASSES}
        fitted = Rates(**found, cast=passes[gpu]["cast"].memory)
        matmuls[gpu] = committed.RATES[gpu] if gpu in MEASURED else fitted
    for name, timed in SCALED_FROM.items():
        matmuls[name] = scaled(matmuls[timed], timed, name)
        passes[name] = {p: scaled_pass(rate, timed, name) for p, rate in passes[timed].items()}
    path = Path(committed.__file__).with_name("rates.toml")
    head, *_ = path.read_text(encoding="utf-8").partition("\n[rates.")
    tables = (
        f'\n[rates."{gpu}"]\n{listed(rates._asdict(), "{} = {}")}' for gpu, rates in matmuls.items()
    )
    lists = re.sub(r"MatmulRate\((.*)\)", r"[\1]", "".join(tables))
    path.write_text(f"{head}{lists}", encoding="utf-8")
    rows = "".join(
        f'    "{gpu}": {{\n{listed(rates, "        {!r}: {},")}    }},\n'.replace("'", '"')
        for gpu, rates in passes.items()
    )
    put(Path(__file__).with_name("pass_rates.py"), "PASS_RATES", rows)


def put(path: Path, name: str, rows: str) -> None:
    """Put `rows` into the dictionary `name` of a file."""
    source = path.read_text(encoding="utf-8")
    old = re.compile(rf"\n{name} = \{{\n.*?\n\}}\n", re.DOTALL)
    path.write_text(old.sub(f"\n{name} = {{\n{rows}}}\n", source), encoding="utf-8")


def listed(rates: Mapping[str, Any], line: str) -> str:
    """Write each rate as a line of code."""
    return "".join(f"{line.format(k, spelled(x))}\n" for k, x in rates.items() if x is not None)


def spelled(rate: Any) -> str:
    """Write a rate as code."""
    if isinstance(rate, float):
        return f"{rate:g}"
    numbers = ", ".join(f"{x:g}" for x in rate if x is not None)
    return f"{type(rate).__name__}({numbers})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timings", type=Path, nargs="?", help="folder of the published timings")
    parser.add_argument("--seed", type=int, default=0, help="of the split by shape")
    parser.add_argument("--write", action="store_true", help="fit all shapes, into rates.toml")
    parser.add_argument("--judge", action="store_true", help="judge rates.toml; fit nothing")
    parser.add_argument("--table", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args(argv)
    if options.table:
        write_table()
    if options.timings is None:
        return
    cards = load(options.timings)
    if options.judge:
        for gpu, shapes in cards.items():
            if gpu not in PASS_RATES or gpu in MEASURED:
                print(f"{gpu}: rates.toml has no rates that were fitted to these timings")
                continue
            rates = committed.RATES[gpu]._asdict() | PASS_RATES[gpu]
            print(*lines(rates, shapes, gpu), sep="\n")
        return
    print(*report(cards, options.seed), sep="\n")
    if options.write:
        write(cards)
        print(*errors(cards, options.seed), sep="\n")


if __name__ == "__main__":
    main()
