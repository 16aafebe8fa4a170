"""The examples on several devices and in several processes, with small models and few steps."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import jfp8
from support.scripts import imported, run_script

SIZES = "--width=64 --layers=2 --heads=4 --seq-len=32 --batch-size=16 --steps=6 --lr=1e-2"
SMALL = SIZES.split()
pytestmark = pytest.mark.usefixtures("elsewhere")
train_sharded, train_processes, llama_nnx, sharding = (
    imported(name, "examples")
    for name in ("train_sharded", "train_processes", "lm.llama_nnx", "lm.sharding")
)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1, 8, 1), (2, 1, 4)])
def test_in_float32_the_losses_are_those_of_one_device(text, factors):
    """But for rounding errors of 2^-24, which six steps amplify by a factor of ten or so."""
    mesh = [f"--{name}={n}" for name, n in zip(("data", "fsdp", "tensor"), factors)]
    result = train_sharded.main([*SMALL, *mesh, f"--text={text}", "--recipe=none", "--compare"])
    assert tuple(result["mesh"].values()) == factors
    assert result["losses"][-1] < result["losses"][0] - 0.5
    assert result["single_device"]["first_loss_differs_by"] < 1e-6
    assert result["single_device"]["any_loss_differs_by"] < 1e-5
    assert result["devices_with_equal_histories"] == 0, "float32 has none"


@pytest.mark.slow
def test_in_fp8_the_losses_are_those_of_one_device(text, capsys):
    """To rounding in f32 at first; then some values and amaxes move by a step of FP8."""
    result = train_sharded.main([*SMALL, f"--text={text}", "--compare"])
    printed = capsys.readouterr().out
    assert "data 2 x fsdp 2 x tensor 2: 8 devices" in printed
    assert "RESULT example=train_sharded metric=train_loss loss=" in printed
    assert Path("runs/train_sharded/loss.png").read_bytes().startswith(b"\x89PNG")
    assert result["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert result["devices_with_equal_histories"] == 8
    assert result["losses"][-1] < result["losses"][0] - 0.5
    single = result["single_device"]
    assert single["first_loss_differs_by"] < 1e-6
    assert single["first_histories_differ_by"] < 1e-2
    assert single["any_loss_differs_by"] < 5e-3
    assert single["last_histories_differ_by"] < 1 / 8
    # Kernels in quarters, the tables (256 + 32 rows) and 5 norms whole.
    kernels, tables = (2 * 12 * 64 + 256) * 64, (256 + 32 + 5 * 2) * 64
    parameters = result["bytes"]["parameters"]
    assert parameters == {"all": 4 * (kernels + tables), "one_device": kernels + 4 * tables}
    moments = result["bytes"]["optimizer state"]
    assert moments["one_device"] == pytest.approx(2 * parameters["one_device"], abs=16)


@pytest.mark.slow
def test_fp8_beyond_the_products(text):
    """Gradients and weights travel as bytes, moments are kept as bytes; the loss hardly notices."""
    argv = [*SMALL, f"--text={text}", "--width=128", "--layers=1", "--scan-layers"]
    plain = train_sharded.main(argv)
    options = ["--fp8-gradients", "--fp8-gather", "--fp8-moments"]
    fp8 = train_sharded.main([*argv, *options])
    assert fp8["devices_with_equal_histories"] == 8
    np.testing.assert_allclose(fp8["losses"][-1], plain["losses"][-1], rtol=0.05)

    before, after = plain["bytes_sent_by_one_device"], fp8["bytes_sent_by_one_device"]
    assert not any("u8" in name for name in before)
    # Kernels are in quarters. Over data, twice half of what a device holds, in blocks of 128;
    # over fsdp, half of a half of the kernels, forward and backward.
    kernels, head, tables = 12 * 128**2, 256 * 128, (256 + 32 + 3 * 2) * 128
    mean = (kernels / 4 + head / 4 + tables) * (1 + 4 / 128)
    assert after["all-to-all u8"] == pytest.approx(mean / 2, rel=0.01)
    assert after["all-gather u8"] == pytest.approx(mean / 2 + kernels / 2, rel=0.01)
    assert sum(after.values()) < sum(before.values())

    moments = [run["bytes"]["optimizer state"]["one_device"] for run in (plain, fp8)]
    assert moments[1] < 0.4 * moments[0]


@pytest.mark.slow
def test_a_run_that_goes_on_equals_one_that_never_stopped(text, capsys):
    """Losses, parameters, moments and histories, to the bit."""
    size = "--size=tiny --devices=8 --width=64 --layers=2 --seq-len=32 --eval-batches=2 --lr=1e-2"
    argv, main = [*size.split(), f"--data={text}"], imported("train_nnx_lm", "examples").main
    whole = main([*argv, "--steps=12", "--checkpoint-every=6", "--out=whole"])
    printed = capsys.readouterr().out
    assert "FLOPs are FP8: 24 of 39 products." in printed
    assert "MFU -, 0 skipped" in printed
    losses = whole["train_loss"]["delayed"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert Path("whole/loss.png").read_bytes().startswith(b"\x89PNG")

    shutil.copytree("whole/step_00000006", "rest/step_00000006")
    shutil.copy("whole/log.jsonl", "rest")  # also its lines after that step, which are dropped
    rest = main([*argv, "--steps=12", "--resume", "--out=rest"])
    assert "resuming from rest/step_00000006" in capsys.readouterr().out
    assert rest["train_loss"] == whole["train_loss"]
    assert rest["validation_loss"] == whole["validation_loss"]
    lines = Path("rest/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    last = [jfp8.checkpoint.load(f"{run}/step_00000012")["state"] for run in ("whole", "rest")]
    jax.tree.map(np.testing.assert_array_equal, *last)
    with pytest.raises(SystemExit, match="seed was 0 and is 1"):
        main([*argv, "--steps=12", "--resume", "--out=rest", "--seed=1"])


def test_the_expected_speed_of_1b():
    """By hand in bf16, on H200, whose peak is 989.5 TFLOP/s, of which matmuls reach 738."""
    size, kind, speed = llama_nnx.SIZES["1b"][0], "NVIDIA H200", imported("lm.speed", "examples")
    kernels = 20 * (2048 * 3072 + 2048 * 2048 + 2048 * 12_288 + 6144 * 2048) + 2048 * 32_768
    flops = 6 * kernels + 12 * 20 * 2048 * 2048 / 2
    assert speed.mfu(1e6, size, 8, kind) == pytest.approx(1e6 * flops / (8 * 989.5e12))
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    tokens, found = jax.ShapeDtypeStruct((64, 2048), jnp.int32), {}
    with use_abstract_mesh(AbstractMesh((8,), ("fsdp",), (AxisType.Auto,), abstract_device=device)):
        model = nnx.eval_shape(lambda: llama_nnx.LanguageModel(size, rngs=nnx.Rngs(0)))
        for name, m in (("bf16", model), ("fp8", jfp8.convert(model, "delayed"))):
            found[name] = speed.expected(jfp8.report(m, tokens), size, tokens.size, 8, kind)
    assert found["bf16"] == pytest.approx(8 * 738e12 / flops)
    assert 1.2 < found["fp8"] / found["bf16"] < 2
    assert speed.expected(None, size, tokens.size, 8, "cpu") is None


@pytest.mark.slow
def test_two_processes_agree_and_equal_one(text, tmp_path):
    """Both to the last bit; one process to the order of sums at first, later to FP8's steps."""
    small = ["--steps=4", "--layers=1", "--seq-len=32", f"--text={text}"]
    printed = run_script("examples/train_processes.py", *small, "--out=here", cwd=tmp_path)
    result = json.loads(Path("here/result.json").read_text())
    assert "equal to the last bit on all 4 devices of each of 2 processes" in printed
    first, second = result["processes"]
    alone = result["single_process"]
    assert first["devices"] == second["devices"] == {"all": 8, "of_this_process": 4}
    assert alone["devices"] == {"all": 8, "of_this_process": 8}
    for figures in (first, second):
        assert figures["equal_histories"]["devices_of_this_process"] == 4
        assert figures["equal_histories"]["processes"] == 2
        assert figures["equal_histories"]["bytes"] >= 4 * 3 * 16 * 4
    assert result["losses_equal_in_both_processes"]
    assert len(first["losses"]) == 4
    assert first["losses"][-1] < first["losses"][0]
    assert result["first_loss_differs_by"] < 1e-6
    assert result["any_loss_differs_by"] < 5e-3


def worker(folder, name, code):
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=output, stderr=subprocess.STDOUT
        )
    return train_processes.Worker(name, process, log, folder / f"{name}.json")


SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"


def test_a_process_that_fails_ends_the_others(tmp_path, capsys):
    workers = [
        worker(tmp_path, "0", SLEEP),
        worker(tmp_path, "1", "raise SystemExit('no such coordinator')"),
    ]
    start = time.monotonic()
    with pytest.raises(SystemExit, match="a process failed"):
        train_processes.wait(workers, 300)
    assert time.monotonic() - start < 60
    assert all(w.process.poll() is not None for w in workers)
    assert "no such coordinator" in capsys.readouterr().out
