"""Compile for a GPU that is not there, and read what the compilers made of the program.

The CUDA plugin of JAX compiles for a text description of a device, in ``tests/data``: XLA's passes,
Mosaic GPU, LLVM and ptxas run as for the device itself; only autotuning does not.
`compile_for` returns the optimized HLO and the resources of the Mosaic kernels as a `Program`.

``python tests/support/gpu_programs.py report.xml...`` prints the table of counts of test runs.

In one process Mosaic GPU compiles kernels for one kind of GPU: programs with kernels for an H200
and for a B200 are tested in different files, which run apart.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

import jfp8

DATA = Path(__file__).parents[1] / "data"
CORES = {"h200": 132, "b200": 148, "rtx5090": 170}
KINDS = {"rtx5090": "NVIDIA GeForce RTX 5090"}  # of others the name says it
SHARED_MEMORY = 232_448  # bytes that one block may use, on both
VERSION = (0, 11, 2)  # JAX 0.12 cannot hand an f8 product to its compiler without a device


def why_not(least: tuple[int, ...] | None = None) -> str | None:
    """Why nothing can be compiled for a GPU in this process; None: it can.

    Args:
      least: for kernels alone, which JAX from this version on compiles, for CUDA 12, too.
    """
    plugins = [f"jax_plugins.xla_cuda{n}" for n in ((13,) if least is None else (13, 12))]
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(name) for name in plugins
    ):
        return f"needs the CUDA plugin of JAX ({plugins[0]}): bash .ci/compile_for_gpus"
    if jax.__version_info__ < least if least else jax.__version_info__ != VERSION:
        return f"needs JAX {'.'.join(map(str, least or VERSION))}, not {jax.__version__}"
    # A process that has looked for a GPU is not to be given another one.
    for name, value in (("JAX_PLATFORMS", "cpu"), ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")):
        if os.environ.get(name) != value:
            return f"needs {name}={value} in the environment: bash .ci/compile_for_gpus"
    return None


# HLO

BITS = {"pred": 8}  # of others the name says it
F8 = ("f8e4m3fn", "f8e5m2")


@dataclass(frozen=True)
class Array:
    """The type of an array: ``bf16[8192,4096]``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.dtype) or int(re.match(r"[a-z]+(\d+)", self.dtype)[1])
        return -(-self.size * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: ``%name = results opcode(operands), attributes``."""

    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def target(self) -> str | None:
        """The library routine that a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found and found[1]

    def calls(self, *keys: str) -> list[str]:
        """Names of the computations under attributes `keys`."""
        found = []
        for key in keys:
            for one, several in re.findall(
                rf"\b{key}=(?:%([\w.-]+)|{{([^}}]*)}})", self.attributes
            ):
                found += [one] if one else re.findall(r"%([\w.-]+)", several)
        return found


# What costs nothing on the device: names for parts or other views of arrays.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
FREE |= {"call", "after-all", "partition-id", "opt-barrier"}
# Of these alone a kernel consists that only passes an array on, in another type, order or scale.
PASSING = {"parameter", "constant", "bitcast", "convert", "copy", "multiply", "broadcast"}
PASSING |= {"reshape", "transpose", "slice", "pad", "bitcast-convert", "dynamic-slice", "add"}
PASSING |= {"select", "compare", "is-finite", "abs", "and", "or", "clamp", "maximum", "minimum"}
PASSING |= {"dynamic-update-slice", "divide", "iota"}
COLLECTIVES = "all-|ragged-all-|reduce-scatter|collective-|async-|partition-id|replica-id"
PRODUCTS = {"dot", "convolution", "scaled-dot", "ragged-dot"}


class Hlo:
    """An optimized module: what is launched on the device, in which order, on which arrays."""

    def __init__(self, text: str, kernels: Sequence[Kernel] = ()):
        self.multiplying = {kernel.name for kernel in kernels if kernel.qgmma}
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
                name, body = header[2], {}
                self.computations[name] = body
                if header[1]:
                    self.entry = name
            elif found := re.match(r"\s+(ROOT )?%([\w.-]+) = (.*)", line):
                instruction = _parse(found[2], found[3])
                body[instruction.name] = instruction
                if found[1]:
                    self.roots[name] = instruction.name

    @functools.cached_property
    def launched(self) -> list[tuple[Instruction, list[Instruction]]]:
        """Every kernel with the instructions that its operands name.

        Loops and branches count once.
        """
        found, todo, seen = [], [self.entry], set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            body = self.computations[name]
            for instruction in body.values():
                keys = ("body", "condition", "branch_computations", "true_computation")
                todo += instruction.calls(*keys, "false_computation")
                if instruction.opcode == "call":
                    todo += instruction.calls("to_apply")
                if instruction.opcode not in FREE:
                    found.append((instruction, [body[name] for name in instruction.operands]))
        return found

    def inside(self, instruction: Instruction) -> set[str]:
        """Opcodes of what a kernel computes."""
        if instruction.opcode != "fusion":
            return {instruction.opcode}
        inner = (i for name in instruction.calls("calls") for i in self.computations[name].values())
        return set().union(*map(self.inside, inner))

    def source(self, instruction: Instruction) -> Instruction:
        """The kernel or parameter that wrote what `instruction` names in the entry computation."""
        body = self.computations[self.entry]
        while instruction.opcode in ("get-tuple-element", "bitcast"):
            if instruction.name not in body:
                break
            instruction = body[instruction.operands[0]]
        return instruction

    # Products

    def calls_of(self, target: str) -> list[Instruction]:
        return [i for i, _ in self.launched if i.target == target]

    @functools.cached_property
    def f8_products(self) -> list[Instruction]:
        """Calls of cuBLASLt's FP8 product."""
        return self.calls_of("__cublas$lt$matmul$f8")

    @functools.cached_property
    def split_products(self) -> list[Instruction]:
        """Those of `f8_products` that XLA has split along a long sum, where the result is small.

        They are batched, and leave partial sums in f32, which another kernel adds and scales.
        """
        return [i for i in self.f8_products if i.name.startswith("cublas-batch-gemm")]

    @functools.cached_property
    def block_products(self) -> list[Instruction]:
        """Calls of cuDNN's product of block-scaled operands, on Blackwell."""
        return self.calls_of("__cudnn$blockScaledDot")

    @functools.cached_property
    def attention_products(self) -> list[Instruction]:
        """Calls of cuDNN's attention in FP8, with two products each."""
        return self.calls_of("__cudnn$fmhaSoftmaxF8")

    @functools.cached_property
    def pallas_products(self) -> list[Instruction]:
        """Calls of kernels in Mosaic GPU that use the FP8 tensor cores.

        The names of kernels are not unique, but none that takes f8 does anything else.
        """
        return [
            i
            for i, operands in self.launched
            if i.target == "mosaic_gpu_v2"
            and _kernel_of(i) in self.multiplying
            and any(o.results[0].dtype in F8 for o in operands)
        ]

    @functools.cached_property
    def fp8_products(self) -> list[Instruction]:
        """All products on FP8 tensor cores, whoever wrote them."""
        by_cudnn = [*self.block_products, *self.attention_products]
        return [*self.f8_products, *by_cudnn, *self.pallas_products]

    @functools.cached_property
    def other_products(self) -> list[Instruction]:
        """Products in bf16, f16, TF32 or f32, in a library or a kernel that XLA generates.

        Triton's of f8 operands are among them: XLA rounds their sums as it likes.
        """
        known = {i.name for i in self.fp8_products}
        return [
            i
            for i, _ in self.launched
            if i.name not in known
            and (
                re.match(r"__cublas|__cudnn", i.target or "")
                or PRODUCTS & self.inside(i)
                or re.search(r"triton\w*gemm", i.attributes)
            )
        ]

    def factors(self, product: Instruction) -> set[str]:
        """The types that one of `other_products` multiplies."""
        bodies = [{o.name: o for o in operands} for i, operands in self.launched if i == product]
        found, todo = set(), [(product, bodies[0])]
        while todo:
            instruction, body = todo.pop()
            if instruction.opcode == "fusion":
                for name in instruction.calls("calls"):
                    inner = self.computations[name]
                    todo += [(i, inner) for i in inner.values()]
            elif instruction == product or instruction.opcode in PRODUCTS:
                found |= {body[o].results[0].dtype for o in instruction.operands[:2]}
        return found

    # What surrounds them

    @functools.cached_property
    def f8_transposes(self) -> list[Instruction]:
        """Kernels that only write f8 values in another order; quantizing could have done it."""
        return [
            i
            for i, operands in self.launched
            if "transpose" in self.inside(i) | set(re.findall(r"^\w*transpose", i.name))
            and any(r.dtype in F8 or r.dtype == "u8" for r in i.results)
            and all(o.results[0].bytes <= o.results[0].size for o in _large(operands))
        ]

    @functools.cached_property
    def passes_over_outputs(self) -> list[Instruction]:
        """Kernels that only convert or scale what a product wrote: the product could have."""
        made_by = {i.name for i in (*self.fp8_products, *self.other_products)}
        return [
            i
            for i, operands in self.launched
            if i.name not in made_by
            and i.target is None
            and self.inside(i) <= PASSING
            and any(self.source(o).name in made_by for o in _large(operands))
        ]

    def f32_written(self, size: int) -> list[Instruction]:
        """Kernels that write an f32 array of at least `size` elements."""
        return [
            i
            for i, _ in self.launched
            if any(r.dtype == "f32" and r.size >= size for r in i.results)
        ]

    @functools.cached_property
    def rounded_scales(self) -> list[Instruction]:
        """Single numbers that are rounded to 16 bits."""
        every = (i for body in self.computations.values() for i in body.values())
        converts = (i for i in every if i.opcode == "convert")
        return [
            i for i in converts if i.results[0].dtype in ("bf16", "f16") and i.results[0].size == 1
        ]

    def masks(self, size: int) -> list[Instruction]:
        """Kernels that write truth values or integers for a quarter of `size` elements or more."""
        return [
            i
            for i, _ in self.launched
            if i.opcode != "custom-call"  # cuBLASLt's workspace
            and any(
                r.dtype in ("pred", "u8", "s8", "u16", "u32") and r.size >= size // 4
                for r in i.results
            )
        ]

    @functools.cached_property
    def bytes_beside_products(self) -> int:
        """Bytes that all kernels but products read and write, were nothing kept in a cache."""
        products = {i.name for i in (*self.fp8_products, *self.other_products)}
        return sum(size for i, size in self.kernels if i.name not in products)

    @functools.cached_property
    def kernels(self) -> list[tuple[Instruction, int]]:
        """What is launched, collectives apart, with the bytes that it reads and writes."""
        return [
            (i, sum(a.bytes for x in (i, *operands) for a in x.results))
            for i, operands in self.launched
            if not re.match(COLLECTIVES, i.opcode)
        ]

    @functools.cached_property
    def small_kernels(self) -> list[Instruction]:
        """Those of `kernels` that take less than 1 MB, and so no time but that of their launch."""
        return [i for i, size in self.kernels if size < 1e6]


def _large(operands: list[Instruction]) -> list[Instruction]:
    """Without scales and other small things."""
    return [o for o in operands if len(o.results) == 1 and o.results[0].size > 4096]


def _parse(name: str, text: str) -> Instruction:
    """`text` is ``results opcode(operands), attributes``; results may be in parentheses."""
    end = _closing(text, 0) + 1 if text[0] == "(" else text.index(" ")
    results = tuple(
        Array(dtype, tuple(map(int, filter(None, shape.split(",")))))
        for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text[:end])
    )
    start = text.index("(", end)
    stop = _closing(text, start)
    operands = tuple(re.findall(r"%([\w.-]+)", text[start:stop]))
    attributes = text[stop + 1 :].partition(', module = "')[0]  # of Mosaic GPU: its whole kernel
    return Instruction(name, results, text[end:start].strip(), operands, attributes)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def _kernel_of(call: Instruction) -> str:
    """The name of the function that a Mosaic GPU kernel was made of."""
    found = re.search(r'op_name="[^"]*?(\w+)/(mpmd_map|custom_partitioning)"', call.attributes)
    assert found, call.attributes[:200]
    return found[1]


# Kernels in Mosaic GPU

FP8_MMA = ("QGMMA", "UTCQMMA")  # on Hopper, and on Blackwell


@dataclass(frozen=True)
class Kernel:
    """A Mosaic GPU kernel, as ptxas left it."""

    name: str
    registers: int
    spilled: int  # bytes, stored and loaded
    shared_memory: int  # bytes
    qgmma: tuple[str, ...]  # instructions of the FP8 tensor cores
    other_mma: tuple[str, ...]  # of tensor cores in other types
    barriers: int = 0  # instructions at which threads of a warpgroup or block wait for each other
    # What the compilers wrote: the report of ptxas, code, and passes over the host's code.
    ptxas: str = field(default="", repr=False, compare=False)
    sass: str = field(default="", repr=False, compare=False)
    ptx: str = field(default="", repr=False, compare=False)
    host: str = field(default="", repr=False, compare=False)

    @classmethod
    def read(cls, stem: Path) -> Kernel:
        """From the files ``{stem}.{ptxas, sass_ctrl, after_layout_inference.txt}``.

        Those of PTX and of passes are for tests that execute a kernel, and may be absent.
        """
        ptxas, sass, module = (
            stem.with_name(stem.name + suffix).read_text()
            for suffix in (".ptxas", ".sass_ctrl", ".after_layout_inference.txt")
        )
        ptx, passes = (
            path.read_text() if (path := stem.with_name(stem.name + suffix)).exists() else ""
            for suffix in (".ptx", ".mlir-passes.log")
        )
        size = re.search(r"dynamic_shared_memory_size %(\S+)", module)[1]
        mma = re.findall(r"\b(Q?H?I?GMMA\.\S+|U?[HQI]MMA\.\S+|UTC\w*MMA\S*)", sass)
        return cls(
            re.search(r"Compiling entry function '(\w+?)(_mosaic_gpu_kernel)?'", ptxas)[1],
            int(re.search(r"Used (\d+) registers", ptxas)[1]),
            sum(map(int, re.findall(r"(\d+) bytes spill", ptxas))),
            int(re.search(rf"%{size} = arith.constant (\d+) : i32", module)[1]),
            tuple(m for m in mma if m.startswith(FP8_MMA)),
            tuple(m for m in mma if not m.startswith(FP8_MMA)),
            len(re.findall(r"\bBAR\.", sass)),
            ptxas,
            sass,
            ptx,
            passes[passes.rfind("// -----// IR Dump") :],
        )


@dataclass(frozen=True)
class Program:
    """What became of a function."""

    hlo: Hlo
    kernels: tuple[Kernel, ...]  # of Mosaic GPU, one per call
    exchanged: jfp8.debug.CollectiveBytes
    memory: int  # bytes: arguments, results that take no argument's place, and what is in between

    def row(self) -> dict[str, str]:
        """Its counts, for the table."""
        by = {
            "cuBLASLt": len(self.hlo.f8_products),
            "cuDNN": len(self.hlo.block_products) + 2 * len(self.hlo.attention_products),
            "Pallas": len(self.hlo.pallas_products),
        }
        most = lambda values: str(max(values, default="–"))
        return {
            "FP8 products": " + ".join(f"{n} {who}" for who, n in by.items() if n) or "0",
            "other products": str(len(self.hlo.other_products)),
            "f8 transposes": str(len(self.hlo.f8_transposes)),
            "passes over outputs": str(len(self.hlo.passes_over_outputs)),
            "MB beside products": f"{self.hlo.bytes_beside_products / 1e6:.0f}",
            "kernels (below 1 MB)": f"{len(self.hlo.kernels)} ({len(self.hlo.small_kernels)})",
            "MB exchanged": f"{self.exchanged.total / 1e6:.0f}",
            "QGMMA": str(sum(len(k.qgmma) for k in self.kernels)) if by["Pallas"] else "–",
            "registers": most(k.registers for k in self.kernels),
            "spilled bytes": most(k.spilled for k in self.kernels),
            "shared memory": most(k.shared_memory for k in self.kernels),
        }


def assert_resources(program: Program, spilled: int = 0) -> None:
    """What holds of every kernel of ours: no more is spilled, and it fits the device."""
    for kernel in program.kernels:
        assert kernel.spilled <= spilled, kernel
        assert 0 < kernel.registers <= 255, kernel
        assert kernel.shared_memory <= SHARED_MEMORY, kernel


def compile_for(target: str, f: Callable[..., Any], *args: Any) -> Program:
    """``jit(f)`` of arguments like `args` (trees of anything with shape and dtype) for `target`.

    That is an ``h200``, a ``b200``, or one with fewer multiprocessors, ``h200:2``.
    """
    everywhere = jax.tree.map(lambda _: PartitionSpec(), args)
    return compile_divided(target, {"x": 1}, f, args, everywhere)


def compile_divided(
    target: str,
    axes: dict[str, int],
    f: Callable[..., Any],
    args: tuple[Any, ...],
    specs: tuple[Any, ...],
    out_specs: Any = None,
    kind: AxisType = AxisType.Auto,
    donated: tuple[int, ...] = (),
) -> Program:
    """The same for a mesh with these axes; arguments and results lie as their specs say."""
    mesh = _mesh_of(target, tuple(axes), tuple(axes.values()), kind)
    place = lambda specs: jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=_is_spec)
    args = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        args,
        place(specs),
    )
    described = AbstractMesh(
        tuple(axes.values()), tuple(axes), (kind,) * len(axes), abstract_device=device_of(target)
    )
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    with tempfile.TemporaryDirectory() as folder, use_abstract_mesh(described):
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            places = None if out_specs is None else place(out_specs)
            jitted = jax.jit(f, out_shardings=places, donate_argnums=donated)
            compiled = jitted.trace(*args).lower(lowering_platforms=("cuda",)).compile()
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
            if before is not None:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before
        kernels = tuple(
            Kernel.read(p.with_suffix("")) for p in sorted(Path(folder).glob("*.ptxas"))
        )
    exchanged, of = jfp8.debug.collective_bytes(compiled), compiled.memory_analysis()
    memory = of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes
    memory += of.temp_size_in_bytes
    return Program(Hlo(compiled.as_text(), kernels), kernels, exchanged, memory)


def device_of(target: str) -> AbstractDevice:
    """Return what a device would say of itself, where kernels are chosen."""
    name, _, cores = target.partition(":")
    kind = KINDS.get(name, f"NVIDIA {name.upper()}")
    return AbstractDevice(device_kind=kind, num_cores=int(cores or CORES[name]), platform="gpu")


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


@functools.cache
def _mesh_of(
    target: str, names: tuple[str, ...], sizes: tuple[int, ...], kind: AxisType
) -> jax.sharding.Mesh:
    """Such devices, with axes of a kind."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x1x{math.prod(sizes)}",
        target_config=(DATA / f"{target.partition(':')[0]}.txtpb").read_text(),
    )
    devices = topologies.make_mesh(topology, sizes, names).devices
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names))


# Programs


def forward_and_backward(
    layer: Any, shape: tuple[int, ...], dtype: Any = jnp.bfloat16
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of (variables, x, cotangent) with its arguments: result and all gradients."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    y = jax.eval_shape(layer.apply, variables, x)

    def f(variables, x, dy):
        histories = {name: variables[name] for name in variables if name == "fp8"}
        others = {name: variables[name] for name in variables if name != "fp8"}
        y, back = jax.vjp(lambda v, x: layer.apply({**v, **histories}, x), others, x)
        return y, back(dy)

    return f, (variables, x, jax.ShapeDtypeStruct(y.shape, y.dtype))


# The table


def print_table(*reports: str) -> None:
    """From the properties that tests left in JUnit reports: one row each, in Markdown."""
    rows = []
    for number, report in enumerate(reports):
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            properties = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
            if "program" in properties:
                rows.append(((number, int(properties.pop("order"))), properties))
    if not rows:
        sys.exit(f"{', '.join(reports)}: no program was compiled.")
    rows.sort(key=lambda row: row[0])
    print("|", " | ".join(rows[0][1]), "|")
    print("|---" * len(rows[0][1]) + "|")
    for _, counts in rows:
        print("|", " | ".join(counts.values()), "|")


if __name__ == "__main__":
    print_table(*sys.argv[1:])
