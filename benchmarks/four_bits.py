"""Errors of matmuls under the recipes in 4 bits, and the bias of their gradients; print a table.

For each recipe and kind of operands, in percent of the exact result (float64): the error of the
forward matmul and of both gradients, and the remaining error of the gradients in the mean over
`--keys` keys. An unbiased error shrinks to ``1 / sqrt(keys)`` of a single one; what exceeds that is
bias, from the operands that are rounded to nearest, too.

    python benchmarks/four_bits.py --keys 64
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np
from common import environment

import jfp8
from jfp8 import E2M1FN

RECIPES = {
    recipe.name: recipe()
    for recipe in jfp8.recipes.RECIPES
    if getattr(recipe().products().fprop.lhs, "fmt", None) == E2M1FN
}
KINDS = ("normal", "heavy tails", "outlier channels")
COLUMNS = ("y", "dx", "dw", "dx, mean", "dw, mean")


def operands(kind: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return activations, weights and the gradient of the result, f32[size, size] each.

    Heavy tails are Student's t with 3 degrees of freedom, of activations and gradients. Outlier
    channels are 1 in 64 of the activations' features, and of the gradient's, 30 times as large.
    """
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=(size, size)) for _ in range(3))
    if kind == "heavy tails":
        x, g = (rng.standard_t(3, size=(size, size)) for _ in range(2))
    if kind == "outlier channels":
        for a in (x, g):
            a[:, rng.permutation(size)[: size // 64]] *= 30
    return tuple(np.asarray(a, np.float32) for a in (x, w, g))


def errors(recipe: jfp8.recipes.Recipe, kind: str, size: int, keys: int) -> dict[str, float]:
    """Return relative Frobenius norms, in percent."""
    x, w, g = operands(kind, size)
    a, b, c = (v.astype(np.float64) for v in (x, w, g))
    exact = (a @ b, c @ b.T, a.T @ c)

    @jax.jit
    def products(x, w, g, key):
        dot = lambda x, w: jfp8.scaled_dot_general(
            x, w, (((1,), (0,)), ((), ())), recipe=recipe, key=key
        )
        y, vjp = jax.vjp(dot, x, w)
        return (y, *vjp(g))

    drawn = [products(x, w, g, key) for key in jax.random.split(jax.random.key(0), keys)]
    percent = lambda y, i: 100 * float(np.linalg.norm(y - exact[i]) / np.linalg.norm(exact[i]))
    single = [percent(np.asarray(y, np.float64), i) for i, y in enumerate(drawn[0])]
    means = [percent(np.mean([np.asarray(y[i], np.float64) for y in drawn], 0), i) for i in (1, 2)]
    return dict(zip(COLUMNS, (*single, *means), strict=True))


def table(results: dict[str, dict[str, dict[str, float]]], keys: int) -> str:
    """Return Markdown: a row for each recipe and kind of operands."""
    head = ["recipe", "operands", "y", "dx", "dw", f"dx, mean of {keys}", f"dw, mean of {keys}"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for kind in KINDS:
        for name, by_kind in results.items():
            of_recipe = f"`{type(RECIPES[name]).__name__}`"
            row = [of_recipe, kind, *(f"{by_kind[kind][column]:.1f}" for column in COLUMNS)]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="size of the square operands")
    parser.add_argument("--keys", type=int, default=64, help="gradients in a mean")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    given = parser.parse_args(arguments)
    results = {
        name: {kind: errors(recipe, kind, given.size, given.keys) for kind in KINDS}
        for name, recipe in RECIPES.items()
    }
    if given.json:
        print(json.dumps({"benchmark": "four bits", **environment(), "percent": results}, indent=2))
    else:
        print(table(results, given.keys))


if __name__ == "__main__":
    main()
