"""Plants bugs in jfp8, one at a time, and shows that its tests fail for each.

    python tests/mutations.py                        all of them, two at a time
    python tests/mutations.py --only sum_for_max     one of them; as often as you like
    python tests/mutations.py --list                 what they are
    python tests/mutations.py --random 100 --seed 1  others, drawn by a seed

The bugs are in `planted_bugs.py`, each with a test of the default suite that has to notice it.
Every bug gets a copy of the checkout in a temporary folder; the working tree stays as it is. All
tests that are named run once without a bug first, and have to pass. A bug counts as caught if its
test fails: not if pytest cannot collect it, nor if it takes longer than `TIME_LIMIT`.

Prints a line for each bug, then a summary as one line of JSON. Exits with 1 if a bug is not caught,
with 2 if the tests fail without one.

``--random`` asks the suite of every day about bugs that nobody wrote; see `support/random_bugs.py`.
It runs once without a bug, to learn which tests enter which functions (``--map FILE`` keeps that
for the next time). Prints the difference of each bug that survives, and exits with 0 all the same:
some change nothing that anybody could notice.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from support.checkout_copies import FAILED, PASSED, copy_to, run_tests
from support.planted_bugs import BUGS, Bug
from support.random_bugs import run_random

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT = 300  # seconds, for the test of one bug


@dataclass(frozen=True)
class Outcome:
    """What became of a bug.

    Attributes:
      verdict: ``"caught"``, ``"SURVIVED"`` (the test passed), or why there is no answer.
      by: what pytest says: the test that failed, and how.
    """

    bug: Bug
    verdict: str
    by: str
    seconds: float

    def __str__(self) -> str:
        told = "" if self.verdict == "caught" else f": {self.by}"
        bug = f"{self.bug.file}: {self.bug.name}: {self.bug.what}"
        return f"{self.verdict:11} {self.seconds:4.0f} s  {bug}{told}"


def plant(bug: Bug, root: Path) -> None:
    """Change the one place in the checkout `root`."""
    path = root / bug.file
    path.write_text(bug.planted(path.read_text()))


def outcome_of(bug: Bug, clean: Path) -> Outcome:
    """Plant `bug` in a copy of the checkout `clean`, and run its test."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jfp8_bug_") as folder:
        root = copy_to(Path(folder), clean)
        plant(bug, root)
        try:
            ran = run_tests(root, [f"tests/{bug.test}"], 0, TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return Outcome(bug, "TIMED OUT", "", time.monotonic() - start)
    verdict = {PASSED: "SURVIVED", FAILED: "caught"}.get(ran.returncode, "DID NOT RUN")
    failure = re.search(r"^FAILED (.+)$", ran.stdout, re.MULTILINE)
    if failure is None and verdict == "caught":
        verdict = "DID NOT RUN"  # a fixture raised, say
    by = failure[1] if failure else ran.stdout.strip().rpartition("\n")[2]
    return Outcome(bug, verdict, by, time.monotonic() - start)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this bug; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="list the bugs and run nothing")
    drawn = parser.add_argument_group("bugs drawn at random")
    drawn.add_argument("--random", type=int, metavar="N", help="draw N of them")
    drawn.add_argument("--seed", type=int, default=0, help="other bugs for another one")
    drawn.add_argument(
        "--map", type=Path, metavar="FILE", help="where the map of the tests is kept"
    )
    drawn.add_argument(
        "--tests", nargs="+", default=[], help="ask only these, as pytest names them"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only or ()) - {bug.name for bug in BUGS})
    if unknown:
        parser.error(f"there is no bug called {', '.join(unknown)}; --list shows them all")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if options.random is not None:
        return run_random(
            ROOT, options.random, options.seed, options.jobs, options.map, options.tests
        )
    bugs = [bug for bug in BUGS if not options.only or bug.name in options.only]
    if options.list:
        for bug in bugs:
            print(f"{bug.file}: {bug.name}: {bug.what}")
        return 0
    return run_planted(bugs, options.jobs)


def run_planted(bugs: Sequence[Bug], jobs: int) -> int:
    """Try all `bugs`, `jobs` at a time, and print what becomes of them."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jfp8_clean_") as folder:
        clean = copy_to(Path(folder), ROOT)
        tests = sorted({f"tests/{bug.test}" for bug in bugs})
        ran = run_tests(clean, tests, jobs)
        if ran.returncode != PASSED:
            print(ran.stdout, ran.stderr, "The tests fail without a bug.", sep="\n")
            return 2
        took = time.monotonic() - start
        print(f"{len(tests)} tests pass without a bug ({took:.0f} s)", flush=True)
        outcomes = []
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(lambda bug: outcome_of(bug, clean), bugs):
                print(outcome, flush=True)
                outcomes.append(outcome)
    missed = [outcome.bug.name for outcome in outcomes if outcome.verdict != "caught"]
    summary = {
        "bugs": len(bugs),
        "caught": len(bugs) - len(missed),
        "not_caught": missed,
        "files": len({bug.file for bug in bugs}),
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(summary))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
