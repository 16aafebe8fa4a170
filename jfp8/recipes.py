"""Recipes: which quantizer each operand of each of the three products gets.

A recipe changes numbers and nothing else does. It is a frozen dataclass: hashable, comparable, and
written to JSON and back. To add one, derive a class from `Recipe` here, and list it in `RECIPES`.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jfp8.matmul.job import ACCUMULATIONS, Accumulation
from jfp8.quantizers import quantizer as quantizers
from jfp8.quantizers.blocks import Blockwise, TwoLevel
from jfp8.quantizers.per_tensor import Current, Delayed, Unit
from jfp8.quantizers.quantizer import Quantizer
from jfp8.quantizers.rotations import Hadamard
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling import formats, printing
from jfp8.scaling.formats import E2M1FN, E4M3FN, E5M2, Format
from jfp8.scaling.history import AmaxState, init_amax_state
from jfp8.scaling.scales import ScaleRounding

__all__ = [
    "DelayedScaling",
    "DirectE5M2",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Hybrid",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "PerOperand",
    "Product",
    "Products",
    "RECIPES",
    "Recipe",
    "RowwiseScaling",
    "Unscaled",
    "from_json",
    "get",
]

Fp8Format = Literal["HYBRID", "E4M3", "E5M2"]

# (forward, gradient); HYBRID gives gradients the range they need and the rest the precision.
_FP8_FORMATS: dict[str, tuple[Format, Format]] = {
    "HYBRID": (E4M3FN, E5M2),
    "E4M3": (E4M3FN, E4M3FN),
    "E5M2": (E5M2, E5M2),
}


@dataclass(frozen=True, repr=False)
class Product:
    """How one of the three products is computed.

    Attributes:
      lhs, rhs: quantizers of its operands; None leaves one in high precision. The operands are
        ``(lhs, rhs)`` in fprop, ``(grad, rhs)`` in dgrad and ``(lhs, grad)`` in wgrad.
      output: quantizes the result as well; None leaves it in high precision.
      rotation: turns both operands along the contraction before they are quantized.
      fast_accumulation: whether hardware may accumulate in fewer bits (see `scaled_matmul`).

    Raises:
      TypeError: something else than a `Quantizer`.
      ValueError: a combination that cannot be computed, or only at a loss; the message says why.
    """

    lhs: Quantizer | None
    rhs: Quantizer | None
    output: Quantizer | None = None
    rotation: Hadamard | None = None
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs", "output"):
            _check_quantizer(name, getattr(self, name))
        if self.rotation is not None:
            if not isinstance(self.rotation, Hadamard):
                raise TypeError(f"rotation must be a Hadamard() or None, got {self.rotation!r}.")
            if self.lhs is None and self.rhs is None:
                raise ValueError(
                    "rotation without a quantized operand changes nothing: leave it out, or give "
                    "the product a quantizer."
                )
            if any(q is not None and q.history_len for q in (self.lhs, self.rhs)):
                raise ValueError(
                    "rotation with an amax history: the history is that of the tensor as it is, "
                    "not of the rotated one. Use quantizers that look at the data at hand."
                )
        blocks = [q.block for q in (self.lhs, self.rhs) if q is not None and q.block is not None]
        if len(blocks) == 2:
            (left, left_free), (right, right_free) = blocks
            if left != right:
                raise ValueError(
                    f"lhs has blocks of {left} along the contraction and rhs of {right}. Scales "
                    "leave the sum block by block, so both need the same stretches: give both "
                    f"blocks of {min(left, right)}."
                )
            if left_free > 1 and right_free > 1:
                raise ValueError(
                    f"Both operands have two-dimensional blocks, {blocks[0]} and {blocks[1]}. No "
                    f"hardware multiplies those: give one of them blocks of ({left}, 1)."
                )
        output = self.output
        if output is not None and (output.block or not output.one_for_both or output.history_len):
            raise ValueError(
                f"output={output!r}: a result has no contraction along which scales could vary, "
                "and no amax history. Use a quantizer with one current scale, such as "
                "quantizers.Current(fmt)."
            )

    __repr__ = printing.changes

    @property
    def powers_of_two(self) -> bool:
        """Whether all scales that vary along the contraction are powers of two."""
        return all(q.powers_of_two for q in (self.lhs, self.rhs) if q is not None and q.block)


@dataclass(frozen=True, repr=False)
class Products:
    """The three products of ``y = lhs @ rhs`` and its gradient. ::

        fprop  y    = lhs . rhs
        dgrad  dlhs = grad . rhs^T
        wgrad  drhs = lhs^T . grad

    A tensor is quantized once for both products it takes part in where their quantizers are equal
    and do not depend on the direction of the contraction, else once for each, from high precision.

    Attributes:
      fprop, dgrad, wgrad: the three products.

    Raises:
      TypeError, ValueError: as for `Product`; also if nothing is quantized, or if one tensor is to
        have two histories.
    """

    fprop: Product
    dgrad: Product
    wgrad: Product

    def __post_init__(self) -> None:
        for name, product in vars(self).items():
            if not isinstance(product, Product):
                raise TypeError(f"{name} must be a recipes.Product, got {product!r}.")
        if not any(self.quantizers()):
            raise ValueError(
                "Nothing is quantized: all operands of all products are None. Use the layer "
                "without jfp8 (flax.linen.Dense, jax.lax.dot_general) for high precision."
            )
        for role, (first, second) in self.by_role().items():
            lengths = {q.history_len for q in (first, second) if q and q.history_len}
            if len(lengths) > 1:
                raise ValueError(
                    f"{role} would need amax histories of lengths {sorted(lengths)}, but a tensor "
                    "has one history. Give its quantizers the same history_len."
                )

    __repr__ = printing.changes

    def by_role(self) -> dict[str, tuple[Quantizer | None, Quantizer | None]]:
        """Both quantizers of each tensor."""
        return {
            "lhs": (self.fprop.lhs, self.wgrad.lhs),
            "rhs": (self.fprop.rhs, self.dgrad.rhs),
            "grad": (self.dgrad.lhs, self.wgrad.rhs),
        }

    def quantizers(self) -> list[Quantizer]:
        """All quantizers, of operands and outputs."""
        products = (self.fprop, self.dgrad, self.wgrad)
        return [q for p in products for q in (p.lhs, p.rhs, p.output) if q is not None]

    @property
    def stochastic(self) -> bool:
        """Whether any of them rounds stochastically."""
        return any(q.stochastic for q in self.quantizers())

    @property
    def matrices(self) -> bool:
        """Whether the operands have to be laid out as (batches of) matrices, for blocks."""
        rotated = any(p.rotation for p in (self.fprop, self.dgrad, self.wgrad))
        return rotated or any(q.block is not None for q in self.quantizers())


@dataclass(frozen=True, repr=False)
class Recipe:
    """Base class of the recipes below. Abstract: use one of them, or ``recipes.get(name)``.

    Attributes:
      accumulation: how the emulated products round their sums, see `scaled_matmul`. ``"hopper"``
        does in all three products what the tensor cores of Hopper do: fast accumulation where the
        recipe allows it (in most only forward), promotion to f32 every 128 elsewhere.
      fast_accumulation: the products, any of ``"fprop"``, ``"dgrad"`` and ``"wgrad"``, in which
        hardware may keep fewer bits of its sums, which is faster. None: as the recipe has it, in
        most ``("fprop",)``.
    """

    name: ClassVar[str] = ""
    """Short name, for `get`."""
    needs_loss_scale: ClassVar[bool] = False
    """Whether gradients have no scale of their own, and need a loss scale to stay in range."""

    accumulation: Accumulation = field(default="f32", kw_only=True)
    fast_accumulation: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __new__(cls, *args: Any, **fields: Any) -> Recipe:
        """Refuse unknown fields with a message that lists the known ones."""
        _check_fields(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_choice(self, "accumulation", ACCUMULATIONS)
        fast, kinds = self.fast_accumulation, ("fprop", "dgrad", "wgrad")
        if fast is not None and not (isinstance(fast, tuple) and all(k in kinds for k in fast)):
            raise ValueError(
                f"{type(self).__name__}(fast_accumulation={fast!r}): must be None or a tuple with "
                f"any of {', '.join(map(repr, kinds))}, such as ('fprop',)."
            )

    def __repr__(self) -> str:
        """The call that makes it, without the fields that have their default."""
        return printing.changes(self)

    def products(self) -> Products:
        """What is done to the operands of the three products.

        Raises:
          TypeError: of `Recipe` itself, which is abstract.
        """
        raise TypeError(f"{type(self).__name__} is abstract; use one of {_names()}.")

    def resolved(self) -> Products:
        """`products`, with what `fast_accumulation` says about them."""
        products, fast = self.products(), self.fast_accumulation
        if fast is None:
            return products
        return Products(
            **{
                kind: dataclasses.replace(product, fast_accumulation=kind in fast)
                for kind, product in vars(products).items()
            }
        )

    def for_layer(self, path: str) -> Recipe:
        """The recipe of the layer at `path` (``"Block_0/Dense_1"``); most make no difference."""
        del path
        return self

    def init_state(self) -> dict[str, AmaxState] | None:
        """Empty state of one product, ``{"lhs", "rhs", "grad"}``; None if the recipe has none."""
        lengths = {
            role: max(q.history_len if q else 0 for q in pair)
            for role, pair in self.products().by_role().items()
        }
        if not any(lengths.values()):
            return None
        return {role: init_amax_state(max(n, 1)) for role, n in lengths.items()}

    def to_json(self) -> str:
        """The recipe as a JSON object, ``{"recipe": class name, field: value, ...}``."""
        return json.dumps({"recipe": type(self).__name__, **_to_plain(vars(self))})


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """Per-tensor scales from an amax history: one pass over each tensor.

    ``scale = max(amax_history) / fmt.max * 2^margin``, where the history holds the amax of each of
    the last `amax_history_len` optimizer steps. Without state it is current scaling.

    Attributes:
      margin: powers of two of headroom between the history's maximum and the format's.
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
      amax_history_len: number of steps remembered.
      amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
      scale_rounding: ``None``, or ``"power_of_two"`` (rounded up).
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      Transformer Engine, ``common/recipe``, ``DelayedScaling``; arXiv 2209.05433.
    """

    name: ClassVar[str] = "delayed"

    margin: int = 0
    fp8_format: Fp8Format = "HYBRID"
    amax_history_len: int = 16
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(self, "margin", minimum=0, maximum=32)
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_int(self, "amax_history_len", minimum=1, maximum=1 << 20)
        _check_choice(self, "amax_compute_algo", ("max", "most_recent"))
        _check_choice(self, "scale_rounding", (None, "power_of_two"))

    def products(self) -> Products:
        forward, backward = (
            Delayed(
                fmt,
                margin=self.margin,
                algo=self.amax_compute_algo,
                scale_rounding=self.scale_rounding,
                length=self.amax_history_len,
            )
            for fmt in _FP8_FORMATS[self.fp8_format]
        )
        return _uniform(forward, forward, backward)


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor itself: ``scale = amax(x) / fmt.max``. No state.

    Attributes:
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
      scale_rounding: ``None``, or ``"power_of_two"`` (rounded up).
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      Transformer Engine, ``common/recipe``, ``Float8CurrentScaling``.
    """

    name: ClassVar[str] = "current"

    fp8_format: Fp8Format = "HYBRID"
    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_choice(self, "scale_rounding", (None, "power_of_two"))

    def products(self) -> Products:
        forward, backward = (
            Current(fmt, self.scale_rounding) for fmt in _FP8_FORMATS[self.fp8_format]
        )
        return _uniform(forward, forward, backward)


@dataclass(frozen=True, repr=False)
class RowwiseScaling(Recipe):
    """One scale for every row that a product sums over. No state.

    ``scale_i = amax_k(x_ik) / fmt.max``, along the contraction ``k`` of each product, so that every
    tensor is quantized twice. An outlier costs its own row only.

    Attributes:
      fp8_format: ``"E4M3"`` for all, ``"HYBRID"`` (e5m2 gradients), or ``"E5M2"`` for all.
      scale_rounding: ``"power_of_two"`` (rounded up), or ``None``.
      high_precision_wgrad: multiply the weight gradient in high precision. The weight then has one
        scale for all in dgrad, so that it need not be read along its other axis.
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      torchao, ``float8/config.py``, ``rowwise`` and ``rowwise_with_gw_hp``.
    """

    name: ClassVar[str] = "rowwise"

    fp8_format: Fp8Format = "E4M3"
    scale_rounding: ScaleRounding = "power_of_two"
    high_precision_wgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_choice(self, "scale_rounding", (None, "power_of_two"))
        _check_bool(self, "high_precision_wgrad")

    def products(self) -> Products:
        forward, backward = (
            Rowwise(fmt, self.scale_rounding) for fmt in _FP8_FORMATS[self.fp8_format]
        )
        if not self.high_precision_wgrad:
            return _uniform(forward, forward, backward)
        return Products(
            fprop=Product(forward, forward, fast_accumulation=True),
            dgrad=Product(backward, Current(forward.fmt, self.scale_rounding)),
            wgrad=Product(None, None),
        )


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(Recipe):
    """A scale for every 1x128 stretch of activations and gradients, and 128x128 tile of weights.

    ``scale_b = amax(x_b) / fmt.max`` for each block ``b``; `rhs` is taken for the weight. Partial
    sums over 128 products are scaled and added in f32. No state.

    Attributes:
      fp8_format: ``"E4M3"`` for all, ``"HYBRID"`` (e5m2 gradients), or ``"E5M2"`` for all.
      scale_rounding: ``"power_of_two"`` (rounded up), or ``None`` for f32 quotients.
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      DeepSeek-V3, arXiv 2412.19437 section 3.3; Transformer Engine, ``Float8BlockScaling``.
    """

    name: ClassVar[str] = "block"

    fp8_format: Fp8Format = "E4M3"
    scale_rounding: ScaleRounding = "power_of_two"
    accumulation: Accumulation = field(default="f32_every_128", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_choice(self, "scale_rounding", (None, "power_of_two"))

    def products(self) -> Products:
        forward, backward = _FP8_FORMATS[self.fp8_format]
        return _uniform(
            Blockwise(forward, (128, 1), self.scale_rounding),
            Blockwise(forward, (128, 128), self.scale_rounding),
            Blockwise(backward, (128, 1), self.scale_rounding),
        )


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """Microscaling: an E8M0 scale, a power of two, for every 32 values along the contraction.

    ``scale_b = 2^ceil(log2(amax(x_b) / fmt.max))`` with the default rounding. Both directions of a
    tensor are quantized from high precision. No state.

    Attributes:
      fp8_format: ``"E4M3"`` for all, ``"HYBRID"`` (e5m2 gradients), or ``"E5M2"`` for all.
      scale_rounding: ``"rceil"`` (rounds the scale up: nothing saturates), ``"floor"`` (the OCP
        text), ``"ceil"`` or ``"even"``; see `scaling.scale_from_amax`.
      two_dimensional_weights: 32x32 blocks for `rhs`, quantized once for both directions.
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      OCP Microscaling Formats v1.0; arXiv 2506.08027; Transformer Engine, ``MXFP8BlockScaling``.
    """

    name: ClassVar[str] = "mxfp8"

    fp8_format: Fp8Format = "E4M3"
    scale_rounding: ScaleRounding = "rceil"
    two_dimensional_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_choice(self, "scale_rounding", ("rceil", "floor", "ceil", "even"))
        _check_bool(self, "two_dimensional_weights")

    def products(self) -> Products:
        forward, backward = _FP8_FORMATS[self.fp8_format]
        weight_block = (32, 32) if self.two_dimensional_weights else (32, 1)
        return _uniform(
            Blockwise(forward, (32, 1), self.scale_rounding),
            Blockwise(forward, weight_block, self.scale_rounding),
            Blockwise(backward, (32, 1), self.scale_rounding),
        )


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """4 bits: E2M1 data, an E4M3 scale for every 16 values, and an f32 scale above those.

    ``S = 448 * 6 / amax(x)``, ``s_b = e4m3(amax(x_b) / 6 * S)``, and
    ``x ~= e2m1(x * S / s_b) * s_b / S``. No state. Where ``s_b`` rounds down, the largest value of
    a block saturates, by up to 6 %: stochastic rounding is unbiased for all others.

    Attributes:
      stochastic_rounding: round gradients stochastically (needs a `key`, or takes one from the
        data; see `scaled_dot_general`).
      random_hadamard: rotate both operands of wgrad by 16x16 Hadamard matrices with random signs.
      two_dimensional_weights: 16x16 blocks for `rhs`, quantized once for both directions.
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      arXiv 2509.25149; Transformer Engine, ``NVFP4BlockScaling``, which rotates in bf16 (here f32).
    """

    name: ClassVar[str] = "nvfp4"

    stochastic_rounding: bool = True
    random_hadamard: bool = True
    two_dimensional_weights: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stochastic_rounding", "random_hadamard", "two_dimensional_weights"):
            _check_bool(self, name)

    def products(self) -> Products:
        lhs = TwoLevel(E2M1FN, (16, 1))
        rhs = TwoLevel(E2M1FN, (16, 16) if self.two_dimensional_weights else (16, 1))
        grad = TwoLevel(
            E2M1FN, (16, 1), rounding="stochastic" if self.stochastic_rounding else "nearest_even"
        )
        return Products(
            fprop=Product(lhs, rhs, fast_accumulation=True),
            dgrad=Product(grad, rhs),
            wgrad=Product(lhs, grad, rotation=Hadamard() if self.random_hadamard else None),
        )


@dataclass(frozen=True, repr=False)
class _Toolkit(Recipe):
    """What the recipes of Intel's FP8 Emulation Toolkit share: unscaled, stochastic gradients.

    Attributes:
      quantize_outputs: quantize the three results too: the output like an activation, the gradients
        like a gradient.
      fused: layers whose output stays in high precision, since what follows is fused with them:
        patterns of paths, such as ``("*/logits", "Block_*/query")``.
      stochastic_gradients: round gradients stochastically; else to nearest even.
    """

    needs_loss_scale: ClassVar[bool] = True

    quantize_outputs: bool = True
    fused: tuple[str, ...] = ()
    stochastic_gradients: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_bool(self, "quantize_outputs")
        _check_bool(self, "stochastic_gradients")
        if not isinstance(self.fused, tuple) or not all(isinstance(p, str) for p in self.fused):
            raise TypeError(
                f"{type(self).__name__}(fused={self.fused!r}): must be a tuple of patterns, such "
                'as ("*/logits",).'
            )

    def forward(self) -> Quantizer:
        """The quantizer of weights, activations and outputs."""
        raise NotImplementedError

    def products(self) -> Products:
        forward = self.forward()
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
    """E5M2 without any scale, for all operands and results of all three products. No state.

    Weights and activations are rounded to nearest even, gradients stochastically. Gradients below
    2^-17 vanish more often than not: train with `jfp8.loss_scale`. For 16-bit master weights see
    `jfp8.optim.stochastic_rounding`.

    Attributes:
      quantize_outputs: quantize the three results too (before a bias is added).
      fused: layers whose results stay in high precision: patterns of paths, ``("*/logits",)``.
      stochastic_gradients: round gradients stochastically; else to nearest even.
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      Intel FP8 Emulation Toolkit, ``mpemu/e5m2_emu.py``; arXiv 1905.12334. Its numbers differ where
      they are not OCP's: it rounds twice (through float16), and subnormals not stochastically.
    """

    name: ClassVar[str] = "direct_e5m2"

    def forward(self) -> Quantizer:
        return Unit(E5M2)


@dataclass(frozen=True, repr=False)
class Hybrid(_Toolkit):
    """E4M3 with per-tensor current scales forward, unscaled E5M2 gradients. No state.

    ``scale = amax(x) / 448`` for weights, activations and outputs. Gradients are rounded
    stochastically and have no scale: train with `jfp8.loss_scale`. For 16-bit master weights see
    `jfp8.optim.stochastic_rounding`.

    Attributes:
      quantize_outputs: quantize the three results too (before a bias is added).
      fused: layers whose results stay in high precision: patterns of paths, ``("*/logits",)``.
      stochastic_gradients: round gradients stochastically; else to nearest even.
      accumulation: see `Recipe`.

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      Intel FP8 Emulation Toolkit, ``mpemu/hybrid_emu.py``, whose multiplying scale ends at 2^16.
    """

    name: ClassVar[str] = "hybrid"

    def forward(self) -> Quantizer:
        return Current(E4M3FN)


@dataclass(frozen=True, repr=False)
class Unscaled(Recipe):
    """FP8 without any scale: every operand is cast as it is. No state.

    Gradients below 2^-17 (e5m2) vanish and values above 448 (e4m3) saturate, unless loss scaling
    keeps them in range: the control that shows what scaling is for.

    Attributes:
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
      accumulation: see `Recipe`.

    Raises:
      ValueError: an unknown `fp8_format`.
    """

    name: ClassVar[str] = "unscaled"
    needs_loss_scale: ClassVar[bool] = True

    fp8_format: Fp8Format = "HYBRID"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))

    def products(self) -> Products:
        forward, backward = (Unit(fmt) for fmt in _FP8_FORMATS[self.fp8_format])
        return _uniform(forward, forward, backward)


@dataclass(frozen=True, repr=False)
class PerOperand(Recipe):
    """A recipe of your own: a quantizer, or None for high precision, for each operand.

    Attributes:
      fprop, dgrad, wgrad: the three products; see `Product` for the order of the operands.
      accumulation: see `Recipe`.

    Raises:
      TypeError, ValueError: a combination that makes no sense; see `Product` and `Products`.

    >>> import jfp8
    >>> from jfp8.quantizers import Current
    >>> from jfp8.recipes import PerOperand, Product
    >>> q = Current(jfp8.E4M3FN)
    >>> recipe = PerOperand(fprop=Product(q, q), dgrad=Product(q, q), wgrad=Product(None, None))
    """

    name: ClassVar[str] = "per_operand"

    fprop: Product
    dgrad: Product
    wgrad: Product

    def __post_init__(self) -> None:
        super().__post_init__()
        self.products()

    def products(self) -> Products:
        return Products(self.fprop, self.dgrad, self.wgrad)


RECIPES: tuple[type[Recipe], ...] = (
    DelayedScaling,
    Float8CurrentScaling,
    RowwiseScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    DirectE5M2,
    Hybrid,
    Unscaled,
)


def get(name: str, **fields: Any) -> Recipe:
    """The recipe called `name`, with `fields` set.

    Args:
      name: the `name` of a class of this module, such as ``"delayed"`` or ``"mxfp8"``, or the name
        of the class.
      **fields: fields of that class.

    Returns:
      A recipe of that class.

    Raises:
      ValueError: unknown `name`; the message lists the known ones.
      TypeError: unknown field.

    >>> import jfp8
    >>> jfp8.recipes.get("delayed", amax_history_len=32).amax_history_len
    32
    """
    return _class_called(name, RECIPES)(**fields)


def from_json(text: str, *, known: Sequence[type] = ()) -> Recipe:
    """The recipe that `Recipe.to_json` wrote.

    Args:
      text: a JSON object.
      known: classes from outside of jfp8, recipes or quantizers, that may occur in it.

    Returns:
      A recipe equal to the one that was written.

    Raises:
      ValueError: not such a JSON object, unknown recipe, or a field's value is not allowed.
      TypeError: unknown field.

    >>> import jfp8
    >>> jfp8.recipes.from_json('{"recipe": "DelayedScaling", "margin": 1}').margin
    1
    """
    try:
        return _from_fields(json.loads(text), known)
    except json.JSONDecodeError as error:
        raise ValueError(f"Not JSON: {error}. Write recipes with recipe.to_json().") from error
    except RecursionError:
        raise ValueError(
            "The JSON is nested too deeply for a recipe. Write recipes with recipe.to_json()."
        ) from None


def _from_fields(fields: Any, known: Sequence[type]) -> Recipe:
    if not isinstance(fields, dict) or not isinstance(fields.get("recipe"), str):
        raise ValueError(
            'A recipe in JSON is an object such as {"recipe": "DelayedScaling", "margin": 0}; '
            f"got {fields!r}."
        )
    own = tuple(c for c in known if issubclass(c, Recipe))
    recipe = _class_called(fields.pop("recipe"), (*RECIPES, PerOperand, *own))
    return recipe(**{name: _from_plain(value, known) for name, value in fields.items()})


def check_recipe(recipe: Any) -> Recipe:
    """`recipe`, if it is one; else a ``TypeError`` that says how to make one."""
    if isinstance(recipe, Recipe):
        return recipe
    raise TypeError(
        f"recipe must be a recipe object such as jfp8.recipes.DelayedScaling(), got {recipe!r}. "
        f'By name: jfp8.recipes.get("delayed"); names: {_names()}.'
    )


def _uniform(lhs: Quantizer, rhs: Quantizer, grad: Quantizer) -> Products:
    """Each tensor with the same quantizer in both of its products."""
    return Products(
        fprop=Product(lhs, rhs, fast_accumulation=True),
        dgrad=Product(grad, rhs),
        wgrad=Product(lhs, grad),
    )


# JSON: a dataclass becomes {"class": its name, field: value, ...}, a format its name.


def _to_plain(value: Any) -> Any:
    if isinstance(value, Format):
        return {"class": "Format", "name": value.name}
    if dataclasses.is_dataclass(value):
        return {"class": type(value).__name__, **_to_plain(vars(value))}
    if isinstance(value, dict):
        return {name: _to_plain(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    return value


def _from_plain(value: Any, known: Sequence[type]) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(v, known) for v in value)
    if not isinstance(value, dict):
        return value
    fields = {name: _from_plain(v, known) for name, v in value.items() if name != "class"}
    name = value.get("class")
    if name == "Format":
        for fmt in formats.FORMATS:
            if fmt.name == fields.get("name"):
                return fmt
        names = ", ".join(fmt.name for fmt in formats.FORMATS)
        raise ValueError(f"There is no format called {fields.get('name')!r}. Formats: {names}.")
    classes = [c for c in vars(quantizers).values() if isinstance(c, type)]
    classes = {c.__name__: c for c in (*classes, Product, Hadamard, *known)}
    if name not in classes:
        raise ValueError(
            f"{name!r} is no class that jfp8 knows. If it is yours, name it: "
            "recipes.from_json(text, known=[ThatClass])."
        )
    return classes[name](**fields)


def _names(recipes: Sequence[type[Recipe]] | None = None) -> str:
    return ", ".join(f'"{recipe.name}" ({recipe.__name__})' for recipe in recipes or RECIPES)


def _class_called(name: str, recipes: Sequence[type[Recipe]]) -> type[Recipe]:
    for recipe in recipes:
        if name and name in (recipe.name, recipe.__name__):
            return recipe
    raise ValueError(f"There is no recipe called {name!r}. Recipes: {_names(recipes)}.")


def _check_quantizer(name: str, quantizer: Any) -> None:
    if quantizer is None:
        return
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"{name} must be a quantizer such as jfp8.quantizers.Current(jfp8.E4M3FN), or None for "
            f"high precision; got {quantizer!r}."
        )
    if not quantizer.fmt.signed:
        raise ValueError(
            f"{name}={quantizer!r}: {quantizer.fmt.name} has no sign and no zero: it holds scales, "
            "not data."
        )


def _check_fields(cls: type, fields: dict[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{cls.__name__} has no field {name!r}.{hint} Fields: {', '.join(known)}."
            )


def _check_choice(recipe: Recipe, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{type(recipe).__name__}({name}={value!r}): allowed are {listed}.")


def _check_bool(recipe: Recipe, name: str) -> None:
    value = getattr(recipe, name)
    if not isinstance(value, bool):
        raise TypeError(f"{type(recipe).__name__}({name}={value!r}): must be True or False.")


def _check_int(recipe: Recipe, name: str, *, minimum: int, maximum: int) -> None:
    value = getattr(recipe, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(recipe).__name__}({name}={value!r}): must be an int.")
    if not minimum <= value <= maximum:
        raise ValueError(
            f"{type(recipe).__name__}({name}={value}): must be from {minimum} to {maximum}."
        )
