"""The library neither promotes dtypes nor ranks by itself: it runs where JAX forbids both."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jfp8
from jfp8.scaling.scales import SCALE_ROUNDINGS

X = jnp.linspace(-3.0, 5.0, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def strict():
    """The rank half, jax_numpy_rank_promotion=raise, holds for every test (conftest)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
def test_quantize_and_multiply(scale_rounding):
    @jax.jit
    def run(x):
        results = []
        for granularity in (jfp8.PerTensor(), jfp8.PerAxis(1), jfp8.Block((2, 4))):
            q = jfp8.quantize(x, granularity=granularity, scale_rounding=scale_rounding)
            results.append(q.dequantize(jnp.bfloat16))
            results.append(jfp8.scaled_matmul(q, q, (((1,), (1,)), ((), ()))))
        return results

    assert all(jnp.isfinite(result).all() for result in run(X))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "micro_batches"), [(jnp.bfloat16, 1), (jnp.float16, 2)])
def test_train_step(dtype, micro_batches):
    model = jfp8.Dense(5, dtype=dtype)
    tx = jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(), optax.sgd(0.1)))
    state = jfp8.TrainState.create(
        apply_fn=model.apply, variables=model.init(jax.random.key(0), X), tx=tx
    )

    def loss_fn(variables, x):
        y, mutated = model.apply(variables, x, mutable=["fp8"])
        return y.sum().astype(jnp.float32), mutated

    @jax.jit
    def step(state, x):
        loss, grads = jfp8.value_and_grad(loss_fn, micro_batches=micro_batches)(state, x)
        return state.apply_gradients(grads), loss

    state, loss = step(state, X)
    assert jnp.isfinite(loss)
    assert state.step == 1
