"""Save and load all state of a run in one file, so that a resumed run continues exactly.

It holds the step, the training state of every model (parameters, amax histories, optimizer state
with its loss scale), the metrics so far, and the options that affect results. Batches are a
function of (seed, step), so nothing else has to be saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jfp8


def save(
    path: str,
    step: int,
    states: dict[str, Any],
    lines: list[dict[str, Any]],
    config: dict[str, Any],
) -> None:
    """Write a file; a crash leaves the old one or the new one."""
    tree = {"config": json.dumps(config), "step": step, "lines": json.dumps(lines)}
    jfp8.checkpoint.save(path, {**tree, "states": states})


def read(path: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the saved tree, after checking that it comes from a run with the same `config`."""
    if not Path(path).is_file():
        raise ValueError(
            f"--resume: there is no checkpoint at {path}. Check --checkpoint, or omit --resume "
            "to start a new run that writes it"
        )
    try:
        tree = jfp8.checkpoint.load(path)
        saved = json.loads(tree["config"])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"--resume: {path} is not a checkpoint of train_lm.py. Omit --resume to start a new run"
        ) from error
    check_same(saved, config, path)
    return tree


def check_same(saved: dict[str, Any], config: dict[str, Any], path: str) -> None:
    """Raise ValueError if the run of the checkpoint at `path` had other options."""
    differences = [
        f"{name} was {saved.get(name)!r} and is {config[name]!r}"
        for name in config
        if saved.get(name) != config[name]
    ]
    if differences:
        raise ValueError(
            f"--resume: {path} belongs to a run with another configuration, so resuming would give "
            f"other results: {'; '.join(differences)}. Type the old values, or omit --resume "
            "to start a new run"
        )


def restore(
    tree: dict[str, Any], states: dict[str, Any]
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Return step, states and metrics of the file; `states` provide only the structure."""
    saved, fit = tree["states"], jfp8.checkpoint.upgrade
    states = {name: fit(saved[name], state, strict=True) for name, state in states.items()}
    return tree["step"], states, json.loads(tree["lines"])
