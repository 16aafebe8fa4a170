"""Recommend layers to compute in few bits, from statistics of a short run."""

from __future__ import annotations

import collections
import glob
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jfp8.conversion.product_report import Report
from jfp8.conversion.tables import Printed, Table, ruled_lines
from jfp8.debug.records import OPERANDS, TensorStats, check_report, check_rows
from jfp8.recipes.recipe import Recipe
from jfp8.recipes.registry import check_recipe
from jfp8.scaling.formats import format_called

_Group = dict[tuple[str, str], TensorStats]  # the rows of a layer in a step, by tensor and product


@dataclass(frozen=True)
class Predicted:
    """Errors of a layer under a recipe: squared relative errors of both operands add up.

    Attributes:
      fprop, dgrad, wgrad: relative error of each product, ``|y' - y| / |y|``.
      noise: ``E |dW' - dW|^2``, which rounding adds to the gradient of the weight.
    """

    fprop: float
    dgrad: float
    wgrad: float
    noise: float


NOTHING = Predicted(0.0, 0.0, 0.0, 0.0)  # lost in high precision


@dataclass(frozen=True)
class Proposed:
    """Proposal for one layer, or for stacked layers.

    Attributes:
      path: place of the layer.
      share: fraction of the FLOPs of all layers here.
      few: True if it gets the recipe with the fewest bits.
      in_few, otherwise: its errors under that recipe, and under the other one.
    """

    path: str
    share: float
    few: bool
    in_few: Predicted
    otherwise: Predicted

    @property
    def chosen(self) -> Predicted:
        """Return its errors under the recipe that it gets."""
        return self.in_few if self.few else self.otherwise


@dataclass(frozen=True, repr=False)
class Recommendation(Printed):
    """Result of `recommend`; prints as a table.

    Attributes:
      layers: first the layers that gain most from more bits.
      few: the recipe with the fewest bits.
      otherwise: the recipe of the other layers, or None for high precision.
    """

    layers: tuple[Proposed, ...]
    few: Recipe
    otherwise: Recipe | None

    @property
    def recipes(self) -> dict[str, Recipe | None]:
        """Return recipes for `jfp8.convert` and `jfp8.initialize`: exceptions, then `few`."""
        exceptions = {glob.escape(row.path): self.otherwise for row in self.layers if not row.few}
        return {**exceptions, "*": self.few}

    @property
    def share(self) -> float:
        """Return the share of the FLOPs that is computed under `few`."""
        return sum(row.share for row in self.layers if row.few)

    @property
    def noise(self) -> float:
        """Return ``E |dW' - dW|^2`` of all layers, relative to `few` everywhere."""
        before = sum(row.in_few.noise for row in self.layers)
        return sum(row.chosen.noise for row in self.layers) / before if before else 0.0

    def __str__(self) -> str:
        few, otherwise = _name(self.few), _name(self.otherwise)
        said = [
            f"{100 * self.share:.3g} % of the FLOPs in {few}, the others in {otherwise}.",
            f"Rounding adds {100 * self.noise:.3g} % of the noise that {few} everywhere would add "
            "to the gradients of weights.",
        ]
        return "\n".join([*said, "", *ruled_lines(self._table(), numbers=True)])

    def _table(self) -> Table:
        head = ("layer", "recipe", "FLOPs", *OPERANDS, f"of the noise, in {_name(self.few)}")
        total = sum(row.in_few.noise for row in self.layers) or 1.0
        table: list[tuple[str, ...]] = [head]
        for row in self.layers:
            errors = (getattr(row.chosen, kind) for kind in OPERANDS)
            numbers = (row.share, *errors, row.in_few.noise / total)
            name = _name(self.few if row.few else self.otherwise)
            table.append((row.path, name, *(f"{100 * x:.3g} %" for x in numbers)))
        return table


def recommend(
    rows: Iterable[TensorStats],
    products: Report,
    *,
    share: float = 0.85,
    recipes: Iterable[Recipe] = (),
) -> Recommendation:
    """Propose the layers to compute in the fewest bits, and the layers to keep in more. ::

        noise = E |dW' - dW|^2 = M K N (mse(x) rms(g)^2 + rms(x)^2 mse(g))

    is what rounding ``x`` (``[M, K]``) and ``g`` (``[M, N]``) adds to the gradient ``dW = x^T g``
    of a weight. Layers with large gradients add most of it. Layers are kept in more bits in the
    order of the noise saved per FLOP, until the others have `share` of the FLOPs.

    Run some training steps with the recipe of fewest bits, and, to choose between two recipes, some
    with the other one. For example::

        model, wide = jfp8.convert(plain, "nvfp4"), jfp8.convert(plain, "mxfp8")
        rows = [*statistics(model), *statistics(wide)]  # by `jfp8.debug.stats` or a `Recorder`
        found = jfp8.debug.recommend(rows, jfp8.report(model, variables, x), share=0.75)
        model = jfp8.convert(plain, found.recipes)

    Args:
      rows: statistics of steps with gradients, under two recipes, or under one: the alternative is
        then high precision. Steps without gradients do not count, and layers that never have some
        get the fewest bits.
      products: ``jfp8.report(model, variables, x)`` of the model in the fewest bits.
      share: least share, 0 to 1, of the FLOPs of all layers with statistics in the fewest bits.
      recipes: recipes in `rows` that are not defaults of their names, or have none.

    Returns:
      A `Recommendation`: ``print`` it; pass ``.recipes`` to `jfp8.convert`.

    Raises:
      TypeError: `rows` or `products` are something else.
      ValueError: no statistics of gradients; a layer without statistics under one of two recipes;
        more than two recipes; `share` out of range.
    """
    groups = _groups(rows)
    check_report(products)
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: a fraction of the FLOPs, from 0 to 1.")
    few, otherwise = _two_recipes(groups, recipes)
    predicted = {
        name: {path: _predicted(steps) for path, steps in by_path.items()}
        for name, by_path in groups.items()
    }
    in_few = predicted[few.name]
    other = dict.fromkeys(in_few, NOTHING) if otherwise is None else predicted[otherwise.name]
    if missing := sorted(in_few.keys() ^ other.keys()):
        raise ValueError(
            f"There are statistics of {missing[0]!r} under one of {few.name!r} and "
            f"{otherwise and otherwise.name!r} only. Convert the same layers for both."
        )
    flops = dict.fromkeys(in_few, 0)
    for row in products.rows:
        if row.path in flops:
            flops[row.path] += row.flops
    total = sum(flops.values())
    if not total:
        raise ValueError(
            f"products has none of the layers in rows ({', '.join(in_few)}). Pass the report of "
            "the same model."
        )
    saved = lambda path: (in_few[path].noise - other[path].noise) / max(flops[path], 1)
    paths = sorted(in_few, key=saved, reverse=True)
    left, kept = (1 - share) * total, set()
    for path in paths:
        if flops[path] <= left and saved(path) > 0:
            kept.add(path)
            left -= flops[path]
    layers = (
        Proposed(path, flops[path] / total, path not in kept, in_few[path], other[path])
        for path in paths
    )
    return Recommendation(tuple(layers), few, otherwise)


def _name(recipe: Recipe | None) -> str:
    return "high precision" if recipe is None else recipe.name


def _groups(rows: Iterable[TensorStats]) -> dict[str, dict[str, dict[object, _Group]]]:
    """Return rows by recipe, layer, and step with the index of a stacked layer."""
    found: dict[tuple[Any, ...], _Group] = collections.defaultdict(dict)
    for row in check_rows(rows, "recommend"):
        group = found[row.recipe, row.path, row.step, row.index]
        group.update({(row.tensor, kind): row for kind in row.products.split("+")})
    layers: dict[str, dict[str, dict[object, _Group]]] = {}
    for (recipe, path, *step), group in found.items():
        if {role for role, _ in group} >= {"lhs", "rhs", "grad"}:  # a product with a weight
            layers.setdefault(recipe, {}).setdefault(path, {})[tuple(step)] = group
    if not layers:
        raise ValueError(
            "There are no statistics of a layer with its gradients. Measure training steps: "
            "jax.jit(jfp8.debug.stats(step)), where step computes the gradients itself."
        )
    return layers


def _two_recipes(
    groups: Mapping[str, Mapping[str, Mapping[object, _Group]]], given: Iterable[Recipe]
) -> tuple[Recipe, Recipe | None]:
    """Return the recipe with the fewest bits, and the other one."""
    if len(groups) > 2:
        raise ValueError(
            f"rows are of {len(groups)} recipes: {', '.join(groups)}. Pass those of one or two."
        )
    own = {recipe.name: recipe for recipe in given}

    def bits(name: str) -> float:
        in_groups = (group for steps in groups[name].values() for group in steps.values())
        formats = [row.format for group in in_groups for row in group.values()]
        return sum(format_called(name).bits for name in formats) / len(formats)

    found = [own.get(name) or check_recipe(name) for name in sorted(groups, key=bits)]
    return found[0], found[1] if len(found) > 1 else None


def _predicted(steps: Mapping[object, _Group]) -> Predicted:
    """Return means over the steps, and the sum of the noise of stacked layers."""
    mean = lambda f: sum(map(f, steps.values())) / len(steps)
    error: Callable[[str], float] = lambda kind: math.sqrt(mean(lambda g: _squared_error(g, kind)))
    stacked = len({index for _, index in steps})  # pyrefly: ignore
    return Predicted(error("fprop"), error("dgrad"), error("wgrad"), stacked * mean(_noise))


def _squared_error(group: _Group, kind: str) -> float:
    return sum(mse / power for mse, power in _powers(group, kind) if power)


def _noise(group: _Group) -> float:
    (lhs, lhs_power), (grad, grad_power) = _powers(group, "wgrad")
    count = {role: row.count for (role, _), row in group.items()}
    multiplications = math.sqrt(count["lhs"] * count["rhs"] * count["grad"])  # M K N
    return multiplications * (lhs * grad_power + lhs_power * grad)


def _powers(group: _Group, kind: str) -> list[tuple[float, float]]:
    """Return ``(mse, rms^2)`` of both operands; operands in high precision lose nothing."""
    found = []
    for role in OPERANDS[kind]:
        row = group.get((role, kind))
        any_row = row or next(r for (other, _), r in group.items() if other == role)
        found.append((row.mse if row else 0.0, any_row.rms**2))
    return found
