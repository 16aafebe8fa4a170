"""Bugs drawn at random: small changes at places of the sources that a seed picks.

Every change that `mutation_kinds.py` knows, in every place, is as likely as every other. Left out
are places where a change is no bug that a test could notice: annotations, docstrings, assertions,
what an exception says, what is exported, and the keywords that `mutation_kinds.py` lists.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from support.mutation_kinds import KINDS, Source, called, is_no_bug

# Kernels for GPUs, and what calls them, need a later JAX than the oldest, where none of their tests
# run.
EXCLUDED = (
    "jfp8/kernels/blackwell/",
    "jfp8/kernels/hopper/",
    "jfp8/kernels/quantize_and_transpose.py",
    "jfp8/kernels/grouped.py",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change of the source.

    Attributes:
      file: from the root of the checkout.
      line: where the text begins that differs.
      function: it is in, by its qualified name; "" in a class or module outside of functions.
      kind: of change; see `mutation_kinds.KINDS`.
      start: of `old`, in bytes.
      old, new: what stands there, a node of the syntax tree, and what stands there instead.
    """

    file: str
    line: int
    function: str
    kind: str
    start: int
    old: str
    new: str

    def planted(self, text: str) -> str:
        """`text`, that of the file, with the bug in it."""
        data, old = text.encode(), self.old.encode()
        before, after = data[: self.start], data[self.start + len(old) :]
        return (before + self.new.encode() + after).decode()

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {self.kind}: {old} -> {new}"


def mutants(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """`count` different ones of the `sources`, texts by path; fewer if there are no more."""
    everywhere = [
        mutant
        for file in sorted(sources)
        if not file.startswith(EXCLUDED)
        for mutant in candidates(file, sources[file])
    ]
    random.Random(seed).shuffle(everywhere)
    return list(islice((m for m in everywhere if is_another_program(m, sources[m.file])), count))


def is_another_program(mutant: Mutant, text: str) -> bool:
    """Whether it compiles, and not to the same."""
    planted = mutant.planted(text)
    try:
        compile(planted, mutant.file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


def candidates(file: str, text: str) -> Iterator[Mutant]:
    """Every change of every kind in one file, also those that do not compile."""
    source = Source.of(text)
    for node, function in places(ast.parse(text)):
        for name, kind in KINDS.items():
            for change in kind(node, source):
                start, end = change.start, change.end
                if isinstance(node, ast.expr | ast.AugAssign):  # enough to see what changes
                    start, end = source.span(node)
                old = source.data[start:end].decode()
                new = source.data[start : change.start] + change.new
                new += source.data[change.end : end]
                line = source.data.count(b"\n", 0, change.start) + 1
                yield Mutant(file, line, function, name, start, old, new.decode())


def places(node: ast.AST, path: str = "", function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every node below `node` where a change may be a bug, with the function it is in.

    Defaults and decorators count as parts of their function: its tests are those that notice.
    """
    yield node, function
    for child in children(node):
        if isinstance(child, Function):
            name = path + child.name
            yield from places(child, f"{name}.<locals>.", name)
        elif isinstance(child, ast.ClassDef):
            yield from places(child, f"{path}{child.name}.", function)
        else:
            yield from places(child, path, function)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes right below `node`, less those where a change is no bug."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or is_docstring(node):
        return  # what an exception says; a string whose parts have no position before Python 3.12
    left_out = {"annotation", "returns"}
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        left_out |= {"test", "body"}
    for field, value in ast.iter_fields(node):
        if field in left_out:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or is_no_program(child):
                continue
            if not (isinstance(child, ast.keyword) and is_no_bug(child, node)):
                yield child


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_no_program(node: ast.AST) -> bool:
    """Whether `node` is an assertion, a list of what is exported, or a type for a checker."""
    targets = getattr(node, "targets", [])
    exported = "__all__" in map(ast.unparse, targets)
    return isinstance(node, ast.Assert) or exported or called(node) in {"cast", "TypeVar"}
