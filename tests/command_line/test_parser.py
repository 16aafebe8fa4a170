"""The command ``jfp8`` itself."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import jfp8
from jfp8.command_line.parser import COMMANDS, main

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]


def printed(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit, match="^0$"):
        main(argv)
    return capsys.readouterr().out


def test_an_installation_brings_the_command_which_tells_its_version(capsys):
    entry = EntryPoint("jfp8", PROJECT["scripts"]["jfp8"], "console_scripts")
    assert entry.load() is main
    assert printed(capsys, "--version") == f"jfp8 {jfp8.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_text_without_markup(command, capsys):
    text = printed(capsys, command, "--help")
    assert text.startswith(f"usage: jfp8 {command} [-h]")
    assert "`" not in text
    assert "python -m" not in text
    description = text.split("\n\n")[1]
    assert description[0].isupper()
