"""A `ScaledArray` as people handle one: by leaves, by operators, by index, by NumPy, by pickle."""

import copy
import operator
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jfp8
from jfp8 import E4M3FN, E8M0FNU, Block, ScaledArray
from support.arrays import on_host

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
Q = jfp8.quantize(X)
R = jfp8.quantize(3 * X[::-1])


def values(data, scale) -> np.ndarray:
    """The values where a scale belongs to all, or to each of the elements that it stands beside."""
    return np.asarray(data).astype(np.float32) * np.asarray(scale)


VALUES, OTHERS = values(Q.data, Q.scale), values(R.data, R.scale)


EMA = lambda u, v: 0.9 * u + 0.1 * v
ARITHMETIC = {
    "twice": lambda q, r: jax.tree.map(lambda u: 2 * u, q),
    "EMA": lambda q, r: jax.tree.map(EMA, q, r),
    "difference": lambda q, r: jax.tree.map(operator.sub, q, r),
    "a step": lambda q, r: optax.apply_updates(q, jax.grad(lambda q: q.dequantize().sum())(q)),
    "Adam": lambda q, r: optax.adam(0.1).update(q, optax.adam(0.1).init(q), q),
    "in a scan": lambda q, r: jax.lax.scan(lambda c, _: (ARITHMETIC["EMA"](c, r), 0), q, None, 2),
    "under vmap": lambda q, r: jax.vmap(lambda *qs: ARITHMETIC["EMA"](*qs).dequantize())(
        *jax.tree.map(lambda u: u[None], (q, r))
    ),
    "under grad": lambda q, r: jax.grad(lambda q: ARITHMETIC["EMA"](q, r).dequantize().sum())(q),
}


@pytest.mark.parametrize("function", ARITHMETIC.values(), ids=ARITHMETIC.keys())
def test_trap_arithmetic_of_leaves_that_is_traced(function):
    """``(2 data) * (2 scale)`` is four times the values; an EMA of each is 20 to 58 % wrong."""
    message = r"computed in FP8, by `\w+`, and so was its scale.*is_leaf=jfp8.is_scaled_array"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(function, Q, R)


def test_trap_leaves_in_other_floats():
    """A scale of 1e-9, for example, is zero in float16, and the array with it."""
    wide = lambda u: u.astype(jnp.float32)
    for function in (wide, lambda u: np.asarray(u) * np.float32(0.5)):
        words = r"data of a ScaledArray came back as f32\[8,6\], not"
        with pytest.raises(TypeError, match=words):
            jax.tree.map(function, {"kernel": Q})
    for dtype in (jnp.float16, jnp.bfloat16):
        cast = lambda u, dtype=dtype: u.astype(dtype) if u.dtype == jnp.float32 else u
        words = r"scale of a ScaledArray came back as b?f16\[\], not in f"
        with pytest.raises(TypeError, match=words):
            jax.tree.map(cast, Q)


def test_eager_arithmetic_of_leaves_is_not_seen():
    """An array that is at hand does not know what made it: the documentation says so."""
    halved = jax.tree.map(lambda u: 0.5 * u, jfp8.quantize(jnp.array([1.0, 2.0])))
    np.testing.assert_array_equal(halved.dequantize(), [0.25, 0.5])


def test_whole_arrays_and_dequantized_trees_are_right():
    trees = {"kernel": Q, "bias": jnp.ones(3)}, {"kernel": R, "bias": jnp.zeros(3)}
    expected = 0.9 * VALUES + 0.1 * OTHERS
    whole = jax.jit(lambda a, b: jax.tree.map(EMA, a, b, is_leaf=jfp8.is_scaled_array))(*trees)
    plain = optax.incremental_update(*map(jfp8.dequantize_tree, trees[::-1]), 0.1)
    for tree in (whole, plain):
        np.testing.assert_allclose(tree["kernel"], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(tree["bias"], 0.9)
    assert jfp8.dequantize_tree(trees[0], jnp.bfloat16)["kernel"].dtype == jnp.bfloat16


def test_what_no_arithmetic_is_passes():
    """Selections, parts, copies, zeros and placeholders, traced and not."""

    def moved(q, r):
        chosen = jax.tree.map(lambda u, v: jnp.where(True, u, v), q, r)
        stacked = jax.tree.map(lambda u, v: jnp.stack([u, v]), chosen, r)
        part = jax.tree.map(lambda u: jax.lax.dynamic_index_in_dim(u, 0, keepdims=False), stacked)
        kept = jax.lax.stop_gradient(jax.lax.optimization_barrier(part))
        jax.tree.map(jnp.zeros_like, kept)
        # FP8 that was computed on purpose travels, under the scale that it was computed for.
        halved = ScaledArray(kept.data * 0.5, kept.scale)
        return kept, jax.tree.map(lambda u: u, halved)

    for function in (moved, jax.jit(moved)):
        kept, halved = function(Q, R)
        assert np.asarray(kept.data).tobytes() == np.asarray(Q.data).tobytes()
        np.testing.assert_allclose(halved.dequantize(), VALUES / 2, atol=2.0**-10 * Q.scale)
    for leaf in (0.1, None, np.float32(0.1), jnp.float32(0.1), object(), PartitionSpec(), True):
        jax.tree.map(lambda u, leaf=leaf: leaf, Q)
    twice = jax.grad(lambda q: (q.dequantize() * jnp.sin(q.dequantize())).sum())
    jax.jit(twice)(Q)  # whose cotangents are added, in FP8


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.lt, operator.ge]


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray, lambda x: ScaledArray(x, Q.scale)])
def test_operators_take_the_values(kind):
    """Of both operands, from both sides, of JAX's arrays and of NumPy's."""
    is_scaled = isinstance(kind(Q.data), ScaledArray)
    other, plain = (R, OTHERS) if is_scaled else (kind(OTHERS), OTHERS)
    for op in [*BINARY, operator.eq, operator.ne]:
        close = 0 if op(1.0, 2.0) in (True, False) else 1e-6
        np.testing.assert_allclose(op(Q, other), op(VALUES, plain), rtol=close)
        np.testing.assert_allclose(op(other, Q), op(plain, VALUES), rtol=close)
    np.testing.assert_allclose(Q @ other.T, VALUES @ plain.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other.T @ Q, plain.T @ VALUES, rtol=1e-5, atol=1e-5)
    assert isinstance(Q * 2, jax.Array)


def test_functions_take_the_values():
    for function in (np.exp, np.sum, np.abs, np.asarray, jnp.asarray, jnp.exp, jnp.sum, np.max):
        plain = getattr(np, function.__name__)(VALUES)
        np.testing.assert_allclose(function(Q), plain, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(jnp.einsum("ij,kj->ik", X, Q), X @ VALUES.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(Q), VALUES)
    np.testing.assert_array_equal(-Q, -VALUES)
    np.testing.assert_array_equal(2 * jfp8.quantize(X[0]), 2 * np.asarray(jfp8.quantize(X[0])))
    assert np.asarray(Q, np.float16).dtype == np.float16
    assert np.array(Q).flags.writeable
    traced = jax.jit(lambda q, x: (np.exp(q) @ x, x.T * q, q > x.T))(Q, VALUES.T)
    expected = np.exp(VALUES) @ VALUES.T
    np.testing.assert_allclose(traced[0], expected, rtol=1e-5)
    assert not traced[2].any()
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(np.asarray)(Q)


def test_it_cannot_be_written_to():
    q = Q
    with pytest.raises(TypeError, match="cannot be changed in place"):
        q += 1
    with pytest.raises(TypeError, match="cannot be changed in place"):
        np.add(X, X, out=Q)


def test_layers_of_others_take_it_by_its_values():
    """A stock layer, and one in somebody's own class: right, in float32."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.zeros, (6, 8))
            return nn.Dense(6)(jnp.einsum("bi,ij->bj", x, kernel.astype(x.dtype)))

    params = {"kernel": Q.T, "Dense_0": {"kernel": R, "bias": jnp.ones(6)}}
    y = jax.jit(Own().apply)({"params": params}, X)
    np.testing.assert_allclose(y, X @ VALUES.T @ OTHERS + 1, rtol=1e-4, atol=1e-4)
    param = nnx.Param(Q)
    np.testing.assert_allclose(X.T @ param, X.T @ VALUES, rtol=1e-5, atol=1e-5)
    assert isinstance(param[...], ScaledArray)
    assert param[2].shape == (6,)


def test_equality_is_elementwise_and_of_the_values():
    same = ScaledArray((Q.data.astype(jnp.float32) / 2).astype(E4M3FN.dtype), 2 * Q.scale)
    expected = np.asarray(same.dequantize()) == VALUES  # but for odd subnormal codes
    np.testing.assert_array_equal(same == Q, expected)
    np.testing.assert_array_equal(same != Q, ~expected)
    assert (copy.deepcopy(Q) == Q).all()
    with pytest.raises(ValueError, match="ambiguous"):
        assert Q == Q
    with pytest.raises(TypeError, match="unhashable"):
        hash(Q)
    assert Q != None  # noqa: E711
    assert Q != "Q"
    assert bool(jfp8.quantize(jnp.ones(1)))
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Q)  # not that of its length


def test_equality_of_placeholders_is_one_of_trees():
    shapes = jax.eval_shape(lambda: Q)
    assert shapes == jax.eval_shape(lambda: Q)
    assert shapes != jax.eval_shape(lambda: Q.T)
    assert shapes != Q
    specs = jax.tree.map(lambda leaf: PartitionSpec(), Q)
    assert {"kernel": specs} == {"kernel": jax.tree.map(lambda leaf: PartitionSpec(), R)}
    assert jax.tree.structure(Q) == jax.tree.structure(R)


def test_attributes_are_those_of_the_values():
    blocks = jfp8.quantize(jnp.asarray(X), granularity=Block((4, 4)))
    assert blocks.dtype == np.asarray(blocks).dtype == np.float32
    assert (blocks.size, len(blocks), blocks.nbytes) == (48, 8, 48 + 4 * 2 * 2)
    np.testing.assert_array_equal(blocks.T, np.asarray(blocks).T)
    assert blocks.astype(jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="no length"):
        len(blocks[0, 0])


DATA = np.asarray(Q.data)
PARTS = {
    "one scale": ScaledArray(DATA, np.float32(0.3), (3, 3), np.ones((8, 6))),
    "rows": ScaledArray(DATA, np.arange(1.0, 9.0, dtype=np.float32)[:, None]),
    "blocks": ScaledArray(DATA, np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)),
    "cut short": ScaledArray(DATA, np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2), (3, 4)),
    "E8M0, E3M4": ScaledArray(
        np.arange(48, dtype=np.uint8).reshape(8, 6),
        np.arange(120, 128, dtype=np.uint8).reshape(4, 2).view(E8M0FNU.dtype),
    ),
    "two-level": ScaledArray(
        DATA, ScaledArray(np.arange(1, 9).reshape(4, 2).astype(E4M3FN.dtype), np.float32(2))
    ),
}
INDICES = [0, -1, 7, np.int64(-3), (3, 2), (-1, -1), (..., 5), (slice(None), 4), (1, ...), ()]
INDICES += [np.s_[6:], np.s_[2:2], np.s_[4:5], np.s_[:, 3:3], np.s_[7:8, 5], np.s_[-2:-1, ..., 0:1]]


def assert_is_part(q: ScaledArray, index) -> None:
    part = q[index]
    assert isinstance(part, ScaledArray)
    assert part.format is q.format
    np.testing.assert_array_equal(on_host(part), on_host(q)[index], err_msg=str(index))
    if q.carrier is not None:
        assert part.carrier.shape == part.shape


@pytest.mark.parametrize("q", PARTS.values(), ids=PARTS.keys())
def test_parts_are_parts_of_the_values(q):
    """Elements, and slices that begin and end with blocks or stay in one."""
    for index in INDICES:
        assert_is_part(q, index)
    np.testing.assert_array_equal([on_host(row) for row in q], on_host(q))


@pytest.mark.parametrize("name", ["cut short", "two-level"])
def test_an_index_may_be_traced(name):
    """And count from the end."""
    q = jax.tree.map(jnp.asarray, PARTS[name])
    for i in (-3, 4):
        row, column = jax.jit(lambda q, i: (q[i], q[:, i].dequantize()))(q, i)
        np.testing.assert_array_equal(row, on_host(q)[i])
        np.testing.assert_array_equal(column, on_host(q)[:, i])


def test_longer_parts():
    for index in (np.s_[2:6], np.s_[4:], np.s_[:, :3], np.s_[2:4, 3:], np.s_[1:2, 1:3]):
        assert_is_part(PARTS["blocks"], index)
    for index in (np.s_[3:], np.s_[:6, 4:], np.s_[3:6, :4]):
        assert_is_part(PARTS["cut short"], index)
        assert PARTS["cut short"][index].block == (3, 4)
    for index in (np.s_[::-1], np.s_[1::3, ::-2], np.s_[:, np.array([0])], X > 0, None):
        assert_is_part(PARTS["one scale"], index)
    for index in (np.s_[::-1], np.s_[1::3], np.s_[-1:0:-2, :]):
        assert_is_part(PARTS["rows"], index)


@pytest.mark.parametrize("index", [np.s_[1:3], np.s_[:7], np.s_[::2], np.s_[2:6, 1:], np.s_[::-1]])
def test_parts_that_cut_blocks_are_refused(index):
    with pytest.raises(TypeError, match=r"axis \d cuts blocks of [23] elements.*dequantize\(\)\["):
        PARTS["blocks"][index]


def test_other_indices_are_refused():
    q = PARTS["blocks"]
    for index in (None, np.array([0, 1]), X > 0, True, 1.0):
        with pytest.raises(TypeError, match="by integers and slices, not by"):
            q[index]
    for index in (8, -9, (0, 6), (0, 0, 0), (..., ...)):
        with pytest.raises(IndexError):
            q[index]
    with pytest.raises(ValueError, match="under jax.vmap"):
        jax.vmap(jfp8.quantize)(jnp.ones((2, 3)))[0]


@pytest.mark.parametrize("q", [PARTS["cut short"], PARTS["two-level"]])
def test_copies(q):
    for new in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert new.block == q.block
        assert new.format is q.format
        np.testing.assert_array_equal(on_host(new), on_host(q))
