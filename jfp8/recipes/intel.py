"""The recipes of Intel's FP8 Emulation Toolkit."""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import ClassVar

from jfp8.quantizers.quantizer import Current, Quantizer, Unit
from jfp8.recipes.product import Product, Products
from jfp8.recipes.recipe import Recipe, takes
from jfp8.scaling.formats import E4M3FN, E5M2


@dataclass(frozen=True, repr=False)
class _Toolkit(Recipe):
    """Base of both recipes: gradients in E5M2 without a scale, and quantized results.

    The result of fprop is quantized like an activation, the others like gradients.
    Results of `fused` layers are not, because the next operation is fused with them.
    """

    needs_loss_scale: ClassVar[bool] = True
    forward: ClassVar[Quantizer]
    """The quantizer of weights, activations and outputs."""

    quantize_outputs: bool = takes(bool, True)
    fused: tuple[str, ...] = ()
    stochastic_gradients: bool = takes(bool, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.fused, tuple) or not all(isinstance(p, str) for p in self.fused):
            raise TypeError(
                f"{type(self).__name__}(fused={self.fused!r}): must be a tuple of patterns, such "
                'as ("*/logits",).'
            )

    def products(self) -> Products:
        forward = self.forward
        grad = Unit(E5M2, rounding="stochastic" if self.stochastic_gradients else "nearest_even")
        y, d = (forward, grad) if self.quantize_outputs else (None, None)
        return Products(
            fprop=Product(forward, forward, output=y, fast_accumulation=True),
            dgrad=Product(grad, forward, output=d),
            wgrad=Product(forward, grad, output=d),
        )

    def for_layer(self, path: str) -> Recipe:
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in self.fused):
            return dataclasses.replace(self, quantize_outputs=False)
        return self


@dataclass(frozen=True, repr=False)
class DirectE5M2(_Toolkit):
    """E5M2 without scales for all operands and results. No state.

    Weights and activations are rounded to nearest even, gradients stochastically. Gradients below
    2^-17 vanish more often than not: train with `jfp8.loss_scale`. For 16-bit master weights see
    `jfp8.optim.stochastic_rounding`.

    Attributes:
      quantize_outputs: also quantize the results of the three matmuls (before a bias is added).
      fused: layers whose results stay in high precision: patterns of paths, ``("*/logits",)``.
      stochastic_gradients: round gradients stochastically; otherwise to nearest even.

    References:
      Intel FP8 Emulation Toolkit, ``mpemu/e5m2_emu.py``; arXiv 1905.12334. Its numbers differ from
      these where they are not OCP's: it rounds twice (through float16), and does not round
      subnormals stochastically.
    """

    name: ClassVar[str] = "direct_e5m2"
    forward: ClassVar[Quantizer] = Unit(E5M2)


@dataclass(frozen=True, repr=False)
class Hybrid(_Toolkit):
    """E4M3 with per-tensor current scales forward, E5M2 without scales for gradients. No state.

    ``scale = amax(x) / 448`` for weights, activations and outputs. Gradients are rounded
    stochastically and have no scale: train with `jfp8.loss_scale`. For 16-bit master weights see
    `jfp8.optim.stochastic_rounding`. See `DirectE5M2` for the fields.

    References:
      Intel FP8 Emulation Toolkit, ``mpemu/hybrid_emu.py``, whose multiplying scale is at most 2^16.
    """

    name: ClassVar[str] = "hybrid"
    forward: ClassVar[Quantizer] = Current(E4M3FN)
