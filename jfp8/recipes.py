"""Recipes: which quantizer each operand of each of the three products gets.

A recipe changes numbers and nothing else does. It is a frozen dataclass: hashable, comparable, and
written to JSON and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jfp8.formats import E4M3FN, E5M2, Format
from jfp8.quantizers import Current, Delayed, Quantizer, Unit
from jfp8.scaling import AmaxState, ScaleRounding, init_amax_state

Fp8Format = Literal["HYBRID", "E4M3", "E5M2"]

# (forward, gradient); HYBRID gives gradients the range they need and the rest the precision.
_FP8_FORMATS: dict[str, tuple[Format, Format]] = {
    "HYBRID": (E4M3FN, E5M2),
    "E4M3": (E4M3FN, E4M3FN),
    "E5M2": (E5M2, E5M2),
}


@dataclass(frozen=True)
class Operands:
    """What becomes of the three tensors of a product ``y = lhs @ rhs`` and its gradient.

    fprop multiplies lhs and rhs, dgrad grad and rhs, wgrad lhs and grad; each is quantized once.

    Attributes:
      lhs, rhs, grad: the quantizers.
      fast_accumulation: whether hardware may accumulate (fprop, dgrad, wgrad) in fewer bits.
    """

    lhs: Quantizer
    rhs: Quantizer
    grad: Quantizer
    fast_accumulation: tuple[bool, bool, bool] = (True, False, False)


class Recipe:
    """Base class of the recipes below. Abstract: use one of them, or ``recipes.get(name)``."""

    name: ClassVar[str]

    def __new__(cls, *args: Any, **fields: Any) -> Recipe:
        """Refuse unknown fields with a message that lists the known ones."""
        _check_fields(cls, fields)
        return super().__new__(cls)

    def operands(self) -> Operands:
        """The quantizer of each operand."""
        raise TypeError(f"{type(self).__name__} is abstract; use one of {_names()}.")

    def init_state(self) -> dict[str, AmaxState] | None:
        """Empty state of one product, ``{"lhs", "rhs", "grad"}``; None if the recipe has none."""
        return None

    def to_json(self) -> str:
        """The recipe as a JSON object, ``{"recipe": class name, field: value, ...}``."""
        return json.dumps({"recipe": type(self).__name__, **vars(self)})


@dataclass(frozen=True)
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
        _check_int(self, "margin", minimum=0, maximum=32)
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_int(self, "amax_history_len", minimum=1, maximum=1 << 20)
        _check_choice(self, "amax_compute_algo", ("max", "most_recent"))
        _check_choice(self, "scale_rounding", (None, "power_of_two"))

    def operands(self) -> Operands:
        forward, backward = (
            Delayed(fmt, self.margin, self.amax_compute_algo, self.scale_rounding)
            for fmt in _FP8_FORMATS[self.fp8_format]
        )
        return Operands(lhs=forward, rhs=forward, grad=backward)

    def init_state(self) -> dict[str, AmaxState]:
        return {role: init_amax_state(self.amax_history_len) for role in ("lhs", "rhs", "grad")}


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor itself: ``scale = amax(x) / fmt.max``. No state.

    Attributes:
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.
      scale_rounding: ``None``, or ``"power_of_two"`` (rounded up).

    Raises:
      ValueError, TypeError: a field outside of these values.

    References:
      Transformer Engine, ``common/recipe``, ``Float8CurrentScaling``.
    """

    name: ClassVar[str] = "current"

    fp8_format: Fp8Format = "HYBRID"
    scale_rounding: ScaleRounding = None

    def __post_init__(self) -> None:
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))
        _check_choice(self, "scale_rounding", (None, "power_of_two"))

    def operands(self) -> Operands:
        forward, backward = (
            Current(fmt, self.scale_rounding) for fmt in _FP8_FORMATS[self.fp8_format]
        )
        return Operands(lhs=forward, rhs=forward, grad=backward)


@dataclass(frozen=True)
class Unscaled(Recipe):
    """FP8 without any scale: every operand is cast as it is. No state.

    Gradients below 2^-17 (e5m2) vanish and values above 448 (e4m3) saturate, unless loss scaling
    keeps them in range: the control that shows what scaling is for.

    Attributes:
      fp8_format: ``"HYBRID"`` (e4m3 forward, e5m2 gradients), ``"E4M3"`` or ``"E5M2"`` for all.

    Raises:
      ValueError: an unknown `fp8_format`.
    """

    name: ClassVar[str] = "unscaled"

    fp8_format: Fp8Format = "HYBRID"

    def __post_init__(self) -> None:
        _check_choice(self, "fp8_format", tuple(_FP8_FORMATS))

    def operands(self) -> Operands:
        forward, backward = (Unit(fmt) for fmt in _FP8_FORMATS[self.fp8_format])
        return Operands(lhs=forward, rhs=forward, grad=backward)


RECIPES: tuple[type[Recipe], ...] = (DelayedScaling, Float8CurrentScaling, Unscaled)


def get(name: str, **fields: Any) -> Recipe:
    """The recipe called `name`, with `fields` set.

    Args:
      name: ``"delayed"``, ``"current"``, ``"unscaled"``, or the name of a class of this module.
      **fields: fields of that class.

    Raises:
      ValueError: unknown `name`; the message lists the known ones.
      TypeError: unknown field.

    >>> import jfp8
    >>> jfp8.recipes.get("delayed", amax_history_len=32).amax_history_len
    32
    """
    return _class_called(name)(**fields)


def from_json(text: str) -> Recipe:
    """The recipe that `Recipe.to_json` wrote.

    Raises:
      ValueError: not such a JSON object, unknown recipe, or a field's value is not allowed.
      TypeError: unknown field.

    >>> import jfp8
    >>> jfp8.recipes.from_json('{"recipe": "DelayedScaling", "margin": 1}').margin
    1
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Not JSON: {error}. Write recipes with recipe.to_json().") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("recipe"), str):
        raise ValueError(
            'A recipe in JSON is an object such as {"recipe": "DelayedScaling", "margin": 0}; '
            f"got {text!r}."
        )
    return _class_called(fields.pop("recipe"))(**fields)


def check_recipe(recipe: Any) -> Recipe:
    """`recipe`, if it is one; else a ``TypeError`` that says how to make one."""
    if isinstance(recipe, Recipe):
        return recipe
    raise TypeError(
        f"recipe must be a recipe object such as jfp8.recipes.DelayedScaling(), got {recipe!r}. "
        f'By name: jfp8.recipes.get("delayed"); names: {_names()}.'
    )


def _names() -> str:
    return ", ".join(f'"{recipe.name}" ({recipe.__name__})' for recipe in RECIPES)


def _class_called(name: str) -> type[Recipe]:
    for recipe in RECIPES:
        if name in (recipe.name, recipe.__name__):
            return recipe
    raise ValueError(f"There is no recipe called {name!r}. Recipes: {_names()}.")


def _check_fields(cls: type, fields: dict[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    for field in fields:
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{cls.__name__} has no field {field!r}.{hint} Fields: {', '.join(known)}."
            )


def _check_choice(recipe: Recipe, field: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(recipe, field)
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{type(recipe).__name__}({field}={value!r}): allowed are {listed}.")


def _check_int(recipe: Recipe, field: str, *, minimum: int, maximum: int) -> None:
    value = getattr(recipe, field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(recipe).__name__}({field}={value!r}): must be an int.")
    if not minimum <= value <= maximum:
        raise ValueError(
            f"{type(recipe).__name__}({field}={value}): must be from {minimum} to {maximum}."
        )
