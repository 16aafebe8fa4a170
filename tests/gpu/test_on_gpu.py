"""The same program on an NVIDIA GPU, if that is the default device, and on the CPU beside it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from jfp8 import recipes

pytestmark = pytest.mark.gpu

PLAIN = (((1,), (0,)), ((), ()))
EVERY = [cls() for cls in recipes.RECIPES]


def on_cpu(f, *args):
    """`f` traced anew and compiled for the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(f)(*jax.device_put(args, cpu))


def error(found, expected):
    """Relative, in the Frobenius norm."""
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    assert np.linalg.norm(b) > 0
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def operands(m, k, n, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=s) for s in ((m, k), (k, n), (m, n)))
    return [jnp.asarray(x, dtype) for x in arrays]


@pytest.mark.parametrize("fmt", [jfp8.E4M3FN, jfp8.E5M2], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_casts_give_the_same_bytes(fmt, dtype):
    """All patterns of 16 bits; of f32 those whose lower half is zero, and random ones."""
    rng = np.random.default_rng(0)
    if dtype == jnp.float32:
        upper = np.arange(2**16, dtype=np.uint32) << 16
        bits = np.concatenate([upper, rng.integers(0, 2**32, 2**18, dtype=np.uint32)])
    else:
        bits = np.arange(2**16, dtype=np.uint16)
    x = jnp.asarray(bits.view(dtype))
    f = lambda x: jax.lax.bitcast_convert_type(jfp8.cast(x, fmt), jnp.uint8)
    np.testing.assert_array_equal(jax.jit(f)(x), on_cpu(f, x))


@pytest.mark.parametrize("implementation", [None, "emulate"])
@pytest.mark.parametrize("shape", [(1024, 768, 640), (1000, 333, 777), (64, 48, 32)], ids=str)
@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.name)
def test_products_and_gradients(recipe, shape, implementation):
    """Hopper's fast sums keep 14 bits; everything else is an f32 sum, rounded to bf16."""

    def f(x, w, dy):
        product = lambda x, w: jfp8.scaled_dot_general(
            x, w, PLAIN, recipe=recipe, implementation=implementation
        )
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    arrays = operands(*shape)
    for found, expected in zip(jax.jit(f)(*arrays), on_cpu(f, *arrays), strict=True):
        assert error(found, expected) < 5e-3


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mxfp8"])
def test_grouped_products(name):
    def f(x, w, dy, sizes):
        product = lambda x, w: jfp8.scaled_ragged_dot(x, w, sizes, recipe=recipes.get(name))
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    x, w, dy = operands(1024, 512, 384)
    w, sizes = jnp.stack([w, 2 * w, w / 2]), jnp.array([500, 0, 424])
    for found, expected in zip(jax.jit(f)(x, w, dy, sizes), on_cpu(f, x, w, dy, sizes)):
        assert error(found, expected) < 5e-3


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_training(name):
    """Losses of 30 steps, with histories, micro-batches and a loss scale."""
    recipe = recipes.get(name)
    layer = lambda n: jfp8.Dense(n, dtype=jnp.bfloat16, recipe=recipe)
    model = nn.Sequential([layer(1024), nn.relu, layer(1024), nn.relu, nn.Dense(1)])
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1024, 256)), jnp.float32)
    target = jnp.tanh(x[:, :8].sum(1))

    def loss_fn(variables, batch):
        x, target = batch
        return jnp.mean((model.apply(variables, x)[:, 0] - target) ** 2), {}

    def train(x, target):
        variables = model.init(jax.random.key(0), x)
        tx = optax.chain(jfp8.loss_scale(), optax.adam(1e-3))
        state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

        def step(state, _):
            loss, grads = jfp8.value_and_grad(loss_fn, micro_batches=2)(state, (x, target))
            return state.apply_gradients(grads), loss

        return jax.lax.scan(step, state, length=30)[1]

    found, expected = np.asarray(jax.jit(train)(x, target)), np.asarray(on_cpu(train, x, target))
    assert expected[-1] < expected[0] / 2
    np.testing.assert_allclose(found, expected, rtol=0.05)
