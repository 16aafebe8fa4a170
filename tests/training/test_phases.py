"""Switch to another recipe at a step, and resume there."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from support.arrays import assert_same

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (16, 32))
BASE = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32)])
DELAYED = jfp8.recipes.DelayedScaling(amax_history_len=4)
PHASES = {0: None, 2: DELAYED, 4: jfp8.recipes.DelayedScaling(amax_history_len=2)}


@functools.cache
def model_with(recipe) -> nn.Module:
    return jfp8.convert(BASE, {"*": recipe}, exempt=())


def model_at(step: int) -> nn.Module:
    return model_with(PHASES[max(s for s in PHASES if s <= step)])


def begun() -> jfp8.TrainState:
    model = model_at(0)
    variables = jax.jit(model.init)(KEY, X)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.adam(1e-2))


@jax.jit
def train_step(state):
    loss_fn = lambda variables, x: jnp.mean((state.apply_fn(variables, x) - jnp.roll(x, 1)) ** 2)
    loss, grads = jfp8.value_and_grad(loss_fn)(state, X)
    return state.apply_gradients(grads), loss


IN_BF16 = nn.Sequential([nn.Dense(32, dtype=jnp.bfloat16) for _ in range(2)])
TO_4_BITS = {0: None, 2: DELAYED, 4: jfp8.recipes.QuantizationAware("nvfp4")}


@pytest.mark.slow
def test_from_bf16_over_fp8_to_4_bits_and_killed_at_each_border(tmp_path):
    """Before and after the model is switched, whose state is restored into a fresh one."""
    models = {s: jfp8.convert(IN_BF16, {"*": r}, exempt=()) for s, r in TO_4_BITS.items()}

    def fresh(step):
        variables = jax.jit(models[0].init)(jax.random.key(step), X)
        state = jfp8.TrainState.create(
            apply_fn=models[0].apply, variables=variables, tx=optax.adam(1e-2)
        )
        return state.with_model(models[max(s for s in models if s <= step)], X)

    def run(state, first, save=lambda name, state: None):
        losses = []
        for step in range(first, 6):
            if step in models and step > first:
                save(f"{step} before", state)
                state = state.with_model(models[step], X)
                save(f"{step} after", state)
            state, loss = train_step(state)
            losses.append(float(loss))
        return state, losses

    save = lambda name, state: jfp8.checkpoint.save(tmp_path / name, state)
    state, losses = run(fresh(0), 0, save)
    assert len({*losses}) == 6
    for border in (2, 4):
        before = jfp8.checkpoint.restore(tmp_path / f"{border} before", fresh(border - 1))
        after = jfp8.checkpoint.restore(tmp_path / f"{border} after", fresh(border), strict=True)
        for resumed in (before.with_model(models[border], X), after):
            found, again = run(resumed, border)
            assert again == losses[border:]
            assert_same(found.fp8, state.fp8)
    assert set(state.fp8 or {}) == set()
    # The last phase multiplied what is deployed.
    params = jfp8.quantize_params(state.params, TO_4_BITS[4], dtype=jnp.bfloat16)
    y = jax.jit(models[4].apply)
    np.testing.assert_array_equal(y({"params": params}, X), y({"params": state.params}, X))


def test_the_recipe_is_another_from_the_switch_on():
    state = begun()
    plain = train_step(state)[1]
    found = train_step(state.with_model(model_with("mxfp8"), X))[1]
    loss = lambda model: jnp.mean((model.apply(state.variables, X) - jnp.roll(X, 1)) ** 2)
    written = nn.Sequential(
        [jfp8.Dense(32, recipe="mxfp8"), nn.relu, jfp8.Dense(32, recipe="mxfp8")]
    )
    np.testing.assert_array_equal(found, jax.jit(lambda: loss(written))())
    assert float(found) != float(plain)


def test_another_model_is_refused():
    state = begun()
    wider = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)])
    with pytest.raises(
        ValueError, match=r"params/layers_0/bias is \(64,\) in it and \(32,\) in the"
    ):
        state.with_model(wider, X)
    with pytest.raises(ValueError, match=r"params/layers_2/bias is missing in it"):
        state.with_model(nn.Sequential([nn.Dense(32)]), X)
    with pytest.raises(TypeError) as told:
        state.with_model(model_with(DELAYED))
    assert told.value.__notes__[-1].startswith("The inputs of model.init come next: ")


def test_histories_of_another_length_keep_the_newest_entries():
    state = begun().with_model(model_with(DELAYED), X)
    for _ in range(3):
        state, _ = train_step(state)

    def histories(length):
        model = model_with(jfp8.recipes.DelayedScaling(amax_history_len=length))
        leaves = jax.tree.leaves_with_path(state.with_model(model, X).fp8)
        return [np.asarray(x) for path, x in leaves if path[-1].key == "amax_history"]

    for two, four, six in zip(*map(histories, (2, 4, 6)), strict=True):
        np.testing.assert_array_equal(two, four[..., :2])
        np.testing.assert_array_equal(six, np.pad(four, (0, 2)))
        assert (four[..., :3] > 0).all()
