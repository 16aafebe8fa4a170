"""Compile for a TPU that is not there, and read what its compiler says of the program.

libtpu compiles for a description of devices. Arguments that lie on such devices say in their types
what they are on; nothing else has to be told to jfp8.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import jfp8
from gpu_programs import forward_and_backward
from support.compiled import CollectiveBytes, Hlo, collective_bytes

KINDS = {"TPU7x": "tpu7x:2x2x1", "v6e": "v6e:2x4"}  # eight cores each
WAYS = ("one core", "8 cores, FSDP", "8 cores, tensor parallel")
AXES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
BF16 = jnp.bfloat16
# No loops that multiply what has arrived so far: the compiler counts the body of a loop once.
OPTIONS: dict[str, bool | str] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def why_not() -> str | None:
    """Why nothing can be compiled for a TPU in this process; None: it can."""
    if importlib.util.find_spec("libtpu") is None:
        return "needs libtpu: bash .ci/compile_for_tpus"
    for name, value in (("JAX_PLATFORMS", "cpu"), ("TPU_SKIP_MDS_QUERY", "1")):
        if os.environ.get(name) != value:
            return f"needs {name}={value} in the environment: bash .ci/compile_for_tpus"
    return None


@dataclass(frozen=True)
class Program:
    """What became of a function.

    Attributes:
      text: the optimized HLO.
      microseconds: the compiler's estimate. It counts a kernel of unknown cost as -1 second.
      megabytes: megabytes that its kernels read and write.
      seconds: time of compilation.
      sent: bytes between devices.
    """

    text: str
    microseconds: float
    megabytes: float
    seconds: float
    sent: CollectiveBytes

    def kernels(self, name: str) -> int:
        """How often a Pallas kernel of this name is called."""
        return len(re.findall(rf"%{name}(\.\d+)? = ", self.text))

    def products(self) -> dict[str, int]:
        """By what is multiplied, and by whom: a product in a loop counts once."""
        found = {
            "f8 Pallas": self.kernels("jfp8_matmul"),
            "blocks Pallas": self.kernels("jfp8_matmul_in_blocks"),
        }
        for body in Hlo(self.text).computations.values():
            for i in body.values():
                if i.opcode in ("convolution", "dot"):
                    types = {body[name].results[0].dtype for name in i.operands if name in body}
                    kind = next((t for t in ("f32", "bf16") if t in types), "f8")
                    found[f"{kind} XLA"] = found.get(f"{kind} XLA", 0) + 1
        return {kind: n for kind, n in found.items() if n}

    def weights_sent(self) -> set[str]:
        """The dtypes in which cores send each other a kernel: gathered, or passed on in a loop.

        Parts of its gradient are passed on, too; in Flax's layer their names do not tell them from
        those of the kernel.
        """
        return {
            each.dtype
            for each in self.sent.collectives
            if each.op in ("all-gather", "collective-permute")
            and each.elements >= 2**20
            and "wgrad" not in each.name
        }


@functools.cache
def devices_of(kind: str) -> tuple[Any, ...]:
    from jax.experimental import topologies

    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=KINDS[kind]).devices)


def compile_on(
    mesh: Mesh, f: Callable[..., Any], args: Any, specs: Any, out: Any = None
) -> Program:
    """``jit(f)`` of arguments like `args`, which lie as `specs` say."""
    place = lambda specs: jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    on = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    jitted = jax.jit(f, out_shardings=None if out is None else place(out))
    began = time.perf_counter()
    with use_abstract_mesh(mesh.abstract_mesh):
        traced = jitted.trace(*jax.tree.map(on, args, place(specs)))
    compiled = traced.lower().compile(compiler_options=OPTIONS)
    seconds = time.perf_counter() - began
    cost: Any = compiled.cost_analysis()
    return Program(
        compiled.as_text() or "",
        1e6 * (cost["optimal_seconds"] % 1),
        cost["bytes accessed"] / 1e6,
        seconds,
        collective_bytes(compiled),
    )


def compile_for(kind: str, f: Callable[..., Any], *args: Any) -> Program:
    """For one core."""
    mesh = Mesh(np.array(devices_of(kind)[:1]), ("x",))
    return compile_on(mesh, f, args, jax.tree.map(lambda _: PartitionSpec(), args))


@functools.cache
def dense(kind: str, way: str, recipe: str, axes: str = "auto") -> Program:
    """A layer of 4096 features on 8192x4096 per core, by FSDP or by tensor parallelism."""
    alone, fsdp = way == WAYS[0], way == WAYS[1]
    how: dict[str, Any] = {"dtype": BF16, "param_dtype": BF16, "use_bias": alone}
    features = 4096 if alone or fsdp else 8 * 4096
    layer = nn.Dense(features, **how)
    if recipe != "bf16":
        layer = jfp8.Dense(features, **how, recipe=jfp8.recipes.get(recipe))
    f, args = forward_and_backward(layer, (8 * 8192 if fsdp else 8192, 4096))
    if alone:
        return compile_for(kind, f, *args)
    rows, columns, whole = PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec()
    kernel, x, y = (rows, rows, rows) if fsdp else (columns, whole, columns)
    variables = jax.tree_util.tree_map_with_path(
        lambda path, _: kernel if "kernel" in jax.tree_util.keystr(path) else whole, args[0]
    )
    gradients = {name: specs for name, specs in variables.items() if name != "fp8"}
    mesh = Mesh(np.array(devices_of(kind)), ("x",), axis_types=(AXES[axes],))
    out = (y, (gradients, x)) if axes == "auto" else None  # explicit ones are in the types
    return compile_on(mesh, f, args, (variables, x, y), out)


def row(kind: str, way: str, recipe: str, axes: str = "auto") -> dict[str, str]:
    """A line of the table."""
    program, bf16 = dense(kind, way, recipe, axes), dense(kind, way, "bf16")
    return {
        "TPU": kind,
        "on": way,
        "axes": "–" if way == WAYS[0] or recipe == "bf16" else axes,
        "recipe": recipe,
        "products": " + ".join(f"{n} {kind}" for kind, n in program.products().items()),
        "time / bf16": f"{program.microseconds / bf16.microseconds:.2f}",
        "bytes / bf16": f"{program.megabytes / bf16.megabytes:.2f}",
        "weights sent as": ", ".join(sorted(program.weights_sent())) or "–",
        "µs": f"{program.microseconds:.0f}",
        "MB": f"{program.megabytes:.0f}",
        "compile s": f"{program.seconds:.0f}",
    }
