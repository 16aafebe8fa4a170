"""The machine code of the kernels for Hopper, compiled as in `test_compiled.py`."""

import re

import jax.numpy as jnp
import pytest

from gpu_programs import compile_for, why_not
from support.compiled_layers import BF16, F8, F8_GRAD, F32, of

if reason := why_not((0, 11, 2)):
    pytest.skip(reason, allow_module_level=True)

from jfp8.kernels.hopper.grouped import grouped_matmul, grouped_outer
from jfp8.kernels.hopper.matmul import block_matmul, matmul

M, N, K = 8192, 4096, 2048
TILES, GROUPS = M // 128, 8
A, B = of((M, K), F8), of((N, K), F8_GRAD)


def vector(*shape):
    return of(shape, F32)


def multiply(promote):
    return lambda *args: matmul(*args, BF16, promote=promote)


INT = of((GROUPS,), jnp.int32)
# Function, arguments; of the loop over operands at most so many f32 operations for each product of
# 32 numbers, and so many cycles from the end of one step's products to those of the next.
PROGRAMS = {
    "fast": (multiply(False), (A, B, vector(M), vector(N)), 0, 160),
    "promoted": (multiply(True), (A, B, vector(M), vector(N)), 24, 200),
    "block": (
        lambda *args: block_matmul(*args, BF16),
        (A, B, vector(K // 128, M), vector(K // 128, N // 128)),
        26,
        210,
    ),
    "block, transposed": (
        lambda *args: block_matmul(*args, F32),
        (A, B, vector(K // 128, M // 128), vector(K // 128, N)),
        26,
        210,
    ),
    "grouped": (
        lambda *args: grouped_matmul(*args, BF16),
        (A, of((GROUPS, N, K), F8), of((TILES,), jnp.int32), vector(K // 128, M),
         vector(GROUPS, K // 128, N // 128)),
        26,
        210,
    ),
    "outer": (
        lambda *args: grouped_outer(*args, BF16),
        (of((K, M), F8), of((N, M), F8_GRAD), INT, INT, vector(TILES, K), vector(TILES, N)),
        32,
        165,
    ),
}  # fmt: skip


def complaints(report):
    """Return what ptxas says of lost performance, but that it orders uses of registers itself."""
    return [line for line in report.splitlines() if re.search(r"\(C7\d+\)", line)
            and "warpgroup.arrive is injected" not in line]  # fmt: skip


def registers_set(kernel):
    """Return the numbers that warpgroups set: as the program says, and as the machine code does."""
    wanted = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", kernel.ptx)
    found = re.findall(r"USETMAXREG\.\S+ (?:UP\d, )?(0x\w+)", kernel.sass)
    return {int(n) for n in wanted}, {int(n, 16) for n in found}


def loop_of(kernel):
    """Return the instructions of the loop in which all products are, but for what is spun on."""
    lines = kernel.sass.splitlines()
    products = [i for i, line in enumerate(lines) if "QGMMA" in line]
    labels = {line.strip(" :"): i for i, line in enumerate(lines) if line.startswith(".L_")}
    for i, line in enumerate(lines):
        to = re.search(r"BRA\S* (?:U?!?P\d, )?`\((\.L_\w+)\)", line)
        if to and i > products[-1] and labels[to[1]] < products[0]:
            return lines[labels[to[1]] : i]
    raise AssertionError("no loop")


def arithmetic_per_product(loop):
    count = lambda names: len(re.findall(rf"\b(?:{names})\b", "\n".join(loop)))
    return count("FFMA|FMUL|FADD|MUFU") / count("QGMMA")


def cycles_without_products(loop):
    """Return the cycles that instructions stall from the wait for products to the next ones."""
    waits = [i for i, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
    first = next(i for i, line in enumerate(loop) if "QGMMA" in line)
    outside = "\n".join([*loop[waits[-1] :], *loop[:first]])
    return sum(map(int, re.findall(r"^\s*\S:\S:\S:\S:(\d\d)\s", outside, re.MULTILINE)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_machine_code(name, record_property):
    f, args, most, longest = PROGRAMS[name]
    for kernel in compile_for("h200", f, *args).kernels:
        assert complaints(kernel.ptxas) == []
        assert kernel.spilled == 0
        wanted, found = registers_set(kernel)
        assert wanted == found
        assert len(wanted) == 2
        loop = loop_of(kernel)
        counted = arithmetic_per_product(loop), cycles_without_products(loop)
        record_property(kernel.name, counted)
        assert counted[0] <= most
        assert 0 < counted[1] <= longest
