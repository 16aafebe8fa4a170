"""Which values of a program count as weights, as data, and as the same data."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
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


class Parts(nn.Module):
    """Multiplies by parts of one parameter, as in a fused projection."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (3, 16, 16))
        return jnp.tanh(x @ w[0]) * jnp.tanh(x @ w[1]) + (4 * x) @ w[2]


def test_parts_of_a_parameter_have_one_state():
    """A state of several matmuls receives at least the largest amax, and less than 1 % more."""
    model = jfp8.convert(Parts(), exempt=())
    variables = model.init(jax.random.key(0), X)
    assert list(variables["fp8"]) == ["DotGeneral_w"]
    create = jfp8.TrainState.create
    state = create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.0))
    _, gradients = jfp8.value_and_grad(lambda v, x: model.apply(v, x).sum())(state, X)
    found = state.apply_gradients(grads=gradients).fp8["DotGeneral_w"]
    expected = {"lhs": 4 * abs(X).max(), "rhs": abs(variables["params"]["w"]).max()}
    for role, amax in expected.items():
        assert amax <= found[role]["amax_history"].max() < 1.01 * amax


def test_an_exempt_layer_may_round_to_fp8_itself():
    rounds = nn.Dense(16, dtype=jnp.float8_e4m3fn)
    plain = nn.Sequential([rounds, lambda x: x.astype(jnp.float32), nn.Dense(16)])
    model = jfp8.convert(plain, "current", exempt="layers_0")
    assert model.init(jax.random.key(0), X).keys() == {"params"}
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        jfp8.convert(plain, "current", exempt=()).init(jax.random.key(0), X)
