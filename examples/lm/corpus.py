"""Real text that needs no download: the source code of Python's own standard library, as bytes.

    |<------------------ one period of 80 KiB ------------------>|
    | 19 blocks of 4 KiB to train on                 | 1 held out |   | 19 blocks ...

Every 20th block is held out, not the end of the file list, so that validation text is like training
text. Training windows lie inside the 19 blocks and contain no held-out byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

BLOCK = 4096
PERIOD = 20 * BLOCK
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "encodings", "pydoc_data")  # tests, and tables without prose
    + ("site-packages", "dist-packages", "__pycache__")  # not the standard library
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes, split into whole periods; the remainder (less than 80 KiB) is dropped."""

    name: str
    periods: np.ndarray  # uint8[number of periods, PERIOD]
    window: int  # bytes in one window: seq_len inputs, and one more because targets are one ahead

    def train_batch(self, seed: int, step: int, batch_size: int) -> np.ndarray:
        """Return int32[batch_size, window], random windows: a function of (seed, step) alone."""
        rng = np.random.default_rng([seed, step])
        period = rng.integers(len(self.periods), size=(batch_size, 1))
        offset = rng.integers(PERIOD - BLOCK - self.window + 1, size=(batch_size, 1))
        return self.periods[period, offset + np.arange(self.window)].astype(np.int32)

    def validation_batches(self, batch_size: int, count: int) -> np.ndarray:
        """Return int32[n, batch_size, window], n <= count, spread evenly over held-out blocks."""
        per_block = BLOCK // self.window
        held_out = self.periods[:, PERIOD - BLOCK :][:, : per_block * self.window]
        windows = held_out.reshape(-1, self.window)
        count = min(count, len(windows) // batch_size)
        if count == 0:
            raise ValueError(
                f"the held-out part of {self.name} has {len(windows)} windows of {self.window} "
                f"bytes, fewer than one batch of {batch_size}: type --batch-size {len(windows)}, "
                "or pass more text with --data"
            )
        chosen = np.linspace(0, len(windows) - 1, count * batch_size).astype(int)
        return windows[chosen].reshape(count, batch_size, self.window).astype(np.int32)

    @property
    def digest(self) -> str:
        """Identify the corpus: a checkpoint is resumed only with the same text."""
        return hashlib.sha256(self.periods.tobytes()).hexdigest()[:16]


def load(path: str | None, seq_len: int, option: str = "--data") -> Corpus:
    """Load the standard library's sources, or the file or folder of files at `path`.

    `option` is the option that set the path, for messages.
    """
    if path is None:
        name = "the Python standard library"
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in files_below(root, SKIPPED_FOLDERS) if f.suffix == ".py"]
    else:
        name = f"{option} {path}"
        root = Path(path).expanduser()
        if not root.exists():
            raise ValueError(
                f"{name} does not exist: pass a text file or a folder of text files, or omit "
                f"{option} to train on the Python standard library"
            )
        files = [root] if root.is_file() else files_below(root)
    return of_bytes(name, b"".join(file.read_bytes() for file in files), seq_len, option)


def load_documentation(path: str | None, seq_len: int, option: str = "--data") -> Corpus:
    """Load the English text of Python's `help()` on keywords and topics; or the text at `path`."""
    if path is not None:
        return load(path, seq_len, option)
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values()).encode()
    return of_bytes("Python's documentation", text, seq_len, option)


def of_bytes(name: str, text: bytes, seq_len: int, option: str = "--data") -> Corpus:
    """Create a corpus of `text`. `option` is the option that set it, for messages."""
    window = seq_len + 1
    if window > BLOCK:
        raise ValueError(
            f"--seq-len {seq_len} does not fit a held-out block of {BLOCK} bytes: "
            f"type --seq-len {BLOCK - 1} or less"
        )
    count = len(text) // PERIOD
    if count == 0:
        raise ValueError(
            f"{name} has {len(text):,} bytes of text, but at least {PERIOD:,} are needed, "
            f"of which {PERIOD - BLOCK:,} to train on and {BLOCK:,} to hold out: pass more text "
            f"with {option}"
        )
    periods = np.frombuffer(text, np.uint8, count * PERIOD).reshape(count, PERIOD)
    return Corpus(name, periods, window)


def files_below(root: Path, skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    """List all files, sorted by path, so that every machine reads the same bytes in order."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped_folders]
        files += [Path(folder, name) for name in names]
    return sorted(files)
