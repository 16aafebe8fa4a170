"""The formulas between the products of a Transformer layer, against numpy in float64."""

import math
from fractions import Fraction
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jfp8.layers import norm_math, position_math, transformer_math
from jfp8.layers.attention_math import attend
from support.arrays import normal

F32_EPS = 2.0**-23


def assert_close(y, expected, ulps=8.0, dtype=jnp.float32):
    """Within some roundings of the largest value: sums may cancel, their terms do not."""
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    assert y.shape == expected.shape
    slack = ulps * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    assert slack > 0, "nothing to compare with"
    np.testing.assert_allclose(y, expected, rtol=0, atol=slack)


def normalized(x, scale, bias, axes, epsilon, kind, zero_centered) -> np.ndarray:
    """As published, over `axes`, in float64; `scale` and `bias` ready to broadcast."""
    x = np.asarray(x, np.float64)
    center = x.mean(axes, keepdims=True) if kind == "layernorm" else 0.0
    spread = np.sqrt(((x - center) ** 2).mean(axes, keepdims=True) + epsilon)
    return (x - center) / spread * (scale + 1.0 * zero_centered) + bias


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_normalize(kind, zero_centered, epsilon):
    x, scale, bias = normal((3, 5, 16)) + 2, normal(16, 1), normal(16, 2)
    y = norm_math.normalize(
        x,
        jnp.asarray(scale),
        jnp.asarray(bias),
        epsilon=epsilon,
        layernorm_type=kind,
        zero_centered_gamma=zero_centered,
    )
    assert_close(y, normalized(x, scale, bias, (-1,), epsilon, kind, zero_centered))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(-1,), (1,), (-2, -1), (-1, -2), (0, 2), (2, 0)])
def test_normalize_over_other_axes(axes):
    """The parameters have the axes' sizes in the axes' order."""
    x = normal((3, 5, 7))
    shape = tuple(x.shape[a] for a in axes)
    scale, bias = normal(shape, 1), normal(shape, 2)

    def laid_out(p):
        order = np.argsort([a % 3 for a in axes])
        full = [n if d in [a % 3 for a in axes] else 1 for d, n in enumerate(x.shape)]
        return p.transpose(order).reshape(full)

    y = norm_math.normalize(x, jnp.asarray(scale), jnp.asarray(bias), axes=axes)
    expected = normalized(x, laid_out(scale), laid_out(bias), axes, 1e-6, "layernorm", False)
    assert_close(y, expected)


@pytest.mark.slow
def test_normalize_computes_bf16_in_f32():
    x = jnp.asarray(normal((4, 64)) + 30, jnp.bfloat16)
    scale, bias = jnp.ones(64, jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)
    y = norm_math.normalize(x, scale, bias)
    assert y.dtype == jnp.float32
    assert_close(y, normalized(x, 1.0, 0.0, (-1,), 1e-6, "layernorm", False))


@pytest.mark.slow
def test_trap_the_variance_does_not_cancel():
    """E[x^2] - E[x]^2 would lose it all: the mean is 10000 standard deviations."""
    x = normal((2, 256)) + np.float32(1e4)
    y = norm_math.normalize(x, jnp.ones(256), jnp.zeros(256))
    expected = normalized(x, 1.0, 0.0, (-1,), 1e-6, "layernorm", False)
    # The mean is rounded to 2^-11, half an ulp of 1e4.
    np.testing.assert_allclose(y, expected, rtol=0, atol=2.0**-10)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def clamped(gate, up):
    """That of gpt-oss."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


FORMULAS = {
    "gelu": (1, lambda x: gelu(x[:, 0])),
    "silu": (1, lambda x: silu(x[:, 0])),
    "relu": (1, lambda x: relu(x[:, 0])),
    "squared_relu": (1, lambda x: relu(x[:, 0]) ** 2),
    "geglu": (2, lambda x: gelu(x[:, 0]) * x[:, 1]),
    "swiglu": (2, lambda x: silu(x[:, 0]) * x[:, 1]),
    "reglu": (2, lambda x: relu(x[:, 0]) * x[:, 1]),
    "clamped_swiglu": (2, lambda x: clamped(x[:, 0], x[:, 1])),
}


@pytest.mark.parametrize("shape", [(4, 8), (8,)])
def test_a_wrong_number_of_projections_is_refused(shape):
    with pytest.raises(ValueError, match=r"'swiglu' takes 2 projections.*\[..., 2, features\]"):
        transformer_math.activate(jnp.ones(shape), "swiglu")


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: norm_math.normalize(x, jnp.ones(64)), jnp.ones((32, 64), jnp.bfloat16)),
        (lambda x: transformer_math.activate(x, "swiglu"), jnp.ones((32, 2, 64), jnp.bfloat16)),
    ],
    ids=["normalize", "activate"],
)
def test_the_backward_pass_keeps_the_input_only(function, x):
    """Not the float32 values in between, of which there are several."""
    kept = jax.tree.leaves(jax.jit(lambda x: jax.vjp(function, x)[1])(x))
    assert [(a.shape, a.dtype) for a in kept if a.size > 64] == [(x.shape, x.dtype)]


def heads_of(groups, heads=4, depth=6, q=3, k=5):
    draw = lambda length, n, seed: normal((2, length, n, depth), seed)
    return draw(q, heads, 0), draw(k, groups, 1), draw(k, groups, 2)


in_high_precision = partial(attend, recipe=None)


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("groups", [4, 2])
def test_weights_are_dropped_as_flax_does(rate, groups):
    """Keys have unit vectors as values, so the result is the weights; one query sees no key."""
    query, key, _ = heads_of(groups, depth=5)
    value = np.broadcast_to(np.eye(5, dtype=np.float32)[:, None], key.shape)
    mask, rng = np.ones((2, 4, 3, 5), bool), jax.random.key(5)
    mask[0, :, 1] = False
    weights = in_high_precision(query, key, value, None, mask).swapaxes(1, 2)
    dropped = nn.Dropout(rate, deterministic=False).apply({}, weights, rng=rng)
    how = {"dropout_rate": rate, "dropout_key": rng}
    y = in_high_precision(query, key, value, None, mask, **how).swapaxes(1, 2)
    np.testing.assert_array_equal(np.any(weights != 0, -1), mask[..., 0])
    np.testing.assert_array_equal(y == 0, dropped == 0)
    np.testing.assert_allclose(y, dropped, rtol=8 * F32_EPS)
    assert rate == 1 or 0.1 < np.mean(np.asarray(y == 0)) < 0.6


def test_masks_and_biases_of_several_batch_dimensions():
    """Each part of the first dimension has a mask of its own; all share one bias."""
    heads = [np.stack([x, -x[::-1]]) for x in heads_of(2)]
    bias, mask = normal((4, 3, 5), 3), normal((2, 1, 1, 3, 5), 4) > -1
    together = in_high_precision(*heads, bias, mask)
    for i in range(2):
        np.testing.assert_array_equal(
            together[i], in_high_precision(*(x[i] for x in heads), bias, mask[i])
        )


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="N a multiple of K"):
        attend(*map(jnp.asarray, heads_of(3)), None, None, recipe=None)


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_of_all_options_and_its_gradients(groups):
    """In float32, by JAX, what it is in float64; and hidden scores have no gradient."""
    heads = heads_of(groups, q=9, k=9)
    ids = np.array([[1] * 4 + [2] * 5, [1] * 7 + [0, 0]])
    bias, grad = normal((2, 4, 9, 9), 3), normal(heads[0].shape, 4)
    found = []
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            tokens = None, None, jnp.asarray(ids), jnp.asarray(ids)
            how = {"is_causal": True, "local_window_size": (3, 0), "tokens": tokens}
            how["sinks"] = jnp.asarray(normal((4,), 5))
            arrays = [jnp.asarray(x, dtype) for x in (*heads, bias, grad)]

            @jax.jit
            def run(*arrays, how=how):
                of = lambda *operands: in_high_precision(*operands, None, **how)
                y, back = jax.vjp(of, *arrays[:-1])
                return [y, *back(arrays[-1])]

            found.append([np.asarray(x) for x in run(*arrays)])
    i, j = np.arange(9)[:, None], np.arange(9)
    same = ids[:, None, :, None] == ids[:, None, None]
    seen = (j <= i) & (j >= i - 3) & same
    for a, b in zip(*found, strict=True):
        assert_close(a, b, ulps=32)
    np.testing.assert_array_equal(found[0][4] != 0, np.broadcast_to(seen, (2, 4, 9, 9)))


@pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (5, 3)])
def test_position_mask(lengths):
    expected = np.tril(np.ones(lengths, bool))
    np.testing.assert_array_equal(position_math.position_mask(lengths), expected)
    later = position_math.position_mask((2, 7), window=(2, 1), first=jnp.int32(3))
    rows = [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]]
    np.testing.assert_array_equal(later, np.array(rows, bool))


def turned(x, positions, windows, pairs_of) -> np.ndarray:
    """Pairs as complex numbers, times ``exp(i angle)``, in float64; one pair after the other."""
    depth = x.shape[-1]
    y = np.zeros(x.shape)
    lo, hi = windows
    for i in range(depth // 2):
        first, second = pairs_of(i, depth)
        angle = np.asarray(positions, np.float64) / (lo * (hi / lo) ** (2 * i / depth))
        pair = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[..., None]
        y[..., first], y[..., second] = pair.real, pair.imag
    return y


PAIRS = {
    "consecutive": lambda i, depth: (2 * i, 2 * i + 1),
    "alternate": lambda i, depth: (i, i + depth // 2),
}


@pytest.mark.parametrize("method", PAIRS)
@pytest.mark.parametrize("windows", [(1, 10_000), (2, 500.0)])
def test_rotary_embedding(method, windows):
    x = normal((2, 30, 3, 8))
    y = position_math.rotary_embedding(jnp.asarray(x), windows=windows, group_method=method)
    expected = turned(x.astype(np.float64), np.arange(30), windows, PAIRS[method])
    # Angles up to 30 are rounded to 2^-20, and turn by that.
    assert_close(y, expected, ulps=32)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("method", PAIRS)
def test_rotary_embedding_of_given_positions(method):
    """Of two packed sequences, positions start anew; they may differ along the batch."""
    x = normal((2, 6, 3, 8))
    positions = np.array([[0, 1, 2, 0, 1, 2], [3, 1, 4, 1, 5, 9]])
    turn = lambda x, p: position_math.rotary_embedding(
        jnp.asarray(x), jnp.asarray(p), group_method=method
    )
    expected = turned(x.astype(np.float64), positions, (1, 10_000), PAIRS[method])
    assert_close(turn(x, positions), expected, ulps=16)
    assert_close(turn(x, positions[1])[1], expected[1], ulps=16)
    assert_close(turn(x[1], positions[1]), expected[1], ulps=16)


def test_rotary_embedding_computes_bf16_in_f32():
    x = jnp.asarray(normal((1, 200, 2, 8)), jnp.bfloat16)
    y = position_math.rotary_embedding(x)
    assert y.dtype == jnp.bfloat16
    expected = turned(np.asarray(x, np.float64), np.arange(200), (1, 10_000), PAIRS["consecutive"])
    assert_close(y, expected, ulps=0.6, dtype=jnp.bfloat16)


def test_rotary_embedding_refuses_what_it_cannot_turn():
    with pytest.raises(ValueError, match="rotates pairs of features, but their number is odd: 7"):
        position_math.rotary_embedding(jnp.ones((3, 2, 7)))
    words = "group_method must be one of 'consecutive', 'alternate'; got 'half'"
    with pytest.raises(ValueError, match=words):
        position_math.rotary_embedding(jnp.ones((3, 2, 8)), group_method="half")


def bucket(distance, bidirectional, num_buckets, max_distance) -> int:
    """The rule of T5 in exact arithmetic: integer powers in place of logarithms."""
    first, back = 0, -distance
    if bidirectional:
        num_buckets //= 2
        first, back = (num_buckets if back < 0 else 0), abs(back)
    back, exact = max(back, 0), num_buckets // 2
    if back < exact:
        return first + back
    ranges = num_buckets - exact
    # exact + floor(ranges * log(back / exact) / log(max_distance / exact))
    step = 0
    while step < ranges - 1 and (
        Fraction(back, exact) ** ranges >= Fraction(max_distance, exact) ** (step + 1)
    ):
        step += 1
    return first + exact + step


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (20, 160), (8, 100)])
def test_relative_position_buckets(bidirectional, num_buckets, max_distance):
    distances = np.arange(-300, 301)
    buckets = position_math.relative_position_buckets(
        distances, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    expected = [bucket(int(d), bidirectional, num_buckets, max_distance) for d in distances]
    np.testing.assert_array_equal(buckets, expected)
    used = set(range(num_buckets))
    # Nothing comes after the query at distance 0: with two directions that bucket stays empty.
    assert set(expected) == (used - {num_buckets // 2} if bidirectional else used)


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_relative_position_bias(bidirectional, lengths):
    table = normal((2, 8))
    bias = position_math.relative_position_bias(
        jnp.asarray(table), *lengths, bidirectional=bidirectional, max_distance=5
    )
    assert bias.shape == (2, *lengths)
    for q, k in np.ndindex(lengths):
        expected = table[:, bucket(k - q, bidirectional, 8, 5)]
        np.testing.assert_array_equal(bias[:, q, k], expected)


def test_activations():
    """All, in one program."""
    assert set(transformer_math.ACTIVATIONS) == set(FORMULAS)
    x = 3 * normal((8, 2, 4))
    given = {name: x[:, :n] for name, (n, _) in FORMULAS.items()}
    activate = transformer_math.activate
    found = jax.jit(lambda given: {name: activate(x, name) for name, x in given.items()})(given)
    for name, (n, formula) in FORMULAS.items():
        assert transformer_math.projections_of(name) == n
        expected = formula(given[name].astype(np.float64))
        np.testing.assert_allclose(found[name], expected, rtol=4e-6, atol=50 * F32_EPS)


# The operations of programs for a GPU: others, with the same values.

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.mark.parametrize("device", [None, H200], ids=["cpu", "gpu"])
def test_residual_sum(device):
    """The sum, in every dimension and mapped; its gradients are that of the sum, in both modes."""
    x, y, dz = normal((2, 3, 4)), normal((2, 3, 4), 1), normal((2, 3, 4), 2)
    f = lambda x, y: transformer_math.residual_sum(x, y.astype(jnp.bfloat16))
    rounded = np.asarray(jnp.asarray(y, jnp.bfloat16), np.float32)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        z, back = jax.vjp(f, x, y)
        np.testing.assert_array_equal(z, x + rounded)
        np.testing.assert_array_equal(jax.vmap(f)(x, y), x + rounded)
        dx, dy = back(dz)
        np.testing.assert_array_equal(dx, dz)
        np.testing.assert_allclose(dy, dz, rtol=2.0**-8)
        _, tangent = jax.jvp(f, (x, y), (dz, 0 * y))
        np.testing.assert_array_equal(tangent, dz)
