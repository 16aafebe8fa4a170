"""`examples/train_moe.py`: its model against NumPy, its picture, and a run of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.scripts import imported, text_in

SIZES = "--width=32 --layers=1 --heads=2 --seq-len=32 --batch-size=4 --eval-batches=4"
SMALL = [*SIZES.split(), "--intermediate=32", "--steps=24", "--lr=1e-2"]


@pytest.fixture(scope="module")
def train_moe():
    return imported("train_moe", "examples")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return str(text_in(tmp_path_factory.mktemp("text")))


# ---- the model


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def normed(x: np.ndarray) -> np.ndarray:
    """Of norms as they are initialized, with scales of 1 and biases of 0."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def block_in_numpy(p: dict, x: np.ndarray, heads: int, k: int) -> tuple[np.ndarray, list, float]:
    """float64[length, width] of one sequence, with the tokens of each expert and the loss."""
    length, width = x.shape
    qkv = (normed(x) @ p["qkv"]["kernel"]).reshape(length, heads, -1)
    q, key, v = np.split(qkv.transpose(1, 0, 2), 3, axis=-1)
    scores = q @ key.transpose(0, 2, 1) / np.sqrt(width / heads)
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    attended = (softmax(scores) @ v).transpose(1, 0, 2).reshape(length, width)
    x = x + attended @ p["out"]["kernel"]

    h, y = normed(x), np.zeros_like(x)
    wi, wo = p["moe"]["wi"]["kernel"], p["moe"]["wo"]["kernel"]
    probabilities = softmax(h @ p["moe"]["router"]["kernel"])
    tokens = [0] * len(wi)
    for t in range(length):
        chosen = np.argsort(-probabilities[t])[:k]
        weights = probabilities[t, chosen] / probabilities[t, chosen].sum()
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = np.split(h[t] @ wi[expert], 2)
            y[t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ wo[expert])
            tokens[expert] += 1
    shares = np.array(tokens) / sum(tokens)
    return x + y, tokens, len(tokens) * float(shares @ probabilities.mean(axis=0))


def model_in_numpy(params: dict, tokens: np.ndarray, heads: int, k: int):
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = p["embed"]["embedding"][tokens] + p["position"]["embedding"][: len(tokens)]
    counts, losses = [], []
    for i in range(2):
        x, count, loss = block_in_numpy(p[f"block_{i}"], x, heads, k)
        counts.append(count)
        losses.append(loss)
    return normed(x) @ p["head"]["kernel"], counts, losses


@pytest.fixture(scope="module")
def twins(train_moe):
    """The same parameters in the model in FP8, and in the one in float32."""
    sizes = {"width": 16, "layers": 2, "heads": 2, "max_length": 12, "experts": 4}
    make = lambda recipe: train_moe.MoETransformer(**sizes, intermediate=8, recipe=recipe)
    fp8, f32 = make("current"), make(None)
    tokens = np.random.default_rng(0).integers(256, size=(1, 12))
    variables = jax.jit(f32.init)(jax.random.key(0), tokens)
    return fp8, f32, variables, tokens


@pytest.mark.slow
def test_the_twin_is_float32(train_moe, twins):
    """Logits to a float32's digits, where the tokens went, and the balance: against float64."""
    _, f32, variables, tokens = twins
    assert set(variables) == {"params"}, "no state of FP8"
    logits, counts, losses = model_in_numpy(variables["params"], tokens[0], heads=2, k=2)
    watched = jax.jit(lambda variables: train_moe.apply_and_watch(f32.apply, variables, tokens))
    got, experts = watched(variables)
    np.testing.assert_allclose(got[0], logits, rtol=1e-4, atol=1e-5)
    assert experts.tokens.tolist() == counts
    np.testing.assert_allclose(experts.balance, losses, rtol=1e-5)


@pytest.mark.slow
def test_the_backward_pass_of_the_twin_is_float32(twins):
    """No number in eight bits is in its program; in that of the other one there are."""
    fp8, f32, variables, tokens = twins

    def program(model):
        loss = lambda params: jnp.sum(model.apply({"params": params}, tokens) ** 2)
        return str(jax.make_jaxpr(jax.grad(loss))(variables["params"]))

    assert "f8_" in program(fp8)
    assert not any(narrow in program(f32) for narrow in ("f8_", "bf16", "f16"))


# ---- the picture


# ---- the script


@pytest.mark.slow
def test_experts_train_in_fp8(train_moe, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = train_moe.main([*SMALL, "--compare", "--data", text])
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
def test_the_load_balancing_loss_balances(train_moe, text, tmp_path):
    """And a multiplied loss changes nothing, not even the part of it that balances."""
    results = {}
    for options in ("--balance 0", "--balance 1", "--balance 1 --loss-multiplier 3"):
        argv = [*SMALL, "--recipe", "none", "--data", text, "--out", str(tmp_path)]
        results[options] = train_moe.main([*argv, *options.split()])
    without, balanced, multiplied = results.values()
    assert balanced["f32_balance"] < without["f32_balance"] - 0.1
    assert without["train_loss"]["f32"][0] == balanced["train_loss"]["f32"][0], "not part of it"
    np.testing.assert_allclose(
        multiplied["train_loss"]["f32"], balanced["train_loss"]["f32"], rtol=1e-4
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--experts 4 --experts-per-token 5", "type --experts-per-token 4 or less, or more"),
        ("--compare --recipe none", "--compare with --recipe none would train float32 twice"),
        ("--balance=-1", "--balance: '-1' is given, but it must be a finite number of 0 or more"),
        ("--experts 0", "--experts: '0' is given, but it must be a whole number of 1 or more"),
    ],
)
def test_a_mistake_is_told_with_what_to_type_instead(train_moe, tmp_path, capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        train_moe.main([*argv.split(), "--out", str(tmp_path / "out")])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
