"""Run functions on a CPU as a GPU would: the kernels in them as they were compiled, from their PTX.

A function is traced for an H200 with two multiprocessors. What is no kernel of ours JAX computes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, use_abstract_mesh

from gpu_programs import Kernel, compile_for, device_of
from ptx.block import Program
from ptx.host import launch_of

TARGET = "h200:2"
KERNEL = "mpmd_map"  # the primitive that a call of `plgpu.kernel` leaves
INNER = "jaxpr", "call", "call_jaxpr"  # parameters of primitives that only call


class Emulated:
    """A function of arrays, traced and compiled once, to run under many schedules."""

    def __init__(self, f: Callable[..., Any], *args: Any):
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device_of(TARGET))):
            traced = jax.jit(f).trace(*args)
        self.jaxpr: ClosedJaxpr = traced.jaxpr
        self.result = jax.tree.structure(traced.out_info)
        self.args = jax.tree.leaves(args)
        self.kernels: dict[int, Kernel] = {}  # by the identity of their equation
        self.programs: dict[str, Program] = {}  # by their PTX
        self.steps = 0  # sum over all warps and runs

    def __call__(
        self,
        schedule: Any,
        *,
        collective: bool = True,
        edit: Callable[[str], str] = lambda ptx: ptx,
    ) -> Any:
        """Return the results under a schedule; for `collective` see `wgmma`; `edit` changes PTX."""

        def run(equation: Any, values: Sequence[np.ndarray]) -> list[np.ndarray]:
            program = self._program(equation, edit)
            wanted = [(v.aval.shape, v.aval.dtype) for v in equation.outvars]
            empty = [np.full(math.prod(s) * d.itemsize, 0xFF, np.uint8) for s, d in wanted]
            found, steps = program.run([*values, *empty], schedule, collective=collective)
            self.steps += steps
            found = zip(found[len(values) :], wanted, strict=True)
            return [x.view(dtype).reshape(shape) for x, (shape, dtype) in found]

        out = _evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, self.args, run)
        return jax.tree.unflatten(self.result, map(np.asarray, out))

    def _program(self, equation: Any, edit: Callable[[str], str]) -> Program:
        if id(equation) not in self.kernels:
            self.kernels[id(equation)] = _compiled(equation)
        kernel = self.kernels[id(equation)]
        ptx = edit(kernel.ptx)
        if ptx not in self.programs:
            self.programs[ptx] = Program(ptx, launch_of(kernel.host), kernel.registers)
        return self.programs[ptx]


def _compiled(equation: Any) -> Kernel:
    args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]

    def call(*values: Any) -> Any:
        with jax.named_scope(str(equation.source_info.name_stack)):  # the scope names the kernel
            return equation.primitive.bind(*values, **equation.params)

    (kernel,) = compile_for(TARGET, call, *args).kernels
    return kernel


def _evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    kernel: Callable[[Any, Sequence[np.ndarray]], list[np.ndarray]],
) -> list[Any]:
    """Compute the equations one after another."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else known[v]
    for equation in jaxpr.eqns:
        values = [read(v) for v in equation.invars]
        inner = next((equation.params[n] for n in INNER if n in equation.params), None)
        if equation.primitive.name == KERNEL:
            out = kernel(equation, [np.asarray(x) for x in values])
        elif isinstance(inner, ClosedJaxpr):
            out = _evaluate(inner.jaxpr, inner.consts, values, kernel)
        elif isinstance(inner, Jaxpr):
            out = _evaluate(inner, (), values, kernel)
        else:
            out = equation.primitive.bind(*map(jnp.asarray, values), **equation.params)
            out = out if equation.primitive.multiple_results else [out]
        known |= zip(equation.outvars, out, strict=True)
    return [read(v) for v in jaxpr.outvars]
