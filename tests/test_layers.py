"""The shape of the package: who may import whom, what an import costs, what is documented."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jfp8

ROOT = Path(jfp8.__file__).parent

# The arrow diagram, in reading order: every file, and the files of jfp8 that it may import.
# A file stands below all that it imports, so reading the table downwards is reading the library.
ARROWS: dict[str, str] = {
    "checkpoint/state_dict": "",
    "checkpoint/safetensors_file": "checkpoint/state_dict",
    "checkpoint/orbax_directory": "checkpoint/state_dict",
    "checkpoint/msgpack_file": "checkpoint/state_dict",
    "checkpoint/changes": "",
    "checkpoint/atomic": "",
    "_version": "",
    "compat": "",
    "explain": "",
    "random_bits": "",
    "kernels/__init__": "",
    "kernels/gpu": "",
    "kernels/refusal": "compat",
    "formats": "random_bits kernels/gpu",
    "printing": "formats",
    "arrays": "formats printing",
    "taps": "arrays",
    "scaling": "formats arrays",
    "quantizers": "random_bits formats printing arrays scaling",
    "rotations": "printing",
    "matrices": "",
    "kernels/emulate": "formats",
    "kernels/hopper": "formats",
    "kernels/xla": "formats matrices",
    "kernels/blackwell": "",
    "kernels/mosaic_gpu/__init__": "",
    "kernels/mosaic_gpu/measured": "kernels/gpu",
    "kernels/mosaic_gpu/tiles": "kernels/mosaic_gpu/measured",
    "kernels/mosaic_gpu/quantize": (
        "compat formats kernels/mosaic_gpu/measured kernels/mosaic_gpu/tiles"
    ),
    "kernels/mosaic_gpu/quantize_blocks": (
        "formats scaling kernels/mosaic_gpu/tiles kernels/mosaic_gpu/quantize"
    ),
    "kernels/mosaic_gpu/matmul": "kernels/mosaic_gpu/tiles",
    "kernels/mosaic_gpu/grouped": "kernels/mosaic_gpu/tiles",
    "accumulation": "compat arrays matrices kernels/emulate kernels/hopper",
    "backends": "formats arrays matrices kernels/emulate kernels/xla accumulation",
    "mosaic": (
        "compat kernels/gpu kernels/refusal arrays matrices kernels/mosaic_gpu/matmul "
        "accumulation backends"
    ),
    "blackwell": "kernels/gpu formats arrays matrices kernels/blackwell accumulation backends",
    "recipes": "formats printing scaling quantizers rotations accumulation",
    "matmul": "explain kernels/gpu formats arrays matrices accumulation backends mosaic blackwell",
    "sink": "",
    "residuals": "formats arrays",
    "bilinear": "compat random_bits arrays taps scaling quantizers recipes sink residuals",
    "dot": "arrays matrices accumulation recipes matmul bilinear",
    "one_read": (
        "compat formats arrays scaling quantizers kernels/mosaic_gpu/quantize "
        "kernels/mosaic_gpu/quantize_blocks backends"
    ),
    "contraction_last": (
        "kernels/gpu arrays scaling backends mosaic recipes matmul bilinear dot one_read"
    ),
    "explicit_sharding": "arrays bilinear",
    "dot_general": (
        "formats arrays scaling matrices recipes matmul bilinear dot contraction_last "
        "explicit_sharding"
    ),
    "conv": (
        "explain formats arrays scaling accumulation recipes matmul bilinear explicit_sharding "
        "dot_general"
    ),
    "region": "recipes",
    "saved_activations": "formats arrays scaling quantizers residuals",
    "einsum": "arrays",
    "conv_transpose": "arrays",
    "linen/state_in_params": "sink",
    "linen/products": (
        "explain arrays scaling recipes matmul sink bilinear dot_general conv region "
        "linen/state_in_params"
    ),
    "linen/layers": "arrays recipes matmul einsum conv_transpose linen/products",
    "transformer_math": "formats saved_activations",
    "ragged_tiles": "",
    "grouped_dot": (
        "compat explain random_bits formats arrays scaling quantizers accumulation recipes matmul "
        "bilinear dot"
    ),
    "grouped_kernels": (
        "explain kernels/gpu arrays scaling kernels/mosaic_gpu/grouped mosaic recipes matmul "
        "bilinear one_read grouped_dot"
    ),
    "ragged_dot": (
        "compat kernels/gpu formats arrays scaling accumulation recipes matmul bilinear "
        "dot_general ragged_tiles grouped_dot grouped_kernels"
    ),
    "routing": "ragged_tiles",
    "linen/attention": "arrays recipes matmul einsum linen/products linen/layers",
    "linen/fused": "formats recipes matmul linen/layers transformer_math",
    "linen/transformer": (
        "formats recipes matmul linen/layers transformer_math linen/attention linen/fused"
    ),
    "linen/moe": "formats arrays recipes matmul linen/products transformer_math ragged_dot routing",
    "linen/__init__": (
        "linen/products linen/layers linen/attention linen/fused linen/transformer linen/moe"
    ),
    "nnx/products": (
        "explain arrays scaling recipes matmul sink bilinear dot_general conv region einsum"
    ),
    "nnx/conv_transpose": "arrays conv_transpose",
    "nnx/hooks": "explain arrays recipes matmul nnx/products nnx/conv_transpose",
    "nnx/layers": "recipes matmul nnx/conv_transpose nnx/hooks",
    "nnx/attention": "recipes matmul region transformer_math nnx/products nnx/hooks",
    "nnx/fused": "formats recipes matmul transformer_math nnx/layers",
    "nnx/transformer": "formats recipes matmul transformer_math nnx/products nnx/layers nnx/fused",
    "nnx/convert": "recipes matmul nnx/hooks nnx/attention",
    "selection": "recipes",
    "edges": "",
    "linen/convert": (
        "explain arrays recipes region linen/state_in_params linen/products linen/layers "
        "linen/attention selection edges"
    ),
    "convert": "recipes nnx/convert selection linen/convert",
    "report": "compat explain formats bilinear linen/products nnx/hooks nnx/convert edges",
    "weights": "formats arrays scaling quantizers recipes selection",
    "collectives": "compat random_bits formats scaling quantizers",
    "gather_weights": (
        "compat formats arrays scaling quantizers recipes selection weights collectives"
    ),
    "optim/loss_scaling": "printing",
    "optim/stochastic_rounding": "random_bits printing optim/loss_scaling",
    "optim/storage": (
        "random_bits formats printing arrays scaling quantizers optim/stochastic_rounding"
    ),
    "optim/stored_state": "random_bits printing arrays optim/loss_scaling optim/storage",
    "checkpoint/tree": "checkpoint/changes optim/stored_state",
    "checkpoint/values": (
        "checkpoint/changes formats arrays scaling quantizers optim/storage optim/stored_state "
        "checkpoint/tree"
    ),
    "checkpoint/optimizer_state": "checkpoint/tree",
    "checkpoint/histories": "checkpoint/changes sink checkpoint/tree",
    "checkpoint/fp8_collections": (
        "checkpoint/changes checkpoint/tree checkpoint/values checkpoint/histories"
    ),
    "checkpoint/transformer_engine": (
        "checkpoint/changes formats sink checkpoint/tree checkpoint/histories "
        "checkpoint/fp8_collections"
    ),
    "checkpoint/flax_fp8_ops": (
        "checkpoint/changes checkpoint/tree checkpoint/histories checkpoint/fp8_collections"
    ),
    "optim/adam": "optim/storage optim/stored_state",
    "optim/state_shardings": "optim/loss_scaling optim/stored_state",
    "optim/masters": (
        "compat random_bits formats printing arrays scaling quantizers optim/loss_scaling "
        "optim/stochastic_rounding optim/storage"
    ),
    "optim/fp8_gradients": "formats scaling quantizers collectives",
    "optim/__init__": (
        "optim/loss_scaling optim/stochastic_rounding optim/storage optim/stored_state optim/adam "
        "optim/state_shardings optim/masters optim/fp8_gradients"
    ),
    "hoist": "compat formats",
    "train": "printing arrays scaling sink optim/loss_scaling optim/masters hoist",
    "checkpoint/upgrade": (
        "checkpoint/changes optim/stored_state checkpoint/tree checkpoint/values "
        "checkpoint/optimizer_state checkpoint/histories checkpoint/flax_fp8_ops optim/masters "
        "train"
    ),
    "checkpoint/files": (
        "checkpoint/state_dict checkpoint/safetensors_file checkpoint/orbax_directory "
        "checkpoint/msgpack_file checkpoint/atomic checkpoint/upgrade"
    ),
    "checkpoint/downgrade": "arrays nnx/products checkpoint/values checkpoint/flax_fp8_ops train",
    "checkpoint/__init__": (
        "checkpoint/changes checkpoint/transformer_engine checkpoint/flax_fp8_ops "
        "checkpoint/upgrade checkpoint/files checkpoint/downgrade"
    ),
    "data_parallel": "sink collectives train",
    "nnx/train": "scaling sink nnx/products optim/loss_scaling train",
    "nnx/__init__": (
        "nnx/products nnx/layers nnx/attention nnx/fused nnx/transformer nnx/convert nnx/train"
    ),
    "initialize": (
        "recipes selection convert report optim/loss_scaling optim/storage optim/stored_state "
        "optim/masters optim/fp8_gradients"
    ),
    "debug/collective_bytes": "",
    "debug/measurement": "",
    "debug/nnx_functions": "nnx/products",
    "debug/records": "",
    "debug/tensorboard": "debug/records",
    "plot/limits": "formats",
    "plot/picture": "",
    "plot/rows": "formats debug/records",
    "plot/style": "plot/picture",
    "plot/amax_history": "formats debug/records plot/limits plot/rows plot/style",
    "plot/block_scales": "arrays plot/style",
    "plot/heat_map": "debug/records plot/rows plot/style",
    "plot/histogram": "formats debug/records plot/limits plot/rows plot/style",
    "plot/loss_curves": "plot/style",
    "plot/number_line": "formats plot/style",
    "plot/__init__": (
        "plot/amax_history plot/block_scales plot/heat_map plot/histogram plot/loss_curves "
        "plot/number_line"
    ),
    "debug/faults": "formats printing selection report debug/records",
    "debug/advice": "printing report debug/records debug/faults",
    "summary": "printing arrays nnx/products train",
    "debug/reading": "compat taps edges debug/measurement",
    "debug/by_layer": "explain debug/reading",
    "debug/compare": (
        "compat explain arrays taps recipes bilinear selection edges convert debug/measurement "
        "debug/reading debug/by_layer"
    ),
    "debug/stats": (
        "compat explain formats arrays taps quantizers report debug/measurement "
        "debug/nnx_functions debug/records debug/reading debug/by_layer"
    ),
    "debug/recorder": "report debug/nnx_functions debug/records debug/tensorboard debug/stats",
    "debug/__init__": (
        "debug/collective_bytes debug/records debug/tensorboard debug/faults debug/advice "
        "debug/compare debug/stats debug/recorder"
    ),
    "__init__": "*",
}

# The only file that may reach into the private parts of JAX and Flax; and the only one elsewhere.
PRIVATE_ALLOWED = "compat"
PRIVATE_ALLOWED_ELSEWHERE = "tests/interpreter"
PRIVATE = ("jax._src", "jaxlib._", "flax.core.lift")


def package_files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.py"))


def imported_names(source: str, file: str) -> Iterator[str]:
    """Every dotted name that `source`, the text of jfp8/`file`.py, imports, wherever it does so."""
    package = ["jfp8", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imported_files(source: str, file: str, files: list[str]) -> set[str]:
    """The files of jfp8 that jfp8/`file`.py imports. A name that is no file is from a package."""
    found = set()
    for name in imported_names(source, file):
        head, *parts = name.split(".")
        if head != "jfp8":
            continue
        for length in range(len(parts), -1, -1):
            stem = "/".join(parts[:length])
            match = [f for f in (stem, f"{stem}/__init__".lstrip("/")) if f in files]
            if match:
                found.add(match[0])
                break
    return found - {file}


def used_names(source: str, file: str) -> Iterator[str]:
    """Imported names, and attribute chains such as `jax.numpy.sum`."""
    yield from imported_names(source, file)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def private_names(source: str, file: str) -> set[str]:
    return {name for name in used_names(source, file) if name.startswith(PRIVATE)}


FILES = package_files(ROOT)


def text(file: str) -> str:
    return (ROOT / f"{file}.py").read_text(encoding="utf-8")


def test_arrows_list_every_file():
    assert sorted(ARROWS) == FILES


def test_arrows_point_upwards():
    seen: set[str] = set()
    for file, allowed in ARROWS.items():
        assert allowed == "*" or set(allowed.split()) <= seen, f"{file} is above what it imports"
        seen.add(file)


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_arrows(file):
    row = ARROWS.get(file, "")
    allowed = set(ARROWS) if row == "*" else set(row.split())
    forbidden = imported_files(text(file), file, FILES) - allowed
    assert not forbidden, f"{file} may import {sorted(allowed)}, not {sorted(forbidden)}"


@pytest.mark.parametrize(
    ("line", "file", "found"),
    [
        ("import jfp8.linen", "formats", {"linen/__init__"}),
        ("import jfp8.linen as l", "formats", {"linen/__init__"}),
        ("from jfp8 import linen, train", "formats", {"linen/__init__", "train"}),
        ("from jfp8 import Dense", "formats", {"__init__"}),
        ("from jfp8.linen import Dense", "formats", {"linen/__init__"}),
        ("from . import linen", "formats", {"linen/__init__"}),
        ("from .linen import Dense", "formats", {"linen/__init__"}),
        ("from .. import linen", "kernels/xla", {"linen/__init__"}),
        ("from ..linen import Dense", "kernels/xla", {"linen/__init__"}),
        ("from . import emulate", "kernels/xla", {"kernels/emulate"}),
        ("from jfp8.kernels import emulate", "matmul", {"kernels/emulate"}),
        ("from jfp8.kernels import TABLE", "matmul", {"kernels/__init__"}),
        ("def f():\n    from jfp8.linen import Dense", "formats", {"linen/__init__"}),
        ("import jfp8\nimport jax.numpy as jnp", "formats", {"__init__"}),
        ("import jax.numpy as jnp\nfrom math import inf", "formats", set()),
    ],
)
def test_the_import_reader_reads(line, file, found):
    assert imported_files(line, file, list(ARROWS)) == found


@pytest.mark.parametrize("file", [file for file in FILES if file != PRIVATE_ALLOWED])
def test_only_compat_touches_private_jax(file):
    assert not private_names(text(file), file)


def test_one_file_elsewhere_uses_private_names():
    checkout = Path(__file__).resolve().parents[1]
    using = {
        path.relative_to(checkout).with_suffix("").as_posix()
        for folder in ("tests", "examples", "benchmarks", "docs")
        for path in sorted((checkout / folder).rglob("*.py"))
        if private_names(path.read_text(encoding="utf-8"), "")
    }
    assert using == {PRIVATE_ALLOWED_ELSEWHERE}


@pytest.mark.parametrize(
    "line",
    [
        f"import {PRIVATE[0]}.core",
        f"from {PRIVATE[0]} import core",
        f"from jax import {PRIVATE[0].removeprefix('jax.')} as internals",
        f"f({PRIVATE[0]}.core.Tracer)",
        f"from {PRIVATE[1]}jax import x",
        f"{PRIVATE[2]}.transform = None",
        "from flax.core import lift",
    ],
)
def test_the_private_reader_reads(line):
    assert private_names(line, "formats")


# Imports the third parties that jfp8 imports, then watches what jfp8 itself asks for.
WATCHED_IMPORT = """
import importlib, os, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        importlib.import_module(name.rpartition(".")[0])
assert not [name for name in sys.modules if name.startswith("jfp8")]
reads = []
def watch(method):
    def watched(self, *args):
        reads.append((method.__name__, *args))
        return method(self, *args)
    return watched
for name in ("__getitem__", "__iter__", "__len__"):
    setattr(os._Environ, name, watch(getattr(os._Environ, name)))
{import_jfp8}
seen = list(reads)
import jax
# JAX refuses this once any device has been asked for.
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices("cpu")) == 3
assert not seen, f"import jfp8 reads the environment: {{seen}}"
"""


def watched_import(import_jfp8: str) -> subprocess.CompletedProcess[str]:
    names = {name for file in FILES for name in imported_names(text(file), file)}
    third_parties = sorted(
        name for name in names if name.split(".")[0] not in {"jfp8", *sys.stdlib_module_names}
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT.parent)
    return subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT.format(import_jfp8=import_jfp8), *third_parties],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_reads_no_environment_and_asks_for_no_device():
    done = watched_import("import jfp8")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sin", "complaint"),
    [
        ("os.getenv('HOME')", "reads the environment"),
        ("dict(os.environ)", "reads the environment"),
        ("import jax.numpy; jax.numpy.zeros(3)", "before backends are initialized"),
    ],
)
def test_the_watch_on_imports_sees(sin, complaint):
    done = watched_import(f"import jfp8; {sin}")
    assert done.returncode != 0
    assert complaint in done.stderr


def public_names() -> list[str]:
    names = list(jfp8.__all__)
    for module in (jfp8.recipes, jfp8.quantizers, jfp8.scaling, jfp8.linen, jfp8.optim):
        short = module.__name__.removeprefix("jfp8.")
        listed = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        names += [f"{short}.{name}" for name in listed]
    return names


def own_docstring(value: object) -> str:
    """What was written for `value`: not its base's docstring, nor a dataclass's generated one."""
    doc = value.__doc__ or ""
    generated = inspect.isclass(value) and doc.startswith(f"{value.__name__}(")
    return "" if generated else doc


@pytest.mark.parametrize("name", public_names())
def test_public_names_are_documented(name):
    value: object = jfp8
    for part in name.split("."):
        value = getattr(value, part)
    assert own_docstring(value).strip(), f"jfp8.{name} has no docstring"


def test_public_names_are_listed_once():
    assert len(set(jfp8.__all__)) == len(jfp8.__all__)


def test_type_hints_ship():
    assert importlib.resources.files("jfp8").joinpath("py.typed").is_file()
