"""Code that the timed benchmarks share: interleaved medians, and the environment of the figures."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import flax
import jax
import jax.numpy as jnp
import numpy as np

import jfp8

Key = TypeVar("Key", bound=Hashable)


def interleaved_medians(runs: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, float]:
    """Return median milliseconds of runs: each compiles once, then all alternate `repeats` times.

    They alternate so that a change of clock or load affects all alike.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[key].append(time.perf_counter() - start)
    return {key: float(np.median(values)) * 1e3 for key, values in times.items()}


def after_gradient(model: Any, variables: Any, x: jax.Array) -> Any:
    """Return the ``fp8`` collection of a Linen model after a gradient, which records amaxes."""

    def loss(params: Any) -> Any:
        y, mutated = model.apply({**variables, "params": params}, x, mutable=["fp8"])
        return jnp.sum(y.astype(jnp.float32) ** 2), mutated

    return jax.grad(loss, has_aux=True)(variables["params"])[1]


def environment() -> dict[str, object]:
    """Return device, processor and versions, to print with every result."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "jfp8": jfp8.__version__,
        },
    }
