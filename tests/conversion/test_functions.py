"""`jfp8.convert` of functions: what only functions have."""

import functools
import warnings

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jfp8
from support.arrays import cosine, relative_error
from support.doors import KEY, convolve

RECIPE = jfp8.recipes.DelayedScaling(amax_history_len=4)
X = jax.random.normal(jax.random.key(0), (8, 16))
STACK = jax.random.normal(jax.random.key(1), (3, 16, 16)) / 3


def test_losses_with_aux_and_their_edges():
    """The logits go into the loss, next to targets and a penalty; experts and a stem into them."""

    def loss(params, images, labels):
        x = jax.nn.relu(convolve(images, params["stem"]))
        rows = jax.nn.relu(convolve(x, params["conv"], (2, 2))).reshape(-1, 8)
        x = jax.nn.relu(lax.ragged_dot(rows, params["experts"], jnp.array([18, 18])))
        logits = x.reshape(4, -1, 8).mean(1) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() + 1e-3 * jnp.sum(params["head"] ** 2), losses

    shapes = {"stem": (3, 3, 3, 8), "conv": (3, 3, 8, 8), "experts": (2, 8, 8), "head": (8, 5)}
    params = {name: jax.random.normal(KEY, shape) / 8 for name, shape in shapes.items()}
    batch = jax.random.normal(KEY, (4, 6, 6, 3)), jnp.arange(4)
    converted = jfp8.convert(loss, RECIPE)
    state = converted.init(params, *batch)
    assert set(state) == {"conv", "experts"}  # the first convolution and the logits are edges
    step = jax.jit(jax.value_and_grad(converted, argnums=(0, 1), has_aux=True))
    (value, losses), (grads, state) = step(params, state, *batch)
    (exact, _), exact_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *batch)
    assert losses.shape == (4,)
    assert 0 < abs(value - exact) < 0.02 * exact
    assert all(cosine(grad, exact_grads[name]) > 0.97 for name, grad in grads.items())
    read = lambda row: jfp8.scaling.read_overwritten(row)[0]["rhs"]["amax_history"][0]
    assert {name: read(row) for name, row in state.items()} == {
        name: jnp.abs(params[name]).max() for name in state
    }
    report = jfp8.report(converted, params, state, *batch)
    fp8 = {(row.path, row.kind) for row in report.rows if row.fp8}
    assert {(name, k) for name in state for k in ("fprop", "dgrad", "wgrad")} <= fp8
    assert {row.path for row in report.unconverted} == {"stem", "head"}
    assert "final logits" in str(report)


def test_names_do_not_depend_on_the_batch_and_patterns_match_them():
    def loss(params, x):
        heads = jnp.concatenate([params["q"], params["k"]], axis=1).astype(jnp.bfloat16)
        q, k = jnp.split(x.astype(jnp.bfloat16) @ heads, 2, axis=1)
        for i in range(2):
            x = jnp.tanh(x @ params["layers"][i])
        return jnp.sum(q * k) + jnp.sum(jnp.take(params["embed"], jnp.arange(3), axis=0) @ x[:3].T)

    params = {"q": STACK[0], "k": STACK[1], "layers": STACK[:2], "embed": STACK[2]}
    names = [*jfp8.convert(loss, RECIPE, exempt=()).init(params, X)]
    assert names == ["q+k", "layers", "layers_2", "embed"]
    assert names == [*jfp8.convert(loss, RECIPE, exempt=()).init(params, X[:5])]
    only = jfp8.convert(loss, {"layers*": RECIPE, "*": None}, exempt="layers_2")
    assert [*only.init(params, X)] == ["layers"]
    with pytest.raises(ValueError, match="matches no layer of the model. Layers: embed, layers"):
        jfp8.convert(loss, RECIPE, exempt="decoder/*").init(params, X)


def test_recipes_without_state_keep_the_signature_and_attention_is_asked_for():
    def loss(w, x):
        q = jnp.tanh(x @ w)
        return jnp.sum(jax.nn.softmax(q @ q.T) @ x)

    converted = jfp8.convert(loss, "current", exempt=())
    assert converted.init(STACK[0], X) == {}
    without_state, exact = converted(STACK[0], X), loss(STACK[0], X)
    assert without_state == converted(STACK[0], converted.init(STACK[0], X), X) != exact
    rows = lambda f: [
        row.fp8 for row in jfp8.report(f, STACK[0], X).rows if row.kind in ("fprop", "forward")
    ]
    assert rows(converted) == [True, False, False]
    assert rows(jfp8.convert(loss, "current", exempt=(), attention=True)) == [True, True, True]


def test_mistakes_are_told():
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    converted = jfp8.convert(loss, RECIPE, exempt=())
    state = converted.init(STACK[0], X)
    other = jfp8.convert(loss, "delayed", exempt=()).init(STACK[0], X)  # with 16 steps
    two = {"a/b": STACK[0], "a": {"b": STACK[1]}}
    for message, args in (
        (r"argument 1 must be the state; got .*f.init\(params, batch", (STACK[0], X)),
        (r"lacks \['w'\], and has \['v'\]", (STACK[0], {"v": state["w"]}, X)),
        (r"has shape \(7638,\); \(6522,\) is needed", (STACK[0], other, X)),
        ("Two weights have the path 'a/b'", (two, state, X)),
    ):
        with pytest.raises(ValueError, match=message):
            converted(*args)
    with pytest.raises(TypeError, match="weights are argument 0"):
        converted(w=STACK[0], x=X)
    for message, function, options in (
        ("weights=-1: must be the position", loss, {"weights": -1}),
        ("weights=0 is for functions", nn.Dense(4), {"weights": 0}),
        ("holds its weights itself", functools.partial(loss, STACK[0]), {}),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            jfp8.convert(function, RECIPE, **options)
    with pytest.warns(UserWarning, match="but not to its sink.*the state of a converted function"):
        jax.jit(jax.grad(converted))(STACK[0], state, X)
    with pytest.warns(UserWarning, match="No product of <lambda> is FP8.*final logits"):
        jfp8.convert(loss, "current")(STACK[0], X)
    with pytest.warns(UserWarning, match="none with an operand made of the weights, argument 1"):
        jfp8.convert(lambda w, x: jnp.sum(w) + jnp.sum(x), "current", weights=1)(STACK[0], X)
    held = STACK[1]
    with pytest.warns(UserWarning, match="argument 0 by arrays that it holds itself.*as an arg"):
        jax.grad(jfp8.convert(lambda x: jnp.sum(x @ held), "current", exempt=()))(X)
    table = jfp8.convert(lambda w, x: x @ w + held[:8] @ w, "current", exempt=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table(STACK[0], X)
        converted(STACK[0], state, X)
        jax.jit(jax.grad(converted, argnums=(0, 1)))(STACK[0], state, X)


def test_only_a_state_is_taken_for_one():
    """An empty dict, or one of the function's own, is an argument like any other."""
    predict = lambda params, options, x: options.get("by", 1.0) * jnp.tanh(x @ params)
    converted = jfp8.convert(predict, "current", exempt=())
    for options in ({}, {"by": jnp.float32(3.0)}):
        exact = predict(STACK[0], options, X)
        assert 0 < relative_error(converted(STACK[0], options, X), exact) < 0.1
    delayed = jfp8.convert(predict, RECIPE, exempt=())
    state = delayed.init(STACK[0], {}, X)
    y = delayed(STACK[0], state, {"by": 2.0}, X)
    assert (y == delayed(STACK[0], {"by": 2.0}, X, fp8_state=state)).all()
    restored = dict(state)  # A checkpoint gives a dict back.
    assert (y == delayed(STACK[0], restored, {"by": 2.0}, X)).all()
    tree = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    assert type(tree) is type(state)
