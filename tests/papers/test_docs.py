"""Everything public is documented, in docstrings and on pages; their code runs; the site builds."""

import ast
import builtins
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import io
import math
import pkgutil
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import jfp8
from support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("", "coming_from/", "trainers/")
GUIDES = sorted(page for folder in FOLDERS for page in DOCS.glob(f"{folder}*.md"))


def modules() -> list[types.ModuleType]:
    """`jfp8` and its public modules."""
    named = [getattr(jfp8, name) for name in jfp8.__all__]
    return [jfp8, *(m for m in named if isinstance(m, types.ModuleType))]


def public() -> dict[str, Any]:
    """Public things by their first name; a layer is `jfp8.Dense` and not `jfp8.linen.Dense`."""
    found: dict[str, Any] = {}
    for module in modules():
        for name in module.__all__:
            value = getattr(module, name)
            is_new = not any(value is known for known in found.values())
            if is_new and name != "__version__" and not isinstance(value, types.ModuleType):
                found[f"{module.__name__}.{name}"] = value
    return found


PUBLIC = public()
FUNCTIONS = {name: f for name, f in PUBLIC.items() if inspect.isfunction(f)}
CLASSES = {name: c for name, c in PUBLIC.items() if inspect.isclass(c)}


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself defines."""
    for name, value in vars(cls).items():
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        is_method = inspect.isfunction(value) and value.__qualname__.startswith(f"{cls.__name__}.")
        # Not what decorators such as flax.struct add.
        is_own = is_method and value.__module__ == cls.__module__
        if not name.startswith("_") and (is_own or isinstance(value, property)):
            yield name, value


# Docstrings

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "References")


def sections(thing: Any) -> dict[str, str]:
    """The text of a docstring by section; what comes before the first one is under ``""``."""
    found, current = {"": ""}, ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line.removesuffix(":") in SECTIONS and line.endswith(":"):
            current = line.removesuffix(":")
            found[current] = ""
        elif line.startswith(">>>"):
            current = "Example"
            found[current] = found.get(current, "") + line + "\n"
        elif current and line and not line.startswith(" "):
            current = ""
        else:
            found[current] += line + "\n"
    return found


def entries(section: str) -> dict[str, str]:
    """``{"lhs": text, "rhs": text}`` of a section with ``lhs, rhs: text``."""
    found: dict[str, str] = {}
    for names, text in re.findall(
        r"^  ([\w*][\w*., ]*):((?:.*)(?:\n(?:    .*|\s*$))*)", section, re.MULTILINE
    ):
        for name in names.split(","):
            found[name.strip().lstrip("*")] = text
    return found


def parameters(function: Any) -> list[inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.name not in ("self", "cls")]


# A shape or dtype, or where it is said.
SHAPE = re.compile(
    r"\b(f32|bf16|f16|f8|f4|e8m0|u32|u8|i32|int32|uint32|bool|scalar|float|number|array|arrays|key|"
    r"tree|pytree|shape|see|as (in|of|for))\b|\["
)


def raised(function: Any, seen: frozenset[str] = frozenset()) -> set[str]:
    """Exceptions in the code of a function, and in that of private helpers of the same module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = set()
    module = inspect.getmodule(function)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", "")
            if isinstance(getattr(builtins, name, None), type):
                found.add(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            helper = getattr(module, node.func.id, None)
            name = node.func.id
            if inspect.isfunction(helper) and name.startswith(("_check", "check_")):
                if name not in seen:
                    found |= raised(helper, seen | {name})
    return found


def missing_in_function(function: Any, *, is_method: bool = False) -> list[str]:
    said = sections(function)
    everything = inspect.getdoc(function) or ""
    if not everything.strip():
        return ["a docstring"]
    missing = []
    args = entries(said.get("Args", ""))
    for p in parameters(function):
        inside = "..." in args or (is_method and re.search(rf"`{p.name}`", everything))
        named = p.name in args or inside
        if not named:
            missing.append(f"Args: {p.name}")
        elif p.name in args and re.search(r"^(?!.*Callable).*\bArray(Like)?\b", str(p.annotation)):
            if not SHAPE.search(args[p.name]):
                missing.append(f"shape or dtype of {p.name}")
    returns = inspect.signature(function).return_annotation not in (None, "None", "NoReturn")
    if returns and not is_method and not {"Returns", "Yields"} & set(said):
        missing.append("Returns")
    for name in sorted(raised(function)):
        if not re.search(rf"\b{name}\b", everything):
            missing.append(f"Raises: {name}")
    return missing


def fields_of(cls: type) -> list[str]:
    """Fields that the class itself adds, or what its own ``__init__`` takes."""
    if hasattr(cls, "_fields"):
        return list(cls._fields)
    if "__init__" in vars(cls) and not dataclasses.is_dataclass(cls):
        return [p.name for p in parameters(cls)]
    own = vars(cls).get("__annotations__", {})
    return [n for n, kind in own.items() if "ClassVar" not in str(kind) and not n.startswith("_")]


def missing_in_class(cls: type) -> list[str]:
    if not (cls.__doc__ or "").strip():
        return ["a docstring"]
    said = sections(cls)
    documented = entries(said.get("Attributes", "")) | entries(said.get("Args", ""))
    if inspect.isfunction(vars(cls).get("__init__")):
        documented |= entries(sections(cls.__init__).get("Args", ""))
    missing = set(fields_of(cls)) - documented.keys() - documented_elsewhere(cls)
    return [f"Attributes: {name}" for name in sorted(missing)]


def documented_elsewhere(cls: type) -> set[str]:
    """Parameters of bases of Flax, and fields of the classes that the docstring says to see."""
    of_flax = [base for base in cls.__mro__ if base.__module__.startswith("flax.nnx.nn.")]
    found = {p.name for base in of_flax for p in parameters(base.__init__)}
    for names in re.findall(r"\bsee\s+`([\w.]+)`(?:\s+and\s+`([\w.]+)`)?", cls.__doc__ or ""):
        for name in filter(None, names):
            other = CLASSES.get(name) or CLASSES.get(f"jfp8.nnx.{name}")
            if other is None and name.startswith("jfp8.linen."):
                other = getattr(jfp8.linen, name.removeprefix("jfp8.linen."))
            said = {} if other is None else sections(other)
            found |= entries(said.get("Attributes", "") + said.get("Args", "")).keys()
    return found


# Fields that Flax gives to every module, and one of its own that jfp8's layers set.
FLAX_FIELDS = {"parent", "name", "promote_dtype"}

# Implementations of published rules, which have references.
PUBLISHED = {f"jfp8.recipes.{recipe.__name__}" for recipe in jfp8.recipes.RECIPES}
PUBLISHED -= {"jfp8.recipes.Unscaled"}  # nobody's rule
PUBLISHED |= {
    f"jfp8.{name}"
    for name in (
        *("Edge", "Format", "MoE", "cast", "initialize", "loss_scale", "save_in_fp8"),
        *("optim.Blocks", "optim.ScaledFloat16", "optim.adam", "optim.fp8_gradients"),
        *("optim.master_weights", "optim.stochastic_rounding", "quantizers.TwoLevel"),
        *("collectives.pmean", "scaling.scale_from_amax"),
    )
}


def test_a_module_says_what_it_is():
    assert [m.__name__ for m in modules() if not (m.__doc__ or "").strip()] == []


@pytest.mark.slow
def test_a_function_says_what_it_takes_gives_and_raises():
    missing = {name: missing_in_function(function) for name, function in FUNCTIONS.items()}
    for name, function in FUNCTIONS.items():
        if name.count(".") == 1 and ">>>" not in (inspect.getdoc(function) or ""):
            missing[name].append("an example (>>>)")
    assert {name: what for name, what in missing.items() if what} == {}


def missing_in_members(cls: type) -> set[str]:
    missing = set(missing_in_class(cls)) - {f"Attributes: {field}" for field in FLAX_FIELDS}
    for member, value in members(cls):
        function = value.fget if isinstance(value, property) else value
        inherited = [getattr(getattr(base, member, None), "__doc__", None) for base in cls.__mro__]
        if not function.__doc__ and any(inherited):
            continue  # it does what its base says
        missing |= {f"{member}: {m}" for m in missing_in_function(function, is_method=True)}
    return missing


def test_a_class_says_what_it_holds_and_does():
    missing = {name: missing_in_members(cls) for name, cls in CLASSES.items()}
    assert {name: what for name, what in missing.items() if what} == {}


def test_published_rules_have_their_source():
    source = r"arXiv \d{4}\.\d{4,5}|OCP|Transformer Engine|torch|Toolkit|MS-AMP"
    said = {name: sections(PUBLIC[name]).get("References", "") for name in PUBLISHED}
    assert [name for name, text in said.items() if not re.search(source, text)] == []


COMPLETE = """Multiply.

Args:
  x: f32 array.
  n: factor.

Returns:
  f32 array.

Raises:
  ValueError: `n` is zero.
"""


def test_the_rules_find_what_is_missing():
    """Each of them, in a docstring that breaks it."""

    def product(x: jax.Array, n: int) -> jax.Array:
        if n == 0:
            raise ValueError("n")
        return x * n

    for whole, part, expected in (
        ("", "", []),
        (COMPLETE, "", ["a docstring"]),
        ("  n: factor.\n", "", ["Args: n"]),
        ("x: f32 array", "x: it", ["shape or dtype of x"]),
        ("Returns:\n  f32 array.\n", "", ["Returns"]),
        ("ValueError", "TypeError", ["Raises: ValueError"]),
    ):
        product.__doc__ = COMPLETE.replace(whole, part, 1) if whole else COMPLETE
        assert missing_in_function(product) == expected


# The pages of the API

LISTED = re.compile(
    r"^(?:\.\. py:data:: (\w+)|   (\w+)|\.\. (currentmodule|automodule):: (\S+))$", re.M
)


def documented() -> dict[str, Any]:
    """Return the documented objects by name: entries of the tables of the API, and data."""
    found: dict[str, Any] = {}
    for page in DOCS.glob("api/*.md"):
        module = ""
        for data, entry, kind, of in LISTED.findall(page.read_text()):
            name = data or entry
            if kind == "currentmodule":
                module = of
            elif kind == "automodule":
                found[of] = importlib.import_module(of)
            else:
                assert f"{module}.{name}" not in found, f"{name} twice"
                found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


def test_everything_public_is_on_a_page_of_the_api():
    there = documented()
    things = PUBLIC | {m.__name__: m for m in modules() if m is not jfp8}
    missing = [n for n, thing in things.items() if not any(thing is t for t in there.values())]
    assert not missing
    unknown = [n for n, t in there.items() if not any(t is thing for thing in things.values())]
    assert not unknown


def test_names_in_docstrings_exist():
    """Every `jfp8.something` in single backticks, also of methods."""
    wrong = []
    for module in [m for name, m in sys.modules.items() if name.startswith("jfp8.")]:
        for reference in re.findall(r"(?<!`)`(jfp8(?:\.\w+)+)`", inspect.getsource(module)):
            *path, last = reference.split(".")
            try:  # resolving also imports modules that are loaded when needed
                thing = pkgutil.resolve_name(".".join(path))
                known = hasattr(thing, last) or last in getattr(thing, "__annotations__", {})
                known = known or importlib.util.find_spec(reference) is not None
            except (AttributeError, ImportError):
                known = False
            if not known:
                wrong.append(f"{module.__name__}: {reference}")
    assert not wrong


# The code on the pages

OTHERS = (
    "Transformer Engine",
    "Qwix",
    "MS-AMP",
    "torchao",
    "FP8 Emulation Toolkit",
    "Accelerate",
    "MaxText",
    *("haiku", "equinox", "keras", "haliax", "tokamax"),
    *("Flax's examples", "gemma", "tunix", "bonsai", "big_vision", "transformers", "diffusers"),
)


TABS = ("NNX", "Linen")  # one program, twice: docs/conf.py shows one of them at a time


BLOCK = re.compile(
    r"(?:^\*\*(\w+)\*\*\n\n)?^```python\n(.*?)^```\n(?:\n?^```(?:text)?\n(.*?)^```)?", re.M | re.S
)


def programs_of(page: Path, tab: str = "") -> list[tuple[str, str]]:
    """The code on a page, and what it prints; with `tab`, without the code of the other one."""
    others = {*TABS} - {tab} if tab else set()
    found = BLOCK.findall(page.read_text())
    # An output below two tabs belongs to both.
    printed = [
        output or (found[i + 1][2] if name == TABS[0] and i + 1 < len(found) else "")
        for i, (name, _, output) in enumerate(found)
    ]
    pairs = zip(found, printed, strict=True)
    return [(code, output) for (name, code, _), output in pairs if name not in others]


def blocks_of(page: Path, tab: str = "") -> list[str]:
    return [code for code, _ in programs_of(page, tab)]


def tabs_of(page: Path) -> list[str]:
    return re.findall(r"^\*\*(NNX|Linen)\*\*\n\n```python\n", page.read_text(), re.MULTILINE)


def is_ours(code: str) -> bool:
    """Code of other libraries begins with a comment that names them."""
    return not code.startswith(tuple(f"# {name}" for name in OTHERS))


MAKE_DEVICES = ("memory.md", "scaling_out.md")  # so they run in processes of their own
RUNNING = [
    page
    for page in (*GUIDES, *DOCS.glob("api/*.md"))
    if page.name not in MAKE_DEVICES and any(map(is_ours, blocks_of(page)))
]


def with_tabs(pages: list[Path]) -> list[tuple[Path, str]]:
    return [(page, tab) for page in pages for tab in (TABS if tabs_of(page) else ("",))]


PROGRAMS = with_tabs(RUNNING)
each_program = pytest.mark.parametrize(
    ("page", "tab"),
    PROGRAMS,
    ids=[
        " ".join([str(page.relative_to(DOCS).with_suffix("")), tab]).strip()
        for page, tab in PROGRAMS
    ],
)


def test_tabs_come_in_pairs():
    tabs = {page.name: tabs_of(page) for page in RUNNING if tabs_of(page)}
    assert len(tabs) >= 6
    assert all(found == [*TABS] * (len(found) // 2) for found in tabs.values())


@pytest.mark.slow
@each_program
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which users have
        scope = {"__name__": page.stem}
        for number, (code, output) in enumerate(programs_of(page, tab)):
            if is_ours(code):
                printed = run(code, scope, f"{page.name}, block {number}")
                assert shows(output, printed), f"block {number} prints\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tab"), [(MAKE_DEVICES[0], tab) for tab in TABS] + [(MAKE_DEVICES[1], "")]
)
def test_the_code_of_a_page_that_makes_devices(name, tab, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    blocks = blocks_of(DOCS / name, tab)
    assert len(blocks) >= 3
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    run_script(script, cwd=tmp_path)


NUMBER = r"\d+\.?\d*(?:e[-+]?\d+)?"


def shows(output: str, printed: str) -> bool:
    """Whether `printed` has the words of `output` in order: a page may wrap lines, or skip some."""
    rest = iter(printed.split())
    words = (word for word in output.split() if word.strip("-.,"))
    return all(any(same(word, other) for other in rest) for word in words)


def same(word: str, printed: str) -> bool:
    """Whether words are equal, up to 10 % in decimals and 5 % in integers from 20 on."""
    if re.sub(NUMBER, "#", word) != re.sub(NUMBER, "#", printed):
        return False
    pairs = zip(re.findall(NUMBER, word), re.findall(NUMBER, printed), strict=True)
    return all(
        math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=1e-3)
        if {*".e"} & {*a}
        else math.isclose(float(a), float(b), rel_tol=0.05 if float(a) >= 20 else 0.0)
        for a, b in pairs
    )


def run(code: str, scope: dict[str, Any], name: str) -> str:
    """Run a block of a page and return its output; a literal behind a ``print`` must be that."""
    printed = io.StringIO()
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            tree = ast.Module([statement], type_ignores=[])
            exec(compile(tree, name, "exec", dont_inherit=True), scope)
        printed.write(out.getvalue())
        comment = lines[statement.end_lineno - 1][statement.end_col_offset :].strip(" #")
        if ast.unparse(statement).startswith("print(") and is_literal(comment):
            assert shows(comment, out.getvalue()), f"{name}: {ast.unparse(statement)}"
    return printed.getvalue()


def is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True


def test_a_changed_output_is_noticed():
    assert run("x = 2\nprint(x)  # 2\nprint('a', x)  # what it is\n", {}, "") == "2\na 2\n"
    with pytest.raises(AssertionError, match="print"):
        run("print(2)  # 3\n", {}, "")
    table = "layer  error\n----------\nfirst  5.31 %\nlast   2.60 %\n"
    assert shows("layer error\n...\nlast\n2.61 %", table)
    assert not shows("layer  error\n-----\nlast  3.61 %", table)
    assert not shows("12 of 16 matmuls", "11 of 16 matmuls")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("sphinx", "myst_nb", "furo", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    done = subprocess.run(
        [*command, str(DOCS), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    pages = {
        path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")
    }
    assert {"index", "quickstart", "api/linen", "coming_from/qwix"} <= pages
    notebooks = {f"notebooks/{path.stem}" for path in ROOT.glob("notebooks/*.ipynb")}
    assert notebooks
    assert notebooks <= pages
    switched = (tmp_path / "quickstart.html").read_text()
    assert switched.count('data-sync-id="NNX"') == switched.count('data-sync-id="Linen"') == 4
    dense = (tmp_path / "api/objects/jfp8.Dense.html").read_text()
    assert "_modules/jfp8/layers/linen/layers.html#Dense" in dense  # its source
    assert "api_reference/flax.linen/layers.html#flax.linen.Dense" in dense
    formulas = [(tmp_path / f"{page}.html").read_text() for page in ("recipes", *notebooks)]
    assert 'class="math notranslate nohighlight"' in formulas[0]
    assert not any("$$" in page for page in formulas)
    listed = (tmp_path / "llms.txt").read_text()
    assert "- [Quickstart](quickstart.html): " in listed
    assert all((tmp_path / page).exists() for page in re.findall(r"\((.*\.html)\):", listed))
    delayed = (tmp_path / "api/objects/jfp8.recipes.DelayedScaling.html").read_text()
    assert "https://arxiv.org/abs/2209.05433" in delayed
