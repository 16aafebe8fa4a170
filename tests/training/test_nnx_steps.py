"""Whole steps of NNX: skipped ones, micro-batches, several devices; Linen next to NNX."""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same

X = jax.random.normal(jax.random.key(0), (48, 16)) * jnp.linspace(0.2, 2, 48)[:, None]
Y = jax.random.normal(jax.random.key(1), (48, 8))
RECIPE = "delayed"


class Network(nnx.Module):
    """Two FP8 layers around a batch normalization and dropout."""

    def __init__(self, rngs):
        self.first = jfp8.nnx.Linear(16, 32, recipe=RECIPE, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = jfp8.nnx.Linear(32, 8, recipe=RECIPE, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Plain(nnx.Module):
    """The layers alone: each example is on its own."""

    def __init__(self, rngs):
        self.first = jfp8.nnx.Linear(16, 32, recipe=RECIPE, rngs=rngs)
        self.last = jfp8.nnx.Linear(32, 8, recipe=RECIPE, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def huge_gradient(model, batch):
    """A finite loss whose gradient is beyond 2^62, which optimizers cannot square."""
    return loss_fn(model, batch) + 2.0**70 * jnp.sum(model.last.bias[...])


def stepped(gradient):
    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = gradient(model, batch)
        optimizer.update(model, grads)
        return loss

    return step


def arrays_of(*nodes):
    """Everything but random keys and counters of steps."""
    pure = [nnx.as_pure(nnx.state(node, nnx.Not(nnx.RngState))) for node in nodes]
    for state in pure:
        for name in ("step", "skipped_steps", "skipped_in_a_row"):
            state.pop(name, None)
    return jax.tree.map(jnp.copy, pure)


def of_devices(n, f):
    """The gradient function of `f`, on `n` devices if there are several."""
    compute = jfp8.nnx.value_and_grad(f)
    if n == 1:
        return compute
    mesh = jax.sharding.Mesh(jax.devices()[:n], ("data",))
    return jfp8.data_parallel(compute, "data", mesh=mesh, mean=jax.lax.pmean)


BATCH = {"x": X, "y": Y}
BAD = {
    "NaN": (loss_fn, {"x": X.at[47, 3].set(jnp.nan), "y": Y}),
    "Inf": (loss_fn, {"x": X.at[47, 3].set(jnp.inf), "y": Y}),
    "huge": (huge_gradient, BATCH),
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("bad", [*BAD])
@pytest.mark.representative(1)
def test_a_step_that_is_not_finite_changes_nothing(bad, devices):
    model = Network(nnx.Rngs(0))
    optimizer = jfp8.nnx.Optimizer(model, optax.adam(1e-2))
    step = stepped(of_devices(devices, loss_fn))
    step(model, optimizer, BATCH)
    before = arrays_of(model, optimizer)
    f, batch = BAD[bad]
    skipped = step if f is loss_fn else stepped(of_devices(devices, f))
    skipped(model, optimizer, batch)
    assert_same(arrays_of(model, optimizer), before)
    counters = optimizer.step, optimizer.skipped_steps, optimizer.skipped_in_a_row
    assert [int(c[...]) for c in counters] == [2, 1, 1]
    step(model, optimizer, BATCH)
    assert [int(c[...]) for c in counters] == [3, 1, 0]
    after = jax.tree.leaves(arrays_of(model, optimizer))
    assert np.any(after[0] != jax.tree.leaves(before)[0])


def test_an_overflow_lowers_the_loss_scale_and_changes_nothing_else():
    model = Plain(nnx.Rngs(0))
    tx = optax.chain(jfp8.loss_scale(init_scale=2.0**16), optax.adam(1e-2))
    optimizer = jfp8.nnx.Optimizer(model, tx)

    @nnx.jit
    def step(model, optimizer, batch):
        scale = jfp8.scale_loss(1.0, optimizer.opt_state)
        loss, grads = jfp8.nnx.value_and_grad(loss_fn, loss_scale=scale)(model, batch)
        optimizer.update(model, grads)
        return loss

    step(model, optimizer, BATCH)
    before = arrays_of(model)
    step(model, optimizer, BAD["Inf"][1])
    assert_same(arrays_of(model), before)
    assert float(optax.tree.get(nnx.as_pure(optimizer.opt_state), "loss_scale")) == 2.0**15
    assert int(optimizer.skipped_steps[...]) == 1


@pytest.mark.parametrize("how", ["micro-batches", "devices"])
@pytest.mark.representative(1)
def test_parts_of_a_batch_train_as_the_whole(how):
    """Histories are those of the whole batch; the gradient is, within roundings to FP8."""
    whole, parts = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(0))
    compute = jfp8.nnx.value_and_grad(loss_fn, micro_batches=4)
    compute = compute if how == "micro-batches" else of_devices(8, loss_fn)
    for _ in range(2):
        loss, grads = nnx.jit(jfp8.nnx.value_and_grad(loss_fn))(whole, BATCH)
        loss_of_parts, grads_of_parts = nnx.jit(compute)(parts, BATCH)
    np.testing.assert_allclose(loss_of_parts, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads_of_parts), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)  # E5M2 rounds by up to 2^-3
    # The mean over a micro-batch, a quarter, has four times the gradients.
    factors = {"lhs": 1, "rhs": 1, "grad": 4 if how == "micro-batches" else 1}
    for name, role in itertools.product(("first", "last"), factors):
        found, expected = (
            getattr(model, name).dot_general.fp8[role][...] for model in (parts, whole)
        )
        assert np.count_nonzero(expected) == 2
        # Gradients have passed a product of other parts of the batch.
        rtol = 1e-6 if (name, role) == ("first", "lhs") else 0.05
        np.testing.assert_allclose(found, factors[role] * expected, rtol=rtol)


@pytest.mark.slow
def test_statistics_pass_from_one_micro_batch_to_the_next():
    model = Network(nnx.Rngs(0))
    y, mean = X @ model.first.kernel[...], jnp.zeros(32)
    for i in range(4):
        mean = 0.99 * mean + 0.01 * jnp.mean(y[i::4], axis=0)
    nnx.jit(jfp8.nnx.value_and_grad(loss_fn, micro_batches=4))(model, BATCH)
    found = model.norm.mean[...]
    assert np.linalg.norm(found - mean) < 0.05 * np.linalg.norm(mean)


def test_what_has_no_batch_axis_is_named():
    model = Plain(nnx.Rngs(0))
    weighted = lambda model, x, weights: jnp.mean(model(x) * weights)
    compute = jfp8.nnx.value_and_grad(weighted, micro_batches=4)
    with pytest.raises(ValueError, match=r"micro_batches=4, batch_axes=\{'weights': None\}"):
        compute(model, X, jnp.ones(8))
    named = partial(jfp8.nnx.value_and_grad, batch_axes={"weights": None})
    weights = jnp.arange(8.0)[None]
    loss, expected = (
        nnx.jit(named(weighted, micro_batches=parts))(model, X, weights)[0] for parts in (4, 1)
    )
    np.testing.assert_allclose(loss, expected, rtol=0.05)


def test_linen_and_nnx_train_alike():
    """Losses, parameters and histories of the same model, from the same start, bit for bit."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(jfp8.Dense(32, recipe=RECIPE)(x))
            return jfp8.Dense(8, recipe=RECIPE)(x)

    model, tx = Plain(nnx.Rngs(0)), optax.adam(1e-2)
    optimizer, linen = jfp8.nnx.Optimizer(model, tx), Linen()
    variables = linen.init(jax.random.key(0), X)
    layers = {"Dense_0": model.first, "Dense_1": model.last}
    params = {
        name: {"kernel": jnp.copy(layer.kernel[...]), "bias": jnp.copy(layer.bias[...])}
        for name, layer in layers.items()
    }
    state = jfp8.TrainState.create(
        apply_fn=linen.apply, variables={**variables, "params": params}, tx=tx
    )

    @jax.jit
    def linen_step(state, batch):
        apply = lambda variables, batch: loss_fn(partial(linen.apply, variables), batch)
        loss, grads = jfp8.value_and_grad(apply)(state, batch)
        return state.apply_gradients(grads), loss

    step = stepped(jfp8.nnx.value_and_grad(loss_fn))
    for _ in range(4):
        state, loss = linen_step(state, BATCH)
        assert_same(step(model, optimizer, BATCH), loss)
    for name, layer in layers.items():
        assert_same(layer.kernel[...], state.params[name]["kernel"])
        for role in ("lhs", "rhs", "grad"):
            in_linen = state.fp8[name]["DotGeneral_0"][role]["amax_history"]
            assert_same(layer.dot_general.fp8[role][...], in_linen)
            assert np.count_nonzero(in_linen) == 4


def test_a_linen_layer_in_a_model_is_told_that_its_histories_stand_still():
    model = nnx.bridge.ToNNX(jfp8.Dense(8, recipe=RECIPE), rngs=nnx.Rngs(0))
    model.lazy_init(X)
    with (
        pytest.warns(UserWarning, match=r"nnx.bridge.ToNNX.*does not update"),
        pytest.warns(UserWarning, match="but not to its sink"),
    ):
        jfp8.nnx.value_and_grad(loss_fn)(model, BATCH)
    current = nnx.bridge.ToNNX(jfp8.Dense(8, recipe="current"), rngs=nnx.Rngs(0))
    current.lazy_init(X)
    assert jfp8.nnx.value_and_grad(loss_fn)(current, BATCH)[0] > 0
