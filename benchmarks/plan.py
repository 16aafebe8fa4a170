r"""Estimate the bytes and the time of a training step on devices that you do not have, by formulas.

    python benchmarks/plan.py --width 4096 --layers 32 --vocabulary 32768 --sequence 4096 \
        --batch 128 --data 4 --fsdp 8

The model is the Transformer of `examples/lm`: per layer the kernels qkv, out, up and down, learned
positions, and a table of embeddings besides the logits' kernel. `examples/train_sharded.py` shards
it over devices in the same way. Each formula says what it counts and what it leaves out. Times are
what arithmetic and communication need at the given rates, so they are bounds, not forecasts. The
default rates are the peaks that NVIDIA publishes for the H200 SXM: for a forecast, pass rates
measured on your machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK = 128
IN_BLOCKS = 1 + 4 / BLOCK  # bytes per element: one of FP8, and its share of a scale in f32
IN_SAVED_BLOCKS = 1 + 2 / 32  # jfp8.save_in_fp8: 32 elements share a bf16


@dataclass(frozen=True)
class Model:
    """The sizes of a Transformer and of its batch, on all devices together."""

    width: int
    layers: int
    vocabulary: int
    sequence: int
    batch: int
    mlp: int = 4  # hidden features / width
    head_size: int = 128  # features of an attention head

    @property
    def kernels(self) -> int:
        """Count the elements of qkv, out, up and down: the FP8 matmuls."""
        return self.layers * (3 + 1 + 2 * self.mlp) * self.width**2

    @property
    def head(self) -> int:
        """Count the elements of the kernel of the logits: a matmul in high precision."""
        return self.vocabulary * self.width

    @property
    def tables(self) -> int:
        """Count the elements of embeddings, positions and norms."""
        norms = (2 * self.layers + 1) * 2 * self.width
        return (self.vocabulary + self.sequence) * self.width + norms

    @property
    def parameters(self) -> int:
        return self.kernels + self.head + self.tables

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Devices:
    """Numbers of devices that a step is sharded over."""

    data: int = 1  # share the batch
    fsdp: int = 1  # share the batch, and every parameter
    tensor: int = 1  # share columns or rows of every kernel

    @property
    def count(self) -> int:
        return self.data * self.fsdp * self.tensor

    def tokens(self, model: Model) -> float:
        return model.tokens / (self.data * self.fsdp)

    def parameters(self, model: Model) -> float:
        return ((model.kernels + model.head) / self.tensor + model.tables) / self.fsdp


@dataclass(frozen=True)
class Precision:
    """Bytes per element of everything that a step keeps or sends."""

    name: str
    fp8_products: bool
    weights: float = 4  # parameters in f32: their own masters
    gradients: float = 4
    moments: float = 8
    reduced: float = 2  # gradients between devices, over the data axis
    gathered: float = 2  # kernels of FP8 matmuls, over the fsdp axis
    gathered_others: float = 2  # other parameters
    scattered: float = 2  # gradients of those kernels, over the fsdp axis
    scattered_others: float = 2  # gradients of other parameters
    exchanged: float = 2  # activations between devices, over the tensor axis
    product_inputs: float = 2  # kept for the backward pass
    other_activations: float = 2  # kept for the backward pass: norms, gelu, v
    attends_again: bool = False  # in the backward pass, instead of keeping results of attention
    kernels: float = 0  # FP8 codes of weights, kept for the backward pass; not with FSDP
    muon: bool = False  # instead of Adam for kernels, with polar factors by FP8 matmuls


# The first row is the best that bf16 does: gradients and gathered weights are cast before they
# travel. What jfp8 has no FP8 for stays at that in every row.
BF16 = Precision("bf16", fp8_products=False)
PRODUCTS = replace(BF16, name="FP8 matmuls", fp8_products=True, product_inputs=1, kernels=1)
O1 = replace(PRODUCTS, name="O1: and FP8 gradients on the wire", reduced=IN_BLOCKS)
O2 = replace(O1, name="O2: and an FP8 and a 16-bit moment", moments=IN_BLOCKS + 2)
ADAM = replace(O1, name="O1 and jfp8.optim.adamw", moments=2 * IN_BLOCKS)
MUON = replace(ADAM, name="O1 and jfp8.optim.muon, FP8 matmuls", muon=True)
GATHER = replace(ADAM, name="... and jfp8.gather_weights", gathered=1)
SCATTER = replace(GATHER, name="... and its gradients_as=E4M3FN", scattered=IN_BLOCKS)
SAVED = replace(
    SCATTER,
    name="... and saved activations in FP8",
    other_activations=IN_SAVED_BLOCKS,
    attends_again=True,
)
PRECISIONS = (BF16, PRODUCTS, O1, O2, MUON, ADAM, GATHER, SCATTER, SAVED)


# Memory of one device


def memory(model: Model, devices: Devices, precision: Precision) -> dict[str, float]:
    """Return bytes on one device, by kind.

    Not counted: logits, temporary buffers, and what is gathered: of one layer, and the logits'.
    """
    share = devices.parameters(model)
    moments = share * precision.moments
    if precision.muon:  # one moment of a kernel, not two
        moments -= model.kernels / devices.tensor / devices.fsdp * precision.moments / 2
    codes = 0.0 if devices.fsdp > 1 else model.kernels / devices.tensor * precision.kernels
    return {
        "weights": share * precision.weights + codes,
        "gradients": share * precision.gradients,
        "moments": moments,
        "activations": model.layers * saved_per_layer(model, devices, precision),
    }


def saved_per_layer(model: Model, devices: Devices, precision: Precision) -> float:
    """Return the bytes that one layer saves for the backward pass.

    Per token, with w the width: the inputs of the four matmuls, w + w + w + mlp w; of the two
    norms, w + w; of gelu, mlp w; and of attention q and k, 2 w in 16 bits, and v, w. Its weights
    are computed again. Unless all of attention is, its results are saved, too: the log-sum-exp, an
    f32 per head, and the output, w in 16 bits; without FP8, the output is the input of out. Tensor
    parallelism divides q, k, v, the results of attention, the input of out, and all of mlp w.
    """
    whole, divided = 1.0, 1.0 / devices.tensor
    products = precision.product_inputs * (2 * whole + (1 + model.mlp) * divided)
    others = precision.other_activations * (2 * whole + (1 + model.mlp) * divided)
    results = 0 if precision.attends_again else 2 * precision.fp8_products + 4 / model.head_size
    return devices.tokens(model) * model.width * (products + others + (2 * 2 + results) * divided)


# Bytes that one device sends in a step


def all_reduce(elements: float, width: float, n: int) -> float:
    """Return the bytes of a mean that every device gets; the same for two exchanges of FP8."""
    return 2 * (n - 1) / n * elements * width


def all_gather(elements: float, width: float, n: int) -> float:
    """Return the bytes of gathering `elements`, of which each of `n` devices had one part."""
    return (n - 1) / n * elements * width


reduce_scatter = all_gather  # the same way back: of the whole, a device sends all parts but its own


def wire(model: Model, devices: Devices, precision: Precision) -> dict[str, float]:
    """Return the bytes that one device sends in a step, by axis of the mesh.

    Rings and pairwise exchanges. Not counted: amaxes, the loss and the sums in it, norms of
    gradients, and the exponents of the softmax where tensor parallelism divides the vocabulary.
    """
    kernels, head = model.kernels / devices.tensor, model.head / devices.tensor
    whole = kernels + head + model.tables
    activations = devices.tokens(model) * model.width
    # Kernels of layers are gathered for each pass; the others are kept.
    gathered = 2 * kernels * precision.gathered
    gathered += (head + model.tables) * precision.gathered_others
    scattered = kernels * precision.scattered + (head + model.tables) * precision.scattered_others
    # Parts of the momentum's two summands, in f32, and of polar factors, in bf16: see `optim.muon`.
    exchanged = reduce_scatter(1, 10 * kernels / devices.fsdp, devices.fsdp) * precision.muon
    return {
        "data": all_reduce(whole / devices.fsdp, precision.reduced, devices.data),
        "fsdp": all_gather(1, gathered, devices.fsdp)
        + reduce_scatter(1, scattered, devices.fsdp)
        + exchanged,
        # Forward after out and down, backward before up, qkv and the logits.
        "tensor": (4 * model.layers + 1)
        * all_reduce(activations, precision.exchanged, devices.tensor),
    }


# Time


@dataclass(frozen=True)
class Rates:
    """Rates of one device, in units of 1 / s, as given by the user."""

    bf16_flops: float
    fp8_flops: float
    memory: float  # bytes read or written
    links: dict[str, float]  # bytes sent, by axis of the mesh


def flops(model: Model) -> dict[str, float]:
    """Count the FLOPs of a step on all devices, 2 forward and 4 backward; attention is causal."""
    attention = model.layers * model.tokens * model.sequence * model.width
    return {
        "layers": 6.0 * model.kernels * model.tokens,
        "logits": 6.0 * model.vocabulary * model.width * model.tokens,
        "attention": 6.0 * attention,
    }


def polar_flops(model: Model, steps: int = 5) -> float:
    """Count polar factors' operations: (4 r + 2) w^3 per step of a kernel of w times r w."""
    ratios = (3, 1, model.mlp, model.mlp)
    return model.layers * steps * sum(4.0 * r + 2 for r in ratios) * model.width**3


def seconds(model: Model, devices: Devices, precision: Precision, rates: Rates) -> dict[str, float]:
    """Return bounds of the time of a step.

    ``products``, ``optimizer`` and the axes are what each takes at full rate; the optimizer reads
    weights, gradients and moments, and writes weights and moments; Muon computes
    polar factors, each device its share over fsdp and tensor. ``overlapped`` supposes that
    communication over data and fsdp hides behind products, or they behind it, and that nothing
    hides tensor parallelism and the optimizer; ``in_turn`` that nothing hides anything. Norms,
    casts, softmax and the like are not counted in either.
    """
    work = flops(model)
    layers = work["layers"] / (rates.fp8_flops if precision.fp8_products else rates.bf16_flops)
    rest = (work["logits"] + work["attention"]) / rates.bf16_flops
    products = (layers + rest) / devices.count
    held = memory(model, devices, replace(precision, kernels=0))
    moved = 2 * held["weights"] + held["gradients"] + 2 * held["moments"]
    optimizer = moved / rates.memory
    if precision.muon:
        optimizer += polar_flops(model) / devices.fsdp / devices.tensor / rates.fp8_flops
    sending = {
        axis: sent / rates.links[axis] for axis, sent in wire(model, devices, precision).items()
    }
    hidden = max(products, sending["data"] + sending["fsdp"])
    return {
        "products": products,
        "optimizer": optimizer,
        **sending,
        "overlapped": hidden + sending["tensor"] + optimizer,
        "in_turn": products + sum(sending.values()) + optimizer,
    }


def plan(model: Model, devices: Devices, rates: Rates) -> list[dict[str, object]]:
    """Return a row for every precision."""
    return [
        {
            "precision": precision.name,
            "memory": memory(model, devices, precision),
            "wire": wire(model, devices, precision),
            "seconds": seconds(model, devices, precision, rates),
        }
        for precision in PRECISIONS
    ]


def table(rows: list[dict]) -> str:
    """Write Markdown: GB per device and GB sent per step (10^9 bytes), milliseconds per step."""
    head = (
        "| | weights | gradients | moments | activations | sum GB "
        "| sent data | fsdp | tensor GB | products | in turn | overlapped ms |"
    )
    lines = [head, "|---|" + "---|" * (head.count("|") - 2)]
    for row in rows:
        held = [value / 1e9 for value in row["memory"].values()]
        sent = [value / 1e9 for value in row["wire"].values()]
        ms = [1e3 * row["seconds"][name] for name in ("products", "in_turn", "overlapped")]
        cells = [f"{x:.1f}" for x in (*held, sum(held))]
        cells += [f"{x:.2f}" for x in sent] + [f"{x:.0f}" for x in ms]
        lines.append(f"| {row['precision']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def add_rates(group: argparse._ArgumentGroup) -> None:
    """Add the rates of a device, except for its links."""
    # fmt: off
    group.add_argument("--bf16-tflops", type=float, default=989.5,
                       help="half of the 1979 with sparsity (%(default)s)")
    group.add_argument("--fp8-tflops", type=float, default=1979,
                       help="half of the 3958 with sparsity (%(default)s)")
    group.add_argument("--memory-bandwidth", type=float, default=4800.0,
                       help="GB/s (%(default)s)")
    # fmt: on


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the sizes, devices and rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # fmt: off
    group = parser.add_argument_group("model")
    group.add_argument("--width", type=int, required=True)
    group.add_argument("--layers", type=int, required=True)
    group.add_argument("--mlp", type=int, default=4, help="hidden features / width (%(default)s)")
    group.add_argument("--vocabulary", type=int, required=True)
    group.add_argument("--sequence", type=int, required=True)
    group.add_argument("--batch", type=int, required=True, help="sequences, on all devices")

    group = parser.add_argument_group("devices")
    for axis in ("data", "fsdp", "tensor"):
        group.add_argument(f"--{axis}", type=int, default=1, help="(%(default)s)")

    group = parser.add_argument_group(
        "rates of one device; the defaults are peaks from the data sheet of the NVIDIA H200 SXM"
    )
    add_rates(group)
    group.add_argument("--data-bandwidth", type=float, default=50.0,
                       help="GB/s sent over the data axis: a 400 Gb/s network card (%(default)s)")
    group.add_argument("--fsdp-bandwidth", type=float, default=450.0,
                       help="GB/s sent over the fsdp axis: half of the 900 of NVLink, which count "
                       "both directions (%(default)s)")
    group.add_argument("--tensor-bandwidth", type=float, default=450.0,
                       help="GB/s sent over the tensor axis (%(default)s)")
    # fmt: on
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan."""
    a = make_parser().parse_args(argv)
    model = Model(a.width, a.layers, a.vocabulary, a.sequence, a.batch, a.mlp)
    devices = Devices(a.data, a.fsdp, a.tensor)
    links = {axis: 1e9 * getattr(a, f"{axis}_bandwidth") for axis in ("data", "fsdp", "tensor")}
    rates = Rates(1e12 * a.bf16_tflops, 1e12 * a.fp8_tflops, 1e9 * a.memory_bandwidth, links)
    print(
        f"{model.parameters / 1e9:.2f} G parameters, {model.tokens:,} tokens in a step, "
        f"{devices.count} devices\n\n{table(plan(model, devices, rates))}"
    )


if __name__ == "__main__":
    main()
