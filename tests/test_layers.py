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
    "_version": "",
    "compat": "",
    "explain": "",
    "random_bits": "compat",
    "kernels/__init__": "",
    "kernels/gpu": "",
    "kernels/refusal": "compat",
    "formats": "compat random_bits kernels/gpu",
    "arrays": "compat random_bits formats",
    "scaling": "compat random_bits formats arrays",
    "quantizers": "compat random_bits formats arrays scaling",
    "rotations": "",
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
    "accumulation": "compat arrays matrices kernels/__init__ kernels/emulate kernels/hopper",
    "backends": "formats arrays matrices kernels/__init__ kernels/emulate kernels/xla accumulation",
    "mosaic": (
        "compat arrays matrices kernels/gpu kernels/refusal kernels/mosaic_gpu/__init__ "
        "kernels/mosaic_gpu/matmul accumulation backends"
    ),
    "blackwell": (
        "formats arrays matrices kernels/__init__ kernels/gpu kernels/blackwell accumulation "
        "backends"
    ),
    "recipes": "compat random_bits formats arrays scaling quantizers rotations accumulation",
    "matmul": "formats arrays matrices kernels/gpu accumulation backends mosaic blackwell explain",
    "sink": "compat formats scaling",
    "residuals": "formats arrays",
    "bilinear": "compat random_bits formats arrays scaling quantizers recipes sink residuals",
    "dot": "arrays matrices recipes accumulation matmul bilinear",
    "one_read": (
        "compat formats arrays scaling quantizers backends kernels/mosaic_gpu/__init__ "
        "kernels/mosaic_gpu/quantize kernels/mosaic_gpu/quantize_blocks"
    ),
    "contraction_last": (
        "arrays scaling recipes backends mosaic matmul kernels/gpu bilinear dot one_read"
    ),
    "explicit_sharding": "arrays bilinear",
    "dot_general": (
        "formats arrays matrices scaling recipes matmul bilinear dot contraction_last "
        "explicit_sharding"
    ),
    "conv": (
        "explain formats arrays scaling recipes accumulation matmul bilinear dot_general "
        "explicit_sharding"
    ),
    "region": "recipes",
    "saved_activations": "formats arrays scaling quantizers residuals",
    "einsum": "arrays",
    "conv_transpose": "arrays",
    "linen/state_in_params": "sink",
    "linen/products": (
        "arrays scaling recipes matmul sink bilinear dot_general conv region explain "
        "linen/state_in_params"
    ),
    "linen/layers": "arrays recipes matmul region einsum conv_transpose linen/products",
    "transformer_math": "formats saved_activations",
    "ragged_tiles": "",
    "grouped_dot": (
        "compat explain random_bits formats arrays scaling quantizers recipes accumulation matmul "
        "bilinear dot"
    ),
    "grouped_kernels": (
        "compat explain arrays scaling recipes backends mosaic matmul bilinear one_read "
        "kernels/gpu kernels/refusal kernels/mosaic_gpu/__init__ kernels/mosaic_gpu/grouped "
        "grouped_dot"
    ),
    "ragged_dot": (
        "compat formats arrays scaling recipes accumulation matmul bilinear dot_general "
        "kernels/gpu ragged_tiles grouped_dot grouped_kernels"
    ),
    "routing": "ragged_tiles",
    "linen/attention": "arrays recipes matmul einsum linen/products linen/layers",
    "linen/fused": "formats recipes matmul transformer_math linen/layers",
    "linen/transformer": (
        "formats recipes matmul transformer_math linen/layers linen/attention linen/fused"
    ),
    "linen/moe": "formats arrays recipes matmul transformer_math ragged_dot routing linen/products",
    "linen/__init__": (
        "linen/products linen/layers linen/attention linen/fused linen/transformer linen/moe"
    ),
    "nnx/products": (
        "arrays scaling recipes matmul sink bilinear dot_general conv region explain einsum"
    ),
    "nnx/conv_transpose": "arrays conv_transpose",
    "nnx/hooks": "arrays recipes matmul explain nnx/products nnx/conv_transpose",
    "nnx/layers": "recipes matmul nnx/conv_transpose nnx/hooks",
    "nnx/attention": "recipes matmul region transformer_math nnx/products nnx/hooks",
    "nnx/fused": "formats recipes matmul transformer_math nnx/layers",
    "nnx/transformer": "formats recipes matmul transformer_math nnx/products nnx/layers nnx/fused",
    "nnx/convert": "recipes matmul nnx/hooks nnx/attention",
    "selection": "recipes",
    "edges": "",
    "linen/convert": (
        "arrays recipes sink region explain selection edges "
        "linen/state_in_params linen/products linen/layers linen/attention"
    ),
    "convert": "recipes selection linen/convert nnx/convert",
    "report": "compat formats bilinear explain edges linen/products nnx/hooks nnx/convert",
    "weights": "formats arrays scaling quantizers recipes selection",
    "collectives": "compat random_bits formats scaling quantizers",
    "gather_weights": (
        "compat formats arrays scaling quantizers recipes selection weights collectives"
    ),
    "optim/loss_scaling": "compat",
    "optim/stochastic_rounding": "compat random_bits optim/loss_scaling",
    "optim/storage": ("random_bits formats arrays scaling quantizers optim/stochastic_rounding"),
    "optim/stored_state": "random_bits arrays optim/loss_scaling optim/storage",
    "optim/adam": "optim/storage optim/stored_state",
    "optim/state_shardings": "optim/loss_scaling optim/stored_state",
    "optim/masters": (
        "compat random_bits formats arrays scaling quantizers optim/loss_scaling "
        "optim/stochastic_rounding optim/storage"
    ),
    "optim/fp8_gradients": "formats scaling quantizers collectives",
    "optim/__init__": (
        "optim/loss_scaling optim/stochastic_rounding optim/storage optim/stored_state optim/adam "
        "optim/state_shardings optim/masters optim/fp8_gradients"
    ),
    "hoist": "compat formats",
    "train": "arrays compat scaling sink optim/loss_scaling optim/masters hoist",
    "data_parallel": "sink collectives train",
    "nnx/train": "scaling sink optim/loss_scaling train nnx/products",
    "nnx/__init__": (
        "nnx/products nnx/layers nnx/attention nnx/fused nnx/transformer nnx/convert nnx/train"
    ),
    "initialize": (
        "recipes selection optim/loss_scaling optim/storage optim/stored_state optim/masters "
        "optim/fp8_gradients convert report"
    ),
    "debug/collective_bytes": "",
    "debug/__init__": "debug/collective_bytes",
    "__init__": "*",
}

# The only file that may reach into the private parts of JAX and Flax.
PRIVATE_ALLOWED = "compat"
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
