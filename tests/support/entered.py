"""A plugin of pytest that writes which functions of jfp8 each test enters: `-p support.entered`.

With ``--entered FILE``, `FILE` has them as JSON, with the seconds each test took. A test whose
shapes another has compiled before runs the program of that one, and does not enter what traces it.
So a function that a test enters is one it depends on, but not the other way around.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

PACKAGE = "jfp8"


class Watch:
    """Runs where tests run: in every worker, if there are some."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root}{os.sep}"
        self.package = f"{self.root}{PACKAGE}{os.sep}"
        self.entered: set[str] = set()
        self.by_fixture: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def on_event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.package):
            file = code.co_filename.removeprefix(self.root).replace(os.sep, "/")
            self.entered.add(f"{file}::{code.co_qualname}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self.on_event)
        sys.setprofile(self.on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """What a fixture enters counts for all tests that use it, not only for the first."""
        outer, self.entered = self.entered, set()
        try:
            return (yield)
        finally:
            self.by_fixture[request.node.nodeid, request.fixturename] |= self.entered
            self.entered |= outer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self.entered = set()
        with self.watching():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            with self.watching():
                return (yield)
        finally:
            for node, name in product(item.listchain(), getattr(item, "fixturenames", ())):
                self.entered |= self.by_fixture.get((node.nodeid, name), set())
            item.user_properties.append(("entered", sorted(self.entered)))


class Writer:
    """Runs where reports arrive, and writes `file` at the end."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.entered: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.entered[report.nodeid] = dict(report.user_properties)["entered"]

    def pytest_sessionfinish(self) -> None:
        tests = {
            test: {"seconds": round(self.seconds[test], 3), "entered": entered}
            for test, entered in self.entered.items()
        }
        self.file.write_text(json.dumps(tests))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--entered", metavar="FILE", help="functions that tests enter")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watch(config.rootpath))
    if config.option.entered and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(config.option.entered)))
