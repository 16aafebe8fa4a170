"""``python -m jfp8 report``: list which matmuls of your model are FP8, and why others are not.

It shows the expected gain on a GPU, here or not, and needs only the shapes of arrays.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import pkgutil
from typing import Any

from jfp8.command_line.doctor import ELSEWHERE, described, known
from jfp8.conversion.report import report


def named(text: str) -> Any:
    """Return the function that ``module:function`` names, which takes no arguments."""
    try:
        function = pkgutil.resolve_name(text)
        inspect.signature(function).bind()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not module:function of something that can be imported here, and called "
            f"without arguments: {error}"
        ) from error
    return function


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
