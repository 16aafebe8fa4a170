"""Numbers that go bad in every operand at random steps: training goes on.

A fault replaces elements of one operand: activations, weights, biases, incoming gradients, labels.
It is an input of the compiled program, `soak.hurt`, so that one program takes them all. Soon after
it the loss is that of a run without it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from jfp8 import debug, recipes
from jfp8.optim.loss_scale_state import find_loss_scale
from jfp8.products.ragged.dot import scaled_ragged_dot
from support.scripts import imported

soak = imported("soak", "benchmarks")

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4", "direct_e5m2", "hybrid")
PAIRS = [(recipe, level) for recipe in RECIPES for level in ("O0", "O1", "O2")]
# Under these a loss scale changes numbers, since gradients have no other.
UNSCALED_GRADIENTS = ("direct_e5m2", "hybrid")

MUST_SKIP = [
    (place, kind)
    for place in soak.PLACES
    for kind in soak.NON_FINITE
    if soak.must_be_skipped(place, kind)
]
OTHERS = [(p, k) for p in soak.PLACES for k in soak.FAULTS if (p, k) not in MUST_SKIP]


# The first tensor of an FP8 product that is not finite, if the fault is not in one itself.
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


def assert_same_bits(a, b):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


def assert_finite(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        values = np.asarray(leaf).astype(np.float32)
        assert np.isfinite(values).all(), jax.tree_util.keystr(path)


class TestExtremes:
    @pytest.mark.slow
    @pytest.mark.parametrize(("recipe", "level"), PAIRS)
    def test_training_recovers(self, recipe, level):
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
        for place, kind in draw.permutation(OTHERS)[:12]:
            injured = list(batches)
            fault = soak.injected(place, kind, int(draw.integers(1 << 20)))
            injured[draw.integers(8)] = {**batches[0], "fault": fault}
            after, losses = run(trained, stacked(injured))
            assert_finite((after.params, after.opt_state, after.fp8))
            assert np.mean(losses[-10:]) < 1.25 * expected, (place, kind)

    @pytest.mark.slow
    def test_trap_two_spikes_in_one_product_do_not_stop_training(self):
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


# A small model whose gradients are finite at any loss scale that a loss of 1 can have.


def tiny_batch(step, factor=1.0, rows=16):
    draw = np.random.default_rng(step)
    x = np.float32(draw.normal(size=(rows, 16)))
    return {"x": x, "y": np.sin(x[:, :4]), "factor": np.full((rows, 4), factor, np.float32)}


class TestBursts:
    @pytest.mark.representative(1)
    @pytest.mark.parametrize("recipe", UNSCALED_GRADIENTS)
    def test_what_saturates_is_finite_but_the_report_tells(self, recipe):
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
            (state, _), seen = step(state, tiny_batch(i))
            rows += seen.rows(i)
        assert state.opt_state.overflow_count == 0
        finding = debug.advice(rows).findings[0]
        assert finding.fault == "saturated_gradient"
        assert finding.remedy.startswith("Lower the loss scale by a factor of 2^")


# Nothing at all


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_batch(recipe):
    """No rows: gradients are zero, histories get no entry but the weight's, the next step works."""
    recipe = recipes.get(recipe)
    model = jfp8.Dense(4, recipe=recipe)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 16)))
    create = jfp8.TrainState.create
    state = create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))

    @jax.jit
    def step(state, x, y):
        loss_fn = lambda v, _: (jnp.sum((model.apply(v, x) - y) ** 2), {})
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads), loss

    x, y = tiny_batch(0)["x"], tiny_batch(0)["y"]
    after, loss = step(state, x[:0], y[:0])
    assert loss == 0
    assert_same_bits(after.params, state.params)
    for role in ("lhs", "rhs", "grad") if after.fp8 else ():
        state_of = after.fp8["DotGeneral_0"][role]
        seen = np.max(np.abs(state.params["kernel"])) if role == "rhs" else 0.0
        np.testing.assert_array_equal(state_of["amax_history"], [seen] + [0.0] * 15)
    (_, expected), (_, loss) = step(state, x, y), step(after, x, y)
    assert loss == expected > 0


def expert_products(x, w, sizes, dy, recipe):
    product = lambda x, w: scaled_ragged_dot(x, w, sizes, recipe=recipe, key=jax.random.key(0))
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_without_tokens(recipe):
    """They get no gradient, and bad numbers in their weights reach nobody."""
    draw = np.random.default_rng(0)
    x, dy = np.float32(draw.normal(size=(48, 32))), np.float32(draw.normal(size=(48, 16)))
    w = np.float32(draw.normal(size=(4, 32, 16)))
    run = jax.jit(functools.partial(expert_products, recipe=recipes.get(recipe)))
    for sizes in ([0, 30, 0, 18], [0, 0, 48, 0], [0, 0, 0, 0]):
        sizes = np.array(sizes, np.int32)
        y, d_x, d_w = jax.device_get(run(x, w, sizes, dy))
        bad = w.copy()
        bad[sizes == 0, 3, 5] = [np.nan, np.inf, 3e38, -np.inf][: (sizes == 0).sum()]
        for clean, with_bad in zip((y, d_x, d_w), run(x, bad, sizes, dy), strict=True):
            np.testing.assert_array_equal(with_bad, clean)
        assert not np.any(d_w[sizes == 0])
        start = 0
        for expert, size in enumerate(sizes):
            rows = slice(start, start := start + size)
            for actual, exact in (
                (y[rows], x[rows] @ w[expert]),
                (d_x[rows], dy[rows] @ w[expert].T),
                (d_w[expert], x[rows].T @ dy[rows]),
            ):
                # 4 bits lose about 0.2, 8 bits 0.05.
                assert np.linalg.norm(actual - exact) <= 0.35 * np.linalg.norm(exact)
        assert not np.any(y[start:])
        assert not np.any(d_x[start:])
