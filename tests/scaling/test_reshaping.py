"""Bytes and scales in other shapes: the same values, bit for bit, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.scaling.reshaping import Reshaped, reshaped_scales
from support.arrays import spread

quantize = jax.jit(jfp8.quantize, static_argnames="granularity")


def quantized(shape, block):
    """An array whose blocks have scales of their own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
    return quantize(x.astype(np.float32), granularity=jfp8.Block(block))


CASES = [
    ((8, 256), (4, 128), (8, 4, 64), (2, 2, 1), (4, 2, 64)),  # two heads share a scale
    ((8, 256), (4, 128), (8, 2, 128), (2, 2, 1), (4, 1, 128)),
    ((4, 2, 64), (1, 2, 64), (8, 64), (4, 1), (2, 64)),
    ((8, 4, 64), (4, 2, 64), (8, 256), (2, 2), (4, 128)),
    ((8, 6), (1, 6), (2, 4, 2, 3), (2, 4, 1, 1), (1, 1, 2, 3)),  # a scale for each row
    ((8, 6), (8, 1), (8, 2, 3), (1, 2, 3), (8, 1, 1)),
    ((5, 300), (2, 128), (5, 1, 300), (3, 1, 3), (2, 1, 128)),  # blocks that are cut short
    ((3, 4), (2, 4), (12,), (2,), (8,)),
]
cases = pytest.mark.parametrize(("shape", "block", "new", "scale", "sizes"), CASES)


@cases
def test_scales_of_whole_blocks(shape, block, new, scale, sizes):
    assert reshaped_scales(shape, block, new) == Reshaped(scale, sizes)


@cases
@pytest.mark.representative(3)
def test_whole_blocks_stay_together(shape, block, new, scale, sizes):
    del sizes
    q = quantized(shape, block)
    r = q.reshape(*new)
    assert r.scale.shape == scale
    np.testing.assert_array_equal(r.data.view(np.uint8).ravel(), q.data.view(np.uint8).ravel())
    np.testing.assert_array_equal(r, np.asarray(q).reshape(new))
    np.testing.assert_array_equal(r.reshape(shape), q)


@pytest.mark.parametrize(
    ("shape", "block", "new"),
    [
        ((8, 384), (4, 128), (8, 2, 192)),  # 128 elements are no whole number of heads
        ((8, 256), (4, 128), (2048,)),  # blocks of two dimensions
        ((4, 2, 64), (2, 1, 64), (8, 64)),  # positions of one head
        ((3, 5), (1, 2), (15,)),  # a shorter block before the end
        ((6, 4), (2, 2), (4, 6)),
    ],
)
def test_trap_blocks_that_would_be_cut(shape, block, new):
    with pytest.raises(ValueError, match="which cuts blocks. Keep a shape whose dimensions"):
        quantized(shape, block).reshape(new)


def test_random_shapes():
    rng, kept = np.random.default_rng(0), 0
    for _ in range(100):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6, 8], rng.integers(1, 4)))
        block = tuple(int(rng.integers(1, n + 1)) for n in shape)
        size, new = int(np.prod(shape)), []
        while len(new) < 2:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            new.append(int(rng.choice(divisors)))
            size //= new[-1]
        new.append(size)
        scale = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        found = reshaped_scales(shape, block, tuple(new))
        if found is not None:
            kept += 1
            # The number of each element's scale, in both shapes.
            number = lambda scale: np.arange(np.prod(scale)).reshape(scale)
            before = spread(number(scale), shape, block).reshape(new)
            np.testing.assert_array_equal(before, spread(number(found.scale), new, found.sizes))
    assert 20 < kept < 100


def test_one_scale_and_other_orders():
    one = jfp8.quantize(jnp.arange(6.0))
    assert one.reshape(2, -1).shape == one.reshape((2, 3)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"6 elements cannot have the shape \(4, 2\)"):
        one.reshape(4, 2)
    q = quantized((4, 6, 10), (2, 3, 4))
    moved = q.transpose(2, 0, 1)
    assert moved.block == (4, 2, 3)
    np.testing.assert_array_equal(moved, np.asarray(q).transpose(2, 0, 1))
    np.testing.assert_array_equal(q.T, np.asarray(q).T)


@pytest.mark.slow
def test_scales_of_two_levels():
    params = jfp8.quantize_params({"d": {"kernel": jnp.ones((32, 32))}}, "nvfp4")
    two = params["d"]["kernel"]
    assert two.scale.scale.ndim == 0
    np.testing.assert_array_equal(two.reshape(32, 2, 16), np.ones((32, 2, 16)))
