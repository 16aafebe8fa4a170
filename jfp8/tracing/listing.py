"""Names of a public module: for completion, and for one that is misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence


def listing(names: Sequence[str]) -> Callable[[], list[str]]:
    """Return a module's ``__dir__``: its public `names`, without the files that they are from."""
    return lambda: sorted(names)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question for the one of `names` that is nearest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def missing(
    name: str, module: str, names: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> object:
    """Raise for a `name` that a `module` lacks: it is `elsewhere`, or near to one of `names`."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    hint = f" Did you mean {module}.{close[0]}?" if close else ""
    hint = f" Take {elsewhere[name]}." if elsewhere and name in elsewhere else hint
    raise AttributeError(f"module {module!r} has no attribute {name!r}.{hint}", name=name)
