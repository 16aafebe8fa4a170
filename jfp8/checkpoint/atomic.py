"""Replace a file atomically: at every moment a complete file exists.

The new file is written next to the old one, under a hidden name, and flushed to disk; then it is
renamed. A process killed before the rename leaves the old file unchanged, and a leftover that the
next replacement removes. If two processes replace one name simultaneously, one of them fails.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace the file `path`; `write` is called with the open file."""
    leftover = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.saving")
    for found in list(path.parent.iterdir()):
        if leftover.fullmatch(found.name):
            found.unlink()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
