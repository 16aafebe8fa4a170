"""Weights are quantized once for all micro-batches: same bits as without, and less in the loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import recipes
from jfp8.training.hoist import split
from support.arrays import assert_same

KEY = jax.random.key(0)
IN, WIDTH = 24, 40  # no other array has as many elements as a weight
MICRO_BATCHES = 4
X = jax.random.normal(jax.random.key(1), (16, IN))


@pytest.fixture
def never_split(monkeypatch):
    """What makes `value_and_grad` quantize weights in each turn."""
    without = lambda function, known, _: ((), lambda kept, varying: function(known, varying))
    return lambda: monkeypatch.setattr(jfp8.training.micro_batches, "split", without)


class Block(nn.Module):
    recipe: recipes.Recipe

    @nn.compact
    def __call__(self, x, _=None):
        dense = lambda n: jfp8.Dense(n, recipe=self.recipe, use_bias=False)
        return nn.tanh(dense(IN)(dense(WIDTH)(x))), None


class Model(nn.Module):
    recipe: recipes.Recipe
    lift: str = "plain"

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if "remat" in self.lift else Block
        if "scan" in self.lift:
            axes = {"params": 0, "fp8": 0, "fp8_sink": 0}
            block = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return block(self.recipe)(x, None)[0]


def state_of(model) -> jfp8.TrainState:
    variables = jax.jit(model.init)(KEY, X)
    return jfp8.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1, momentum=0.9)
    )


def step_of(model):
    def loss_fn(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2), {}

    def step(state, x):
        loss, grads = jfp8.value_and_grad(loss_fn, micro_batches=MICRO_BATCHES)(state, x)
        return state.apply_gradients(grads), loss, grads.params

    return jax.jit(step)


def quantized_in_loops(step, *args) -> list[int]:
    """Return the sizes of arrays that are rounded to 8 bits inside a loop over micro-batches."""
    found = []

    def visit(jaxpr, inside):
        for eqn in jaxpr.eqns:
            if inside and eqn.primitive.name == "convert_element_type":
                if eqn.params["new_dtype"] == jnp.uint8:
                    found.append(eqn.outvars[0].aval.size)
            loop = eqn.primitive.name == "scan" and eqn.params["length"] == MICRO_BATCHES
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(value, "eqns"):
                    visit(getattr(value, "jaxpr", value), inside or loop)

    visit(jax.make_jaxpr(step)(*args).jaxpr, False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lift"),
    [("delayed", "scan remat"), ("current", "plain"), ("mxfp8", "scan"), ("nvfp4", "plain")],
)
def test_the_same_step_bit_for_bit_with_no_weight_quantized_inside_of_the_loop(
    name, lift, never_split
):
    model = Model(recipes.get(name), lift)
    state = state_of(model)
    result, in_loops = step_of(model)(state, X), quantized_in_loops(step_of(model), state, X)
    never_split()
    expected, without = step_of(model)(state, X), quantized_in_loops(step_of(model), state, X)
    assert IN * WIDTH in without
    # NVFP4 rounds weights once more for each gradient, with other random numbers.
    assert (IN * WIDTH in in_loops) == (name == "nvfp4")
    assert_same(jax.tree.leaves(result), jax.tree.leaves(expected))
    assert float(result[1]) > 0
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(result[2]))
    for path, leaf in jax.tree.leaves_with_path(result[0].fp8):
        if "amax_history" in str(path):
            assert np.all(np.asarray(leaf)[..., 0] > 0)


def test_gradients_of_bf16_parameters_are_summed_in_f32():
    """Gradients of 256, 1, 1, ...: a sum in bf16 would stay at 256."""
    n = 64

    class Line(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (1, 1), jnp.bfloat16)
            return x * w

    model = Line()
    variables = model.init(KEY, jnp.ones((1, 1), jnp.bfloat16))
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))
    x = jnp.ones((n, 1), jnp.bfloat16).at[0].set(256.0)
    loss_fn = lambda v, x: (model.apply(v, x).sum(), {})
    grads = jax.jit(lambda s, x: jfp8.value_and_grad(loss_fn, micro_batches=n)(s, x)[1])(state, x)
    (grad,) = jax.tree.leaves(grads.params)
    assert grad.dtype == jnp.float32
    assert grad[0, 0] == (256 + (n - 1)) / n


@pytest.mark.slow
def test_callbacks_in_the_loss_run_in_each_turn():
    seen, model = [], nn.Dense(2)
    state = state_of(model)

    def loss_fn(variables, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return jnp.mean(model.apply(variables, x) ** 2), {}

    step = jax.jit(lambda s, x: jfp8.value_and_grad(loss_fn, micro_batches=4)(s, x)[0])
    jax.block_until_ready(step(state, X))
    jax.effects_barrier()
    sums = [X[i::4].sum() for i in range(4)]
    np.testing.assert_allclose(sorted(seen), sorted(sums), rtol=1e-5, atol=1e-4)


def quantized(w):
    q = jfp8.quantize(w)
    return q.data, q.scale


def rest_and_kept(function, known, varying):
    kept, rest = split(function, known, varying)
    result, expected = rest(kept, varying), function(known, varying)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        # Compiled apart from the rest, a sine may be off by an ulp.
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2.0**-22
        )
    return result, kept


def test_what_is_kept_is_smaller_than_what_it_is_made_of():
    w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones((4, 8))

    def function(w, x):
        data, scale = quantized(w)
        wide = jnp.sin(w)  # not worth keeping, at the size of w
        return x @ (data.astype(jnp.float32) * scale) + (x @ wide)

    _, kept = rest_and_kept(function, w, x)
    assert sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(kept)) == [
        ("float32", 1),
        ("uint8", 64),
    ]


@pytest.mark.representative(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_loops_over_stacked_weights(reverse):
    w = jax.random.normal(KEY, (3, 8, 8))

    def function(w, x):
        def turn(h, w):
            data, scale = quantized(w)
            return h @ data.astype(jnp.float32) * scale, h.sum()

        return lax.scan(turn, x, w, reverse=reverse)

    _, kept = rest_and_kept(function, w, jnp.ones((4, 8)))
    assert sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(kept)) == [
        ("float32", (3,)),
        ("uint8", (3, 8, 8)),
    ]


def test_a_loop_may_start_from_constants():
    w = jax.random.normal(KEY, (3, 8, 8))

    def function(w, x):
        def turn(total, w):
            data, scale = quantized(w)
            return total + x @ data.astype(jnp.float32) * scale, None

        return lax.scan(turn, jnp.zeros((4, 8)), w)[0]

    _, kept = rest_and_kept(function, w, jnp.ones((4, 8)))
    assert sorted(leaf.shape for leaf in jax.tree.leaves(kept)) == [(3,), (3, 8, 8)]


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_calls(call):
    @call
    def layer(w, x):
        data, scale = quantized(w)
        return jnp.tanh(x @ data.astype(jnp.float32) * scale)

    _, kept = rest_and_kept(
        lambda w, x: layer(w, layer(w, x)), jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones((4, 8))
    )
    assert {leaf.size for leaf in jax.tree.leaves(kept)} == {1, 64}
    assert all(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(kept) if leaf.size == 64)


def test_what_varies_is_not_kept():
    function = lambda w, x: quantized(w * x.sum())[0].astype(jnp.float32)
    _, kept = rest_and_kept(function, jnp.ones((8, 8)), jnp.ones(8))
    assert jax.tree.leaves(kept) == []


@pytest.mark.slow
def test_keys_constants_branches_and_while_loops():
    table = jax.random.normal(KEY, (8, 8))

    def function(known, x):
        data, scale = quantized(known["w"])
        q = data.astype(jnp.float32) * scale + table
        noise = jax.random.normal(known["key"], x.shape)
        y = lax.cond(x.sum() > 0, lambda: x @ q + noise, lambda: x - q[0][None])
        y = lax.fori_loop(0, 3, lambda i, y: y @ q, y)
        branch = lax.cond(known["w"].sum() > 0, lambda: 1.0, lambda: 2.0)
        return {"y": y, "branch": branch, "same": known["n"] + 1, "w": known["w"]}

    known = {"key": KEY, "w": 2 * table, "n": jnp.int32(4)}
    result, _ = rest_and_kept(function, known, jnp.ones((2, 8)))
    assert result["same"] == 5


def test_views_of_what_is_kept_are_not_kept_beside_it():
    """They cost nothing to make, wherever they are used."""
    w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones((4, 8))

    def function(w, x):
        data, scale = quantized(w)
        views = [
            scale.astype(jnp.bfloat16),
            lax.bitcast_convert_type(scale, jnp.int32),
            lax.reshape(scale, (1,)),
            lax.squeeze(lax.reshape(scale, (1, 1)), (0,)),
            checkpoint_name(scale, "scale"),
            lax.bitcast_convert_type(data, jnp.int8).reshape(-1),
        ]
        return x @ data.astype(jnp.float32) * scale, [
            view * x[0, 0].astype(view.dtype) for view in views
        ]

    kept = jax.eval_shape(lambda w, x: split(function, w, x)[0], w, x)
    assert sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(kept)) == [
        ("float32", 1),
        ("uint8", 64),
    ]


def test_weights_on_explicit_axes_are_quantized_early_too():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones((4, 8))

    def function(w, x):
        data, scale = quantized(w)
        return x @ data.astype(jnp.float32) * scale

    with jax.set_mesh(mesh):
        kept = jax.eval_shape(lambda w, x: split(function, w, x)[0], w, x)
    assert ("uint8", 64) in [(leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(kept)]


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_explicit_axes_keep_what_automatic_ones_do(recipe):
    """Axes are automatic inside a matmul, which quantized weights leave sharded like weights.

    What is computed late has the bits of the whole.
    """
    numbers = (((1,), (0,)), ((), ()))
    loss = lambda w, x: jnp.sum(jfp8.scaled_dot_general(x, w, numbers, recipe=recipe) ** 2)

    def early_and_late(w, x):
        kept, rest = split(jax.grad(loss), w, x)
        return kept, rest(kept, x), jax.grad(loss)(w, x)

    def kept_on(kind):
        mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            w = jax.device_put(jax.random.normal(KEY, (64, 32)), NamedSharding(mesh, P("d")))
            kept, found, expected = jax.jit(early_and_late)(w, jax.random.normal(KEY, (8, 64)))
        assert np.all(np.any(expected, axis=0))
        np.testing.assert_array_equal(found, expected)
        return jax.tree.leaves(kept)

    explicit, automatic = map(kept_on, (AxisType.Explicit, AxisType.Auto))
    of = lambda leaves: [(leaf.dtype, leaf.shape) for leaf in leaves]
    assert of(explicit) == of(automatic)
    assert {leaf.sharding.spec for leaf in explicit if leaf.shape == (64, 32)} == {P("d", None)}
