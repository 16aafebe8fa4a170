"""Count the mannerisms of our English in pages and docstrings: budgets that may only shrink.

A page is read without code, links and headings, a docstring up to its first empty line. Pages and
rooms that are not listed below have none.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIRST = r"\A(What|Whether|Of|Those|That|As many|As much|The same|How|Where|Which)\b"
# (pattern, example, what to write instead, budget of pages, budget of docstrings)
PHRASES = [
    (r"\b([Tt]hose|[Tt]hat) of\b", "those of the recipes", "repeat the noun", 6, 0),
    (r"\bto the bit\b", "equal to the bit", "bitwise identical", 0, 0),
    (r"\bgradients? by\b(?! hand)", "the gradient by x", "with respect to", 0, 0),
    (r"\b(in|out)side of\b", "inside of a scan", "inside", 0, 0),
    (r"\bbeside\b", "beside the scale", "next to", 0, 0),
    (r"\bby lot\b", "rounded by lot", "stochastically", 0, 0),
    (r"\bof (its|their|one's|your|our) own\b", "a scale of its own", "its own, separate", 7, 0),
    (r"\bat hand\b", "the JAX at hand", "installed", 0, 0),
    (r"\btravels?\b", "weights travel", "are sent", 0, 0),
    (r"\bdivide[sd]? (over|among)\b", "divided over devices", "sharded over", 0, 0),
    (r"\bcompiler divides\b", "the compiler divides it", "shards, partitions", 0, 0),
    (r"\b(FP8|f8|bf16|matrix|grouped|three) products?\b", "FP8 products", "matmuls", 0, 0),
    (r"\bNone: ", "axis; None: all", "None means, None if", 0, 0),
    (r"\bwhat\b[^.:;|]*\bwhat\b", "what is read is what was saved", "name the thing", 0, 0),
    (r"\b(is|be) told\b|\bforetells?\b", "cannot be told", "inconclusive", 0, 0),
    (FIRST, "What a layer keeps", "begin with a verb", 0, 0),
]
PAGES_TO_EDIT = "fp8_training quickstart which_recipe"
ROOMS_TO_EDIT = ""


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


@pytest.mark.parametrize(("pattern", "example", "instead", "in_pages", "in_docstrings"), PHRASES)
def test_mannerisms_become_fewer(pattern, example, instead, in_pages, in_docstrings):
    assert re.search(pattern, example)
    for texts, budget, to_edit in (
        (pages() if pattern != FIRST else {}, in_pages, PAGES_TO_EDIT),
        (docstrings(), in_docstrings, ROOMS_TO_EDIT),
    ):
        found = count(pattern, texts)
        assert found.total() <= budget, f"{example!r}: write {instead!r} in {found}"
        new = {name for name in found if name.split("/")[0] not in to_edit.split()}
        assert not new, f"{example!r}: write {instead!r} in {new}"
