"""`Recipe`: how the three `Products` of a layer are computed, from a name and a few fields.

Only the recipe decides numerics. It is a frozen dataclass: hashable, comparable, and convertible to
JSON and back.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Self

from jfp8.matmul.spec import ACCUMULATIONS, Accumulation
from jfp8.recipes.causality import Layer, Operand, shares_among_rows
from jfp8.recipes.in_words import products_in_words, state_in_words
from jfp8.recipes.product import Products
from jfp8.scaling import printing
from jfp8.scaling.formats import E4M3FN, E5M2, Format
from jfp8.scaling.history import AmaxState, init_amax_state
from jfp8.tracing.listing import did_you_mean

# Fields of recipes that list the values they take.


def takes(allowed: Iterable[Any] | type[bool], default: Any) -> Any:
    """Return a field that takes one of `allowed`: some values, the ints of a range, or ``bool``."""
    return dataclasses.field(default=default, metadata={"allowed": allowed})


def check_fields(recipe: Any) -> None:
    """Raise unless each field of `recipe` that lists its allowed values has one of them."""
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
        sums like Hopper's tensor cores in all three matmuls: fast accumulation where the recipe
        allows it (in most only forward), promotion to f32 every 128 products elsewhere.
      fast_accumulation: the matmuls, any of ``"fprop"``, ``"dgrad"`` and ``"wgrad"``, in which
        hardware may keep fewer bits of its sums, which is faster. None means the default, in
        most ``("fprop",)``.
      wgrad_dtype: ``"bfloat16"`` rounds the gradient of an f32 weight where it is computed, so that
        GPUs write and read 2 bytes; JAX's result is still f32. None does not round.

    Raises:
      TypeError, ValueError: a field of any recipe has a value that it does not take.
    """

    name: ClassVar[str] = ""
    """Short name, for `get`."""
    needs_loss_scale: ClassVar[bool] = False
    """Return whether gradients have no scale, and need a loss scale to stay in range."""
    exact_export: ClassVar[bool] = False
    """Whether `jfp8.quantize_params` gives what the forward pass multiplies, or raises."""

    _: KW_ONLY
    accumulation: Accumulation = takes(ACCUMULATIONS, "f32")
    fast_accumulation: tuple[str, ...] | None = None
    wgrad_dtype: Literal[None, "bfloat16"] = takes((None, "bfloat16"), None)

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        # Before Python's own message, which does not list the known fields.
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                hint = did_you_mean(name, known)
                raise TypeError(
                    f"{cls.__name__} has no field {name!r}.{hint} Fields: {', '.join(known)}."
                )
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
        """Return the call that makes it, without the fields that have their default."""
        return printing.changes(self)

    def __str__(self) -> str:
        """Describe its method and its promises in a few lines; ``repr`` is the call that makes it.

        >>> import jfp8
        >>> print(jfp8.recipes.DelayedScaling())
        DelayedScaling()
          fprop  E4M3FN per tensor x E4M3FN per tensor
          dgrad  E5M2 per tensor x E4M3FN per tensor
          wgrad  E4M3FN per tensor x E5M2 per tensor
          state: amaxes of the last 16 steps
          causal: once there is a history; batch-invariant: once there is a history
        """
        if type(self) is Recipe:  # abstract
            return repr(self)
        products, promises = self.resolved(), []
        kinds = {"causal": self.is_causal, "batch-invariant": self.is_batch_invariant}
        for name, kept in kinds.items():
            later = "once there is a history" if kept(history=True) else "no"
            promises.append(f"{name}: {'yes' if kept() else later}")
        needs = "; needs a loss scale" if self.needs_loss_scale else ""
        state = f"state: {state_in_words(products)}{needs}"
        return "\n  ".join([repr(self), *products_in_words(products), state, "; ".join(promises)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def products(self) -> Products:
        """Return the quantizers of the operands of the three matmuls.

        Raises:
          TypeError: `Recipe` itself is abstract.
        """
        raise TypeError(
            f"{type(self).__name__} is abstract; use one such as jfp8.recipes.DelayedScaling()."
        )

    @functools.cache  # noqa: B019  (recipes are few, small and immutable)
    def resolved(self) -> Products:
        """Return `products`, with what `fast_accumulation` says about them."""
        products, fast = self.products(), self.fast_accumulation
        if fast is None:
            return products
        chosen = {k: replace(p, fast_accumulation=k in fast) for k, p in vars(products).items()}
        return Products(**chosen)

    def for_layer(self, path: str) -> Recipe:
        """Return the recipe of the layer at `path` (``"Block_0/Dense_1"``), mostly ``self``."""
        del path
        return self

    def init_state(self) -> dict[str, AmaxState] | None:
        """Make the empty state of a matmul, ``{"lhs", "rhs", "grad"}``; None if it keeps none."""
        lengths = {
            role: max(q.history_len if q else 0 for q in pair)
            for role, pair in self.products().by_role().items()
        }
        if not any(lengths.values()):
            return None
        return {role: init_amax_state(max(n, 1)) for role, n in lengths.items()}

    def is_causal(
        self, layer: Layer = "dense", operand: Operand | None = None, *, history: bool = False
    ) -> bool:
        """Return True if no result of a layer depends on a later position of its sequence.

        True promises it bit for bit, for the forward pass of a layer that does not itself look
        ahead: changing a later token changes no earlier result. This holds in training and in
        decoding, where the sequence grows token by token.

        Args:
          layer: ``"dense"`` (every matmul with a weight), ``"conv"`` (along a spatial dimension
            that is padded on one side only), ``"moe"``, or ``"attention"``: the two matmuls of
            attention itself, where keys after a query are masked.
          operand: ``"lhs"``, ``"rhs"`` or ``"output"``, the result, which some recipes quantize;
            None means all of them.
          history: whether each amax history has an entry, as it has after the first training step;
            recipes without histories ignore it. With True, the promise covers products that are
            used once in a step; a second use, and one that records its amaxes (NNX in training
            outside ``nnx.jit``), may take a larger scale.

        Raises:
          ValueError: unknown `layer` or `operand`.

        >>> import jfp8
        >>> jfp8.recipes.MXFP8BlockScaling().is_causal()
        True
        >>> jfp8.recipes.Float8CurrentScaling().is_causal()
        False
        >>> jfp8.recipes.DelayedScaling().is_causal(history=True)
        True
        """
        return not shares_among_rows(self.resolved(), layer, operand, history)

    def is_batch_invariant(
        self, layer: Layer = "dense", operand: Operand | None = None, *, history: bool = False
    ) -> bool:
        """Return True if no result of a layer depends on the other sequences of the batch.

        True promises it bit for bit, for the forward pass.

        Args:
          layer, operand, history: see `is_causal`.

        Raises:
          ValueError: unknown `layer` or `operand`.
        """
        return not shares_among_rows(self.resolved(), layer, operand, history)

    def to_json(self) -> str:
        """Return the recipe as a JSON object, ``{"recipe": class name, field: value, ...}``."""
        return json.dumps({"recipe": type(self).__name__, **_to_plain(vars(self))})


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
