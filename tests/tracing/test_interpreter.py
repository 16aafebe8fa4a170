"""The interpreter of traced programs, by readers that change, emit, feed and count."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import jfp8
from jfp8.tracing import interpreter
from jfp8.tracing.compat import primitive_name
from jfp8.tracing.interpreter import Place, Reader, Value, arrays, equations
from jfp8.training.hoist import split
from support.arrays import assert_same
from support.later_jax import later_primitives

P = PartitionSpec
X = np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3)
W = np.linspace(-1, 1, 18, dtype=np.float32).reshape(2, 3, 3)


def read_by(reader, f, *args, **feeds):
    """Return the results of ``f(*args)``, and what the reader emits."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    ins = map(Value, jax.tree.leaves(args))
    outs, emitted = interpreter.run(reader, closed.jaxpr, closed.consts, ins, Place(feeds=feeds))
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays(outs)), emitted


def sharded(f):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 3 * tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.cos(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, dy: (5 * dy * x,))


def program(x, w):
    """Call everything that the interpreter enters, and functions with their own derivative."""

    def turn(carry, w):
        y = jnp.tanh(carry @ w) + x[:1]
        return y, y.sum(0)

    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(turn, policy=policy, prevent_cse=False)
    y, sums = lax.scan(layer, jax.jit(jnp.sinh)(x), w, reverse=True)
    limit = lax.stop_gradient(y).max()
    n, _ = lax.while_loop(lambda s: s[1] < limit + 9, lambda s: (s[0] + 1, s[1] + 2), (0, limit))
    y = lax.cond(n > 3, with_jvp, with_vjp, y)
    return jnp.sum(sharded(lambda y: y * y)(y)) + jnp.sum(with_vjp(with_jvp(sums))), n


def test_a_reader_that_changes_nothing():
    again = lambda x, w: read_by(Reader(), program, x, w)[0]
    gradients = lambda f: jax.value_and_grad(f, argnums=(0, 1), has_aux=True)
    names = lambda f: [e.primitive.name for e, *_ in equations(jax.make_jaxpr(f)(X, W).jaxpr)]
    entered, *others = map(names, (program, again))
    for found in (entered, *others):
        assert {"scan", "while", "cond", "shard_map", "custom_jvp_call"} <= set(found)
    (policy,) = (
        eqn.params["policy"]
        for eqn, *_ in equations(jax.make_jaxpr(again)(X, W).jaxpr)
        if primitive_name(eqn) == "checkpoint"
    )
    assert policy is jax.checkpoint_policies.dots_saveable
    assert_same(jax.jit(gradients(again))(X, W), jax.jit(gradients(program))(X, W))


class Marks(Reader):
    """Emit the sum of what is marked by a name, which is multiplied by a factor and by a feed."""

    emits = True

    def __init__(self, factor):
        self.factor = factor  # bodies close over it

    def equation(self, eqn, ins, at):
        if eqn.primitive.name != "name":
            return None
        y = ins[0].array * self.factor * at.feeds.get(eqn.params["name"], 1)
        return [Value(y)], [((eqn.params["name"], at.path), y.sum())]

    def slices(self, name, at):
        return name == "scan"

    def merge(self, key, stacked):
        return stacked.sum(0)

    def nothing(self, key, like):
        return jnp.zeros(like.shape, like.dtype)

    def merge_devices(self, key, x, axes):
        return lax.psum(x, axes)


def marked(x, w):
    """Compute what `in_numpy` does; each mark doubles."""
    mark = checkpoint_name
    x, y = lax.scan(lambda x, w: (mark(x @ w, "scan"), x.sum()), x, w)
    turn = lambda state: (state[0] + 1, mark(state[1], "while"))
    _, x = lax.while_loop(lambda state: state[0] < 3, turn, (0, x))
    x = lax.cond(x[0, 0] < 1e9, lambda x: mark(x, "taken"), lambda x: mark(x, "not taken"), x)
    x = jax.checkpoint(lambda x: mark(x, "checkpoint"))(x)
    return sharded(lambda x: mark(x, "shard_map"))(x), y


def in_numpy(x, w, feed):
    sums, emitted = [], {"scan": [], "while": 0, "not taken": 0}
    for each, fed in zip(w, feed, strict=True):
        sums.append(x.sum())
        x = 2 * fed * (x @ each)
        emitted["scan"].append(x.sum())
    for _ in range(3):
        x = 2 * x
        emitted["while"] += x.sum()
    for name in ("taken", "checkpoint", "shard_map"):
        x = 2 * x
        emitted[name] = x.sum()
    return (x, np.array(sums)), emitted


def test_what_is_emitted_and_fed():
    feed = np.array([1.0, -3.0], np.float32)
    run = lambda x, w, feed, two: read_by(Marks(two), marked, x, w, scan=feed)
    keys = []

    def results_and_emitted(*args):
        results, emitted = run(*args)
        keys.extend(name for (name, _), _ in emitted)
        return results, [x for _, x in emitted]

    results, emitted = jax.jit(results_and_emitted)(X, W, feed, 2.0)
    expected, expected_emitted = in_numpy(X, W, feed)
    assert sorted(keys) == sorted(expected_emitted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), results, expected)
    for x, name in zip(emitted, keys, strict=True):
        np.testing.assert_allclose(x, expected_emitted[name], rtol=1e-5, err_msg=name)


class Matmuls(Reader):
    """Count the matmuls in a program, and follow the arguments that they multiply."""

    computes = False

    def __init__(self):
        self.found = []

    def equation(self, eqn, ins, at):
        if eqn.primitive.name == "dot_general":
            self.found.append(ins[1].note)

    def flow(self, eqn, ins):
        return [ins[0].note if ins else None] * len(eqn.outvars)


def test_counting_is_a_short_reader():
    assert len(inspect.getsource(Matmuls).strip().splitlines()) <= 15
    reader = Matmuls()
    closed = jax.make_jaxpr(jax.jit(jax.grad(lambda w, x: program(x, w)[0])))(W, X)
    ins = [Value(None, "w"), Value(None, "x")]
    outs, emitted = interpreter.run(reader, closed.jaxpr, closed.consts, ins)
    assert len(reader.found) == str(closed).count("dot_general") > 2
    assert {"w"} <= set(reader.found)
    assert (arrays(outs), emitted) == ([None], [])


class Told(Reader):
    def __init__(self):
        self.told = []

    def closed_to(self, eqn, ins, at):
        self.told.append(eqn.primitive.name)
        return super().closed_to(eqn, ins, at)


def solved(x):
    solve = lambda _, b: b / 2
    return with_jvp(lax.custom_linear_solve(lambda y: 2 * y, x[0], solve, symmetric=True))


def test_a_body_that_is_not_known_stays_and_is_told():
    reader, inlines = Told(), Told()
    y, _ = read_by(reader, solved, X)
    np.testing.assert_allclose(y, np.sin(X[0] / 2), rtol=1e-6)
    assert reader.told == ["custom_linear_solve", "custom_jvp_call"]
    inlines.inlines_rules = True
    assert_same(read_by(inlines, solved, X)[0], y)
    assert inlines.told == ["custom_linear_solve"]
    follows = Told()
    follows.computes = False
    read_by(follows, solved, X)
    assert follows.told == ["custom_linear_solve"]


@pytest.fixture(params=[["jax_remat3"], []], ids=["remat3", "all"])
def later(request):
    with later_primitives(*request.param):
        yield


def test_a_later_checkpoint_is_entered(later):
    multiply = lambda w, x: x @ w
    layer = jfp8.convert(multiply, "current", exempt=())
    plain = lambda w, x: jnp.tanh(layer(w, layer(w, x)))
    policy = jax.checkpoint_policies.everything_saveable
    saved = lambda w, x: jax.checkpoint(plain, policy=policy)(w, x)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(saved)(W[0], X).eqns]
    assert names == ["call_hi_primitive"]
    with_statistics = [jax.jit(jfp8.debug.stats(f))(W[0], X) for f in (saved, plain)]
    (y, seen), (expected, others) = with_statistics
    assert_same(y, expected)
    assert len(seen.vectors) == 4
    assert seen.rows() == others.rows()
    rows = jfp8.report(saved, W[0], X).rows
    assert [(row.kind, row.fp8) for row in rows] == [
        (row.kind, row.fp8) for row in jfp8.report(plain, W[0], X).rows
    ]

    @partial(jax.checkpoint, policy=policy)
    def quantized_inside(w, x):
        q = jfp8.quantize(w)
        return x @ q.data.astype(jnp.float32) * q.scale

    kept, rest = split(quantized_inside, W[0], X)
    assert sorted(leaf.dtype.name for leaf in jax.tree.leaves(kept)) == ["float32", "uint8"]
    assert_same(rest(kept, X), quantized_inside(W[0], X))
