"""``python -m jfp8 convert-checkpoint``: write a checkpoint without FP8, or for another model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jfp8.checkpoint.files import load, restore, save
from jfp8.checkpoint.upgrade import downgrade
from jfp8.command_line.report import named


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("source", type=Path, help="a folder of Orbax, or *.safetensors")
    parser.add_argument("result", type=Path, help="a new folder, or a new *.safetensors")
    parser.add_argument(
        "--to",
        type=named,
        metavar="MODULE:FUNCTION",
        help="your function; returns the state to convert to, of arrays or shapes (default: the "
        "plain model's parameters, without FP8)",
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    """Convert the file; returns what was written, the lines to print, and whether it was."""
    if options.result.exists():
        text = f"{options.result} exists. Name a new file: nothing is overwritten."
        return {"failure": text}, [text], False
    wanted = None if options.to is None else options.to()
    try:
        if wanted is None:
            state = downgrade(load(options.source))
        else:
            state = restore(options.source, wanted)
        save(options.result, state)
    except (OSError, ValueError) as error:
        return {"failure": str(error)}, [str(error)], False
    return {"written": str(options.result)}, [f"Written: {options.result}"], True
