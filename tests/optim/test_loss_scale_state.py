"""A loss scale half used or misplaced is noticed; each test names parameters of its own."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X @ np.ones((4, 2), np.float32)
NOT_SCALED = r"nothing has multiplied the loss by S(.|\n)*jfp8\.scale_loss\(loss, opt_state\)"


def chain():
    return optax.chain(jfp8.loss_scale(), optax.sgd(0.25))


def loss_fn(params):
    (w,) = params.values()
    return jnp.mean((X @ w - Y) ** 2)


def begin(name):
    return {name: jnp.zeros((4, 2))}


def step_of(tx, scaled):
    def step(params, state):
        loss = (lambda p: jfp8.scale_loss(loss_fn(p), state)) if scaled else loss_fn
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def scanned(step):
    body = lambda carry, _: (step(*carry), None)
    return lambda *carry: jax.lax.scan(body, carry, None, length=1)[0]


WRAPPED = {
    "eager": lambda step: step,
    "jit": jax.jit,
    "scan": scanned,
    "vmap": lambda step: (
        lambda *args: jax.vmap(step, axis_size=1)(*jax.tree.map(lambda x: x[None], args))
    ),
}
in_loops = pytest.mark.parametrize("loop", list(WRAPPED))


@in_loops
def test_trap_a_loss_that_nobody_scales(loop):
    """Every update would be 32768 times too small: loss 15.37 where SGD has 0.0002."""
    tx, params = chain(), begin(f"unscaled {loop}")
    with pytest.warns(UserWarning, match=NOT_SCALED) as caught:
        WRAPPED[loop](step_of(tx, scaled=False))(params, tx.init(params))
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize(
    "tx",
    [
        jfp8.loss_scale(optax.sgd(0.25)),
        jfp8.skip_on_overflow(chain()),
        optax.MultiSteps(chain(), 2),
        optax.chain(optax.inject_hyperparams(jfp8.loss_scale)(init_scale=4.0), optax.sgd(0.25)),
        optax.chain(jfp8.loss_scale(), jfp8.optim.master_weights(optax.sgd(0.25))),
    ],
    ids=["inner", "skip", "multi_steps", "inject_hyperparams", "masters"],
)
def test_wrappers_hide_no_unscaled_loss(tx, request):
    params = begin(request.node.callspec.id)
    state = tx.init(params)
    assert "32768" in repr(state) or "inject" in request.node.callspec.id  # does not count
    update = lambda: jax.eval_shape(tx.update, jax.grad(loss_fn)(params), state, params)
    with pytest.warns(UserWarning, match=NOT_SCALED):
        update()
    jfp8.scale_loss(1.0, state)
    update()


@in_loops
def test_a_scaled_loss_is_trained_as_without_a_loss_scale(loop):
    (tx, plain), params = (chain(), optax.sgd(0.25)), begin(f"scaled {loop}")
    expected, _ = WRAPPED[loop](step_of(plain, scaled=False))(params, plain.init(params))
    actual, _ = WRAPPED[loop](step_of(tx, scaled=True))(params, tx.init(params))
    # 2^15 commutes with every rounding; XLA may contract products with sums.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


def test_gradients_and_updates_may_be_compiled_apart():
    """A loop of its own: S leaves as a number."""
    params = begin("apart")
    gradient = jax.jit(lambda params, s: jax.grad(lambda p: s * loss_fn(p))(params))
    tx = chain()
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(gradient(params, jfp8.scale_loss(1.0, state)), state)


def test_reading_and_comparing_do_not_count():
    params = begin("only read")
    tx, other = chain(), chain()
    state, used = tx.init(params), other.init(params)
    jfp8.scale_loss(1.0, used)
    assert jax.tree.structure(state) == jax.tree.structure(used)
    assert hash(jax.tree.structure(state)) == hash(jax.tree.structure(used))
    for copy in (pickle.loads(pickle.dumps(state)), jax.eval_shape(tx.init, params)):
        assert jax.tree.structure(copy) == jax.tree.structure(state)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(used)]
    assert paths[:2] == ["[0].loss_scale", "[0].growth_tracker"]  # the paths of any named tuple
    assert state[0].loss_scale == optax.tree.get(state, "loss_scale") == 2.0**15
    gradient = jax.grad(loss_fn)(params)
    with pytest.warns(UserWarning, match=NOT_SCALED):
        tx.update(gradient, state)
    other.update(gradient, used)


def test_one_trace_for_all_steps():
    tx, params = chain(), begin("one trace")
    traces = []

    def step(params, state):
        traces.append(1)
        return step_of(tx, scaled=True)(params, state)

    step = jax.jit(step, donate_argnums=1)
    state = jax.jit(tx.init)(params)
    for _ in range(3):
        params, state = step(params, state)
    assert traces == [1]


@pytest.mark.parametrize("door", ["Linen", "NNX"])
def test_trap_a_loss_that_is_scaled_twice(door):
    """Gradients would be 32768 times too large; a scale that is read beforehand is used once."""
    tx, x = chain(), jnp.ones((2, 4))
    if door == "Linen":
        model = jfp8.Dense(3)
        variables = model.init(jax.random.key(0), x)
        state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
        opt_state, loss = state.opt_state, lambda variables: jnp.sum(model.apply(variables, x))
        gradient, first = jfp8.value_and_grad, state
    else:
        first = jfp8.nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        opt_state, loss = jfp8.nnx.Optimizer(first, tx).opt_state, lambda model: jnp.sum(model(x))
        gradient = jax.tree_util.Partial(
            jfp8.nnx.value_and_grad, loss_scale=jfp8.scale_loss(1.0, opt_state)
        )
    gradient(loss)(first)
    twice = lambda model: jfp8.scale_loss(loss(model), opt_state)
    with pytest.warns(UserWarning, match=r"value_and_grad multiplies by.*Return the loss") as told:
        gradient(twice)(first)
    assert [w.filename for w in told] == [__file__]


def test_where_it_cannot_be_known_nothing_is_said():
    """A scale that is always 1, states from elsewhere, states made by hand."""
    params = begin("unknown")
    gradient = jax.grad(loss_fn)(params)
    jfp8.loss_scale(init_scale=1.0, max_scale=1.0).update(
        gradient, jfp8.loss_scale(init_scale=1.0, max_scale=1.0).init(params)
    )
    tx = jfp8.loss_scale()
    for state in (
        pickle.loads(pickle.dumps(tx.init(params))),
        jfp8.LossScaleState(*tx.init(params)),
    ):
        tx.update(gradient, state)


SGD, ADAM = optax.sgd(0.25), optax.adam(0.25)
FROZEN = optax.set_to_zero()
CLIP = optax.clip_by_global_norm(1.0)
SCALED = optax.chain(jfp8.loss_scale(), SGD)
TWO = {"w": np.ones(2, np.float32), "v": np.ones(3, np.float32)}


def groups(w, v):
    return optax.multi_transform({"a": w, "b": v}, {"w": "a", "v": "b"})


@pytest.mark.parametrize(
    "tx", [groups(SCALED, SGD), groups(ADAM, SCALED), optax.chain(CLIP, groups(SCALED, ADAM))]
)
def test_trap_a_loss_scale_for_one_group(tx):
    """The other group would get gradients 32768 times too large: parameters of 3e6."""
    match = r"one group of a multi_transform(.|\n)*optax\.chain\(jfp8\.loss_scale\(\), optax\.multi"
    with pytest.raises(ValueError, match=match):
        jfp8.scale_loss(1.0, tx.init(TWO))
    with pytest.raises(ValueError, match=match):
        jfp8.TrainState.create(apply_fn=None, variables={"params": TWO}, tx=tx)


@pytest.mark.parametrize(
    ("tx", "warning"),
    [
        (
            optax.chain(CLIP, SCALED),
            r"in front of loss_scale.*jfp8\.loss_scale\(\), optax\.clip_by",
        ),
        (optax.chain(CLIP, jfp8.skip_on_overflow(SCALED)), "in front of loss_scale"),
        (optax.MultiSteps(optax.chain(optax.chain(CLIP), jfp8.loss_scale(SGD)), 2), "in front of"),
        (groups(optax.chain(CLIP, SCALED), FROZEN), "in front of loss_scale"),
        (
            optax.masked(SCALED, {"w": True, "v": False}),
            r"optax\.chain\(jfp8.loss_scale\(\), optax.m",
        ),
    ],
)
def test_trap_something_in_front_of_the_loss_scale(tx, warning):
    """A clip in front sees gradients 32768 times too large, and stops training."""
    state = tx.init(TWO)
    for call in (
        lambda: jfp8.scale_loss(1.0, state),
        lambda: jfp8.TrainState.create(apply_fn=None, variables={"params": TWO}, tx=tx),
    ):
        with pytest.warns(UserWarning, match=warning) as caught:
            call()
        assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(jfp8.loss_scale(), CLIP, groups(SGD, ADAM)),
        groups(SCALED, FROZEN),
        optax.chain(
            optax.masked(SCALED, {"w": True, "v": False}),
            optax.masked(FROZEN, {"w": False, "v": True}),
        ),
        optax.chain(
            jfp8.optim.fp8_gradients(), jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(), CLIP))
        ),
        jfp8.initialize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ADAM, opt_level="O1", recipe="hybrid")[
            1
        ],
    ],
)
def test_at_the_right_place_nothing_is_said(tx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jfp8.scale_loss(1.0, tx.init(TWO)) == 2.0**15
        jfp8.TrainState.create(apply_fn=None, variables={"params": TWO}, tx=tx)
