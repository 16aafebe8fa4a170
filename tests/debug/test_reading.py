"""Measurements inside loops, branches and calls, and the layers that they belong to."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jfp8.debug.measurement import Measurement
from jfp8.debug.reading import Loop, read
from jfp8.products.observers import tap


@dataclass(frozen=True)
class Size(Measurement):
    """How many elements there are, the sum of their squares, and the largest."""

    sums: ClassVar = ("count",)
    powers: ClassVar = ("squares",)
    maxima: ClassVar = ("amax", "minus_amin")

    name: str = ""

    def __call__(self, x):
        a = jnp.abs(x)
        return jnp.stack([jnp.float32(x.size), jnp.sum((a / a.max()) ** 2), a.max(), -a.min()])


def sizes(*xs):
    """What `Size` gives for all elements of `xs`, in float64."""
    a = np.abs(np.concatenate([np.ravel(x) for x in xs])).astype(np.float64)
    return [a.size, np.sum((a / a.max()) ** 2), a.max(), -a.min()]


def tapped(x, name, weight=None):
    return tap(x, measure=Size(name, weight=weight))


X = np.array([1.0, -2.0, 3.0], np.float32)
WEIGHTS = np.arange(1, 13, dtype=np.float32).reshape(4, 3)


def program(x, weights):
    @jax.checkpoint
    def layer(x, w):
        w = tapped(w, "weight", weight=0)
        return 2 * tapped(x, "carried", weight=0) + w, x[0]

    x, firsts = lax.scan(layer, x, weights, reverse=True)
    turn = lambda state: (state[0] + 1, 2 * tapped(state[1], "turn"))
    _, x = lax.while_loop(lambda state: state[0] < 3, turn, (0, x))
    x = lax.cond(x[0] > 0, lambda x: tapped(x, "positive"), lambda x: -tapped(x, "negative"), x)
    x = jax.vmap(lambda x: tapped(x, "each")[None])(x)
    return jax.jit(lambda x: tapped(x, "call"))(x), firsts


def test_control_flow_stays_and_is_measured():
    closed = jax.make_jaxpr(program)(X, WEIGHTS)
    (y, firsts), found = read(closed, [X, WEIGHTS])

    x, before = X, []
    for w in WEIGHTS[::-1]:
        before.append(x)
        x = 2 * x + w
    before = before[::-1]
    np.testing.assert_array_equal(y[:, 0], 8 * x)
    np.testing.assert_array_equal(firsts, [b[0] for b in before])

    expected = {
        "weight": [sizes(w) for w in WEIGHTS],
        "carried": [sizes(b) for b in before],
        "turn": sizes(x, 2 * x, 4 * x),
        "positive": sizes(8 * x),
        "negative": [0, 0, 0, -np.inf],
        "each": sizes(8 * x),
        "call": sizes(8 * x),
    }
    places = {place.measure.name: place for place, _ in found}
    assert set(places) == set(expected)
    for place, vector in found:
        np.testing.assert_allclose(vector, expected[place.measure.name], rtol=1e-6)
    assert [place.number for place, _ in found] == list(range(7))
    assert places["weight"].loops == (Loop(4, over_inputs=True),)
    assert places["carried"].loops == (Loop(4, over_inputs=False),)
    assert not any(
        place.loops for name, place in places.items() if name not in ("weight", "carried")
    )
    # Nothing of one trace is left in them, or a step would be compiled again for each.
    assert [place for place, _ in read(closed, [X, WEIGHTS])[1]] == [place for place, _ in found]


def test_what_measurements_cannot_leave_is_refused():
    solve = lambda _, b: tapped(b, "inside") / 2
    solved = lambda b: lax.custom_linear_solve(lambda x: 2 * x, b, solve, symmetric=True)
    closed = jax.make_jaxpr(solved)(X)
    with pytest.raises(NotImplementedError, match="inside 'custom_linear_solve' cannot be taken"):
        read(closed, [X])
