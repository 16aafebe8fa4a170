"""JAX's options for primitives that are objects: checkpoints, and functions with rules."""

import contextlib
from collections.abc import Iterator

import jax
import pytest

OPTIONS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


@contextlib.contextmanager
def later_primitives(*options: str) -> Iterator[None]:
    """Set these options, all by default; skip the test where JAX is too old for them."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("jfp8 takes jax_remat3 from JAX 0.12 on")
    before = {name: getattr(jax.config, name) for name in options or OPTIONS}
    try:
        for name in before:
            jax.config.update(name, True)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
