"""Save and load all state of a run in one file, so that a resumed run continues exactly.

It holds the step, the training state of every model (parameters, amax histories, optimizer state
with its loss scale), the metrics so far, and the options that affect results. Batches are a
function of (seed, step), so nothing else has to be saved.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flax import serialization


def save(
    path: str,
    step: int,
    states: dict[str, Any],
    lines: list[dict[str, Any]],
    config: dict[str, Any],
) -> None:
    """Write next to `path`, then rename: a crash leaves the old file or the new one."""
    tree = {
        "config": json.dumps(config),
        "step": step,
        "lines": json.dumps(lines),
        "states": {name: serialization.to_state_dict(state) for name, state in states.items()},
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_bytes(serialization.msgpack_serialize(tree))
    os.replace(temporary, target)


def read(path: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the saved tree, after checking that it comes from a run with the same `config`."""
    if not Path(path).is_file():
        raise ValueError(
            f"--resume: there is no checkpoint at {path}. Check --checkpoint, or omit --resume "
            "to start a new run that writes it"
        )
    try:
        tree = serialization.msgpack_restore(Path(path).read_bytes())
        saved = json.loads(tree["config"])
    except Exception as error:  # msgpack raises many types for invalid files
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
    states = {
        name: serialization.from_state_dict(state, tree["states"][name])
        for name, state in states.items()
    }
    return tree["step"], states, json.loads(tree["lines"])
