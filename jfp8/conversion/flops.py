"""Count the operations of matmuls that JAX computes; expect their times, and a step's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from jfp8.conversion.product_rows import ProductRow
from jfp8.conversion.weight_matmul import PRODUCTS
from jfp8.matmul.planner import Scales, Work, planner_of
from jfp8.recipes.recipe import Recipe
from jfp8.tracing.device import current_gpu
from jfp8.tracing.devices import Gpu

# The matmuls in a pass of cuDNN's attention, by the names of JAX's primitives. On an H100 both
# passes together reached this part of the rate of other matmuls.
CUDNN_PASSES = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
CUDNN_RATE = 0.55
# Bytes that norms, activations, residuals and rotations move, forward and backward, for each number
# in the results of forward matmuls. In a Llama block they are 56.5 for each token and feature, and
# 15.5 for each token and feature of the MLP.
BETWEEN = 9.4
# Bytes for each parameter in f32: AdamW moves 30. In bf16 weights are cast; with FP8 matmuls their
# gradients are in f32, and checked.
ADAMW, CAST, CHECKED = 30, 6, 8


def flops(eqn: Any) -> int:
    """Count the multiplications and additions of a plain product; 0 for anything else.

    cuDNN's attention leaves out half of them if it is causal.
    """
    if matmuls := CUDNN_PASSES.get(eqn.primitive.name):
        query, key = (v.aval for v in eqn.invars[:2])
        keys = key.shape[2 if eqn.params["layout"] else 1]  # heads are before or after them
        return 2 * matmuls * query.size * keys // (1 + ("CAUSAL" in eqn.params["mask_type"].name))
    if eqn.primitive.name not in PRODUCTS:
        return 0
    lhs, rhs, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * out.size * math.prod(lhs.shape[d] for d in contract)
    if eqn.primitive.name == "conv_general_dilated":
        return conv_flops(lhs.shape, rhs.shape, out.shape, eqn.params["dimension_numbers"])
    return 2 * lhs.shape[0] * rhs.size // max(rhs.shape[0], 1)  # a row meets one group


def conv_flops(lhs: Any, rhs: Any, out: Any, numbers: jax.lax.ConvDimensionNumbers) -> int:
    """Count 2 * batch * features * channels * (pairs of the two smallest of the three sizes).

    The sizes are those of image, kernel and result, along each dimension of space. Products there
    are triples of a pixel, a tap and a result, of which any two determine the third. For a
    convolution that makes images no larger this is the usual 2 * results * taps * channels; its
    gradients, and transposed convolutions, permute the three sizes, and the zeros between elements
    that JAX writes them with add nothing.
    """
    (batch, features, *out_space) = numbers.out_spec
    lhs_space, (_, channels, *taps) = numbers.lhs_spec[2:], numbers.rhs_spec
    flops = 2 * out[batch] * out[features] * rhs[channels]
    for i, k, o in zip(lhs_space, taps, out_space, strict=True):
        flops *= math.prod(sorted((lhs[i], rhs[k], out[o]))[:2])
    return flops


def expected_gain(eqn: Any, recipe: Recipe, gpu: Gpu | None) -> float:
    """Return the expected speed of a plain matmul under `recipe` on `gpu`, relative to bf16."""
    lhs, rhs, out = (v.aval for v in (*eqn.invars[:2], eqn.outvars[0]))
    work = Work(flops(eqn) / 2, lhs.size + rhs.size + out.size)
    is_conv = eqn.primitive.name == "conv_general_dilated"
    taps = eqn.params["dimension_numbers"].rhs_spec[2:] if is_conv else ()
    in_f8 = all(rhs.shape[d] == 1 for d in taps)  # convolutions by 1x1 kernels are matmuls
    return planner_of(gpu).expected_gain(work, recipe.resolved().quantizers(), in_f8)


def microseconds(
    flops: float, elements: int, how: str = "bf16", scales: Scales = "one"
) -> dict[str, Any]:
    """Return the times of a `ProductRow`: as it is computed, ``Times.{how}``, and in bf16.

    `elements` counts both operands and the result.
    """
    times = planner_of(current_gpu()).expected_times(Work(flops / 2, elements), scales)
    of = lambda name: None if times is None else 1e6 * getattr(times, name)
    return {"expected_us": of(how), "bf16_us": of("bf16")}


def parts_of_step(rows: Sequence[ProductRow], parameters: int) -> dict[str, tuple[float, float]]:
    """Return microseconds of the parts of a training step, as it is and in bf16; {} if unknown.

    `rows` are its matmuls, forward and backward; so many `parameters` are trained.
    """
    us_of = lambda moved: 1e6 * (planner_of(current_gpu()).expected_pass(moved) or 0.0)
    between = us_of(BETWEEN * sum(row.times * _results(row) for row in rows))
    if not between or not parameters:
        return {}
    parts = {}
    for name, in_fp8 in (("FP8 matmuls", True), ("other matmuls", False)):
        timed = [row for row in rows if row.fp8 == in_fp8]
        here = sum(row.times * (row.expected_us or 0.0) for row in timed)
        parts[name] = here, sum(row.times * (row.bf16_us or 0.0) for row in timed)
    parts["norms and activations"] = between, between
    parts["AdamW"] = us_of((ADAMW + CHECKED) * parameters), us_of((ADAMW + CAST) * parameters)
    return parts


def _results(row: ProductRow) -> int:
    """Count the numbers that a forward matmul writes for other kernels: 0 for any other row."""
    if row.kind not in ("fprop", "forward") or row.implementation == "cudnn":
        return 0
    return math.prod(map(int, re.findall(r"\d+", row.out.partition("[")[2])))
