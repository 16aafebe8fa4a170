"""`jfp8.report`: every product of a model, with numbers worked out by hand."""

import dataclasses
import html
import inspect
import itertools
import json
import re
import warnings
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jfp8
from jfp8.conversion.layer_tree import tree_lines
from jfp8.conversion.product_rows import ProductRow
from jfp8.kernels.cost_model import ON_ADA, expected, work_of
from jfp8.kernels.rates import RATES
from jfp8.recipes.block_scaling import MXFP8BlockScaling
from jfp8.recipes.nvfp4 import NVFP4BlockScaling
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.rowwise import RowwiseScaling
from jfp8.tracing.notes import notes_of
from support.devices import traced_for
from support.interpreter import cudnn_known
from support.models import Model

KEY = jax.random.key(0)
CURRENT = Float8CurrentScaling()
LOGITS = "exempt: a layer whose result the model returns: the final logits"
NO_LAYER = "computed by no layer that can be converted"
X = jnp.ones((4, 8))


def report(model, *inputs, **kwargs):
    return jfp8.report(model, jax.eval_shape(model.init, KEY, *inputs), *inputs, **kwargs)


def product(path: str, kind: str = "fprop", fp8: bool = True, **other) -> ProductRow:
    """A product of a layer of 8 features, as the report finds it."""
    lhs, rhs = ("e4m3fn[4,8]", "e4m3fn[8,8]") if fp8 else ("bf16[4,8]", "bf16[8,8]")
    fields = {
        "layer": "Dense",
        "lhs": lhs,
        "rhs": rhs,
        "out": "f32[4,8]",
        "times": 1,
        "flops": 512,
        "recipe": "current" if fp8 else "",
        "implementation": "emulate",
        "reason": "",
        "cuda": "xla" if fp8 else "",
    }
    return ProductRow(path=path, kind=kind, fp8=fp8, **{**fields, **other})


def counted(r, *fields) -> Counter:
    """How often there is a product with these fields."""
    found = Counter()
    for row in r.rows:
        found[tuple(getattr(row, f) for f in fields)] += row.times
    return found


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(3)(x)


def test_rows_of_an_mlp():
    """x f32[4, 8] -> 16 -> 3: 1024 FLOPs for each product of the first layer, 384 of the second."""

    names = ("lhs", "rhs", "out")
    fp8 = lambda kind, *of: product("Dense_0", kind, flops=1024, **dict(zip(names, of)))
    how = {"implementation": "jax", "reason": LOGITS, "flops": 384}
    plain = lambda kind, *of: product("Dense_1", kind, False, **how, **dict(zip(names, of)))
    r = report(jfp8.convert(Mlp(), CURRENT), X)
    assert r.rows[0] == fp8("fprop", "e4m3fn[4,8]", "e4m3fn[8,16]", "f32[4,16]")
    assert r.rows[1] == plain("forward", "f32[4,16]", "f32[16,3]", "f32[4,3]")
    assert r.rows[-1] == fp8("wgrad", "e4m3fn[4,8]", "e5m2[4,16]", "f32[8,16]")
    assert len(r.rows) == 5
    for row in r.rows[2:4]:  # by the weight and by the input; which way round is JAX's choice
        assert row == plain("backward", row.lhs, row.rhs, row.out)
    assert {row.out for row in r.rows[2:4]} <= {"f32[4,16]", "f32[16,3]", "f32[3,16]"}
    assert r.flops == 2 * 1024 + 3 * 384
    assert r.fp8_fraction == 2048 / 3200
    assert r.unconverted == r.rows[1:4]
    assert r.summary() == "64.0 % of 3.2 kFLOPs are FP8: 2 of 5 products."
    data = json.loads(r.to_json())
    assert data == json.loads(json.dumps(r.to_dict()))
    assert (data["fp8_fraction"], data["flops"]) == (r.fp8_fraction, 3200)
    assert tuple(ProductRow(**row) for row in data["products"]) == r.rows


def test_an_unconverted_model_has_no_fp8():
    """Its results are differentiated in an object, too, that is no pytree."""

    @dataclasses.dataclass
    class Output:
        logits: jax.Array
        name: str = "normal"

    wrapped = Model(lambda module, x: {"out": Output(Mlp(name="mlp")(x)), "more": [None, 3.0]})
    r = report(wrapped, X)
    assert r.fp8_fraction == 0
    assert len(r.unconverted) == 5
    assert all(row.reason.startswith(NO_LAYER) for row in r.rows)
    assert counted(r, "path", "kind") == {
        ("mlp/Dense_0", "forward"): 1,
        ("mlp/Dense_0", "backward"): 1,  # the input needs no gradient
        ("mlp/Dense_1", "forward"): 1,
        ("mlp/Dense_1", "backward"): 2,
    }


def test_loops_in_loops_multiply():
    def scanned(run, length, name):
        stacked = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Model, length=length, **stacked)(run, name=name)

    inner = lambda module, x, _: (nn.relu(nn.jit(nn.Dense)(8, name="dense")(x)), None)
    outer = lambda module, x, _: scanned(inner, 2, "inner")(x, None)
    model = Model(lambda module, x: scanned(outer, 3, "outer")(x, None)[0])
    r = report(jfp8.convert(model, CURRENT, exempt=()), X)
    assert {row.kind: (row.times, row.flops) for row in r.rows} == {
        "fprop": (6, 6 * 512),
        "dgrad": (6, 6 * 512),
        "wgrad": (6, 6 * 512),
    }
    assert {row.path for row in r.rows} == {"outer/inner/dense"}


@pytest.mark.slow
def test_rematerialized_products_run_again():
    r = report(jfp8.convert(nn.Sequential([nn.remat(Mlp)(), nn.Dense(3)]), CURRENT), X)
    found = counted(r, "path", "kind")
    assert found["layers_0/Dense_0", "fprop"] == 2
    assert found["layers_0/Dense_1", "wgrad"] == 1
    assert found["layers_1", "forward"] == 1


@pytest.mark.parametrize(
    ("layer", "windows"),
    [
        (nn.Conv(16, (3, 3), strides=2), 4 * 4),
        (nn.Conv(16, (3, 3), strides=2, padding="VALID"), 3 * 3),
        (nn.Conv(16, (3, 3), padding="VALID", feature_group_count=2), 6 * 6 / 2),
        (nn.Conv(16, (3, 3), padding="VALID", kernel_dilation=2), 4 * 4),
        (nn.ConvTranspose(16, (3, 3), strides=(2, 2), padding="VALID"), 8 * 8),
    ],
    ids=["strided", "strided VALID", "grouped VALID", "dilated VALID", "transposed"],
)
def test_the_three_products_of_a_convolution_count_alike(layer, windows):
    """2 * results * taps * channels (pixels if transposed); XLA counts the same without padding."""
    x = jnp.ones((1, 8, 8, 8))
    layer = layer.clone(use_bias=False)
    model = nn.Sequential([nn.LayerNorm(), layer, jnp.sum])  # whose parameters need a dgrad
    variables = jax.eval_shape(model.init, KEY, x)
    expected = 2 * windows * 16 * 9 * 8
    if layer.padding == "VALID":
        alone = jax.jit(layer.apply).lower({"params": variables["params"]["layers_1"]}, x)
        assert alone.cost_analysis()["flops"] == expected
    rows = jfp8.report(model, variables, x).rows
    assert [row.flops for row in rows] == [expected] * 3
    rows = jfp8.report(jfp8.convert(model, CURRENT, exempt=()), variables, x).rows
    assert {row.kind: row.flops for row in rows} == dict.fromkeys(
        ["fprop", "dgrad", "wgrad"], expected
    )


def test_expected_times_of_a_known_gpu():
    """As `cost_model` has them: of an L40S with its costs, in bf16 where that is chosen."""
    model = nn.Sequential([jfp8.Dense(4096), jfp8.Dense(128), jfp8.Dense(16)])
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    variables = jax.eval_shape(model.init, KEY, x)
    assert "Expected" not in jfp8.report(model, variables, x).summary()
    with traced_for("NVIDIA L40S"):
        r = jfp8.report(model, variables, x)
    found = {row.path: (row.cuda.split(":")[0], row) for row in r.rows}
    for name, n, k in (("layers_0", 4096, 4096), ("layers_1", 128, 4096), ("layers_2", 16, 128)):
        times = expected(work_of((4096, n, k)), RATES["L40S"], "one", ON_ADA)
        used, row = found[name]
        fastest = min(times.fp8, times.rounded)
        assert used == ("xla" if fastest == times.fp8 else "bf16")
        assert row.expected_us == pytest.approx(1e6 * fastest)
        assert row.bf16_us == pytest.approx(1e6 * times.bf16)
    first = r.rows[0]
    assert (f"{first.expected_us:.3g}", f"{first.bf16_us:.3g}") == ("499", "664")


def test_the_gain_is_that_of_all_products():
    """By Amdahl's law: ten equal layers, of which one or none is converted."""

    class Ten(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(10):
                x = nn.relu(nn.Dense(4096, use_bias=False, dtype=jnp.bfloat16, name=f"w{i}")(x))
            return x

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    with traced_for("NVIDIA H100"):
        model = jfp8.convert(Ten(), CURRENT, only="w3")
        r = jfp8.report(model, jax.eval_shape(model.init, KEY, x), x)
        plain = jfp8.report(Ten(), jax.eval_shape(Ten().init, KEY, x), x)
    of_layer = [row for row in r.rows if row.path == "w3"]
    layer = sum(row.bf16_us for row in of_layer) / sum(row.expected_us for row in of_layer)
    assert layer > 1.2
    share = 3 / (3 * 9 + 2)  # the first layer has no dgrad
    gain = 1 / (1 - share + share / layer)
    assert f"Expected by a cost model: {gain:.2f} times as fast as bf16" in str(r)
    (line,) = [line for line in str(r).splitlines() if line.startswith("w3")]
    assert line.endswith(f" {layer:.2f}x")
    assert sum(line.endswith("x") for line in str(r).splitlines()) == 1
    assert "Expected" not in str(plain)
    assert all(row.expected_us == row.bf16_us == of_layer[0].bf16_us for row in plain.rows)


def test_a_step_is_its_matmuls_the_passes_between_them_and_adamw():
    """By hand: of an L40S, whose memory moves 0.9 * 0.864 TB/s."""
    model = nn.Sequential([jfp8.Dense(4096, recipe=CURRENT), nn.relu, nn.Dense(512)])
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    variables = jax.eval_shape(model.init, KEY, x)
    assert jfp8.report(model, variables, x).step_gain is None
    with traced_for("NVIDIA L40S"):
        r = jfp8.report(model, variables, x)
        plain = jfp8.report(nn.Dense(512), jax.eval_shape(nn.Dense(512).init, KEY, x), x)
    us = lambda moved: pytest.approx(moved / (0.9 * 0.864e6))
    parameters = 4096 * 4096 + 4096 + 4096 * 512 + 512
    between, matmuls = us(9.4 * 4096 * (4096 + 512)), {}
    for row in r.rows:
        matmuls.setdefault(row.fp8, []).append((row.expected_us, row.bf16_us))
    totals = {narrow: tuple(map(sum, zip(*each))) for narrow, each in matmuls.items()}
    assert totals[False][0] == totals[False][1]
    assert r.step == {
        "FP8 matmuls": totals[True],
        "other matmuls": totals[False],
        "norms and activations": (between, between),
        "AdamW": (us(38 * parameters), us(36 * parameters)),
    }
    here, in_bf16 = (sum(part[i] for part in r.step.values()) for i in (0, 1))
    assert r.step_gain == pytest.approx(in_bf16 / here)
    said = " ".join(str(r).split())
    assert f"a training step with AdamW: {in_bf16 / here:.2f} times as fast as in bf16" in said
    assert plain.step
    assert plain.step_gain is None  # nothing is FP8
    assert "training step" not in str(plain)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_cudnn_counts(causal):
    """Two matmuls forward, five backward; a causal mask leaves out half of each."""
    q = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    how = {"is_causal": causal, "implementation": "cudnn"}
    attend = lambda qkv: jax.nn.dot_product_attention(*qkv, **how)
    with traced_for("NVIDIA H100"), cudnn_known():
        rows = jfp8.report(attend, (q, k, k)).rows
    one = 2 * (2 * 256 * 8 * 64) * 512 // (2 if causal else 1)
    assert [(row.kind, row.flops) for row in rows] == [("forward", 2 * one), ("backward", 5 * one)]
    assert {row.implementation for row in rows} == {"cudnn"}
    assert all(row.reason.startswith("attention by a function") for row in rows)
    assert all(row.expected_us > 1e6 * row.flops / 738e12 / 0.55 for row in rows)


def test_mi300_says_that_it_has_other_formats():
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    for recipe, backend in (("current", "xla"), ("mxfp8", "emulate")):
        layer = jfp8.Dense(256, recipe=recipe)
        variables = jax.eval_shape(layer.init, KEY, x)
        with traced_for("AMD Instinct MI300X"):
            (how,) = {row.cuda for row in jfp8.report(layer, variables, x).rows}
        assert how == f"{backend}: AMD Instinct MI300X has FP8 tensor cores for fnuz formats alone"


def test_a_model_that_is_expected_to_be_slower_is_told_once():
    """MXFP8 has no products on Hopper, and 512 x 512 is small; published times say so, too."""
    large, small = (jax.ShapeDtypeStruct((n, n), jnp.bfloat16) for n in (8192, 512))

    def seen(recipe, x, kind="NVIDIA H200"):
        model = nn.Sequential([jfp8.Dense(x.shape[1], recipe=recipe) for _ in range(2)])
        variables = jax.eval_shape(model.init, KEY, x)
        with traced_for(kind), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "JAX .* has none of jfp8's Pallas kernels")
            report = jfp8.report(model, variables, x)
        text = " ".join(report._repr_html_().split())
        assert all(str(w.message) in html.unescape(text) for w in caught)
        head, _, line, *_ = str(report).splitlines()
        gain = float(line.split()[-1].rstrip("x")) if head.endswith("gain") else None
        total = re.findall(r"Expected by a cost model: ([\d.]+) times as fast", report.summary())
        assert total == ([] if gain is None else [f"{gain:.2f}"])  # both layers are alike
        return gain, [str(w.message) for w in caught]

    fast, messages = seen("current", large)
    assert 1.5 < fast < 1.8
    assert messages == []
    for recipe, x, (least, most) in (("mxfp8", large, (0.8, 0.9)), ("current", small, (0.1, 0.5))):
        gain, (message,) = seen(recipe, x)
        assert least < gain < most
        assert message.startswith("On NVIDIA H200, FP8 is expected to slow down layers_0 (")
        assert f"layers_1 ({gain:.2f} of its speed in bf16)" in message
    assert seen("mxfp8", large, "NVIDIA A100") == (None, [])  # It has no known rates.


class Raw(nn.Module):
    """Products that no layer computes, of arrays that depend on data."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        w = x[:1] * self.param("w", nn.initializers.ones, (8, 8))
        x = x @ w  # RAW 1
        x = jnp.einsum("ab,bc->ac", x, w)  # RAW 2
        return jnp.dot(x, w)  # RAW 3


@pytest.mark.slow
def test_raw_products_are_listed_with_their_place_and_never_as_fp8():
    r = report(jfp8.convert(Raw(), DelayedScaling()), X)
    assert {row.path for row in r.rows if row.fp8} == {"Dense_0"}
    lines, first = inspect.getsourcelines(Raw)
    places = [first + i for i, line in enumerate(lines) if "# RAW" in line]
    raw = [row for row in r.rows if not row.fp8]
    forward = [row.reason for row in raw if row.kind == "forward"]
    assert forward == [f"{NO_LAYER}: test_report.py:{n}" for n in places]
    assert {row.reason for row in raw if row.kind == "backward"} == set(forward)
    assert len(raw) == 9
    assert r.fp8_fraction == 2 / 11
    assert all((row.recipe, row.implementation) == ("", "jax") for row in raw)


def test_products_of_quantized_values_in_the_users_own_code_are_not_fp8():
    weight = lambda module: module.param("w", nn.initializers.ones, (8, 8))
    fake = Model(lambda module, x: jfp8.round_to_format(x, jfp8.E4M3FN) @ weight(module))
    assert report(fake, X).fp8_fraction == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_remat_in_a_loop_brings_constants_as_large_as_operands(name):
    """Partial evaluation hands a product what it was compiled with as further operands."""

    layers = lambda module, x, _: (x + nn.Dense(8)(nn.relu(nn.Dense(32)(x))), None)
    block = nn.remat(Model, prevent_cse=False)
    scanned = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=3)
    stack = Model(lambda module, x: scanned(layers)(x, None)[0])
    r = report(jfp8.convert(stack, name, exempt=()), jnp.ones((64, 8)))
    assert r.fp8_fraction == 1
    forward = [row for row in r.rows if row.kind == "fprop"]
    assert forward
    for row in forward:
        assert row.lhs.partition("[")[2] in ("64,8]", "64,32]", "1,64,8]", "1,64,32]"), row
        assert row.rhs.partition("[")[2] in ("8,32]", "32,8]", "1,8,32]", "1,32,8]"), row


def test_products_of_the_library_itself_are_not_blamed_on_its_files():
    """A router is in f32. Whoever reads the report looks for a line of the own program."""
    r = report(jfp8.MoE(2, 16, recipe=CURRENT), jnp.ones((1, 4, 8)))
    reasons = [row.reason for row in r.unconverted]
    assert reasons
    assert all(reason.startswith(NO_LAYER) and "moe.py" not in reason for reason in reasons)


def test_regions():
    model = nn.Sequential([nn.Dense(8), jfp8.Dense(8), jfp8.Dense(8, recipe=RowwiseScaling())])
    variables = jax.eval_shape(model.init, KEY, X)
    assert {row.path for row in jfp8.report(model, variables, X).rows if row.fp8} == {
        "layers_1",
        "layers_2",
    }
    with jfp8.autocast(CURRENT):
        r = jfp8.report(model, variables, X)
    assert r.fp8_fraction == 1
    recipes = {row.path: row.recipe for row in r.rows}
    assert recipes == {"layers_0": "current", "layers_1": "current", "layers_2": "rowwise"}


@pytest.mark.slow
def test_a_product_counts_as_fp8_only_if_both_operands_are_narrow():
    """The E8M0 scales of the other operand are no operand."""
    recipe = RowwiseScaling(high_precision_wgrad=True)
    rows = report(jfp8.convert(Mlp(), recipe, exempt=()), X).rows
    assert {(row.kind, row.fp8) for row in rows} == {
        ("fprop", True),
        ("dgrad", True),
        ("wgrad", False),
    }
    wgrad = [row for row in rows if row.kind == "wgrad"]
    assert {row.reason for row in wgrad} == {"the recipe keeps an operand in high precision"}
    assert (wgrad[-1].lhs, wgrad[-1].rhs) == ("f32[4,8]", "f32[4,16]")
    mx = MXFP8BlockScaling().products()
    for half, shapes in (
        ("lhs", ("f32[32,32]", "e4m3fn[32,16]")),
        ("rhs", ("e4m3fn[32,32]", "f32[32,16]")),
    ):
        fprop = dataclasses.replace(mx.fprop, **{half: None})
        recipe = jfp8.recipes.PerOperand(fprop=fprop, dgrad=mx.dgrad, wgrad=mx.wgrad)
        row = report(jfp8.convert(Mlp(), recipe, exempt=()), jnp.ones((32, 32))).rows[0]
        assert (row.kind, row.fp8, row.lhs, row.rhs) == ("fprop", False, *shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "operands"),
    [
        (MXFP8BlockScaling(), ("e4m3fn[32,32]", "e4m3fn[32,16]")),
        (NVFP4BlockScaling(), ("e2m1fn[32,32]", "e2m1fn[32,16]")),
        (DelayedScaling(accumulation="hopper"), ("e4m3fn[32,32]", "e4m3fn[32,16]")),
        (CURRENT, ("e4m3fn[32,32]", "e4m3fn[32,16]")),
    ],
    ids=["mxfp8", "nvfp4", "hopper", "current"],
)
def test_flops_are_those_of_the_product_whatever_computes_it(recipe, operands):
    r = report(jfp8.convert(Mlp(), recipe, exempt=()), jnp.ones((32, 32)))
    assert (r.rows[0].lhs, r.rows[0].rhs) == operands
    first, second = 2 * 32 * 32 * 16, 2 * 32 * 16 * 3
    assert {(row.path, row.kind): row.flops for row in r.rows} == {
        ("Dense_0", "fprop"): first,
        ("Dense_0", "wgrad"): first,
        ("Dense_1", "fprop"): second,
        ("Dense_1", "dgrad"): second,
        ("Dense_1", "wgrad"): second,
    }
    assert r.fp8_fraction == 1


@pytest.mark.slow
def test_nothing_is_left_behind():
    """The notes of a report are not in what is traced after it, nor reused from before it."""
    model = jfp8.convert(Mlp(), CURRENT)
    variables = jax.jit(model.init)(KEY, X)
    text = lambda: jax.jit(model.apply).lower(variables, X).as_text(debug_info=True)
    before = text()
    assert jfp8.report(model, variables, X).rows[0].path == "Dense_0"
    assert "path=" not in text() + before
    assert jfp8.report(model, variables, X).rows[0].recipe == "current"


@pytest.mark.slow
def test_static_arguments_rngs_methods_and_other_collections():
    class Net(nn.Module):
        def setup(self):
            self.dense, self.norm, self.head = nn.Dense(8), nn.BatchNorm(), nn.Dense(2)
            self.drop = nn.Dropout(0.5)

        def __call__(self, x, train: bool):
            return self.head(self.encode(x, train=train))

        def encode(self, x, train):
            x = self.norm(self.dense(x), use_running_average=not train)
            noise = jax.random.normal(self.make_rng("noise"), x.shape) if train else 0.0
            return self.drop(nn.relu(x) + noise, deterministic=not train)

    model = jfp8.convert(Net(), DelayedScaling())
    variables = model.init(KEY, X, False)
    layers = lambda *args, **kwargs: sorted(
        {row.path for row in jfp8.report(model, variables, *args, **kwargs).rows}
    )
    assert layers(X, train=True, rngs={"noise": KEY}) == ["dense", "head"]
    assert layers(X, False) == ["dense", "head"]
    assert layers(X, False, method="encode") == layers(X, False, method=Net.encode) == ["dense"]


def test_text():
    """A line a layer; shares of 3200 FLOPs: 2 * 1024 and 3 * 384. Verbose, a line a product."""
    r = report(jfp8.convert(Mlp(), CURRENT), X)
    assert str(r).splitlines() == [
        "layer    fprop  dgrad  wgrad  FLOPs    recipe   on CUDA",
        "-" * 55,
        "Dense_0  FP8           FP8     64.0 %  current  xla",
        "Dense_1  f32    f32    f32     36.0 %",
        "",
        "In high precision:",
        f"  {LOGITS}",
        "    Dense_1",
        "",
        "64.0 % of 3.2 kFLOPs are FP8: 2 of 5 products.",
    ]
    lines = r.verbose().splitlines()
    assert lines[0].split() == ["layer", "product", "lhs", "rhs", "result", "times", "FLOPs", "how"]
    assert lines[2].split() == [
        *("Dense_0", "fprop", "e4m3fn[4,8]", "e4m3fn[8,16]", "f32[4,16]", "1", "1.02", "k"),
        *("current,", "emulate;", "on", "CUDA", "xla"),
    ]
    assert lines[3].endswith(f"high precision: {LOGITS}")
    assert lines[-1] == "64.0 % of 3.2 kFLOPs are FP8: 2 of 5 products."
    assert len(lines) == 2 + 5 + 1


def test_notes_of_a_name_stack():
    """The innermost of each kind; a new path forgets what was noted about another layer."""
    stack = "jit(f)/path=A;/layer=Dense;/recipe=current;/dot/path=A/b;/layer=Conv;/reason=no, it;/x"
    assert notes_of(stack) == {"path": "A/b", "layer": "Conv", "reason": "no, it"}
    assert notes_of("jit(f)/xpath=A;/dot") == {}
    # A matmul that stays keeps its own stack, behind what the conversion said of it.
    again = "path=A/b;/reason=exempt: 'A/b';/M/path=A;/layer=M;/path=A/b;/layer=Dense;/dot"
    assert notes_of(again) == {"path": "A/b", "layer": "Dense", "reason": "exempt: 'A/b'"}


def test_layers_that_are_alike_are_one_line():
    """Four blocks, of which one has a layer in another recipe."""
    rows = [product(f"block_{i}/up") for i in range(4)]
    rows += [product(f"block_{i}/down", recipe="mxfp8" if i == 1 else "current") for i in range(4)]
    rows += [product(f"block_{i}/up", "wgrad", out="f32[8,8]") for i in range(4)]
    table = str(jfp8.Report(tuple(rows))).splitlines()[2:-2]
    assert [line.split() for line in table] == [
        ["block_{0,2,3}"],
        ["up", "FP8", "FP8", "50.0", "%", "current", "xla"],
        ["down", "FP8", "25.0", "%", "current", "xla"],
        ["block_1"],
        ["up", "FP8", "FP8", "16.7", "%", "current", "xla"],
        ["down", "FP8", "8.3", "%", "mxfp8", "xla"],
    ]


def test_marks_say_what_of_a_layer_is_fp8():
    """Of plain products the gradient is told by its dimensions; of squares by their number."""
    backward = lambda path, out: product(path, "backward", False, out=out)
    dense = [product("dense", "forward", False, lhs="bf16[4,16]", rhs="bf16[16,8]")]
    rows = [
        *(*dense, backward("dense", "f32[8,16]")),  # transposed, as JAX may write it
        *(product("square", "forward", False, lhs="bf16[8,8]"), backward("square", "f32[8,8]")),
        *(product("both"), product("both", "forward", False)),
        *(product("wide"), product("wide", "wgrad", False, lhs="e4m3fn[4,8]", rhs="f32[4,8]")),
    ]
    table = str(jfp8.Report(tuple(rows))).splitlines()
    starts = [table[0].index(head) for head in ("fprop", "dgrad", "wgrad", "FLOPs")]
    cells = lambda line: [line[a:b].strip() for a, b in itertools.pairwise(starts)]
    assert {line.split()[0]: cells(line) for line in table[2:6]} == {
        "dense": ["bf16", "", "bf16"],
        "square": ["bf16", "", "bf16"],
        "both": ["FP8, bf16", "", ""],
        "wide": ["FP8", "", "f32"],
    }


def test_each_reason_is_said_once_with_its_layers():
    plain = lambda path, reason: product(path, "forward", False, reason=reason)
    rows = [plain(f"block_{i}", f"{NO_LAYER}: model.py:{n}") for i in range(3) for n in (7, 9)]
    rows += [plain("", f"{NO_LAYER}: train.py:3"), plain("head", LOGITS)]
    small = "bf16: FP8 does not pay for a product this small"
    rows += [product("up", cuda=small), product("down", cuda="mosaic_gpu: xla does not")]
    text = str(jfp8.Report(tuple(rows)))
    assert text.split("\n\n")[1:-1] == [
        f"In high precision:\n  {NO_LAYER}\n"
        "    block_{0..2} (model.py:7, model.py:9), (the model itself) (train.py:3)\n"
        f"  {LOGITS}\n    head",
        "FP8 that an NVIDIA GPU computes in bf16:\n"
        "  FP8 does not pay for a product this small\n    up",
    ]


def test_reasons_that_differ_in_shapes_are_one():
    """The wgrad of either layer sums over two blocks, and its scales have another shape."""
    r = report(jfp8.convert(Mlp(), MXFP8BlockScaling(), exempt=()), jnp.ones((64, 32)))
    assert len({row.cuda for row in r.rows if row.kind == "wgrad"}) == 2
    title, text, layers = str(r).split("\n\n")[1].splitlines()
    assert title == "FP8 that an NVIDIA GPU computes in bf16:"
    assert text == "  scales that vary along the contraction and cannot be applied after it"
    assert layers == "    Dense_0, Dense_1"


def test_text_is_at_most_100_columns_wide():
    path = "/".join(f"a_module_with_a_name_that_goes_on_and_on_{name * 40}" for name in "abc")
    rows = [product(f"{path}/{c}", "forward", False, reason=LOGITS * 3) for c in "abcdefghijkl"]
    rows += [product(path, looks_ahead=True, recipe="a_recipe_of_the_user")]
    lines = str(jfp8.Report(tuple(rows), causal=True)).splitlines()
    words = [line for line in lines if " " in line.strip()]
    assert max(map(len, words)) <= 100
    assert any(line.split()[:2] == ["a", "bf16"] for line in lines)
    assert "and 4 more" in " ".join(lines)


def test_html_is_escaped():
    row = product("<b>layer</b>", "forward", False, reason="a & b <script>")
    text = jfp8.Report((row,))._repr_html_()
    layers, products = text.split("<details>")
    for part in (layers, products):
        assert "&lt;b&gt;layer" in part
        assert "a &amp; b &lt;script&gt;" in part
    assert "<b>layer" not in text
    assert "<script>" not in text
    assert "product" in products
    assert products.endswith("</pre></details>")


def test_a_model_without_products():
    r = report(Model(lambda module, x: x * module.param("s", nn.initializers.ones, ())), X)
    assert r.rows == ()
    assert (r.flops, r.fp8_fraction) == (0, 0)
    assert str(r) == "0.0 % of 0 FLOPs are FP8: 0 of 0 products."
    assert "0 of 0 products" in r._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Dense(2),), "variables must be what model.init returned.*got nothing"),
        ((nn.Dense(2), X), "variables must be what model.init returned.*got Array"),
        ((nn.Dense(2), {"kernel": X}, X), "with 'params' in it; got dict"),
        ((nn.Dense, {}, X), "model must be a Flax Linen or NNX module, got the class Dense"),
        ((3,), "model must be a Flax Linen or NNX module, got int"),
        (
            (nn.Sequential([nn.Dense(2)]), {"params": {}}),
            r"jfp8.report\(model, variables, x\).*missing 1 required .* 'inputs'",
        ),
        (
            (nnx.Linear(2, 2, rngs=nnx.Rngs(0)),),
            r"jfp8.report\(model, x\).*missing 1 required .* 'inputs'",
        ),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(TypeError, match=words):
        jfp8.report(*arguments)
    with pytest.raises(TypeError, match=r"^Dense\.__call__.* unexpected .* 'train'"):
        jfp8.report(nn.Dense(2), {"params": {}}, X, train=True)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((0, 1), "block_{0,1}"),
        ((0, 1, 2), "block_{0..2}"),
        ((0, 2, 3, 4, 9), "block_{0,2..4,9}"),
        ((8, 9, 10, 11), "block_{8..11}"),
        (("00", "01", "02"), "block_{00..02}"),
        ((3,), "block_3"),
    ],
)
def test_siblings_that_are_alike_are_one_line(numbers, name):
    """Alike are names that differ in the last number only."""
    blocks = {f"w1_block_{n}": "same" for n in numbers}
    (line, *others) = tree_lines({**blocks, "w2_block_0": "same", "mlp/up": 1, "mlp": 2})
    assert (line.name, line.layers) == (f"w1_{name}", tuple(blocks))
    assert [other.name for other in others] == ["w2_block_0", "mlp", "up"]


def test_alike_are_layers_with_equal_insides():
    """Another value, another name, or nothing at all inside tells them apart."""
    same = {f"{i}/attention/out": "a" for i in range(5)} | {f"{i}/mlp": "b" for i in range(5)}
    layers = {**same, "1/mlp": "c", "2/more": "d", "3": "e"}
    assert [f"{'  ' * line.depth}{line.name}" for line in tree_lines(layers)] == [
        *("{0,4}", "  attention", "    out", "  mlp"),
        *("1", "  attention", "    out", "  mlp"),
        *("2", "  attention", "    out", "  mlp", "  more"),
        *("3", "  attention", "    out", "  mlp"),
    ]
