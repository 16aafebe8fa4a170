"""A layer that decodes in parts from a cache, and computes the whole sequence at once."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from support.recorded import record, recorded


class Linen:
    """A Linen layer, the cached one, and their variables after a training step on `x`."""

    def __init__(self, whole, cached, x, **masks):
        self.whole, self.cached, self.x, self.masks = whole, cached, x, masks
        self.variables = jax.jit(cached.init)(jax.random.key(1), x)
        self.cache = self.variables.pop("cache")
        self.variables.pop("fp8_sink", None)
        if "fp8" in self.variables:
            self.variables |= recorded(whole, self.variables, x, **masks)

    def at_once(self):
        return jax.jit(self.whole.apply)(self.variables, self.x, **self.masks)

    def in_parts(self, parts, x=None):
        """Return the results and the cache, of steps with these numbers of tokens."""

        def step(variables, cache, x):
            y, new = self.cached.apply({**variables, "cache": cache}, x, mutable=["cache"])
            return y, new["cache"]

        step, cache = jax.jit(step, donate_argnums=1), jax.tree.map(jnp.copy, self.cache)
        results = []
        for part in split(self.x if x is None else x, parts):
            y, cache = step(self.variables, cache, part)
            results.append(y)
        return np.concatenate(results, axis=1), cache


class NNX:
    """The same for an NNX layer; `whole` is another one if the cached one computes in FP8."""

    def __init__(self, cached, x, cache_dtype=jnp.float32, whole=None, **masks):
        self.whole, self.cached = whole or cached, cached
        self.x, self.cache_dtype, self.masks = x, cache_dtype, masks
        if whole is None:
            record(cached, x, decode=False, **masks)

    def at_once(self):
        call = nnx.jit(lambda layer, x: layer(x, decode=False, **self.masks))
        return call(self.whole, self.x)

    def in_parts(self, parts):
        self.cached.init_cache(self.x.shape, self.cache_dtype)
        step = nnx.jit(lambda layer, x: layer(x, decode=True))
        results = [step(self.cached, part) for part in split(self.x, parts)]
        return np.concatenate(results, axis=1), nnx.state(self.cached, nnx.Cache)


def split(x, parts):
    return jnp.split(x, np.cumsum(parts)[:-1], axis=1)


def difference(a, b) -> float:
    """Return the largest difference, relative to the largest number in `b`."""
    return float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(np.asarray(b))))
