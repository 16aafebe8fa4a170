import jax
import pytest

from support.devices import interpret_tpu_kernels


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels for TPUs run on this machine."""
    interpret_tpu_kernels(monkeypatch)
    yield
    jax.clear_caches()
