"""Layers at the edges of a model, found in jaxprs of functions whose layers are marked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jfp8.conversion.edges import arrays_in, edge_layers, mark_input, mark_output

X = jnp.ones((2, 3))
W = {"w": jnp.ones((3, 3)), "g": jnp.ones((1, 3))}


def layer(path, x, w):
    """A marked matrix product."""
    return mark_output(mark_input(x, path) @ w, path)


def looped(x, w):
    return lax.scan(lambda h, _: (layer("looped", h, w), None), x, None, length=2)[0]


def found(function, *inputs, parameters=W):
    """``(first, returned)`` of ``function(parameters, *inputs)``."""
    closed = jax.make_jaxpr(function)(parameters, *inputs)
    return edge_layers(closed, len(jax.tree.leaves(parameters)))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda p, x, a, b: b, {"b"}),
        (lambda p, x, a, b: (b, {"h": x}), {"b"}),
        (lambda p, x, a, b: jax.nn.softmax(b), {"b"}),
        (lambda p, x, a, b: jnp.argmax(b, -1), {"b"}),
        (lambda p, x, a, b: b.reshape(3, 2)[::-1].astype(jnp.bfloat16), {"b"}),
        (lambda p, x, a, b: b / 2 + 1, {"b"}),
        (lambda p, x, a, b: b * p["g"] + p["g"], {"b"}),  # a learned scale and bias
        (lambda p, x, a, b: jax.jit(jnp.tanh)(b), {"b"}),
        (lambda p, x, a, b: jax.checkpoint(jnp.tanh)(b), {"b"}),
        (lambda p, x, a, b: jax.nn.gelu(b), {"b"}),
        (lambda p, x, a, b: (b[:, :1], b[:, 1:]), {"b"}),  # mean and variance
        (lambda p, x, a, b: b + x, set()),  # a residual
        (lambda p, x, a, b: b + a, set()),
        (lambda p, x, a, b: jnp.sin(a), set()),  # a goes into b
        (lambda p, x, a, b: (a, b), {"b"}),  # features beside the logits
        (lambda p, x, a, b: b @ p["w"], set()),
        (lambda p, x, a, b: jnp.concatenate([a, b]), set()),
        (lambda p, x, a, b: lax.cond(b.sum() > 0, jnp.sin, jnp.cos, b), set()),
        (lambda p, x, a, b: layer("b", b, p["w"]), set()),  # used twice
        (lambda p, x, a, b: looped(b, p["w"]), set()),  # one turn's result goes into the next
        (lambda p, x, a, b: (None, p["g"], x, 3.0), set()),
        (lambda p, x, a, b: (layer("c", b, p["w"]), layer("d", b, p["w"]).mean()), {"c", "d"}),
        (lambda p, x, a, b: checkpoint_name(b, "logits"), {"b"}),  # a name that the model gives
    ],
)
def test_returned_layers(end, expected):
    """Of: layer a, relu, layer b, then the end."""

    def model(p, x):
        a = layer("a", x, p["w"])
        b = layer("b", jax.nn.relu(a), p["w"])
        return end(p, x, a, b)

    assert found(model, X)[1] == expected


def test_first_layers():
    def model(p, x, y):
        stem = layer("stem", (x - x.mean()) / p["g"], p["w"])
        other = layer("other", y, p["w"])
        return layer("late", y + stem, p["w"]) + layer("last", other, p["w"])

    assert found(model, X, X)[0] == {"stem", "other"}


def test_layers_in_calls_and_loops():
    block = jax.jit(lambda x, w: layer("jitted", x, w))
    remat = jax.checkpoint(lambda x, w: layer("remat", x, w))

    def model(p, x):
        h = looped(remat(block(x, p["w"]), p["w"]), p["w"])
        return layer("head", h, p["w"])

    first, returned = found(model, X)
    assert first == {"jitted"}
    assert returned == {"head"}


def test_arrays_in_what_a_model_returns():
    @dataclasses.dataclass
    class Output:
        mean: jax.Array
        name: str = "normal"

    a, b, c = jnp.ones(1), np.ones(2), jnp.ones(3)
    arrays = arrays_in({"out": [a, "text", None, 3.0], "dist": Output(c), "np": b})
    assert sorted(x.size for x in arrays) == [1, 2, 3]
