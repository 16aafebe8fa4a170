"""Fake quantization by the published rule of each recipe, in numpy and ml_dtypes: an oracle.

Rules take an array ``[b, rows, columns]`` and the axis that is summed over, 1 or 2, and return the
values that the quantized array stands for. Products are those of batches of matrices, in float64:
lhs ``[b, m, k]``, rhs ``[b, k, n]``, grad ``[b, m, n]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import jfp8
from jfp8 import recipes
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Current, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.product import Product

UNIT_ROUNDOFF = 2.0**-24  # f32's
E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
MAX = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
EMAX = {E4M3: 8, E5M2: 15, E2M1: 2}
MANTISSA_BITS = {E4M3: 3, E5M2: 2, E2M1: 1}

Rule = Callable[[np.ndarray, int], np.ndarray]


def round_to(x, fmt) -> np.ndarray:
    return np.clip(x, -MAX[fmt], MAX[fmt]).astype(fmt).astype(np.float64)


def of_blocks(x, block, reduced) -> np.ndarray:
    """`reduced` of the block that each element is in, cut short at the ends; of shape x."""
    padded = np.pad(x, [(0, -n % b) for n, b in zip(x.shape, block)])
    parts = [part for n, b in zip(padded.shape, block) for part in (n // b, b)]
    found = reduced(padded.reshape(parts), axis=(1, 3, 5), initial=0)
    for axis, b in enumerate(block):
        found = np.repeat(found, b, axis=axis)
    return found[tuple(map(slice, x.shape))]


def amax_per(x, block) -> np.ndarray:
    return of_blocks(abs(x), block, np.max)


def scale_for(amax, fmt, rounding) -> np.ndarray:
    """The scale of the block, by the text of each rounding; of zeros it does not matter."""
    amax = np.where(amax > 0, amax, 1).astype(np.float32)
    if rounding is None:
        return amax / np.float32(MAX[fmt])
    fraction, exponent = np.frexp(amax.astype(np.float64))  # amax = fraction * 2^exponent
    floor_log2 = exponent - 1  # since 1/2 <= fraction < 1
    if rounding == "floor":
        power = floor_log2 - EMAX[fmt]
    elif rounding == "ceil":
        power = floor_log2 + (fraction > 0.5) - EMAX[fmt]
    elif rounding == "even":  # amax is rounded to the format's mantissa, half away from zero
        half_a_step = np.exp2(floor_log2 - MANTISSA_BITS[fmt] - 1.0)
        power = np.floor(np.log2(amax.astype(np.float64) + half_a_step)) - EMAX[fmt]
    else:  # "rceil", "power_of_two": the smallest power with amax <= max * 2^power
        power = floor_log2 - EMAX[fmt]
        power = power + (amax > MAX[fmt] * np.exp2(1.0 * power))
    return np.exp2(1.0 * power).astype(np.float32)


def fake_quantized(x, scale, fmt) -> np.ndarray:
    return round_to(x * (np.float32(1) / scale), fmt) * scale.astype(np.float64)


def high_precision(x, axis):
    return x.astype(np.float64)


def unit(fmt) -> Rule:
    return lambda x, axis: round_to(x, fmt)


def per_tensor(fmt, rounding=None) -> Rule:
    return lambda x, axis: fake_quantized(
        x, scale_for(np.full(x.shape, abs(x).max(initial=0)), fmt, rounding), fmt
    )


def per_row(fmt, rounding="power_of_two") -> Rule:
    def rule(x, axis):
        amax = abs(x).max(axis=axis, keepdims=True, initial=0)
        return fake_quantized(x, scale_for(amax, fmt, rounding), fmt)

    return rule


def block_shape(along, free, axis):
    return (1, along, free) if axis == 1 else (1, free, along)


def per_block(fmt, along, free, rounding) -> Rule:
    def rule(x, axis):
        amax = amax_per(x, block_shape(along, free, axis))
        return fake_quantized(x, scale_for(amax, fmt, rounding), fmt)

    return rule


def nvfp4(free, target=6, reach=448 * 6, by_row=False) -> Rule:
    """arXiv 2509.25149 appendix B, blocks of 16; f32 arithmetic."""

    def rule(x, axis):
        f32 = np.float32
        amax = abs(x).max(axis=axis if by_row else None, keepdims=True, initial=0)
        S = np.where(amax > 0, f32(reach) / np.where(amax > 0, amax, f32(1)), f32(1))
        s = round_to(amax_per(x, block_shape(16, free, axis)) / f32(target) * S, E4M3)
        with np.errstate(divide="ignore"):
            m = np.minimum(f32(1) / (s.astype(f32) / S), np.finfo(f32).max)
        return round_to(x * m, E2M1) * s / S.astype(np.float64)

    return rule


def four_over_six(free) -> Rule:
    """arXiv 2512.02010: of the scales that take the largest of a block to 6 or to 4, the better."""

    def rule(x, axis):
        six, four = (nvfp4(free, target, 256 * 6)(x, axis) for target in (6, 4))
        block = block_shape(16, free, axis)
        error_of_six, error_of_four = (of_blocks((y - x) ** 2, block, np.sum) for y in (six, four))
        return np.where(error_of_four < error_of_six, four, six)

    return rule


SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotated(x, axis) -> np.ndarray:
    """Stretches of 16 along `axis`, zeros behind them, times ``diag(signs) H / 4``."""
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    x = np.pad(x, [(0, -n % 16 if d == axis else 0) for d, n in enumerate(x.shape)])
    x = np.moveaxis(x, axis, -1)
    stretches = x.reshape(*x.shape[:-1], -1, 16).astype(np.float64)
    exact = (stretches @ (np.diag(SIGNS) @ h / 4)).reshape(x.shape)
    assert (exact == exact.astype(np.float32)).all()  # the data is such that f32 sums are exact
    return np.moveaxis(exact.astype(np.float32), -1, axis)


@dataclass(frozen=True)
class Rules:
    """Rules of both operands of each product, and of its result."""

    fprop: tuple[Rule, Rule]
    dgrad: tuple[Rule, Rule]
    wgrad: tuple[Rule, Rule]
    outputs: tuple[Rule, Rule, Rule] | None = None
    rotate_wgrad: bool = False


def uniform(lhs, rhs, grad, **options) -> Rules:
    return Rules((lhs, rhs), (grad, rhs), (lhs, grad), **options)


def oracle(rules, lhs, rhs, dy):
    """Exact y, d_lhs, d_rhs of f32 arrays [b, ., .], and how far f32 sums may be from them.

    |error| <= (K + 8) u sum|a b| for a sum of K products: at most K - 1 additions, padding included
    since adding zero is exact; each product takes at most two scales of two factors and their
    product, which are rounded once each; the rest is for terms of higher order. Below the normal
    numbers XLA:CPU flushes.
    """
    products = {
        "y": (rules.fprop, "bmk,bkn->bmn", lhs, 2, rhs, 1),
        "d_lhs": (rules.dgrad, "bmn,bkn->bmk", dy, 2, rhs, 2),
        "d_rhs": (rules.wgrad, "bmk,bmn->bkn", lhs, 1, dy, 1),
    }
    results = {}
    for name, ((rule_a, rule_b), equation, a, a_axis, b, b_axis) in products.items():
        if name == "d_rhs" and rules.rotate_wgrad:
            a, b = rotated(a, a_axis), rotated(b, b_axis)
        k = a.shape[a_axis]
        a, b = rule_a(a, a_axis), rule_b(b, b_axis)
        magnitude = np.einsum(equation, abs(a), abs(b))
        bound = (k + 8) * UNIT_ROUNDOFF * magnitude + np.finfo(np.float32).tiny
        results[name] = np.einsum(equation, a, b), bound
    return results


# Recipes and their rules


def mx(fmt, free=1, rounding="rceil") -> Rule:
    return per_block(fmt, 32, free, rounding)


def tiles(fmt, free, rounding="power_of_two") -> Rule:
    return per_block(fmt, 128, free, rounding)


def mixed_recipe():
    """Different for every operand, some of them in high precision."""
    return PerOperand(
        fprop=Product(Blockwise(jfp8.E4M3FN, (32, 1), "rceil"), None),
        dgrad=Product(Rowwise(jfp8.E5M2, "power_of_two"), Current(jfp8.E4M3FN)),
        wgrad=Product(None, Unit(jfp8.E5M2)),
    )


MIXED_RULES = Rules(
    fprop=(mx(E4M3), high_precision),
    dgrad=(per_row(E5M2), per_tensor(E4M3)),
    wgrad=(high_precision, unit(E5M2)),
)
RNE = {"stochastic_gradients": False}
NVFP4_PLAIN = {
    "stochastic_rounding": False,
    "random_hadamard": False,
    "two_dimensional_weights": False,
}
DIRECT = uniform(unit(E5M2), unit(E5M2), unit(E5M2), outputs=(unit(E5M2),) * 3)
HYBRID = uniform(per_tensor(E4M3), per_tensor(E4M3), unit(E5M2))
HYBRID_ALL = uniform(
    *(per_tensor(E4M3), per_tensor(E4M3), unit(E5M2)),
    outputs=(per_tensor(E4M3), unit(E5M2), unit(E5M2)),
)


def quantization_aware(weights: Rule, activations: Rule = high_precision) -> Rules:
    """Gradients in high precision, of what the forward product multiplied."""
    again = (lambda x, axis: activations(x, 2)), (lambda x, axis: weights(x, 1))
    return Rules((activations, weights), (high_precision, again[1]), (again[0], high_precision))


# Nearest rounding everywhere: what stochastic rounding does is in test_stochastic.py.
VARIANTS = {
    "delayed": (
        recipes.DelayedScaling(),
        uniform(per_tensor(E4M3), per_tensor(E4M3), per_tensor(E5M2)),
    ),
    "current": (
        recipes.Float8CurrentScaling(),
        uniform(per_tensor(E4M3), per_tensor(E4M3), per_tensor(E5M2)),
    ),
    "rowwise": (recipes.RowwiseScaling(), uniform(*[per_row(E4M3)] * 3)),
    "rowwise, f32 scales, hybrid": (
        recipes.RowwiseScaling(fp8_format="HYBRID", scale_rounding=None),
        uniform(per_row(E4M3, None), per_row(E4M3, None), per_row(E5M2, None)),
    ),
    "rowwise, high-precision wgrad": (
        recipes.RowwiseScaling(high_precision_wgrad=True),
        Rules(
            (per_row(E4M3), per_row(E4M3)),
            (per_row(E4M3), per_tensor(E4M3, "power_of_two")),
            (high_precision, high_precision),
        ),
    ),
    "block": (
        recipes.Float8BlockScaling(),
        uniform(tiles(E4M3, 1), tiles(E4M3, 128), tiles(E4M3, 1)),
    ),
    "block, f32 scales, hybrid": (
        recipes.Float8BlockScaling(fp8_format="HYBRID", scale_rounding=None),
        uniform(tiles(E4M3, 1, None), tiles(E4M3, 128, None), tiles(E5M2, 1, None)),
    ),
    "block, tiles in wgrad": (
        recipes.Float8BlockScaling(fp8_format="HYBRID", wgrad_tiles=True),
        Rules(
            (tiles(E4M3, 1), tiles(E4M3, 128)),
            (tiles(E5M2, 1), tiles(E4M3, 128)),
            (tiles(E4M3, 128), tiles(E5M2, 1)),
        ),
    ),
    "mxfp8": (recipes.MXFP8BlockScaling(), uniform(mx(E4M3), mx(E4M3), mx(E4M3))),
    "mxfp8, 2d, hybrid": (
        recipes.MXFP8BlockScaling(fp8_format="HYBRID", two_dimensional_weights=True),
        uniform(mx(E4M3), mx(E4M3, 32), mx(E5M2)),
    ),
    "nvfp4, nearest": (
        recipes.NVFP4BlockScaling(stochastic_rounding=False),
        uniform(nvfp4(1), nvfp4(16), nvfp4(1), rotate_wgrad=True),
    ),
    "nvfp4, options off": (
        recipes.NVFP4BlockScaling(**NVFP4_PLAIN),
        uniform(nvfp4(1), nvfp4(1), nvfp4(1)),
    ),
    "nvfp4_4over6, nearest": (
        recipes.NVFP4FourOverSix(stochastic_rounding=False),
        uniform(four_over_six(1), four_over_six(16), four_over_six(1), rotate_wgrad=True),
    ),
    "nvfp4_row, nearest": (
        recipes.NVFP4RowScaling(stochastic_rounding=False),
        Rules(
            (nvfp4(1, by_row=True), nvfp4(16)),
            (nvfp4(1), nvfp4(16)),
            (nvfp4(1), nvfp4(1)),
            rotate_wgrad=True,
        ),
    ),
    "mxfp4, options off": (
        recipes.MXFP4BlockScaling(stochastic_rounding=False, random_hadamard=False),
        uniform(mx(E2M1), mx(E2M1), mx(E2M1)),
    ),
    "qat": (recipes.QuantizationAware(), quantization_aware(mx(E2M1))),
    "qat, mxfp4 by mxfp8": (
        recipes.QuantizationAware("mxfp4", "mxfp8"),
        quantization_aware(mx(E2M1), mx(E4M3)),
    ),
    "qat, nvfp4": (
        recipes.QuantizationAware("nvfp4", "nvfp4"),
        quantization_aware(nvfp4(1), nvfp4(1)),
    ),
    "qat, rowwise": (
        recipes.QuantizationAware("rowwise", "rowwise"),
        quantization_aware(per_row(E4M3, None), per_row(E4M3, None)),
    ),
    "qat, block": (
        recipes.QuantizationAware("block", "block"),
        quantization_aware(tiles(E4M3, 128), tiles(E4M3, 1)),
    ),
    "qat, high-precision backward": (
        recipes.QuantizationAware("mxfp8", backward="high_precision"),
        Rules((high_precision, mx(E4M3)), *[(high_precision, high_precision)] * 2),
    ),
    "qat, fp8 backward": (
        recipes.QuantizationAware("nvfp4", backward="mxfp8"),
        Rules((high_precision, nvfp4(1)), *[(mx(E4M3), mx(E4M3))] * 2),
    ),
    "direct_e5m2, nearest": (recipes.DirectE5M2(**RNE), DIRECT),
    "hybrid, nearest": (recipes.Hybrid(**RNE), HYBRID_ALL),
    "hybrid, nearest, operands only": (recipes.Hybrid(quantize_outputs=False, **RNE), HYBRID),
    "unscaled": (recipes.Unscaled(), uniform(unit(E4M3), unit(E4M3), unit(E5M2))),
    "per operand": (mixed_recipe(), MIXED_RULES),
} | {
    f"mxfp8, {mode}": (
        recipes.MXFP8BlockScaling(scale_rounding=mode),
        uniform(*[mx(E4M3, rounding=mode)] * 3),
    )
    for mode in ("floor", "ceil", "even")
}
