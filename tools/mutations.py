"""Draws mutants of jfp8, and prints those that the tests do not notice.

    python tools/mutations.py --random 20 --seed 1
    python tools/mutations.py --random 100 --seed 1 --everywhere

A mutant is a small change of one place: another operator, constant or bound, a dropped statement,
and so on; see `mutants.py`. Each gets a copy of the checkout in a temporary folder, where
the daily tests of its room run until one fails; the files that name most of its module's functions
come first. ``--everywhere`` asks all daily tests about those that survive.

Prints a line for each mutant, the difference for those that survive, then a summary as one line of
JSON. Some survivors change nothing that anybody could notice, so survivors are no failure: exits
with 0, or with 2 if the first of these files fails without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
# The repository's history, and large ignored folders.
NOT_COPIED = (".git", ".venv*", ".*_cache", "__pycache__", "_build", "dist", "runs")
MOST_FILES = 6  # test files for a file in a room without a folder of tests
MOST_ELSEWHERE = 2  # further test files, in other rooms
# Pytest's exit codes by verdict; any other, a crash for example, counts as caught.
VERDICTS = {0: "SURVIVED", 4: "DID NOT RUN", 5: "DID NOT RUN"}


@dataclass(frozen=True)
class Trial:
    """The outcome for one mutant.

    Attributes:
      verdict: ``"caught"``, ``"SURVIVED"``, or no answer: ``"TIMED OUT"``, as a loop without an end
        does, but also a room with slow tests, or ``"DID NOT RUN"``.
      by: the test that failed, or pytest's last line.
    """

    mutant: Mutant
    verdict: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.verdict:11} {self.seconds:4.0f} s  {self.mutant}: {self.by}"


def copied(root: Path, folder: str) -> Path:
    """Return a copy of the checkout `root` in `folder`."""
    copy = Path(folder).resolve() / "checkout"
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return copy


def tests_of(file: str, root: Path) -> list[str]:
    """Return the test files of the room of `file`, those first that name most of its functions.

    A few of other rooms that name some follow: experts' matmuls of `products`, for example, are
    tested where the layers are.
    """
    room = Path(file).with_suffix("").parts[1]
    texts = {p: p.read_text("utf-8") for p in sorted((root / "tests").rglob("test_*.py"))}
    tree = ast.parse((root / file).read_text("utf-8"))
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}

    def named(path: Path) -> int:
        return len(defined & set(re.findall(r"\w+", texts[path])))

    found = [path for path in texts if path.is_relative_to(root / "tests" / room)]
    if not found:  # a room without a folder of tests
        found = [path for path, text in texts.items() if f"jfp8.{room}" in text and named(path)]
        found = sorted(found, key=named, reverse=True)[:MOST_FILES]
    house = root / "tests/test_house.py"
    elsewhere = [path for path in texts if path not in (*found, house) and named(path)]
    found += sorted(elsewhere, key=named, reverse=True)[:MOST_ELSEWHERE]
    found = found or [house]
    return [str(path.relative_to(root)) for path in sorted(found, key=named, reverse=True)]


def run_tests(
    root: Path, tests: Sequence[str], cache: Path, limit: float
) -> subprocess.CompletedProcess[str]:
    """Run `tests` in the checkout `root`, with the jfp8 in it, until one of them fails.

    Args:
      cache: folder of pytest's cache, where compiled programs are kept from run to run.
      limit: seconds after which pytest and its processes are killed.

    Raises:
      subprocess.TimeoutExpired: it took longer.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-n0"]
    command += ["-o", f"cache_dir={cache}", *tests]
    # Also for scripts that tests run in other processes.
    environment = {**os.environ, "PYTHONPATH": str(root)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, cwd=root, env=environment, start_new_session=True, **pipes
    ) as process:
        try:
            out, _ = process.communicate(timeout=limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out)


def tried(mutant: Mutant, clean: Path, tests: Sequence[str], cache: Path, limit: float) -> Trial:
    """Plant `mutant` in a copy of the checkout `clean`, and run `tests`."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jfp8_mutant_") as folder:
        root = copied(clean, folder)
        path = root / mutant.file
        path.write_text(mutant.planted(path.read_text("utf-8")), "utf-8")
        try:
            ran = run_tests(root, tests, cache, limit)
        except subprocess.TimeoutExpired:
            return Trial(mutant, "TIMED OUT", "", time.monotonic() - start)
    failed = re.search(r"^(?:FAILED|ERROR) (.+)$", ran.stdout, re.MULTILINE)
    by = failed[1] if failed else ran.stdout.strip().rpartition("\n")[2]
    return Trial(mutant, VERDICTS.get(ran.returncode, "caught"), by, time.monotonic() - start)


def difference(mutant: Mutant, text: str) -> str:
    texts = text.splitlines(), mutant.planted(text).splitlines()
    return "\n".join(difflib.unified_diff(*texts, mutant.file, mutant.file, lineterm=""))


def run(root: Path, options: argparse.Namespace) -> int:
    """Try mutants of the checkout `root`, print what becomes of them, and return the exit code."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jfp8_clean_") as folder:
        clean, cache = copied(root, folder), Path(folder) / "cache"
        sources = {
            path.relative_to(clean).as_posix(): path.read_text("utf-8")
            for path in sorted((clean / "jfp8").rglob("*.py"))
        }
        drawn = mutants(sources, options.random, options.seed)
        ran = run_tests(clean, tests_of(drawn[0].file, clean)[:1], cache, options.limit)
        if ran.returncode:
            print(ran.stdout, "The tests fail without a mutant.", sep="\n")
            return 2

        def trial_of(mutant: Mutant) -> Trial | None:
            if time.monotonic() - start > options.minutes * 60:
                return None
            trial = tried(mutant, clean, tests_of(mutant.file, clean), cache, options.limit)
            if trial.verdict == "SURVIVED" and options.everywhere:
                trial = tried(mutant, clean, ["tests"], cache, 3600)
            return trial

        trials = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for trial in filter(None, pool.map(trial_of, drawn)):
                trials.append(trial)
                print(trial, flush=True)
                if trial.verdict == "SURVIVED":
                    print(difference(trial.mutant, sources[trial.mutant.file]), flush=True)
    by_verdict = {
        verdict: [str(trial.mutant) for trial in trials if trial.verdict == verdict]
        for verdict in ("TIMED OUT", "DID NOT RUN", "SURVIVED")
    }
    caught = sum(trial.verdict == "caught" for trial in trials)
    summary = {"seed": options.seed, "mutants": len(trials), "caught": caught, **by_verdict}
    print(json.dumps(summary | {"seconds": round(time.monotonic() - start)}))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--random", type=int, default=20, metavar="N", help="how many (default 20)")
    parser.add_argument("--seed", default="0", help="any text; others for another one")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=240, help="seconds for the tests of one")
    parser.add_argument("--minutes", type=float, default=1e6, help="start none after these")
    parser.add_argument("--everywhere", action="store_true", help="ask all daily tests, too")
    return run(ROOT, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
