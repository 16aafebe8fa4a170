"""How much of jfp8 a program enters, and how large its files are: see `benchmarks/weight.py`."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jfp8

ROOT = Path(jfp8.__file__).parent
PLAIN = (((1,), (0,)), ((), ()))


class Entered(NamedTuple):
    """What a call enters of jfp8: files, lines of these files, and functions with a name."""

    files: int
    lines: int
    functions: int
    paths: tuple[str, ...]


def entered(call: Callable[[], Any]) -> Entered:
    """Count what `call` enters, cold: nothing that JAX or jfp8 remembers is used again."""
    jax.clear_caches()
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("jfp8."):
            values = list(vars(module).values())
            values += [x for v in values if isinstance(v, type) for x in vars(v).values()]
            for value in values:
                clear = getattr(value, "cache_clear", None)
                if clear is not None and getattr(value, "__module__", "").startswith("jfp8"):
                    clear()
    found: defaultdict[str, set[Any]] = defaultdict(set)

    def watch(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            found[code.co_filename].add(code)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    named = [c for codes in found.values() for c in codes if not c.co_name.startswith("<")]
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in found)
    paths = tuple(sorted(str(Path(file).relative_to(ROOT)) for file in found))
    return Entered(len(found), lines, len(named), paths)


def gradient_of_a_product() -> Any:
    """Compute one gradient of `scaled_dot_general` by the default recipe."""
    x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
    loss = lambda x, w: jfp8.scaled_dot_general(x, w, PLAIN).sum()
    return jax.grad(loss, argnums=(0, 1))(x, w)


def step_of_dense() -> Any:
    """Initialize a `Dense` and train it for one step."""
    model: nn.Module = jfp8.Dense(4)
    x = jnp.ones((8, 16))
    variables = model.init(jax.random.key(0), x)
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.adam(1e-3))
    loss_fn = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)
    loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
    return loss, state.apply_gradients(grads)


def jaxpr_of_gradient() -> str:
    """Return the program of `gradient_of_a_product`, as JAX prints it."""
    return str(jax.make_jaxpr(gradient_of_a_product)())


def lines_of_rooms() -> dict[str, int]:
    """Return the lines of each folder of the package."""
    found: defaultdict[str, int] = defaultdict(int)
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        room = parts[0] if len(parts) > 1 else "."
        found[room] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(found.items()))


class Function(NamedTuple):
    """A function of the package: size and complexity, without docstring, ``self`` and ``cls``."""

    name: str
    lines: int
    complexity: int
    parameters: int


def functions() -> Iterator[Function]:
    """Yield all functions of the package."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                where = f"{path.relative_to(ROOT)}:{node.name}"
                yield Function(where, _lines(node), _complexity(node), _parameters(node))


def _lines(function: ast.FunctionDef) -> int:
    doc = function.body[0] if ast.get_docstring(function, clean=False) else None
    documented = 0 if doc is None else (doc.end_lineno or 0) - doc.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - documented


_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension)


def _complexity(function: ast.FunctionDef) -> int:
    """Count branches, without functions inside, which are counted by themselves."""
    count, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        count += isinstance(node, _BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        nodes += ast.iter_child_nodes(node)
    return count


def _parameters(function: ast.FunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])
