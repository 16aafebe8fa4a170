"""A function in another process: it may raise, hang or crash, and the caller learns which."""

import time
from pathlib import Path

import pytest

from jfp8.command_line.child import ask


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{root}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_the_result_comes_back():
    answer = ask("planted:doubled", [1, "a"])
    assert (answer.result, answer.failure) == ([1, "a", 1, "a"], "")
    assert 0 < answer.seconds < 60


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("raises", "error", "ValueError: no kernel here"),
        ("crashes", "crash", "exit code -6: the driver says goodbye"),
        ("nothing_of_this_name", "error", "AttributeError"),
    ],
)
@pytest.mark.representative(1)
def test_a_failure_is_told(function, kind, words):
    answer = ask(f"planted:{function}", "kernel")
    assert (answer.result, answer.kind) == (None, kind)
    assert words in answer.failure


def test_a_kernel_that_hangs_is_ended_soon_after_it_was_compiled():
    start = time.monotonic()
    answer = ask("planted:hangs_in_a_kernel", running=1, starting=100)
    assert (answer.kind, answer.failure) == ("hang", "no answer within 1 s to run")
    assert time.monotonic() - start < 50


def test_a_process_that_never_starts_is_ended():
    answer = ask("planted:hangs_at_once", starting=1, running=100)
    assert (answer.kind, answer.failure) == ("hang", "no answer within 1 s to start and compile")
