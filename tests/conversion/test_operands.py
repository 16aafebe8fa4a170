"""Which operands count as weights, however a model is written, and which state they share."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.arrays import assert_same, relative_error
from support.doors import DOORS, converted, moved
from support.later_jax import later_primitives

X = jax.random.normal(jax.random.key(1), (2, 6, 8))
W = 0.3 * jax.random.normal(jax.random.key(2), (3, 8, 8))
every_door = pytest.mark.parametrize("door", DOORS)

WEIGHTS = {
    "@": lambda x, w: x @ w[0],
    "matmul": lambda x, w: jnp.matmul(w[2].T, x.swapaxes(-1, -2)),
    "batched": lambda x, w: jnp.einsum("btd,edf->ebtf", x, w),
    "looked up": lambda x, w: jnp.einsum("td,bsd->bts", w[0][jnp.arange(6)], x),
    "computed": lambda x, w: x @ jnp.tanh(2 * w[0]),
    "dot": lambda x, w: jnp.dot(x, w[1].astype(jnp.bfloat16).astype(jnp.float32)),
    "tensordot": lambda x, w: jnp.tensordot(x, jnp.reshape(w, (3 * 8, 8)), ((-1,), (1,))),
    "dot_general": lambda x, w: lax.dot_general(x, w[0], (((2,), (0,)), ((), ()))),
    "by index": lambda x, w: x @ lax.dynamic_index_in_dim(w, x.shape[0] // 2, keepdims=False),
    "jit": lambda x, w: jax.jit(lambda x, w: jnp.tanh(x) @ w)(x, w[0]),
    "closure": lambda x, w: jax.jit(lambda x: x @ w[0])(x),
    "vmap": lambda x, w: jax.vmap(lambda x: x @ w[0])(x),
    "loop": lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w)[0],
    "frozen": lambda x, w: x @ lax.stop_gradient(w[0]),
    "side by side": lambda x, w: x @ jnp.concatenate([w[0], w[2]], axis=-1),
    "masked": lambda x, w: x @ (w[0] * (jnp.arange(8) % 3 > 0)[None]),
    "normalized": lambda x, w: x @ (w[1] / jnp.linalg.norm(w[1], axis=0, keepdims=True)),
    "merged": lambda x, w: x @ (w[0] + 0.1 * w[1, :, :2] @ w[2, :2]),
    "experts": lambda x, w: lax.ragged_dot(x.reshape(12, 8), w, jnp.array([4, 4, 4])),
}
own_derivative = jax.custom_jvp(jnp.dot)
own_derivative.defjvp(lambda xs, ts: (jnp.dot(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))
squared = lambda rows: jnp.sum(jax.nn.softmax(rows @ rows.T) @ jnp.tanh(rows))
OTHERS = {
    "activations": lambda x, w: jnp.einsum("btd,bsd->bts", x, x),
    "two weights": lambda x, w: x + jnp.sum(w[0] @ w[1]),
    "own derivative": lambda x, w: own_derivative(x, w[0]),
    "repeated": lambda x, w: jnp.einsum("bud,bsd->bsu", jnp.broadcast_to(w[0], (2, 8, 8)), x),
    "with an activation": lambda x, w: jnp.einsum("btd,sd->bts", x, jnp.concatenate([w[0], x[0]])),
    "integers": lambda x, w: x + jnp.sum(jnp.dot(jnp.ones((6, 8), int), w[0].astype(int))),
    "of data": lambda x, w: x @ (w[0] * x[0, :1]),
    "dropped": lambda x, w: x @ jnp.where(x[0, :1] > 0, w[0], 0),
    "rows of a table": lambda x, w: x + squared(w[0][x[0, :, 0].astype(int)]),
}


def by_door(ways, *others):
    """All `ways` as functions first, then `others` in other doors, and the rest."""
    first = [(way, "function") for way in ways]
    other = [(way, door) for way in ways for door in ("linen", "nnx")]
    return [*first, *sorted(other, key=lambda pair: pair[0] not in others)]


@pytest.mark.parametrize(("way", "door"), by_door(WEIGHTS, "@", "matmul", "loop"))
@pytest.mark.representative(len(WEIGHTS) + 6)
def test_a_weight_is_computed_from_weights_alone(way, door):
    case = converted(door, lambda p, x: WEIGHTS[way](x, p["w"]), {"w": W}, X, exempt=())
    rows = case.report(X).rows
    assert "fprop" in {row.kind for row in rows if row.fp8}
    merged = {"both operands are weights"} if way == "merged" else set()
    assert {row.reason for row in rows if not row.fp8} == merged
    y, expected = case(X), case.plain(X)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    assert 1e-3 < relative_error(y, expected) < 0.1


@pytest.mark.parametrize(("way", "door"), by_door(OTHERS, "activations"))
@pytest.mark.representative(len(OTHERS) + 2)
def test_other_matmuls_stay_as_they_are(way, door):
    run = lambda p, x: p("d", OTHERS[way](x, p["w"]))
    params = {"w": W, "d": jax.random.normal(jax.random.key(3), (OTHERS[way](X, W).shape[-1], 4))}
    rows = converted(door, run, params, X, layers="d", exempt=()).report(X).rows
    assert {row.path for row in rows if row.fp8} == {"d"}
    both, unknown = "both operands are weights", "computed by no layer that can be converted"
    assert {row.reason.partition(": ")[0] for row in rows if not row.fp8} == {
        "two weights": {both},
        "rows of a table": {both, unknown},
        "own derivative": {"inside custom_jvp_call, which has a derivative of its own"},
    }.get(way, {unknown})


@every_door
def test_an_activation_times_a_parameter_is_an_activation(door):
    run = lambda p, x: p("d", x * p["alpha"])
    params = {"alpha": jnp.ones(()), "d": W[0]}
    rows = converted(door, run, params, X, layers="d", exempt=()).report(X).rows
    assert {row.kind for row in rows if row.fp8} == {"fprop", "dgrad", "wgrad"}


@every_door
def test_a_weight_is_cast_to_the_dtype_of_the_inputs(door):
    body = jax.checkpoint(lambda x, w: x.astype(jnp.bfloat16) @ w)
    rounded = {"w": W[0].astype(jnp.bfloat16).astype(jnp.float32)}
    case = converted(door, lambda p, x: body(x, p["w"]), {"w": W[0]}, X, exempt=())
    assert 0 < relative_error(case(X), case.plain(X)) < 0.1
    np.testing.assert_array_equal(case(X), case(X, rounded))
    assert (rounded["w"] != W[0]).any()


def parts(p, x):
    return jnp.tanh(x @ p["w"][0]) * jnp.tanh(x @ p["w"][1]) + (4 * x) @ p["w"][2]


@every_door
def test_matmuls_of_one_weight_share_its_state(door):
    """It receives the largest amax: exactly, since these differ by powers of two.

    In a function each part of a weight has a state.
    """
    w = W / abs(W).max((1, 2), keepdims=True) * jnp.array([4.0, 1.0, 2.0]).reshape(3, 1, 1)
    case = converted(door, parts, {"w": w}, X, "delayed", exempt=())
    case.step(X)
    assert moved(case) == ({"w", "w_2", "w_3"} if door == "function" else {"w"})
    for role, amax in {"lhs": 4 * abs(X).max(), "rhs": 4}.items():
        assert max(state[role].max() for state in case.states().values()) == amax
    both = lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], axis=1)
    case = converted(door, both, {"q": W[0], "k": W[1]}, X, "delayed", exempt=())
    case.step(X)
    assert moved(case) == ({"q+k"} if door == "function" else {"q"})


@every_door
def test_a_weight_that_is_scanned_and_joined_has_two_states(door):
    """The state of layers in a loop cannot serve a matmul outside the loop."""

    def run(p, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["q"])
        return x @ jnp.concatenate([p["q"][0], p["k"]], axis=1)

    case = converted(door, run, {"q": W, "k": W[0]}, X, "delayed", exempt=())
    case.step(X)
    # NNX keeps no state for the second kind of matmul of a weight.
    assert moved(case) == {"function": {"q", "q+k"}, "linen": {"q", "q_2"}, "nnx": {"q"}}[door]
    assert 0 < relative_error(case(X), case.plain(X)) < 0.2


@every_door
def test_a_scan_of_no_layers(door):
    run = lambda p, x: lax.scan(lambda x, _: (x @ p["w"], None), x, None, length=0)[0]
    case = converted(door, run, {"w": W[0]}, X, "delayed", exempt=())
    np.testing.assert_array_equal(case(X), X)


@every_door
@pytest.mark.parametrize("later", [False, True], ids=["remat2", "remat3"])
@pytest.mark.representative(4)
def test_checkpoints_of_both_versions_are_entered(later, door):
    """They have the matmuls, gradients and amaxes of a model that saves everything."""
    block = lambda w, x: jnp.tanh(jax.nn.silu(jnp.tanh(x @ w) @ w))
    again = lambda p, x: p("head", jax.checkpoint(block)(p["w"], x))
    saved = lambda p, x: p("head", block(p["w"], x))
    params = {"w": W[0], "head": W[1]}
    case, expected = (
        converted(door, run, params, X, "delayed", layers=["head"]) for run in (again, saved)
    )
    step = expected.step(X)
    with later_primitives() if later else contextlib.nullcontext():
        assert_same(case.step(X), step)
        assert_same(case.states(), expected.states())
        rows = case.report(X).rows
    assert {row.kind for row in rows if row.path != "head"} == {"fprop", "dgrad", "wgrad"}
    assert {row.path for row in rows if not row.fp8} == {"head"}  # the logits


@every_door
@pytest.mark.filterwarnings("ignore:Matmuls stay in high precision")
def test_a_primitive_that_is_not_known_is_told(door):
    """Its matmuls stay as they are, which a warning and the report say."""

    def run(p, x):
        inverse = lambda _, b: b @ p["w"]
        solved = lax.custom_linear_solve(lambda y: y @ p["w"], x, inverse, symmetric=True)
        return p("up", x) + solved

    unknown = "custom_linear_solve', a primitive that jfp8 does not know"
    case = converted(door, run, {"w": jnp.eye(8), "up": W[0]}, X, layers=["up"], exempt=())
    with pytest.warns(UserWarning, match=unknown):
        rows = case.report(X).rows
    assert {row.path for row in rows if row.fp8} == {"up"}
    reasons = {row.reason for row in rows if not row.fp8}
    assert reasons == {"inside custom_linear_solve, a primitive that jfp8 does not know"}
