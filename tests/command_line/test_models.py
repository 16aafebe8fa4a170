"""`python -m jfp8 report` and `convert-checkpoint`, on a model that a module here makes."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.command_line.parser import main

MODEL = """
import flax.linen as nn, jax, jax.numpy as jnp, jfp8
plain = nn.Dense(128, use_bias=False)
x = jnp.ones((128, 128))
model = jfp8.convert(plain, exempt=())
def example():
    return model, jax.eval_shape(model.init, jax.random.key(0), x), x
def plain_state():
    return jax.eval_shape(plain.init, jax.random.key(0), x)
def fp8_state():
    return model.init(jax.random.key(1), x)
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    import my_models

    return my_models


def test_a_report_of_a_model_for_a_card_that_is_not_here(capsys, models):
    with pytest.warns(UserWarning, match="On NVIDIA H200, FP8 is expected to slow down"):
        assert main(["report", "my_models:example", "--card", "NVIDIA H200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fp8_fraction"] == 1
    assert found["flops"] == 2 * 2 * 128**3
    assert main(["report", "my_models:example"]) == 0
    assert capsys.readouterr().out.strip() == str(jfp8.report(*models.example()))


@pytest.mark.parametrize("command", [["report", "my_models:example"], ["doctor"]])
@pytest.mark.parametrize(("card", "nearest"), [("NVIDIA H900", "H200"), ("h100", "H100")])
def test_a_card_that_is_none_is_refused_with_the_names_that_exist(capsys, command, card, nearest):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--card", card])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{card!r} is no card that jfp8 knows. Did you mean {nearest!r}? " in said
    assert "known rates: B200, B300, GB300, H100, H200, L40S, RTX PRO 6000" in said


def test_a_name_that_is_none_is_told(capsys):
    for name in ("my_models:nothing", "no_module:x", "json", "json:dumps"):
        with pytest.raises(SystemExit) as ended:
            main(["report", name])
        assert ended.value.code == 2
        assert f"{name!r} is not module:function" in capsys.readouterr().err


def test_a_checkpoint_becomes_that_of_the_plain_model_and_back(capsys, models):
    state = models.fp8_state()
    jfp8.checkpoint.save("fp8.safetensors", state)
    convert = ["convert-checkpoint", "fp8.safetensors", "plain.safetensors"]
    assert main(convert) == 0
    assert capsys.readouterr().out == "Written: plain.safetensors\n"
    plain = jfp8.checkpoint.load("plain.safetensors")
    assert list(plain) == ["params"]
    kernel = np.asarray(state["params"]["kernel"])
    np.testing.assert_array_equal(plain["params"]["kernel"], kernel)
    assert main(["convert-checkpoint", "nothing", "new"]) == 1
    assert capsys.readouterr().out == f"There is no checkpoint {Path('nothing').resolve()}.\n"
    assert main(convert) == 1
    assert "nothing is overwritten" in capsys.readouterr().out
    back = "plain.safetensors", "back.safetensors"
    with pytest.warns(jfp8.checkpoint.CheckpointChange):
        main(
            [
                "convert-checkpoint",
                "plain.safetensors",
                "back.safetensors",
                "--to=my_models:fp8_state",
            ]
        )
    back = jfp8.checkpoint.load(back[1])
    assert jax.tree.structure(back) == jax.tree.structure(jfp8.checkpoint.load("fp8.safetensors"))
    np.testing.assert_array_equal(back["params"]["kernel"], kernel)
    assert jnp.any(kernel != 0)


def test_the_commands_are_listed_where_python_finds_the_package():
    root = Path(__file__).parents[2]
    program, env = [sys.executable, "-m", "jfp8", "--help"], {"PYTHONPATH": str(root)}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    for command in ("doctor", "check", "report", "convert-checkpoint"):
        assert f"\n    {command}" in done.stdout
