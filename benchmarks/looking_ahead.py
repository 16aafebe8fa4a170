"""Change later tokens, and other sequences, and find recipes whose results depend on them.

    python benchmarks/looking_ahead.py            # the table of docs/recipes.md: about 5 minutes
    python benchmarks/looking_ahead.py --recipes current mxfp8 --json

Every layer takes `x`, [2 sequences, 8 positions, 32 features], of normal values. In one test a
feature of the last position is multiplied by 100, in another a feature of the second sequence. A
figure is the largest change of a result at earlier positions, or of the first sequence, divided by
the largest result. 0: no bit changed.

A layer gets the whole sequence, as in training, and then each prefix of it, from which the last
result is taken, as in decoding; `steps` is the largest difference between the two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from common import after_gradient

import jfp8
from jfp8.layers.linen.moe import MoE
from jfp8.recipes import Recipe
from jfp8.recipes.causality import Layer

BATCH, LENGTH, FEATURES = 2, 8, 32


class _Attention(nn.Module):
    """Attention itself, with the input as queries, keys and values."""

    recipe: Recipe

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q = x.reshape(*x.shape[:-1], 2, -1)
        attention = jfp8.linen.DotProductAttention(self.recipe)
        return attention(q, q, q, is_causal=True).reshape(x.shape)


# Each layer's kind for `Recipe.is_causal`, and its constructor.
LAYERS: dict[str, tuple[Layer, Callable[[Recipe], nn.Module]]] = {
    "Dense": ("dense", lambda r: jfp8.Dense(FEATURES, recipe=r)),
    "LayerNormMLP": ("dense", lambda r: jfp8.LayerNormMLP(FEATURES, recipe=r)),
    "Conv": ("conv", lambda r: jfp8.Conv(FEATURES, (3,), padding="CAUSAL", recipe=r)),
    "MoE": ("moe", lambda r: MoE(4, FEATURES, recipe=r)),
    "attention": ("attention", _Attention),
}
# The table's layers, of which every recipe promises the same. Attention is causal under all.
IN_TABLE = [name for name, (kind, _) in LAYERS.items() if kind != "attention"]


@dataclass(frozen=True)
class Change:
    """The changes of results by later positions and other sequences; and by decoding."""

    later: float
    others: float
    steps: float


def cases() -> dict[str, tuple[Recipe, bool]]:
    """Return all recipes, and True if histories have an entry, by their names in the table."""
    found = {f"`{recipe.__name__}`": (recipe(), True) for recipe in jfp8.recipes.RECIPES}
    name = "`DelayedScaling` in its first step or without state"
    first = {name: (jfp8.recipes.DelayedScaling(), False)}
    (delayed, *others) = found.items()
    return dict([delayed, *first.items(), *others])


def measure(
    recipe: Recipe, history: bool, layers: Iterable[str] = LAYERS, *, decoding: bool = True
) -> dict[str, Change]:
    """Return the changes of each layer's results under `recipe`; all are compiled together.

    Args:
      history: True if amax histories have an entry.
      layers: some of `LAYERS`.
      decoding: False to pass only the whole sequence to layers.
    """
    models = {name: LAYERS[name][1](recipe) for name in layers}
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))

    def apply(name: str, variables: Any, x: jax.Array) -> jax.Array:
        return models[name].apply(variables[name], x)

    @jax.jit
    def run(x: jax.Array, later: jax.Array, others: jax.Array) -> Any:
        variables = {name: model.init(jax.random.key(1), x) for name, model in models.items()}
        for of_layer in variables.values():
            of_layer.pop("fp8_sink", None)
        if history:  # the state after a step with the same data
            for name, model in models.items():
                if "fp8" in variables[name]:
                    variables[name] |= after_gradient(model, variables[name], x)

        def results(x: jax.Array) -> Any:
            whole = {name: apply(name, variables, x) for name in models}
            if not decoding:
                return whole, whole
            prefixes = {
                name: [apply(name, variables, x[:, : t + 1])[:, t] for t in range(LENGTH)]
                for name in models
            }
            return whole, {name: jnp.stack(ends, axis=1) for name, ends in prefixes.items()}

        # A loop, so that each layer is compiled once for all three.
        return jax.lax.map(results, jnp.stack([x, later, others]))

    whole, steps = run(x, x.at[:, -1, 0].multiply(100), x.at[1, :, 0].multiply(100))

    def changes(name: str) -> Change:
        both = [np.asarray(of[name], np.float64) for of in (whole, steps)]
        return Change(
            later=max(_change(y[0, :, :-1], y[1, :, :-1]) for y in both),
            others=max(_change(y[0, 0], y[2, 0]) for y in both),
            steps=_change(*(y[0] for y in both)),
        )

    return {name: changes(name) for name in models}


def _change(old: np.ndarray, new: np.ndarray) -> float:
    return float(np.max(np.abs(new - old)) / np.max(np.abs(old)))


def table(measured: dict[str, dict[str, Change]]) -> str:
    """Return Markdown: a recipe's change, and in the last row those that promise none."""
    lines = [["recipe", "later tokens", "other sequences"], ["---"] * 3]
    unchanged = []
    for name, (recipe, history) in cases().items():
        row = [name]
        for promise, field in (("is_causal", "later"), ("is_batch_invariant", "others")):
            ask = getattr(recipe, promise)
            kept = all(ask(LAYERS[layer][0], history=history) for layer in IN_TABLE)
            found = [getattr(measured[name][x], field) for x in IN_TABLE if name in measured]
            row.append("✓" if kept else _percent(found))
        unchanged += [name] if row == [name, "✓", "✓"] else []
        lines += [row] if name not in unchanged else []
    lines.append([", ".join(unchanged), "✓", "✓"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _percent(changes: list[float]) -> str:
    if not changes:
        return "no"
    low, high = (f"{100 * change:.2g}" for change in (min(changes), max(changes)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {recipe.name: recipe for recipe in jfp8.recipes.RECIPES}
    parser.add_argument("--recipes", nargs="+", choices=names, default=list(names))
    parser.add_argument("--json", action="store_true", help="print every figure")
    args = parser.parse_args(argv)
    chosen = {n: case for n, case in cases().items() if case[0].name in args.recipes}
    measured = {name: measure(*case) for name, case in chosen.items()}
    if args.json:
        plain = {r: {x: asdict(c) for x, c in of.items()} for r, of in measured.items()}
        print(json.dumps(plain, indent=1, ensure_ascii=False))
    print(table(measured))


if __name__ == "__main__":
    main()
