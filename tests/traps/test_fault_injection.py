"""Numbers go bad in every operand at random steps, by `soak.hurt`: training goes on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from jfp8 import debug, recipes
from jfp8.optim.loss_scale_state import find_loss_scale
from support.scripts import imported

soak = imported("soak", "benchmarks")

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4", "direct_e5m2", "hybrid")
PAIRS = [(recipe, level) for recipe in RECIPES for level in ("O0", "O1", "O2")]
FAULTS = [(p, k) for p in soak.PLACES for k in soak.FAULTS if not soak.must_be_skipped(p, k)]


def optimizer(recipe):
    """Clipped, as everywhere: Adam remembers one huge gradient for 1000 steps, in float32 too."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    return optax.chain(jfp8.loss_scale(), tx) if recipe == "delayed" else tx


def step_of(loss_fn):
    def step(state, batch):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)
        return state.apply_gradients(grads), loss

    return step


@functools.cache
def created(recipe, level):
    """The state before the first step, and the loss."""
    return soak.create(recipe, level, optimizer(recipe))


@functools.cache
def many_steps(recipe, level):
    """``(state, batches) -> (state, losses)``, one step for each batch."""
    return jax.jit(functools.partial(jax.lax.scan, step_of(created(recipe, level)[1])))


def stacked(batches):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def assert_finite(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        values = np.asarray(leaf).astype(np.float32)
        assert np.isfinite(values).all(), jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "level"), PAIRS)
def test_training_recovers(recipe, level):
    """12 faults of all kinds, each alone: 92 or more steps later the loss is what it would be.

    A history remembers a spike for 16 steps, in which all that is small beside it is lost and
    weights move by their noise, up to 0.003 a step. The other 80 are to undo that. A quarter
    is left for what the run without faults is ahead, and for the draw of 10 batches.
    """
    (state, loss_fn), run = created(recipe, level), many_steps(recipe, level)
    draw = np.random.default_rng(PAIRS.index((recipe, level)))
    n = 100
    trained, _ = run(state, stacked([soak.batch_of(i) for i in range(n)]))
    batches = [soak.batch_of(n + i) for i in range(n)]
    at_first = loss_fn(state.variables, batches[-1])[0]
    expected = np.mean(run(trained, stacked(batches))[1][-10:])
    assert expected < at_first / 5
    for place, kind in draw.permutation(FAULTS)[:12]:
        injured = list(batches)
        fault = soak.injected(place, kind, int(draw.integers(1 << 20)))
        injured[draw.integers(8)] = {**batches[0], "fault": fault}
        after, losses = run(trained, stacked(injured))
        assert_finite((after.params, after.opt_state, after.fp8))
        assert np.mean(losses[-10:]) < 1.25 * expected, (place, kind)


@pytest.mark.slow
def test_trap_two_spikes_in_one_product_do_not_stop_training():
    """The product of their scales is Inf, and times zero NaN: no step would ever be taken."""
    state, run = created("delayed", "O2")[0], many_steps("delayed", "O2")
    batches = [soak.batch_of(i) for i in range(100)]
    _, expected = run(state, stacked(batches))
    for i, fault in ((5, ("Dense_1 lhs", "-3e38")), (8, ("Dense_1 rhs", "times 1e12"))):
        batches[i] = soak.batch_of(i, fault=soak.injected(*fault))
    state, losses = run(state, stacked(batches))
    assert_finite((state.params, state.opt_state, state.fp8))
    assert find_loss_scale(state.opt_state).overflow_count <= 2
    # 20 of the steps are lost to the histories, in the middle of the way down.
    assert np.mean(losses[-10:]) < 1.5 * np.mean(expected[-10:])


@pytest.mark.representative(1)
@pytest.mark.parametrize("recipe", ["direct_e5m2", "hybrid"])
def test_what_saturates_is_finite_but_advice_names_it(recipe):
    """Without a scale for gradients, 2^40 for the loss cuts all of them, and nothing is Inf."""
    recipe = recipes.get(recipe, quantize_outputs=False)
    model = jfp8.Dense(4, recipe=recipe)
    variables = model.init(jax.random.key(0), jnp.ones((1, 16)))
    tx = jfp8.loss_scale(optax.adam(3e-3), init_scale=2.0**40, max_scale=2.0**60)
    make = jfp8.TrainState.create
    state = make(apply_fn=model.apply, variables=variables, tx=tx)

    def loss_fn(variables, batch):
        return jnp.mean(optax.log_cosh(model.apply(variables, batch["x"]), batch["y"])), {}

    step, rows = jax.jit(debug.stats(step_of(loss_fn))), []
    for i in range(5):
        x = np.float32(np.random.default_rng(i).normal(size=(16, 16)))
        (state, _), seen = step(state, {"x": x, "y": np.sin(x[:, :4])})
        rows += seen.rows(i)
    assert state.opt_state.overflow_count == 0
    finding = debug.advice(rows).findings[0]
    assert finding.fault == "saturated_gradient"
    assert finding.remedy.startswith("Lower the loss scale by a factor of 2^")
