"""Check the results of each kernel on the current device: the cases, at all sizes.

`python -m jfp8 check` runs a small case of each; how they are checked is said there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfp8
from jfp8.command_line.cases import (
    MOSAIC,
    Scales,
    check_grouped,
    check_matmul,
    check_quantizing,
)
from jfp8.command_line.exactness import awkward, normal, on_cpu, poisoned_runs, run
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Delayed, Quantizer
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.formats import E4M3FN, E5M2, Format
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


# Quantizing.

# The kernel for the blocks of a quantizer.
KERNELS = {
    None: "quantize_tensor",
    (128, 1): "quantize_rows_in_blocks",
    (32, 1): "quantize_rows_in_blocks",
    (128, 128): "quantize_tiles",
}
ROUNDINGS = ("floor", "ceil", "even")


def quantize_cases(settings: Settings) -> list[list[Case]]:
    """For each kind of input."""
    f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
    if settings.smoke:
        inputs = [((72, 136), bf16)]
    else:
        ragged, large = (1000, 1544), (4096, 8192)
        inputs = [(ragged, bf16), (large, bf16), (ragged, f32), (ragged, f16)]
    more = [*_quantizers(E5M2), Blockwise(E4M3FN, (128, 1)), Blockwise(E4M3FN, (128, 128))]
    more += [Blockwise(E4M3FN, (32, 1), rounding) for rounding in ROUNDINGS]
    return [
        [
            _quantize_case(quantizer, shape, dtype)
            for quantizer in (
                *_quantizers(E4M3FN),
                *(more if index == 0 and not settings.smoke else ()),
            )
        ]
        for index, (shape, dtype) in enumerate(inputs)
    ]


def _quantizers(fmt: Format) -> Iterator[Quantizer]:
    yield from (Delayed(fmt, length=2), Rowwise(fmt), Blockwise(fmt, (128, 1), "power_of_two"))
    yield from (Blockwise(fmt, (32, 1), "rceil"), Blockwise(fmt, (128, 128), "power_of_two"))


def _quantize_case(quantizer: Quantizer, shape: tuple[int, int], dtype: Any) -> Case:
    def check() -> Record:
        return check_quantizing(quantizer, awkward(shape, dtype, 1), history=3.7)

    where = f"{shape[0]}x{shape[1]} {np.dtype(dtype).name}"
    kernel = "quantize_lines" if isinstance(quantizer, Rowwise) else KERNELS[quantizer.block]
    return Case(f"{kernel}: {quantizer}, {where}", check, (kernel,))


# Products.

# Scales of operands, and the kernel that multiplies them.
SCALES = {
    "one": (Scales(None, None), "matmul"),
    "rows": (Scales((1, 1 << 20), (1, 1 << 20)), "matmul"),
    "128x128": (Scales((1, 128), (128, 128)), "block_matmul"),
    "1x128": (Scales((1, 128), (1, 128)), "block_matmul"),
    "128x128 of lhs": (Scales((128, 128), (1, 128)), "block_matmul"),
}


def product_cases(settings: Settings) -> Iterator[Case]:
    ragged = (1000, 1544, 1096)
    # The last is about as large as is quick on a CPU.
    shapes = [ragged, (512, 768, 1024), (2048, 2048, 2048)]
    if settings.smoke:
        shapes = [(72, 136, 200)]
    mixes = [
        ((E4M3FN, E4M3FN), jnp.bfloat16),
        ((E4M3FN, E5M2), jnp.float32),
        ((E5M2, E4M3FN), jnp.float16),
    ]
    for shape in shapes:
        for formats, out in mixes[: 3 if shape == ragged else 1]:
            what = f"{'x'.join(f.name for f in formats)}, {'x'.join(map(str, shape))}"
            for name, (scales, kernel) in SCALES.items():
                for fast in (False, True) if kernel == "matmul" else (False,):
                    check = functools.partial(
                        check_matmul, MOSAIC, shape, formats, scales, out, fast
                    )
                    label = f"{kernel}: {'running' if fast else 'promoted'} sum, {name}, {what}"
                    yield Case(label, check, (kernel,))
    n, k = (128, 256) if settings.smoke else (1544, 1096)
    check = functools.partial(check_grouped, 500, (200, 0, 260), k, n)
    yield Case("grouped_matmul: and gradients", check, ("grouped_matmul", "grouped_outer"))


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
