"""Random bits: a hash of index and key that others have tested, however they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfp8.scaling.random_bits import fold_in, random_bits, seed_of

N = 2**18
KEY = jax.random.key(0)
jit_bits = jax.jit(random_bits, static_argnums=1)


@pytest.fixture(scope="module")
def bits() -> np.ndarray:
    return np.asarray(jit_bits(KEY, (N,)))


def test_bits_are_the_hash_of_the_index_and_the_key(bits):
    """Namely murmur3's finalizer, of which some values are known."""

    def finalizer(h):
        h = h ^ (h >> np.uint32(16))
        h = h * np.uint32(0x85EBCA6B)
        h = h ^ (h >> np.uint32(13))
        h = h * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    known = {0: 0, 1: 0x514E28B7, 2: 0x30F4C306, 0xFFFFFFFF: 0x81F16F39}
    assert finalizer(np.uint32([*known])).tolist() == [*known.values()]
    seed = np.asarray(jax.random.bits(KEY, (2,), jnp.uint32))
    index = np.arange(N, dtype=np.uint32)
    expected = finalizer(finalizer(index + seed[0]) ^ seed[1])
    assert bits.dtype == np.uint32
    np.testing.assert_array_equal(bits, expected)


# Seeds: the two words of a key, and others made from them.


def test_different_words_give_different_seeds():
    words = np.random.default_rng(0).integers(0, 2**32, 10_000).astype(np.uint32)
    words = np.unique(np.append(words, np.arange(1000, dtype=np.uint32)))
    for seed in (seed_of(KEY), jnp.zeros((2,), jnp.uint32)):
        seeds = np.asarray(jax.jit(jax.vmap(fold_in, in_axes=(None, 0)))(seed, words))
        assert seeds.shape == (len(words), 2)
        assert len(np.unique(seeds, axis=0)) == len(words)
        alone = fold_in(seed, jnp.asarray(words[7]))
        np.testing.assert_array_equal(seeds[7], alone)
        ones = [np.mean(seeds >> i & 1) for i in range(32)]
        np.testing.assert_allclose(ones, 0.5, atol=5 * 0.5 / np.sqrt(seeds.size))


def test_a_shape_is_a_view_of_the_flat_bits(bits):
    for shape in ((), (6,), (3, 1, 2), (2, 0, 3)):
        result = jit_bits(KEY, shape)
        assert result.shape == shape
        np.testing.assert_array_equal(np.asarray(result).ravel(), bits[: result.size])
    beyond_32_bits = (2, 2**17, 2**16)
    assert jax.eval_shape(lambda: random_bits(KEY, beyond_32_bits)).shape == beyond_32_bits


@pytest.mark.slow
def test_jit_and_vmap_agree_with_eager():
    keys = jax.random.split(KEY, 3)
    eager = np.stack([random_bits(key, (7, 9)) for key in keys])
    np.testing.assert_array_equal(jit_bits(keys[0], (7, 9)), eager[0])
    np.testing.assert_array_equal(jax.vmap(lambda key: random_bits(key, (7, 9)))(keys), eager)
    assert len(np.unique(eager)) == eager.size


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(None, "x"), P("x", "y"), P(("x", "y"))], ids=str)
def test_sharding_changes_nothing_and_moves_nothing(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    shape = (64, 48)
    sharding = NamedSharding(mesh, spec)
    sharded = jax.jit(random_bits, static_argnums=1, out_shardings=sharding)
    result = sharded(KEY, shape)
    assert result.sharding == sharding
    np.testing.assert_array_equal(result, random_bits(KEY, shape))
    program = sharded.lower(KEY, shape).compile().as_text()
    assert "uint32" in program or "u32" in program
    for moved in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert moved not in program


def test_a_word_may_be_of_any_integer_dtype():
    seed = seed_of(KEY)
    for word in (0, 5, 2**31 - 1):
        expected = fold_in(seed, np.uint32(word))
        np.testing.assert_array_equal(fold_in(seed, jnp.int32(word)), expected)
