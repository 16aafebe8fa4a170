"""A product of a model as plain data, and a report of them all as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jfp8.conversion.tables import table_html, table_lines

INSIDE_OF_ATTENTION = "inside of attention (convert with attention_products=True)"
_HEAD = ("layer", "product", "lhs", "rhs", "result", "times", "FLOPs", "how")


@dataclass(frozen=True)
class ProductRow:
    """One product of the program.

    Attributes:
      path: of the layer that computes it; empty if none does.
      layer: its type.
      kind: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``; of products in high precision ``"forward"`` or
        ``"backward"``.
      lhs, rhs, out: what is multiplied and what it gives, such as ``"e4m3fn[8,64]"``.
      fp8: whether both operands are in a narrow format.
      recipe: its name, if it has one.
      implementation: what the default device computes it with: ``"emulate"``, or what `cuda` says
        where that is an NVIDIA GPU; ``"jax"`` for products in high precision.
      reason: why it is not FP8.
      times: how often it is computed: iterations of loops.
      flops: multiplications and additions, of all times together.
      cuda: what an NVIDIA GPU computes it with, the current one if there is one: ``"xla"``
        (cuBLASLt's FP8 product), ``"mosaic_gpu"``, ``"cudnn"`` or ``"bf16"``; and after a colon
        the reason why each of those that would be better is not (see `choice.choose`).
      looks_ahead: of forward products, whether positions of a sequence share a scale, so that a
        later one changes an earlier result; see ``Recipe.is_causal``. With a history that has an
        entry, if the product has one.
    """

    path: str
    layer: str
    kind: str
    lhs: str
    rhs: str
    out: str
    fp8: bool
    recipe: str
    implementation: str
    reason: str
    times: int
    flops: int
    cuda: str = ""
    looks_ahead: bool = dataclasses.field(default=False, compare=False)


@dataclass(frozen=True, repr=False)
class Report:
    """What `report` found; prints as a table, and shows as one in Jupyter.

    Attributes:
      rows: every product, in the order of the program.
      causal: whether the program masks positions that come later, as far as that can be seen.
    """

    rows: tuple[ProductRow, ...]
    causal: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(row.flops for row in self.rows)

    @property
    def fp8_fraction(self) -> float:
        """The fraction of the FLOPs of all products that is FP8: 0 to 1."""
        return sum(row.flops for row in self.rows if row.fp8) / max(self.flops, 1)

    @property
    def unconverted(self) -> tuple[ProductRow, ...]:
        """The products in high precision."""
        return tuple(row for row in self.rows if not row.fp8)

    @property
    def looking_ahead(self) -> tuple[ProductRow, ...]:
        """If the model is causal, the forward products whose scales see later positions."""
        return tuple(row for row in self.rows if self.causal and row.looks_ahead)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "fp8_fraction": self.fp8_fraction,
            "flops": self.flops,
            "products": [dataclasses.asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """The report in one line."""
        n = sum(row.times for row in self.rows)
        fp8 = sum(row.times for row in self.rows if row.fp8)
        return (
            f"{100 * self.fp8_fraction:.1f} % of {_si(self.flops)}FLOPs are FP8: "
            f"{fp8} of {n} products."
        )

    def __str__(self) -> str:
        head, *lines = table_lines([_HEAD, *map(_cells, self.rows)])
        return "\n".join([head, "-" * len(head), *lines, self.summary(), *self._warning()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        unconverted = [number for number, row in enumerate(self.rows, 1) if not row.fp8]
        table = table_html([_HEAD, *map(_cells, self.rows)], faded=unconverted)
        said = "".join(f"<p><b>{line}</b></p>" for line in (self.summary(), *self._warning()))
        return f"{said}{table}"

    def _warning(self) -> list[str]:
        rows = self.looking_ahead
        if not rows:
            return []
        return [looks_ahead_message({row.path or row.layer: row.recipe for row in rows})]


def looks_ahead_message(recipes: Mapping[str, str]) -> str:
    """What to know of layers, by path, of a causal model, whose recipes let scales look ahead."""
    names = ", ".join(sorted({f'"{name}"' for name in recipes.values()}))
    layers = list(dict.fromkeys(recipes))
    listed = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    return (
        f"The model masks later positions, but under the recipe {names} the scales of {listed} "
        "depend on them: a later token changes the results of earlier ones, in training and not in "
        'decoding. Recipes that keep them apart: "rowwise", "block", "mxfp8"; "delayed" with its '
        "state (recipe.is_causal() says it of any). jfp8.debug.looks_ahead measures it."
    )


def _cells(row: ProductRow) -> tuple[str, ...]:
    layer = row.path or "(no layer)"
    how = f"{row.recipe}, {row.implementation}" if row.fp8 else f"high precision: {row.reason}"
    if row.cuda not in ("", row.implementation):
        how += f"; on CUDA {row.cuda}"
    return (layer, row.kind, row.lhs, row.rhs, row.out, str(row.times), _si(row.flops), how)


def _si(n: int) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {prefix}"
    return f"{n} "
