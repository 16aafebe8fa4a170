"""Mutants: small changes of the sources at places that a seed draws.

Every change that `KINDS` knows, in every place, is as likely as every other. Places where no test
could notice a change are left out: annotations, docstrings, assertions, messages of exceptions,
`__all__`, and the keyword arguments in `NO_BUGS`.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

# Kernels for GPUs, and what calls them, need a later JAX than the oldest, where none of their tests
# run.
EXCLUDED = (
    "jfp8/kernels/blackwell/",
    "jfp8/kernels/hopper/",
    "jfp8/kernels/quantize_and_transpose.py",
    "jfp8/kernels/grouped_kernels.py",
)
COMPARISONS: dict[type[Any], type[Any]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[Any], type[Any]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# For these, `comparison` gives the negated condition.
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
)
TWIN = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
# The first argument of these chooses one of the next two.
CHOOSERS = {"where", "select", "cond"}
# Swapped arguments always raise, or give the same.
NOT_SWAPPED = {"isinstance", "issubclass", "max", "maximum", "min", "minimum", "swapaxes"}
# `strict` of a zip is an assertion: a check of the caller's arguments comes first, with a test.
# The others change a line or a letter of a picture, but not its place or its text.
NO_BUGS = {"strict", "alpha", "aspect", "fontsize", "labelsize", "linewidth", "ms", "zorder"}

# An old node of the syntax tree, and a new one in its place.
Change = tuple[Any, ast.AST]


def comparison(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[i] = COMPARISONS[type(operator)]()
            yield node, ast.Compare(node.left, operators, node.comparators)


def operation(node: ast.AST) -> Iterator[Change]:
    other = OPERATORS.get(type(getattr(node, "op", None)))
    if other:
        yield node, with_fields(node, op=other())


def sign(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, node.operand


def condition(node: ast.AST) -> Iterator[Change]:
    tests = node.ifs if isinstance(node, ast.comprehension) else []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        tests = [node.test]
    for test in tests:
        if "TYPE_CHECKING" in names(test):
            continue
        by_sign = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        by_comparison = isinstance(test, ast.Compare) and isinstance(test.ops[0], OPPOSITES)
        if not (by_sign or by_comparison):
            yield test, ast.UnaryOp(ast.Not(), test)


def constant(node: ast.AST) -> Iterator[Change]:
    """Another number, truth value, or string without spaces, which selects something."""
    match getattr(node, "value", None) if isinstance(node, ast.Constant) else None:
        case bool(value):
            yield node, ast.Constant(not value)
        case int(value):
            yield node, ast.Constant(value + 1)
        case float(value):
            yield node, ast.Constant(value * 2 if value else 1.0)
        case str(value) if value and not re.search(r"\s", value):
            yield node, ast.Constant(value + "_")


def bound(node: ast.AST) -> Iterator[Change]:
    """A slice that is one longer or starts one later; `constant` changes those of numbers."""
    if isinstance(node, ast.Slice):
        for edge in (node.lower, node.upper):
            if edge is not None and not isinstance(edge, ast.Constant | ast.UnaryOp):
                yield edge, ast.BinOp(edge, ast.Add(), ast.Constant(1))


def swapped(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call) or called(node) in NOT_SWAPPED:
        return
    first = 1 if called(node) in CHOOSERS else 0
    pair = node.args[first : first + 2]
    if len(pair) == 2 and not any(isinstance(argument, ast.Starred) for argument in pair):
        arguments = [*node.args[:first], *pair[::-1], *node.args[first + 2 :]]
        yield node, with_fields(node, args=arguments)


def keyword_dropped(node: ast.AST) -> Iterator[Change]:
    for keyword in getattr(node, "keywords", []):
        if isinstance(node, ast.Call) and keyword.arg and keyword.arg not in NO_BUGS:
            rest = [other for other in node.keywords if other is not keyword]
            yield node, with_fields(node, keywords=rest)


def twin(node: ast.AST) -> Iterator[Change]:
    """A function that is mixed up easily: ``max`` for ``min``."""
    if isinstance(node, ast.Call) and called(node) in TWIN:
        field = "id" if isinstance(node.func, ast.Name) else "attr"
        yield node.func, with_fields(node.func, **{field: TWIN[called(node)]})


def dropped(node: ast.AST) -> Iterator[Change]:
    """A statement dropped that leaves no name without a value, mostly."""
    droppable = isinstance(
        node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Assign
    )
    if isinstance(node, ast.Expr):
        # Without its docstring or its yield, a function is no other program or another kind.
        droppable = not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        binds = [t for t in node.targets if isinstance(t, ast.Name | ast.Tuple | ast.List)]
        droppable = names(*binds) <= names(node.value)
    if droppable:
        yield node, ast.Pass()


KINDS: tuple[Callable[[ast.AST], Iterator[Change]], ...] = (
    comparison,
    operation,
    sign,
    condition,
    constant,
    bound,
    swapped,
    keyword_dropped,
    twin,
    dropped,
)


def with_fields(node: ast.AST, **changed: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **changed})


def names(*nodes: ast.AST) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def called(node: ast.AST) -> str:
    """The last name of the function that a call calls; "" for anything else."""
    function = getattr(node, "func", None)
    return getattr(function, "id", getattr(function, "attr", ""))


@dataclass(frozen=True)
class Mutant:
    """One change of a source file: the node at byte `start`, replaced by a function of `KINDS`."""

    file: str
    line: int
    kind: str
    start: int
    old: str
    new: str

    def planted(self, text: str) -> str:
        """Return `text`, the file's, with the change."""
        data, end = text.encode(), self.start + len(self.old.encode())
        return (data[: self.start] + self.new.encode() + data[end:]).decode()

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {self.kind}: {old} -> {new}"


def mutants(sources: Mapping[str, str], count: int, seed: str) -> list[Mutant]:
    """Return `count` different mutants of `sources`, texts by path; fewer if there are no more."""
    everywhere = [
        mutant
        for file in sorted(sources)
        if not file.startswith(EXCLUDED)
        for mutant in candidates(file, sources[file])
    ]
    random.Random(seed).shuffle(everywhere)
    return list(islice((m for m in everywhere if is_another_program(m, sources[m.file])), count))


def is_another_program(mutant: Mutant, text: str) -> bool:
    """Return True if it compiles, and to other code."""
    planted = mutant.planted(text)
    try:
        compile(planted, mutant.file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


def candidates(file: str, text: str) -> Iterator[Mutant]:
    """Yield every change of every kind in one file, also those that do not compile."""
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in places(ast.parse(text)):
        for kind in KINDS:
            for old, new in kind(node):
                start = starts[old.lineno - 1] + old.col_offset
                end = starts[old.end_lineno - 1] + old.end_col_offset
                before = text.encode()[start:end].decode()
                after = ast.unparse(ast.fix_missing_locations(new))
                if isinstance(new, ast.expr):
                    after = f"({after})"
                yield Mutant(file, old.lineno, kind.__name__, start, before, after)


def places(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node where a change may be a bug."""
    yield node
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return  # the message of an exception; parts without positions before Python 3.12
    left_out = {"annotation", "returns"}
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        left_out |= {"test", "body"}
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.Dict) and field == "values":  # they may be keyword arguments
            pairs = zip(node.keys, node.values, strict=True)
            value = [child for key, child in pairs if getattr(key, "value", None) not in NO_BUGS]
        for child in value if isinstance(value, list) else [value]:
            if field not in left_out and isinstance(child, ast.AST) and is_program(child):
                yield from places(child)


def is_program(node: ast.AST) -> bool:
    """Return False for docstrings, assertions, `__all__`, types and keywords in `NO_BUGS`."""
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    exported = "__all__" in map(ast.unparse, getattr(node, "targets", []))
    keyword = isinstance(node, ast.keyword) and node.arg in NO_BUGS
    of_types = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
    typing = of_types or called(node) in {"cast", "TypeVar"}
    return not (docstring or exported or keyword or typing or isinstance(node, ast.Assert))
