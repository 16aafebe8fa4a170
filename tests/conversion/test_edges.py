"""Layers at the edges of a model stay in high precision, however the model was written and made."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jfp8
from support.doors import DOORS, converted

D = 16
X = jax.random.normal(jax.random.key(0), (6, D))
every_door = pytest.mark.parametrize("door", DOORS)


def looped(h, w):
    return lax.scan(lambda h, _: (h @ w, None), h, None, length=2)[0]


ENDS = {
    # The end of a model after layer a, relu and layer b; and the layers that stay.
    "result": (lambda p, x, a, b: b, "b"),
    "two heads": (lambda p, x, a, b: (p("c", b), p("d", b).mean()), "cd"),
    "residual": (lambda p, x, a, b: b + x, ""),
    "both": (lambda p, x, a, b: (a, b), "b"),  # features beside the logits
    "with an input": (lambda p, x, a, b: (b, {"h": x}), "b"),
    "softmax": (lambda p, x, a, b: jax.nn.softmax(b), "b"),
    "argmax": (lambda p, x, a, b: jnp.argmax(b, -1), "b"),
    "moved": (lambda p, x, a, b: b.reshape(D, 6)[::-1].astype(jnp.bfloat16), "b"),
    "numbers": (lambda p, x, a, b: b / 2 + 1, "b"),
    "scale and bias": (lambda p, x, a, b: b * p["g"] + p["g"], "b"),
    "jit": (lambda p, x, a, b: jax.jit(jnp.tanh)(b), "b"),
    "checkpoint": (lambda p, x, a, b: jax.checkpoint(jnp.tanh)(b), "b"),
    "gelu": (lambda p, x, a, b: jax.nn.gelu(b), "b"),
    "split": (lambda p, x, a, b: (b[:, :1], b[:, 1:]), "b"),  # mean and variance
    "named": (lambda p, x, a, b: checkpoint_name(b, "logits"), "b"),
    "two layers": (lambda p, x, a, b: b + a, ""),
    "not the last": (lambda p, x, a, b: jnp.sin(a), ""),  # a goes into b
    "matmul": (lambda p, x, a, b: b @ p["w"] @ p["w"].T, ""),
    "joined": (lambda p, x, a, b: jnp.concatenate([a, b]), ""),
    "cond": (lambda p, x, a, b: lax.cond(b.sum() > 0, jnp.sin, jnp.cos, b), ""),
    "used twice": (lambda p, x, a, b: p("b", b), ""),
    "loop": (lambda p, x, a, b: looped(b, p["w"]), ""),  # a turn's result goes into the next
    "no layer": (lambda p, x, a, b: (None, p["g"], x, 3.0), ""),
    # The result of an embedding that is tied, with a bias of its own.
    "tied": (lambda p, x, a, b: b @ p["table"].T + p["g"], "table"),
    # A projection of two parts, which are read in another order.
    "parts": (lambda p, x, a, b: p("c", jnp.roll(p("d", b), 8, -1)), "c"),
}
LAYERS = "abcd"
SQUARE = jax.random.normal(jax.random.key(1), (D, D)) / 4
PARAMS = {**dict.fromkeys(LAYERS, SQUARE), "w": SQUARE, "table": SQUARE, "g": jnp.ones((1, D))}
PAIRS = [(end, door) for end in ENDS for door in DOORS]


@pytest.mark.parametrize(("end", "door"), sorted(PAIRS, key=lambda pair: pair[1] != "function"))
@pytest.mark.representative(len(ENDS) + 2)
def test_layers_whose_result_a_model_returns_stay(end, door):
    after, stays = ENDS[end]

    def run(p, x):
        a = p("a", x)
        return after(p, x, a, p("b", jax.nn.relu(a)))

    names = lambda **options: set(
        converted(door, run, PARAMS, X, "delayed", layers=LAYERS, **options).states()
    )
    stayed = names(exempt=()) - names()
    assert stayed == ({stays} if stays == "table" else set(stays))
    assert {"a"} <= names(exempt=())


def convolutions(p, x):
    """A stem of four channels, the most that an image has, and one of five: what is no image."""
    y = jax.nn.relu(p("stem", (x[..., :4] - x.mean()) / p["std"]) + p("waves", x[..., :5]))
    return p("head", p("body", p("four", y)).mean((1, 2)))


@every_door
def test_convolutions_of_images_stay(door):
    shapes = {
        "stem": (3, 3, 4, 8),
        "waves": (3, 3, 5, 8),
        "four": (3, 3, 8, 4),
        "body": (3, 3, 4, 8),
    }
    layers = {name: jnp.ones(shape) for name, shape in {**shapes, "head": (8, 5)}.items()}
    params, x = {**layers, "std": jnp.ones((1, 1, 1, 4))}, jnp.ones((2, 4, 4, 5))
    names = lambda run, given: set(
        converted(door, run, params, x, "delayed", layers=given).states()
    )
    inside = lambda p, x: jax.checkpoint(jax.jit(lambda x: convolutions(p, x)))(x)
    fp8 = {"waves", "four", "body"}  # "four" has four channels, but is not the first
    assert names(convolutions, layers) == fp8
    assert names(inside, ()) == fp8


@every_door
def test_adapters_stay(door):
    """A LoRA, into a layer and into a matmul of one's own."""

    def run(p, x):
        x = jnp.tanh(p("up", x) + x @ p["a"] @ p["b"])
        return jnp.tanh(x @ p["w"] + (x @ p["a2"]) @ p["b2"])

    wide = {"up": SQUARE, "w": SQUARE}
    low = {name: jnp.ones((D, 2) if "a" in name else (2, D)) for name in ("a", "b", "a2", "b2")}
    case = lambda recipe, **options: converted(
        door, run, {**wide, **low}, X, recipe, layers=["up"], **options
    )
    assert set(case("delayed").states()) == {"up", "w"}
    low_rank = {row.reason for row in case("current").report(X).rows if not row.fp8}
    assert low_rank == {f"exempt: {jfp8.Edge.LOW_RANK.value}"}
    assert set(case("delayed", exempt=jfp8.Edge.LOGITS).states()) == {*wide, *low}
