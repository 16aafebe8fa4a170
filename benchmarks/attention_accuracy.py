"""Error of attention in FP8, forward and of its gradients, against float64; write JSON.

    O = softmax(scale Q K^T) V,  and dQ, dK, dV for a normal dO

Errors are ``|computed - exact| / |exact|`` (Euclidean norms) of a head with T queries and keys.
``"unquantized"`` compares with attention of the operands themselves, ``"dequantized"`` with that
of the operands as the recipe rounds them: the remaining error is the rounding of P and dS.

Values: normal; outlier channels, normal with one channel of Q, and another one of K, times 30;
outlier values, N(0, 1) + N(0, 100) Bernoulli(0.001), as in FlashAttention-3 (arXiv 2407.08608,
section 4.3), in Q, K and V.

"tokens" is `jfp8.scaled_dot_product_attention`, with a scale for each token, and "histories" the
same with amax histories of another sample as its `state`. The others are computed here: bf16
operands, P and dS with f32 sums; one scale per tensor as in FlashAttention-3 and in TE;
and the same with O in e4m3, as cuDNN returns it. "Rotated": Q and K are multiplied by one
random Hadamard matrix over the head first, and their gradients are rotated back.

    python benchmarks/attention_accuracy.py              # everything: about 20 minutes on two cores
    python benchmarks/attention_accuracy.py --lengths 512 --results /tmp/short.json
    python benchmarks/attention_accuracy.py --table      # of the recorded results, as Markdown
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import results_file

import jfp8
from jfp8.products.flash.numerics import for_both, numerics_of
from jfp8.quantizers.rotations import Hadamard
from jfp8.scaling.sink import init_sink

RESULTS = Path(__file__).parent / "results/attention_accuracy.json"
OUTPUTS = ("O", "dQ", "dK", "dV")
Array = np.ndarray
Pair = tuple[Array, Array]


# Operands


def normal(rng: np.random.Generator, *shape: int) -> list[Array]:
    return [rng.normal(size=shape) for _ in range(4)]


def outlier_channels(rng: np.random.Generator, *shape: int) -> list[Array]:
    q, k, v, grad = normal(rng, *shape)
    q[:, 0] *= 30
    k[:, 1] *= 30
    return [q, k, v, grad]


def outlier_values(rng: np.random.Generator, *shape: int) -> list[Array]:
    q, k, v, grad = normal(rng, *shape)
    some = lambda: 10 * rng.normal(size=shape) * (rng.random(shape) < 0.001)
    return [q + some(), k + some(), v + some(), grad]


VALUES = {
    "normal": normal,
    "outlier channels": outlier_channels,
    "outlier values": outlier_values,
}


def operands(values: str, length: int, depth: int, seed: int) -> list[Array]:
    """Return Q, K, V and dO, f32[length, depth]."""
    made = VALUES[values](np.random.default_rng(seed), length, depth)
    return [x.astype(np.float32) for x in made]


# Attention in float64


class Roundings(NamedTuple):
    """The roundings of intermediate results; P is at most 1."""

    weights: Callable[[Array], Array] = lambda x: x
    scores: Callable[[Array], Array] = lambda x: x
    out: Callable[[Array], Array] = lambda x: x


EXACT = Roundings()


def attention(
    q: Pair, k: Pair, v: Pair, grad: Pair, causal: bool, to: Roundings = EXACT
) -> list[Array]:
    """Return O, dQ, dK and dV; for the operands of the matmuls see `flash.numerics.Numerics`."""
    scale = 1 / np.sqrt(q[0].shape[1])
    s = q[0] @ k[0].T * scale
    if causal:
        s[np.triu_indices(len(s), 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    total = p.sum(1, keepdims=True)
    out = to.out(to.weights(p) @ v[0] / total)
    p /= total
    dv = to.weights(p).T @ grad[1]
    dp = grad[0] @ v[1].T
    ds = to.scores(p * (dp - np.sum(grad[0] * out, axis=1, keepdims=True)))
    return [out, ds @ k[1] * scale, ds.T @ q[1] * scale, dv]


# Implementations. Each returns O, dQ, dK, dV, and its operands in float64.

Way = Callable[[list[Array], list[Array], bool], tuple[list[Array], list[Pair]]]


def of_library(recipe: jfp8.recipes.Recipe, history: bool = False) -> Way:
    """Return `jfp8.scaled_dot_product_attention`, with histories of another sample."""

    @functools.partial(jax.jit, static_argnums=3)
    def compute(arrays, state, grad, causal):
        def of(*arrays):
            heads = (x[None, :, None] for x in arrays)
            return jfp8.scaled_dot_product_attention(
                *heads, is_causal=causal, recipe=recipe, state=state, sink=sinks
            )[0, :, 0]

        sinks = state and {name: init_sink() for name in state}
        out, vjp = jax.vjp(of, *arrays)
        return [out, *vjp(grad)]

    @jax.jit
    def rounded(arrays, state):
        uses = [getattr(numerics_of(recipe), n) for n in ("query", "key", "value", "grad")]
        roles = (("scores", "lhs"), ("scores", "rhs"), ("context", "rhs"), ("context", "grad"))
        return [
            for_both(x, use, state and state[which][role], folded=i == 2)
            for i, (x, use, (which, role)) in enumerate(zip(arrays, uses, roles, strict=True))
        ]

    def run(arrays, before, causal):
        state = _state(recipe, before) if history else None
        results = compute(arrays[:3], state, arrays[3], causal)
        pairs = [
            tuple(np.asarray(x.data, np.float64) * np.asarray(x.scale)[:, None] for x in both)
            for both in rounded(arrays, state)
        ]
        return [np.asarray(x, np.float64) for x in results], pairs

    return run


def _state(recipe: jfp8.recipes.Recipe, before: list[Array]):
    """Return histories with one entry, the amaxes of `before`."""
    q, k, v, grad = (np.abs(x).max() for x in before)
    amaxes = {
        "scores": {"lhs": q, "rhs": k, "grad": 1.0},
        "context": {"lhs": 1.0, "rhs": v, "grad": grad},
    }
    return {
        which: {
            role: {**state, "amax_history": state["amax_history"].at[0].set(amaxes[which][role])}
            for role, state in recipe.init_state().items()
        }
        for which in amaxes
    }


def in_bf16(arrays: list[Array], before: list[Array], causal: bool):
    del before
    to = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)
    pairs = [(to(x), to(x)) for x in arrays]
    return attention(*pairs, causal, Roundings(to, to)), pairs


def cast(x: Array, fmt: jfp8.Format) -> Array:
    return np.clip(x, -fmt.max, fmt.max).astype(fmt.dtype).astype(np.float64)


def per_tensor(
    arrays: list[Array], before: list[Array], causal: bool, out_in_e4m3: bool = False
) -> tuple[list[Array], list[Pair]]:
    """Return attention with one current scale per tensor; e4m3, or e5m2 for dO, dS; P times 256."""
    del before

    def quantized(x, fmt):
        scale = np.abs(x).max() / fmt.max
        return cast(x / scale, fmt) * scale

    e4m3, e5m2 = jfp8.E4M3FN, jfp8.E5M2
    rounded = [
        quantized(x.astype(np.float64), fmt)
        for x, fmt in zip(arrays, (e4m3, e4m3, e4m3, e5m2), strict=True)
    ]
    pairs = [(x, x) for x in rounded]
    bound = np.abs(rounded[2]).max() / e4m3.max
    to = Roundings(
        lambda p: cast(p * 256, e4m3) / 256,
        lambda ds: quantized(ds, e5m2),
        (lambda o: cast(o / bound, e4m3) * bound) if out_in_e4m3 else (lambda o: o),
    )
    return attention(*pairs, causal, to), pairs


def rotated(way: Way) -> Way:
    """Multiply Q and K by one random Hadamard matrix: Q R (K R)^T = Q K^T."""

    def run(arrays, before, causal):
        signs = np.random.default_rng(1).choice([-1, 1], arrays[0].shape[1])
        r = Hadamard(tuple(int(s) for s in signs)).matrix()
        turn = lambda sample: [sample[0] @ r, sample[1] @ r, *sample[2:]]
        (out, dq, dk, dv), pairs = way(turn(arrays), turn(before), causal)
        back = [tuple(x @ r.T.astype(np.float64) for x in pair) for pair in pairs[:2]]
        return [out, dq @ r.T, dk @ r.T, dv], [*back, *pairs[2:]]

    return run


WAYS: dict[str, Way] = {
    "bf16": in_bf16,
    "per tensor": per_tensor,
    "per tensor, O in e4m3": functools.partial(per_tensor, out_in_e4m3=True),
    "per tensor, rotated": rotated(per_tensor),
    "histories": of_library(jfp8.recipes.DelayedScaling(), history=True),
    "tokens": of_library(jfp8.recipes.DelayedScaling()),
    "tokens, rotated": rotated(of_library(jfp8.recipes.DelayedScaling())),
}


def error(computed: Array, exact: Array) -> float:
    return float(f"{np.linalg.norm(computed - exact) / np.linalg.norm(exact):.3g}")


def measure(values: str, length: int, depth: int, causal: bool) -> dict[str, dict]:
    """Return the errors of every implementation in `WAYS`."""
    arrays, before = (operands(values, length, depth, seed) for seed in (0, 1))
    twice = [(x, x) for x in (x.astype(np.float64) for x in arrays)]
    exact = attention(*twice, causal)
    rows, known = {}, {}
    for name, way in WAYS.items():
        computed, pairs = way(arrays, before, causal)
        key = tuple(x.tobytes() for pair in pairs for x in pair)  # many round their operands alike
        if key not in known:
            known[key] = attention(*pairs, causal)
        by_kind = {"unquantized": exact, "dequantized": known[key]}
        rows[name] = {
            kind: {
                output: error(x, y)
                for output, x, y in zip(OUTPUTS, computed, reference, strict=True)
            }
            for kind, reference in by_kind.items()
        }
    return rows


# Records


def case_of(values: str, length: int, depth: int, causal: bool) -> str:
    return f"{values}, T {length}, H {depth}, {'causal' if causal else 'full'}"


def table(errors: dict, length: int, depth: int, causal: bool) -> str:
    """Return the table: errors in percent against attention of unquantized operands.

    Implementations with equal figures share a row. For gradients, the largest error.
    """
    cases = [errors[case_of(values, length, depth, causal)] for values in VALUES]
    rows: dict[tuple[float, ...], list[str]] = {}
    for name in WAYS:
        figures = []
        for of in (case[name] for case in cases):
            out, *gradients = (of["unquantized"][output] for output in OUTPUTS)
            figures += [out, max(gradients)]
        rows.setdefault(tuple(figures), []).append(name)
    heads = [f"{values}: {what}" for values in VALUES for what in ("O", "gradients")]
    lines = ["| " + " | ".join(("", *heads)) + " |", "| --- |" + " ---: |" * len(heads)]
    for figures, names in rows.items():
        cells = (f"{100 * x:.2g}" for x in figures)
        lines.append("| " + " | ".join(("; ".join(names), *cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", nargs="*", choices=VALUES, default=list(VALUES))
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 4096], help="T")
    parser.add_argument("--depths", nargs="*", type=int, default=[64, 128], help="H")
    parser.add_argument("--results", type=Path, default=RESULTS, help="goes on with this file")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    given = parser.parse_args()
    cases = list(itertools.product(given.lengths, given.depths, (True, False), given.values))
    cases = {case_of(v, t, h, causal): (v, t, h, causal) for t, h, causal, v in cases}
    held = results_file.read(given.results, {"conditions", "commit", "errors"})
    if given.table:
        for length, depth, causal in itertools.product(given.lengths, given.depths, (True, False)):
            print(f"T {length}, H {depth}, {'causal' if causal else 'full'}\n")
            print(table(held["errors"], length, depth, causal) + "\n")
        return
    conditions = results_file.conditions()
    results_file.check_conditions(given.results, "errors", held.get("conditions", {}), conditions)
    errors = held.get("errors", {})
    for case, what in cases.items():
        if case not in errors:
            errors[case] = measure(*what)
            records = {"conditions": conditions, "commit": results_file.commit(), "errors": errors}
            results_file.write(given.results, records)
            print(f"recorded: {case}", flush=True)


if __name__ == "__main__":
    main()
