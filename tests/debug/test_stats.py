"""`debug.stats`: what is measured, against ml_dtypes, and where, under every transformation."""

import dataclasses
import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jfp8
from support.arrays import assert_same, normal
from support.models import Model

P = PartitionSpec
DTYPES = {"E4M3FN": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
MATMUL = (((1,), (0,)), ((), ()))
multiply = partial(jfp8.scaled_dot_general, dimension_numbers=MATMUL, recipe="current")


def only(rows, tensor, path=None):
    (row,) = [r for r in rows if r.tensor == tensor and path in (None, r.path)]
    return row


def stats_of(recipe):
    """Results and statistics of one product, forward and backward, without a model."""

    def run(x, w):
        y, pull_back = jax.vjp(partial(multiply, recipe=recipe), x, w)
        return y, pull_back(jnp.ones_like(y))

    return jax.jit(jfp8.debug.stats(run))


def expected(x, scale, fmt):
    """The statistics of `x` quantized with one scale, in float64 and ml_dtypes."""
    x = np.asarray(x, np.float64)
    finite = np.isfinite(x)
    dtype, top = DTYPES[fmt], float(ml_dtypes.finfo(DTYPES[fmt]).max)
    scale = np.asarray(scale, np.float64)
    stored = np.clip(np.where(finite, x, 0) / scale, -top, top).astype(np.float32).astype(dtype)
    values = stored.astype(np.float64) * scale
    kept = np.where(finite, x, 0)
    error = (values - kept)[finite]
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(np.abs(kept[kept != 0]))).astype(int)
    # Halfway to what would be the next value, 480 or 65536; E5M2's rounds up, to the even one.
    limit = {"E4M3FN": np.nextafter(464.0, 500), "E5M2": 61440.0}[fmt]
    return {
        "count": x.size,
        "amax": np.abs(kept).max(),
        "underflow": np.mean((kept != 0) & (values == 0)),
        "overflow": np.mean(np.abs(kept) >= scale * limit),
        "nonfinite": np.mean(~finite),
        "rms": math.sqrt(np.mean(kept[finite] ** 2)),
        "mse": np.mean(error**2),
        "sqnr": 10 * math.log10(np.sum(kept**2) / np.sum(error**2)),
        "headroom": math.log2(top * scale / np.abs(kept).max()),
        "exponents": {int(e): int(np.sum(exponents == e)) for e in np.unique(exponents)},
    }


def check(row, x, scale, tolerance=2e-5):
    """`row` tells of `x`; sums of n float32 terms are good to about 1e-6, ratios of them less."""
    for name, value in expected(x, scale, row.format).items():
        got = getattr(row, name)
        if name in ("count", "exponents", "underflow", "overflow", "nonfinite", "amax"):
            assert got == pytest.approx(value, rel=1e-6), name
        else:
            assert got == pytest.approx(value, rel=tolerance, abs=1e-5), name


def hard(shape, seed):
    """Values over many decades with some zeros, which underflow under one scale."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10 ** rng.uniform(-7, 1, shape)
    x[rng.random(shape) < 0.1] = 0
    return x.astype(np.float32)


def test_current_scaling_against_ml_dtypes():
    x, w = hard((64, 48), 0), hard((48, 32), 1)
    _, seen = stats_of(jfp8.recipes.Float8CurrentScaling())(x, w)
    rows = seen.rows(step=7)
    assert [(r.tensor, r.products, r.format) for r in rows] == [
        ("rhs", "fprop+dgrad", "E4M3FN"),
        ("lhs", "fprop+wgrad", "E4M3FN"),
        ("grad", "dgrad+wgrad", "E5M2"),
    ]
    for row, tensor in zip(rows, (w, x), strict=False):
        scale = np.float32(np.abs(tensor).max()) / np.float32(448)
        assert row.scale_min == row.scale_max == pytest.approx(scale, rel=1e-7)
        check(row, tensor, scale)
        assert row.underflow > 0.1
        assert row.step == 7
        assert row.recipe == ""
    assert rows[2].amax == 1.0


# In E4M3, and without a scale: 464 is a tie above the largest value, and 2^-10 one above zero, and
# both go to the even neighbor. What is not finite is counted, and left out of the rest.
UNSCALED = [448.0, 463.0, 464.0, 465.0, 1e6, -1e6, 2.0**-10, 2.0**-9, 1.0, np.inf, -np.inf, np.nan]


def test_a_cast_without_a_scale():
    x = np.float32([UNSCALED])
    _, seen = stats_of(jfp8.recipes.Unscaled())(x, np.eye(12, dtype=np.float32))
    row = only(seen.rows(3), "lhs")
    assert (row.overflow, row.underflow, row.nonfinite) == (3 / 12, 1 / 12, 3 / 12)
    assert row.headroom == pytest.approx(math.log2(448 / 1e6), rel=1e-6)
    check(row, x, 1.0)
    assert str(row) == (
        "step 3: lhs: E4M3FN, amax 1e+06, 8.33 % underflow, 25 % overflow, 25 % nonfinite, "
        "SQNR 0.0 dB, headroom -11.12 bits"
    )
    x = np.array([[57344.0, 61439.0, 61440.0, 61441.0]], np.float32)  # the tie is 61440
    _, seen = stats_of(jfp8.recipes.DirectE5M2())(x, np.eye(4, dtype=np.float32))
    assert only(seen.rows(), "lhs").overflow == 2 / 4


def test_squares_neither_overflow_nor_vanish():
    measured = stats_of(jfp8.recipes.Float8CurrentScaling())
    for magnitude in (1e-30, 1e-12, 1.0, 1e25, 0.0):
        x = normal((32, 16)) * np.float32(magnitude)
        row = only(measured(x, normal((16, 8), 1))[1].rows(), "lhs")
        if magnitude:
            check(row, x, np.float32(np.abs(x).max()) / np.float32(448))
            assert 25 < row.sqnr < 40
        else:
            assert (row.amax, row.underflow, row.overflow, row.exponents) == (0, 0, 0, {})
            assert row.headroom == math.inf
            assert math.isnan(row.sqnr)


def test_block_scales_have_a_range_and_one_headroom():
    x = normal((64, 64)) * np.logspace(-6, 0, 64, dtype=np.float32)[:, None]
    recipe = jfp8.recipes.MXFP8BlockScaling()
    _, seen = stats_of(recipe)(x, normal((64, 32), 1))
    rows = [r for r in seen.rows() if r.tensor == "lhs"]
    assert [r.products for r in rows] == ["fprop", "wgrad"]
    blocks = np.abs(x.reshape(64, 2, 32)).max(-1).astype(np.float64)
    scales = 2.0 ** np.ceil(np.log2(blocks / 448))
    fprop = rows[0]
    assert (fprop.scale_min, fprop.scale_max) == (scales.min(), scales.max())
    assert fprop.headroom == pytest.approx(np.log2(448 * scales / blocks).min(), abs=1e-6)
    full = np.repeat(scales, 32, axis=1)
    values = (x / full).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * full
    sqnr = 10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum((values - x) ** 2))
    assert fprop.sqnr == pytest.approx(sqnr, abs=1e-4)


def test_a_block_of_zeros_says_nothing_of_headroom():
    x = normal((32, 32))
    x[:, :16] = 0  # their scales are 0 in NVFP4
    recipe = jfp8.recipes.NVFP4BlockScaling(stochastic_rounding=False)
    _, seen = stats_of(recipe)(x, normal((32, 16), 1))
    row = next(r for r in seen.rows() if r.tensor == "lhs")
    assert row.scale_min == 0 < row.scale_max
    assert abs(row.headroom) < 0.1


def test_large_tensors_have_a_sampled_histogram_and_exact_sums():
    x = normal((512, 256))
    _, seen = stats_of(jfp8.recipes.Float8CurrentScaling())(x, normal((256, 8), 1))
    row = only(seen.rows(), "lhs")
    want = expected(x, np.float32(np.abs(x).max()) / np.float32(448), "E4M3FN")
    assert row.mse == pytest.approx(want["mse"], rel=2e-5)
    total = sum(row.exponents.values())
    assert total <= 16384
    for e, n in want["exponents"].items():
        share, got = n / x.size, row.exponents.get(e, 0) / total
        assert abs(got - share) < 5 * math.sqrt(share / total) + 1e-3


def state_of(model):
    variables = model.init(jax.random.key(0), jnp.ones((1, 32)))
    tx = optax.chain(jfp8.loss_scale(), optax.adam(1e-3))
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


MODEL = nn.Sequential([jfp8.Dense(64), nn.relu, jfp8.Dense(16)])


def train_step(model):
    def loss_fn(variables, x):
        return jnp.mean(model.apply(variables, x) ** 2), {}

    def step(state, x):
        loss, grads = jfp8.value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads), loss

    return step


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
def test_off_the_compiled_program_is_the_same():
    """Also of a function that has been traced with statistics before."""
    step, state, x = train_step(MODEL), state_of(MODEL), normal((16, 32))
    text = lambda: jax.jit(lambda s, x: step(s, x)).lower(state, x).compile().as_text()
    texts = []
    for _ in range(2):  # the text says where it was called from, so that is one place
        texts.append(text())
        jax.jit(jfp8.debug.stats(step))(state, x)
    assert texts[0] == texts[1]
    assert "jfp8_tap" not in str(jax.make_jaxpr(lambda s, x: step(s, x))(state, x))


@pytest.mark.slow
def test_results_are_those_of_the_step_itself():
    """And rows those of every tensor in its order; gradients have the loss scale in them."""
    step, state, x = train_step(MODEL), state_of(MODEL), normal((16, 32))
    results, seen = jax.jit(jfp8.debug.stats(step))(state, x)
    assert_same(jax.jit(step)(state, x), results)
    rows = seen.rows()
    assert [r.name for r in rows] == [
        "layers_0 rhs",
        "layers_0 lhs",
        "layers_2 rhs",
        "layers_2 lhs",
        "layers_2 grad",
        "layers_0 grad",
    ]
    assert [r.order for r in rows] == sorted(r.order for r in rows)
    assert {r.recipe for r in rows} == {"delayed"}
    assert {r.history for r in rows} == {16}
    y = np.asarray(MODEL.apply({"params": state.params}, x), np.float64)
    largest = np.abs(2 * y / y.size).max() * float(state.opt_state[0].loss_scale)
    assert only(rows, "grad", "layers_2").amax == pytest.approx(largest, rel=1e-2)


def stacked(remat, recipe):
    layers = lambda module, x, _: (x + nn.relu(jfp8.Dense(32, recipe=recipe)(x)), None)
    block = nn.remat(Model, prevent_cse=False) if remat else Model
    axes = dict.fromkeys(("params", "fp8", "fp8_sink"), 0)
    scanned = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=5)
    return Model(lambda module, x: scanned(layers, name="blocks")(x, None)[0])


@pytest.mark.representative(1)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("remat", [True, False])
def test_scan_over_layers_gives_a_row_for_each(recipe, remat):
    """Remat computes the forward pass twice, and it is counted once."""
    model = stacked(remat, jfp8.recipes.get(recipe))
    state, x = state_of(model), normal((16, 32))
    results, seen = jax.jit(jfp8.debug.stats(train_step(model)))(state, x)
    assert_same(results, jax.jit(train_step(model))(state, x))
    rows = seen.rows()
    uses = {(r.tensor, r.products) for r in rows}
    assert len(rows) == 5 * len(uses)
    kernels = np.asarray(state.params["blocks"]["Dense_0"]["kernel"])
    for r in rows:
        assert r.path == "blocks/Dense_0"
        assert r.count == (1024 if r.tensor == "rhs" else 512)
        if r.tensor == "rhs":
            assert r.amax == np.abs(kernels[r.index]).max()
        if r.tensor == "lhs" and r.index == (0,):
            assert r.amax == np.abs(x).max()
    grads = [r.amax for r in rows if r.tensor == "grad" and r.products.startswith("dgrad")]
    assert len(set(grads)) == 5


@pytest.mark.slow
def test_a_loop_over_time_is_no_loop_over_layers():
    """The weights of a recurrent cell are the same in each turn."""

    def cell(module, carry, x):
        y = nn.tanh(jfp8.Dense(8, recipe="current")(carry) + x)
        return y, y

    scan = nn.scan(Model, variable_broadcast="params", split_rngs={"params": False})
    model = Model(lambda module, xs: scan(cell)(jnp.ones((4, 8)), xs)[0])
    xs = normal((12, 4, 8))
    variables = model.init(jax.random.key(0), xs)
    loss = lambda v: jnp.sum(model.apply(v, xs) ** 2)
    rows = jax.jit(jfp8.debug.stats(jax.grad(loss)))(variables)[1].rows()
    assert {(r.tensor, r.index) for r in rows} == {("lhs", ()), ("rhs", ()), ("grad", ())}
    assert only(rows, "lhs").count == 12 * 4 * 8


def test_attention_shows_the_operands_of_two_products():
    """Each has the largest element that it has in f32; `dS` is shown times scales."""
    q, k, v, dy = (normal((1, 8, 1, 16), seed) for seed in range(4))
    attend = partial(jfp8.scaled_dot_product_attention, recipe="current")
    run = jax.jit(jfp8.debug.stats(lambda *x: jax.vjp(attend, *x)[1](dy)))
    rows = run(q, k, v)[1].rows()
    tensors = {
        ("scores", "lhs"): q,
        ("scores", "rhs"): k,
        ("context", "lhs"): jnp.ones(1),  # exp(S - max S)
        ("context", "rhs"): v,
        ("context", "grad"): dy,
    }
    found = {(row.path, row.tensor): row.amax for row in rows}
    assert found.pop(("scores", "grad")) > 0
    assert found == pytest.approx({key: float(abs(x).max()) for key, x in tensors.items()})


def test_uses_of_a_layer_are_one_and_those_of_no_layer_are_not():
    layer = jfp8.Dense(8, recipe="current", name="layer")
    params, x = layer.init(jax.random.key(0), normal((4, 8))), normal((4, 8))
    twice = lambda x: layer.apply(params, 50 * layer.apply(params, x))
    inside = Model(lambda module, x: (lambda f: f(50 * f(x)))(jfp8.Dense(8, recipe="current")))
    variables = {"params": {"Dense_0": params["params"]}}
    y, seen = jfp8.debug.stats(inside.apply)(variables, x)
    np.testing.assert_array_equal(y, twice(x))
    assert [(r.path, r.tensor, r.count) for r in seen.rows()] == [
        ("Dense_0", "rhs", 2 * 64),
        ("Dense_0", "lhs", 2 * x.size),
    ]
    assert only(seen.rows(), "lhs").amax == np.abs(50 * layer.apply(params, x)).max()
    run = lambda x, a, b: multiply(multiply(x, a), b)
    _, seen = jfp8.debug.stats(run)(normal((4, 8)), normal((8, 8), 1), normal((8, 8), 2))
    assert [r.tensor for r in seen.rows()] == ["rhs", "lhs", "rhs", "lhs"]


def test_a_branch_that_is_not_taken_has_no_row():
    run = lambda flag, x, w: jax.lax.cond(flag, multiply, jnp.matmul, x, w)
    x, w = normal((4, 8)), normal((8, 4), 1)
    with_stats = jax.jit(jfp8.debug.stats(run))
    assert len(with_stats(jnp.bool_(True), x, w)[1].rows()) == 2
    assert with_stats(jnp.bool_(False), x, w)[1].rows() == ()


def test_vmap_is_taken_together():
    x, w = normal((3, 4, 8)), normal((8, 4), 1)
    x[1] *= 50
    y, seen = jax.jit(jfp8.debug.stats(jax.vmap(multiply, (0, None))))(x, w)
    np.testing.assert_array_equal(y, jax.jit(jax.vmap(multiply, (0, None)))(x, w))
    row = only(seen.rows(), "lhs")
    assert row.count == x.size
    scales = np.abs(x).max((1, 2)) / np.float32(448)
    assert (row.scale_min, row.scale_max) == pytest.approx((scales.min(), scales.max()), rel=1e-6)
    error = sum(expected(a, s, "E4M3FN")["mse"] for a, s in zip(x, scales, strict=True)) / 3
    assert row.mse == pytest.approx(error, rel=2e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_takes_devices_together(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=(P("data"), P()),
        check_vma=check_vma,
    )
    def run(x, w):
        y = partial(multiply, x)
        grad = jax.grad(lambda w: jnp.sum(y(w) ** 2))(w)
        return y(w), grad if check_vma else jax.lax.psum(grad, "data")

    x, w = normal((16, 8)), normal((8, 4), 1)
    x[5] *= 20
    results, seen = jax.jit(jfp8.debug.stats(run))(x, w)
    assert_same(results, jax.jit(run)(x, w))
    row = next(r for r in seen.rows() if r.tensor == "lhs")
    assert row.amax == np.abs(x).max()
    assert row.scale_max == pytest.approx(np.abs(x).max() / 448, rel=1e-6)
    assert row.scale_min < row.scale_max  # each device has its own
    assert row.count % x.size == 0


def test_explicit_meshes():
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        x = jax.device_put(normal((16, 8)), NamedSharding(mesh, P("data")))
        w = jax.device_put(normal((8, 4), 1), NamedSharding(mesh, P()))
        _, seen = jax.jit(jfp8.debug.stats(multiply))(x, w)
        assert only(seen.rows(), "lhs").amax == np.abs(np.asarray(x)).max()


class TwoLayers(nnx.Module):
    def __init__(self, linear):
        self.first = linear(8, 16, rngs=nnx.Rngs(0))
        self.second = linear(16, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def test_nnx_models_in_their_functional_form():
    model = jfp8.convert(TwoLayers(nnx.Linear), exempt=())
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        return jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) ** 2)

    rows = jax.jit(jfp8.debug.stats(jax.grad(loss)))(params, rest, normal((4, 8)))[1].rows()
    assert {r.recipe for r in rows} == {"delayed"}
    assert {(r.path, r.tensor) for r in rows} == {
        (path, tensor) for path in ("first", "second") for tensor in ("lhs", "rhs", "grad")
    }


@pytest.mark.slow
def test_nnx_models_that_a_step_changes():
    """The same updates as without statistics, and names that nobody gave."""

    def step(model, optimizer, x):
        loss, grads = jfp8.nnx.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2))(model, x)
        optimizer.update(model, grads)
        return loss

    losses, states = [], []
    for function in (step, jfp8.debug.stats(step)):
        model = TwoLayers(jfp8.nnx.Linear)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        run = nnx.jit(function)
        run(model, optimizer, normal((4, 8), 1))
        losses.append(run(model, optimizer, normal((4, 8))))
        states.append((nnx.state(model), nnx.state(optimizer)))
    loss, seen = losses[1]
    assert loss == losses[0]
    assert_same(*states)
    rows = seen.rows()
    assert {(r.path, r.tensor) for r in rows} == {
        (path, tensor) for path in ("first", "second") for tensor in ("lhs", "rhs", "grad")
    }
    assert only(rows, "lhs", "first").amax == np.abs(normal((4, 8))).max()


def test_rows_inside_of_jit_are_refused():
    run = jfp8.debug.stats(lambda x: multiply(x, x.T))
    with pytest.raises(TypeError, match="call rows\\(\\) outside jax.jit"):
        jax.jit(lambda x: run(x)[1].rows())(normal((4, 4)))


def test_rows_are_written_as_json_lines_and_read_back(tmp_path):
    x = normal((4, 8))
    x[0, 0] = np.nan
    _, seen = stats_of(jfp8.recipes.Unscaled())(x, normal((8, 4), 1))
    rows = (*seen.rows(1), dataclasses.replace(seen.rows(2)[0], sqnr=math.inf, index=(3,)))
    path = tmp_path / "stats.jsonl"
    jfp8.debug.write_jsonl(path, rows[:2])
    jfp8.debug.write_jsonl(path, rows[2:])
    assert jfp8.debug.read_jsonl(path) == rows
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match=f"line {len(rows) + 1}"):
        jfp8.debug.read_jsonl(path)
