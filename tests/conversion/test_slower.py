"""``exempt="slower"``: matmuls that are expected to be slower in FP8 stay in high precision."""

import json
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8.kernels.verdicts import verdict_file
from support.devices import traced_for
from support.doors import DOORS, loss_of, original
from support.models import Model, trained

KEY = jax.random.key(0)
WIDE = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)


def all_slower(reasons):
    assert {reason.partition(" (")[0] for reason in reasons} <= {"exempt: 'slower'"}


def what_is_fp8(report):
    """Whether each layer is FP8; all reasons of the others must be the sizes."""
    all_slower(row.reason for row in report.rows if not row.fp8)
    return {row.path: row.fp8 for row in report.rows}


LINEN = nn.Sequential([nn.Dense(8192), nn.Dense(64), nn.relu])


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.representative(4)
def test_sizes_decide(door, recipe):
    run = lambda p, x: jax.nn.relu(p("small", jnp.tanh(p("large", x))))
    weights = {"large": WIDE, "small": jax.ShapeDtypeStruct((8192, 64), jnp.bfloat16)}
    with traced_for("NVIDIA H100"):
        convert = lambda: jfp8.convert(
            original(door, run, weights, weights), recipe, exempt="slower"
        )
        model = nnx.eval_shape(convert) if door == "nnx" else convert()
    first = {
        "function": lambda: (weights, jax.eval_shape(model.init, weights, WIDE)),
        "linen": lambda: (jax.eval_shape(model.init, KEY, WIDE),),
    }.get(door, lambda: ())()
    if (door, recipe) == ("function", "delayed"):
        assert first[1].keys() == weights.keys()  # for calls with more rows
    # Blocks have no kernels on this JAX: see `test_cost_model.py`.
    large = recipe == "delayed" or jax.__version_info__ >= (0, 11, 2)
    for few, expected in ((WIDE, large), (jax.ShapeDtypeStruct((16, 8192), jnp.bfloat16), False)):
        with traced_for("NVIDIA H100"), warnings.catch_warnings():
            warnings.filterwarnings("error", "On NVIDIA")
            found = what_is_fp8(jfp8.report(model, *first, few))
        assert found == {"large": expected, "small": False}
        # The GPU is that of the conversion, wherever the model is traced.
        assert what_is_fp8(jfp8.report(model, *first, few)) == found


def traced_step(door, model, weights, x):
    """Trace a gradient step, and return the warnings of what FP8 slows down, however often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if door == "nnx":
            graph, state = nnx.split(model)
            loss = jfp8.nnx.value_and_grad(lambda model, x: loss_of(model(x)))
            jax.eval_shape(lambda state, x: loss(nnx.merge(graph, state), x)[1], state, x)
        elif door == "linen":
            variables = jax.eval_shape(model.init, KEY, x)
            loss = lambda variables, x: loss_of(model.apply(variables, x))
            jax.eval_shape(jax.grad(loss), variables, x)
            jax.eval_shape(loss, variables, x)
        else:
            jax.eval_shape(jax.grad(lambda w, x: loss_of(model(w, x))), weights, x)
            jax.eval_shape(model, weights, x)
    return [str(w.message) for w in caught if "FP8 is expected to slow down" in str(w.message)]


@pytest.mark.parametrize("door", DOORS)
def test_training_what_fp8_slows_down_is_told_once(door):
    """Of the layers that the report expects to be slow; nobody who left these out is told."""
    run = lambda p, x: jax.nn.relu(p("b", p("a", jnp.tanh(p("large", x)))))
    shapes = {"large": (8192, 8192), "a": (8192, 256), "b": (256, 8192)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def told(kind, exempt=(), x=WIDE):
        with traced_for(kind):
            convert = lambda: jfp8.convert(
                original(door, run, weights, weights), "current", exempt=exempt
            )
            model = nnx.eval_shape(convert) if door == "nnx" else convert()
            return model, traced_step(door, model, weights, x)

    model, (message,) = told("NVIDIA H200")
    first = {"function": [weights]}.get(door, [])
    if door == "linen":
        first = [jax.eval_shape(model.init, KEY, WIDE)]
    with traced_for("NVIDIA H200"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = jfp8.report(model, *first, WIDE).rows
    for name in ("a", "b"):
        times = [(row.bf16_us, row.expected_us) for row in rows if row.path == name]
        bf16, fp8 = map(sum, zip(*times, strict=True))
        assert f"{name} ({bf16 / fp8:.2f} of its speed in bf16)" in message
    assert message.startswith("On NVIDIA H200, FP8 is expected to slow down a (")
    assert "large (" not in message
    assert told("NVIDIA H200", ("a", "b"))[1] == []
    for line in ("slower", "slower on NVIDIA H200"):
        assert f'"{line}"' in message
        assert told("NVIDIA H200", line)[1] == []
    assert told("NVIDIA H200", "slower on RTX 5090")[1] == []  # on which they are not slow
    assert told("NVIDIA A100")[1] == []  # It has no known rates.


@pytest.mark.skipif(
    jax.config.jax_remat3, reason="this checkpoint does not say what a gradient is with respect to"
)
def test_layers_in_a_loop_are_told_once_at_the_users_line():
    """By Python's default filter, as JAX differentiates the loop several times."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16)
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    f = jfp8.convert(lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0]), "current")
    with traced_for("NVIDIA H100"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        jax.jit(jax.grad(f)).trace(w, x)
    found = [w.filename for w in caught if "FP8 is expected to slow down w (" in str(w.message)]
    assert found == [__file__]


def products(module, x):
    """Of 8 experts with 4096 rows each; by kernels of 1x1, and of 3x3."""
    experts = x.reshape(8, -1, 2048)
    einsum = nn.Einsum((8, 2048, 256), "ecd,edf->ecf", use_bias=False, name="experts")
    image = x.reshape(1, 256, 128, 2048)
    one = nn.Conv(2048, (1, 1), name="one")(image)
    three = nn.Conv(2048, (3, 3), name="three")(image)
    return nn.relu(einsum(experts)).sum() + nn.relu(one).sum() + nn.relu(three).sum()


def test_batched_matmuls_and_convolutions():
    """No GPU convolves in FP8. The experts' products are small, though there are many."""
    x = jax.ShapeDtypeStruct((8 * 4096, 2048), jnp.bfloat16)
    with traced_for("NVIDIA H200"):
        model = jfp8.convert(Model(products), "current", exempt="slower")
    found = what_is_fp8(jfp8.report(model, jax.eval_shape(model.init, KEY, x), x))
    assert found == {"experts": False, "one": True, "three": False}


@pytest.mark.parametrize(("rows", "expected"), [(16384, True), (512, False)])
def test_grouped_matmuls_are_matmuls(rows, expected):
    """Of all rows together with one group each; for the small ones even a launch is too long."""
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.bfloat16)
    f = lambda w, x: jnp.tanh(jax.lax.ragged_dot(x, w, jnp.full(8, rows // 8)))
    f = jfp8.convert(f, "current", exempt="slower on NVIDIA H100")
    assert what_is_fp8(jfp8.report(f, w, x)) == {"w": expected}


def test_layers_of_jfp8_keep_their_recipe():
    """Only layers that `jfp8.convert` converts are left out."""
    x, how = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), {"recipe": "current"}
    linen = nn.Sequential([jfp8.Dense(64, **how), nn.Dense(64)])
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(jfp8.nnx.Linear(64, 64, **how, rngs=rngs), nnx.Linear(64, 64, rngs=rngs))
    with traced_for("NVIDIA H100"):
        linen, model = (jfp8.convert(each, "current", exempt="slower") for each in (linen, model))
    found = what_is_fp8(jfp8.report(linen, jax.eval_shape(linen.init, KEY, x), x))
    assert found == {"layers_0": True, "layers_1": False}
    assert what_is_fp8(jfp8.report(model, x)) == {"layers/0": True, "layers/1": False}


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_attention_that_would_be_slower_is_not_quantized(framework):
    """It has no kernel on any GPU."""
    x, dtype = jax.random.normal(KEY, (2, 32, 256), jnp.float32), jnp.float32
    if framework == "linen":
        layer = nn.MultiHeadDotProductAttention(4, dtype=dtype)
        variables = layer.init(KEY, x)
        run = lambda model, x: model.apply(variables, x)
    else:
        given = {"decode": False, "dtype": dtype, "rngs": nnx.Rngs(0)}
        layer = nnx.Sequential(nnx.MultiHeadAttention(4, 256, 256, **given))
        run = lambda model, x: model(x)
    with traced_for("NVIDIA H100"):
        model = jfp8.convert(layer, "current", exempt="slower", attention=True)
    rows = jfp8.report(*((model, variables) if framework == "linen" else (model,)), x).rows
    assert not any(row.fp8 for row in rows)
    path = "" if framework == "linen" else "layers/0"
    by_attention = {row.reason for row in rows if row.path == path}
    assert by_attention == {"exempt: 'slower' (attention in FP8 has no kernel)"}
    np.testing.assert_array_equal(run(model, x), run(layer, x))


@pytest.mark.slow
def test_a_model_that_is_too_small_is_the_original():
    """Its results and gradients are those of the original; its histories stay empty."""
    original = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8), nn.relu])
    x = jax.random.normal(KEY, (16, 24))
    with traced_for("NVIDIA H100"):
        model = jfp8.convert(original, "delayed", exempt="slower")
    variables = model.init(KEY, x)
    params = variables["params"]
    loss = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)
    plain = lambda params: jnp.mean(original.apply({"params": params}, x) ** 2)
    assert loss(variables, x) == plain(params) > 0
    state = trained(loss, variables, x, steps=2, lr=0.1)
    for _ in range(2):
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(plain)(params))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, state.params, params)
    histories = jax.tree.leaves(state.variables["fp8"])
    assert len(histories) > 4
    assert not any(jnp.any(amaxes) for amaxes in histories)


def test_a_card_may_be_named(monkeypatch, tmp_path):
    """It decides anywhere, without what was measured on a machine that has one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, kind = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), "NVIDIA H200"
    f = lambda w, x: jnp.tanh(x @ w)
    fp8 = lambda line: what_is_fp8(jfp8.report(jfp8.convert(f, "current", exempt=line), x, x))
    assert fp8(("slower on NVIDIA H200",)) == {"w": True}
    path = verdict_file(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    timed = {"bf16": 1.0, "current": 2.0, "delayed": 2.0}
    layers = {name: {"us": {"4096x4096": us}} for name, us in timed.items()}
    path.write_text(json.dumps({"kernels": {}, "layers": layers}))
    with traced_for(kind):
        assert fp8("slower") == {"w": False}
    assert fp8("slower on NVIDIA H200") == fp8("slower on H200") == {"w": True}
    for card, hint in (
        ("NVIDIA H900", " Did you mean 'H200'?"),
        ("RTX 5090 Laptop", ""),
        (" ", ""),
    ):
        known = f"'{card}' is no card that jfp8 knows.{hint} Cards with known rates: B200, "
        with pytest.raises(ValueError, match=re.escape(known)):
            jfp8.convert(f, exempt=f"slower on {card}")
    with pytest.raises(ValueError, match="exempt has 'slower' and 'slower on H100': give one"):
        jfp8.convert(f, exempt=("slower", "slower on H100"))


def test_the_gpu_must_be_known():
    known = r"known rates: .*H100.*RTX 5090; and JAX traces for '{}' here. Convert where"
    for convert in (
        jfp8.convert,
        lambda m, exempt: jfp8.initialize(m, optax.sgd(1), exempt=exempt),
    ):
        with pytest.raises(ValueError, match=known.format("cpu")):
            convert(LINEN, exempt=(*jfp8.EDGES, "slower"))
    with traced_for("NVIDIA A100"), pytest.raises(ValueError, match=known.format("NVIDIA A100")):
        jfp8.convert(LINEN, exempt="slower")
    with pytest.raises(ValueError, match="The pattern 'slower' matches no layer"):
        jfp8.quantize_params({"params": {"a": {"kernel": jnp.ones((8, 8))}}}, exempt="slower")
