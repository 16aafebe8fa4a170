"""`debug.Recorder`: which steps are sampled, what they return, and what is written."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8


def setup():
    model = nn.Sequential([jfp8.Dense(16), nn.relu, jfp8.Dense(4)])
    variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    tx = optax.adam(1e-2)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    def step(state, x):
        loss_fn = lambda variables, x: (jnp.mean(model.apply(variables, x) ** 2), {})
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads), loss

    rng = np.random.default_rng(0)
    return state, step, [rng.normal(size=(4, 8)).astype(np.float32) for _ in range(7)]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_samples_every_so_many_steps_and_changes_nothing(compiled, tmp_path):
    """Steps that are not sampled run the given program: one trace is without statistics."""
    state, step, batches = setup()
    path, traced = tmp_path / "stats.jsonl", []
    counted = lambda state, x: [step(state, x), traced.append(None)][0]
    record = jfp8.debug.Recorder(jax.jit(counted) if compiled else counted, every=3, jsonl=path)
    plain = jax.jit(step)
    expected, losses = state, []
    for x in batches:
        expected, loss = plain(expected, x)
        state, recorded = record(state, x)
        losses.append((float(loss), float(recorded)))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(a == b for a, b in losses)

    assert len(traced) == 2
    assert sorted({row.step for row in record.rows}) == [0, 3, 6]
    first = [row for row in record.rows if row.path == "layers_0" and row.tensor == "lhs"]
    assert [row.amax for row in first] == [np.abs(batches[i]).max() for i in (0, 3, 6)]
    assert jfp8.debug.read_jsonl(path) == tuple(record.rows)
    assert record.step == 7
    assert record.products.fp8_fraction == 1


@pytest.mark.slow
def test_no_step_waits_for_the_host():
    """What a sample measures is fetched when the next one has been started, or is asked for."""
    state, step, batches = setup()
    record = jfp8.debug.Recorder(step, every=1)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        record(state, jnp.asarray(batches[0]))
    assert {row.step for row in record.rows} == {0}


def test_mistakes_are_explained():
    for name, value in itertools.product(("every", "keep"), (0, -1, 1.5, True, "10")):
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got {value!r}"):
            jfp8.debug.Recorder(lambda x: x, **{name: value})


def test_resumed_and_bounded_and_handed_to_a_writer():
    written = []
    model = jfp8.Dense(4, recipe="current")
    variables = {"params": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}}
    options = {"every": 2, "start": 5, "keep": 2, "write": written.append}
    record = jfp8.debug.Recorder(jax.jit(model.apply), **options)
    for _ in range(7):
        record(variables, jnp.ones((2, 8)))
    assert sorted({row.step for row in record.rows}) == [8, 10]
    assert len(record.rows) == 2 * 2
    assert [{row.step for row in rows} for rows in written] == [{6}, {8}, {10}]
    assert list(itertools.chain(*written[1:])) == record.rows
