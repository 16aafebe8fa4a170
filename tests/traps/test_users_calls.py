"""Calls that people write, and that ended in an error of another library or were silently wrong."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from support.arrays import assert_same, normal, relative_error

X, Y = normal((8, 16), 1), normal((8, 4), 2)


def state_of(model, tx, x=X) -> jfp8.TrainState:
    variables = model.init(jax.random.key(0), x)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def other_opt_state(state, tx) -> jfp8.TrainState:
    _, grads = jfp8.value_and_grad(loss_of(LINEN))(state, X, Y)
    return state.replace(opt_state=tx.init(state.params)).apply_gradients(grads)


def loss_of(model):
    return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)


@pytest.mark.parametrize(
    "tx",
    [
        optax.polyak_sgd(),
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=1)),
        jfp8.skip_on_overflow(optax.polyak_sgd()),
    ],
    ids=["polyak", "plateau", "inside skip_on_overflow"],
)
def test_optimizers_that_want_the_loss(tx):
    """The oracle is JAX's and Optax's own loop of the same model in f32."""
    model = nn.Dense(4)
    state, loss_fn = state_of(model, tx), loss_of(model)

    def step(state, _):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, X, Y)
        return state.apply_gradients(grads, value=loss), loss

    def plain_step(carry, _):
        params, opt_state = carry
        differentiate = jax.value_and_grad(lambda params: loss_fn({"params": params}, X, Y))
        loss, grads = differentiate(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), loss

    after, losses = jax.lax.scan(step, state, length=6)
    wanted, wanted_losses = jax.lax.scan(plain_step, (state.params, state.opt_state), length=6)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for found, expected in zip(jax.tree.leaves(after.params), jax.tree.leaves(wanted[0])):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_extra_arguments_with_a_loss_scale_and_histories():
    """The loss is passed on as it is, unscaled, and a step that is skipped stays skipped."""
    model = jfp8.Dense(4, recipe="delayed")
    taken = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros(()), lambda updates, state, params, *, value: (updates, value)
    )
    state = state_of(model, optax.chain(jfp8.loss_scale(init_scale=8.0), taken, optax.sgd(0.1)))
    loss_fn = loss_of(model)

    @jax.jit
    def step(state, x):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x, Y)
        return state.apply_gradients(grads, value=loss), loss

    state, loss = step(state, X)
    assert state.opt_state[1] == loss > 0
    assert step(state, X * np.inf)[0].opt_state[1] == loss


def test_a_functional_loop_of_one_product():
    """The loop that docstrings suggest has the histories of `TrainState`, bit for bit."""
    model = jfp8.Dense(4, use_bias=False, recipe="delayed")
    state, loss_fn = state_of(model, optax.sgd(0.1)), loss_of(model)

    def step(state, _):
        _, grads = jfp8.value_and_grad(loss_fn)(state, X, Y)
        return state.apply_gradients(grads), None

    recipe, contracting = jfp8.recipes.get("delayed"), (((1,), (0,)), ((), ()))

    def loss_of_product(kernel, sink, history):
        y = jfp8.scaled_dot_general(X, kernel, contracting, recipe=recipe, state=history, sink=sink)
        return jnp.mean((y - Y) ** 2)

    def functional_step(carry, _):
        kernel, history = carry
        differentiate = jax.grad(loss_of_product, argnums=(0, 1))
        gradient, cotangent = differentiate(kernel, jfp8.scaling.init_sink(), history)
        return (kernel - 0.1 * gradient, jfp8.advance(history, cotangent)), None

    start = (state.params["kernel"], recipe.init_state())
    (kernel, history), _ = jax.lax.scan(functional_step, start, length=6)
    after, _ = jax.lax.scan(step, state, length=6)
    with_check = after.fp8["DotGeneral_0"]
    assert_same(history, {role: with_check[role] for role in history})
    assert np.count_nonzero(history["grad"]["amax_history"]) == 6
    np.testing.assert_allclose(kernel, after.params["kernel"], rtol=1e-5, atol=1e-7)


def test_metrics_without_has_aux_are_told():
    """They were taken for collections, and dropped."""
    model = jfp8.Dense(4, recipe="delayed")
    state, loss_fn = state_of(model, optax.sgd(0.1)), loss_of(model)
    with_metrics = lambda *args: (loss_fn(*args), {"accuracy": jnp.ones(())})
    with pytest.raises(ValueError, match=r"\['accuracy'\] in mutated.*has_aux=True"):
        jax.jit(jfp8.value_and_grad(with_metrics))(state, X, Y)

    corrected = lambda *args: (loss_fn(*args), {}, {"accuracy": jnp.ones(())})
    (_, aux), _ = jfp8.value_and_grad(corrected, has_aux=True)(state, X, Y)
    assert aux["accuracy"] == 1


def test_collections_that_models_sow_are_no_metrics():
    model = jfp8.Dense(4, recipe="delayed")
    state = state_of(model, optax.sgd(0.1))

    def loss_fn(variables, x):
        y, mutated = model.apply(
            variables, x, mutable=["fp8", "intermediates"], capture_intermediates=True
        )
        return jnp.mean(y**2), mutated

    _, grads = jfp8.value_and_grad(loss_fn)(state, X)
    assert grads.collections == {}


def sharded(mesh, *arrays):
    return jax.device_put(arrays, NamedSharding(mesh, P("data")))


@pytest.mark.representative(1)
def test_micro_batches_are_spread_over_all_devices(mesh_of, compiled_here):
    """Each part lay on 2 of 8 devices, so that every device did 4 times the work."""
    model = jfp8.Dense(64, recipe="delayed")
    state = state_of(model, optax.sgd(0.1), normal((8, 64)))
    loss_fn = loss_of(model)
    mesh = mesh_of((8,), ("data",))
    x, y = sharded(mesh, normal((8192, 64)), normal((8192, 64), 1))
    flops, results = [], []
    with jax.set_mesh(mesh):
        state = jax.device_put(state, NamedSharding(mesh, P()))
        for parts in (1, 4):
            compute = jax.jit(jfp8.value_and_grad(loss_fn, micro_batches=parts))
            program = compute.lower(state, x, y).compile()
            flops.append(parts * program.cost_analysis()["flops"])  # a loop's body counts once
            results.append(program(state, x, y))
    assert flops[1] < 1.3 * flops[0]
    (loss, grads), (loss_of_parts, grads_of_parts) = results
    np.testing.assert_allclose(loss_of_parts, loss, rtol=1e-3)
    assert relative_error(grads_of_parts.params, grads.params) < 0.05


def test_micro_batches_of_sharded_parameters(mesh_of):
    """The oracle is a plain layer, on one device, without micro-batches."""
    model = nn.Dense(4)
    state, loss_fn = state_of(model, optax.sgd(0.1)), loss_of(model)
    x, y = normal((32, 16)), normal((32, 4), 1)
    wanted = jax.grad(loss_fn)({"params": state.params}, x, y)["params"]
    mesh = mesh_of((8,), ("data",))
    x, y = sharded(mesh, x, y)
    rows = lambda leaf: P("data") if leaf.shape == (16, 4) else P()
    place = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, rows(leaf)))
    with jax.set_mesh(mesh):
        state = jax.tree.map(place, state)
        _, grads = jax.jit(jfp8.value_and_grad(loss_fn, micro_batches=4))(state, x, y)
    assert relative_error(grads.params, wanted) < 1e-5


def test_micro_batches_below_the_devices_over_explicit_axes_are_told():
    model = nn.Dense(4)
    state = state_of(model, optax.sgd(0.1))
    mesh = jax.make_mesh((8,), ("data",))
    x, y = sharded(mesh, normal((16, 16)), normal((16, 4)))
    compute = jax.jit(jfp8.value_and_grad(loss_of(model), micro_batches=4))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="a batch of a multiple of 32"):
        compute(state, x, y)


def weighted_loss(variables, batch, class_weights=None):
    weights = batch["weights"] if class_weights is None else class_weights
    y = nn.Dense(4).apply(variables, batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(y, batch["labels"])
    return jnp.mean(loss * weights[batch["labels"]])


WEIGHTS = jnp.arange(1.0, 9.0)
LABELED = {"x": X, "labels": jnp.arange(8) % 4, "weights": WEIGHTS}
WHOLE = {"weights": None}


@pytest.mark.parametrize("where", ["key", "argument", "keyword"])
@pytest.mark.representative(1)
def test_arrays_without_a_batch_axis_are_named(where):
    """Class weights whose length fits were cut like a batch, and look-ups in the parts clamped."""
    state = state_of(nn.Dense(4), optax.sgd(0.1))
    batch = {"x": X, "labels": LABELED["labels"]}
    args, named, axes = {
        "key": ((LABELED,), {}, WHOLE),
        "argument": ((batch, WEIGHTS), {}, {"class_weights": None}),
        "keyword": ((batch,), {"class_weights": WEIGHTS}, {"class_weights": None}),
    }[where]
    loss, grads = jfp8.value_and_grad(weighted_loss)(state, *args, **named)
    options = {"micro_batches": 4, "batch_axes": axes}
    found, of_parts = jax.jit(jfp8.value_and_grad(weighted_loss, **options))(state, *args, **named)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert relative_error(of_parts.params, grads.params) < 1e-6


def test_scalars_are_the_same_in_all_micro_batches():
    """They were refused here, and taken by `data_parallel`."""
    state = state_of(nn.Dense(4), optax.sgd(0.1))
    loss_fn = lambda variables, x, factor: factor * jnp.mean(nn.Dense(4).apply(variables, x) ** 2)
    loss, _ = jfp8.value_and_grad(loss_fn)(state, X, 3.0)
    of_parts, _ = jfp8.value_and_grad(loss_fn, micro_batches=4)(state, X, 3.0)
    np.testing.assert_allclose(of_parts, loss, rtol=1e-6)


def test_data_parallel_leaves_named_arrays_whole():
    state = state_of(nn.Dense(4), optax.sgd(0.1))
    loss, _ = jfp8.value_and_grad(weighted_loss)(state, LABELED)
    mesh = Mesh(jax.devices()[:4], ("data",))
    inner = jfp8.value_and_grad(weighted_loss, micro_batches=2, batch_axes=WHOLE)
    compute = jfp8.data_parallel(inner, mesh=mesh, batch_axes=WHOLE)
    np.testing.assert_allclose(jax.jit(compute)(state, LABELED)[0], loss, rtol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, **options: jfp8.value_and_grad(f, micro_batches=2, **options),
        lambda f, **options: jfp8.data_parallel(
            jfp8.value_and_grad(f), mesh=Mesh(jax.devices()[:2], ("data",)), **options
        ),
    ],
    ids=["value_and_grad", "data_parallel"],
)
@pytest.mark.representative(1)
def test_leading_axes_that_differ_are_told(call):
    """Four class weights beside a batch of eight can be no batch."""
    state = state_of(nn.Dense(4), optax.sgd(0.1))
    batch = LABELED | {"weights": WEIGHTS[:4]}
    with pytest.raises(ValueError, match=r"labels' has 8, '.*weights' has 4") as caught:
        call(weighted_loss)(state, batch)
    assert "batch_axes={'weights': None})" in str(caught.value)
    call(weighted_loss, batch_axes=WHOLE)(state, batch)
    with pytest.raises(ValueError, match="has {'weigths': None}, but takes None for names of"):
        call(weighted_loss, batch_axes={"weigths": None})(state, batch)
    with pytest.raises(ValueError, match="has {'x': 1}, but takes None"):
        call(weighted_loss, batch_axes={"x": 1})(state, batch)


def nnx_step(model, optimizer, x, y):
    loss_fn = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
    loss, grads = jfp8.nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.slow
def test_nnx_layers_with_x64_enabled(recipe):
    """Histories were f64, and the first step failed. Now it is the step without x64."""

    def run():
        model = jfp8.nnx.Linear(16, 4, recipe=recipe, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        model.kernel[...] = jnp.asarray(normal((16, 4)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(3):
            nnx.jit(nnx_step)(model, optimizer, jnp.asarray(X), jnp.asarray(Y))
        return jax.tree.leaves(nnx.state(model))

    wanted = run()
    with jax.enable_x64(True):
        found = run()
    assert_same(found, wanted)


def histories_of(layer) -> dict:
    return layer.dot_general.histories()


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.slow
def test_gradients_of_each_example_by_nnx_vmap(jit):
    """The histories of the shared model get the largest amax of all examples."""
    models = [jfp8.nnx.Linear(16, 4, recipe="delayed", rngs=nnx.Rngs(0)) for _ in range(9)]
    loss_fn = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
    differentiate = jfp8.nnx.value_and_grad(loss_fn)
    each, alone = nnx.vmap(differentiate, in_axes=(None, 0, 0)), nnx.jit(differentiate)
    shared, *singles = models
    for _ in range(2):  # the second time with histories
        losses, grads = (nnx.jit(each) if jit else each)(shared, X[:, None], Y[:, None])
        wanted = [alone(single, X[i : i + 1], Y[i : i + 1]) for i, single in enumerate(singles)]
        np.testing.assert_allclose(losses, [loss for loss, _ in wanted], rtol=1e-5)
        kernels = np.stack([np.asarray(grad["kernel"][...]) for _, grad in wanted])
        np.testing.assert_allclose(grads["kernel"][...], kernels, rtol=1e-4, atol=1e-6)
        largest = jax.tree.map(lambda *h: np.max(h, axis=0), *map(histories_of, singles))
        for found, expected in zip(
            jax.tree.leaves(histories_of(shared)), jax.tree.leaves(largest), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        for single in singles:
            single.dot_general.set_histories(histories_of(shared))


@pytest.mark.slow
def test_an_example_that_is_not_finite_leaves_histories_alone():
    model = jfp8.nnx.Linear(16, 4, recipe="delayed", rngs=nnx.Rngs(0))
    each = nnx.vmap(
        jfp8.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)), in_axes=(None, 0)
    )
    each(model, X[:, None])
    before = histories_of(model)
    each(model, np.where(np.arange(8) == 3, np.nan, X.T).T[:, None])
    assert_same(histories_of(model), before)


@pytest.mark.slow
def test_models_of_their_own_under_nnx_vmap_keep_histories_of_their_own():
    make = nnx.vmap(lambda rngs: jfp8.nnx.Linear(16, 4, recipe="delayed", rngs=rngs))
    models = make(nnx.Rngs(0).split(8))
    each = nnx.vmap(jfp8.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)))
    each(models, X[:, None])
    found = histories_of(models)["lhs"][:, 0]
    np.testing.assert_allclose(found, np.max(np.abs(X), axis=1), rtol=1e-6)


LINEN = jfp8.Dense(4, recipe="delayed")


WRONG_CALLS = {
    "NNX to create": (
        lambda: jfp8.TrainState.create(
            apply_fn=None, variables=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx=optax.sgd(0.1)
        ),
        r"TypeError.*an NNX Linear.*nnx.Optimizer\(model, tx, wrt=nnx.Param\)",
    ),
    "split to create": (
        lambda: jfp8.TrainState.create(
            apply_fn=None, variables=nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), tx=None
        ),
        r"TypeError.*got an NNX GraphDef.*nnx\.Optimizer\(model, tx, wrt=nnx\.Param\)",
    ),
    "state to nnx": (
        lambda: jfp8.nnx.value_and_grad(lambda state, x: 1.0)(state_of(LINEN, optax.sgd(1)), X),
        r"TypeError.*Linen TrainState. Use jfp8.value_and_grad\(loss_fn\)\(state, batch\)",
    ),
    "Linen to nnx": (
        lambda: jfp8.nnx.value_and_grad(lambda model, x: 1.0)(LINEN, X),
        "TypeError.*a Linen Dense",
    ),
    "variables to nnx": (
        lambda: jfp8.nnx.value_and_grad(loss_of(LINEN))({"params": {}, "fp8": {}}, X, Y),
        r"TypeError.*tree of variables\. Use jfp8\.value_and_grad\(loss_fn\)\(state, batch\)",
    ),
    "empty": (
        lambda: jfp8.value_and_grad(loss_of(LINEN))(state_of(LINEN, optax.sgd(1)), X[:0], y=Y[:0]),
        "ValueError.*The batch has no examples",
    ),
    "empty NNX": (
        lambda: jfp8.nnx.value_and_grad(lambda model, x: jnp.mean(model(x)))(
            jfp8.nnx.Linear(16, 4, rngs=nnx.Rngs(0)), X[:0]
        ),
        "ValueError.*The batch has no examples",
    ),
    "Linear": (lambda: jfp8.Linear(16, 4), r"AttributeError.*jfp8\.nnx\.Linear.*jfp8\.Dense"),
    "format": (lambda: jfp8.E4M3, r"AttributeError.*'E4M3'\. Did you mean jfp8\.E4M3FN\?"),
    "Dense of NNX": (
        lambda: jfp8.nnx.Dense,
        r"AttributeError.*jfp8\.nnx.*Take Linear\.",
    ),
    "recipe elsewhere": (lambda: jfp8.Hybrid, r"AttributeError.*Take jfp8\.recipes\.Hybrid\."),
    "recipe": (
        lambda: jfp8.recipes.MXFP8Scaling,
        r"Did you mean jfp8\.recipes\.MXFP8BlockScaling\?",
    ),
    "misspelled recipe": (lambda: jfp8.recipes.get("delayd"), "Did you mean .*delayed.*Recipes: "),
    "tx not called": (
        lambda: state_of(LINEN, optax.adam),
        r"TypeError.*as optax\.adam\(1e-3\), got <function adam",
    ),
    "loss_scale not called": (
        lambda: state_of(LINEN, optax.chain(jfp8.loss_scale, optax.adam(1e-3))),
        r"TypeError.*function loss_scale\. Call it: jfp8\.loss_scale\(\)",
    ),
    "state of another optimizer": (
        lambda: other_opt_state(state_of(LINEN, optax.adam(1e-3)), optax.sgd(0.1)),
        r"AttributeError.*another optimizer: it has EmptyState, EmptyState, and this one ScaleByAd",
    ),
    "with_model alone": (
        lambda: state_of(LINEN, optax.adam(1e-3)).with_model(LINEN),
        r"(?s)TypeError.*state\.with_model\(model, x\)",
    ),
    "a state as variables": (
        lambda: LINEN.apply(state_of(LINEN, optax.adam(1e-3)), X),
        r"TypeError.*model\.apply\(state\.variables, x\)",
    ),
    "loss in data_parallel": (
        lambda: jfp8.data_parallel(
            loss_of(LINEN), mesh=jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        )(state_of(LINEN, optax.adam(1e-3)), X),
        r"TypeError.*data_parallel\(jfp8\.value_and_grad\(loss_fn\), axis_name\)",
    ),
    "no mesh": (
        lambda: jfp8.data_parallel(jfp8.value_and_grad(loss_of(LINEN)))(None, X),
        r"ValueError.*'data',\), axis_types=\(jax\.sharding\.AxisType\.Auto,",
    ),
    "tx and model": (
        lambda: jfp8.nnx.Optimizer(optax.adam(1), nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        "TypeError.*tx must be an optimizer.*got Linear",
    ),
    "gradients alone": (
        lambda: jfp8.nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(1)).update({}),
        r"TypeError.*optimizer\.update\(model, grads\)",
    ),
    "state first": (lambda: jfp8.checkpoint.save({}, "x"), r"TypeError.*save\(path, tree\).*dict"),
    "NNX state": (
        lambda: jfp8.report(model := nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.state(model), X),
        r"TypeError.*jfp8\.report\(model, x\)",
    ),
    "weights of a model": (
        lambda: jfp8.quantize_params(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        r"TypeError.*nnx\.state\(model, nnx\.Param\)",
    ),
    "fault": (
        lambda: jfp8.debug.advice([]).of("outlier"),
        "ValueError.*no fault 'outlier'. Faults: .*outliers",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_are_told_the_right_one(name):
    call, words = WRONG_CALLS[name]
    with pytest.raises((AttributeError, TypeError, ValueError)) as error:
        call()
    assert re.search(words, " ".join([repr(error.value), *getattr(error.value, "__notes__", [])]))


def test_a_recipe_may_be_assigned_to_a_matmul_by_its_name():
    """A name failed in the next call; another recipe kept the histories of the first."""
    layer = jfp8.nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    for recipe in ("mxfp8", jfp8.recipes.DelayedScaling(amax_history_len=4), "current", "delayed"):
        layer.dot_general.recipe = recipe
        wanted = jfp8.nnx.Linear(16, 4, recipe=recipe, rngs=nnx.Rngs(0))
        assert nnx.graphdef(layer.dot_general) == nnx.graphdef(wanted.dot_general)
        assert_same(layer(X), wanted(X))
    with pytest.raises(ValueError, match="no recipe called 'mxfp'. Did you mean 'mxfp8'"):
        layer.dot_general.recipe = "mxfp"
    assert layer.dot_general.recipe == jfp8.recipes.DelayedScaling()


def test_arguments_that_are_no_arrays_are_passed_on():
    """Such as names and functions, in a loop without jit, and NNX's random keys."""
    model = nn.Dense(4)
    state = state_of(model, optax.sgd(0.1))
    loss_fn = lambda variables, x, name, activation: jnp.mean(activation(model.apply(variables, x)))
    for parts in (1, 4):
        compute = jfp8.value_and_grad(loss_fn, micro_batches=parts)
        assert compute(state, X, "train", activation=nn.relu)[0] > 0
    layer, rngs = nnx.Linear(16, 4, rngs=nnx.Rngs(0)), nnx.Rngs(1)
    keyed = lambda layer, x, rngs, name: jnp.mean(layer(x)) + jax.random.uniform(rngs.params())
    assert np.isfinite(jfp8.nnx.value_and_grad(keyed)(layer, X, rngs, "train")[0])


def test_an_empty_array_beside_a_batch_is_none():
    """A graph without edges, say."""
    model = nn.Dense(4)
    state = state_of(model, optax.sgd(0.1))
    loss_fn = lambda variables, x, edges: jnp.mean(model.apply(variables, x)) + jnp.sum(edges)
    loss, _ = jfp8.value_and_grad(loss_fn)(state, X, np.zeros((0, 2), np.float32))
    assert np.isfinite(loss)


def test_an_nnx_layer_inside_of_a_linen_model_is_told():
    """`init` returned no parameters, and nothing was trained."""
    layer = jfp8.nnx.Linear(16, 4, recipe="delayed", rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"Linen module Sequential.*nnx\.bridge\.to_linen"):
        nn.Sequential([layer, nn.relu]).init(jax.random.key(0), X)
    bridged = nn.Sequential([nnx.bridge.to_linen(jfp8.nnx.Linear, 16, 4), nn.relu])
    assert "params" in bridged.init(jax.random.key(0), X)


def test_a_bridge_that_drops_what_its_nnx_layer_records_is_told():
    """Histories stayed empty, and a `TrainState` does not know them."""
    model = nnx.bridge.to_linen(jfp8.nnx.Linear, 16, 4)
    state = state_of(model, optax.sgd(0.1))
    with pytest.warns(UserWarning, match=r"to_linen records amaxes.*mutable=\['Fp8State'\]\)"):
        jfp8.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x)))(state, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(model.apply, state.variables, X)  # no training
        # The warning's advice.
        apply = lambda v, x: model.apply(v, x, mutable=["Fp8State"])
        loss_fn = lambda v, x: (jnp.mean((out := apply(v, x))[0]), out[1])
        _, grads = jfp8.value_and_grad(loss_fn)(state, X)
    histories = state.apply_gradients(grads).collections["Fp8State"]["dot_general"]["fp8"]
    np.testing.assert_allclose(histories["lhs"][:2], [np.max(np.abs(X)), 0])
