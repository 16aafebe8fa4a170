"""`train_nnx_lm.py --size`: a model of its own on 8 virtual devices, with small sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import jfp8
from support.scripts import imported, text_in

llama_nnx, fsdp_nnx, speed = (
    imported(f"lm.{name}", "examples") for name in ("llama_nnx", "fsdp_nnx", "speed")
)
SMALL = "--size=tiny --devices=8 --width=64 --layers=2 --heads=4 --seq-len=32 --eval-batches=2"
STEPS = ["--steps=12", "--lr=1e-2"]


@pytest.fixture(scope="module")
def script():
    return imported("train_nnx_lm", "examples")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return str(text_in(tmp_path_factory.mktemp("text")))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Scripts write their results below the working directory."""
    monkeypatch.chdir(tmp_path)


def lines_of(folder):
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def state_of(folder):
    return jfp8.checkpoint.load(Path(folder, "step_00000012"))["state"]


@pytest.mark.slow
def test_a_run_that_goes_on_equals_one_that_never_stopped(script, text, capsys):
    """Losses, parameters, moments and histories, to the bit."""
    argv = [*SMALL.split(), *STEPS, "--data", text]
    whole = script.main([*argv, "--checkpoint-every=6", "--out=whole"])
    printed = capsys.readouterr().out
    assert "FLOPs are FP8: 24 of 39 products." in printed
    assert "expected, not measured: no model of time knows cpu" in printed
    assert "MFU -, 0 skipped" in printed
    losses = whole["train_loss"]["delayed"]
    assert len(losses) == len(lines_of("whole")) == 12
    assert losses[-1] < losses[0] - 1
    assert Path("whole/loss.png").read_bytes().startswith(b"\x89PNG")

    shutil.copytree("whole/step_00000006", "rest/step_00000006")
    shutil.copy("whole/log.jsonl", "rest")  # also its lines after that step, which are dropped
    rest = script.main([*argv, "--resume", "--out=rest"])
    assert "going on from rest/step_00000006" in capsys.readouterr().out
    assert rest["train_loss"] == whole["train_loss"]
    assert rest["validation_loss"] == whole["validation_loss"]
    assert [line["step"] for line in lines_of("rest")] == list(range(1, 13))
    first, second = state_of("whole"), state_of("rest")
    jax.tree.map(np.testing.assert_array_equal, first, second)
    histories = [x for path, x in jax.tree.leaves_with_path(first) if "'grad'" in str(path)]
    assert len(histories) == 4
    assert all((x > 0).sum() == 2 * 12 for x in histories)  # of two layers, in 12 steps


def test_a_step_on_eight_devices_in_fp8():
    size, mesh = llama_nnx.Size(64, 2, 4, 2, 256, 16, 64), fsdp_nnx.make_mesh(8)
    rng = np.random.default_rng(0)
    windows = rng.integers(64, size=(8, 17)).astype(np.int32)

    def create():
        model = jfp8.convert(llama_nnx.LanguageModel(size, rngs=nnx.Rngs(0)), "delayed")
        return model, jfp8.nnx.Optimizer(model, optax.sgd(1.0))

    with jax.set_mesh(mesh):
        graphdef, state = nnx.split(nnx.eval_shape(create))
        like = fsdp_nnx.placed(state, mesh)
        places = jax.tree.map(lambda x: x.sharding, like)
        state = jax.jit(lambda: nnx.state(create()), out_shardings=places)()
        step = jax.jit(fsdp_nnx.make_step(graphdef), out_shardings=(places, None))
        state, first = step(state, windows)
        state, second = step(state, windows)
    assert abs(float(first["loss"]) - np.log(64)) < 1
    assert float(second["loss"]) < float(first["loss"]) - 0.1
    model, _ = nnx.merge(graphdef, state)
    kernel = model.layers.gate_up.kernel[...]
    assert kernel.shape == (2, 64, 512)
    assert kernel.addressable_shards[0].data.shape == (2, 64, 64)
    for name in ("qkv", "out", "gate_up", "down"):
        histories = getattr(model.layers, name).dot_general.histories()
        for amaxes in histories.values():
            assert (np.asarray(amaxes) > 0).sum() == 2 * 2  # of two layers, in two steps


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((20, 2048, 12_288), P(None, None, "fsdp")),
        ((20, 6144, 2048), P(None, "fsdp", None)),
        ((20, 2047, 4096), P(None, None, "fsdp")),
        ((32_768, 2048), P("fsdp", None)),
        ((20, 2047, 2049), P()),
        ((20, 2048), P()),  # of norms: too small
        ((), P()),
    ],
)
def test_the_rule_for_what_is_divided(shape, spec):
    assert fsdp_nnx.spec_of(jax.ShapeDtypeStruct(shape, jnp.float32), 8) == spec


def test_the_model_of_time():
    """Of the 1B model, by hand; on H200, whose peak in bf16 is 989.5 TFLOP/s."""
    size = llama_nnx.SIZES["1b"][0]
    kernels = 20 * (2048 * 3072 + 2048 * 2048 + 2048 * 12_288 + 6144 * 2048) + 2048 * 32_768
    flops = 6 * kernels + 12 * 20 * 2048 * 2048 / 2
    kind = "NVIDIA H200"
    assert speed.mfu(1e6, size, 8, kind) == pytest.approx(1e6 * flops / (8 * 989.5e12))
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((8,), ("fsdp",), (AxisType.Auto,), abstract_device=device)
    pace = {}
    with use_abstract_mesh(mesh):
        for recipe in ("delayed", None):
            make = lambda: llama_nnx.LanguageModel(size, rngs=nnx.Rngs(0))
            model = nnx.eval_shape(make)
            model = jfp8.convert(model, recipe) if recipe else model
            found = jfp8.report(model, jax.ShapeDtypeStruct((64, 2048), jnp.int32))
            pace[recipe] = speed.expected(found, size, 64 * 2048, 8, kind)
    assert speed.mfu(pace[None], size, 8, kind) == pytest.approx(0.78)
    assert 1.2 < pace["delayed"] / pace[None] < 2
    assert speed.expected(found, size, 64 * 2048, 8, "cpu") is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--devices 8", "--devices is for a model of a named size: type --size tiny as well"),
        ("--recipe none", "--recipe none is for a model of a named size: type --size tiny"),
        ("--size tiny --devices 9", "--devices 9, but there are 8: type --devices 8"),
        ("--size tiny --devices 8 --batch-size 12", "--devices 8: type --batch-size 16"),
        ("--size tiny --resume", "has no checkpoint: leave --resume out"),
        ("--size 2b", "invalid choice: '2b'"),
    ],
)
def test_a_mistake_is_told_with_what_to_type_instead(script, capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        script.main(argv.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
