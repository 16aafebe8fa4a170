from pathlib import Path

import pytest

from support.scripts import text_in


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    return text_in(tmp_path_factory.mktemp("text"))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Scripts write their results below the working directory."""
    monkeypatch.chdir(tmp_path)
