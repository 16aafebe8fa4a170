"""Functions of other libraries: Haiku, Equinox, and flow matching in plain JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from harness import (
    ADAM,
    VOCABULARY,
    Client,
    Trained,
    images_of,
    next_token_loss,
    run,
    timed,
    tokens_of,
    version_of,
)

import jfp8

LAYERS, WIDTH, HEADS = 2, 64, 4
Model = tuple[Callable[..., jax.Array], Any]  # a loss of weights and a batch, and the weights


def train(batch_of: Callable[[int, int], Any], model: Model, seed: int) -> Trained:
    """By ``jax.value_and_grad`` and Optax."""
    loss, weights = model
    places = (0, 1) if isinstance(loss, jfp8.Fp8Function) else (0,)
    states = [loss.init(weights, batch_of(seed, 0))] if len(places) == 2 else []
    opt_state = ADAM.init(weights)

    @jax.jit
    def step(weights, states, opt_state, batch):
        gradient = jax.value_and_grad(loss, argnums=places)
        value, (grads, *states) = gradient(weights, *states, batch)
        updates, opt_state = ADAM.update(grads, opt_state)
        return jax.tree.map(jnp.add, weights, updates), states, opt_state, value

    def steps():
        nonlocal weights, states, opt_state
        for i in range(1000):
            weights, states, opt_state, value = step(weights, states, opt_state, batch_of(seed, i))
            yield value

    return timed(steps())


def convert(model: Model, recipe: str) -> Model:
    """Convert the loss: the one line."""
    return jfp8.convert(model[0], recipe), model[1]


def report(batch_of: Callable[[int, int], Any], model: Model) -> jfp8.Report:
    """List the matmuls of a converted loss."""
    loss, weights = model
    return jfp8.report(loss, weights, loss.init(weights, batch_of(0, 0)), batch_of(0, 0))


def make_haiku(seed: int) -> Model:
    """A Transformer of Haiku's own modules."""

    def forward(tokens):
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + hk.get_parameter("positions", [tokens.shape[1], WIDTH], init=jnp.zeros)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        norm = lambda x: hk.LayerNorm(-1, True, True)(x)
        for _ in range(LAYERS):
            h, init = norm(x), hk.initializers.VarianceScaling(1.0)
            attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, model_size=WIDTH, w_init=init)
            x = x + attention(h, h, h, mask=mask)
            x = x + hk.nets.MLP([4 * WIDTH, WIDTH], activation=jax.nn.gelu)(norm(x))
        return hk.Linear(VOCABULARY)(norm(x))

    net = hk.without_apply_rng(hk.transform(forward))
    loss = lambda weights, tokens: next_token_loss(net.apply(weights, tokens), tokens)
    return loss, net.init(jax.random.key(seed), tokens_of(0, 0))


class Block(eqx.Module):
    """A block of Equinox' own modules, for one sequence."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]

    def __call__(self, x: jax.Array) -> jax.Array:
        h, mask = jax.vmap(self.norms[0])(x), jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


def make_equinox(seed: int) -> Model:
    """A Transformer of Equinox' own modules, for one sequence, under ``vmap``."""
    keys = jax.random.split(jax.random.key(seed), LAYERS + 2)
    model = {
        "embed": eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        "blocks": [Block(key) for key in keys[2:]],
        "head": eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[1]),
    }
    weights, static = eqx.partition(model, eqx.is_inexact_array)

    def of_one(model, tokens):
        x = jax.vmap(model["embed"])(tokens)
        for block in model["blocks"]:
            x = block(x)
        return jax.vmap(model["head"])(x)

    def loss(weights, tokens):
        model = eqx.combine(weights, static)
        return next_token_loss(jax.vmap(functools.partial(of_one, model))(tokens), tokens)

    return loss, weights


def make_flow(seed: int) -> Model:
    """Flow matching (arXiv 2210.02747) with a residual network, scanned over its blocks."""
    size, hidden = 16 * 16 * 3, 128
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5
    weights = {
        "into": normal(keys[0], size + 2, hidden),
        "up": normal(keys[1], LAYERS, hidden, 4 * hidden),
        "down": normal(keys[2], LAYERS, 4 * hidden, hidden),
        "out": normal(keys[3], hidden, size),
    }

    def loss(weights, batch):
        images = batch[0].reshape(len(batch[0]), -1)
        key, other = jax.random.split(jax.random.key(jnp.sum(batch[1])))
        time = jax.random.uniform(key, (len(images), 1))
        noise = jax.random.normal(other, images.shape)
        x = jnp.concatenate([(1 - time) * noise + time * images, time, jnp.sin(9 * time)], axis=1)

        def block(h, w):
            return h + jax.nn.silu(jax.nn.standardize(h) @ w[0]) @ w[1], None

        h, _ = jax.lax.scan(block, x @ weights["into"], (weights["up"], weights["down"]))
        return jnp.mean((jax.nn.standardize(h) @ weights["out"] - (images - noise)) ** 2)

    return loss, weights


MADE = {
    "Haiku, Transformer": (version_of("dm-haiku"), make_haiku, tokens_of, 6 * LAYERS),
    "Equinox, Transformer": (version_of("equinox"), make_equinox, tokens_of, 6 * LAYERS),
    "plain JAX, flow matching": (version_of("jax"), make_flow, images_of, 1 + 2 * LAYERS),
}
run(
    *(
        Client(
            name,
            version,
            make,
            functools.partial(report, batch_of),
            functools.partial(train, batch_of),
            needed,
            convert,
        )
        for name, (version, make, batch_of, needed) in MADE.items()
    )
)
