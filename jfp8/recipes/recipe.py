"""`Recipe`: which quantizer each operand gets in each of the three `Products`.

A recipe changes numbers and nothing else does. It is a frozen dataclass: hashable, comparable, and
written to JSON and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jfp8.matmul.job import ACCUMULATIONS, Accumulation
from jfp8.quantizers.quantizer import Quantizer
from jfp8.quantizers.rotations import Hadamard
from jfp8.scaling import printing
from jfp8.scaling.formats import E4M3FN, E5M2, Format
from jfp8.scaling.history import AmaxState, init_amax_state


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


def uniform(lhs: Quantizer, rhs: Quantizer, grad: Quantizer) -> Products:
    """Each tensor with the same quantizer in both of its products."""
    return Products(
        fprop=Product(lhs, rhs, fast_accumulation=True),
        dgrad=Product(grad, rhs),
        wgrad=Product(lhs, grad),
    )


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


# Fields of recipes that say which values they take.


def takes(allowed: Iterable[Any] | type[bool], default: Any) -> Any:
    """A field that takes one of `allowed`: some values, the ints of a range, or ``bool``."""
    return dataclasses.field(default=default, metadata={"allowed": allowed})


def check_fields(recipe: Any) -> None:
    """Raise unless each field of `recipe` that says which values it takes has one of them.

    Raises:
      TypeError: no bool, or no int, where one is asked for.
      ValueError: another value than the allowed ones.
    """
    for f in dataclasses.fields(recipe):
        if "allowed" in f.metadata:
            given = getattr(recipe, f.name)
            call = f"{type(recipe).__name__}({f.name}={given!r})"
            _check(call, given, f.metadata["allowed"])


def _check(call: str, given: Any, allowed: Any) -> None:
    if allowed is bool:
        if not isinstance(given, bool):
            raise TypeError(f"{call}: must be True or False.")
    elif isinstance(allowed, range):
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(f"{call}: must be an int.")
        if given not in allowed:
            raise ValueError(f"{call}: must be from {allowed[0]} to {allowed[-1]}.")
    elif given not in tuple(allowed):
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{call}: allowed are {listed}.")


# Recipes themselves.

Fp8Format = Literal["HYBRID", "E4M3", "E5M2"]

# (forward, gradient); HYBRID gives gradients the range they need and the rest the precision.
FP8_FORMATS: dict[str, tuple[Format, Format]] = {
    "HYBRID": (E4M3FN, E5M2),
    "E4M3": (E4M3FN, E4M3FN),
    "E5M2": (E5M2, E5M2),
}


@dataclass(frozen=True, repr=False)
class Recipe:
    """Base class of all recipes. Abstract: use one of them, or ``recipes.get(name)``.

    Attributes:
      accumulation: how the emulated products round their sums, see `scaled_matmul`. ``"hopper"``
        does in all three products what the tensor cores of Hopper do: fast accumulation where the
        recipe allows it (in most only forward), promotion to f32 every 128 elsewhere.
      fast_accumulation: the products, any of ``"fprop"``, ``"dgrad"`` and ``"wgrad"``, in which
        hardware may keep fewer bits of its sums, which is faster. None: as the recipe has it, in
        most ``("fprop",)``.

    Raises:
      TypeError, ValueError: a field, of any recipe, outside of the values that it takes.
    """

    name: ClassVar[str] = ""
    """Short name, for `get`."""
    needs_loss_scale: ClassVar[bool] = False
    """Whether gradients have no scale of their own, and need a loss scale to stay in range."""

    accumulation: Accumulation = field(
        default="f32", kw_only=True, metadata={"allowed": ACCUMULATIONS}
    )
    fast_accumulation: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __new__(cls, *args: Any, **fields: Any) -> Recipe:
        """Refuse unknown fields with a message that lists the known ones."""
        _refuse_unknown(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
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
        raise TypeError(
            f"{type(self).__name__} is abstract; use one such as jfp8.recipes.DelayedScaling()."
        )

    def resolved(self) -> Products:
        """`products`, with what `fast_accumulation` says about them."""
        return _resolved(self)

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


@functools.cache
def _resolved(recipe: Recipe) -> Products:
    products, fast = recipe.products(), recipe.fast_accumulation
    if fast is None:
        return products
    return Products(
        **{
            kind: dataclasses.replace(product, fast_accumulation=kind in fast)
            for kind, product in vars(products).items()
        }
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


def _refuse_unknown(cls: type, fields: dict[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{cls.__name__} has no field {name!r}.{hint} Fields: {', '.join(known)}."
            )
