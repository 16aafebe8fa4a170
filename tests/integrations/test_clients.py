"""`jfp8.convert` of the models of gemma and tunix, if installed: see `.ci/lock/trainers.in`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STAYS = {"computed by no layer that can be converted", "exempt", "an adapter (nnx.LoRAParam)"}
CLIENTS = Path(__file__).parents[2] / "benchmarks" / "clients"


def counted(script: str) -> dict:
    """What the clients of a script print with ``--count``, by name."""
    paths = os.pathsep.join([str(CLIENTS), str(CLIENTS.parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(CLIENTS / script), "--count"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, text = {}, done.stdout.strip()
    while text:
        record, end = json.JSONDecoder().raw_decode(text)
        found, text = found | record, text[end:].strip()
    return found


@pytest.mark.parametrize(
    ("script", "packages", "clients"),
    [
        ("gemma_client.py", ["gemma", "kauldron"], {"gemma", "gemma, its LoRA"}),
        ("tunix_client.py", ["tunix", "qwix"], {"tunix, SFT", "tunix, Qwix's LoRA"}),
    ],
    ids=["gemma", "tunix"],
)
def test_all_projections_of_models_as_released_are_fp8(script, packages, clients):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    found = counted(script)
    assert set(found) == clients
    for name, record in found.items():
        for recipe in ("delayed", "current", "mxfp8"):
            assert record[recipe]["fp8"] == record["needed"], (name, recipe)
            # The two products of attention, logits and adapters.
            others = {reason.partition(": ")[0] for reason in record[recipe]["others"]}
            assert others <= STAYS, name
