"""Read the texts of compilers, whose form is known: anything else is an error."""

import re


def read(pattern: str, text: str) -> re.Match[str]:
    """Return the first match of a pattern in a text that must have one."""
    if found := re.search(pattern, text):
        return found
    raise ValueError(f"no {pattern!r} in {text[:200]!r}")
