"""Join layers whose paths differ in numbers alone, as in the blocks of a Transformer."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence


def alike_layers(layers: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Return names such as ``"block_{0..5}/up"``, each with the paths that it stands for.

    Layers are alike if their values are equal, and their paths are equal but for numbers.
    """
    alike: dict[Hashable, list[str]] = {}
    for path, value in layers.items():
        alike.setdefault((re.sub(r"\d+", "#", path), value), []).append(path)
    return [(_name(paths), paths) for paths in alike.values()]


def _name(paths: Sequence[str]) -> str:
    parts = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(_spelled(dict.fromkeys(part)) for part in parts)


def _spelled(part: Iterable[str]) -> str:
    """Return the text that all paths have in common, or ``"{0..2,5}"`` for numbers."""
    first, *others = part
    runs = [[first]]
    for number in others:
        if int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spelled = (f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs)
    return f"{{{','.join(spelled)}}}" if others else first
