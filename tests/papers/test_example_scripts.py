"""The other scripts of `examples/`: help for each, and a run of a few small steps."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jfp8
from support.scripts import imported

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = "--width=32 --layers=1 --heads=2 --seq-len=32 --batch-size=4 --eval-batches=4"
SMALL = [*SIZES.split(), "--steps=12", "--lr=1e-2"]
EXPERTS = [*SIZES.split(), "--intermediate=32", "--steps=24", "--lr=1e-2"]
pytestmark = pytest.mark.usefixtures("elsewhere")
SCRIPTS = sorted(
    path.stem
    for path in EXAMPLES.glob("*.py")
    if path.stem not in ("audit", "quickstart", "custom_quantizer")
)


def figures_of(printed: str) -> dict[str, str]:
    """What the line of results says: the same form in every script."""
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return dict(field.split("=") for field in line.split()[1:])


def check_run(script: str, result: dict, printed: str, runs: set[str]) -> dict[str, str]:
    """Every run learned, all from the same start, and the files and the line say what was."""
    out = Path("runs", script)
    assert sorted(Path().iterdir()) == [Path("runs")]
    assert list(Path("runs").iterdir()) == [out]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "result.json").read_text()) == result
    assert set(result["train_loss"]) == set(result["validation_loss"]) == runs
    for run, losses in result["train_loss"].items():
        assert len(losses) == result["arguments"]["steps"]
        assert np.mean(losses[-3:]) < losses[0] - 0.5
        assert losses[0] == pytest.approx(result["train_loss"]["f32"][0], rel=0.05)
        assert run == "f32" or losses[0] != result["train_loss"]["f32"][0], f"{run} is not FP8"
    figures = figures_of(printed)
    assert figures["example"] == script
    assert figures["metric"] == "validation_loss"
    for run, loss in result["validation_loss"].items():
        assert float(figures[run]) == pytest.approx(loss, rel=1e-5)
    first, f32 = (
        result["validation_loss"][run] for run in (next(iter(result["train_loss"])), "f32")
    )
    assert float(figures["gap_percent"]) == pytest.approx(100 * (first / f32 - 1), abs=1e-3)
    assert abs(float(figures["gap_percent"])) < 5
    if "fp8" in runs:
        assert 0 < abs(float(figures["noise_percent"])) < 20
    return figures


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_examples_of_use(script, capsys):
    with pytest.raises(SystemExit) as exit:
        imported(script, "examples").main(["--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert f"\n    python examples/{script}.py" in printed
    assert "--out DIR" in printed
    assert f"runs/{script}" in printed


@pytest.mark.slow
def test_a_converted_model_trains_as_it_did(text, capsys):
    result = imported("convert_model", "examples").main([*SMALL, f"--data={text}"])
    printed = capsys.readouterr().out
    figures = check_run("convert_model", result, printed, {"fp8", "f32"})
    assert "parameters of both: equal in names, shapes and values" in printed
    # The table of `jfp8.report`, down to the layers inside nn.scan, nn.remat and attention
    assert "\nScanCheckpointBlock_0\n  MultiHeadDotProductAttention_0  f32 " in printed
    assert "\n    query                         FP8    FP8    FP8 " in printed
    assert 0 < float(figures["fp8_percent_of_flops"]) < 100


@pytest.mark.slow
def test_a_layer_can_be_left_as_it_is(text, capsys):
    script = imported("convert_model", "examples")
    fractions = {}
    for pattern in ("*/Dense_1", "*/Dense_*"):
        args = [*SMALL, f"--data={text}", "--steps=1", "--exempt", pattern]
        fractions[pattern] = script.main(args)["fp8_percent_of_flops"]
        assert f"  exempt: {pattern!r}\n" in capsys.readouterr().out
    assert fractions["*/Dense_*"] < fractions["*/Dense_1"]
    with pytest.raises(SystemExit):
        script.main([*SMALL, f"--data={text}", "--exempt", "decoder/*"])
    assert "decoder/*" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_transformers(text, capsys):
    pytest.importorskip("transformers", reason="pip install 'jfp8[models]'")
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which its authors use
        result = imported("convert_model", "examples").main(
            [*SMALL, f"--data={text}", "--model=llama"]
        )
    printed = capsys.readouterr().out
    check_run("convert_model", result, printed, {"fp8", "f32"})
    assert re.search(r"^ +gate_proj +FP8 +FP8 +FP8 ", printed, re.MULTILINE)


def test_a_model_that_is_not_installed(text, monkeypatch, capsys):
    monkeypatch.setitem(imported("sys", "examples").modules, "transformers.models.llama", None)
    with pytest.raises(SystemExit):
        imported("convert_model", "examples").main([*SMALL, f"--data={text}", "--model=llama"])
    assert "type  pip install 'jfp8[models]'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_nnx_model_trains_in_fp8(text, capsys):
    result = imported("train_nnx_lm", "examples").main([*SMALL, f"--data={text}"])
    printed = capsys.readouterr().out
    figures = check_run("train_nnx_lm", result, printed, {"fp8", "f32"})
    # Four products in a block, each with three histories of 16 and their check
    parameters = 2 * 256 * 32 + 32 * 32 + 12 * 32**2 + 6 * 32
    assert f"{parameters:,} parameters, and {4 * (3 * 16 + 1)} numbers of FP8 state" in printed
    assert "4 of 4 histories of gradients have entries" in printed
    assert figures["grad_histories"] == "4"


@pytest.mark.slow
def test_fine_tuning_begins_with_the_checkpoint(text, capsys):
    script = imported("finetune", "examples")
    argv = [*SMALL, "--pretrain-steps=12", f"--data={text}"]
    first = script.main(argv)
    printed = capsys.readouterr().out
    path = Path("runs/finetune/pretrained.safetensors")
    assert f"parameters written to {path}" in printed
    # Twelve steps on similar text bring the loss from ln 256 to about 3.6
    assert first["f32_before"] < 4.5 < np.log(256)
    assert first["fp8_before"] == pytest.approx(first["f32_before"], rel=0.02)
    assert first["fp8_before"] != first["f32_before"]
    for run in ("fp8", "f32"):
        assert first["validation_loss"][run] < first[f"{run}_before"] - 0.1
    assert abs(first["gap_percent"]) < 5
    figures = figures_of(printed)
    assert figures["example"] == "finetune"
    assert float(figures["fp8_before"]) == pytest.approx(first["fp8_before"], rel=1e-5)

    # The file goes on where it was, without pre-training, to the last bit.
    again = script.main([*argv, "--from", str(path), "--out", "again"])
    assert "pre-training" not in capsys.readouterr().out
    assert again["train_loss"] == first["train_loss"]
    assert sorted(p.name for p in Path("again").iterdir()) == ["loss.png", "result.json"]
    with pytest.raises(SystemExit):
        script.main([*argv, "--from", str(path), "--width=64"])
    assert "with the same --layers, --width and --seq-len" in capsys.readouterr().err


@pytest.mark.slow
def test_the_student_is_deployed_as_it_was_trained(text, capsys):
    script = imported("quantization_aware", "examples")
    argv = [*SMALL, "--teacher-steps=12", f"--data={text}"]
    result = script.main(argv)
    figures = figures_of(capsys.readouterr().out)
    assert figures["example"] == "quantization_aware"
    losses = result["validation_loss"]
    assert losses["qat"] == result["trained"] != result["rounded"]
    assert losses["f32"] < np.log(256) - 1
    # From the rounded teacher on, towards the teacher.
    assert result["train_loss"]["qat"][-1] < result["train_loss"]["qat"][0]
    other = script.main([*argv, "--backward=high_precision"])
    assert other["train_loss"]["qat"][0] == result["train_loss"]["qat"][0]
    assert other["train_loss"]["qat"] != result["train_loss"]["qat"]


@pytest.mark.slow
def test_a_recipe_of_ones_own_trains(text, capsys):
    script = imported("custom_recipe", "examples")
    result = script.main([*SMALL, f"--data={text}"])
    printed = capsys.readouterr().out
    check_run("custom_recipe", result, printed, {"own", "stock", "f32"})
    errors = result["own_gradient_error_percent"], result["stock_gradient_error_percent"]
    assert errors[0] < 0.85 * errors[1], "less noise than NVFP4"
    assert '"recipe": "QuartetII"' in printed


def test_a_recipe_of_ones_own_is_unbiased():
    """The mean of 64 gradients is 8 times as close as one, to what NumPy computes in float64."""
    recipe, rng = imported("custom_recipe", "examples").QuartetII(), np.random.default_rng(0)
    x, w, dy = (np.float32(rng.normal(size=s)) for s in ((96, 80), (80, 160), (96, 160)))

    def gradients(key):
        contract = (((1,), (0,)), ((), ()))
        dot = lambda x, w: jfp8.scaled_dot_general(x, w, contract, recipe=recipe, key=key)
        return jax.vjp(dot, x, w)[1](dy)

    keys = jax.random.split(jax.random.key(0), 64)
    drawn = jax.jit(lambda: jax.lax.map(gradients, keys, batch_size=16))()
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    for samples, exact in zip(map(np.float64, drawn), (dy @ w.T, x.T @ dy), strict=True):
        error = lambda y, exact=exact: np.linalg.norm(y - exact) / np.linalg.norm(exact)
        single = np.mean([error(y) for y in samples[:8]])
        assert single == pytest.approx(0.14, rel=0.15)
        assert error(samples.mean(0)) == pytest.approx(single / 8, rel=0.15)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Small gradients are zero under 'unscaled'")  # the finding
def test_the_tensor_that_breaks_is_found(text, capsys):
    """Gradients of a loss that is multiplied by 1e-3 lie below 2^-17, where e5m2 ends."""
    result = imported("debug_training", "examples").main([*SMALL, f"--data={text}", "--every=4"])
    printed = capsys.readouterr().out
    assert result["first_fault"] == "vanishing_gradient"
    assert result["first_tensor"] == "block_0/down grad"  # the first product of the backward pass
    assert "-> Raise the loss scale" in printed
    assert result["findings_after_repair"] == 0
    figures = figures_of(printed)
    assert figures["first_tensor"] == "block_0/down_grad"
    losses = result["validation_loss"]
    assert losses["broken"] > losses["f32"] + 0.3
    assert losses["repaired"] == pytest.approx(losses["f32"], rel=0.05)
    out = Path("runs/debug_training")
    names = ["gradients.png", "loss.png", "result.json", "stats.jsonl"]
    assert sorted(p.name for p in out.iterdir()) == names
    rows = jfp8.debug.read_jsonl(out / "stats.jsonl")
    assert {row.step for row in rows} == {0, 4, 8}
    assert len(rows) == 3 * 12, "three tensors of four products in three steps"
    down = [r for r in rows if r.path == "block_0/down" and r.tensor == "grad"]
    assert min(row.underflow for row in down) > 0.9


@pytest.mark.slow
def test_experts_train_in_fp8(text, capsys):
    train_moe = imported("train_moe", "examples")
    result = train_moe.main([*EXPERTS, "--compare", f"--data={text}"])
    printed = capsys.readouterr().out
    out = Path("runs/train_moe")
    assert sorted(p.name for p in out.iterdir()) == ["loss.png", "metrics.jsonl", "result.json"]
    assert json.loads((out / "result.json").read_text()) == result
    fp8, f32 = (result["train_loss"][run] for run in ("fp8", "f32"))
    for losses in (fp8, f32):
        assert len(losses) == 24
        assert np.mean(losses[-3:]) < losses[0] - 0.5
    assert fp8[0] == pytest.approx(f32[0], rel=0.05), "the same parameters and the same batch"
    assert fp8[0] != f32[0], "and yet one of them in FP8"
    assert abs(result["gap_percent"]) < 5

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 25))
    tokens = np.array([line["tokens"]["fp8"] for line in lines])
    assert tokens.shape == (24, 1, 8)
    assert (tokens.sum(axis=-1) == 4 * 32 * 2).all(), "every byte goes to two experts"
    share = 100 * tokens.mean(axis=(0, 1)) / 256
    assert result["fp8_largest_share_percent"] == pytest.approx(share.max())
    # Embedding and head, positions, attention, three norms, router, and experts of which two of
    # eight are used.
    others = 2 * 256 * 32 + 32 * 32 + 4 * 32**2 + 3 * 2 * 32 + 32 * 8
    experts = 8 * 3 * 32 * 32
    assert f"{others + experts:,} parameters" in printed
    assert f"a byte uses {others + experts // 4:,}" in printed
    assert f"fp8_balance={result['fp8_balance']:.6g} " in printed


@pytest.mark.slow
def test_the_load_balancing_loss_balances(text, tmp_path):
    """And a multiplied loss changes nothing, not even the part of it that balances."""
    train_moe, results = imported("train_moe", "examples"), {}
    for options in ("--balance 0", "--balance 1", "--balance 1 --loss-multiplier 3"):
        argv = [*EXPERTS, "--recipe=none", f"--data={text}", f"--out={tmp_path}"]
        results[options] = train_moe.main([*argv, *options.split()])
    without, balanced, multiplied = results.values()
    assert balanced["f32_balance"] < without["f32_balance"] - 0.1
    assert without["train_loss"]["f32"][0] == balanced["train_loss"]["f32"][0], "not part of it"
    np.testing.assert_allclose(
        multiplied["train_loss"]["f32"], balanced["train_loss"]["f32"], rtol=1e-4
    )
