"""`jfp8.backends`: which backends may compute what jfp8 quantizes."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
from support.devices import traced_for

# Blocks in bf16 are, and a report says so.
pytestmark = pytest.mark.filterwarnings("ignore:On NVIDIA .*FP8 is expected")

SIZE = 4096  # where FP8 pays on all GPUs below
DIMS = (((1,), (0,)), ((), ()))
X = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)


def dot(recipe="current", implementation=None):
    return lambda x, w: jfp8.scaled_dot_general(
        x, w, DIMS, recipe=recipe, implementation=implementation
    )


def used(function, *args, kind="NVIDIA H100"):
    """Return which backends a report names for the matmuls of `function`."""
    with traced_for(kind):
        return {row.cuda.partition(":")[0] for row in jfp8.report(function, *args).rows}


def test_only_allowed_backends_compute():
    assert used(dot(), X, X) == {"xla"}
    with jfp8.backends("bf16"):
        assert used(dot(), X, X) == {"bf16"}
        assert used(dot("block"), X, X) == {"bf16"}
    with jfp8.backends(without="xla"):
        assert used(dot(), X, X) <= {"bf16", "mosaic_gpu"}
    with jfp8.backends("emulate", "xla"):
        assert used(dot("block"), X, X) == {"emulate"}
    assert used(dot(), X, X) == {"xla"}  # all are allowed again


def test_the_reference_alone_is_the_program_of_a_cpu():
    jaxpr = lambda: re.sub(
        r"0x\w+", "", str(jax.make_jaxpr(jax.grad(lambda x: dot()(x, x).sum()))(X))
    )
    expected = jaxpr()
    with traced_for(), jfp8.backends("emulate"):
        assert jaxpr() == expected
    with traced_for():
        assert jaxpr() != expected


def test_it_holds_in_converted_models_and_caches_of_jit():
    layer = jfp8.convert(nn.Dense(SIZE, dtype=jnp.bfloat16), recipe="current", exempt=())
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    own = nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)))
    own = jfp8.convert(own, recipe="current", exempt=())
    step, found = jax.jit(dot()), []
    with traced_for():
        for context, name in ((jfp8.backends(), "xla"), (jfp8.backends("bf16"), "bf16")):
            with context:
                for model, args in ((layer, (variables, X)), (own, (X,))):
                    rows = jfp8.report(model, *args).rows
                    assert {row.cuda.partition(":")[0] for row in rows} == {name}
                found.append(str(step.trace(X, X).jaxpr))
    assert found[0] != found[1]


@pytest.mark.parametrize("function", [
    dot("mxfp8"),
    lambda x, w: jfp8.scaled_ragged_dot(x, w[None], jnp.array([SIZE]), recipe="mxfp8"),
    lambda x, w: jfp8.scaled_conv_general_dilated(
        x[None, :64, :64, None], w[:3, :3, None, None], (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    lambda x, w: jfp8.scaled_dot_product_attention(
        *[x[None, :128, :192].reshape(1, 128, 2, 96)] * 3, recipe="current"
    ),
])  # fmt: skip
def test_what_no_allowed_backend_computes_is_loud(function):
    loud = pytest.raises(NotImplementedError, match=r"(?s)allow.*'bf16' or 'emulate' as well")
    with traced_for(), jfp8.backends("mosaic_gpu", "xla"), loud:
        jax.make_jaxpr(function)(X, X)


def test_on_a_cpu_only_the_reference_computes():
    x = jnp.eye(4)
    with jfp8.backends("emulate"):
        np.testing.assert_array_equal(dot("unscaled")(x, x), x)
    with jfp8.backends("mosaic_gpu"), pytest.raises(NotImplementedError, match="'emulate'"):
        dot()(x, x)


def test_bf16_by_name_gives_the_numbers_of_the_reference():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(2))
    for recipe in ("current", "block", "mxfp8", "nvfp4"):
        expected = dot(recipe, "emulate")(x, w)
        # Stored values and powers of two are exact in bf16; other scales of blocks have 3 terms.
        np.testing.assert_allclose(dot(recipe, "bf16")(x, w), expected, rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(expected)) > 1


def test_errors():
    x = jnp.eye(4)
    with pytest.raises(ValueError, match=r"'cublas' is unknown. Allowed: emulate, bf16"):
        jfp8.backends("cublas")
    with pytest.raises(ValueError, match="leaves no backend"):
        jfp8.backends("xla", without="xla")
    with jfp8.backends(without="xla"), pytest.raises(NotImplementedError, match="only 'xla'"):
        dot(implementation="xla")(x, x)
