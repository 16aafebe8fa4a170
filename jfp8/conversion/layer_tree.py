"""Draw layers by path as the lines of a tree; siblings that are alike share one line."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TreeLine:
    """Hold a line of the tree."""

    name: str  # "Dense_0"; of siblings that are alike "block_{0..5}"
    path: str  # the names from the root to it: "encoder/block_{0..5}"
    depth: int  # how many modules are around it
    layers: tuple[str, ...]  # the paths that it stands for; empty if it only holds others


def tree_lines(layers: Mapping[str, Hashable]) -> list[TreeLine]:
    """Return the lines of `layers`, values by path: modules before their children.

    Siblings are alike if their names differ only in the last number, and everything inside them has
    equal names and values.
    """
    return list(_lines(layers, "", [""], 0))


def _lines(
    layers: Mapping[str, Hashable], above: str, above_each: Sequence[str], depth: int
) -> Iterator[TreeLine]:
    """Return the lines below `above`, which stands for the modules `above_each`."""
    inside: dict[str, dict[str, Hashable]] = {}
    for path, value in layers.items():
        name, _, rest = path.partition("/")
        inside.setdefault(name, {})[rest] = value  # under "" itself
    alike: dict[Hashable, list[str]] = {}
    for name, below in inside.items():
        start, _, end = _split(name)
        alike.setdefault((start, end, frozenset(below.items())), []).append(name)
    for names in alike.values():
        below = dict(inside[names[0]])
        name, each = _together(names), [path + name for path in above_each for name in names]
        here = "" in below
        below.pop("", None)
        yield TreeLine(name, above + name, depth, tuple(each) if here else ())
        yield from _lines(below, f"{above}{name}/", [f"{path}/" for path in each], depth + 1)


def _split(name: str) -> tuple[str, str, str]:
    """Split `name` before and after its last number."""
    found = re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.DOTALL)
    return (found[1], found[2], found[3]) if found else (name, "", "")


def _together(names: Sequence[str]) -> str:
    """Return ``"block_{0..2,5}"`` for ``["block_0", "block_1", "block_2", "block_5"]``."""
    if len(names) == 1:
        return names[0]
    start, _, end = _split(names[0])
    runs: list[list[str]] = []
    for number in (_split(name)[1] for name in names):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = (f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs)
    return f"{start}{{{','.join(parts)}}}{end}"
