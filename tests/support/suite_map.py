"""Which tests enter which functions of jfp8, and how long they take: from one run of a suite."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from support.checkout_copies import PASSED, run_tests
from support.random_mutants import Mutant

# It says whether the text of the package has the places of the planted bugs: of no interest here,
# as it fails for any change of such a place.
NOT_ASKED = "--ignore-glob=*test_mutations.py"


class SuiteFailed(Exception):
    """Tests fail without a bug."""


@dataclass(frozen=True)
class Entry:
    """One test: its seconds, and the functions it enters as ``file::qualified name``."""

    test: str
    seconds: float
    entered: frozenset[str]

    def enters(self, mutant: Mutant) -> bool:
        """Its function; any one of its file if it is in none."""
        if mutant.function:
            return f"{mutant.file}::{mutant.function}" in self.entered
        return any(name.startswith(f"{mutant.file}::") for name in self.entered)


@dataclass(frozen=True)
class SuiteMap:
    """Tests that pass, the quickest first, and the seconds that all of them took together."""

    entries: tuple[Entry, ...]
    seconds: float

    def tests_of(self, mutant: Mutant, seconds: float) -> list[Entry]:
        """The quickest tests that enter the function of `mutant`, of so many seconds in all."""
        entering = [entry for entry in self.entries if entry.enters(mutant)]
        totals = accumulate(entry.seconds for entry in entering)
        return [entry for entry, total in zip(entering, totals) if total <= seconds]


def map_of(checkout: Path, tests: Sequence[str], workers: int, file: Path) -> SuiteMap:
    """That of `tests` in `checkout`: read from `file` if it was made of the same, or written there.

    Raises:
      SuiteFailed: they do not pass.
    """
    made_of = fingerprint(checkout, tests)
    if file.exists() and json.loads(file.read_text())["made_of"] == made_of:
        return read(file)
    raw = file.with_name(f"{file.name}.part").resolve()
    start = time.monotonic()
    plugin = ["-p", "support.entered", f"--entered={raw}"]
    ran = run_tests(checkout, [*plugin, NOT_ASKED, *tests], workers)
    if ran.returncode != PASSED:
        raise SuiteFailed(ran.stdout + ran.stderr)
    seconds = time.monotonic() - start
    found = {"made_of": made_of, "seconds": seconds, "tests": json.loads(raw.read_text())}
    file.write_text(json.dumps(found))
    raw.unlink()
    return read(file)


def read(file: Path) -> SuiteMap:
    found = json.loads(file.read_text())
    entries = [
        Entry(test, ran["seconds"], frozenset(ran["entered"]))
        for test, ran in found["tests"].items()
    ]
    return SuiteMap(tuple(sorted(entries, key=lambda e: (e.seconds, e.test))), found["seconds"])


def fingerprint(checkout: Path, tests: Sequence[str]) -> str:
    """Another one for other sources of the package or the tests, or other tests asked for."""
    digest = hashlib.sha256(repr(list(tests)).encode())
    for folder in ("jfp8", "tests"):
        for path in sorted((checkout / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(checkout)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
