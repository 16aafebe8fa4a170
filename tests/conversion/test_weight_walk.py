"""Which values of a program count as weights, as data, and as the same data."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jfp8
from jfp8.conversion.program import Program
from jfp8.conversion.weight_walk import Walk

X = jax.random.normal(jax.random.key(0), (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 16))


class Gate(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(x * self.param("alpha", nn.initializers.ones, ()))


class NnxGate(nnx.Module):
    def __init__(self):
        self.alpha = nnx.Param(jnp.ones(()))
        self.dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x * self.alpha[...])


def _forward(model, *args):
    model = jfp8.convert(model, "current", exempt=())
    args = args or (model.init(jax.random.key(0), X), X)
    return [row.fp8 for row in jfp8.report(model, *args).rows if row.kind in ("fprop", "forward")]


@pytest.mark.parametrize("door", ["function", "linen", "nnx"])
def test_an_activation_times_a_parameter_is_an_activation(door):
    if door == "function":
        params = {"alpha": jnp.ones(()), "w": W}
        assert _forward(lambda p, x: (x * p["alpha"]) @ p["w"], params, X) == [True]
    else:
        assert _forward(*((Gate(),) if door == "linen" else (NnxGate(), X))) == [True]


def test_a_scan_of_no_layers():
    def layers(w, x):
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=0)[0]

    converted = jfp8.convert(layers, exempt=())
    assert (converted(W, converted.init(W, X), X) == X).all()


def test_arrays_in_other_orders_are_other_data():
    """Matmuls share a quantized operand only if it is the same array."""
    seen = []

    def see(matmul):
        seen.append(matmul.data.key)
        return matmul.plain(), []

    run = lambda w, x: (x[::-1] @ w, x[:, ::-1] @ w, x @ w, x @ w)
    program = Program.of(run, W, ["w"], X)
    program.run(Walk(see, {}, emits=False), program.arguments, {})
    assert seen[2] == seen[3]
    assert len(set(seen)) == 3


def test_what_is_computed_from_rows_of_a_table_is_data():
    def mix(params, tokens):
        rows = params["table"][tokens]
        scores = jax.nn.softmax(rows @ rows.T)
        return scores @ (jnp.tanh(rows) @ params["w"])

    assert _forward(mix, {"table": W, "w": W}, jnp.arange(8) % 3) == [False, True, False]
