"""The recipe for training whose forward pass multiplies what will be deployed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jfp8.quantizers.from_forward import FromForward
from jfp8.quantizers.quantizer import Quantizer
from jfp8.recipes.block_scaling import Float8BlockScaling, MXFP8BlockScaling
from jfp8.recipes.mxfp4 import MXFP4BlockScaling
from jfp8.recipes.nvfp4 import NVFP4BlockScaling
from jfp8.recipes.per_tensor import Float8CurrentScaling
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe, takes
from jfp8.recipes.rowwise import RowwiseScaling

Grid = Literal["block", "rowwise", "mxfp8", "mxfp4", "nvfp4"]

# Recipes whose forward matmul has the quantizers of activations and weights.
_GRIDS: dict[str, Recipe] = {
    "block": Float8BlockScaling(),
    "rowwise": RowwiseScaling(scale_rounding=None),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(two_dimensional_weights=False),
}

Backward = Literal["dequantized", "high_precision", "current", "rowwise", "block", "mxfp8"]

_IN_FP8: dict[Backward, Recipe] = {
    "current": Float8CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}


@dataclass(frozen=True, repr=False)
class QuantizationAware(Recipe):
    """Quantization-aware training (QAT): forward on the grid of the deployed weights. No state. ::

        fprop  y  = q(x) . q(w)       q(x) = x, unless `activations` are quantized
        dgrad  dx = dy . q(w)^T       "dequantized"
        wgrad  dw = q(x)^T . dy

    The gradient is straight-through: it reaches the unquantized weight, which the optimizer
    updates, as if ``q`` were the identity. `jfp8.quantize_params` with this recipe gives the bytes
    and scales whose dequantized values the forward pass multiplied, bit for bit. A matmul refuses
    stored weights that are on another grid, since it would round them again.

    Attributes:
      weights: the grid of the weights, or a quantizer. ``"block"``: E4M3, a power of two for each
        128x128; ``"rowwise"``: E4M3, an f32 scale for each output channel; ``"mxfp8"``,
        ``"mxfp4"``: E4M3 or E2M1, a power of two for every 32 values along the sum; ``"nvfp4"``:
        E2M1, an E4M3 scale for every 16 values along the sum, and one f32 scale for the tensor.
      activations: quantizer of activations, for engines that quantize them, where ``"block"`` has
        1x128 and ``"rowwise"`` a scale for each token; None keeps them in high precision.
      backward: ``"dequantized"``: both gradients in high precision, of the values that the forward
        pass multiplied. ``"high_precision"``: of the unquantized operands. ``"current"``,
        ``"rowwise"``, ``"block"``, ``"mxfp8"``: in FP8, as that recipe computes them, from the
        unquantized operands.

    References:
      Transformer Engine, ``backward_override``; arXiv 1712.05877 section 3.
    """

    name: ClassVar[str] = "qat"
    exact_export: ClassVar[bool] = True

    weights: Grid | Quantizer = "mxfp4"
    activations: Grid | Quantizer | None = None
    backward: Backward = takes(("dequantized", "high_precision", *_IN_FP8), "dequantized")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "activations"):
            given = getattr(self, name)
            known = isinstance(given, Quantizer) or (isinstance(given, str) and given in _GRIDS)
            if not known and (name, given) != ("activations", None):
                raise ValueError(
                    f"QuantizationAware({name}={given!r}): allowed are "
                    f"{', '.join(map(repr, _GRIDS))}, a quantizer such as "
                    "jfp8.quantizers.Blockwise(jfp8.E4M3FN, (128, 128)), and None for activations."
                )
        forward = self.products().fprop
        for name, q in (("weights", forward.rhs), ("activations", forward.lhs)):
            if q is not None and (q.stochastic or q.history_len):
                raise ValueError(
                    f"QuantizationAware({name}={q!r}): rounds stochastically or takes its scale "
                    "from a history, so that the values of a step could not be exported. Use a "
                    "quantizer that rounds to nearest, with scales from the data."
                )

    def products(self) -> Products:
        grid_of = lambda given: _GRIDS[given].products().fprop
        w = grid_of(self.weights).rhs if isinstance(self.weights, str) else self.weights
        x = grid_of(self.activations).lhs if isinstance(self.activations, str) else self.activations
        fprop = Product(x, w, fast_accumulation=True)
        if self.backward in _IN_FP8:
            backward = _IN_FP8[self.backward].products()
            return Products(fprop, backward.dgrad, backward.wgrad)
        if self.backward == "high_precision":
            return Products(fprop, Product(None, None), Product(None, None))
        again = lambda q: None if q is None else FromForward(q.fmt, q.powers_of_two)
        return Products(fprop, Product(None, again(w)), Product(again(x), None))
