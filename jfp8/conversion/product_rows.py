"""Hold each product of a model as plain data, and print it as a line of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jfp8.conversion.tables import Table
from jfp8.scaling.printing import listed, si

NO_LAYER = "computed by no layer that can be converted"
INSIDE_OF_ATTENTION = "inside of attention (convert with attention=True)"
INSIDE_OF_OURS = "inside of attention (set attention_products=True of the layer)"
OWN_ATTENTION = (
    "attention by a function, which convert does not replace (call "
    "jfp8.linen.DotProductAttention or jfp8.nnx.DotProductAttention)"
)
AT_CODE = NO_LAYER, OWN_ATTENTION
"""Reasons after which reports name the line of code."""

SLOW = 0.97  # speed of a layer relative to bf16, below which a warning names it
_HEAD = ("layer", "product", "lhs", "rhs", "result", "times", "FLOPs", "how")


@dataclass(frozen=True)
class ProductRow:
    """Hold one product of the program.

    Attributes:
      path: the layer that computes it; empty if none does.
      layer: its type.
      kind: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``; of products in high precision ``"forward"`` or
        ``"backward"``.
      lhs, rhs, out: the operands and the result, such as ``"e4m3fn[8,64]"``.
      fp8: whether both operands are in a narrow format.
      recipe: its name, if it has one.
      implementation: the one on the default device: ``"emulate"``, or the same as `cuda`
        on an NVIDIA GPU and as `tpu` on a TPU; ``"jax"`` for products in high precision.
      reason: why it is not FP8.
      times: how often it is computed: iterations of loops.
      flops: multiplications and additions, of all times together.
      cuda: the implementation on an NVIDIA GPU, the current one if there is one: ``"xla"``
        (cuBLASLt's FP8 product), ``"mosaic_gpu"``, ``"cudnn"`` or
        ``"bf16"``; and after a colon why each of those that would be better is not used (see
        `kernels.cuda_backends`).
      tpu: where JAX traces for a TPU, what that computes it with: ``"mosaic_tpu"``, ``"xla"`` or
        ``"bf16"``, and reasons as in `cuda` (see `kernels.tpu.backend`).
      looks_ahead: for forward products, whether positions of a sequence share a scale, so that a
        later one changes an earlier result; see ``Recipe.is_causal``. For a product with a history,
        this is about the steps after its first entry.
      expected_us: microseconds for computing it once, quantizing included, by the model of
        `kernels.cost_model`; of products in high precision their time in bf16; None unless JAX
        traces for a GPU whose rates the model has.
      bf16_us: the same if the layer were not converted.
    """

    path: str
    layer: str
    kind: str
    lhs: str
    rhs: str
    out: str
    fp8: bool = False
    recipe: str = ""
    implementation: str = "jax"
    reason: str = ""
    times: int = 1
    flops: int = 0
    cuda: str = ""
    tpu: str = ""
    looks_ahead: bool = dataclasses.field(default=False, compare=False)
    expected_us: float | None = dataclasses.field(default=None, compare=False)
    bf16_us: float | None = dataclasses.field(default=None, compare=False)


def looks_ahead_message(recipes: Mapping[str, str]) -> str:
    """Warn about layers, by path, of a causal model whose recipes let scales look ahead."""
    names = ", ".join(sorted({f'"{name}"' for name in recipes.values()}))
    return (
        f"The model masks later positions, but under the recipe {names} the scales of "
        f"{listed(list(recipes))} "
        "depend on them: a later token changes the results of earlier ones, in training and not in "
        'decoding. Recipes that keep them apart: "rowwise", "block", "mxfp8"; "delayed" with its '
        "state (recipe.is_causal() says it of any). jfp8.debug.looks_ahead measures it."
    )


def slower_message(gains: Mapping[str, float], gpu: str) -> str:
    """Warn about layers, by path, that FP8 is expected to slow down."""
    named = [f"{path} ({gain:.2f} of its speed in bf16)" for path, gain in gains.items()]
    return (
        f"On {gpu}, FP8 is expected to slow down {listed(named)}. "
        'jfp8.convert(..., exempt=(*jfp8.EDGES, "slower")) leaves out slower layers. '
        f'"slower on {gpu}" leaves them out on any machine.'
    )


def blind_message(policy: str) -> str:
    """Warn about a policy of ``jax.checkpoint`` that does not see FP8 matmuls."""
    return (
        f"jax.checkpoint_policies.{policy} does not see the FP8 matmuls of jfp8's layers: a GPU "
        "computes them again in the backward pass, and a CPU saves float32 results. Pass "
        f"policy=jfp8.checkpoint_policies.{policy}."
    )


def product_table(rows: Sequence[ProductRow]) -> Table:
    """Return a head, and a line for each product."""
    return [_HEAD, *map(_cells, rows)]


def gain_of(rows: Iterable[ProductRow]) -> float | None:
    """Return the expected speed of products, relative to bf16.

    Products that are not FP8 count with their times in bf16. None if none is FP8, or no time is
    known.
    """
    timed = [(row, row.expected_us) for row in rows if row.expected_us is not None]
    if not any(row.fp8 for row, _ in timed):
        return None
    total = sum(row.times * us for row, us in timed)
    return sum(row.times * (row.bf16_us or 0.0) for row, _ in timed) / total


def _cells(row: ProductRow) -> tuple[str, ...]:
    how = f"{row.recipe}, {row.implementation}" if row.fp8 else f"high precision: {row.reason}"
    if row.cuda not in ("", row.implementation) and not row.tpu:
        how += f"; on CUDA {row.cuda}"
    what = row.path or "(no layer)", row.kind, row.lhs, row.rhs, row.out
    return (*what, str(row.times), si(row.flops), how)
