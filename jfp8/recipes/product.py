"""`Products`: which quantizer each operand gets in each of the three matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jfp8.quantizers.from_forward import FromForward
from jfp8.quantizers.quantizer import Quantizer
from jfp8.quantizers.rotations import Rotation
from jfp8.scaling import printing


@dataclass(frozen=True, repr=False)
class Product:
    """Quantizers of one of the three matmuls.

    Attributes:
      lhs, rhs: quantizers of its operands; None leaves an operand in high precision. The operands
        are ``(lhs, rhs)`` in fprop, ``(grad, rhs)`` in dgrad and ``(lhs, grad)`` in wgrad.
      output: quantizer of the result; None leaves it in high precision.
      rotation: rotates both operands along the contraction before they are quantized.
      fast_accumulation: whether hardware may accumulate in fewer bits (see `scaled_matmul`).

    Raises:
      TypeError: anything but a hashable `Quantizer` or None, or a `rotation` other than a
        ``Hadamard`` or a ``RandomHadamard``.
      ValueError: a combination that cannot be computed, or would gain nothing.
    """

    lhs: Quantizer | None
    rhs: Quantizer | None
    output: Quantizer | None = None
    rotation: Rotation | None = None
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs", "output"):
            _check_quantizer(name, getattr(self, name))
        operands = [q for q in (self.lhs, self.rhs) if q is not None]
        if self.rotation is not None:
            _check_rotation(self.rotation, operands)
        blocks = [q.block for q in operands if q.block is not None]
        if len(blocks) == 2:
            (left, left_free), (right, right_free) = blocks
            if left != right:
                raise ValueError(
                    f"lhs has blocks of {left} along the contraction and rhs of {right}. Sums are "
                    "scaled block by block, so both need the same length: give both blocks of "
                    f"{min(left, right)}."
                )
            if left_free > 1 and right_free > 1:
                raise ValueError(
                    f"Both operands have two-dimensional blocks, {blocks[0]} and {blocks[1]}. No "
                    f"hardware supports that: give one of them blocks of ({left}, 1)."
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
        """Return whether all scales that vary along the contraction are powers of two."""
        operands = [q for q in (self.lhs, self.rhs) if q is not None]
        return all(q.powers_of_two for q in operands if q.block or isinstance(q, FromForward))


@dataclass(frozen=True, repr=False)
class Products:
    """The three matmuls of ``y = lhs @ rhs`` and its gradient. ::

        fprop  y    = lhs . rhs
        dgrad  dlhs = grad . rhs^T
        wgrad  drhs = lhs^T . grad

    A tensor is quantized once for both matmuls it takes part in, if their quantizers are equal and
    do not depend on the direction of the contraction; otherwise once for each, from high precision.

    Attributes:
      fprop, dgrad, wgrad: the three matmuls.

    Raises:
      TypeError, ValueError: see `Product`; also if nothing is quantized, or if one tensor would
        need two histories.
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
                "Nothing is quantized: all operands of all matmuls are None. Use the layer "
                "without jfp8 (flax.linen.Dense, jax.lax.dot_general) for high precision."
            )
        if FromForward in map(type, self.quantizers()):
            _check_from_forward(self)
        for role, (first, second) in self.by_role().items():
            lengths = {q.history_len for q in (first, second) if q and q.history_len}
            if len(lengths) > 1:
                raise ValueError(
                    f"{role} would need amax histories of lengths {sorted(lengths)}, but a tensor "
                    "has one history. Give its quantizers the same history_len."
                )

    __repr__ = printing.changes

    def by_role(self) -> dict[str, tuple[Quantizer | None, Quantizer | None]]:
        """Return both quantizers of each tensor."""
        return {
            "lhs": (self.fprop.lhs, self.wgrad.lhs),
            "rhs": (self.fprop.rhs, self.dgrad.rhs),
            "grad": (self.dgrad.lhs, self.wgrad.rhs),
        }

    def quantizers(self) -> list[Quantizer]:
        """Return all quantizers, of operands and outputs."""
        operands = (q for p in vars(self).values() for q in (p.lhs, p.rhs, p.output))
        return [q for q in operands if q is not None]

    @property
    def stochastic(self) -> bool:
        """Return whether anything is rounded stochastically or rotated at random."""
        rotated = any(p.rotation is not None and p.rotation.random for p in vars(self).values())
        return rotated or any(q.stochastic for q in self.quantizers())

    @property
    def matrices(self) -> bool:
        """Return whether operands must be laid out as (batches of) matrices, for blocks."""
        rotated = any(product.rotation for product in vars(self).values())
        return rotated or any(q.block is not None for q in self.quantizers())


def uniform(lhs: Quantizer, rhs: Quantizer, grad: Quantizer) -> Products:
    """Return each tensor with the same quantizer in both of its matmuls."""
    return Products(
        fprop=Product(lhs, rhs, fast_accumulation=True),
        dgrad=Product(grad, rhs),
        wgrad=Product(lhs, grad),
    )


def _check_from_forward(products: Products) -> None:
    for role, (first, second) in products.by_role().items():
        product = {"lhs": products.wgrad, "rhs": products.dgrad}.get(role)
        if isinstance(second, FromForward) and product is not None:
            beside = {product.lhs, product.rhs, product.output} - {second}
            if first is not None and first.fmt == second.fmt and beside == {None}:
                continue
        if isinstance(first, FromForward) or isinstance(second, FromForward):
            raise ValueError(
                f"The quantizers of {role} are {first!r} and {second!r}. FromForward is for "
                "dgrad.rhs and wgrad.lhs, in the format that fprop has for the same operand, and "
                "next to a gradient in high precision."
            )


def _check_rotation(rotation: Any, operands: list[Quantizer]) -> None:
    if not isinstance(rotation, Rotation):
        raise TypeError(
            f"rotation must be a Hadamard(), a RandomHadamard() or None, got {rotation!r}."
        )
    if not operands:
        raise ValueError(
            "rotation without a quantized operand changes nothing: leave it out, or give the "
            "matmul a quantizer."
        )
    if any(q.history_len for q in operands):
        raise ValueError(
            "rotation with an amax history: the history belongs to the original tensor, not to the "
            "rotated one. Use quantizers with current scaling, such as quantizers.Current(fmt)."
        )


def _check_quantizer(name: str, quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer | None):
        raise TypeError(
            f"{name} must be a quantizer such as jfp8.quantizers.Current(jfp8.E4M3FN), or None for "
            f"high precision; got {quantizer!r}."
        )
    try:
        hash(quantizer)
    except TypeError as error:
        raise TypeError(
            f"{name}: this {type(quantizer).__name__} is not hashable, but equal quantizers are "
            "traced once. Hold numbers and tuples in it, not arrays or lists: tuple(x.tolist())."
        ) from error
    if quantizer is not None and not quantizer.fmt.signed:
        raise ValueError(
            f"{name}={quantizer!r}: {quantizer.fmt.name} has no sign and no zero: it holds scales."
        )
