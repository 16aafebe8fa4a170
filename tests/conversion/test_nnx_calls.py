"""Calls of converted NNX models change what calls of the model itself change, and nothing else."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.nnx import Fp8State
from support.arrays import relative_error

D = 16
X = jax.random.normal(jax.random.key(0), (4, D))


class Net(nnx.Module):
    """Statistics, random numbers, a cache that a call makes, and a counter that is static."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head, self.calls = nnx.Linear(D, 4, rngs=rngs), 0

    def __call__(self, x):
        self.calls += 1
        self.last = nnx.Cache(self.features(x))
        return self.head(self.last[...])

    def features(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))

    def until(self, x):
        while jnp.linalg.norm(x) > 1e-3:  # which no trace can follow
            x = self.down(x) / 4
        return x

    def widened(self, rngs):
        self.more = nnx.Linear(4, 4, rngs=rngs)
        return self


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def data_of(model):
    """All that a call may change: everything but parameters and histories."""
    rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, Fp8State, nnx.RngKey)))
    return {path: v.get_raw_value() for path, v in nnx.to_flat_state(rest)}


def test_a_call_changes_what_the_model_changes():
    """With a recipe that stays in high precision, so that values are equal."""
    never = lambda path, layer: False
    plain, ours = Net(nnx.Rngs(0)), jfp8.convert(Net(nnx.Rngs(0)), only=never)
    for train in (True, False, True):
        for model in (plain, ours):
            model.train() if train else model.eval()
        np.testing.assert_array_equal(ours(X), plain(X))
        np.testing.assert_array_equal(ours.features(X), plain.features(X))  # changes only values
        for path, value in data_of(plain).items():
            np.testing.assert_array_equal(data_of(ours)[path], value)
    assert ours.calls == plain.calls == 3
    assert data_of(ours).keys() == data_of(plain).keys()
    assert ours.widened(nnx.Rngs(1)) is ours
    assert ours.more(X[:, :4]).shape == (4, 4)


def test_training_with_evaluation_between_steps():
    """Histories move where a gradient is taken, and the model draws the same random numbers."""
    plain, ours = Net(nnx.Rngs(0)), jfp8.convert(Net(nnx.Rngs(0)), "delayed")
    optimizer = jfp8.nnx.Optimizer(ours, optax.sgd(0.1))
    for _ in range(2):
        before = jax.tree.map(jnp.copy, nnx.state(ours, Fp8State))
        ours.eval()
        ours(100 * X)
        jax.tree.map(np.testing.assert_array_equal, before, nnx.state(ours, Fp8State))
        ours.train()
        loss, grads = jfp8.nnx.value_and_grad(loss_of)(ours, X)
        optimizer.update(ours, grads)
    history = ours.up.dot_general.fp8["lhs"][...]
    np.testing.assert_array_equal(history[:3], [jnp.abs(X).max()] * 2 + [0])
    plain(X), plain(X)
    assert ours.drop.rngs.count[...] == plain.drop.rngs.count[...]
    np.testing.assert_allclose(ours.norm.mean[...], plain.norm.mean[...], atol=0.05)


WRAPPED = {
    "eager": loss_of,
    "nnx.jit": nnx.jit(loss_of),
    "nnx.remat": nnx.remat(loss_of),
    "nnx.vmap": lambda m, x: nnx.vmap(loss_of, in_axes=(None, 0))(m, x[None]).sum(),
    "methods": lambda m, x: jnp.mean(m.last_layer(m.first_layer(x)) ** 2),
    "layers": lambda m, x: jnp.mean(m.down(nnx.tanh(m.up(x))) ** 2),
}


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def first_layer(self, x):
        return nnx.tanh(self.up(x))

    def last_layer(self, x):
        return self.down(x)

    def __call__(self, x):
        return self.last_layer(self.first_layer(x))


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("ours", [True, False])
def test_transformations_around_a_call(way, ours):
    """Losses, gradients and histories are the same, with sinks and without."""
    differentiate = jfp8.nnx.value_and_grad if ours else nnx.value_and_grad
    results = []
    for name in ("eager", way):
        model = jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())
        loss, grads = differentiate(WRAPPED[name])(model, X)
        second, _ = differentiate(WRAPPED[name])(model, 2 * X)
        # Not their checks, which hash all bits.
        state = nnx.to_pure_dict(nnx.state(model, Fp8State))
        fp8 = {name: state[name]["dot_general"]["fp8"] for name in ("up", "down")}
        histories = {k: {role: x[role] for role in ("lhs", "rhs", "grad")} for k, x in fp8.items()}
        results.append((loss, second, grads, histories))
    assert np.all(results[0][3]["down"]["rhs"][:2])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *results)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: Plain(rngs))
        self.blocks = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        return over_blocks(self.blocks, x)


def over_blocks(blocks, x):
    body = nnx.scan(nnx.remat(lambda x, f: x + f(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return body(x, blocks)


def test_a_stack_is_scanned_inside_or_outside_of_a_call():
    found = []
    for call in (lambda model, x: model(x), lambda model, x: over_blocks(model.blocks, x)):
        model = jfp8.convert(Stacked(nnx.Rngs(0)), "delayed", exempt=())
        loss = lambda model, x, call=call: jnp.mean(call(model, x) ** 2)
        for _ in range(2):
            value, grads = jfp8.nnx.value_and_grad(loss)(model, X)
        found.append((value, grads, nnx.state(model, Fp8State)))
    assert found[0][2]["blocks"]["up"]["dot_general"]["fp8"]["grad"].shape == (3, 16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)


def test_what_a_call_captures():
    class Sowing(Plain):
        def first_layer(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return super().first_layer(x)

    model = jfp8.convert(Sowing(nnx.Rngs(0)), "delayed", exempt=())
    with jax.checking_leaks():
        y, found = nnx.capture(model, nnx.Intermediate)(X)
    np.testing.assert_array_equal(found["x"][0], X)
    np.testing.assert_array_equal(y, jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())(X))


def test_what_no_trace_can_follow_runs_as_it_is():
    model = Net(nnx.Rngs(0))
    converted = jfp8.convert(model, "current", exempt=())
    assert 0 < relative_error(converted.until(X), model.until(X)) < 0.3


def test_a_matmul_that_no_trace_can_reach_is_loud():
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((D, D)))

        def __call__(self, x):
            return x @ self.w[...] if float(x.sum()) else x

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        jfp8.convert(Own(), "current", exempt=())(X)
    assert "even where it is called without" in str(error.value.__notes__)


def test_copies_of_a_converted_model():
    model = jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())
    jfp8.nnx.value_and_grad(loss_of)(model, X)
    expected = model(X)
    graph, state = nnx.split(model)
    copies = {
        "clone": nnx.clone(model),
        "merge": nnx.merge(graph, state),
        "pickle": pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy(model),
    }
    restored = nnx.eval_shape(lambda: jfp8.convert(Plain(nnx.Rngs(1)), "delayed", exempt=()))
    nnx.update(restored, state)
    for name, other in (copies | {"restored": restored}).items():
        assert isinstance(other, Plain), name
        np.testing.assert_array_equal(other(X), expected, err_msg=name)
        assert jax.tree.structure(nnx.state(other)) == jax.tree.structure(state), name


def test_a_model_in_fp8_weights_keeps_them_in_a_call():
    model = jfp8.convert(Net(nnx.Rngs(0)), "current", exempt=())
    nnx.update(model, jfp8.quantize_params(nnx.state(model, nnx.Param), "current"))
    stored = model.up.kernel.get_raw_value()
    model(X)  # adds a variable
    model.eval()
    again = model(X)
    assert type(model.up.kernel.get_raw_value()) is type(stored)
    np.testing.assert_array_equal(model(X), again)


def test_a_converted_model_inside_of_another():
    inner = jfp8.convert(Plain(nnx.Rngs(0)), "delayed", exempt=())
    outer = nnx.Sequential(inner, nnx.Linear(D, D, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match="'layers/0/down' has the recipe 'delayed'"):
        jfp8.convert(outer, "current")
    converted = jfp8.convert(outer, "delayed", exempt=())
    loss, _ = jfp8.nnx.value_and_grad(loss_of)(converted, X)
    histories = nnx.to_flat_state(nnx.state(converted, Fp8State))
    assert {path[:-3] for path, variable in histories if variable[...].any()} == {
        ("layers", 0, "up"),
        ("layers", 0, "down"),
        ("layers", 1),
    }
    assert loss != loss_of(outer, X)
