"""Keep the mannerisms of our English out of pages and docstrings."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIRST = r"\A(What|Whether|Of|Those|That|As many|As much|The same|How|Where|Which)\b"
# (pattern, example, what to write instead)
PHRASES = [
    (r"\b([Tt]hose|[Tt]hat) of\b", "those of the recipes", "repeat the noun"),
    (r"\bto the bit\b", "equal to the bit", "bitwise identical"),
    (r"\bgradients? by\b(?! hand)", "the gradient by x", "with respect to"),
    (r"\b(in|out)side of\b", "inside of a scan", "inside"),
    (r"\bbeside\b", "beside the scale", "next to"),
    (r"\bby lot\b", "rounded by lot", "stochastically"),
    (r"(?i)colour|neighbour|behaviour|normalis|\bgrey\b", "neighbours", "American spelling"),
    (r"\bof (its|their|one's|your|our) own\b", "a scale of its own", "its own, separate"),
    (r"\bat hand\b", "the JAX at hand", "installed"),
    (r"\btravels?\b", "weights travel", "are sent"),
    (r"\bdivide[sd]? (over|among)\b", "divided over devices", "sharded over"),
    (r"\bcompiler divides\b", "the compiler divides it", "shards, partitions"),
    (r"\b(FP8|f8|bf16|matrix|grouped|three) products?\b", "FP8 products", "matmuls"),
    (r"\bNone: ", "axis; None: all", "None means, None if"),
    (r"\bwhat\b[^.:;|]*\bwhat\b", "what is read is what was saved", "name the thing"),
    (r"\b(is|be) told\b|\bforetells?\b", "cannot be told", "inconclusive"),
    (FIRST, "What a layer keeps", "begin with a verb"),
]
FRAGMENT = r"(of|as|which|what|that)\b"


@cache
def pages() -> dict[str, list[str]]:
    folders = (ROOT, *(ROOT / f"docs/{name}" for name in ("", "api", "coming_from", "trainers")))
    found = {}
    for path in (path for folder in folders for path in folder.glob("*.md")):
        text = re.sub(r"^ *(```|~~~).*?^ *\1", "", path.read_text("utf-8"), flags=re.M | re.S)
        text = re.sub(r"`[^`]*`|\]\([^)]*\)|^#.*$", "_", text, flags=re.M)
        name = path.relative_to(ROOT).as_posix().removesuffix(".md").removeprefix("docs/")
        found[name] = [re.sub(r"(?<=\S)\n *(?=\w)", " ", text)]
    return found


@cache
def docstrings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with_docstrings = ast.Module | ast.ClassDef | ast.FunctionDef
    for path in (ROOT / "jfp8").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        texts = [ast.get_docstring(n) or "" for n in nodes if isinstance(n, with_docstrings)]
        room = path.relative_to(ROOT / "jfp8").parts[0]
        found.setdefault(room, []).extend(t.split("\n\n")[0].replace("\n", " ") for t in texts)
    return found


def count(pattern: str, texts: dict[str, list[str]]) -> Counter[str]:
    found = {name: sum(len(re.findall(pattern, t)) for t in of) for name, of in texts.items()}
    return Counter({name: n for name, n in found.items() if n})


@pytest.mark.parametrize(("pattern", "example", "instead"), PHRASES)
def test_pages_and_docstrings_have_no_mannerism(pattern, example, instead):
    assert re.search(pattern, example)
    found = count(pattern, docstrings())
    if pattern != FIRST:
        found += count(pattern, pages())
    assert not found, f"{example!r}: write {instead!r} in {found}"


def comments(text: str) -> Iterator[str]:
    """Yield the first line of each comment, without its ``#``."""
    above = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = not token.line[:column].strip()
            if not (alone and above == line - 1):
                yield token.string.lstrip("# ")
            above = line if alone else -1


def attribute_texts(text: str) -> Iterator[str]:
    """Yield the text after each ``name:`` in docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented):
            lines = (ast.get_docstring(node) or "").splitlines()
            yield from (m[1] for x in lines if (m := re.match(r" +[\w`*, .]+: (.*)", x)))


def fragments(text: str) -> list[str]:
    """Return the comments and attribute texts that begin with one of the words."""
    texts = (*comments(text), *attribute_texts(text))
    return [t for t in texts if re.match(FRAGMENT, t, re.IGNORECASE)]


FRAGMENTED = '''
def rows(x):
    """Return rows.

    Args:
      x, `y`: of the matrix.
      z: rows of the matrix, one
        of: a continuation.
    """
    n = 8  # of a head
    # As measured, which
    # of several lines is one comment.
    text = "# of a string"
    return n  # often
'''


def test_fragments_are_found():
    assert fragments(FRAGMENTED) == ["of a head", "As measured, which", "of the matrix."]


def test_comments_and_attribute_texts_stand_alone():
    """A comment is a sentence, or a noun phrase that needs no line above it."""
    found: Counter[str] = Counter()
    where = []
    for folder in ("jfp8", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            room = parts[1] if folder == "jfp8" else folder
            texts = fragments(path.read_text("utf-8"))
            found[room] += len(texts)
            where += [f"{Path(*parts)}: {t}" for t in texts]
    assert not where, f"{+found}; begin with a noun or a subject:\n" + "\n".join(where)
