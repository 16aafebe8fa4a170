"""The shape of the package: who may import whom, what an import costs, what is documented."""

import ast
import graphlib
import importlib
import importlib.resources
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from flax import nnx

import jfp8
from jfp8.matmul.planner import NAMED
from jfp8.tracing.device import PLANNERS
from support import weight

ROOT = Path(jfp8.__file__).parent
CHECKOUT = Path(__file__).parents[1]
SCRIPTS = ("benchmarks", "examples", "tests", "tools")  # folders that import jfp8

# The rooms of the house in the order of the data's way: a room imports from those above it.
ROOMS = """
    tracing      what a program is traced for: the JAX at hand, the device, notes
    scaling      formats, casts, arrays with a scale, amax histories
    quantizers   how one operand becomes f8
    matmul       products of f8 arrays: the backends, and the one file that chooses
    recipes      which quantizer each operand of each product gets
    products     differentiable products: fprop, dgrad, wgrad
    kernels      what knows a chip or a compiler: imported when a program is traced for one
    checkpoint_policies what jax.checkpoint saves of them
    layers       the same as layers of Linen and NNX
    linen        the names of jfp8.linen
    collectives  means and gathers in f8
    optim        loss scaling, FP8 optimizer states
    conversion   models that nobody edits, and a report of what became of them
    training     steps, histories between them, data parallelism
    nnx          the names of jfp8.nnx
    checkpoint   files, upgrades, formats of others
    debug        what FP8 did to each tensor
    plot         pictures of it
    __init__     the names of jfp8
    integrations recipes in trainers of others, which need not be installed
    command_line commands that look at a GPU, check its kernels and measure it
    __main__     python -m jfp8
"""
ORDER = [line.split()[0] for line in ROOMS.strip().splitlines()]

# The only file that may reach into the private parts of JAX and Flax; and the only ones elsewhere.
# JAX has no public name for cuDNN's attention in FP8.
PRIVATE_ALLOWED = "jfp8.tracing.compat"
PRIVATE_ALLOWED_ELSEWHERE = {"tests/support/interpreter", "benchmarks/on_gpu/attention"}
PRIVATE = ("jax._src", "jaxlib._", "flax.core.lift")


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax of every file of jfp8, by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("jfp8", *path.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported, wherever it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_modules(tree: ast.AST, known: set[str]) -> set[str]:
    """The modules among `known` that are imported. A name that is none is from its package."""
    names = set(imported_names(tree))
    return {name if name in known else name.rpartition(".")[0] for name in names} & known


def room_of(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


@cache
def arrows() -> dict[str, set[str]]:
    """The modules of jfp8 that each of them imports."""
    known = set(modules())
    return {name: imported_modules(tree, known) - {name} for name, tree in modules().items()}


def test_every_room_is_in_the_order():
    assert {room_of(module) for module in modules()} == set(ORDER)


def test_rooms_import_from_those_above_them():
    place = {room: i for i, room in enumerate(ORDER)}
    wrong = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in others
        if place[room_of(other)] > place[room_of(module)]
    ]
    assert not wrong


# Rooms that a reader learns when they are needed. The trunk, all others, trains a model without.
LEAVES = {"kernels", "checkpoint", "debug", "plot", "command_line", "integrations"}
DOORS = {"__init__", "__main__"}  # name all rooms


def test_the_trunk_imports_no_leaf():
    assert set(map(room_of, modules())) >= LEAVES
    wrong = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in others
        if room_of(other) in LEAVES and room_of(module) not in LEAVES | DOORS
    ]
    assert not wrong


def test_nothing_imports_an_integration():
    inside = {module for module in modules() if room_of(module) == "integrations"}
    assert not [m for m, others in arrows().items() if m not in inside and others & inside]


def test_no_file_imports_itself_by_way_of_others():
    assert len(list(graphlib.TopologicalSorter(arrows()).static_order())) == len(modules())


def test_what_a_file_keeps_to_itself_is_not_imported():
    private = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        for name in imported_names(tree)
        if name.startswith("jfp8.") and any(p.startswith("_") for p in name.split(".")[1:])
    ]
    assert not private


def exists(name: str) -> bool:
    """Whether the dotted `name` is a module of jfp8, or what one of them has."""
    module, _, attribute = name.rpartition(".")
    if attribute == "*" or name in modules():
        return True
    if module not in modules():
        return False
    if module.startswith("jfp8.integrations."):  # they import trainers that may not be installed
        return attribute in {getattr(node, "name", None) for node in modules()[module].body}
    return hasattr(importlib.import_module(module), attribute)


def test_what_scripts_import_exists():
    """Also where it is imported only as it is needed, on a GPU for example."""
    scripts = [p for d in SCRIPTS for p in (CHECKOUT / d).rglob("*.py")]
    assert len(scripts) > 100
    missing = [
        f"{path.relative_to(CHECKOUT)} imports {name}"
        for path in scripts
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith("jfp8.") and not exists(name)
    ]
    assert not missing


# The core and the kernels. The door, `tracing/device.py`, names planners as strings.
KERNELS = "jfp8.kernels"


def test_nothing_but_kernels_imports_kernels():
    """But for the commands that check and measure them, which nothing imports."""
    inside = {module for module in modules() if module.startswith(KERNELS)}
    assert len(inside) > 30
    may = inside | {module for module in modules() if room_of(module) == "command_line"}
    assert not [m for m, others in arrows().items() if m not in may and others & inside]


def test_planners_that_the_door_names_exist():
    named = {*PLANNERS.values(), *filter(None, NAMED.values())}
    assert len(named) > 2
    assert all(map(exists, named))


TRAINED_ON_A_CPU = """
import sys, jax, jax.numpy as jnp, optax, jfp8
x, model = jnp.ones((8, 16)), jfp8.Dense(4)
state = jfp8.TrainState.create(
    apply_fn=model.apply, variables=model.init(jax.random.key(0), x), tx=optax.sgd(0.1)
)
loss_fn = lambda variables, x: jnp.sum(model.apply(variables, x))
loss, grads = jax.jit(jfp8.value_and_grad(loss_fn))(state, x)
state = state.apply_gradients(grads)
assert not [name for name in sys.modules if name.startswith("jfp8.kernels")]
"""


def test_a_training_step_on_a_cpu_imports_no_kernel():
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT.parent)}
    program = [sys.executable, "-c", TRAINED_ON_A_CPU]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Budgets, so that no later feature makes the core hard to read again. A change that needs a larger
# one says why in its message. `python benchmarks/weight.py --files` shows what counts.
ENTERED_BY_A_GRADIENT = weight.Entered(files=15, lines=3568, functions=91, paths=())
ENTERED_BY_A_STEP = weight.Entered(files=31, lines=6106, functions=204, paths=())
LINES_OF_A_JAXPR = 251  # with the name of the result, for policies of `jax.checkpoint`
READERS_OF_EQUATIONS = 3  # files with ``.eqns``: others are a `Reader` of the one interpreter
LINES_OF_ROOMS = {
    "tracing": 1351,
    "scaling": 2893,
    "quantizers": 686,
    "matmul": 1038,
    "recipes": 1569,
    "products": 5209,
    "kernels": 6131,
    "layers": 4816,
    "collectives": 530,
    "optim": 2682,
    "training": 3046,
    "checkpoint": 3135,
    "conversion": 4932,
    "debug": 3482,
    "plot": 858,
    "command_line": 1030,
}
LONGEST, MOST_COMPLEX, WIDEST = 60, 15, 15
# The arguments of `optax.contrib.muon`, 19, and of `jax.nn.dot_product_attention`, 12, and more.
LARGE = {"optim/muon.py:muon", "products/flash/dot_product.py:scaled_dot_product_attention"}


@pytest.mark.parametrize(
    ("call", "budget"),
    [
        (weight.gradient_of_a_product, ENTERED_BY_A_GRADIENT),
        (weight.step_of_dense, ENTERED_BY_A_STEP),
    ],
    ids=["gradient", "training step"],
)
def test_little_is_entered(call, budget):
    found = weight.entered(call)
    assert found.files <= budget.files, found.paths
    assert (found.lines, found.functions) <= (budget.lines, budget.functions)
    assert found.functions <= budget.functions


def test_the_program_of_a_gradient_is_short_and_has_no_platform_switch():
    program = weight.jaxpr_of_gradient()
    assert program.count("dot_general[") == 3
    assert len(program.splitlines()) <= LINES_OF_A_JAXPR
    assert "platform_index" not in program


def test_few_files_read_equations_themselves():
    reading = {
        name
        for name, tree in modules().items()
        if any(isinstance(node, ast.Attribute) and node.attr == "eqns" for node in ast.walk(tree))
    }
    assert "jfp8.tracing.interpreter" in reading
    assert len(reading) <= READERS_OF_EQUATIONS, reading


# Means that break with releases of JAX or Flax, and how often each may be used. The frame is that
# of a user's line, for warnings; the class that of a converted NNX module.
FRAGILE = {
    r"\._getframe\(": 1,
    r"\"__class__\"": 1,
    r"\.__class__ = ": 0,
    r"^(import|from) dis\b": 0,
    r"\bContextVar\b|get_opaque_trace_state|trace_state_clean|eval_trace": 0,
    r"\(core\.Trace\)": 0,
    r"module\._context|_pytree__is_pytree|module_stack": 0,
    r"[^_]Primitive\(": 2,
}


def test_fragile_means_are_not_used():
    texts = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")]
    lines = [line for text in texts for line in text.splitlines()]
    found = {means: sum(bool(re.search(means, line)) for line in lines) for means in FRAGILE}
    assert found == FRAGILE


def test_rooms_stay_small():
    found = weight.lines_of_rooms()
    assert {room: found[room] for room, most in LINES_OF_ROOMS.items() if found[room] > most} == {}


def test_functions_stay_small():
    found = list(weight.functions())
    assert len({f.name for f in found}) > 1500
    large = {
        f.name
        for f in found
        if f.lines > LONGEST or f.complexity > MOST_COMPLEX or f.parameters > WIDEST
    }
    assert large == LARGE


def test_no_module_has_the_name_of_a_public_function():
    functions = {name for name in jfp8.__all__ if inspect.isfunction(getattr(jfp8, name))}
    assert functions
    assert not functions & {name.removeprefix("jfp8.") for name in modules()}


def private_names(tree: ast.AST) -> set[str]:
    """Private names that are imported or stand in attribute chains such as `jax.numpy.sum`."""
    chains = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {name for name in {*imported_names(tree), *chains} if name.startswith(PRIVATE)}


def test_only_compat_touches_private_jax():
    assert {name for name, tree in modules().items() if private_names(tree)} == {PRIVATE_ALLOWED}


def test_two_files_elsewhere_use_private_names():
    checkout = Path(__file__).resolve().parents[1]
    words = ("_src", "jaxlib", "lift")  # one of them is in every such name
    texts = {
        path.relative_to(checkout).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for folder in (*SCRIPTS, "docs")
        for path in sorted((checkout / folder).rglob("*.py"))
    }
    using = {
        file
        for file, text in texts.items()
        if any(word in text for word in words) and private_names(ast.parse(text))
    }
    assert using == PRIVATE_ALLOWED_ELSEWHERE


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
import jax
reads.clear()
import jfp8
seen = list(reads)
# JAX refuses this once any device has been asked for.
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices("cpu")) == 3
assert not seen, f"reads the environment: {seen}"
"""


def third_parties() -> list[str]:
    trees = [tree for module, tree in modules().items() if room_of(module) != "integrations"]
    names = {name for tree in trees for name in imported_names(tree)}
    known = {"jfp8", *sys.stdlib_module_names}
    return sorted(name for name in names if name.split(".")[0] not in known)


def test_import_reads_no_environment_and_asks_for_no_device():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT.parent)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, *third_parties()],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed_once():
    assert len(set(jfp8.__all__)) == len(jfp8.__all__)


PUBLIC_MODULES = {"jfp8"} | {
    f"jfp8.{name}" for name in jfp8.__all__ if inspect.ismodule(getattr(jfp8, name))
}


@pytest.mark.parametrize("name", sorted(PUBLIC_MODULES))
def test_dir_shows_what_is_public(name):
    """In place of the files that public names come from, and of Python's own attributes."""
    module = importlib.import_module(name)
    assert len(PUBLIC_MODULES) == 12
    assert dir(module) == sorted(module.__all__)
    assert {name for name in dir(module) if name.startswith("_")} <= {"__version__"}
    files = [other for other in modules() if other.rpartition(".")[0] == name]
    assert all(inspect.ismodule(importlib.import_module(file)) for file in files)


def test_type_hints_ship():
    assert importlib.resources.files("jfp8").joinpath("py.typed").is_file()


# Not frozen: Flax's modules inherit from these, and are dataclasses that Flax freezes itself.
BASES_OF_MODULES = {
    "jfp8.layers.transformer_options.InFeatures",
    "jfp8.layers.transformer_options.FeedForward",
    "jfp8.layers.transformer_options.FeedForwardOptions",
    "jfp8.layers.transformer_options.BiasOptions",
    "jfp8.layers.transformer_options.Architecture",
    "jfp8.layers.transformer_options.TransformerOptions",
    "jfp8.layers.moe_math.MoEOptions",
    "jfp8.layers.linen.fused._LinenFeedForward",
    "jfp8.layers.nnx.fused.LayerNormMLP",
    "jfp8.layers.nnx.moe.MoE",
    "jfp8.layers.nnx.transformer.RelativePositionBiases",
    "jfp8.layers.linen.layers.Fp8Layer",
    "jfp8.layers.linen.transformer._LinenArchitecture",
    "jfp8.layers.nnx.transformer.TransformerLayer",
}
# The files in which something changes after it was made, and why.
CHANGES = {
    r"(layers|conversion|training)\.nnx|debug\.(stats|compare)": (
        "NNX modules are references that calls update; a converted copy gets subclasses"
    ),
    r"optim\.loss_scale_state": "notes of what happens while a function is traced",
    r"debug\.(recorder|reading)": "count steps, and say where a traced body measured",
    r"layers\.(linen\.|options)|conversion\.linen|integrations\.maxtext\.enabled": (
        "options of a layer for one call; that a model has warned; a trainer in a context"
    ),
}
CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
SETTERS = {"setattr", "delattr", "object.__setattr__", "object.__delattr__"}
NAMES_OF_FUNCTIONS = {"__name__", "__signature__"}


def dataclasses_of(tree: ast.AST) -> dict[str, bool]:
    """The dataclasses in `tree`, and whether they are frozen; a bare decorator counts, too."""
    return {
        node.name: "frozen=True" in ast.unparse(decorator)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if ast.unparse(getattr(decorator, "func", decorator)).split(".")[-1] == "dataclass"
    }


def changes_in(node: ast.AST, function: str = "") -> Iterator[str]:
    """List assignments to attributes, ``__class__`` included, outside constructors."""
    function = getattr(node, "name", function)
    if function not in CONSTRUCTORS:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if node.attr not in NAMES_OF_FUNCTIONS:
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS:
            yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from changes_in(child, function)


def test_values_never_change():
    """Nobody has to ask who else holds a recipe, a format or a state."""
    frozen = {
        f"{module}.{name}": is_frozen
        for module, tree in modules().items()
        for name, is_frozen in dataclasses_of(tree).items()
    }
    assert len(frozen) > 100
    assert {name for name in frozen if not frozen[name]} == BASES_OF_MODULES
    changing = {m: found for m, t in modules().items() if (found := list(changes_in(t)))}
    excused = re.compile("|".join(rf"jfp8\.({files})" for files in CHANGES))
    assert {m: found for m, found in changing.items() if not excused.match(m)} == {}
    for files in CHANGES:
        assert any(re.match(rf"jfp8\.({files})", module) for module in changing), files


def test_conversion_replaces_nothing_in_a_class_or_in_the_model_given():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    methods, attributes = dict(vars(nnx.Linear)), dict(vars(model))
    converted = jfp8.convert(model, exempt=())
    assert converted is not model
    assert isinstance(converted, nnx.Linear)
    assert dict(vars(nnx.Linear)) == methods
    assert (type(model), dict(vars(model))) == (nnx.Linear, attributes)


def test_the_reader_of_changes_reads():
    for source, thawed, changes in (
        ("@dataclasses.dataclass(eq=False)\nclass A:\n    x: int", ["A"], 0),
        ("@dataclass(frozen=True)\nclass A:\n    x: int", [], 0),
        ("def f(a):\n    object.__setattr__(a, '__class__', B)", [], 1),
        ("def f(a):\n    del a.x, a.y", [], 2),
        ("class A:\n    def __init__(self):\n        self.x = 1", [], 0),
    ):
        tree = ast.parse(source)
        assert [name for name, frozen in dataclasses_of(tree).items() if not frozen] == thawed
        assert len(list(changes_in(tree))) == changes
