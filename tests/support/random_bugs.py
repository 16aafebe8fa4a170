"""Plants mutants that a seed draws, and asks the suite of every day which of them it notices.

A mutant is tried in two rounds: the quickest tests that enter its function; then, if these pass,
the whole suite. Whoever reads of one that survives has to say whether it is a bug at all.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from support.checkout_copies import PASSED, copy_to, run_tests
from support.random_mutants import Mutant, mutants
from support.suite_map import NOT_ASKED, SuiteFailed, SuiteMap, map_of

FIRST_ROUND = 120  # seconds that its tests took for the map, in all
# Beyond a multiple of what the tests took: alone, a test compiles what others had compiled for it.
PATIENCE = 300
NO_TESTS = (4, 5)  # what pytest exits with if it found none, or not those it was asked for
SURVIVED = "SURVIVED"


@dataclass(frozen=True)
class Trial:
    """What became of a mutant.

    Attributes:
      verdict: ``"caught"``, ``"no import"`` and ``"timed out"``, which are caught too,
        ``"SURVIVED"``, or ``"DID NOT RUN"`` if pytest found no tests.
      by: what pytest says: the test that failed, and how.
    """

    mutant: Mutant
    verdict: str
    by: str
    seconds: float

    @property
    def caught(self) -> bool:
        return self.verdict in ("caught", "no import", "timed out")

    def __str__(self) -> str:
        return f"{self.verdict:11} {self.seconds:4.0f} s  {self.mutant}: {self.by}"


def run_random(
    root: Path, count: int, seed: int, jobs: int, map_file: Path | None, tests: Sequence[str]
) -> int:
    """Try `count` mutants of the checkout `root`, print what becomes of them, and exit with 0.

    Exits with 2 if tests fail without a mutant.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jfp8_clean_") as folder:
        clean = copy_to(Path(folder).resolve() / "checkout", root)
        sources = sources_of(clean)
        drawn = mutants(sources, count, seed)
        try:
            known = map_of(clean, tests, workers(jobs), map_file or Path(folder) / "map.json")
        except SuiteFailed as failed:
            print(failed, "The tests fail without a bug.", sep="\n")
            return 2
        print(f"{len(known.entries)} tests pass without a bug ({known.seconds:.0f} s)", flush=True)
        trials = []
        for trial in trials_of(drawn, clean, known, jobs, tests):
            print(trial, flush=True)
            if trial.verdict == SURVIVED:
                print(difference(trial.mutant, sources[trial.mutant.file]), flush=True)
            trials.append(trial)
    print(json.dumps(summary(seed, trials, time.monotonic() - start)))
    return 0


def sources_of(checkout: Path) -> dict[str, str]:
    """The texts of the package, by path."""
    paths = sorted((checkout / "jfp8").rglob("*.py"))
    return {path.relative_to(checkout).as_posix(): path.read_text("utf-8") for path in paths}


def workers(jobs: int) -> int:
    """How many pytest should start: for one job, the process of its own does."""
    return jobs if jobs > 1 else 0


def trials_of(
    drawn: Sequence[Mutant], clean: Path, known: SuiteMap, jobs: int, tests: Sequence[str]
) -> Iterator[Trial]:
    """Those that the first round catches, then those that all tests were asked about."""

    def first(mutant: Mutant) -> Trial:
        return first_round(mutant, clean, known)

    left = []
    with ThreadPoolExecutor(jobs) as pool:
        for trial in pool.map(first, drawn):
            if trial.caught:
                yield trial
            else:
                left.append(trial)
    for trial in left:
        limit = PATIENCE + 3 * known.seconds
        again = tried(trial.mutant, clean, [NOT_ASKED, *tests], workers(jobs), limit)
        yield Trial(again.mutant, again.verdict, again.by, trial.seconds + again.seconds)


def first_round(mutant: Mutant, clean: Path, known: SuiteMap) -> Trial:
    """Ask the tests that enter the function of `mutant`."""
    entries = known.tests_of(mutant, FIRST_ROUND)
    if not entries:
        return Trial(mutant, SURVIVED, "no test enters it", 0)
    limit = PATIENCE + 5 * sum(entry.seconds for entry in entries)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as names:
        # They may be too many for a command line.
        names.write("\n".join(entry.test for entry in entries))
        names.flush()
        trial = tried(mutant, clean, [f"@{names.name}"], 0, limit)
    if trial.verdict != "DID NOT RUN":
        return trial
    # Cases of a test are named after what they test: if that prints otherwise, all cases are asked.
    return tried(mutant, clean, sorted({e.test.partition("[")[0] for e in entries}), 0, limit)


def tried(mutant: Mutant, clean: Path, tests: Sequence[str], n_workers: int, limit: float) -> Trial:
    """Plant `mutant` in a copy of the checkout `clean`, and run `tests`."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jfp8_mutant_") as folder:
        root = copy_to(Path(folder).resolve(), clean)
        path = root / mutant.file
        path.write_text(mutant.planted(path.read_text("utf-8")), "utf-8")
        try:
            ran = run_tests(root, tests, n_workers, limit)
        except subprocess.TimeoutExpired:
            return Trial(mutant, "timed out", "", time.monotonic() - start)
        verdict, by = verdict_of(ran, lambda: imports(root, mutant.file))
    return Trial(mutant, verdict, by, time.monotonic() - start)


def verdict_of(
    ran: subprocess.CompletedProcess[str], imports: Callable[[], bool]
) -> tuple[str, str]:
    """What a run of pytest says of a mutant, whose file `imports` or does not, and by what."""
    last = ran.stdout.strip().rpartition("\n")[2]
    if ran.returncode == PASSED:
        return SURVIVED, last
    failure = re.search(r"^(FAILED|ERROR) (.+)$", ran.stdout, re.MULTILINE)
    if failure is None and ran.returncode in NO_TESTS:
        return "DID NOT RUN", last
    if failure is None:  # pytest itself failed, or was killed
        return "caught", f"pytest exits with {ran.returncode}: {last}"
    # A test that cannot be collected may have called the function that the mutant is in.
    broken = failure[1] == "ERROR" and not imports()
    return "no import" if broken else "caught", failure[2]


def imports(root: Path, file: str) -> bool:
    """Whether Python imports the module in `file`."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    command = [sys.executable, "-c", f"import {module}"]
    try:
        return not subprocess.run(command, cwd=root, capture_output=True, timeout=60).returncode
    except subprocess.TimeoutExpired:
        return False


def difference(mutant: Mutant, text: str) -> str:
    """What `mutant` changes in its file, as a unified diff."""
    texts = text.splitlines(), mutant.planted(text).splitlines()
    return "\n".join(difflib.unified_diff(*texts, mutant.file, mutant.file, lineterm=""))


def summary(seed: int, trials: Sequence[Trial], seconds: float) -> dict[str, object]:
    def by(verdict: str) -> list[str]:
        return [str(trial.mutant) for trial in trials if trial.verdict == verdict]

    return {
        "seed": seed,
        "mutants": len(trials),
        "caught": sum(trial.caught for trial in trials),
        "no_import": len(by("no import")),
        "timed_out": by("timed out"),
        "did_not_run": by("DID NOT RUN"),
        "survived": by(SURVIVED),
        "seconds": round(seconds),
    }
