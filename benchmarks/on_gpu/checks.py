"""Check the results of each kernel on the current device: the cases, at all sizes.

`python -m jfp8 check` runs a small case of each; how they are checked is said there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfp8
from jfp8.command_line.exactness import awkward, normal, on_cpu, poisoned_runs, run
from jfp8.command_line.product_checks import (
    check_block_matmul,
    check_grouped_matmul,
    check_grouped_outer,
    check_matmul,
)
from jfp8.command_line.quantize_checks import (
    check_quantize_lines,
    check_quantize_rows_in_blocks,
    check_quantize_tensor,
    check_quantize_tiles,
    check_row_and_column_amax,
    check_tensor_amax,
)
from jfp8.scaling.formats import E4M3FN, E5M2
from on_gpu.cases import Case, Group, Settings
from on_gpu.kernels import check_large
from on_gpu.records import Record
from on_gpu.shapes import name_of, shapes


def check_poison() -> Record:
    """Return the share of a result that a program does not overwrite, and that was poisoned."""
    shape = (4096, 4096)
    found = [
        float(jnp.mean(jnp.isnan(x)))
        for x in poisoned_runs(lambda: jax.lax.empty(shape, jnp.bfloat16))
    ]
    return {"poisoned": min(found)}


# Quantize kernels.


def quantize_cases(settings: Settings) -> list[list[Case]]:
    """For each kind of input."""
    f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
    if settings.smoke:
        inputs = [((72, 136), bf16)]
    else:
        ragged, large = (1000, 1544), (4096, 8192)
        inputs = [(ragged, bf16), (large, bf16), (ragged, f32), (ragged, f16)]
    found = []
    for index, (shape, dtype) in enumerate(inputs):
        where = f"{shape[0]}x{shape[1]} {np.dtype(dtype).name}"
        x = functools.cache(functools.partial(awkward, shape, dtype, 1))
        every = index == 0 and not settings.smoke
        found.append(list(_quantize_cases_of(x, where, every)))
    return found


def _quantize_cases_of(x: Callable[[], jax.Array], where: str, every: bool) -> Iterator[Case]:
    def case(function: Callable[..., Record], what: str, *arguments: Any) -> Case:
        name = function.__name__.removeprefix("check_")
        label = ", ".join(part for part in (what, where) if part)
        return Case(f"{name}: {label}", lambda: function(x(), *arguments), (name,))

    yield case(check_tensor_amax, "")
    yield case(check_row_and_column_amax, "")
    for fmt in (E4M3FN, E5M2):
        yield case(check_quantize_tensor, fmt.name, fmt, True)
        yield case(check_quantize_lines, fmt.name, fmt)
        yield case(check_quantize_rows_in_blocks, f"{fmt.name}, 1x128", fmt, 128, "power_of_two")
        yield case(check_quantize_rows_in_blocks, f"{fmt.name}, 1x32 rceil", fmt, 32, "rceil")
        yield case(check_quantize_tiles, f"{fmt.name}", fmt, "power_of_two")
        if every:
            yield case(check_quantize_tensor, f"{fmt.name}, no amax", fmt, False)
            yield case(check_quantize_rows_in_blocks, f"{fmt.name}, 1x128 f32", fmt, 128, None)
            yield case(check_quantize_tiles, f"{fmt.name}, f32", fmt, None)
            for mode in ("floor", "ceil", "even"):
                yield case(check_quantize_rows_in_blocks, f"{fmt.name}, {mode}", fmt, 32, mode)
        else:
            return  # one format is enough there


# Products.


def product_cases(settings: Settings) -> Iterator[Case]:
    four, five = E4M3FN.dtype, E5M2.dtype
    # The last is about as large as is quick in float64 on a CPU.
    shapes = [(1000, 1544, 1096), (512, 768, 1024), (2048, 2048, 2048)]
    if settings.smoke:
        shapes = [(72, 136, 200)]

    def case(name: str, what: str, check: Callable[[], Record]) -> Case:
        return Case(f"{name}: {what}", check, (name,))

    mixes = [((four, four), jnp.bfloat16), ((four, five), jnp.float32), ((five, four), jnp.float16)]
    for shape in shapes:
        size = "x".join(map(str, shape))
        for dtypes, out in mixes[: 3 if shape == (1000, 1544, 1096) else 1]:
            what = f"{'x'.join(np.dtype(d).name.removeprefix('float8_') for d in dtypes)}, {size}"
            for promote, rows in ((False, False), (True, True), (False, True), (True, False)):
                if not settings.smoke or promote == rows:
                    label = f"{'promoted' if promote else 'running'} sum, {what}"
                    label += ", rows" if rows else ""
                    check = functools.partial(check_matmul, *shape, dtypes, out, promote, rows)
                    yield case("matmul", label, check)
            for by_tile in (True,) if settings.smoke else (True, False):
                label = f"b in {'128x128' if by_tile else '1x128'}, {what}"
                check = functools.partial(check_block_matmul, *shape, dtypes, out, by_tile)
                yield case("block_matmul", label, check)
    n, k = (128, 256) if settings.smoke else (1544, 1096)
    for scaled in (True,) if settings.smoke else (True, False):
        label = "scaled" if scaled else "not scaled"
        yield case(
            "grouped_matmul", label, functools.partial(check_grouped_matmul, 3, 4, n, k, scaled)
        )
        yield case(
            "grouped_outer", label, functools.partial(check_grouped_outer, 3, 4, 136, n, scaled)
        )


def large_cases(settings: Settings) -> Iterator[Case]:
    for shape in shapes(settings):
        for kind in ("running", "promoted", "block")[: 1 if settings.smoke else 3]:
            name = "block_matmul" if kind == "block" else "matmul"
            check = functools.partial(check_large, kind, *shape)
            yield Case(f"{name}: {kind} sum, {name_of(shape)}", check, (name,))


# The public functions, by every way to compute them.

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8")
IMPLEMENTATIONS = (None, "xla", "mosaic_gpu")
# Scales that vary along the contraction, in blocks that no kernel of theirs takes.
_REFUSED = {("block", "xla"), ("mxfp8", "xla"), ("mxfp8", "mosaic_gpu")}


def check_gradients(shape: tuple[int, int, int], recipe: str, implementation: Any) -> Record:
    """Compare a matmul and its gradients with the emulated ones on the CPU.

    The quantized operands are the same, so only the order of additions differs, and what a tensor
    core cuts off: 1 % is far above that, and far below what a wrong scale or operand would do.
    """
    m, k, n = shape
    x, w, dy = (normal(s, jnp.bfloat16, i) for i, s in enumerate(((m, k), (k, n), (m, n))))

    def products(x, w, dy, implementation):
        dot = functools.partial(
            jfp8.scaled_dot_general,
            dimension_numbers=(((1,), (0,)), ((), ())),
            recipe=jfp8.recipes.get(recipe),
            implementation=implementation,
        )
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(dy)

    got = run(functools.partial(products, implementation=implementation), x, w, dy)
    expected = on_cpu(functools.partial(products, implementation="emulate"), x, w, dy)
    record = {}
    for name, a, b in zip(("y", "dx", "dw"), got, expected, strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        relative = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        record[name] = relative
        if not relative < 1e-2:
            raise AssertionError(f"{name} is off by {relative:.3g}")
    return {"relative_error": max(record.values()), **record}


def public_cases(settings: Settings) -> Iterator[Case]:
    shape = (128, 256, 128) if settings.smoke else (1000, 1544, 1096)
    for recipe in RECIPES[:1] if settings.smoke else RECIPES:
        for implementation in IMPLEMENTATIONS[-1:] if settings.smoke else IMPLEMENTATIONS:
            if (recipe, implementation) in _REFUSED:
                continue
            check = functools.partial(check_gradients, shape, recipe, implementation)
            size = "x".join(map(str, shape))
            yield Case(f"{recipe}, implementation={implementation}, {size}", check)


def checks(settings: Settings) -> Iterator[Group]:
    """Yield the section: the kernels, then the functions that use them."""
    first, *others = quantize_cases(settings)
    if not settings.smoke:  # a CPU writes zeros
        yield Group("memory", [Case("what no program wrote", check_poison)])
    yield Group("quantize kernels", first)
    yield Group("products", list(product_cases(settings)))
    yield Group("scaled_dot_general with gradients", list(public_cases(settings)))
    yield Group("products as large as those that are timed", list(large_cases(settings)))
    if others:
        yield Group("quantize kernels, other inputs", [case for o in others for case in o])
