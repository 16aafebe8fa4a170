"""Equinox, Haiku, Keras and haliax as released: losses in FP8 within 5 % of those in f32."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:haliax")

TOKENS = jax.random.randint(jax.random.key(1), (8, 17), 0, 40)
STEPS, TOLERANCE = 12, 0.05
TX = optax.adam(3e-3)


@pytest.fixture(autouse=True)
def _rules_of_others():
    with jax.numpy_rank_promotion("allow"):
        yield


def next_token_loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def trained(loss: Callable[..., Any], params: Any) -> tuple[float, float, Any]:
    """Return the last losses of `loss` and of its conversion, and the state of the latter."""
    fp8 = jfp8.convert(loss, "delayed")
    state = fp8.init(params, TOKENS)

    @jax.jit
    def steps(arrays, state):
        def step(carry, _):
            ours, histories, ours_opt, theirs, theirs_opt = carry
            value, (grads, histories) = jax.value_and_grad(fp8, argnums=(0, 1))(
                ours, histories, TOKENS
            )
            expected, exact = jax.value_and_grad(loss)(theirs, TOKENS)
            updates, ours_opt = TX.update(grads, ours_opt)
            exact, theirs_opt = TX.update(exact, theirs_opt)
            ours, theirs = optax.apply_updates(ours, updates), optax.apply_updates(theirs, exact)
            return (ours, histories, ours_opt, theirs, theirs_opt), (value, expected)

        start = arrays, state, TX.init(arrays), arrays, TX.init(arrays)
        return jax.lax.scan(step, start, length=STEPS)

    (_, state, *_), (ours, theirs) = steps(params, state)
    assert theirs[-1] < 0.8 * theirs[0]
    return float(ours[-1]), float(theirs[-1]), state


def check_histories(state, n):
    assert len(state) == n
    for variable in state.values():
        histories, _ = jfp8.scaling.read_overwritten(variable)
        for role in histories.values():
            assert jnp.all(role["amax_history"][:10] > 0)


def test_haiku():
    hk = pytest.importorskip("haiku")

    def forward(tokens):
        x = hk.Embed(40, 64)(tokens)
        norm = lambda x: hk.LayerNorm(-1, True, True)(x)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        for _ in range(2):
            init = hk.initializers.VarianceScaling(1.0)
            h = norm(x)
            x = x + hk.MultiHeadAttention(4, 16, model_size=64, w_init=init)(h, h, h, mask=mask)
            x = x + hk.nets.MLP([128, 64])(norm(x))
        return hk.Linear(40)(norm(x))

    net = hk.without_apply_rng(hk.transform(forward))
    params = net.init(jax.random.key(0), TOKENS[:, :-1])
    loss = lambda params, tokens: next_token_loss(net.apply(params, tokens[:, :-1]), tokens)
    ours, theirs, state = trained(loss, params)
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    check_histories(state, 12)  # the last Linear is exempt: the logits
    assert "multi_head_attention_1/query/w" in state


def test_equinox():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        attention: Any
        mlp: Any
        norms: Any

        def __call__(self, x):
            first, second = (jax.vmap(norm) for norm in self.norms)
            h, mask = first(x), jnp.tril(jnp.ones((len(x), len(x)), bool))
            x = x + self.attention(h, h, h, mask=mask)
            return x + jax.vmap(self.mlp)(second(x))

    class Model(eqx.Module):
        embed: Any
        blocks: Any
        head: Any

        def __call__(self, tokens):
            x = jax.vmap(self.embed)(tokens)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    keys = iter(jax.random.split(jax.random.key(0), 8))
    block = lambda: Block(
        eqx.nn.MultiheadAttention(4, 64, key=next(keys)),
        eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=next(keys)),
        [eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)],
    )
    embed = eqx.nn.Embedding(40, 64, key=next(keys))
    model = Model(embed, [block(), block()], eqx.nn.Linear(64, 40, key=next(keys)))
    loss = lambda model, tokens: next_token_loss(jax.vmap(model)(tokens[:, :-1]), tokens)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    ours, theirs, state = trained(lambda a, tokens: loss(eqx.combine(a, static), tokens), arrays)
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    check_histories(state, 12)
    assert "blocks/1/mlp/layers/0/weight" in state

    fp8 = jfp8.convert(loss, "delayed")  # the module itself, in a loop of Equinox
    both = eqx.filter_jit(eqx.filter_value_and_grad(lambda both, tokens: fp8(*both, tokens)))
    value, (grads, state) = both((model, fp8.init(model, TOKENS)), TOKENS)
    assert value == pytest.approx(float(loss(model, TOKENS)), rel=TOLERANCE)
    assert isinstance(grads, Model)
    assert len(state) == 12
    with pytest.raises(TypeError, match="holds its weights itself"):
        jfp8.convert(model, "delayed")

    from jfp8.integrations.equinox import apply_updates, convert

    module = convert(model, TOKENS[0, :-1], recipe="delayed")
    opt_state = TX.init(eqx.filter(module, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(module, opt_state):
        value, grads = eqx.filter_value_and_grad(loss)(module, TOKENS)
        updates, opt_state = TX.update(grads, opt_state)
        return value, apply_updates(module, updates, grads), opt_state

    for _ in range(10):
        last, module, opt_state = step(module, opt_state)
    assert last < 0.8 * value
    check_histories(module.state, 12)
    amax = jnp.abs(module.model.blocks[1].mlp.layers[0].weight).max()
    newest = jfp8.scaling.read_overwritten(module.state["blocks/1/mlp/layers/0/weight"])[0]
    assert newest["rhs"]["amax_history"][0] == pytest.approx(float(amax), rel=0.05)


def test_keras_fits_evaluates_and_predicts():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    from jfp8.integrations.keras import convert

    def losses(converts):
        keras.utils.set_random_seed(0)
        tokens = keras.Input((16,), dtype="int32")
        x = keras.layers.Embedding(40, 64)(tokens)
        norm = lambda x: keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(norm(x), norm(x), use_causal_mask=True)
        x = x + keras.layers.Dense(64)(keras.layers.Dense(128, activation="gelu")(norm(x)))
        model = keras.Model(tokens, keras.layers.Dense(40)(x))
        model = convert(model, "delayed") if converts else model
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.AdamW(3e-3), loss=cross_entropy)
        x, y = np.asarray(TOKENS[:, :-1]), np.asarray(TOKENS[:, 1:])
        fitted = model.fit(x, y, batch_size=4, epochs=5, verbose=0, shuffle=False)
        assert model.predict(x, verbose=0).shape == (8, 16, 40)
        after = model.evaluate(x, y, verbose=0)
        assert after < fitted.history["loss"][-1] < 0.9 * fitted.history["loss"][0]
        return after, model

    (theirs, _), (ours, model) = losses(False), losses(True)
    assert theirs != ours == pytest.approx(theirs, rel=TOLERANCE)
    states = {v.path: v.value for v in model.trainable_variables if v.overwrite_with_gradient}
    check_histories(states, 6)
    with pytest.raises(ValueError, match="call it once on a batch, and pass that"):
        convert(keras.Sequential([keras.layers.Dense(3)]))


def test_haliax_layers_stacked_and_alone():
    eqx = pytest.importorskip("equinox")
    hax = pytest.importorskip("haliax", exc_type=ImportError)
    if not hasattr(jax.core, "is_constant_dim"):
        pytest.skip("haliax 1.4 asks for JAX below 0.11")
    import haliax.nn as hnn
    from haliax.quantization import apply_updates, partition_for_grad_overwrite

    from jfp8.integrations.haliax import convert

    inner, outer, layers, batch = hax.make_axes(inner=32, outer=8, layers=3, batch=32)

    class Block(eqx.Module):
        linear: Any

        @staticmethod
        def init(key):
            return Block(hnn.Linear.init(inner, inner.alias("out"), key=key))

        def __call__(self, x):
            return x + hax.tanh(self.linear(x).rename({"out": "inner"}))

    class Model(eqx.Module):
        blocks: Any
        head: Any

        def __call__(self, x):
            return self.head(self.blocks.fold(x))

    first, second, third, fourth = jax.random.split(jax.random.key(0), 4)
    blocks = hnn.Stacked.init(layers, Block)(key=jax.random.split(first, 3))
    model = Model(blocks, hnn.Linear.init(inner, outer, key=second))
    x, y = hax.random.normal(third, (batch, inner)), hax.random.normal(fourth, (batch, outer))
    loss = lambda model: ((model(x) - y) ** 2).mean().scalar()

    def run(model):
        @eqx.filter_jit
        def step(model, opt_state):
            value, grads = eqx.filter_value_and_grad(loss)(model)
            overwrites, grads = partition_for_grad_overwrite(grads)
            updates, opt_state = TX.update(grads, opt_state)
            return value, apply_updates(model, updates, overwrites), opt_state

        rest = partition_for_grad_overwrite(model)[1]
        opt_state = TX.init(eqx.filter(rest, eqx.is_inexact_array))
        for _ in range(STEPS):
            value, model, opt_state = step(model, opt_state)
        return float(value), model

    (theirs, _), (ours, model) = run(model), run(convert(model, "delayed"))
    assert theirs != ours == pytest.approx(theirs, rel=TOLERANCE)
    stacked = model.blocks.stacked.linear.dot_general.state
    rows = {str(i): row for i, row in enumerate(stacked)} | {"head": model.head.dot_general.state}
    check_histories(rows, 4)
