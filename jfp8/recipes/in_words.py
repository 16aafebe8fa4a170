"""A description of a recipe in words, one line for each matmul."""

from __future__ import annotations

from jfp8.quantizers.from_forward import FromForward
from jfp8.quantizers.quantizer import EVERYWHERE, Quantizer
from jfp8.recipes.product import Product, Products


def products_in_words(products: Products) -> list[str]:
    """Return a line for each matmul, such as ``"dgrad  E5M2 per tensor x E4M3FN per tensor"``."""
    return [f"{kind}  {_product(product)}" for kind, product in vars(products).items()]


def state_in_words(products: Products) -> str:
    """Return the state that is kept from step to step."""
    lengths = sorted({q.history_len for q in products.quantizers() if q.history_len})
    if not lengths:
        return "none"
    return f"amaxes of the last {' or '.join(map(str, lengths))} steps"


def _product(product: Product) -> str:
    if product.lhs is None and product.rhs is None:
        return _operand(None)
    words = f"{_operand(product.lhs)} x {_operand(product.rhs)}"
    if product.rotation is not None:
        words = f"{product.rotation!r} of both, then {words}"
    return words if product.output is None else f"{words} -> {_operand(product.output)}"


def _operand(quantizer: Quantizer | None) -> str:
    if quantizer is None:
        return "high precision"
    if isinstance(quantizer, FromForward):
        return f"{quantizer.fmt.name} as in fprop, dequantized"
    rounding = ""
    if quantizer.stochastic:
        rounding = " (stochastic)" if quantizer.rounding == "stochastic" else " (stochastic scales)"
    return f"{quantizer.fmt.name}{rounding} {_shares(quantizer)}"


def _shares(quantizer: Quantizer) -> str:
    """Name the elements that share a scale."""
    along = quantizer.scale_shared_along(history=False)
    if quantizer.block is not None:
        contracting, free = quantizer.block
        blocks = f"per {free}x{contracting}"
        if quantizer.spans_rows:
            return f"{blocks} and row"
        return f"{blocks} and tensor" if along == EVERYWHERE else blocks
    if not along:
        return "without scales"
    return "per tensor" if along == EVERYWHERE else "per row"
