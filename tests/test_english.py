"""Keep the mannerisms of our English out of pages and docstrings."""

import ast
import re
from collections import Counter
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
