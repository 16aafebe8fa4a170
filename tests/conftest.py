"""What every test runs under: 8 virtual CPU devices, no silent rank promotion, 32-bit numbers."""

import importlib.util
import os
from collections import Counter

# Read once, when JAX starts its CPU backend, so it stands before the first import of JAX.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

# A program for the command line, and what only a late JAX can import.
collect_ignore = ["mutations.py", "support"]

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", False)

# The same examples in every run, so that a failure is there for everybody. No deadline: the first
# example compiles. Where only tests of GPUs run, hypothesis need not be installed.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large]
    reproducible = settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=unhurried
    )
    settings.register_profile("default", reproducible, max_examples=25)
    settings.register_profile("thorough", reproducible, max_examples=100)
    settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``representative(n)``: the first `n` cases of a test stand for the others, which are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        for mark in item.iter_markers("representative"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")


MAPS = Path("/proc/self/maps")
# Linux gives a process 65,530 by default, and XLA dies without a word when it gets no more.
MANY_MAPS = 25_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Drops compiled programs when there are many: each takes some maps of memory, for good."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MANY_MAPS:
        jax.clear_caches()
