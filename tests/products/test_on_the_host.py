"""Programs that were traced for a GPU, and run on the host's CPU all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from support.devices import traced_for

ROWS, GROUPS, IN, OUT = 512, 4, 256, 128


def run_here(function, *args):
    """Return what a program traced for an H100 computes on this machine."""
    with traced_for("NVIDIA H100 80GB HBM3"):
        traced = jax.jit(function).trace(*args)
    assert "jfp8_on_platform" in str(traced.jaxpr)
    return traced.lower(lowering_platforms=("cpu",)).compile()(*args)


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def dot(recipe):
    dims = (((1,), (0,)), ((), ()))
    function = lambda x, w: jfp8.scaled_dot_general(x, w, dims, recipe=recipe)
    return function, draw((1024, 1024), (1024, 1024))


def ragged_dot(recipe):
    sizes = jnp.array([100, 0, 212, 180])
    function = lambda x, w: jfp8.scaled_ragged_dot(x, w, sizes, recipe=recipe)
    return function, draw((ROWS, IN), (GROUPS, IN, OUT))


def experts(recipe):
    layer = jfp8.MoE(GROUPS, OUT, num_experts_per_token=2, recipe=recipe)
    (x,) = draw((ROWS, IN))
    variables = layer.init(jax.random.key(0), x)
    rest = {name: value for name, value in variables.items() if name != "params"}
    function = lambda x, params: layer.apply({**rest, "params": params}, x)
    return function, [x, variables["params"]]


@pytest.mark.parametrize(
    ("operation", "recipe"),
    [(dot, "current"), (ragged_dot, "block"), (experts, "current")],
)
@pytest.mark.representative(2)
def test_the_host_computes_the_reference(operation, recipe):
    function, args = operation(recipe)
    both = jax.value_and_grad(lambda *args: jnp.sum(function(*args) ** 2), argnums=(0, 1))
    expected, found = jax.jit(both)(*args), run_here(both, *args)
    assert float(expected[0]) > 1.0
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Up to the order of sums in f32: tiles of groups may have another height.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(a))))


def test_batches_are_those_of_each():
    function, (x, w) = dot("current")
    xs = jnp.stack([x, 2 * x])
    each = jax.jit(jax.vmap(function, (0, None)))
    np.testing.assert_array_equal(each(xs, w), run_here(jax.vmap(function, (0, None)), xs, w))
