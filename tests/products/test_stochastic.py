"""Stochastic rounding in products, seen through identity matrices: reproducible, unbiased."""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import recipes, scaled_dot_general
from jfp8.quantizers.rowwise import Rowwise
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.product import Product
from jfp8.tracing.compat import jaxprs_of
from support.arrays import normal

PLAIN = (((1,), (0,)), ((), ()))
N = 48
EYE = np.eye(N, dtype=np.float32)

HYBRID = recipes.Hybrid(quantize_outputs=False)
NVFP4 = recipes.NVFP4BlockScaling(random_hadamard=False)


@partial(jax.jit, static_argnames=("recipe", "numbers"))
def value_and_grads(lhs, rhs, dy, key=None, *, recipe, numbers=PLAIN):
    f = lambda lhs, rhs: scaled_dot_general(lhs, rhs, numbers, recipe=recipe, key=key)
    y, vjp = jax.vjp(f, lhs, rhs)
    return y, *vjp(dy)


def differ(a, b) -> bool:
    """As independent roundings do: in many elements, and not in all."""
    share = np.mean(np.asarray(a) != np.asarray(b))
    return 0.1 < share < 0.9


def same(a, b) -> bool:
    return np.array_equal(a, b)


@pytest.mark.parametrize("key", [None, jax.random.key(5)], ids=["no key", "key"])
def test_operands_and_directions_use_different_bits(key):
    """One matrix as lhs, rhs and gradient is rounded in six ways, with equal scales."""
    x = np.where(normal((N, N), 1) > 0, np.float32(1.1), np.float32(-1.7))
    x[:, 0], x[0] = 2.0, 2.0
    rowwise = Rowwise(jfp8.E4M3FN, rounding="stochastic")
    run = partial(value_and_grads, key=key, recipe=PerOperand(*[Product(rowwise, rowwise)] * 3))
    y, _, d_rhs = run(x, EYE, EYE)
    y_of_rhs, d_lhs, _ = run(EYE, x, EYE)
    rounded = [y, d_rhs.T, y_of_rhs, d_lhs.T, *run(EYE, EYE, x)[1:]]
    assert all(differ(one, other) for one, other in itertools.combinations(rounded, 2))


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, jax.random.key(5)], ids=["no key", "key"])
def test_scan_iterations_and_examples_differ_if_their_data_do(key):
    """One key for all of them: no key is threaded through scan, vmap or shard_map."""
    x = normal((N, N))
    # Elements of equal value under amaxes that differ by a hair.
    stack = np.stack([x] * 8)
    for i in range(8):
        stack[i, 0, 0] = 8 + i / 1024
    # Like activations, the left operand varies over devices.
    rounded = lambda dy: value_and_grads(EYE + 0 * dy, EYE, dy, key, recipe=HYBRID)[1]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on_devices = jax.shard_map(
        lambda dy: rounded(dy[0])[None], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    loop = np.stack([rounded(dy) for dy in stack])
    for name, results in {
        "vmap": jax.jit(jax.vmap(rounded))(stack),
        "scan": jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, rounded(x)), 0, xs)[1])(stack),
        "shard_map": jax.jit(on_devices)(stack),
    }.items():
        assert same(results, loop), name
    for i in range(8):
        for j in range(i):
            assert differ(loop[i], loop[j])
    # Equal data are rounded alike, which is why a key is better where data repeat.
    assert same(rounded(stack[0]), rounded(stack[0].copy()))


KEYS = 256


@partial(jax.jit, static_argnames="recipe")
def gradients_of_many_keys(lhs, rhs, dy, *, recipe):
    """d_lhs and d_rhs for each of `KEYS` keys."""
    keys = jax.random.split(jax.random.key(6), KEYS)
    one = lambda key: value_and_grads.__wrapped__(lhs, rhs, dy, key, recipe=recipe)[1:]
    return jax.lax.map(one, keys, batch_size=32)


UNBIASED = {
    "hybrid": (recipes.Hybrid(), recipes.Hybrid(stochastic_gradients=False)),
    "direct_e5m2": (recipes.DirectE5M2(), recipes.DirectE5M2(stochastic_gradients=False)),
    "nvfp4": (NVFP4, recipes.NVFP4BlockScaling(random_hadamard=False, stochastic_rounding=False)),
    "nvfp4, rotated": (
        recipes.NVFP4BlockScaling(),
        recipes.NVFP4BlockScaling(stochastic_rounding=False),
    ),
}


def with_the_largest_in_each_block(x):
    """A 4 in each 16 elements, others below 3.5: no scale of NVFP4 saturates or rounds."""
    x = np.clip(np.round(x * 64) / 64, -3.5, 3.5).astype(np.float32)
    i, j = np.indices(x.shape)
    return np.where((i - j) % 16 == 0, np.float32(4), x)


def unrotated(z):
    """Columns whose rotation by 16x16 Hadamard matrices is `z`; exact for multiples of 1/64."""
    rotation = jfp8.quantizers.rotations.Hadamard()
    matrix = np.asarray(rotation(jnp.eye(16), 1), np.float64)  # rows x become x @ matrix
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    x = np.einsum("mk,skn->smn", matrix, z.reshape(-1, 16, z.shape[1]).astype(np.float64))
    return x.reshape(z.shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_gradient_is_that_of_the_unrounded_one(name):
    """Within 5 standard errors over keys; rounding to nearest even fails by far."""
    recipe, nearest = UNBIASED[name]
    n = 32
    lhs = rhs = np.where(normal((n, n), 7) > 0, np.float32(7), np.float32(-7))
    dy = with_the_largest_in_each_block(normal((n, n), 8))
    which = [0, 1]
    if name == "nvfp4, rotated":  # then it is the rotated gradient whose blocks count, in wgrad
        lhs, dy, which = 7 * np.eye(n, dtype=np.float32), unrotated(dy), [1]
    samples = gradients_of_many_keys(lhs, rhs, dy, recipe=recipe)
    fixed = value_and_grads(lhs, rhs, dy, recipe=nearest)[1:]
    lhs, rhs, dy = (x.astype(np.float64) for x in (lhs, rhs, dy))
    exact = (dy @ rhs.T, lhs.T @ dy)
    for i in which:
        drawn, wrong = (np.asarray(x[i], np.float64) for x in (samples, fixed))
        floor = 1e-5 * abs(exact[i]).max()  # where nothing is rounded f32 sums show
        error = np.maximum(drawn.std(axis=0, ddof=1) / np.sqrt(KEYS), floor)
        score = (drawn.mean(axis=0) - exact[i]) / error
        assert abs(score).max() < 5
        assert 0.8 < np.sqrt(np.mean(score**2)) < 1.2
        assert abs(np.mean(score)) < 5 / n
        nearest_score = (wrong - exact[i]) / error
        assert np.sqrt(np.mean(nearest_score**2)) > 3
        assert abs(nearest_score).max() > 5


class TwoLayers(nn.Module):
    """Two layers with equal weights, each followed by nothing, whose gradients are equal."""

    @nn.compact
    def __call__(self, x):
        dense = partial(
            jfp8.Dense, N, use_bias=False, recipe=HYBRID, kernel_init=lambda *_: jnp.asarray(EYE)
        )
        return dense(name="first")(x), dense(name="second")(x)


@partial(jax.jit, static_argnames="model")
def weight_gradients(params, dy, rngs, *, model=None):
    model = model or TwoLayers()
    y, vjp = jax.vjp(lambda p: model.apply({"params": p}, EYE, rngs=rngs), params)
    (grads,) = vjp(tuple(dy for _ in y))
    return grads["first"]["kernel"], grads["second"]["kernel"]


@pytest.mark.slow
def test_layers_draw_from_the_stream_fp8():
    """Two layers get different bits from it, the same key gives the same result."""
    params = TwoLayers().init(jax.random.key(0), EYE)["params"]  # no stream is required
    dy = normal((N, N))
    first, second = weight_gradients(params, dy, {"fp8": jax.random.key(1)})
    assert differ(first, second)
    again = weight_gradients(params, dy, {"fp8": jax.random.key(1)})
    assert same(first, again[0])
    assert same(second, again[1])
    for one, other in zip(
        (first, second), weight_gradients(params, dy, {"fp8": jax.random.key(2)})
    ):
        assert differ(one, other)


@pytest.mark.slow
def test_layers_that_do_not_round_stochastically_leave_the_stream_alone():
    """Or adding such a layer would change the numbers of all others."""

    class Model(nn.Module):
        recipe: recipes.Recipe

        @nn.compact
        def __call__(self, x):
            x = jfp8.Dense(4, recipe=self.recipe)(x)
            return jax.random.key_data(self.make_rng("fp8"))

    keys = {"params": jax.random.key(0), "fp8": jax.random.key(1)}
    results = [
        jax.jit(Model(recipe).init_with_output)(keys, EYE)[0]
        for recipe in (recipes.Float8CurrentScaling(), recipes.RowwiseScaling())
    ]
    assert same(*results)


def random_sizes(jaxpr) -> list[int]:
    """How many bits JAX's own generator is asked for, in each place."""
    sizes = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("random_bits", "threefry2x32"):
            sizes += [max(v.aval.size for v in eqn.outvars)]
        for inner in jaxprs_of(eqn):
            sizes += random_sizes(inner)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [recipes.Hybrid(), recipes.DirectE5M2(), recipes.NVFP4BlockScaling()],
    ids=lambda r: r.name,
)
def test_trap_no_threefry_per_element(recipe):
    """JAX's generator makes the two words of a seed, once, whatever the size of the operands."""
    seen = []
    for n in (16, 256):
        x = jnp.zeros((n, n))
        f = partial(value_and_grads.__wrapped__, recipe=recipe)
        jaxpr = jax.make_jaxpr(f)(x, x, x, jax.random.key(0)).jaxpr
        seen.append(random_sizes(jaxpr))
        assert not random_sizes(jax.make_jaxpr(f)(x, x, x).jaxpr)  # without a key not even that
    assert seen == [[2], [2]]
