"""What every test runs under: 8 virtual CPU devices, no silent rank promotion, 32-bit numbers."""

import ctypes
import gc
import importlib.metadata
import importlib.util
import mmap
import os
import sys
from collections import Counter

# Read once, when JAX starts its CPU backend, so they stand before the first import of JAX. The
# programs of tests run once, on small arrays: what LLVM would gain is less than what it takes, and
# MLIR's emitters of fusions take more time than all else of XLA. A flag that is in the environment
# stays as it is; with an optimization level there, programs are compiled as users have them.
FLAGS = {"--xla_force_host_platform_device_count": 8}
COMPILED_CHEAPLY = {
    "--xla_backend_optimization_level": 0,
    "--xla_llvm_disable_expensive_passes": "true",
}
# Later ones know no emitters but those, and end with an error where a flag is unknown.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    COMPILED_CHEAPLY |= {
        "--xla_cpu_use_fusion_emitters": "false",
        "--xla_cpu_parallel_codegen_split_count": 1,
    }
given = os.environ.get("XLA_FLAGS", "")
if "--xla_backend_optimization_level" not in given:
    FLAGS |= COMPILED_CHEAPLY
missing = [f"{name}={value}" for name, value in FLAGS.items() if name not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from support import parts

# Helpers, some of which only a late JAX can import.
collect_ignore = ["support"]

# Traces make millions of objects and little garbage: looking for it takes an eighth of the time.
# `little_memory` does so between files.
gc.disable()
MANY_OBJECTS = 5_000_000

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", False)
# Ten frames of a call stack for each operation take a tenth of the time of tracing and compiling.
jax.config.update("jax_traceback_in_locations_limit", 1)

# The same examples in every run, so that a failure is there for everybody. No deadline: the first
# example compiles. Where only tests of GPUs run, hypothesis need not be installed.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large]
    reproducible = settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=unhurried
    )
    settings.register_profile("default", reproducible, max_examples=4)
    settings.register_profile("full", reproducible, max_examples=25)
    settings.register_profile("thorough", reproducible, max_examples=100)
    settings.load_profile("default")


def of_a_gpu(config: pytest.Config) -> bool:
    """Whether this run is ``pytest -m gpu``, or that and more conditions."""
    return config.option.markexpr.split()[:1] == ["gpu"]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """On a GPU one process runs all tests: JAX takes most of its memory in each."""
    if of_a_gpu(config) and hasattr(config.option, "numprocesses"):
        config.option.numprocesses = 0


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device before JAX looks for one, and keep compiled programs for other runs."""
    if of_a_gpu(config):
        os.environ["XLA_FLAGS"] = given  # compiled as users have it
    elif not jax.config.jax_platforms:
        os.environ["JAX_PLATFORMS"] = "cpu"  # for workers and scripts
        jax.config.update("jax_platforms", "cpu")
    if "not slow" in config.option.markexpr and "jfp8" in config.args:
        config.args.remove("jfp8")  # doctests are slow, and collecting them imports everything
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def add_row(request: pytest.FixtureRequest) -> Callable[[dict[str, str]], None]:
    """Adds a row to the table that `pytest_terminal_summary` prints, in the order of the tests."""
    order = request.session.items.index(request.node)
    return lambda row: request.node.user_properties.append(("row", (order, row)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests counted of compiled programs, as a table in Markdown."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    found = [value for r in reports for name, value in r.user_properties if name == "row"]
    rows = [row for _, row in sorted(found, key=lambda each: each[0])]
    if rows:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
        for cells in lines:
            terminalreporter.write_line(f"| {' | '.join(cells)} |")


@pytest.fixture
def compiled_here() -> Iterator[None]:
    """For tests that read a compiled program, whose text is another when it was found again."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="I/N", help="only the I-th of N parts")
    parser.addoption("--measure", action="store_true", help=f"write CPU seconds: {parts.MEASURED}")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Marks as slow what `representative` tests leave out, and doctests; keeps one part of all."""
    seen: Counter[str] = Counter()
    for item in items:
        for mark in item.iter_markers("representative"):
            if item.get_closest_marker("slow"):
                continue
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.slow)
    yield  # to what leaves out tests by marks and names
    files = {file_of(item.nodeid) for item in items}
    chosen = parts.files_of_part(files, parts.measured(), config.getoption("--part"))
    items[:] = [item for item in items if file_of(item.nodeid) in chosen]


seconds: Counter[str] = Counter()
BEGAN = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Reports of workers have what a test took so far."""
    report = yield
    report.cpu_seconds = cpu_seconds() - item.stash[BEGAN]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the seconds of each file; where there are workers, in the process that has them."""
    if report.when == "teardown":
        # A notebook is reported by another plugin, without them.
        seconds[file_of(report.nodeid)] += getattr(report, "cpu_seconds", 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--measure") and not hasattr(session.config, "workerinput"):
        parts.update(seconds, session.config.rootpath)


def pytest_collection_finish() -> None:
    """Never looks for garbage in what is imported: that takes half a second each time."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU, and pytest -m gpu")


MAPS, STATM = Path("/proc/self/maps"), Path("/proc/self/statm")
# Linux gives a process 65,530 by default, and XLA dies without a word when it gets no more.
MANY_MAPS = 25_000
MUCH_MEMORY, TOO_MUCH_MEMORY = 1_600_000_000, 1_900_000_000  # bytes: between files, between tests


def memory() -> int:
    """Return the bytes of memory that this process holds; 0 if the system does not tell."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE if STATM.exists() else 0


def has_grown() -> bool:
    """Return True if this process holds much memory, many maps of it, or many new objects."""
    if memory() > MUCH_MEMORY:
        return True
    many_maps = MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MANY_MAPS
    return many_maps or gc.get_count()[0] > MANY_OBJECTS


def release_memory() -> None:
    """Return freed memory to the system: of 1.7 GB glibc keeps 1.2 until it is told."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def drop_what_is_compiled() -> None:
    """Free compiled programs and garbage."""
    jax.clear_caches()
    gc.collect()
    release_memory()


@pytest.fixture(autouse=True, scope="module")
def little_memory() -> Iterator[None]:
    """Drops compiled programs and garbage between files, where a process has grown."""
    yield
    if has_grown():
        drop_what_is_compiled()


@pytest.fixture(autouse=True)
def no_more_memory() -> Iterator[None]:
    """Does so between the tests of a file that makes a process grow further."""
    yield
    if memory() > TOO_MUCH_MEMORY:
        drop_what_is_compiled()


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def mesh_of(request: pytest.FixtureRequest) -> Callable[..., Mesh]:
    """Make meshes like ``jax.make_mesh``, with its default of explicit axes, then automatic."""

    def make(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
        return jax.make_mesh(shape, names, axis_types=(request.param,) * len(names))

    return make
