"""Statistics of one tensor in one step, as plain numbers: rows of tables, lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jfp8.conversion.product_report import Report

# The operands of each product of a layer.
OPERANDS = {"fprop": ("lhs", "rhs"), "dgrad": ("grad", "rhs"), "wgrad": ("lhs", "grad")}


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one quantized operand of a product, in one step.

    Below, ``x`` is the operand in high precision, ``s`` the scale of an element and
    ``x' = data * s`` its quantized value. All fractions are of `count`; only finite elements count
    in `amax`, `mse` and `sqnr`.

    Attributes:
      step: number of the training step; None if not given.
      path: place of the layer, ``"decoder/mlp/Dense_0"``.
      index: number among several stacked layers (``nn.scan``): ``(3,)``; ``()`` for others.
      tensor: ``"lhs"`` (the activation), ``"rhs"`` (the weight), ``"grad"`` (the gradient with
        respect to the result); or a result that the recipe quantizes: ``"y"``, ``"d_lhs"``,
        ``"d_rhs"``.
      products: the products that use it: ``"fprop"``, ``"dgrad"``, ``"wgrad"``, or two of them,
        ``"fprop+wgrad"``, if both use the same bytes.
      recipe: its name, ``"delayed"``.
      format: format of the data, ``"E4M3FN"``.
      order: position in the program: what comes earlier is computed earlier.
      count: number of elements, of all uses in the step (micro-batches, devices, repeated calls).
      amax: the largest ``|x|``.
      scale_min, scale_max: the smallest and the largest scale in use.
      underflow: fraction that is not zero in ``x`` and zero in ``x'``.
      overflow: fraction that saturated: ``|x|`` too large to round to ``format.max * s``.
      nonfinite: fraction that is NaN or Inf in ``x``.
      rms: ``sqrt(mean(x^2))``.
      mse: ``mean((x' - x)^2)``.
      sqnr: ``10 log10(sum(x^2) / sum((x' - x)^2))`` in dB; Inf where nothing was lost.
      headroom: ``log2(format.max * s / |x|)`` in bits, for the element where that is least: how
        often `amax` may double. Below 0 something saturated.
      exponents: how many elements have ``floor(log2 |x|) == e``, by ``e``. Zeros are left out, and
        subnormal f32 numbers count as ``e = -127``. Large tensors are sampled, see
        `jfp8.debug.stats`.
      history: length of the amax history that the scale comes from; 0 for other scales.
    """

    step: int | None
    path: str
    index: tuple[int, ...]
    tensor: str
    products: str
    recipe: str
    format: str
    order: int
    count: int
    amax: float
    scale_min: float
    scale_max: float
    underflow: float
    overflow: float
    nonfinite: float
    rms: float
    mse: float
    sqnr: float
    headroom: float
    exponents: Mapping[int, int] = dataclasses.field(repr=False)
    history: int = 0

    @property
    def layer(self) -> str:
        """Return the path with the index: ``"blocks/Dense_0[3]"``."""
        return self.path + "".join(f"[{i}]" for i in self.index)

    @property
    def name(self) -> str:
        """Name layer and tensor; and the products, if it is not quantized once for both."""
        whole = "+" in self.products or self.tensor not in ("lhs", "rhs", "grad")
        return f"{self.layer} {self.tensor}".lstrip() + ("" if whole else f" ({self.products})")

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        lost = [
            f"{100 * getattr(self, what):.3g} % {what}"
            for what in ("underflow", "overflow", "nonfinite")
            if getattr(self, what)
        ]
        parts = [f"{self.format}, amax {self.amax:.4g}", *lost, f"SQNR {self.sqnr:.1f} dB"]
        return f"{step}{self.name}: {', '.join(parts)}, headroom {self.headroom:.2f} bits"


NUMBERS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(TensorStats) if field.type == "float"
)
"""The fields of a row that are one floating-point number."""


def write_jsonl(path: str | Path, rows: Iterable[TensorStats]) -> None:
    """Append `rows` to a file, one JSON object per line. NaN and Inf are written as strings.

    Args:
      path: name of the file, which is made if there is none.
      rows: statistics of one or more steps.
    """
    with Path(path).open("a", encoding="utf-8") as file:
        for row in rows:
            plain = dataclasses.asdict(row)
            extreme = {k: json.dumps(plain[k]) for k in NUMBERS if not math.isfinite(plain[k])}
            file.write(json.dumps(plain | extreme, allow_nan=False) + "\n")


def read_jsonl(path: str | Path) -> tuple[TensorStats, ...]:
    """Return the rows that `write_jsonl` wrote.

    Args:
      path: name of the file.

    Returns:
      The rows, in the order of the file.

    Raises:
      ValueError: a line is no row of statistics; says which.
    """
    rows = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(_row_of(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a row that jfp8.debug.write_jsonl wrote ({error})."
                ) from error
    return tuple(rows)


def _row_of(plain: dict[str, Any]) -> TensorStats:
    changed: dict[str, Any] = {
        k: float(x) for k, x in plain.items() if x in ("NaN", "Infinity", "-Infinity")
    }
    changed["index"] = tuple(plain["index"])
    changed["exponents"] = {int(e): int(n) for e, n in plain["exponents"].items()}
    return TensorStats(**plain | changed)


def check_rows(rows: Any, function: str) -> list[TensorStats]:
    """Return `rows` as a list, or raise ``TypeError`` in the name of `function`."""
    several = isinstance(rows, Iterable) and not isinstance(rows, (str, bytes))
    found = list(rows) if several else [rows]
    for row in found:
        if not isinstance(row, TensorStats):
            raise TypeError(
                f"{function} takes rows of statistics, but one of them is a {type(row).__name__}. "
                "Rows come from stats.rows(step), where jfp8.debug.stats returned stats, from "
                "recorder.rows, or from jfp8.debug.read_jsonl(path)."
            )
    return found


def steps_of(rows: Iterable[TensorStats]) -> tuple[int, ...]:
    """Return the steps of these rows, in order, each once."""
    return tuple(sorted({row.step for row in rows if row.step is not None}))


def some_rows(rows: Iterable[TensorStats], function: str) -> list[TensorStats]:
    """Return `rows` to draw; raise ``ValueError`` for none, or if only some have a step."""
    found = check_rows(rows, f"jfp8.plot.{function}")
    if not found:
        raise ValueError(
            f"jfp8.plot.{function} got no rows. Recorder.rows is empty until a sampled step is "
            "over and the next one has begun; Stats.rows(), if nothing was computed in FP8."
        )
    if len({row.step is None for row in found}) > 1:
        raise ValueError(
            "Only some rows have a step, so their order is unknown. Give all of them one: "
            "Stats.rows(step=...)."
        )
    return found


def check_report(products: Any) -> Report:
    """Return `products`, or raise ``TypeError``."""
    if not isinstance(products, Report):
        raise TypeError(
            "products must be what jfp8.report(model, variables, x) returned, got "
            f"{type(products).__name__}."
        )
    return products
