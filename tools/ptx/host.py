"""Run a kernel's host code, which is straight: it describes tensors to the copy engine, and starts.

It is read from the last module that Mosaic GPU's passes leave, in the LLVM dialect. An address is a
pair of what was allocated, or of the argument that a pointer came from, and an offset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ptx.text import read

# Bytes of the types that `mosaic_gpu_init_tma_desc` knows by numbers.
SIZES = {1: 1, 2: 2, 3: 4, 5: 2, 6: 4, 7: 2}
SWIZZLES = {16: 0, 32: 32, 64: 64, 128: 128}  # by the codes of Mosaic GPU: 16 is none


@dataclass(frozen=True)
class Tensor:
    """Describe an array to the copy engine. The last dimension is the innermost."""

    argument: int
    item: int  # bytes of an element
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Launch:
    """Say how a kernel starts, and with what."""

    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    threads: int
    shared_memory: int
    parameters: tuple[int | None, ...]  # the argument that each points to; None: it has tensors
    tensors: dict[tuple[int, int], Tensor]  # by parameter and offset in it


def launch_of(module: str) -> Launch:
    """Run the host code of ``llvm.func @..._mosaic_gpu`` in a dump of passes."""
    module = module[module.rindex("// -----// IR Dump") :]
    start = read(r"llvm\.func @\w+_mosaic_gpu\(%\w+: !llvm\.ptr[^\n]*\{\n", module)
    arguments = re.findall(r"(%\w+): !llvm\.ptr", start[0])
    values: dict[str, Any] = {name: (name, 0) for name in arguments}
    memory: dict[Any, Any] = {}
    described: dict[Any, Tensor] = {}
    array = lambda at, rank: tuple(memory[at[0], 8 * i] for i in range(rank))
    for line in module[start.end() :].split("\n"):
        text = re.sub(r" loc\(.*", "", line).strip()
        result, code = read(r"^(?:(%\w+) = )?(.*)", text).groups()
        op = read(r"^[\w.]+", code)[0]
        given: list[Any] = [values.get(name) for name in re.findall(r"%\w+", code)]
        if op == "llvm.call" and "init_tma_desc" in code:
            at, base, kind, rank, sizes, strides, swizzle, box = given
            shape = [array(x, rank) for x in (sizes, strides, box)]
            described[at] = Tensor(base[0], SIZES[kind], *shape, swizzle=SWIZZLES[swizzle])
        elif op == "llvm.call":
            return _launch(given, memory, described)
        elif op == "llvm.store":
            memory[given[1]] = given[0]
        else:
            values[result] = _value(op, code, given, memory, result, arguments[-1])
    raise ValueError("the host code starts no kernel")


def _value(op: str, code: str, given: list, memory: dict, result: str, buffers: str) -> Any:
    """Return the result of an operation that has one."""
    places = re.search(r"\[([\d, ]+)\]", code)
    path = tuple(map(int, places[1].split(","))) if places else ()
    if op == "llvm.mlir.constant":
        return int(read(r"\((-?\d+)", code)[1])
    if op == "llvm.alloca":
        return result, 0
    if op == "llvm.insertvalue":
        return (given[1] or {}) | {path: given[0]}
    if op == "llvm.extractvalue":
        return given[0][path]
    if op == "llvm.getelementptr":
        (block, offset), index = given[0], path[-1] if path else given[1]
        return block, offset + index * (1 if code.endswith(" i8") else 8)
    if op == "llvm.load":
        if given[0][0] == buffers:
            return given[0][1] // 8, 0  # the pointer to an argument
        return memory.get(given[0], given[0])  # a whole object: by its place
    if op == "llvm.mul":
        return given[0] * given[1]
    if op == "llvm.add":
        return (given[0][0], given[0][1] + given[1]) if isinstance(given[0], tuple) else sum(given)
    return given[0] if given else None


def _launch(given: Sequence[Any], memory: dict, described: dict[Any, Tensor]) -> Launch:
    grid, cluster, threads = (tuple(given[i : i + 3]) for i in (1, 4, 7))
    shared_memory, pointers = given[10], given[13]
    parameters, tensors, number = [], {}, 0
    while (pointers[0], 8 * number) in memory:
        place = memory[pointers[0], 8 * number]
        block, _ = memory.get(place, place)  # JAX 0.12 passes tensors by their place
        parameters.append(block if isinstance(block, int) else None)
        of = {at[1]: tensor for at, tensor in described.items() if at[0] == block}
        tensors |= {(number, offset): tensor for offset, tensor in of.items()}
        number += 1
    assert threads[1:] == (1, 1)
    cluster = tuple(max(n, 1) for n in cluster)
    return Launch(grid, cluster, threads[0], shared_memory, tuple(parameters), tensors)
