"""`examples/train_moe.py`: a run of a few steps, and its model without FP8."""

import json
from pathlib import Path

import numpy as np
import pytest

from support.scripts import imported

SIZES = "--width=32 --layers=1 --heads=2 --seq-len=32 --batch-size=4 --eval-batches=4"
SMALL = [*SIZES.split(), "--intermediate=32", "--steps=24", "--lr=1e-2"]
train_moe = imported("train_moe", "examples")


@pytest.mark.slow
def test_experts_train_in_fp8(text, elsewhere, capsys):
    result = train_moe.main([*SMALL, "--compare", f"--data={text}"])
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
    results = {}
    for options in ("--balance 0", "--balance 1", "--balance 1 --loss-multiplier 3"):
        argv = [*SMALL, "--recipe=none", f"--data={text}", f"--out={tmp_path}"]
        results[options] = train_moe.main([*argv, *options.split()])
    without, balanced, multiplied = results.values()
    assert balanced["f32_balance"] < without["f32_balance"] - 0.1
    assert without["train_loss"]["f32"][0] == balanced["train_loss"]["f32"][0], "not part of it"
    np.testing.assert_allclose(
        multiplied["train_loss"]["f32"], balanced["train_loss"]["f32"], rtol=1e-4
    )
