"""Scalars about a training state, computed inside and outside a compiled step."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8

X = jax.random.normal(jax.random.key(0), (8, 16))
SIZES = (1, 1.03, 2, 30, 1)  # factors on the inputs of five steps; 3 % is within rounding
OF_HISTORIES = ("worst_ratio", "saturated_matmuls", "empty_histories")
TX = optax.sgd(0.0)  # so that weights stay, and only activations and gradients grow


class Model(nn.Module):
    """Two layers; a history of the second one is shorter."""

    @nn.compact
    def __call__(self, x):
        short = jfp8.recipes.DelayedScaling(amax_history_len=4)
        return jfp8.Dense(4, name="last", recipe=short)(nn.relu(jfp8.Dense(16, name="first")(x)))


MODEL = Model()


def linen_state(model=MODEL, tx=TX):
    variables = jax.jit(model.init)(jax.random.key(0), X)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


@jax.jit
def linen_step(state, x):
    loss_fn = lambda variables, x: jnp.mean(state.apply_fn(variables, x) ** 2)
    state = state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, x)[1])
    return state, jfp8.metrics(state, per_tensor=True)


def expected_of(histories):
    """The metrics of ``{path: {role: history}}``, entry by entry in Python floats."""
    ratios, saturated, empty = {}, 0, 0
    for path, roles in histories.items():
        grown = False
        for role, history in roles.items():
            newest, *older = map(float, history)
            first, second, *_ = sorted(older, reverse=True)
            if second > 0 and first > 8 * second:  # a jump, which the step did not believe
                older = [0.0 if older[0] == first else x * (x < first) for x in older]
            empty += max(older) == 0
            ratios[f"ratio/{path}/{role}"] = newest / max(older) if max(older) else 0.0
            grown |= ratios[f"ratio/{path}/{role}"] > 17 / 16
        saturated += grown
    of_all = {"worst_ratio": max(ratios.values()), "saturated_matmuls": saturated}
    return {**of_all, "empty_histories": empty, "skipped_steps": 0, "skipped_in_a_row": 0, **ratios}


def assert_metrics(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert (actual[name].shape, actual[name].dtype) == ((), jnp.float32)
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)


def test_metrics_of_linen_follow_from_the_histories():
    state = linen_state()
    assert jfp8.metrics(state)["empty_histories"] == 6
    worst = []
    for size in SIZES:
        state, inside = linen_step(state, size * X)
        histories = {
            f"{layer}/DotGeneral_0": {r: product[r]["amax_history"] for r in ("lhs", "rhs", "grad")}
            for layer, of in state.fp8.items()
            for product in of.values()
        }
        assert_metrics(inside, expected_of(histories))
        assert_metrics(jfp8.metrics(state, per_tensor=True), expected_of(histories))
        worst.append(float(inside["worst_ratio"]))
    assert worst[0] == 0
    assert 1 < worst[1] < 17 / 16
    assert worst[2] == pytest.approx(2 / 1.03)
    assert worst[3] == pytest.approx(15)
    assert worst[4] <= 1
    bad, inside = linen_step(state, jnp.nan * X)
    kept = {**jfp8.metrics(state, per_tensor=True), "skipped_steps": 1, "skipped_in_a_row": 1}
    assert_metrics(inside, kept)
    assert "ratio/first/DotGeneral_0/lhs" not in jfp8.metrics(bad)


def test_metrics_of_nnx_follow_from_the_histories():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        jfp8.nnx.Linear(16, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 4, rngs=rngs)
    )
    model = jfp8.convert(model, exempt=())
    optimizer = jfp8.nnx.Optimizer(model, optax.chain(jfp8.loss_scale(), TX))

    @nnx.jit
    def step(model, optimizer, x):
        how = {"loss_scale": jfp8.scale_loss(1.0, optimizer.opt_state)}
        loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
        optimizer.update(model, jfp8.nnx.value_and_grad(loss_fn, **how)(model, x)[1])
        return optimizer.metrics(model, per_tensor=True)

    for size in SIZES:
        inside = step(model, optimizer, size * X)
        histories = {}
        for path, variable in nnx.to_flat_state(nnx.state(model, jfp8.nnx.Fp8State)):
            if path[-1] != "check":
                roles = histories.setdefault("/".join(map(str, path[:-2])), {})
                roles[path[-1]] = variable.get_value()
        assert len(histories) == 2
        expected = {**expected_of(histories), "loss_scale": 2.0**15}
        assert_metrics(inside, expected)
        assert_metrics(optimizer.metrics(model, per_tensor=True), expected)
    assert set(optimizer.metrics()) == {"loss_scale", "skipped_steps", "skipped_in_a_row"}


def test_stacked_layers_count_one_by_one():
    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            call = lambda layer, x, _: (layer(x), None)
            return nn.scan(
                call,
                variable_axes={"params": 0, "fp8": 0, "fp8_sink": 0},
                split_rngs={"params": True},
                length=3,
            )(jfp8.Dense(16), x, None)[0]

    state = linen_state(Stacked())
    assert jfp8.metrics(state)["empty_histories"] == 9
    for size in (1, 1, 2):
        state, found = linen_step(state, size * X)
    assert found["saturated_matmuls"] == 3
    assert {name for name in found if name.startswith("ratio/")} == {
        f"ratio/Dense_0/DotGeneral_0/{role}" for role in ("lhs", "rhs", "grad")
    }


def test_without_histories_there_is_nothing_to_outgrow():
    found = jfp8.metrics(linen_state(jfp8.Dense(4, recipe="current")), per_tensor=True)
    assert set(found) == {"skipped_steps", "skipped_in_a_row", *OF_HISTORIES}
    assert not any(found.values())


def test_metrics_of_an_nnx_optimizer_are_its_method():
    with pytest.raises(
        TypeError, match=r"takes a jfp8.TrainState, got Linear.*optimizer.metrics\("
    ):
        jfp8.metrics(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("door", ["Linen", "NNX"])
def test_inside_jit_skipped_steps_are_said_at_once_if_asked_for(door):
    """From the tenth on; a program that does not ask has no callback."""
    options = lambda warn: {"warn": True} if warn else {}
    if door == "Linen":
        values = [linen_state()]

        def step(warn, state, x):
            new, _ = linen_step(state, x)
            return new, jfp8.metrics(new, **options(warn))

        run = jax.jit(step, static_argnums=0)
    else:
        model = jfp8.nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        values = nnx.split((model, jfp8.nnx.Optimizer(model, TX)))
        graphdef = values[0]

        def step(warn, state, x):
            model, optimizer = nnx.merge(graphdef, state)
            grads = jfp8.nnx.value_and_grad(lambda model, x: jnp.mean(model(x)))(model, x)[1]
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), optimizer.metrics(**options(warn))

        run = jax.jit(step, static_argnums=0)
    state, bad = values[-1], jnp.nan * X
    assert "callback" not in str(jax.make_jaxpr(step, static_argnums=0)(False, state, X))
    for warn in (False, True):
        for _ in range(9):
            state, _ = run(warn, state, bad)
        jax.effects_barrier()
        if warn:
            break
        state, _ = run(warn, state, bad)  # the tenth
        state, _ = run(warn, state, X)
    with warnings.catch_warnings(record=True, action="always") as told:
        _, found = run(True, state, bad)
        jax.effects_barrier()
    assert found["skipped_in_a_row"] == 10
    assert [str(w.message)[:38] for w in told] == ["At least the last 10 steps were skippe"]


UNSCALED = r"Small gradients are zero {}, and there is no loss scale. Add one: {}"


@pytest.mark.parametrize("door", ["Linen", "NNX"])
@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"recipe": "hybrid"}, "under 'hybrid', which does not scale them"),
        ({"recipe": "direct_e5m2"}, "under 'direct_e5m2', which does not scale them"),
        ({"recipe": jfp8.recipes.Unscaled("E4M3")}, "under 'unscaled', which does not scale them"),
        ({"dtype": jnp.float16}, "in float16"),
        ({"recipe": "delayed"}, ""),
    ],
)
def test_gradients_that_vanish_without_a_loss_scale_are_told(door, options, where):
    """While JAX traces a step, before the first one runs."""
    for scaled in (False, True):
        tx = optax.chain(jfp8.loss_scale(), TX) if scaled else TX
        if door == "Linen":
            remedy = r"optax.chain\(jfp8.loss_scale\(\), tx\)"
            model = jfp8.Dense(4, **options)
            loss_fn = lambda variables, model=model: jnp.mean(model.apply(variables, X) ** 2)
            first, gradient = linen_state(model, tx), jfp8.value_and_grad(loss_fn)
        else:
            remedy = r"jfp8.nnx.value_and_grad\(f, loss_scale=scale\)"
            model = jfp8.nnx.Linear(16, 4, rngs=nnx.Rngs(0), **options)
            first = model
            gradient = jfp8.nnx.value_and_grad(
                lambda model: jnp.mean(model(X) ** 2), loss_scale=2.0**15 if scaled else None
            )
        trace = jax.eval_shape if door == "Linen" else nnx.eval_shape
        with warnings.catch_warnings(record=True, action="always") as told:
            trace(gradient, first)
        if scaled or not where:
            assert told == []
            continue
        (message,) = {str(w.message) for w in told}
        assert re.match(UNSCALED.format(where, remedy), message)
        assert {w.filename for w in told} == {__file__}
