"""Plan a mixture of experts on devices that you do not have: bytes and time of one layer.

    python benchmarks/plan_experts.py --model deepseek-v3 --devices 8 64 256 1024
    python benchmarks/plan_experts.py --width 4096 --hidden 14336 --experts 8 --per-token 2

One layer of experts, its forward and its backward pass, on a mesh with the axes data, fsdp, expert
tensor. Tokens are sharded over data, fsdp and expert. Each copy of a token is sent to the
device of its expert and its result back, over the expert axis; so are gradients. We assume that
experts are used equally and that each copy is sent separately. Not counted are the router,
activations and norms, the optimizer, shared experts, amaxes, and the rows by which tiles are
padded.

Times are lower bounds from arithmetic, memory and communication at the given rates, not forecasts.
The default rates are the peaks of `plan.py`. The bytes are from `expert_bytes.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable

from expert_bytes import (
    MODELS,
    SCALES,
    Mesh,
    Model,
    Precision,
    memory,
    mesh_of,
    precisions,
    wire,
)
from plan import Rates, add_rates

NODE = 8  # devices that NVLink connects
CAST = 3  # bytes per element that a cast reads and writes: 2 of bf16, 1 of FP8, either way
CAST_WEIGHT = 6  # reads f32; writes bf16, or FP8 for both directions of the matmuls


def product_seconds(model: Model, mesh: Mesh, precision: Precision, rates: Rates) -> float:
    """Return seconds of the six grouped matmuls: each by arithmetic, or by its bytes."""
    operand, rate = (1, rates.fp8_flops) if precision.fp8_products else (2, rates.bf16_flops)
    rows, groups, hidden = model.copies, model.experts / mesh.expert, model.hidden / mesh.tensor
    total = 0.0
    for k, n in ((model.width, model.projections * hidden), (hidden, model.width)):
        lhs, rhs, result = rows * k, groups * k * n, rows * n
        for moved in (
            operand * (lhs + rhs) + 2 * result,
            operand * (result + rhs) + 2 * lhs,
            operand * (lhs + result) + precision.gradients * rhs,
        ):
            total += max(2 * rows * k * n / rate, moved / rates.memory)
    return total


def cast_bytes(model: Model, mesh: Mesh, precision: Precision) -> float:
    """Return bytes that casts read and write in both passes.

    Matrices are cast in every precision, each device its shard. If kernels quantize their own
    results, nothing is counted; nor is the transposition of codes after arrival.
    """
    casts, hidden = precision.casts, model.hidden / mesh.tensor
    of_width = casts.home * model.tokens + (casts.tokens + casts.gradients) * model.copies
    of_hidden = (casts.activated + casts.projected * model.projections) * model.copies
    elements = of_width * model.width + of_hidden * hidden
    return CAST * elements + CAST_WEIGHT * mesh.elements(model) / mesh.fsdp


def links(mesh: Mesh, nvlink: float, network: float) -> dict[str, float]:
    """Return bytes that one device sends per second, by axis.

    Neighbors on the tensor axis are next to each other, then those on expert, fsdp and data. An
    axis within a node has the rate of NVLink. Of a longer one, a ring is as fast as the network;
    an all-to-all sends to those in the node by NVLink, and at the same time to all others by the
    network.
    """
    rates, distance = {}, 1
    for axis in ("tensor", "expert", "fsdp", "data"):
        n = getattr(mesh, axis)
        within = distance * n <= NODE
        rates[axis] = nvlink if within else network
        if axis == "expert" and not within:
            near = (max(1, NODE // distance) - 1) / (n - 1)
            rates[axis] = 1 / max(near / nvlink, (1 - near) / network)
        distance *= n
    return rates


def seconds(
    model: Model, mesh: Mesh, precision: Precision, rates: Rates, alpha: float
) -> dict[str, float]:
    """Return bounds of the time of both passes.

    ``exchange`` is four all-to-alls and the counts; each takes at least `alpha` seconds for each
    other device. ``overlapped`` supposes, as `plan.seconds` does, that communication over data and
    fsdp hides behind products and casts, or they behind it, and that nothing hides the exchange and
    tensor parallelism; ``in_turn`` that nothing hides anything.
    """
    sent = wire(model, mesh, precision)
    travelling = sent["dispatch"] + sent["combine"] + sent["counts"]
    found = {
        "products": product_seconds(model, mesh, precision, rates),
        "casts": cast_bytes(model, mesh, precision) / rates.memory,
        "exchange": travelling / rates.links["expert"] + 5 * alpha * (mesh.expert - 1),
        "weights": sum(sent[axis] / rates.links[axis] for axis in ("fsdp", "data")),
        "tensor": sent["tensor"] / rates.links["tensor"],
    }
    hidden = max(found["products"] + found["casts"], found["weights"])
    return {
        **found,
        "in_turn": sum(found.values()),
        "overlapped": hidden + found["exchange"] + found["tensor"],
    }


def plan(
    model: Model,
    meshes: list[Mesh],
    rows: tuple[Precision, ...],
    rates: Callable[[Mesh], Rates],
    *,
    alpha: float,
    capacity_factor: float,
) -> list[dict]:
    """A row for every mesh and precision; `faster` is the first precision's time over its own."""
    found = []
    for mesh in meshes:
        first = seconds(model, mesh, rows[0], rates(mesh), alpha)
        for precision in rows:
            took = seconds(model, mesh, precision, rates(mesh), alpha)
            found.append(
                {
                    "mesh": dataclasses.asdict(mesh),
                    "precision": precision.name,
                    "wire": wire(model, mesh, precision),
                    "memory": memory(model, mesh, precision, capacity_factor),
                    "seconds": took,
                    "faster": {k: first[k] / took[k] for k in ("in_turn", "overlapped")},
                }
            )
    return found


def table(rows: list[dict], capacity_factor: float) -> str:
    """Return Markdown: MB sent (10^6 bytes), GB kept (10^9), milliseconds, bf16's time over it."""
    head = (
        "| devices | precision | dispatch | combine | counts | weights | tensor MB | kept expected "
        f"| capacity {capacity_factor:g} | worst GB | products | casts | exchange | weights "
        "| in turn | overlapped ms | bf16 / in turn | bf16 / overlapped |"
    )
    lines = [head, "|---|" + "---|" * (head.count("|") - 2)]
    for row in rows:
        sent = {name: moved / 1e6 for name, moved in row["wire"].items()}
        sent["weights"] = sent["fsdp"] + sent["data"]
        ms = {name: 1e3 * took for name, took in row["seconds"].items()}
        cells = [str(math.prod(row["mesh"].values())), row["precision"]]
        cells += [f"{sent[name]:.0f}" for name in ("dispatch", "combine")]
        cells += [f"{sent['counts']:.2f}"]
        cells += [f"{sent[name]:.0f}" for name in ("weights", "tensor")]
        cells += [f"{kept / 1e9:.2f}" for kept in row["memory"].values()]
        named = ("products", "casts", "exchange", "weights", "in_turn", "overlapped")
        cells += [f"{ms[name]:.2f}" for name in named]
        cells += [f"{times:.2f}" for times in row["faster"].values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # fmt: off
    group = parser.add_argument_group("model: a name, sizes, or both; sizes take precedence")
    group.add_argument("--model", choices=sorted(MODELS))
    group.add_argument("--width", type=int)
    group.add_argument("--hidden", type=int, help="features between the matmuls of an expert")
    group.add_argument("--experts", type=int)
    group.add_argument("--per-token", type=int, help="experts that a token uses")
    group.add_argument("--projections", type=int,
                       help="columns of the first matmul / hidden; 2, unless given")
    group.add_argument("--tokens", type=int, help="of one device; 4096, unless given")

    group = parser.add_argument_group("devices")
    group.add_argument("--devices", type=int, nargs="+", default=[8, 64, 256, 1024],
                       help="a plan for each of these numbers (%(default)s)")
    group.add_argument("--longest-expert", type=int, default=64,
                       help="the expert axis is as long as experts and devices allow, up to this: "
                       "DeepSeek-V3 was trained with 64 (%(default)s)")
    group.add_argument("--data", type=int, default=1, help="(%(default)s)")
    group.add_argument("--tensor", type=int, default=1,
                       help="(%(default)s); what remains is fsdp")
    group.add_argument("--capacity-factor", type=float, default=1.25,
                       help="for the memory in the column of that name (%(default)s)")

    group = parser.add_argument_group("precision")
    group.add_argument("--scales", choices=SCALES, default="block",
                       help="of FP8: of tensors, rows, blocks of 128, or MX (%(default)s)")
    group.add_argument("--gradient-bytes", type=float, default=2,
                       help="per element of gradients of matrices, between devices (%(default)s)")

    group = parser.add_argument_group(
        "rates of one device; the defaults are peaks from the data sheet of the NVIDIA H200 SXM, "
        "which grouped matmuls do not reach"
    )
    add_rates(group)
    group.add_argument("--nvlink-bandwidth", type=float, default=450.0,
                       help=f"GB/s sent within a node of {NODE} (%(default)s)")
    group.add_argument("--network-bandwidth", type=float, default=50.0,
                       help="GB/s sent between nodes: a 400 Gb/s network card (%(default)s)")
    group.add_argument("--alpha", type=float, default=1.0,
                       help="microseconds that an exchange takes at least for each other device: "
                       "an assumption (%(default)s)")
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    # fmt: on
    return parser


def model_of(a: argparse.Namespace) -> Model:
    """Return the model that the arguments name, with the given sizes.

    Raises:
      ValueError: a size is missing, or not positive; or a token would use more experts than exist.
    """
    names = [field.name for field in dataclasses.fields(Model)]
    given = {name: getattr(a, name) for name in names if getattr(a, name) is not None}
    sizes = {**(dataclasses.asdict(MODELS[a.model]) if a.model else {}), **given}
    missing = [name for name in ("width", "hidden", "experts", "per_token") if name not in sizes]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"The model lacks {flags}. Pass them, or --model {' | '.join(MODELS)}.")
    if min(sizes.values()) < 1 or sizes["per_token"] > sizes["experts"]:
        raise ValueError(
            f"Sizes have to be positive, and per_token at most experts, but these are {sizes}."
        )
    return Model(**sizes)


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, plan, print."""
    a = make_parser().parse_args(argv)
    model = model_of(a)
    meshes = [mesh_of(n, model, a.longest_expert, a.data, a.tensor) for n in a.devices]
    speeds = (1e12 * a.bf16_tflops, 1e12 * a.fp8_tflops, 1e9 * a.memory_bandwidth)
    rates = lambda m: Rates(*speeds, links(m, 1e9 * a.nvlink_bandwidth, 1e9 * a.network_bandwidth))
    rows = plan(
        model,
        meshes,
        precisions(a.scales, a.gradient_bytes),
        rates,
        alpha=1e-6 * a.alpha,
        capacity_factor=a.capacity_factor,
    )
    if a.json:
        print(json.dumps({"arguments": vars(a), "plan": rows}))
        return
    print(
        f"{model.experts} experts of {model.width} x {model.hidden}, {model.per_token} per token, "
        f"{model.tokens:,} tokens per device\n"
    )
    print(table(rows, a.capacity_factor))


if __name__ == "__main__":
    main()
