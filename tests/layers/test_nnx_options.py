"""Options of NNX layers that their Linen twins have: the same results by the same parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jfp8


def test_relative_position_biases():
    options = {"num_buckets": 8, "max_distance": 12, "embedding_init": nnx.initializers.normal(3.0)}
    biases = jfp8.nnx.RelativePositionBiases(4, **options, rngs=nnx.Rngs(0))
    table = biases.rel_embedding.get_value()
    assert table.shape == (4, 8)
    assert 2 < jnp.std(table) < 4
    del options["embedding_init"]
    twin = jfp8.linen.RelativePositionBiases(4, **options)
    expected = twin.apply({"params": {"rel_embedding": table}}, 16, 16)
    np.testing.assert_array_equal(biases(16, 16), expected)
    farther = jfp8.linen.RelativePositionBiases(4, num_buckets=8)
    assert (expected != farther.apply({"params": {"rel_embedding": table}}, 16, 16)).any()


def test_precision_of_experts_in_high_precision():
    layer = jfp8.nnx.ExpertDense(2, 8, 4, precision="highest", rngs=nnx.Rngs(0))
    x, sizes = jnp.ones((6, 8)), jnp.array([2, 4])
    with jfp8.autocast(enabled=False):
        assert "HIGHEST" in str(jax.make_jaxpr(layer)(x, sizes))
