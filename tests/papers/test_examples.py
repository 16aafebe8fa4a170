"""The examples are run as a stranger would run them, only with fewer and smaller steps."""

import json
import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jfp8
from support.scripts import imported, run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = "--steps=24 --width=32 --layers=1 --heads=2 --seq-len=32 --batch-size=4 --eval-batches=4"


@pytest.fixture(scope="module")
def train_lm():
    return imported("train_lm", "examples")


@pytest.fixture(scope="module")
def compared(train_lm, text, tmp_path_factory):
    """One run of FP8 beside float32, which never stops; most tests below look at what it left."""
    out = tmp_path_factory.mktemp("compared")
    argv = [*SMALL.split(), "--compare", "--data", str(text), "--lr", "1e-2", "--loss-scale"]
    argv += ["--checkpoint", str(out / "state.safetensors"), "--checkpoint-every", "7"]
    return argv, out, train_lm.main([*argv, "--out", str(out)])


def read_metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_quickstart_says_what_is_fp8_and_compares(tmp_path):
    lines = run_script("examples/quickstart.py", cwd=tmp_path).splitlines()
    assert any(line.startswith("100.0 % of") for line in lines)  # all products are FP8
    steps = [re.findall(r"\d\.\d+", line) for line in lines if line.startswith("step")]
    fp8, f32 = np.array(steps, float).T
    assert len(fp8) == 6
    assert fp8[0] == pytest.approx(np.log(256), abs=0.3)  # knows nothing yet
    assert fp8[-1] < 3
    # Two trainings, not one printed twice, that differ by less than a broken one would.
    assert (fp8 != f32).any()
    np.testing.assert_allclose(fp8, f32, rtol=0.05)
    assert lines[-2].startswith("mean of the last 100 steps")
    noise = float(re.fullmatch(r"float32 on other batches: (.*) %, so a smaller .*", lines[-1])[1])
    assert 0 < abs(noise) < 10


def test_quickstart_is_short_enough_to_be_read():
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 50


@pytest.mark.slow
def test_both_losses_fall_and_stay_close(compared):
    _, out, result = compared
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 25))
    for run in ("fp8", "f32"):
        losses = np.array([line["loss"][run] for line in lines])
        assert np.isfinite(losses).all()
        assert losses[-5:].mean() < losses[:5].mean() - 0.5
        assert np.isfinite(result["validation_loss"][run])
    fp8, f32 = lines[0]["loss"]["fp8"], lines[0]["loss"]["f32"]
    assert fp8 == pytest.approx(f32, rel=0.02), "the same initial parameters and the same batch"
    assert fp8 != f32, "and yet one of them in FP8"
    assert abs(result["gap_percent"]) < 5


@pytest.mark.slow
def test_what_a_run_leaves_behind(compared):
    argv, out, result = compared
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "result.json").read_text()) == result
    assert result["arguments"]["width"] == 32
    assert set(result["versions"]) == {"jfp8", "jax", "flax", "optax"}
    # embedding and head, positions, one block of 12 width^2 and four norm vectors, the last norm
    assert result["parameters"] == 2 * 256 * 32 + 32 * 32 + 12 * 32**2 + 4 * 32 + 2 * 32
    last = read_metrics(out)[-1]
    assert last["ms"]["fp8"] > 0
    assert last["ms"]["f32"] > 0
    assert last["loss_scale"] == {"fp8": 2.0**15, "f32": 2.0**15}
    assert [p.name for p in out.iterdir() if "state" in p.name] == ["state.safetensors"]


@pytest.mark.slow
def test_resume_gives_the_numbers_of_a_run_that_never_stopped(train_lm, compared, tmp_path, capsys):
    argv, out, straight = compared
    argv = [*argv, "--out", str(tmp_path), "--checkpoint", str(tmp_path / "state.safetensors")]

    assert train_lm.main([*argv, "--stop-at", "11"]) is None
    assert "stopped after step 11" in capsys.readouterr().out
    assert len(read_metrics(tmp_path)) == 11
    resumed = train_lm.main([*argv, "--resume"])
    printed = capsys.readouterr().out
    assert "relative gap" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    assert (
        f"example=train_lm metric=validation_loss fp8={resumed['validation_loss']['fp8']:.6g}"
        in line
    )

    def without_time(lines):
        return [{k: v for k, v in line.items() if k != "ms"} for line in lines]

    assert without_time(read_metrics(tmp_path)) == without_time(read_metrics(out))
    assert resumed["validation_loss"] == straight["validation_loss"]
    assert last_state(tmp_path) == last_state(out)


def last_state(out: Path) -> list[tuple[str, bytes]]:
    """Every number that the checkpoint in `out` holds, to the last bit."""
    tree = jfp8.checkpoint.load(out / "state.safetensors")["states"]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), np.asarray(leaf).tobytes()) for path, leaf in leaves]


@pytest.mark.slow
def test_float32_does_not_notice_a_loss_multiplier(train_lm, text, tmp_path):
    argv = [*SMALL.split(), "--steps=8", "--recipe=none", f"--data={text}", f"--out={tmp_path}"]
    losses = []
    for multiplier in ("1", "1e-3"):
        train_lm.main([*argv, "--loss-multiplier", multiplier, "--micro-batches", "2"])
        losses.append([line["loss"]["f32"] for line in read_metrics(tmp_path)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


# (script, options, message); what all scripts check alike stands here once.
MISTAKES = [
    ("train_lm", "--steps=-3", "--steps: '-3' is given, but it must be a whole number of 1"),
    ("train_lm", "--seed=-1", "--seed: '-1' is given, but it must be a whole number of 0 or more"),
    ("train_lm", "--lr nan", "--lr: 'nan' is given, but it must be a finite number above 0"),
    ("train_lm", "--width 130 --heads 4", "Type --heads with one of 1, 2, 5, 10, 13, 26, 65, 130"),
    ("train_lm", "--recipe delay", "invalid choice: 'delay' (choose from"),
    ("train_lm", "--batch-size 8 --micro-batches 3", "--micro-batches 3: type --batch-size 9"),
    ("train_lm", "--compare --recipe none", "--recipe none would train float32 twice: omit"),
    ("train_lm", "--fp8-head --recipe none", "--fp8-head with --recipe none would add FP8"),
    ("train_lm", "--attention-recipe rowwise --recipe none", "--attention-recipe with --recipe"),
    ("train_lm", "--resume", "--resume needs a file for the state: add --checkpoint runs/train_lm"),
    ("train_lm", "--stop-at 5", "--stop-at needs a file for the state: add --checkpoint"),
    ("train_lm", "--resume --checkpoint no/such.safetensors", "there is no checkpoint at no/such"),
    ("train_lm", "--resume --checkpoint small.safetensors", "is not a checkpoint of train_lm.py"),
    ("train_lm", "--checkpoint x.msgpack", "x.msgpack needs a name that ends in .safetensors"),
    ("train_lm", "--data no/such", "--data no/such does not exist: pass a text file or a folder"),
    ("train_lm", "--data small.txt", "has 11 bytes of text, but at least 81,920"),
    ("train_lm", "--seq-len 4096", "type --seq-len 4095 or less"),
    ("train_lm", "--batch-size 300 --data text.txt", "type --batch-size 31, or pass more text"),
    ("train_lm", "--out small.txt", "small.txt"),
    ("finetune", "--data text.txt --from small.txt", "does not hold parameters of this model"),
    ("train_images", "--compare --recipe none", "--recipe none would train float32 twice: omit"),
    ("train_images", "--data no/such", "--data no/such has no file train-images-idx3-ubyte"),
    ("train_moe", "--experts 4 --experts-per-token 5", "type --experts-per-token 4 or less"),
    ("train_moe", "--balance=-1", "it must be a finite number of 0 or more"),
    ("train_sharded", "--data 3", "needs 12 devices, but there are 8"),
    ("train_sharded", "--fsdp 16", "type three factors of 8, for example --data 8 --fsdp 1"),
    ("train_sharded", "--batch-size 6", "--data 2 times --fsdp 2: type --batch-size 8"),
    ("train_sharded", "--heads 1", "Type --heads 2 and a --width that is a multiple of it"),
    ("train_sharded", "--fp8-gather --recipe none", "--recipe none would round the weights"),
    ("train_sharded", "--text no/such", "--text no/such does not exist"),
    ("train_nnx_lm", "--devices 8", "--devices is for a model of a named size: type --size tiny"),
    ("train_nnx_lm", "--recipe none", "--recipe none is for a model of a named size: type --size"),
    ("train_nnx_lm", "--size tiny --devices 9", "--devices 9, but there are 8: type --devices 8"),
    ("train_nnx_lm", "--size tiny --devices 8 --batch-size 12", "type --batch-size 16"),
    ("train_nnx_lm", "--size tiny --resume", "has no checkpoint: omit --resume"),
]


@pytest.mark.parametrize(("script", "argv", "message"), MISTAKES)
def test_a_mistake_is_told_with_what_to_type_instead(
    script, argv, message, text, elsewhere, capsys
):
    Path("small.txt").write_text("hello world")
    Path("small.safetensors").write_text("hello world")
    Path("text.txt").write_bytes(text.read_bytes()[:100_000])
    with pytest.raises(SystemExit) as exit:
        imported(script, "examples").main(argv.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_resume_refuses_another_configuration(train_lm, compared, capsys):
    argv, out, _ = compared
    with pytest.raises(SystemExit):
        train_lm.main([*argv, "--out", str(out), "--resume", "--width", "64", "--seed", "3"])
    message = capsys.readouterr().err
    assert "width was 32 and is 64" in message
    assert "seed was 0 and is 3" in message
    assert "Type the old values, or omit --resume" in message


@pytest.mark.parametrize("missing", ["tqdm", "matplotlib"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    train_lm, monkeypatch, missing
):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "lm.report")
    monkeypatch.delattr(sys.modules["lm"], "report")
    with pytest.raises(SystemExit, match=rf"needs {missing}: type  pip install 'jfp8\[examples\]'"):
        runpy.run_path(str(EXAMPLES / "train_lm.py"))


def test_training_windows_touch_no_held_out_byte(train_lm, tmp_path):
    corpus = train_lm.corpus
    path = tmp_path / "marked"
    path.write_bytes((b"\0" * 19 * corpus.BLOCK + b"\1" * corpus.BLOCK) * 3 + b"\1" * corpus.BLOCK)
    marked = corpus.load(str(path), seq_len=1000)
    assert marked.periods.shape == (3, corpus.PERIOD)
    for step in range(50):
        assert not marked.train_batch(0, step, 8).any()
    batches = marked.validation_batches(batch_size=4, count=100)
    assert batches.shape == (3, 4, 1001)
    assert batches.all()


@pytest.mark.slow
def test_custom_quantizer():
    """The quantizer of one's own beats the library's where it is meant to."""
    path = EXAMPLES / "custom_quantizer.py"
    errors = runpy.run_path(str(path))["main"]()
    current, clipped = errors.values()
    assert 0 < clipped < current / 2
    body = path.read_text().partition("class Clipped")[2].partition("def main")[0]
    assert len(body.splitlines()) <= 30
