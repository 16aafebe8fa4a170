"""NNX state: what calls and steps record, under every transformation; and the traps of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.nnx import Fp8Sink, Fp8State
from support.amaxes import E4M3, E5M2, amax, fake_quantize
from support.arrays import assert_same
from support.arrays import keyed_normal as normal
from support.recorded import histories

D = 8


def linear(**options):
    return jfp8.nnx.Linear(D, D, use_bias=False, **options, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = jfp8.nnx.Linear(D, 2 * D, rngs=rngs)
        self.down = jfp8.nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


def loss_of(model, x):
    return (model(x) ** 2).mean()


step = nnx.jit(jfp8.nnx.value_and_grad(loss_of))
flax_step = nnx.jit(nnx.value_and_grad(loss_of))
call = nnx.jit(lambda model, x: model(x))


def newest(product, n=3):
    return {role: [float(a) for a in h[:n]] for role, h in product.histories().items()}


def test_modes_make_no_difference():
    """They are about dropout and running statistics: only a gradient records."""
    layer, x = linear(), normal(1, (4, D))
    model = nnx.Sequential(layer)
    for change in (model.eval, model.train, lambda: nnx.view(layer, use_running_average=True)):
        change()
        call(model, x)
        assert newest(layer.dot_general)["lhs"][0] == 0.0
    model.eval()
    step(model, x)
    assert newest(layer.dot_general)["lhs"][:2] == [amax(x), 0.0]


@pytest.mark.slow
def test_signature_of_value_and_grad():
    model, x = Block(nnx.Rngs(0)), normal(1, (4, D))
    fresh = lambda: nnx.clone(model)
    loss, grads = step(fresh(), x)

    with_aux = lambda model, x: (loss_of(model, x), {"y": model(x)})
    (found, aux), found_grads = nnx.jit(jfp8.nnx.value_and_grad(with_aux, has_aux=True))(
        fresh(), x=x
    )
    assert aux["y"].shape == (4, D)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert jax.tree.structure(found_grads) == jax.tree.structure(grads)

    @jfp8.nnx.value_and_grad(argnums=(1, nnx.DiffState(0, nnx.PathContains("up"))))
    def both(model, x):
        """Documented."""
        return loss_of(model, x)

    assert both.__doc__ == "Documented."
    _, (dx, up) = nnx.jit(both)(fresh(), x)
    wanted_dx, wanted_up = nnx.jit(
        nnx.grad(loss_of, argnums=(1, nnx.DiffState(0, nnx.PathContains("up"))))
    )(fresh(), x)
    np.testing.assert_allclose(dx, wanted_dx, rtol=1e-5, atol=1e-7)
    # A filter by path takes in the histories; here they do not count as parameters.
    assert jax.tree.structure(up) == jax.tree.structure(nnx.filter_state(wanted_up, nnx.Param))
    assert jax.tree.structure(up) != jax.tree.structure(wanted_up)

    by_name = jfp8.nnx.value_and_grad(lambda model, *, x: loss_of(model, x))
    with pytest.raises(TypeError, match=r"\['x'\] by position"):
        by_name(model, x=x)


@pytest.mark.slow
def test_models_inside_of_containers():
    models, x = {"a": linear(), "b": [linear()]}, normal(1, (4, D))
    f = lambda models, x: (models["b"][0](models["a"](x)) ** 2).mean()
    _, grads = nnx.jit(jfp8.nnx.value_and_grad(f))(models, x)
    _, wanted = nnx.jit(nnx.value_and_grad(f))({"a": linear(), "b": [linear()]}, x)
    assert_same(grads, wanted)
    for layer in (models["a"], models["b"][0]):
        assert newest(layer.dot_general)["grad"][0] > 0


# Transformations. Each product sees x with an amax that is known.


def test_trap_vmap_over_a_batch_takes_the_maximum():
    """Not the sum of amaxes, and no complaint that the state became batched."""
    layer, x = linear(), jnp.stack([normal(1, (4, D)), 3 * normal(2, (4, D))])
    x = x.at[0, 0, 0].set(jnp.inf)  # one member overflows: the others still count
    batched = lambda layer, x: nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, x)
    nnx.jit(batched)(layer, x)
    assert newest(layer.dot_general)["lhs"][0] == 0
    nnx.jit(nnx.grad(lambda layer, x: batched(layer, x).sum()))(layer, x)
    assert newest(layer.dot_general)["lhs"][:2] == [amax(x[1]), 0]

    x = x.at[0, 0, 0].set(0.0)
    layer = linear()
    nnx.jit(jfp8.nnx.value_and_grad(lambda layer, x: (batched(layer, x) ** 2).mean()))(layer, x)
    assert amax(x) <= newest(layer.dot_general)["lhs"][0] <= 9 / 8 * amax(x)


@pytest.mark.slow
def test_functional_training_with_split_and_merge():
    x = normal(1, (4, D))
    graphdef, param, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)

    @jax.jit
    def train_step(param, rest, x):
        def f(param):
            model = nnx.merge(graphdef, param, rest, copy=True)
            return loss_of(model, x), nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(f, has_aux=True)(param)
        return loss, grads, rest

    reference = Block(nnx.Rngs(0))
    for _ in range(2):
        loss, grads, rest = train_step(param, rest, x)
        wanted_loss, wanted = flax_step(reference, x)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    assert_same(histories(nnx.merge(graphdef, param, rest)), histories(reference))


def test_copies_have_histories_of_their_own():
    layer, x = linear(), normal(1, (4, D))
    flax_step(layer, x)
    copy = nnx.clone(layer)
    flax_step(copy, 2 * x)
    assert newest(layer.dot_general)["lhs"][:2] == [amax(x), 0]
    assert newest(copy.dot_general)["lhs"][:2] == [2 * amax(x), amax(x)]


def gradient_of_kernel(x, dy, grad_amax):
    """By fake quantization, with a scale of the gradient for `grad_amax`."""

    return fake_quantize(x, E4M3).T @ fake_quantize(dy, E5M2, grad_amax)


@pytest.mark.slow
def test_trap_stale_scales_in_a_default_loop():
    """``nnx.grad`` knows no sinks, so a history of gradients must not count there: it is stale."""
    layer, x, dy = linear(), normal(1, (16, D)), normal(2, (16, D))
    f = lambda layer, x, dy: (layer(x) * dy).sum()
    nnx.jit(jfp8.nnx.value_and_grad(f))(layer, x, dy)
    assert newest(layer.dot_general)["grad"][0] == pytest.approx(amax(dy), rel=1e-6)

    default = nnx.jit(nnx.grad(f))
    for i in range(20):
        shrinking = dy * 10.0**-i
        grads = default(layer, x, shrinking)
        wanted = gradient_of_kernel(x, shrinking, amax(shrinking))
        error = np.linalg.norm(grads["kernel"].get_value() - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5, i
    # Histories of lhs and rhs record at every gradient.
    assert newest(layer.dot_general)["lhs"] == [amax(x)] * 3
    assert np.all(layer.dot_general.histories()["lhs"] > 0)


@pytest.mark.parametrize("where", ["input", "gradient", "loss"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_trap_nonfinite_amax_never_enters(where, bad):
    layer, x, dy = linear(), normal(1, (4, D)), jnp.ones((4, D))

    @nnx.jit
    @jfp8.nnx.value_and_grad
    def f(layer, x, dy, offset):
        return (layer(x) * dy).sum() + offset

    f(layer, x, dy, 0.0)
    before = histories(layer)
    assert all(h[0] > 0 for h in before.values())
    args = {
        "input": (x.at[1, 2].set(bad), dy, 0.0),
        "gradient": (x, dy.at[1, 2].set(bad), 0.0),
        "loss": (x, dy, bad),
    }[where]
    f(layer, *args)
    assert_same(histories(layer), before)
    f(layer, 2 * x, dy, 0.0)
    assert newest(layer.dot_general)["lhs"][:2] == pytest.approx([2 * amax(x), amax(x)])

    # Without a sink the finite operand counts.
    layer = linear()
    flax_step(layer, x.at[1, 2].set(bad))
    found = newest(layer.dot_general)
    assert found["lhs"] == [0, 0, 0]
    assert found["rhs"][0] == amax(layer.kernel.get_value())


@pytest.mark.parametrize("ratio", [2.0, 0.5, 2.0**-10])
def test_trap_a_changed_loss_scale_does_not_saturate(ratio):
    """Histories of gradients do not depend on the loss scale, so the next step fits at once."""
    layer, x, dy = linear(), normal(1, (16, D)), normal(2, (16, D))
    f = lambda layer, x, dy: (layer(x) * dy).sum()

    @nnx.jit
    def scaled_step(layer, scale):
        return jfp8.nnx.value_and_grad(f, loss_scale=scale)(layer, x, dy)

    loss, grads = scaled_step(layer, 2.0**12)
    assert newest(layer.dot_general)["grad"][0] == pytest.approx(amax(dy), rel=1e-6)
    new_loss, new_grads = scaled_step(layer, ratio * 2.0**12)
    np.testing.assert_array_equal(loss, new_loss)
    old, new = (g["kernel"].get_value() for g in (grads, new_grads))
    np.testing.assert_allclose(new, ratio * old, rtol=1e-5, atol=1e-4 * ratio * amax(old))
    wanted = 2.0**12 * gradient_of_kernel(x, dy, amax(dy))
    assert np.linalg.norm(old - wanted) / np.linalg.norm(wanted) < 1e-5


def test_trap_a_loss_scale_in_nnx_optimizer():
    """A loss that nobody scales is said: the kernel moved by 6e-6 instead of 0.1."""
    # A width of its own, so that no structure of another test plays a part.
    model = jfp8.nnx.Linear(D, 7, rngs=nnx.Rngs(0))
    x, y = normal(1, (4, D)), normal(2, (4, 7))
    f = lambda model: jnp.mean((model(x) - y) ** 2)
    _, tx = jfp8.initialize(
        nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), optax.sgd(1.0), recipe="hybrid"
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(nnx.jit, static_argnames="scaled")
    def step(model, optimizer, scaled):
        scale = jfp8.scale_loss(1.0, optimizer.opt_state) if scaled else None
        _, grads = jfp8.nnx.value_and_grad(f, loss_scale=scale)(model)
        optimizer.update(model, grads)

    with pytest.warns(
        UserWarning, match=r"nothing has(.|\n)*jfp8\.nnx\.value_and_grad\(loss_fn, l"
    ):
        step(model, optimizer, scaled=False)

    before = np.asarray(model.kernel[...])
    step(model, optimizer, scaled=True)
    gradient = 2 / y.size * np.asarray(x).T @ (np.asarray(x) @ before - np.asarray(y))
    moved = before - np.asarray(model.kernel[...])
    assert np.linalg.norm(moved - gradient) < 0.1 * np.linalg.norm(gradient)  # E4M3, E5M2


@pytest.mark.slow
def test_trap_frozen_layers_cost_no_backward_pass():
    """A sink would force one: only what is trained gets any."""

    class Model(nnx.Module):
        def __init__(self):
            self.frozen, self.head = linear(), linear()

        def __call__(self, x):
            return self.head(self.frozen(x))

    model, x = Model(), normal(1, (4, D))
    wrt = nnx.DiffState(0, nnx.PathContains("head"))

    def products(differentiate):
        graphdef, state = nnx.split(model)
        run = lambda state, x: differentiate(loss_of, argnums=wrt)(nnx.merge(graphdef, state), x)
        lowered = jax.jit(run).lower(state, x)
        return lowered.compile().as_text().count(" dot(")

    assert products(jfp8.nnx.value_and_grad) == products(nnx.value_and_grad) == 3
    nnx.jit(jfp8.nnx.value_and_grad(loss_of, argnums=wrt))(model, x)
    assert newest(model.head.dot_general)["grad"][0] > 0
    nothing = {"lhs": [0, 0, 0], "rhs": [0, 0, 0], "grad": [0, 0, 0]}
    assert newest(model.frozen.dot_general) == nothing
    # A layer that the gradient passes through records.
    wrt = nnx.DiffState(0, nnx.PathContains("frozen"))
    nnx.jit(jfp8.nnx.value_and_grad(loss_of, argnums=wrt))(model, x)
    kernel = amax(model.head.kernel.get_value())
    assert newest(model.head.dot_general, 1)["rhs"] == [kernel]
    assert newest(model.head.dot_general, 2)["rhs"] == [kernel, kernel]


@pytest.mark.slow
def test_trap_merge_needs_a_copy_inside_of_grad():
    graphdef, param, rest = nnx.split(linear(), nnx.Param, ...)
    x = normal(1, (4, D))
    f = lambda param, copy: loss_of(nnx.merge(graphdef, param, rest, copy=copy), x)
    assert jax.grad(f)(param, True)
    with pytest.warns(UserWarning, match=r"histories do not change.*copy=True"):
        jax.grad(f)(param, False)
    jax.jit(f, static_argnums=1)(param, False)  # an evaluation has nothing to record


def test_an_evaluation_by_transformations_of_jax():
    """A model from outside, whose variables cannot be written there, need not be."""
    layer, x = linear(), normal(1, (4, D))
    for transformed in (
        jax.vmap(layer),
        jax.jit(layer),
        jax.jit(jax.grad(lambda x: layer(x).sum())),
    ):
        assert transformed(x).shape == (4, D)
    assert newest(layer.dot_general)["lhs"][0] == 0


@pytest.mark.slow
def test_trap_stacked_state_that_is_not_lifted():
    stacked = nnx.vmap(Block)
    x, axes = normal(1, (4, D)), nnx.StateAxes({nnx.Param: 0, ...: None})
    f = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
    with pytest.raises(ValueError, match=r"stacked along \(3,\).*nnx.StateAxes"):
        f(x, stacked(nnx.Rngs(0).split(3)))
    both = nnx.StateAxes({(nnx.Param, Fp8State, Fp8Sink): 0, ...: None})
    f = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, both), out_axes=nnx.Carry)
    blocks = stacked(nnx.Rngs(0).split(3))
    nnx.jit(jfp8.nnx.value_and_grad(lambda blocks, x: f(x, blocks).sum()))(blocks, x)
    assert np.all(histories(blocks)["up", "dot_general", "grad"][:, 0] > 0)


@pytest.mark.slow
def test_trap_a_history_of_another_length():
    layer = linear()
    with jfp8.autocast(jfp8.recipes.DelayedScaling(amax_history_len=4)):
        with pytest.raises(ValueError, match="another recipe"):
            layer(jnp.ones((1, D)))
        short = linear()
    assert short.dot_general.histories()["lhs"].shape == (4,)
