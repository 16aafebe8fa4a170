"""Compile for a GPU that is not there, and read what the compilers made of the program.

The CUDA plugin of JAX compiles for a text description of a device, in ``tests/data``: XLA's passes,
Mosaic GPU, LLVM and ptxas run as for the device itself; only autotuning does not.
`compile_for` returns the optimized HLO and the resources of the Mosaic kernels as a `Program`.

In one process Mosaic GPU compiles kernels for one kind of GPU: programs with kernels for an H200
and for a B200 are tested in different files, which run apart.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from ptx.text import read as read_text
from support.compiled import (
    Audit,
    CollectiveBytes,
    Instruction,
    Launches,
    audit_of,
    large,
    read,
)

DATA = Path(__file__).parents[1] / "tests" / "data"
CORES = {"h200": 132, "b200": 148, "rtx5090": 170}
NAMES = {"rtx5090": "NVIDIA GeForce RTX 5090"}  # other cards' names equal their keys
SHARED_MEMORY = 232_448  # bytes that one block may use, on both
VERSION = (0, 11, 2)  # JAX 0.12 cannot hand an f8 product to its compiler without a device


def why_not(least: tuple[int, ...] | None = None) -> str | None:
    """Return why no program, from JAX `least` on, can be compiled for a GPU here, or None."""
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

# The only operations of a kernel that passes an array on, in another type, order or scale.
PASSING = {"parameter", "constant", "bitcast", "convert", "copy", "multiply", "broadcast"}
PASSING |= {"reshape", "transpose", "slice", "pad", "bitcast-convert", "dynamic-slice", "add"}
PASSING |= {"select", "compare", "is-finite", "abs", "and", "or", "clamp", "maximum", "minimum"}
PASSING |= {"dynamic-update-slice", "divide", "iota"}


class Hlo(Launches):
    """The counts of `examples/audit.py`, one by one, and further ones for tests."""

    def matmuls(self, *kinds: str) -> list[Instruction]:
        return [self.by_name[name] for name, kind in self.kinds.items() if kind in kinds]

    def calls_of(self, target: str) -> list[Instruction]:
        return [i for i, _ in self.launched if i.target == target]

    @functools.cached_property
    def f8_products(self) -> list[Instruction]:
        """Calls of cuBLASLt's FP8 product."""
        return self.matmuls("FP8, cuBLASLt")

    @functools.cached_property
    def split_products(self) -> list[Instruction]:
        """Those that XLA has split along a long sum: another kernel adds partial sums in f32."""
        return [i for i in self.f8_products if i.name.startswith("cublas-batch-gemm")]

    @functools.cached_property
    def block_products(self) -> list[Instruction]:
        """Calls of cuDNN's product of block-scaled operands, on Blackwell."""
        return self.matmuls("FP8, cuDNN")

    @functools.cached_property
    def pallas_products(self) -> list[Instruction]:
        """Calls of kernels in Mosaic GPU that use the FP8 tensor cores."""
        return self.matmuls("FP8, Pallas")

    @functools.cached_property
    def fp8_products(self) -> list[Instruction]:
        """All products on FP8 tensor cores, whoever wrote them."""
        by_libraries = self.matmuls("FP8, cuBLASLt", "FP8, cuDNN")
        return [*by_libraries, *self.pallas_products]

    @functools.cached_property
    def other_products(self) -> list[Instruction]:
        """Products in 16 or 32 bits, and Triton's of f8, whose sums XLA rounds as it likes."""
        fp8 = {i.name for i in self.fp8_products}
        return [self.by_name[name] for name in self.kinds if name not in fp8]

    @functools.cached_property
    def mosaic_kernels(self) -> set[str]:
        """The hashes of kernels in Mosaic GPU, of which XLA compiles equal ones once."""
        calls = [i for i, _ in self.launched if i.target.startswith("mosaic_gpu")]
        return {i.attributes.partition("backend_config=")[2] for i in calls}

    # Kernels around them

    @functools.cached_property
    def passes_over_outputs(self) -> list[Instruction]:
        """Kernels that only convert or scale what a product wrote: the product could have."""
        return [
            i
            for i, operands in self.launched
            if i.name not in self.kinds
            and not i.target
            and self.opcodes(i) <= PASSING
            and any(self.writer(o) in self.kinds for o in large(operands))
        ]

    def writer(self, operand: Instruction) -> str:
        """The name of the kernel that wrote an operand."""
        source = self.hlo.source(operand)
        return source.operands[0] if source.opcode == "get-tuple-element" else source.name

    def f32_written(self, size: int) -> list[Instruction]:
        """Kernels that write an f32 array of at least `size` elements."""
        return [
            i
            for i, _ in self.launched
            if any(r.dtype == "f32" and r.size >= size for r in i.results)
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
        return sum(size for i, size in self.kernels if i.name not in self.kinds)


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
    other_mma: tuple[str, ...]  # instructions of tensor cores in other types
    barriers: int = 0  # instructions at which threads of a warpgroup or block wait for each other
    # The compilers' output: the report of ptxas, code, and passes over the host's code.
    ptxas: str = field(default="", repr=False, compare=False)
    sass: str = field(default="", repr=False, compare=False)
    ptx: str = field(default="", repr=False, compare=False)
    host: str = field(default="", repr=False, compare=False)

    @classmethod
    def read(cls, stem: Path) -> Kernel:
        """Read the dumped files; PTX and passes may be absent."""
        ptxas, sass, module = (
            stem.with_name(stem.name + suffix).read_text()
            for suffix in (".ptxas", ".sass_ctrl", ".after_layout_inference.txt")
        )
        ptx, passes = (
            path.read_text() if (path := stem.with_name(stem.name + suffix)).exists() else ""
            for suffix in (".ptx", ".mlir-passes.log")
        )
        size = read_text(r"dynamic_shared_memory_size %(\S+)", module)[1]
        mma = re.findall(r"\b(Q?H?I?GMMA\.\S+|U?[HQI]MMA\.\S+|UTC\w*MMA\S*)", sass)
        return cls(
            read_text(r"Compiling entry function '(\w+?)(_mosaic_gpu_kernel)?'", ptxas)[1],
            int(read_text(r"Used (\d+) registers", ptxas)[1]),
            sum(map(int, re.findall(r"(\d+) bytes spill", ptxas))),
            int(read_text(rf"%{size} = arith.constant (\d+) : i32", module)[1]),
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
    kernels: tuple[Kernel, ...]  # Mosaic GPU's, one per call; () without dumps
    audit: Audit
    memory: int  # bytes: arguments, results that take no argument's place, and what is in between

    @property
    def exchanged(self) -> CollectiveBytes:
        return self.audit.sent

    def row(self) -> dict[str, str]:
        """Its counts, for the table."""
        by = {
            "cuBLASLt": len(self.hlo.f8_products),
            "cuDNN": len(self.hlo.block_products),
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
    """``jit(f)`` of arguments like `args` for an ``h200``, a ``b200``, or a smaller ``h200:2``."""
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
    dumped: bool = True,
) -> Program:
    """Compile for a mesh, laid out by specs; undumped, where CPU time counts."""
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
    places = None if out_specs is None else place(out_specs)
    jitted = jax.jit(f, out_shardings=places, donate_argnums=donated)
    with (
        tempfile.TemporaryDirectory() as folder,
        use_abstract_mesh(described),
        pytest.MonkeyPatch.context() as patch,
    ):
        if dumped:
            patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        compiled = jitted.trace(*args).lower(lowering_platforms=("cuda",)).compile()
        kernels = tuple(
            Kernel.read(p.with_suffix("")) for p in sorted(Path(folder).glob("*.ptxas"))
        )
    of: Any = compiled.memory_analysis()
    hlo = Hlo(read(compiled))
    memory = of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes
    memory += of.temp_size_in_bytes
    multiplying = {kernel.name for kernel in kernels if kernel.qgmma}
    # Kernels that this process has compiled before are not written again.
    assert hlo.pallas_products or not multiplying
    return Program(hlo, kernels, audit_of(hlo), memory)


def device_of(target: str) -> AbstractDevice:
    """Return what a device would say of itself, where kernels are chosen."""
    name, _, cores = target.partition(":")
    kind = NAMES.get(name, f"NVIDIA {name.upper()}")
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
