"""Random bits: as even and unrelated as random, and the same however they are computed.

Keys are fixed, so every test is deterministic; its bounds are five standard deviations of what
truly random bits would give.
"""

from __future__ import annotations

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


def ones_per_position(words: np.ndarray) -> np.ndarray:
    """For each of the 32 bits, the fraction of words that have it set."""
    return np.array([np.mean((words >> np.uint32(i)) & np.uint32(1)) for i in range(32)])


def assert_balanced(words: np.ndarray):
    np.testing.assert_allclose(ones_per_position(words), 0.5, atol=5 * 0.5 / np.sqrt(words.size))


def assert_even(values: np.ndarray, buckets: int):
    """Chi-squared over the counts of `values`, integers below `buckets`."""
    expected = values.size / buckets
    counts = np.bincount(values, minlength=buckets)
    chi_squared = np.sum((counts - expected) ** 2) / expected
    freedom = buckets - 1
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


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


def test_every_bit_is_balanced(bits):
    assert_balanced(bits)


@pytest.mark.parametrize("shift", [0, 8, 12, 16, 24])
def test_every_byte_is_even(bits, shift):
    assert_even((bits >> np.uint32(shift)) & np.uint32(0xFF), 256)


def test_pairs_of_neighbours_are_even(bits):
    """The low bits, which stochastic rounding uses, of every element and the next."""
    low = bits & np.uint32(0xF)
    assert_even((low[0::2] << np.uint32(4)) | low[1::2], 256)


@pytest.mark.parametrize("distance", [1, 2, 3, 128, 1024])
def test_elements_at_a_distance_are_not_correlated(bits, distance):
    a, b = bits[:-distance], bits[distance:]
    assert_balanced(a ^ b)
    uniform = bits / 2.0**32 - 0.5
    correlation = np.mean(uniform[:-distance] * uniform[distance:]) * 12
    assert abs(correlation) < 5 / np.sqrt(len(a))


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        jax.random.key(1),
        jax.random.key(2**31),
        jax.random.fold_in(KEY, 0),
        jax.random.fold_in(KEY, 1),
        *jax.random.split(KEY),
    ],
    ids=["key1", "key2^31", "fold0", "fold1", "split0", "split1"],
)
def test_keys_are_not_correlated(bits, other):
    others = np.asarray(jit_bits(other, (N,)))
    assert_balanced(bits ^ others)
    assert_balanced(others)
    # Nor is one the other, moved: for a window of it no start in the other fits.
    assert np.mean(np.isin(bits, others)) < 10 * N / 2**32


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
        assert_balanced(seeds.ravel())


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (3, 1, 2), (0,), (2, 0, 3)])
def test_a_shape_is_a_view_of_the_flat_bits(bits, shape):
    result = jit_bits(KEY, shape)
    assert result.shape == shape
    np.testing.assert_array_equal(np.asarray(result).ravel(), bits[: result.size])


def test_shapes_beyond_32_bits_of_index_can_be_traced():
    shape = (2, 2**17, 2**16)
    assert jax.eval_shape(lambda: random_bits(KEY, shape)).shape == shape


@pytest.mark.slow
def test_raw_keys_are_keys():
    raw = random_bits(jax.random.PRNGKey(7), (5,))
    np.testing.assert_array_equal(raw, random_bits(jax.random.key(7), (5,)))
    assert np.any(np.asarray(raw) != np.asarray(random_bits(KEY, (5,))))


@pytest.mark.slow
def test_jit_and_vmap_agree_with_eager():
    keys = jax.random.split(KEY, 3)
    eager = np.stack([random_bits(key, (7, 9)) for key in keys])
    np.testing.assert_array_equal(jit_bits(keys[0], (7, 9)), eager[0])
    np.testing.assert_array_equal(jax.vmap(lambda key: random_bits(key, (7, 9)))(keys), eager)
    assert len(np.unique(eager)) == eager.size


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y"), P(("x", "y"))], ids=str)
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
