"""Compute rates, floors and targets from raw times, and print a table."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]

# The floor of a line. For a chain of kernels it is the sum of their parts, for a single kernel the
# larger of its two.
_CHAINS = ("alone", "linear", "block", "attention", "experts", "fusions")
_RATES = ("ratio", "tflops", "gbs", "floor_ms", "percent_of_floor", "percent_of_best")


def complete(result: Record) -> Record:
    """`result`, as `records.load` returns it, with rates, ceilings and targets."""
    on_gpu = result["device"]["platform"] == "gpu"
    limits = derive(result["records"], on_gpu)
    return {
        **result,
        "ceilings": limits,
        "targets": targets(result["records"]) if on_gpu else [],
    }


def derive(records: list[Record], on_gpu: bool) -> Record:
    """Add ratios, rates and floors to `records` in place; returns the ceilings they refer to.

    All are None unless `on_gpu`: a CPU that interprets kernels says nothing about their speed.
    """
    wrong = {r["name"].split(":")[0] for r in records if r["section"] == "checks" and "error" in r}
    # Programs that ran alone have no baseline next to them.
    in_bf16 = {
        r["group"]: r["ms"]
        for r in records
        if (r["section"], r["name"]) == ("alone", "bf16") and "ms" in r
    }
    for record in records:
        if "ms" not in record:
            continue
        record.update(dict.fromkeys(_RATES))
        record["kernel_failed_its_check"] = not wrong.isdisjoint(record["uses"])
        if on_gpu:
            seconds = record["ms"] / 1e3
            flops = record.get("flops_f8", 0) + record.get("flops_bf16", 0)
            record["tflops"] = flops / seconds / 1e12 if flops else None
            record["gbs"] = record["bytes"] / seconds / 1e9 if "bytes" in record else None
            is_alone = record["section"] == "alone"
            base = in_bf16.get(record["group"]) if is_alone else record["baseline_ms"]
            record["ratio"] = base / record["ms"] if base else None
    limits = (
        _ceilings(records) if on_gpu else dict.fromkeys(("bf16_tflops", "fp8_tflops", "copy_gbs"))
    )
    for record in records:
        if "ms" not in record or not on_gpu:
            continue
        parts = [
            _over(record.get("flops_f8"), limits["fp8_tflops"], 1e9),
            _over(record.get("flops_bf16"), limits["bf16_tflops"], 1e9),
            _over(record.get("bytes"), limits["copy_gbs"], 1e6),
        ]
        if None not in parts and any(parts):
            products, copies = parts[0] + parts[1], parts[2]
            chain = record["section"] in _CHAINS
            record["floor_ms"] = products + copies if chain else max(products, copies)
            record["percent_of_floor"] = 100 * record["floor_ms"] / record["ms"]
        if record["section"] == "products":
            best = best_cublaslt(records, record["group"])
            if best and record["tflops"]:
                record["percent_of_best"] = 100 * record["tflops"] / best
    return limits


def _over(work: float | None, rate: float | None, unit: float) -> float | None:
    """Milliseconds for `work`; None if it is not known how fast it can be done."""
    if not work:
        return 0.0
    return work / (rate * unit) if rate else None


def _ceilings(records: list[Record]) -> Record:
    def best(unit: str, rate: str, sections: Iterable[str]) -> float | None:
        rates = [
            r[rate]
            for r in records
            if r["section"] in sections
            and r.get(rate)
            and unit in r
            and not r["kernel_failed_its_check"]
        ]
        return max(rates, default=None)

    return {
        "bf16_tflops": best("flops_bf16", "tflops", ("ceilings", "products")),
        "fp8_tflops": best("flops_f8", "tflops", ("ceilings", "products")),
        "copy_gbs": best("bytes", "gbs", ("ceilings",)),
    }


def is_cublaslt(record: Record) -> bool:
    """Return True for one FP8 matmul by cuBLASLt."""
    if record["name"].startswith("PyTorch _scaled_mm"):
        return "rows" not in record["name"]  # those are CUTLASS's
    return bool((record.get("program") or {}).get("kernels", {}).get("cublasLt f8"))


def best_cublaslt(records: list[Record], group: str) -> float | None:
    """TFLOP/s of the best of them for one shape."""
    rates = [
        r["tflops"]
        for r in records
        if r["section"] == "products" and r["group"] == group and r.get("tflops") and is_cublaslt(r)
    ]
    return max(rates, default=None)


def _find(records: list[Record], section: str, group: str, name: str | None) -> Record | None:
    for r in records:
        if (r["section"], r["group"], r["name"]) == (section, group, name) and "ms" in r:
            return r
    return None


# Targets.


def targets(records: list[Record]) -> list[Record]:
    """Compare targets of the kernels with their measured values."""
    found: list[Record] = []

    def add(what: str, target: float, measured: float | None, unit: str) -> None:
        met = None if measured is None else measured >= target
        found.append(
            {"what": what, "target": target, "measured": measured, "unit": unit, "met": met}
        )

    def of(section: str, group: str, name: str, key: str) -> float | None:
        record = _find(records, section, group, name)
        return record.get(key) if record and not record["kernel_failed_its_check"] else None

    large, published, small = "8192x8192x8192", "15872x4096x16384", "4096x4096x4096"
    for group in (large, published, small):
        ours = [
            r["percent_of_best"]
            for r in records
            if r["section"] == "products"
            and r["group"] == group
            and r["name"].startswith("jfp8")
            and r["name"].endswith(" fast")
            and r.get("percent_of_best")
            and not r["kernel_failed_its_check"]
        ]
        add(f"FP8 product, {group}", 90, max(ours, default=None), "% of the best cuBLASLt")
    for recipe, group, target in (
        ("delayed", large, 1.75),
        ("delayed", published, 1.75),
        ("delayed", small, 1.35),
        ("current", large, 1.58),
        ("current", published, 1.58),
        ("block", large, 1.30),
        ("block", published, 1.30),
    ):
        add(f"linear {recipe}, {group}", target, of("linear", group, recipe, "ratio"), "x bf16")
    for section, group, recipe, target in (
        ("alone", "7B block, step", "delayed", 1.50),
        ("alone", "7B block, step", "block", 1.28),
        ("alone", "GPT layer, forward and backward", "delayed", 1.60),
        ("experts", "16384x4096x4096, 8 equal", "delayed", 1.0),
        ("experts", "16384x2048x1408, 64 equal", "delayed", 1.0),
    ):
        what = f"{section} {recipe}, {group}"
        add(what, target, of(section, group, recipe, "ratio"), "x bf16")
    blocks = of("products", large, "jfp8 mosaic_gpu blocks", "tflops")
    add(f"block-scaled product, {large}", 0.8 * 1550, blocks, "TFLOP/s")
    slowest: dict[str, Record] = {}
    for r in records:
        ours = r["section"] == "quantize" and not r["name"].startswith(("XLA", "copy"))
        if ours and r.get("percent_of_floor") and not r["kernel_failed_its_check"]:
            least = slowest.setdefault(r["group"], r)
            if r["percent_of_floor"] < least["percent_of_floor"]:
                slowest[r["group"]] = r
    for group, r in slowest.items():
        what = f"quantize {group}, slowest: {r['name']}"
        add(what, 85, r["percent_of_floor"], "% of the copy rate")
    return found


# The table.


def table(result: Record) -> str:
    """All of `result` in a hundred lines or so; ± is half the distance of percentiles 10 and 90."""
    lines: list[str] = []
    records = result["records"]
    for section, what in result["sections"].items():
        own = [r for r in records if r["section"] == section]
        lines += ["", f"{section} ({what['seconds']} s)"]
        lines += _SHOWN.get(section, _timed)(own)
    lines += [
        "",
        "ceilings: " + ", ".join(f"{k} {_number(v)}" for k, v in result["ceilings"].items()),
    ]
    if any(t["measured"] is not None for t in result["targets"]):
        lines += ["", "targets"]
        for t in result["targets"]:
            verdict = {True: "met", False: "MISSED", None: "not measured"}[t["met"]]
            lines.append(
                f"  {t['what'][:70]:70} {_number(t['measured']):>8} of {_number(t['target'])} "
                f"{t['unit']}: {verdict}"
            )
    device, versions = result["device"], result["versions"]
    lines += [
        "",
        f"{device['kind']} ({device['platform']}), driver {device['driver']}, {result['date']}",
    ]
    lines.append(", ".join(f"{name} {version}" for name, version in versions.items() if version))
    lines += _conditions(records)
    if result["smoke"]:
        lines.append("A smoke test: kernels interpreted on a CPU, whose times mean nothing.")
    return "\n".join(lines)


def _conditions(records: list[Record]) -> list[str]:
    """Whose clock it was, and how fast the device ran."""
    timed = [r for r in records if "ms" in r]
    if not timed:
        return []
    counts = collections.Counter(r["clock"] for r in timed)
    lines = ["times by " + ", ".join(f"{clock} ({n})" for clock, n in counts.items())]
    if seen := [r["clocks"] for r in timed if r.get("clocks")]:
        least, most = (f([c["sm_mhz"] for c in seen]) for f in (min, max))
        throttled = sorted({reason for c in seen for reason in c["throttled"]})
        lines.append(
            f"multiprocessors at {least:.0f} to {most:.0f} MHz of "
            f"{max(c['sm_mhz_most_possible'] for c in seen):.0f}; throttled by: "
            f"{', '.join(throttled) or 'nothing'}"
        )
    return lines


def _timed(records: list[Record]) -> list[str]:
    """A line for each name, a column for each group."""
    groups = list(dict.fromkeys(r["group"] for r in records if r["group"]))
    names = list(dict.fromkeys(r["name"] for r in records if r["name"]))
    width = max([len(name) for name in names], default=0)
    lines = [f"  {'':{width}}" + "".join(f"  {group[:36]:>36}" for group in groups)]
    for name in names:
        cells = []
        for group in groups:
            at = [r for r in records if (r["group"], r["name"]) == (group, name)]
            cells.append(_cell(at[0]) if at else "")
        lines.append(f"  {name:{width}}" + "".join(f"  {cell:>36}" for cell in cells))
    return lines + _complaints(records)


def _cell(record: Record) -> str:
    if "error" in record:
        return "FAILED"
    if "skipped" in record:
        return "skipped"
    half = 50 * (record["ms_p90"] - record["ms_p10"]) / record["ms"]
    parts = [f"{record['ms']:.4g} ms ±{half:.0f}%"]
    if record["section"] in _CHAINS:
        parts += [_number(record["ratio"], "x"), _number(record["percent_of_floor"], "% floor")]
    elif record["section"] == "products":
        parts += [_number(record["tflops"], " T"), _number(record["percent_of_best"], "% best")]
    elif record["section"] == "quantize":
        parts += [_number(record["gbs"], " GB/s"), _number(record["percent_of_floor"], "%")]
    else:
        parts += [_number(record["tflops"], " T"), _number(record["gbs"], " GB/s")]
    if record["kernel_failed_its_check"]:
        parts.append("WRONG")
    return " ".join(part for part in parts if part)


def _checks(records: list[Record]) -> list[str]:
    failed = sum("error" in r for r in records)
    skipped = sum("skipped" in r for r in records)
    passed = len(records) - failed - skipped
    lines = [f"  {passed} passed, {failed} failed, {skipped} skipped"]
    if poisoned := [r["poisoned"] for r in records if "poisoned" in r]:
        lines.append(f"  before each run NaN was in {poisoned[0]:.0%} of what it was to write")
    return lines + _complaints(records)


def _complaints(records: list[Record]) -> list[str]:
    """Why lines have no figure, each reason once."""
    reasons: dict[str, list[str]] = {}
    for r in records:
        if message := r.get("error"):
            where = f"{r['group']}: {r['name']}" if r["section"] == "checks" else r["name"]
            reasons.setdefault(message.splitlines()[0][:160], []).append(where[:90])
    lines = []
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  FAILED {names[0] or 'the section'}{more}: {reason}")
    skipped = [r["name"] for r in records if "skipped" in r]
    if skipped:
        more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        lines.append(f"  skipped: {skipped[0] or 'the section'}{more}")
    return lines


def _accumulation(records: list[Record]) -> list[str]:
    lines = [
        f"  {'':28} {'relative error':>15} {'mean error':>12} {'as hopper':>10} {'every_128':>10}"
    ]
    group = None
    for r in records:
        if r["group"] != group:
            group = r["group"]
            lines.append(f"  {group}")
        if "relative_error" in r:
            lines.append(
                f"    {r['name']:26} {r['relative_error']:15.3g} {r['mean_error']:12.2g} "
                f"{r['equal_to_hopper']:10.1%} {r['equal_to_hopper_every_128']:10.1%}"
            )
    return lines + _complaints(records)


def _steps(records: list[Record]) -> list[str]:
    """The times, the clock and power, the bytes that a program holds, and its longest kernels."""
    lines = []
    for r in records:
        if "ms" not in r:
            continue
        lines.append(f"  {r['group']}: {r['name']}: {_cell(r)}")
        if clocks := r.get("clocks"):
            power = f"{clocks['sm_mhz']:.0f} MHz, {clocks['watts_median']:.0f} W"
            lines.append(f"    {power}, busy {_number(r.get('busy_ms'))} ms")
        sizes = (r.get("memory") or {}).items()
        held = ", ".join(f"{k} {v / 2**30:.2f} GiB" for k, v in sizes if v is not None)
        lines.append(f"    held: {held}")
        for kernel, us in list(r.get("kernels_us", {}).items())[:8]:
            lines.append(f"    {us:8.1f} us  {kernel[:90]}")
    return lines + _complaints(records)


def _attention(records: list[Record]) -> list[str]:
    lines = _timed(records)
    for r in records:
        if "relative_errors" in r:
            errors = ", ".join(f"{name} {e:.2g}" for name, e in r["relative_errors"].items())
            lines.append(f"  {r['group']}: {r['name']}: errors of {errors}")
    return lines


def _facts(records: list[Record]) -> list[str]:
    lines = []
    for r in records:
        if "expected" in r:
            seen = r.get("program") or {"same_bits": r.get("same_bits")}
            shown = {k: v for k, v in seen.items() if k != "memory" and v not in ({}, None)}
            lines.append(f"  {r['name']}: expected {r['expected']}; found {str(shown)[:240]}")
    return lines + _complaints(records)


_SHOWN: dict[str, Callable[[list[Record]], list[str]]] = {
    "checks": _checks,
    "accumulation": _accumulation,
    "alone": _steps,
    "block": _steps,
    "attention": _attention,
    "facts": _facts,
}


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "" if unit else "-"
    return f"{value:.3g}{unit}" if abs(value) < 1000 else f"{value:.0f}{unit}"
