"""The commands of ``jfp8``, or ``python -m jfp8``, their options, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import jfp8
from jfp8.command_line import check, convert_checkpoint, doctor, report

# Each is a module with `arguments(parser)` and `run(options)`, which returns the result for
# ``--json``, the lines that are printed without it, and whether nothing is wrong.
COMMANDS = {
    "doctor": (doctor, "show what is installed, and what is missing for FP8 on this GPU"),
    "check": (check, "run each kernel once, leave out wrong ones from now on, time layers"),
    "report": (report, "list which matmuls of your model are FP8, and why others are not"),
    "convert-checkpoint": (convert_checkpoint, "write one without FP8, or for another model"),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="jfp8", description="Prepare a GPU for FP8, inspect a model, convert checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"jfp8 {jfp8.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        # A docstring without the name of its command, and without markup.
        text = (module.__doc__ or "").partition(": ")[2].replace("`", "")
        text = text[:1].upper() + text[1:]
        command = commands.add_parser(name, help=summary, description=text)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        module.arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and print its result; returns 0, or 1 if something is wrong."""
    options = make_parser().parse_args(argv)
    module, _ = COMMANDS[options.command]
    result, lines, is_right = module.run(options)
    print(json.dumps(result, indent=1) if options.json else "\n".join(lines), flush=True)
    return 0 if is_right else 1
