"""`python -m jfp8 bench`, rehearsed: one file with every rate, and what failed."""

import json

import jax
import jax.numpy as jnp
import pytest

from jfp8.command_line import bench
from jfp8.command_line.parser import main

DONE = ("copy", "layer, delayed")
ALL = dict(bench.WORK)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bench, "WORK", {name: bench.WORK[name] for name in DONE})


def test_one_file_has_the_card_the_versions_and_the_rates(capsys, tmp_path):
    path = tmp_path / "rates.json"
    assert main(["bench", "--smoke", "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["card"], found["platform"], found["smoke"]) == ("cpu", "cpu", True)
    assert found["versions"]["jax"] == jax.__version__
    copy, layer = found["rates"]["copy, 16"], found["rates"]["layer, delayed, 16"]
    assert copy["gbs"] == pytest.approx(4 * 16**2 / copy["us"] / 1e3)
    assert layer["tflops"] == pytest.approx(6 * 16**3 / layer["us"] / 1e6)
    assert 0 < layer["us"] < 1e6
    text = capsys.readouterr().out
    assert "layer, delayed, 16" in text
    assert f"Written: {path}" in text
    assert "the times mean nothing" in text


@pytest.mark.slow
def test_what_fails_is_told(capsys, monkeypatch, tmp_path):
    """The other process does not know this work, and the file cannot be written either."""
    monkeypatch.setattr(bench, "WORK", {"unknown": bench.WORK["copy"]})
    assert main(["bench", "--smoke", "--out", str(tmp_path / "no" / "folder.json")]) == 1
    text = capsys.readouterr().out
    assert "KeyError: 'unknown'" in text
    assert "name another file with --out" in text


def test_the_slope_is_the_time_of_one_call(monkeypatch):
    """Though each program takes a second more; by a clock that is made up here."""
    monkeypatch.setattr(bench, "_seconds", lambda run: 1 + 2e-3 * len(run.args[0]))
    work = bench.Work(lambda x: x, (jnp.ones(3),))
    assert bench.microseconds(work, smoke=False) == pytest.approx(2000)


@pytest.mark.parametrize("recipe", [None, "block"])
def test_a_layer_is_the_product_and_both_gradients(recipe):
    work = bench.layer(recipe, 64)
    variables, x, dy = work.arguments
    w = variables["params"]["kernel"]
    grads, dx = work.function(variables, x, dy)
    for found, expected in ((dx, dy @ w.T), (grads["params"]["kernel"], x.T @ dy)):
        error = jnp.linalg.norm((found - expected).astype(jnp.float32))
        norm = jnp.linalg.norm(expected.astype(jnp.float32))
        assert error < (0.01 if recipe is None else 0.1) * norm
    assert work.flops == 3 * 2 * 64**3


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_matmul_is_one(is_fp8):
    work = bench.matmul(is_fp8, 64)
    x = bench.random(64, 64).astype(jnp.float32)
    expected = x @ (x.T if is_fp8 else x)
    error = jnp.linalg.norm(work.function(*work.arguments) - expected)
    assert error < 0.1 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("quantize", 0),
        ("attention, bf16", 2 * 16 * 128**3),  # half of the scores are masked
        ("attention, FP8", 2 * 16 * 128**3),
        ("grouped", 2 * 128**3),
    ],
)
def test_work_takes_its_arguments(name, flops):
    work = ALL[name][0](128)
    assert jax.tree.leaves(jax.eval_shape(work.function, *work.arguments))
    assert work.flops == flops
