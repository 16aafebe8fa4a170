"""Print the tables of docs/benchmarks.md that were measured on an H100 by `gpu.py`.

python benchmarks/gpu_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu_h100.json"
# Names of runs in the record, in the order of the figures in a cell.
RUNS = ("before-clusters", "after-clusters")

Record = dict[str, Any]
BLOCK = "width 4096, mlp 11008, heads 32, batch 4, length 2048"
_SQUARES = ("4096x4096", "8192x8192", "15872x4096")
_CUBES = ("4096x4096x4096", "8192x8192x8192", "15872x4096x16384")
_RECIPES = {name: f"`{name}`" for name in ("delayed", "current", "rowwise", "block", "mxfp8")}
_FLAX = {f"Flax {name}": f"Flax `{name}`" for name in ("Fp8DirectDotGeneralOp", "Fp8DotGeneralOp")}
_BLOCKS = {"bf16": "bf16", **_RECIPES}
_MATMULS = {
    "bf16": "bf16",
    "jfp8 xla fast": "cuBLASLt",
    "jfp8 mosaic_gpu fast": "Pallas",
    "PyTorch _scaled_mm fast": "PyTorch `_scaled_mm`",
    "jfp8 mosaic_gpu rows fast": "Pallas, scales of rows",
    "jfp8 xla full": "cuBLASLt, full accumulation",
    "jfp8 mosaic_gpu full": "Pallas, full accumulation",
    "jfp8 mosaic_gpu blocks": "Pallas, blocks of 128",
}
_QUANTIZING = {
    "quantize_tensor with amax": "one scale, both directions, amax",
    "quantize_lines": "rows and columns",
    "quantize_rows_in_blocks 1x128": "1×128",
    "quantize_tiles 128x128": "128×128",
    "quantize_rows_in_blocks 1x32 E8M0": "1×32 in E8M0",
    "tensor_amax": "amax",
    "row_and_column_amax": "amax of rows and columns",
    "XLA one scale, both directions, amax": "XLA: one scale, both directions, amax",
}


def found(record: Record, section: str, group: str, name: str) -> list[Record]:
    """Return the lines of a case, one for each run that has it."""
    lines = [r for run in RUNS for r in record["runs"][run]["records"]]
    return [r for r in lines if (r["section"], r["group"], r["name"]) == (section, group, name)]


def _shape(group: str) -> str:
    sizes = group.split("x")
    powers = {2: "²", 3: "³"}
    return sizes[0] + powers[len(sizes)] if len(set(sizes)) == 1 else "×".join(sizes)


def _grid(
    record: Record,
    section: str,
    groups: Iterable[str],
    names: dict[str, str],
    cell: Callable[[Record], str],
) -> str:
    """Return a table with a row for each name and a column for each group."""
    rows = [["", *map(_shape, groups)], ["---" for _ in ("", *groups)]]
    for name, shown in names.items():
        of_groups = [found(record, section, group, name) for group in groups]
        rows.append([shown, *(", ".join(map(cell, lines)) or "–" for lines in of_groups)])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def linear(record: Record) -> str:
    """Return speeds of linear layers, forward and backward, relative to bf16."""
    groups = ("1024x1024x1024", "2048x2048x2048", *_CUBES)
    return _grid(record, "linear", groups, _RECIPES | _FLAX, lambda r: f"{r['ratio']:.2f}")


def block(record: Record) -> str:
    """Return times of a training step of a Transformer block, and its first loss."""
    rows = ["| | ms | relative to bf16 | loss of the first step |", "|---|---|---|---|"]
    for name, shown in _BLOCKS.items():
        for r in found(record, "block", BLOCK, name):
            cells = f"{r['ms']:.2f} | {r['ratio']:.2f} | {r['first_loss']:.4f}"
            rows.append(f"| {shown} | {cells} |")
    return "\n".join(rows)


def matmuls(record: Record) -> str:
    """Return TFLOP/s of single matmuls, and their share of the best rate of cuBLASLt."""
    cell = lambda r: f"{r['tflops']:,.0f} ({r['percent_of_best']:.0f} %)"
    return _grid(record, "products", _CUBES, _MATMULS, cell)


def quantizing(record: Record) -> str:
    """Return the rates of kernels that quantize as a share of the rate of a large copy."""
    cell = lambda r: f"{r['percent_of_floor']:.0f} %"
    return _grid(record, "quantize", _SQUARES, _QUANTIZING, cell)


def experts(record: Record) -> str:
    """Return times of grouped matmuls, forward and backward."""
    rows = ["| | ms | relative to `ragged_dot` |", "|---|---|---|"]
    names = {"bf16": "`jax.lax.ragged_dot` in bf16", "delayed": "`delayed`"}
    for name, shown in (names | {"bf16 batched": "a batched matmul in bf16"}).items():
        (r,) = found(record, "experts", "16384x4096x4096, 8 equal", name)
        rows.append(f"| {shown} | {r['ms']:.2f} | {r['ratio']:.1f} |")
    return "\n".join(rows)


TABLES = (linear, block, matmuls, quantizing, experts)


def main() -> None:
    """Print every table below the first line of its docstring."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    for table in TABLES:
        print(f"{table.__doc__}\n\n{table(record)}\n")


if __name__ == "__main__":
    main()
