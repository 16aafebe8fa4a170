"""`listing`: a public module without its files, for completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def listing(names: Sequence[str]) -> Callable[[], list[str]]:
    """Return a module's ``__dir__``: its public `names`, without the files that they are from."""
    return lambda: sorted(names)
