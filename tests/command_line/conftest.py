"""What other processes import, and what changes modules there, is not collected here."""

from pathlib import Path

import pytest

collect_ignore_glob = ["planted*.py"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """A cache of its own; other processes find the package and these tests, and run on a CPU."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parents[1]}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
