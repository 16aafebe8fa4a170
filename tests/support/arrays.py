"""Arrays for tests, and comparisons of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jfp8 import E3M4, ScaledArray


def normal(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def device_normal(shape, seed=0, scale=1.0, dtype=jnp.float32) -> jax.Array:
    """Return the numbers of `normal`, times `scale`, as an array of JAX."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def standard_normal(seed, shape, dtype=jnp.float8_e4m3fn) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def keyed_normal(seed, shape, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def scales(seed, shape) -> jax.Array:
    """Draw f32 numbers over four orders of magnitude, not powers of two: a wrong one shows."""
    return jnp.asarray(10 ** np.random.default_rng(seed).uniform(-2, 2, shape), jnp.float32)


def along(scale, axis, size) -> np.ndarray:
    """Repeat f64 scales of 128 elements each for all of them."""
    return np.repeat(f64(scale), 128, axis).take(np.arange(size), axis)


def codes(array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def decibels(exact, x) -> float:
    with np.errstate(divide="ignore"):  # values sent in f32 may be exact
        return 20 * np.log10(np.linalg.norm(f64(exact)) / np.linalg.norm(f64(exact) - f64(x)))


def f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def assert_product(y, a, b, out_dtype) -> None:
    """Assert ``y = a @ b.T`` but for K f32 additions, two scales, and one rounding."""
    assert y.dtype == out_dtype
    expected, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    assert y.shape == expected.shape
    out = jnp.finfo(out_dtype)
    bound = (a.shape[1] + 4) * 2.0**-24 * magnitude
    bound += float(out.eps) / 2 * (np.abs(expected) + bound)
    bound += np.where(magnitude > 0, float(out.smallest_subnormal) / 2, 0)
    error = np.abs(f64(y) - expected)
    assert np.all(error <= bound), (error / bound).max()


def assert_same_codes(got, want, poisoned=False) -> None:
    """Assert equal bytes, or that both are NaN; where `poisoned`, the whole of `got` is NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    nan = np.isnan(want.astype(np.float32)) | poisoned
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(np.where(nan, 0, codes(got)), np.where(nan, 0, codes(want)))


def assert_same(a, b) -> None:
    """Assert the same structure, dtypes, shapes and bits; a NaN equals any other."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y, where = np.asarray(x), np.asarray(y), jax.tree_util.keystr(path)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), where
        lane = f"u{x.dtype.itemsize}"
        same = (x.view(lane) == y.view(lane)) | ((x != x) & (y != y))
        assert np.all(same), (where, x[~same][:5], y[~same][:5])


def relative_error(a, b) -> float:
    """Return the norm of ``a - b`` relative to that of `b`, over all leaves."""
    a, b = flat(a), flat(b)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def cosine(a, b) -> float:
    a, b = flat(a), flat(b)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def flat(tree) -> np.ndarray:
    return np.concatenate([f64(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def spread(scale, shape, block=None) -> np.ndarray:
    """Repeat each element of `scale` over its block of an array of `shape`."""
    scale = np.asarray(scale)
    for axis, m in enumerate(scale.shape):
        n = shape[axis]
        size = block[axis] if block else n // m if m else 1
        scale = np.repeat(scale, size, axis=axis).take(np.arange(n), axis=axis)
    return scale


def values_of(array, fmt) -> np.ndarray:
    """Return f64 values of numbers or codes of `fmt`: by ml_dtypes, or E3M4's by definition."""
    code = np.asarray(array).view(np.uint8)
    if fmt is not E3M4:
        return code.view(fmt.dtype).astype(np.float32).astype(np.float64)
    e, k = code.astype(int) >> 4 & 7, code & 15
    magnitude = np.where(e > 0, np.ldexp(16.0 + k, e - 7), np.ldexp(1.0 * k, -6))
    magnitude = np.where(code & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(code >> 7, -magnitude, magnitude)


def on_host(q) -> np.ndarray:
    """Return the f32 values of a `ScaledArray`, each scale repeated over its block, by NumPy."""
    scale = on_host(q.scale) if isinstance(q.scale, ScaledArray) else np.asarray(q.scale)
    return np.asarray(q.data).astype(np.float32) * spread(scale, q.shape, q.block).astype(
        np.float32
    )
