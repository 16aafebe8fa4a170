"""Sample from a small language model step by step, and compare with one pass over the whole.

    python benchmarks/decoding.py            # the figures of docs/benchmarks.md: about 5 minutes
    python benchmarks/decoding.py --recipes delayed mxfp8 --json

Two causal `TransformerLayer`s with random weights (128 features, 4 heads, 256 tokens) draw 8
sequences of 64 tokens from a cache of keys and values. A pass over the whole sequences, as in
training, then gives the log-probabilities of the same tokens; `jfp8.debug.mismatch`
compares the two. Amax histories have one entry, from other tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from common import after_gradient

import jfp8
from jfp8.debug import DecodingMismatch
from jfp8.layers.kv_cache import init_kv_cache
from jfp8.recipes import Recipe

BATCH, LENGTH, FEATURES, HEADS, VOCABULARY = 8, 64, 128, 4, 256
CACHES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "FP8": jfp8.E4M3FN}


class LM(nn.Module):
    """A decoder-only language model."""

    recipe: Recipe
    decode: bool = False
    cache_dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, FEATURES)(tokens)
        for _ in range(2):
            x = jfp8.TransformerLayer(
                FEATURES,
                4 * FEATURES,
                HEADS,
                self_attn_mask_type="causal",
                enable_rotary_pos_emb=True,
                recipe=self.recipe,
                decode=self.decode,
                cache_dtype=self.cache_dtype,
            )(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def measure(recipe: Recipe, cache_dtype: Any, *, fp8: bool = True) -> DecodingMismatch:
    """The mismatch of tokens that are drawn from a cache of `cache_dtype`.

    Args:
      fp8: whether products are in FP8.
    """
    if fp8:
        return _measure(recipe, cache_dtype)
    with jfp8.autocast(enabled=False):
        return _measure(recipe, cache_dtype)


def _measure(recipe: Recipe, cache_dtype: Any) -> DecodingMismatch:
    whole, cached = LM(recipe), LM(recipe, decode=True, cache_dtype=cache_dtype)

    @jax.jit
    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        others = jax.random.randint(key, (BATCH, LENGTH), 0, VOCABULARY)
        variables = dict(cached.init(key, others))
        cache = variables.pop("cache")
        variables.pop("fp8_sink", None)
        if "fp8" in variables:
            variables |= after_gradient(whole, variables, others)

        def step(carry: Any, key: jax.Array) -> Any:
            cache, token = carry
            variables_now = {**variables, "cache": cache}
            logits, new = cached.apply(variables_now, token[:, None], mutable=["cache"])
            log_probs = jax.nn.log_softmax(logits[:, 0])
            token = jax.random.categorical(key, log_probs)
            found = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
            return (new["cache"], token), (token, found)

        first = jnp.zeros((BATCH,), jnp.int32)
        _, (tokens, decode) = jax.lax.scan(step, (cache, first), jax.random.split(key, LENGTH))
        inputs = jnp.concatenate([first[:, None], tokens.T[:, :-1]], axis=1)
        log_probs = jax.nn.log_softmax(whole.apply(variables, inputs))
        return jnp.take_along_axis(log_probs, tokens.T[..., None], axis=-1)[..., 0], decode.T

    return jfp8.debug.mismatch(*run(jax.random.key(0)))


def table(measured: dict[str, dict[str, DecodingMismatch]]) -> str:
    """Markdown: mean and maximum of the differences, and k3, for each recipe and cache."""
    lines = [["recipe", "causal", *(f"{name} cache: mean, max, k3" for name in CACHES)]]
    lines.append(["---"] * len(lines[0]))
    for recipe in jfp8.recipes.RECIPES:
        if recipe.name in measured:
            kept = "✓" if recipe().is_causal(history=True) else "no"
            cells = [_cell(found) for found in measured[recipe.name].values()]
            lines.append([f"`{recipe.__name__}`", kept, *cells])
    lines.append(["no FP8 products", "✓", *(_cell(found) for found in measured["off"].values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(found: DecodingMismatch) -> str:
    if found.max == 0:
        return "0"
    return f"{found.mean:.1g}, {found.max:.1g}, {found.k3:.1g}"


def bytes_per_token(depth: int) -> str:
    """Markdown: the bytes of a head's key and value for one token."""
    lines = [["cache", f"bytes per token, head and layer, depth {depth}"], ["---"] * 2]
    for name, dtype in CACHES.items():
        cache = init_kv_cache((1, 1, 1, depth), dtype)
        lines.append([name, str(cache.key.nbytes + cache.value.nbytes)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {recipe.name: recipe for recipe in jfp8.recipes.RECIPES}
    parser.add_argument("--recipes", nargs="+", choices=names, default=list(names))
    parser.add_argument("--json", action="store_true", help="print every figure")
    args = parser.parse_args(argv)
    measured = {
        name: {cache: measure(names[name](), dtype) for cache, dtype in CACHES.items()}
        for name in args.recipes
    }
    rowwise = names["rowwise"]()  # switched off below
    measured["off"] = {c: measure(rowwise, dtype, fp8=False) for c, dtype in CACHES.items()}
    if args.json:
        plain = {r: {c: asdict(m) for c, m in of.items()} for r, of in measured.items()}
        print(json.dumps(plain, indent=1))
    print(table(measured))
    print(bytes_per_token(128))


if __name__ == "__main__":
    main()
