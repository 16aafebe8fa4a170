"""How a recipe computes the two products of attention, so that no query sees later keys.

    scores   S = Q K^T       lhs: queries, free x depth       rhs: keys, depth x free
    context  Y = P V         lhs: weights, free x keys        rhs: values, keys x depth

In both, positions lie along a dimension in which most recipes share scales: a scale for all keys,
or for a block of them, tells a query about keys that it may not attend to. So each operand gets
separate scales for each position. Those of the values vary along the sum, which no product
supports; they are powers of two and move, exactly, into the weights, whose zeros hide what a query
may not see.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.quantizer import Current, Quantizer, Unit
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.product import Product, Products
from jfp8.scaling.formats import E4M3FN, Format

InAttention = Literal["scores", "context"]


def attention_products(products: Products, which: InAttention) -> tuple[Products, Format | None]:
    """`products` adapted to one of the two products of attention. Backward products do not change.

    Neither do scales from an amax history. The result is not quantized. Where a quantizer from
    outside of jfp8 shares scales among positions, its operand stays in high precision.

    Args:
      which: ``"scores"`` or ``"context"``.

    Returns:
      The products; and the format whose range the values of each key fill, ``v_k / s_k``, with a
      power of two ``s_k`` by which the weights ``p_k`` are multiplied. None: neither is changed.
    """
    fprop, of_values = products.fprop, None
    rhs = fprop.rhs
    if which == "scores":
        rhs = _for_each_row(rhs)
    elif rhs is not None and rhs.scale_shared_along(history=True) & {"contracting", "batch"}:
        known = type(rhs) in (Current, Rowwise, Blockwise, TwoLevel)  # a subclass may do more
        of_values = _wide(rhs) if known else None
        rhs = None if of_values is None else Unit(of_values)
    lhs = _for_each_row(fprop.lhs)
    fprop = Product(lhs, rhs, fast_accumulation=fprop.fast_accumulation)
    return dataclasses.replace(products, fprop=fprop), of_values


def _for_each_row(quantizer: Quantizer | None) -> Quantizer | None:
    """`quantizer` with separate scales for each row of a sum; None if there is no such one."""
    if quantizer is None or not quantizer.scale_shared_along(history=True) & {"free", "batch"}:
        return quantizer
    if type(quantizer) is Current:
        return Rowwise(quantizer.fmt, quantizer.scale_rounding)
    if type(quantizer) is Blockwise:
        return dataclasses.replace(quantizer, block_size=(quantizer.block_size[0], 1))
    if type(quantizer) is TwoLevel:  # without the level of the tensor, 4 bits are too few
        return Blockwise(_wide(quantizer), (32, 1), "rceil")
    return None


def _wide(quantizer: Quantizer) -> Format:
    return quantizer.fmt if quantizer.fmt.has_nan else E4M3FN
