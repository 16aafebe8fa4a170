"""Count the bytes of one layer of a mixture of experts that a device sends and saves.

Formulas for `plan_experts.py`, which documents their assumptions and limits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from plan import all_gather, all_reduce, reduce_scatter

PARTIAL = 4  # bytes of a partial sum between devices of the tensor axis: f32


@dataclass(frozen=True)
class Model:
    """The sizes of one layer, and of the batch of one device.

    Attributes:
      width: features of a token.
      hidden: features between the two matmuls of an expert.
      experts, per_token: number of experts, and of experts per token.
      tokens: number per device.
      projections: columns of the first matmul / `hidden`: 2 for gated activations.
    """

    width: int
    hidden: int
    experts: int
    per_token: int
    tokens: int = 4096
    projections: int = 2

    @property
    def copies(self) -> int:
        """Return the copies of a device's tokens: the rows that it multiplies if balanced."""
        return self.tokens * self.per_token


MODELS = {
    # arXiv 2412.19437, section 4.2; its shared expert is left out.
    "deepseek-v3": Model(7168, 2048, experts=256, per_token=8),
    # arXiv 2401.04088, table 1.
    "mixtral-8x7b": Model(4096, 14336, experts=8, per_token=2),
}


@dataclass(frozen=True)
class Mesh:
    """The sizes of the mesh axes over which a layer is sharded.

    Attributes:
      expert: the experts, and the tokens.
      data: the tokens.
      fsdp: the tokens, and every matrix until it is gathered.
      tensor: columns of the first matmul's matrices, and rows of the second's.
    """

    expert: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def elements(self, model: Model) -> float:
        """Return elements of a device's matrices, gathered over fsdp."""
        of_expert = (model.projections + 1) * model.width * model.hidden
        return model.experts / self.expert * of_expert / self.tensor


def mesh_of(count: int, model: Model, longest: int = 64, data: int = 1, tensor: int = 1) -> Mesh:
    """Return a mesh of `count` devices, with the longest expert axis that `longest` allows.

    What remains is fsdp.

    Raises:
      ValueError: an axis has no devices; `count` is no multiple of the other axes; experts or
        hidden features cannot be divided evenly.
    """
    if min(count, longest, data, tensor) < 1:
        raise ValueError(
            f"An axis has at least one device, but these are {count} devices with data={data}, "
            f"tensor={tensor} and an expert axis of at most {longest}. Give positive numbers."
        )
    expert = min(longest, model.experts, max(1, count // (data * tensor)))
    others = expert * data * tensor
    if count % others or model.experts % expert or model.hidden % tensor:
        raise ValueError(
            f"{count} devices cannot be split into data={data}, tensor={tensor} and an expert "
            f"axis of {expert} for {model.experts} experts with {model.hidden} hidden features: "
            f"devices have to be a multiple of {others}, experts of {expert}, and features of "
            f"{tensor}. Choose other --devices, or a shorter axis by --longest-expert."
        )
    return Mesh(expert, data, count // others, tensor)


class Casts(NamedTuple):
    """The number of casts of a layer's operands, each by a separate kernel.

    Attributes:
      home: tokens on their own device, where each stands once.
      tokens, gradients: copies of tokens, and gradients of their results; rows of `width`.
      activated: operands of the second matmul; rows of `hidden`.
      projected: gradients of the first matmul's results; rows of `projections hidden`.
    """

    home: int = 0
    tokens: int = 0
    gradients: int = 0
    activated: int = 0
    projected: int = 0


@dataclass(frozen=True)
class Precision:
    """The FP8 matmuls, saved and sent tensors of a layer, and its casts.

    Attributes:
      kept, dispatched: keys of `ROW_BYTES`; of operands of matmuls, and of rows sent to experts.
      gathered, gradients: bytes per element of matrices and of their gradients, between devices.
    """

    name: str
    fp8_products: bool = True
    kept: str = "block"
    dispatched: str = "block"
    gathered: float = 1
    gradients: float = 2
    casts: Casts = Casts()


def precisions(scales: str, gradients: float) -> tuple[Precision, ...]:
    """Return the rows of a table, with FP8 in these `SCALES`.

    arXiv 2511.02302 counts 12 casts if each is a kernel, and 2 if kernels quantize their own
    results. The choice of the 12 tensors is ours: sent tensors are quantized, dequantized by the
    receiver, and quantized in the two directions of the matmuls; the other operands are
    quantized in these two.
    """
    fp8 = Precision("", kept=scales, dispatched=scales, gradients=gradients)
    of = lambda name, **fields: dataclasses.replace(fp8, name=name, **fields)
    wide = {"dispatched": "bf16", "gathered": 2}
    return (
        of("bf16", fp8_products=False, kept="bf16", **wide),
        of("FP8 matmuls only", casts=Casts(0, 2, 2, 2, 2), **wide),
        of("FP8, 12 casts", casts=Casts(1, 3, 4, 2, 2)),
        of("FP8, 2 casts", casts=Casts(home=1, gradients=1)),
    )


# Bytes that one device sends

# Bytes of a row by its number of elements. FP8 codes with a scale per tensor, which is not sent;
# with one in f32 per row or per block of 128; or with a byte for 32 elements.
ROW_BYTES: dict[str, Callable[[int], float]] = {
    "f32": lambda width: 4.0 * width,
    "bf16": lambda width: 2.0 * width,
    "tensor": lambda width: 1.0 * width,
    "row": lambda width: width + 4.0,
    "block": lambda width: width + 4.0 * math.ceil(width / 128),
    "mx": lambda width: width + 1.0 * math.ceil(width / 32),
}
SCALES = ("tensor", "row", "block", "mx")


def dispatch_bytes(
    tokens: float, per_token: int, width: int, expert: int, encoding: str, *, padded: bool = False
) -> float:
    """Return bytes that a device sends to experts: rows of tokens, or of results' gradients.

    One all-to-all over `expert` devices, of which each uses all others equally::

        (expert - 1) / expert  *  tokens per_token  *  bytes of a row

    Args:
      tokens: number on this device.
      per_token: copies of each.
      width: elements of a row.
      expert: devices that share the experts.
      encoding: encoding of a row; a key of `ROW_BYTES`.
      padded: each pair of devices exchanges a bucket large enough for all copies, as without
        a ragged exchange: ``expert tokens per_token`` rows instead of ``tokens per_token``.
    """
    rows = tokens * per_token * (expert if padded else 1)
    return (expert - 1) / expert * rows * ROW_BYTES[encoding](width)


def combine_bytes(
    tokens: float,
    per_token: int,
    width: int,
    expert: int,
    encoding: str = "bf16",
    *,
    padded: bool = False,
) -> float:
    """Return bytes that a device sends back: rows of results, or of tokens' gradients.

    As many rows as went there. For the arguments see `dispatch_bytes`.
    """
    return dispatch_bytes(tokens, per_token, width, expert, encoding, padded=padded)


def count_bytes(experts: int, expert: int) -> float:
    """Return bytes of i32[expert, experts], all-gathered: copies of each device per expert."""
    return all_gather(expert * experts, 4, expert)


def wire(model: Model, mesh: Mesh, precision: Precision) -> dict[str, float]:
    """Return bytes that one device sends in both passes, by purpose.

    ``dispatch`` and ``combine`` are each sent forward and backward. ``fsdp``: matrices gathered for
    either pass, and their gradients scattered. ``data``: these gradients. ``tensor``: partial sums
    of results and of gradients of tokens.
    """
    of_layer = (model.tokens, model.per_token, model.width, mesh.expert)
    elements = mesh.elements(model)
    return {
        "dispatch": 2 * dispatch_bytes(*of_layer, precision.dispatched),
        "combine": 2 * combine_bytes(*of_layer),
        "counts": count_bytes(model.experts, mesh.expert),
        "fsdp": 2 * all_gather(elements, precision.gathered, mesh.fsdp)
        + reduce_scatter(elements, precision.gradients, mesh.fsdp),
        "data": all_reduce(elements / mesh.fsdp, precision.gradients, mesh.data),
        "tensor": 2 * all_reduce(model.copies * model.width, PARTIAL, mesh.tensor),
    }


# Memory of one device


def rows_of(model: Model, mesh: Mesh, capacity_factor: float) -> dict[str, int]:
    """Return the rows that a device multiplies, or allocates.

    ``expected``: experts are used equally. ``worst``: all copies of the devices that share the
    experts go to one of them; a program of fixed shapes that drops none allocates that.
    ``capacity``: an expert gets at most `capacity_factor` times the mean, and drops the others.
    """
    everyone = mesh.expert * model.copies
    of_expert = max(1, math.ceil(capacity_factor * everyone / model.experts))
    capacity = min(everyone, model.experts // mesh.expert * of_expert)
    return {"expected": model.copies, "capacity": capacity, "worst": everyone}


def memory(
    model: Model, mesh: Mesh, precision: Precision, capacity_factor: float
) -> dict[str, float]:
    """Return bytes that a layer saves for its backward pass on a device, by rows of `rows_of`.

    Per row of the experts the operands of both matmuls, ``width + hidden`` elements, and the
    activation's input, ``projections hidden`` in bf16. Besides, for the gradient of the router's
    weights, the results of all copies at home in bf16.
    """
    of_row, hidden = ROW_BYTES[precision.kept], model.hidden // mesh.tensor
    row = of_row(model.width) + of_row(hidden) + 2 * model.projections * hidden
    home = model.copies * 2 * model.width
    rows = rows_of(model, mesh, capacity_factor)
    return {name: home + count * row for name, count in rows.items()}
