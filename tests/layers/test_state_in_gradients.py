"""State whose gradient is its new value, in loops that are not ours: as of `jfp8.TrainState`."""

import functools

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict

import jfp8
from jfp8.linen import histories_in
from jfp8.recipes.per_tensor import DelayedScaling
from jfp8.scaling.state_in_gradients import init_overwritten, read_overwritten
from support.arrays import assert_same

OWG = "_overwrite_with_gradient"
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 16))
Y = jnp.ones((8, 4))
TX = optax.sgd(0.1)
LAYER = jfp8.Dense(4, state_collection=OWG)


class Twice(nn.Module):
    """One layer that is used twice, with inputs of different sizes."""

    where: str = "fp8"

    @nn.compact
    def __call__(self, x, _=None):
        dense = jfp8.Dense(16, name="twice", state_collection=self.where)
        return jnp.tanh(dense(3 * jnp.tanh(dense(x)))), None


class Stack(nn.Module):
    """Layers stacked along an axis by nn.scan, under remat, and a head."""

    where: str = "fp8"
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        collections = ("params", OWG) if self.where == OWG else ("params", "fp8", "fp8_sink")
        layers = nn.scan(
            nn.remat(Twice, prevent_cse=False),
            variable_axes=dict.fromkeys(collections, self.axis),
            split_rngs={"params": True},
            length=3,
        )
        x, _ = layers(self.where, name="layers")(x, None)
        return jfp8.Dense(4, name="head", state_collection=self.where)(x)


def squared_error(model, variables, scale):
    """The batch of a step is `scale` times `X`, so that amaxes grow and shrink."""
    return jnp.mean((model.apply(variables, scale * X) - Y) ** 2)


def losses_and_histories(model, steps=3):
    """Of every step of `jfp8.TrainState`."""
    create = jfp8.TrainState.create
    state = create(apply_fn=model.apply, variables=jax.jit(model.init)(KEY, X), tx=TX)

    @jax.jit
    def step(state, scale):
        loss_fn = functools.partial(squared_error, model)
        loss, grads = jfp8.value_and_grad(loss_fn)(state, scale)
        return state.apply_gradients(grads), loss

    for scale in np.float32([1, 3, 2, 5, 1][:steps]):
        state, loss = step(state, scale)
        yield loss, state.fp8


def stock_losses_and_histories(model, steps=3):
    """Of every step of Flax's ``TrainState``, as its documentation writes the loop."""
    state = TrainState.create(apply_fn=model.apply, params=jax.jit(model.init)(KEY, X), tx=TX)

    @jax.jit
    def step(state, scale):
        loss_fn = functools.partial(squared_error, model)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, scale)
        return state.apply_gradients(grads=grads), loss

    for scale in np.float32([1, 3, 2, 5, 1][:steps]):
        state, loss = step(state, scale)
        yield loss, histories_in(state.params[OWG])


def assert_same_runs(theirs, ours):
    for (loss, histories), (expected_loss, expected) in zip(theirs, ours, strict=True):
        assert loss == expected_loss
        assert_same(histories, expected)
    filled = [x for path, x in flatten_dict(histories).items() if path[-1] == "amax_history"]
    assert len(filled) >= 6
    assert all(np.all(x[..., :3] > 0) and not np.any(x[..., 3:]) for x in filled)


@pytest.mark.parametrize("axis", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_histories_are_those_of_our_train_state_to_the_bit(axis):
    """One product used twice, under remat, in a scan over layers stacked along any axis."""
    model = Stack(OWG, axis)
    shapes = flatten_dict(jax.eval_shape(model.init, KEY, X)[OWG])
    assert shapes[("layers", "twice", "DotGeneral_0", "state")].shape[axis] == 3
    assert_same_runs(stock_losses_and_histories(model), losses_and_histories(Stack()))


def test_every_layer_takes_the_collection():
    x = jnp.ones((2, 4, 8))
    layers = [
        (jfp8.Conv(4, (3,), state_collection=OWG), 1),
        (jfp8.ConvTranspose(4, (3,), state_collection=OWG), 1),
        (jfp8.DenseGeneral(4, state_collection=OWG), 1),
        (jfp8.Einsum((8, 4), "abc,cd->abd", state_collection=OWG), 1),
        (jfp8.MultiHeadDotProductAttention(2, state_collection=OWG), 4),
        (jfp8.LayerNormDense(4, state_collection=OWG), 1),
        (jfp8.LayerNormMLP(4, state_collection=OWG), 2),
        (jfp8.TransformerLayer(8, 8, 2, state_collection=OWG), 4),
        (jfp8.MoE(2, 4, state_collection=OWG), 2),
        (nn.Dense(4, dot_general_cls=lambda: jfp8.linen.DotGeneral(state_collection=OWG)), 1),
        (jfp8.convert(nn.Dense(4), exempt=(), state_collection=OWG), 1),
    ]
    for layer, products in layers:
        shapes = jax.eval_shape(layer.init, KEY, x)
        assert sorted(shapes) == [OWG, "params"]
        assert {leaf.shape for leaf in jax.tree.leaves(shapes[OWG])} == {(3 * (2050 + 31 * 16),)}
        assert len(jax.tree.leaves(shapes[OWG])) == products


def gradient_of(*scales, state=None):
    """The mean gradient of micro-batches `scales` times `X`, at one value of the variables."""
    variables = LAYER.init(KEY, X)
    variables = variables if state is None else {**variables, OWG: state}
    gradients = [gradient_of_one(variables, np.float32(scale)) for scale in scales]
    return jax.tree.map(lambda *gs: sum(gs) / len(gs), *gradients)[OWG]


@jax.jit
@jax.grad
def gradient_of_one(variables, scale):
    return jnp.sum(LAYER.apply(variables, scale * X) ** 2)


def history_of(state, role="lhs"):
    return np.asarray(histories_in(state)["DotGeneral_0"][role]["amax_history"])


AMAX = np.max(np.abs(np.asarray(X)))


def test_an_average_over_micro_batches_is_one_entry():
    first = gradient_of(1.0, 1.0, 1.0, 1.0)
    np.testing.assert_array_equal(history_of(first)[:2], [AMAX, 0])
    entry, before = history_of(gradient_of(1.0, 7.0, 0.5, state=first))[:2]
    assert before == AMAX
    assert 7 * AMAX <= entry < 7 * AMAX * 9 / 8


def test_multi_steps_is_one_entry_for_each_micro_step():
    """Flax's ``TrainState`` replaces the state in every call, as the documentation says."""
    variables = LAYER.init(KEY, X)
    tx = optax.MultiSteps(TX, 2)
    state = TrainState.create(apply_fn=LAYER.apply, params=variables, tx=tx)
    for scale in (1.0, 2.0):
        grads = gradient_of_one(state.params, np.float32(scale))
        state = state.apply_gradients(grads=grads)
    np.testing.assert_array_equal(history_of(state.params[OWG])[:3], [2 * AMAX, AMAX, 0])


def test_factors_and_narrow_dtypes_change_nothing():
    state = gradient_of(3.0, state=gradient_of(1.0))["DotGeneral_0"]["state"]
    expected = history_of({"DotGeneral_0": {"state": state}})
    assert expected[1] == AMAX
    for factor in (1 / 3, 65536.0, 2.0**-90, -0.7, np.inf):
        for dtype in ("float32", "bfloat16"):
            scaled = (state * np.float32(factor)).astype(dtype).astype("float32")
            found = history_of({"DotGeneral_0": {"state": scaled}})
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("factor", [np.nan, 0.0])
def test_what_a_loop_destroys_starts_empty(factor):
    """Then tensors use their own amaxes, as in the first step."""
    state = jax.tree.map(lambda g: g * factor, gradient_of(3.0, state=gradient_of(1.0)))
    assert not np.any(history_of(state))
    again = gradient_of(2.0, state=state)
    np.testing.assert_array_equal(history_of(again)[:2], [2 * AMAX, 0])


@pytest.mark.slow
def test_any_history_survives_to_the_bit():
    """Of lengths that differ, after sums over uses and a weight for each."""
    rng = np.random.default_rng(0)
    empty = {
        role: {"amax_history": np.zeros(n, np.float32), "amax": np.float32(0)}
        for role, n in {"lhs": 4, "rhs": 7, "grad": 1}.items()
    }
    step = jax.jit(jax.grad(lambda v, rows: jnp.vdot(read_overwritten(v, empty)[1], rows)))
    variable, seen = init_overwritten(empty), np.zeros((3, 9), np.float32)
    for _ in range(9):
        amaxes = np.abs(rng.normal(size=3) * 2.0 ** rng.integers(-120, 120, 3)).astype(np.float32)
        rows = jfp8.scaling.sink.encode_amax(jnp.asarray(amaxes)) * np.float32(2.0**-20)
        uses = [np.float32(w) * step(variable, rows) for w in rng.uniform(0.01, 3, 5)]
        variable = functools.reduce(jnp.add, uses)
        seen = np.concatenate([amaxes[:, None], seen[:, :-1]], axis=1)
        states, _ = read_overwritten(variable, empty)
        for row, (role, state) in zip(seen, states.items(), strict=True):
            length = len(empty[role]["amax_history"])
            np.testing.assert_array_equal(state["amax_history"], row[:length])


@pytest.mark.parametrize(
    "box",
    [lambda a: nnx.bridge.NNXMeta(nnx.Param, a, {}), lambda a: nn.Partitioned(a, (None,))],
    ids=["NNX", "Partitioned"],
)
@pytest.mark.representative(1)
def test_boxes_are_opened_and_closed_again(box):
    layer = jfp8.convert(nn.Dense(4), exempt=(), state_collection=OWG)
    variables = layer.init(KEY, X)
    variables = {**variables, OWG: jax.tree.map(box, variables[OWG])}
    grads = jax.jit(jax.grad(functools.partial(squared_error, layer)))(variables, 1.0)
    assert jax.tree.structure(grads) == jax.tree.structure(variables)
    assert history_of(grads[OWG])[0] == AMAX


def kept_after(model, scales):
    """The variables after steps as Kauldron's: all are differentiated, only ``params`` updated."""
    variables = model.init(KEY, X)

    def loss(variables, scale):
        y, kept = model.apply(variables, scale * X, mutable=True)
        return jnp.mean((y - Y) ** 2), kept

    for scale in np.float32(scales):
        (_, kept), grads = jax.value_and_grad(loss, has_aux=True)(variables, scale)
        descend = lambda param, grad: param - 0.1 * grad
        params = jax.tree.map(descend, variables["params"], grads["params"])
        variables = {**kept, "params": params}
    return variables


@pytest.mark.parametrize(
    "make", [jfp8.Dense, lambda n, **given: jfp8.convert(nn.Dense(n), **given)]
)
def test_a_loop_that_keeps_the_collection_is_told_what_to_type(make):
    exempt = {} if make is jfp8.Dense else {"exempt": ()}
    model = make(4, state_collection=OWG, **exempt)
    with pytest.warns(UserWarning, match=r"Kauldron.*omit state_collection") as caught:
        variables = kept_after(model, [1, 3])
    assert {warning.filename for warning in caught} == {__file__}
    history = histories_in(variables[OWG])["DotGeneral_0"]["lhs"]["amax_history"]
    np.testing.assert_array_equal(history, np.zeros(16))

    # The message's advice: the default, or for a loop that replaces the collection a filter.
    fp8 = kept_after(make(4, **exempt), [1, 3])["fp8"]["DotGeneral_0"]
    np.testing.assert_array_equal(fp8["lhs"]["amax_history"][:3], [3 * AMAX, AMAX, 0])
    model.apply(variables, X, mutable=flax.core.DenyList(OWG))


def test_collections_that_are_refused():
    with pytest.raises(ValueError, match="state_collection must be 'fp8' or '_overwrite"):
        jfp8.Dense(4, state_collection="fp9").init(KEY, X)
    with pytest.raises(ValueError, match="got 'fp9'"):
        jfp8.convert(nn.Dense(4), state_collection="fp9")
    with pytest.raises(ValueError, match="is for Linen models.*Fp8State"):
        jfp8.convert(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), state_collection=OWG)
    with pytest.raises(ValueError, match="state_collection='fp8', or use flax.training"):
        jfp8.TrainState.create(apply_fn=LAYER.apply, variables=LAYER.init(KEY, X), tx=TX)


def test_the_state_of_another_recipe():
    shorter = jfp8.Dense(4, recipe=DelayedScaling(amax_history_len=4), state_collection=OWG)
    with pytest.raises(ValueError, match=r"has shape \(7638,\); \(6522,\) is needed"):
        shorter.apply(LAYER.init(KEY, X), X)
    stateless = jfp8.Dense(4, recipe="current", state_collection=OWG)
    with pytest.raises(ValueError, match="keeps no state, but a state was given"):
        stateless.apply(LAYER.init(KEY, X), X)


def test_histories_in_something_else():
    flax_layer = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    with pytest.raises(ValueError, match="no state of a layer of jfp8.*from_flax_fp8_ops"):
        histories_in(jax.eval_shape(flax_layer.init, KEY, X)[OWG])


@pytest.mark.slow
def test_checkpoints_move_between_the_collections():
    variables, plain = LAYER.init(KEY, X), nn.Dense(4).init(KEY, X)
    kept = jfp8.Dense(4).init(KEY, X)
    trained = {**variables, OWG: gradient_of(1.0)}
    assert_same(jfp8.checkpoint.upgrade(trained, variables), trained)
    fp8 = jfp8.checkpoint.upgrade(trained, kept)["fp8"]
    assert_same(fp8, histories_in(trained[OWG]))
    for before in (plain, kept):
        with pytest.warns(jfp8.checkpoint.CheckpointChange):
            started = jfp8.checkpoint.upgrade(before, variables)
        assert_same(started, {**variables, "params": before["params"]})
    assert_same(jfp8.checkpoint.downgrade(trained), {"params": trained["params"]})
