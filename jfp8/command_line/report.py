"""``python -m jfp8 report``: list which matmuls of your model are FP8, and why others are not.

It shows the expected gain on a GPU, here or not, and needs only the shapes of arrays.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from typing import Any

from jfp8.command_line.doctor import ELSEWHERE, described, known
from jfp8.conversion.report import report


def named(text: str) -> Any:
    """Return the attribute that ``module:attribute`` names."""
    module, _, attribute = text.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not module:attribute of something that can be imported here: {error}"
        ) from error


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "example",
        type=named,
        metavar="MODULE:FUNCTION",
        help="your function, such as mine:described; returns (model, x) in NNX, and (model, "
        "variables, x) in Linen",
    )
    parser.add_argument("--card", type=known, help=ELSEWHERE)
    parser.add_argument("--verbose", action="store_true", help="print a line for each matmul")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    """Return the report, the lines to print, and True."""
    given = options.example()
    with described(options.card) if options.card else contextlib.nullcontext():
        found = report(*given)
    text = found.verbose() if options.verbose else str(found)
    return json.loads(found.to_json()), text.splitlines(), True
