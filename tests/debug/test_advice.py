"""`debug.advice` finds faults that were planted in real trainings, and nothing in good ones."""

import dataclasses
import functools
import html
import math
import re
import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jfp8
import support.rows
from jfp8 import recipes
from jfp8.conversion.product_report import Report
from jfp8.conversion.product_rows import ProductRow
from jfp8.debug import advice, stats

CONTEXT = 32


@functools.cache
def corpus() -> np.ndarray:
    names = ("argparse", "ast", "inspect", "typing")
    folder = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"".join((folder / f"{n}.py").read_bytes() for n in names), np.uint8)


def batches(n_steps, size=64):
    """The bytes of a context as numbers around zero, and the byte that follows."""
    draw, text = np.random.default_rng(0), corpus()
    for _ in range(n_steps):
        starts = draw.integers(0, len(text) - CONTEXT - 1, size)
        windows = np.stack([text[i : i + CONTEXT + 1] for i in starts])
        yield windows[:, :-1].astype(np.float32) / 64 - 1, windows[:, -1].astype(np.int32)


class Net(nn.Module):
    """Two layers in FP8, of which ``branch`` multiplies the second, and logits that are not."""

    @nn.compact
    def __call__(self, x, branch=1.0):
        x = nn.gelu(nn.Dense(64)(x))
        x = nn.LayerNorm()(x + branch * nn.Dense(64)(x))
        return nn.Dense(256, name="logits")(x)


@functools.cache
def training(recipe):
    """The state before the first step, and a step with statistics."""
    model = jfp8.convert(Net(), recipe)
    x, _ = next(batches(1))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    tx = jfp8.loss_scale(optax.adam(3e-3))
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    def loss_fn(variables, batch):
        logits = model.apply(variables, batch["x"], batch["branch"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(state, batch):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, batch)
        return state.apply_gradients(grads), loss

    return state, jax.jit(stats(step))


def train(recipe, n_steps=20, *, branch=1.0, data=lambda i, x: x, after=lambda i, old, new: new):
    """Return the statistics of a training; `branch` multiplies the second layer of `Net`."""
    state, step = training(recipe)
    rows = []
    for i, (x, y) in enumerate(batches(n_steps)):
        batch = {"x": data(i, x), "y": y, "branch": np.float32(branch)}
        (new, _), seen = step(state, batch)
        rows += seen.rows(step=i)
        state = after(i, state, new)
    return rows


TOOLKIT = recipes.Hybrid(quantize_outputs=False)  # gradients without a scale
HEALTHY = ("delayed", "current", "rowwise", "mxfp8", "nvfp4", "hybrid", "direct_e5m2")


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with_a_good_training(name):
    rows = train(TOOLKIT if name == "hybrid" else recipes.get(name), 30)
    found = advice(rows)
    assert found.findings == (), str(found)
    assert str(found).startswith("Nothing is wrong (")
    # Nor with its first step alone, nor with every tenth.
    assert advice([row for row in rows if row.step == 0]).findings == ()
    assert advice([row for row in rows if row.step % 10 == 0]).findings == ()


def first(found):
    assert found.findings, "nothing was found"
    return found.findings[0]


@pytest.mark.slow
def test_a_branch_whose_gradient_dies():
    """Layer scale: the gradient of one branch is tiny, that of the others is not."""
    found = advice(train(TOOLKIT, 5, branch=2.0**-30))
    finding = first(found)
    assert (finding.fault, finding.tensor) == ("vanishing_gradient", "Dense_1 grad")
    assert finding.remedy.startswith("Use a recipe with scales for gradients")
    assert {f.tensor for f in found.findings} == {"Dense_1 grad"}
    mended = train(recipes.Float8CurrentScaling(), 5, branch=2.0**-30)
    assert advice(mended).findings == ()


def test_a_history_that_is_never_put_back():
    """The state of the fifth step is used ever after, while the data grows."""

    def keep_old(i, old, new):
        return new if i < 5 else new.replace(fp8=old.fp8)

    rows = train(recipes.DelayedScaling(), after=keep_old, data=lambda i, x: x * 1.3**i)
    found = advice(rows)
    finding = first(found)
    assert (finding.fault, finding.tensor) == ("stale_history", "Dense_0 lhs")
    assert "the fp8 collection" in finding.remedy
    assert "jfp8.TrainState" in finding.remedy
    assert {f.fault for f in found.findings} == {"stale_history"}
    # All that move are named, and of each the steps in which its scale is the same.
    assert {"Dense_1 lhs", "Dense_1 grad"} <= {f.tensor for f in found.findings}
    assert min(finding.steps) in (5, 6)
    assert max(finding.steps) == 19


def test_an_empty_history():
    """Nothing is ever put back: delayed scaling that works as current scaling."""
    rows = train(
        recipes.DelayedScaling(),
        after=lambda i, old, new: new.replace(fp8=old.fp8),
        data=lambda i, x: x * 1.1**i / 1000,
    )
    found = advice(rows)
    assert {f.fault for f in found.findings} == {"empty_history"}
    assert {f.severity for f in found.findings} == {"note"}
    assert {"Dense_0 lhs", "Dense_1 lhs"} <= {f.tensor for f in found.findings}


def test_values_that_outgrow_their_history():
    recipe = recipes.DelayedScaling()
    rows = train(recipe, 20, data=lambda i, x: x * 3.0**i)
    finding = next(f for f in advice(rows).findings if f.tensor == "Dense_0 lhs")
    assert finding.fault == "short_history"
    assert "margin=2" in finding.remedy  # 3 is more than 1 bit


def test_a_spike_that_stays_in_the_history():
    """Two batches are 2^20 times as large, and 16 steps pay for it; a single one is ignored."""
    spikes = lambda *steps: lambda i, x: x * (2.0**20 if i in steps else 1.0)
    assert advice(train(recipes.DelayedScaling(), data=spikes(8))).findings == ()
    finding = first(advice(train(recipes.DelayedScaling(), data=spikes(8, 9))))
    assert (finding.fault, finding.tensor) == ("long_history", "Dense_0 lhs")
    assert "lower amax_history_len" in finding.remedy
    assert set(finding.steps) == set(range(10, 20))


@pytest.mark.parametrize(
    ("bad", "told", "remedy"),
    [
        ({0: 0.5}, "the first tensor in the program that has any.", "clean the data"),
        ({1: 0.5}, "the first tensor in the program that has any.", "The weight itself is not"),
        ({2: 0.5, 3: 0.1}, "that has any, and 1 more after it.", "what is computed between"),
        ({0: 0.5, 1: 0.1, 2: 0.1}, "that has any, and 2 more after it.", "clean the data"),
    ],
)
@pytest.mark.parametrize("steps", [2, 3])
def test_what_is_not_finite_first(bad, told, remedy, steps):
    places = [("a", "lhs"), ("a", "rhs"), ("b", "lhs"), ("b", "rhs")]
    rows = [
        row(step=step, path=path, tensor=tensor, order=i, nonfinite=bad.get(i, 0.0) * (step == 1))
        for step in range(steps)
        for i, (path, tensor) in enumerate(places)
    ]
    (finding,) = advice(rows).findings
    assert (finding.fault, finding.severity, finding.steps) == ("non_finite", "error", (1,))
    assert finding.tensor == "{} {}".format(*places[min(bad)])
    assert finding.evidence.startswith("50 % of its elements are NaN or Inf")
    assert told in finding.evidence
    assert ("Later steps are finite again" in finding.evidence) == (steps > 2)
    assert remedy in finding.remedy


def test_gradients_that_overflow():
    """Once is what a dynamic loss scale does."""
    of = lambda bad: [row(step=i, tensor="grad", nonfinite=0.1 * bad(i)) for i in range(20)]
    (finding,) = advice(of(lambda i: i == 11)).findings
    assert (finding.fault, finding.severity, finding.steps) == ("non_finite", "note", (11,))
    assert "nothing to do" in finding.remedy
    (finding,) = advice(of(lambda i: i > 17)).findings  # and it did not help
    assert (finding.severity, finding.steps) == ("error", (18,))
    assert "lower the loss scale" in finding.remedy


def report_of(**choice):
    model, (x, _) = jfp8.convert(Net(), recipes.DelayedScaling(), **choice), next(batches(1))
    return jfp8.report(model, jax.eval_shape(model.init, jax.random.key(0), x), x)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"exempt": ("Dense_1", "logits")}, "exempt='logits' exempts"),
        ({"only": "Dense_1"}, "only='Dense_1' leaves out"),
    ],
)
def test_a_choice_of_layers_that_leaves_little(choice, told):
    (finding,) = advice((), report_of(**choice)).of("little_in_fp8")
    assert finding.evidence.startswith(told)
    assert f": {finding.tensor}" in finding.evidence  # the first of the layers


def test_small_models_whose_logits_are_most_of_them():
    """What is exempt by default is no mistake, however much it is."""
    good = report_of()
    assert good.fp8_fraction < 0.5
    assert advice((), good).findings == ()


# The rest, on statistics made up


# A tensor with nothing wrong: values around 1 to 4 under their own scale.
row = functools.partial(
    support.rows.row,
    path="layer",
    tensor="lhs",
    recipe="current",
    count=1000,
    amax=4.0,
    scale_min=4.0 / 448,
    scale_max=4.0 / 448,
    exponents={-1: 300, 0: 400, 1: 300},
)


@pytest.mark.parametrize(("times", "faults"), [(4, []), (5, ["short_history"])])
def test_saturation_now_and_then_is_what_delayed_scaling_does(times, faults):
    """In a tenth of 40 steps values are cut in half, and then in one more."""
    rows = [
        row(
            step=i,
            history=16,
            amax=4.0 + i % 3,
            scale_max=(3.0 + i) / 448,
            headroom=-1.1 if i % 8 == 0 and i < 8 * times else 0.1,
            overflow=1e-3,
        )
        for i in range(40)
    ]
    assert [f.fault for f in advice(rows).findings] == faults


def test_what_comes_back_after_a_history_has_forgotten_it():
    """A spike of 32 in every sixth step, under histories of 4."""
    spike, usual = {"amax": 32.0, "headroom": -5.0, "overflow": 0.1}, {"amax": 1.0}
    rows = [
        row(step=i, history=4, scale_max=1.0 + i, **(usual if i % 6 else spike)) for i in range(24)
    ]
    (finding,) = advice(rows).findings
    assert (finding.fault, finding.steps) == ("short_history", (0, 6, 12, 18))
    assert "grows faster than a history can tell" in finding.remedy
    rows[6] = dataclasses.replace(rows[6], headroom=-6.0)
    (finding,) = advice(rows).findings
    assert "longer ago than 4 steps: raise amax_history_len, to 32, say." in finding.remedy


@pytest.mark.parametrize(("lost", "faults"), [(0.09, []), (0.11, ["outliers"])])
def test_a_tenth_of_the_elements_is_many(lost, faults):
    spread = {1: 100 - round(100 * lost), -30: round(100 * lost)}
    rows = [row(step=i, underflow=lost, exponents=spread) for i in range(5)]
    assert [f.fault for f in advice(rows).findings] == faults


@pytest.mark.parametrize(
    ("scale", "steps", "faults"),
    [(2.0**-6, 40, []), (2.0**-6 * 1.01, 17, []), (2.0**-6 * 1.01, 18, ["stale_history"])],
)
def test_a_power_of_two_serves_amaxes_that_differ(scale, steps, faults):
    """A scale that stays for longer than the history: right if it is rounded, else stale."""
    rows = [
        row(step=i, history=16, amax=4.0 + i % 2, scale_min=scale, scale_max=scale, headroom=0.5)
        for i in range(steps)
    ]
    assert [f.fault for f in advice(rows).findings] == faults


def test_one_tensor_that_repeats_itself():
    """Data of bytes has the same amax again and again; weights and gradients do not."""
    scale = 4.03 / 448
    data = [
        row(step=i, history=16, amax=4.0 if i % 9 else 4.03, scale_min=scale, scale_max=scale)
        for i in range(40)
    ]
    others = [
        row(step=i, history=16, path=path, amax=4.0 + i, scale_max=(4.1 + i) / 448, order=1)
        for i in range(40)
        for path in ("other", "third")
    ]
    assert advice(data + others).findings == ()


def test_noise_without_another_reason():
    bad = [row(step=i, sqnr=8.0 + i / 2) for i in range(4)]
    found = advice([*bad, row(step=4)])
    (finding,) = found.findings
    assert found.steps == (0, 4)
    assert (finding.fault, finding.tensor) == ("noise", "layer lhs")
    assert "SQNR 8.0 dB" in finding.evidence
    assert advice([bad[0], *(row(step=i) for i in range(1, 5))]).findings == ()


def test_outliers_of_gradients_and_under_fine_scales():
    """1 of 4 elements is 2^-26 of the largest: beyond E4M3, within E5M2."""
    bad = row(underflow=0.25, exponents={1: 750, -24: 250}, scale_min=1e-4)
    gradient = dataclasses.replace(bad, tensor="grad", scale_min=bad.scale_max)
    (finding,) = advice([gradient]).findings
    assert finding.fault == "outliers"
    assert "75 % of its elements are within 2^8 of it" in finding.evidence
    assert 'fp8_format="HYBRID"' in finding.remedy
    (finding,) = advice([bad]).findings
    assert finding.remedy.startswith("Try MXFP8BlockScaling()")
    (finding,) = advice([dataclasses.replace(bad, recipe="mxfp8")]).findings
    assert finding.remedy.startswith("No recipe has finer scales with this range: exempt")


@pytest.mark.parametrize("tensor", ["lhs", "rhs", "grad"])
def test_a_tensor_of_zeros_is_dead(tensor):
    """In one sample that may be how a training begins; in several it is not."""
    nothing = {"amax": 0.0, "exponents": {}, "sqnr": math.nan, "scale_min": 1.0, "scale_max": 1.0}
    zeros = [row(step=i, tensor=tensor, **nothing) for i in range(3)]
    (finding,) = advice(zeros).findings
    assert (finding.fault, finding.severity, finding.steps) == ("dead", "warning", (0, 1, 2))
    both = [dataclasses.replace(zeros[0], products=name) for name in ("fprop", "wgrad")]
    assert [f.severity for f in advice(both).findings] == ["note"]
    assert advice([*zeros, row(step=3, tensor=tensor)]).findings == ()


def test_stacked_layers_are_told_apart_and_steps_may_be_unknown():
    spread = {1: 750, -24: 250}
    rows = [row(step=None, index=(i,), underflow=(i == 2) / 4, exponents=spread) for i in range(4)]
    found = advice(rows)
    assert [(f.tensor, f.steps) for f in found.findings] == [("layer[2] lhs", ())]
    assert "step" not in str(found)


def test_a_step_that_is_not_finite_tells_nothing_else():
    """Scales and losses of such a step mean nothing."""
    inf = row(step=3, nonfinite=0.1, underflow=0.9, headroom=-9.0, exponents={1: 10, -30: 90})
    other = row(step=3, path="other", order=1, underflow=0.9, exponents={1: 10, -30: 90})
    paths = ("layer", "other")
    good = [row(step=i, path=path, order=path == "other") for i in (0, 1, 2, 4) for path in paths]
    (finding,) = advice([inf, other, *good]).findings
    assert (finding.fault, finding.tensor) == ("non_finite", "layer lhs")


def test_the_text():
    bad = [
        row(path=f"layer_{i}", order=i, underflow=0.6, exponents={1: 400, -24: 600})
        for i in range(9)
    ]
    text = str(advice(bad))
    lines = text.splitlines()
    assert lines[0] == "9 errors (9 tensors, steps 0 to 0)."
    assert lines[2] == "error: layer_0 lhs (outliers)"
    assert lines[3].startswith("  60 % of it becomes zero at step 0: its amax, 4, is 2^26 times")
    assert lines[4].startswith("  -> Use block scales")
    assert lines[-1] == ("  The same (outliers): layer_3 lhs, layer_4 lhs, layer_5 lhs and 3 more.")
    assert text.count("->") == 3


def test_jupyter_shows_the_same_text():
    found = advice([row(path="<layer>", underflow=0.6, exponents={1: 400, -24: 600})])
    assert repr(found) == str(found)
    assert "&lt;layer&gt; lhs (outliers)" in found._repr_html_()
    assert html.unescape(re.sub("</?pre.*?>", "", found._repr_html_())) == str(found)
    assert str(advice([])) == "No tensor in FP8 was recorded."


@pytest.mark.parametrize("rows", [None, "log.jsonl", 3, [1, 2], [{"step": 0}]])
def test_errors_say_what_to_pass(rows):
    with pytest.raises(TypeError, match=r"rows of statistics.*jfp8\.debug\.read_jsonl\(path\)"):
        advice(rows)
    with pytest.raises(TypeError, match=r"products must be what jfp8\.report"):
        advice([], products="model")


@pytest.mark.parametrize(("later", "faults"), [(16, ["stale_history"]), (17, [])])
def test_a_history_forgets_what_saturated_when_it_is_over(later, faults):
    """As long as it holds the amax that saturated, the scale must have grown."""
    same = {"history": 16, "scale_min": 2.0**-7, "scale_max": 2.0**-7}
    rows = [
        row(step=0, amax=7.0, headroom=-1.0, overflow=1e-3, **same),
        row(step=later, amax=3.0, headroom=0.2, **same),
    ]
    assert [f.fault for f in advice(rows).findings] == faults


def test_the_edges_are_told_with_their_worst_sample():
    """The gradient of the logits, the input of the images, and of no other tensor or layer."""
    fields = {"kind": "fprop", "rhs": "e4m3fn[8]", "out": "f32[8]", "fp8": True, "reason": ""}
    fields |= {"recipe": "current", "implementation": "emulate", "times": 1, "flops": 1}
    product = functools.partial(ProductRow, **fields)
    products = Report(
        (
            product(path="stem", layer="Conv", lhs="e4m3fn[8,28,28,4]"),
            product(path="body", layer="Conv", lhs="e4m3fn[8,28,28,4]"),
            product(path="logits", layer="Dense", lhs="e4m3fn[8,16]"),
        )
    )
    told = {("stem", "lhs"): (31.0, 29.0), ("logits", "grad"): (27.0, 28.0)}
    rows = [
        row(path=path, tensor=tensor, step=step, sqnr=told.get((path, tensor), (25.0, 25.0))[step])
        for path in ("stem", "body", "logits")
        for tensor in ("lhs", "rhs", "grad")
        for step in (0, 1)
    ]
    found = advice(rows, products).of("edge_in_fp8")
    assert "first convolution of an image model" in found[0].evidence
    assert "logits" in found[1].evidence
    assert "jfp8.EDGES" in found[0].remedy
    assert [(f.tensor, f.steps, f.evidence.partition("Its ")[2]) for f in found] == [
        ("stem", (0, 1), "lhs has an SQNR of 29 dB at worst."),
        ("logits", (0, 1), "grad has an SQNR of 27 dB at worst."),
    ]
    assert {f.fault for f in advice((), Report(products.rows[1:])).findings} == {"edge_in_fp8"}
    five = dataclasses.replace(products.rows[0], lhs="e4m3fn[8,28,28,5]")
    assert [f.tensor for f in advice((), Report((five, *products.rows[1:]))).findings] == ["logits"]
