"""Kinds of small bugs, each a change of the text of one node of a syntax tree.

A kind is a function that takes a node and yields the changes it knows for it. It need not take
care that the outcome compiles: `random_mutants.py` leaves out what does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# What may stand between an operand and its operator.
BEFORE_OPERATOR = re.compile(rb"(?:[\s()\\]|#[^\n]*\n)*")

COMPARISONS = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
}
LOGIC = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
# For these, the operator of the opposite is what the negated condition says as well.
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
TWINS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
)
TWIN = {one: other for pair in TWINS for one, other in (pair, pair[::-1])}
# Their first argument says which of the next two it is.
CHOOSERS = {"where", "select", "cond"}
# Their arguments the other way around always raise.
CLASS_CHECKS = {"isinstance", "issubclass"}
# Of two arguments, and no key, these give the same either way around.
COMMUTATIVE = {"max", "maximum", "min", "minimum"}
# Keyword arguments whose change is no bug. `strict` of a zip is an assertion: what users can give
# in unequal numbers is refused before, with a message that has its own test. The others say how a
# line or a letter of a picture looks, not where it stands, nor what it says.
NO_BUGS = {"alpha", "aspect", "fontsize", "labelsize", "linewidth", "ms", "zorder"}
NO_BUGS_BY_CALL = {"zip": {"strict"}}


@dataclass(frozen=True)
class Source:
    """The text of a file, as the positions in its syntax tree count it: in bytes."""

    data: bytes
    lines: tuple[int, ...]  # where each of them starts

    @classmethod
    def of(cls, text: str) -> Source:
        data = text.encode()
        return cls(data, (0, *(match.end() for match in re.finditer(rb"\n", data))))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where the text of `node` starts and ends."""
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        return self.data[slice(*self.span(node))]


@dataclass(frozen=True)
class Change:
    """`new` instead of what stands from `start` to `end`."""

    start: int
    end: int
    new: bytes


Kind = Callable[[ast.AST, Source], Iterator[Change]]


def operator_between(
    left: ast.AST, right: ast.AST, words: tuple[str, str], source: Source
) -> Iterator[Change]:
    """Another operator between two operands: the second of `words` instead of the first."""
    gap_end = source.span(right)[0]
    start = BEFORE_OPERATOR.match(source.data, source.span(left)[1], gap_end).end()
    spelled = re.compile(rb"\s+".join(re.escape(word.encode()) for word in words[0].split()))
    if found := spelled.match(source.data, start, gap_end):
        yield Change(start, found.end(), words[1].encode())


def comparison(node: ast.AST, source: Source) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops):
            yield from operator_between(left, right, COMPARISONS[type(operator)], source)


def arithmetic(node: ast.AST, source: Source) -> Iterator[Change]:
    words = ARITHMETIC.get(type(getattr(node, "op", None)))
    if words and isinstance(node, ast.BinOp):
        yield from operator_between(node.left, node.right, words, source)
    elif words and isinstance(node, ast.AugAssign):
        yield from operator_between(node.target, node.value, words, source)


def logic(node: ast.AST, source: Source) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:]):
            yield from operator_between(left, right, LOGIC[type(node.op)], source)


def sign(node: ast.AST, source: Source) -> Iterator[Change]:
    """The operand without the ``-`` or ``not`` before it."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        word = b"not" if isinstance(node.op, ast.Not) else b"-"
        start, _ = source.span(node)
        yield Change(start, start + len(word), b"")


def condition(node: ast.AST, source: Source) -> Iterator[Change]:
    """The opposite of what an ``if`` or ``while`` asks, in any place where these may stand."""
    tests = node.ifs if isinstance(node, ast.comprehension) else []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        tests = [node.test]
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            continue  # `sign` does it
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], OPPOSITES):
            continue  # `comparison` does it
        yield Change(*source.span(test), b"not (" + source.text(test) + b")")


def constant(node: ast.AST, source: Source) -> Iterator[Change]:
    """Another number, truth value, or string without spaces, which selects something."""
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield Change(*source.span(node), str(not value).encode())
    elif isinstance(value, int):
        yield Change(*source.span(node), str(value + 1).encode())
    elif isinstance(value, float):
        yield Change(*source.span(node), repr(value * 2 if value else 1.0).encode())
    elif isinstance(value, str) and value and not re.search(r"\s", value):
        yield Change(*source.span(node), repr(value + "_").encode())


def called(node: ast.AST) -> str:
    """The last name of the function that a call calls; "" for anything else."""
    function = getattr(node, "func", None)
    return getattr(function, "id", getattr(function, "attr", ""))


def is_no_bug(argument: ast.AST, call: ast.AST) -> bool:
    """Whether `argument` of `call` is a keyword whose change is no bug."""
    name = getattr(argument, "arg", None)
    return name in NO_BUGS | NO_BUGS_BY_CALL.get(called(call), set())


def swapped(node: ast.AST, source: Source) -> Iterator[Change]:
    """Two positional arguments, the other way around."""
    if not isinstance(node, ast.Call) or called(node) in CLASS_CHECKS:
        return
    if called(node) in COMMUTATIVE and len(node.args) == 2 and not node.keywords:
        return
    first = 1 if called(node) in CHOOSERS else 0
    pair = node.args[first : first + 2]
    if len(pair) < 2 or any(isinstance(argument, ast.Starred) for argument in pair):
        return
    (start, gap_start), (gap_end, end) = (source.span(argument) for argument in pair)
    gap = source.data[gap_start:gap_end]
    yield Change(start, end, source.text(pair[1]) + gap + source.text(pair[0]))


def keyword_dropped(node: ast.AST, source: Source) -> Iterator[Change]:
    """A call without one of its keyword arguments, and without the comma that it needed."""
    if not isinstance(node, ast.Call):
        return
    arguments = sorted([*node.args, *node.keywords], key=source.span)
    for i, argument in enumerate(arguments):
        if not isinstance(argument, ast.keyword) or argument.arg is None:
            continue
        if is_no_bug(argument, node):
            continue
        start, end = source.span(argument)
        if i + 1 < len(arguments):
            end = source.span(arguments[i + 1])[0]
        elif i:
            start = source.span(arguments[i - 1])[1]
        yield Change(start, end, b"")


def twin(node: ast.AST, source: Source) -> Iterator[Change]:
    """A function that is mixed up easily: ``max`` for ``min``."""
    if isinstance(node, ast.Call) and (name := called(node)) in TWIN:
        _, end = source.span(node.func)
        yield Change(end - len(name), end, TWIN[name].encode())


def bound(node: ast.AST, source: Source) -> Iterator[Change]:
    """A slice that is one longer or starts one later. Those of numbers are `constant`'s."""
    if isinstance(node, ast.Slice):
        for edge in (node.lower, node.upper):
            if edge is not None and not isinstance(edge, ast.Constant | ast.UnaryOp):
                yield Change(*source.span(edge), b"(" + source.text(edge) + b") + 1")


def names(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def droppable(node: ast.AST) -> bool:
    """Whether a statement can go without leaving a name without a value, mostly."""
    match node:
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom() | ast.Await()):
            return False  # a docstring, or what makes the function another kind of function
        case ast.Assign():
            binds = [t for t in node.targets if isinstance(t, ast.Name | ast.Tuple | ast.List)]
            return names(binds) <= names([node.value])
        case _:
            kinds = ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break
            return isinstance(node, kinds)


def dropped(node: ast.AST, source: Source) -> Iterator[Change]:
    """``pass`` instead of a statement."""
    if droppable(node):
        yield Change(*source.span(node), b"pass")


KINDS: dict[str, Kind] = {
    "comparison": comparison,
    "arithmetic": arithmetic,
    "and/or": logic,
    "sign or not": sign,
    "condition": condition,
    "constant": constant,
    "swapped": swapped,
    "keyword dropped": keyword_dropped,
    "twin": twin,
    "bound": bound,
    "statement dropped": dropped,
}
