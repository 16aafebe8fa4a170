"""Calls of converted Linen models outside ``jax.jit``, where JAX keeps traces between calls."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jfp8

X = jax.random.normal(jax.random.key(0), (2, 8, 16))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


class Scores(nn.Module):
    """It has histories and no parameters."""

    @nn.compact
    def __call__(self, x):
        return jfp8.linen.DotGeneral("delayed")(x, x, (((1,), (1,)), ((0,), (0,))))


JittedScores, JittedMLP = nn.jit(Scores), nn.jit(MLP)


class Block(nn.Module):
    lifted: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        return self.lifted(name="jitted")(x)


def test_a_second_call_compiles_nothing():
    compiled = []
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    model = jfp8.convert(MLP(), exempt=())
    variables = model.init(jax.random.key(0), X)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        model.apply(variables, 2 * X)
        assert compiled
        compiled.clear()
        model.apply(variables, 3 * X)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


@pytest.mark.parametrize(
    ("lifted", "states"),
    [
        (JittedScores, {"DotGeneral_0"}),
        (JittedMLP, {"Dense_0/DotGeneral_0", "Dense_1/DotGeneral_0"}),
    ],
)
def test_histories_inside_nn_jit_are_read_in_each_call(lifted, states):
    model = jfp8.convert(Block(lifted), exempt=())
    variables = model.init(jax.random.key(0), X)
    flat = flatten_dict(variables["fp8"]["jitted"], sep="/")
    assert {path.removesuffix("/lhs/amax_history") for path in flat} >= states
    saturating = jax.tree.map(lambda x: 1e-3 + 0 * x, variables["fp8"])
    first, second = (model.apply({**variables, "fp8": saturating}, X) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert abs(first - model.apply(variables, X)).max() > 0.1
