"""`python -m jfp8 doctor`: facts of this machine, and advice from made-up ones."""

import json

import jax
import pytest

from jfp8.command_line import doctor
from jfp8.command_line.parser import main

H200 = {"name": "NVIDIA H200", "driver_version": "580.65.06", "compute_cap": "9.0"}


def facts(**changed):
    """A healthy machine with an H200 that was checked, but for what is `changed`."""
    jax_says = {
        "gpus": changed.pop("gpus", 1),
        "card": "NVIDIA H200",
        "verdicts": changed.pop("verdicts", {"matmul": {"failure": ""}}),
    }
    return {
        "python": "3.12.1",
        "packages": {"jax": "0.12.0.1"},
        "ptxas": {"path": "/bin/ptxas", "version": "13.0.88"},
        "driver": [H200],
        "platforms": "",
        "jax": jax_says,
        **changed,
    }


def test_a_healthy_machine_needs_no_advice():
    assert list(doctor.advice(facts())) == []


@pytest.mark.parametrize(
    ("changed", "is_wrong", "words"),
    [
        ({"gpus": 0}, True, "pip install 'jfp8[cuda]'"),
        ({"gpus": 0, "platforms": "cpu"}, True, "JAX_PLATFORMS=cpu hides NVIDIA H200"),
        (
            {"gpus": 0, "driver": [H200 | {"driver_version": "550.54.14"}]},
            True,
            "driver 550 is too old for CUDA 13 (580): pip install 'jax[cuda12]'",
        ),
        ({"gpus": 0, "driver": []}, False, "There is no GPU here"),
        ({"packages": {"jax": "0.10.2"}, "python": "3.11.7"}, True, "Install Python 3.12"),
        ({"jax": {"failure": "no answer within 120 s"}}, True, "no answer within 120 s"),
        ({"verdicts": {}}, False, "python -m jfp8 check"),
        (
            {"verdicts": {"matmul": {"failure": ""}, "block_matmul": {"failure": "off"}}},
            True,
            "they failed `python -m jfp8 check`: block_matmul.",
        ),
    ],
)
def test_advice_says_what_to_type(changed, is_wrong, words):
    ((wrong, text),) = doctor.advice(facts(**changed))
    assert wrong is is_wrong
    assert words in text


def test_some_assemblers_miscompile():
    """CUDA 12.8.0, 12.8.1 and 12.9.0 ship them; 12.6.3, 12.9.1 and 13.0 do not."""
    for version in ("12.6.85", "12.8.61", "12.8.93", "12.9.41", "12.9.86", "13.0.88"):
        found = list(doctor.advice(facts(ptxas={"path": "/bin/ptxas", "version": version})))
        assert len(found) == (version in ("12.8.61", "12.8.93", "12.9.41"))
        assert all(wrong and f"ptxas {version}" in text for wrong, text in found)


def test_the_command_shows_what_a_described_card_computes(capsys):
    status = main(["doctor", "--json", "--card", "NVIDIA H200"])
    found = json.loads(capsys.readouterr().out)
    has_kernels = jax.__version_info__ >= (0, 11, 2)
    assert status == (0 if has_kernels else 1)  # Python 3.11 has no kernels for it
    by = {row["recipe"]: row for row in found["jax"]["recipes"]}
    assert (by["delayed"]["backend"], by["delayed"]["reason"]) == ("xla", "")
    assert by["block"]["backend"] == ("mosaic_gpu" if has_kernels else "bf16")
    assert by["nvfp4"] == {
        "recipe": "nvfp4",
        "backend": "bf16",
        "reason": "no tensor cores for E2M1FN x E2M1FN",
    }
    text = "\n".join(doctor.lines(found))
    assert "nvfp4         bf16 tensor cores" in text
    assert "nvfp4, nvfp4_4over6" in text
    assert "\npackages flax " in text
    assert " ".join(text.split()).count("no tensor cores for E2M1FN x E2M1FN") == 1
    assert f"JAX      {len(found['jax']['devices'])} x cpu" in text


def test_a_card_that_jax_does_not_find_is_wrong(capsys, monkeypatch, tmp_path):
    """By an nvidia-smi that shows one."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 9.0, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "driver   NVIDIA H200, 580.65.06, 9.0, 143771 MiB" in text
    assert "WRONG: JAX_PLATFORMS=cpu hides NVIDIA H200. Unset it." in text
