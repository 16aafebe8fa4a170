"""Grouped products in FP8 against a loop over groups of fake-quantized matrices, in numpy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jfp8
from jfp8 import ScaledArray, quantizers, recipes
from jfp8.kernels.xla import f8_dot
from jfp8.products.operation import Options, State
from jfp8.products.ragged.dot import observed_ragged_dot, scaled_ragged_dot
from jfp8.products.ragged.row_tiles import lay_out
from jfp8.recipes.per_operand import PerOperand
from jfp8.recipes.per_tensor import Float8CurrentScaling
from jfp8.recipes.product import Product
from jfp8.scaling.sink import decode_amax, init_sink
from jfp8.tracing.devices import Gpu
from support.arrays import cosine, relative_error
from support.devices import pretend, traced_for
from support.fake_quantization import (
    E4M3,
    E5M2,
    VARIANTS,
    fake_quantized,
    per_block,
    per_tensor,
    scale_for,
    uniform,
)
from support.fake_quantization import oracle as products_of

# A group longer than any block of scales, an empty one, one with a single row; 25 rows of none.
SIZES = (131, 0, 1, 70, 33)
M, K, N = 260, 40, 24


def operands(m=M, k=K, n=N, groups=5, seed=0):
    """f32 lhs, rhs and gradient, in 256ths. The groups' matrices differ in magnitude."""
    rng = np.random.default_rng(seed)
    shapes = ((m, k), (groups, k, n), (m, n))
    lhs, rhs, dy = (np.round(256 * rng.standard_normal(s)) / 256 for s in shapes)
    rhs *= 2.0 ** np.arange(groups)[:, None, None]
    return tuple(x.astype(np.float32) for x in (lhs, rhs, dy))


STATIC = ("recipe", "implementation", "preferred_element_type")


@functools.partial(jax.jit, static_argnames=STATIC)
def value_and_gradients(lhs, rhs, sizes, dy, **options):
    """``(y, d_lhs, d_rhs)``, compiled in one piece."""
    product = lambda lhs, rhs: scaled_ragged_dot(lhs, rhs, jnp.asarray(sizes), **options)
    y, vjp = jax.vjp(product, lhs, rhs)
    return (y, *vjp(dy))


@functools.partial(jax.jit, static_argnames=STATIC)
def value_and_gradient_by_lhs(lhs, rhs, sizes, dy, **options):
    """``(y, d_lhs)``, for an rhs that may be a `ScaledArray`."""
    product = lambda lhs: scaled_ragged_dot(lhs, rhs, jnp.asarray(sizes), **options)
    y, vjp = jax.vjp(product, lhs)
    return (y, *vjp(dy))


def groups_of(x, sizes):
    """The rows of each group."""
    ends = np.cumsum(sizes)
    return [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]


# The oracle: fake quantization of the groups, filled up with zeros to be one stack; float64.

ROWS = per_block(E4M3, 128, 1, "power_of_two")  # one scale for all of up to 128 elements
CASES = {**VARIANTS, "rowwise": (recipes.RowwiseScaling(), uniform(ROWS, ROWS, ROWS))}
NEAREST = {"mxfp4": "mxfp4, options off"} | {
    name: f"{name}, nearest"
    for name in ("nvfp4", "nvfp4_4over6", "nvfp4_row", "direct_e5m2", "hybrid")
}
ORACLES = [cls.name for cls in recipes.RECIPES]


def case(name):
    """The recipe of this name, rounding to nearest, and its rules."""
    return CASES[NEAREST.get(name, name)]


def one_by_one(rule):
    """Each matrix with scales of its own."""
    return lambda x, axis: np.concatenate([rule(matrix[None], axis) for matrix in x])


def oracle(name, lhs, rhs, sizes, dy):
    """All three products, group by group; float64."""
    rules = case(name)[1]
    (of_lhs, of_rhs), (of_grad, of_rhs_again) = rules.fprop, rules.dgrad
    rules = dataclasses.replace(
        rules, fprop=(of_lhs, one_by_one(of_rhs)), dgrad=(of_grad, one_by_one(of_rhs_again))
    )
    fill = lambda x: np.pad(x, [(0, max(sizes) - len(x)), (0, 0)])
    stacks = (np.stack([fill(part) for part in groups_of(x, sizes)]) for x in (lhs, dy))
    lhs_stack, dy_stack = stacks
    exact = [y for y, _ in products_of(rules, lhs_stack, rhs, dy_stack).values()]
    if rules.outputs is not None:
        exact = [rule(y.astype(np.float32), 2) for rule, y in zip(rules.outputs, exact)]
    results = []
    for stack, rows in zip(exact[:2], (len(lhs), len(dy))):
        parts = [matrix[:size] for matrix, size in zip(stack, sizes)]
        parts.append(np.zeros((rows - sum(sizes), stack.shape[2])))
        results.append(np.concatenate(parts))
    return *results, exact[2]


def quantized(x, fmt=E4M3):
    """Of one matrix, with one scale."""
    return per_tensor(fmt)(x[None], 1)[0]


# Results in high precision differ by the order of f32 sums; those in f8 where these round apart.
TOLERANCE = {"direct_e5m2": 3e-3, "hybrid": 3e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, None) for name in ORACLES),
        *((name, "xla") for name in ("current", "rowwise", "mxfp8")),
    ],
)
def test_products_are_those_of_fake_quantized_groups(name, implementation):
    lhs, rhs, dy = operands()
    recipe, _ = case(name)
    actual = value_and_gradients(lhs, rhs, SIZES, dy, recipe=recipe, implementation=implementation)
    expected = oracle(name, lhs, rhs, SIZES, dy)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < TOLERANCE.get(name, 2e-6)
        assert cosine(a, b) > 1 - 1e-5


@pytest.fixture
def blackwell(monkeypatch):
    """Products are those for a B200, computed here."""
    pretend(monkeypatch, Gpu("NVIDIA B200", (10, 0)))
    monkeypatch.setattr(f8_dot, "cuda", f8_dot.elsewhere)


in_mx = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 has no block-scaled product on CPUs"
)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "name",
    [
        "rowwise",
        pytest.param("mxfp8", marks=in_mx),
        "current",
        pytest.param("block", marks=in_mx),
        pytest.param("nvfp4", marks=in_mx),
    ],
)
def test_a_tile_of_each_group_at_a_time(name, blackwell):
    """Groups of three tiles, two, one and none; the shapes are of this test alone."""
    sizes, m, k, n = (259, 0, 1, 140), 410, 264, 136
    lhs, rhs, dy = operands(m, k, n, groups=4)
    recipe, _ = case(name)
    actual = value_and_gradients(lhs, rhs, sizes, dy, recipe=recipe)
    for a, b in zip(actual, oracle(name, lhs, rhs, sizes, dy), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 2e-6
        assert cosine(a, b) > 1 - 1e-5


@pytest.mark.filterwarnings("ignore:On NVIDIA .*, FP8 is expected")  # the layer is small
@pytest.mark.parametrize(
    ("recipe", "gpu", "says"),
    [
        ("current", "L40S", "xla: a tile of each group at a time"),
        ("nvfp4", "H200", "bf16: no FP8 kernel for these groups on this GPU"),
        ("nvfp4", "B200", "cudnn: a tile of each group at a time"),
    ],
)
def test_the_report_says_what_multiplies_groups(recipe, gpu, says):
    layer = jfp8.nnx.ExpertDense(4, 32, 16, recipe=recipe, rngs=nnx.Rngs(0))
    with traced_for(f"NVIDIA {gpu}"):
        rows = jfp8.report(layer, jnp.ones((64, 32)), jnp.full(4, 16)).rows
    assert {row.cuda for row in rows} == {says}


@pytest.mark.parametrize("sizes", [(0, 0, 64, 0), (0, 0, 0, 63), (0, 0, 0, 0), (17, 15, 16, 16)])
@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_any_sizes(name, sizes):
    lhs, rhs, dy = operands(m=64, groups=4)
    actual = value_and_gradients(lhs, rhs, sizes, dy, recipe=recipes.get(name))
    expected = oracle(name, lhs, rhs, sizes, dy)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(np.linalg.norm(b), 1e-9))
    used = np.asarray(sizes) > 0
    assert np.all(np.any(np.asarray(actual[2]), axis=(1, 2)) == used)


@pytest.mark.parametrize("height", [1, 16, 128])
def test_every_row_of_a_group_has_one_place_in_a_tile_of_the_group(height):
    rng = np.random.default_rng(height)
    m, groups = 150, 6
    run = jax.jit(lambda sizes: lay_out(sizes, m, height))
    cases = [np.zeros(groups, int), np.eye(groups, dtype=int)[2] * m, np.full(groups, m // groups)]
    # The most tiles that can be needed: all groups but one have a single row.
    cases.append(np.array([m - groups + 1, *np.ones(groups - 1, int)]))
    cases += [np.diff(np.sort([0, *rng.integers(0, m + 1, groups)])) for _ in range(20)]
    for sizes in cases:
        tiles = jax.tree.map(np.asarray, run(jnp.asarray(sizes, jnp.int32)))
        owner = np.repeat(np.arange(groups), sizes)
        assert tiles.rows.size <= m + groups * height
        places = [np.flatnonzero(tiles.rows.ravel() == row) for row in range(m)]
        for row, place in enumerate(places):
            if row >= len(owner):
                assert place.size == 0
                assert tiles.slots[row] == tiles.rows.size
            else:
                assert place.tolist() == [tiles.slots[row]]
                assert tiles.group[place[0] // height] == owner[row]
        assert tiles.padded_sizes.tolist() == [-(-size // height) * height for size in sizes]


@pytest.mark.slow
def test_rows_of_no_group_influence_nothing():
    """Whatever is in them: their results and gradients are zero, and no amax sees them."""
    lhs, rhs, dy = operands(m=64, groups=3)
    sizes, used = jnp.array([20, 0, 21]), 41
    recipe, sink = recipes.DelayedScaling(), init_sink()
    state = recipe.init_state()

    @jax.jit
    def run(lhs, dy):
        def product(lhs, rhs, sink):
            return observed_ragged_dot(lhs, rhs, sizes, Options(recipe), State(state, sink))

        y, vjp, observed = jax.vjp(product, lhs, rhs, sink, has_aux=True)
        return y, observed, vjp(dy)

    clean = run(np.where(np.arange(64)[:, None] < used, lhs, 0), dy)
    for value in (np.nan, np.inf, 1e30):
        dirty_lhs, dirty_dy = lhs.copy(), dy.copy()
        dirty_lhs[used:], dirty_dy[used:] = value, value
        dirty = run(dirty_lhs, dirty_dy)
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            np.testing.assert_array_equal(a, b)
    y, observed, (d_lhs, d_rhs, d_sink) = clean
    assert not np.any(y[used:])
    assert not np.any(d_lhs[used:])
    assert np.all(np.any(np.asarray(y[:used]), axis=1))
    expected = [np.max(np.abs(x)) for x in (lhs[:used], rhs, dy[:used])]
    assert [float(a) for a in observed] == expected[:2]
    assert [float(decode_amax(row)[0]) for row in d_sink] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_nan_stays_in_its_row_and_in_its_group():
    lhs, rhs, dy = operands(m=48, groups=3)
    lhs[5, 3], rhs[2, 1, 1] = np.nan, np.inf
    y, d_lhs, d_rhs = value_and_gradients(lhs, rhs, (16, 16, 16), dy)
    assert np.all(np.isnan(y[5]))
    assert np.all(np.isnan(y[32:, 1]))
    y = np.asarray(y).copy()
    y[5], y[32:, 1] = 0, 0
    assert np.all(np.isfinite(y))
    assert np.all(np.isfinite(d_lhs[:32]))
    assert np.all(np.isnan(d_lhs[32:, 1]))
    assert np.all(np.isnan(d_rhs[0, 3]))
    assert np.all(np.isfinite(d_rhs[1:]))


@pytest.mark.slow
def test_group_sizes_beyond_the_rows_do_not_crash():
    lhs, rhs, dy = operands(m=48, groups=3)
    y, *_ = value_and_gradients(lhs, rhs, (20, 40, 9), dy)
    expected, *_ = value_and_gradients(lhs, rhs, (20, 28, 0), dy)
    assert np.all(np.asarray(y) == np.asarray(expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A loss is differentiated with respect to a weight")
def test_histories_are_those_of_lhs_and_grad():
    """Twice the amax in a history doubles the scale, of lhs and grad; that of rhs is not read."""
    lhs, rhs, dy = operands(m=64, groups=2)
    sizes, recipe = (30, 34), recipes.DelayedScaling(amax_history_len=4)
    amaxes = {"lhs": np.max(np.abs(lhs)), "rhs": 100 * np.max(rhs), "grad": np.max(np.abs(dy))}
    state = {
        role: {"amax_history": jnp.array([0, 0.5, 3, 1]) * amax, "amax": jnp.zeros(())}
        for role, amax in amaxes.items()
    }
    by_history = lambda x, fmt: fake_quantized(x, scale_for(3 * np.max(np.abs(x)), fmt, None), fmt)
    xs, dys = groups_of(by_history(lhs, E4M3), sizes), groups_of(by_history(dy, E5M2), sizes)
    ws = [quantized(w) for w in rhs]
    expected = (
        np.concatenate([x @ w for x, w in zip(xs, ws, strict=True)]),
        np.concatenate([g @ w.T for g, w in zip(dys, ws, strict=True)]),
        np.stack([x.T @ g for x, g in zip(xs, dys, strict=True)]),
    )
    actual = value_and_gradients(lhs, rhs, sizes, dy, recipe=recipe, state=state, sink=init_sink())
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-6
    # Without a sink the gradient's history is not kept up, so it is not read either.
    _, d_lhs, _ = value_and_gradients(lhs, rhs, sizes, dy, recipe=recipe, state=state)
    unread = np.concatenate(
        [g @ w.T for g, w in zip(groups_of(quantized(dy, E5M2), sizes), ws, strict=True)]
    )
    assert relative_error(d_lhs, unread) < 1e-6


@pytest.mark.representative(1)
@pytest.mark.parametrize("scales", ["per group", "one in three dimensions", "e8m0"])
def test_rhs_of_stored_bytes_is_used_as_it_is(scales):
    """Their scales are none that quantizing the values again would find."""
    lhs, rhs, dy = operands(m=64, groups=3)
    sizes = (10, 31, 20)
    scale = {
        "per group": np.float32([0.011, 0.2, 3.0]).reshape(3, 1, 1),
        "one in three dimensions": np.full((1, 1, 1), 0.3, np.float32),
        "e8m0": np.array([0.125, 0.5, 4.0], ml_dtypes.float8_e8m0fnu).reshape(3, 1, 1),
    }[scales]
    data = np.clip(rhs * 50, -448, 448).astype(E4M3)
    values = data.astype(np.float64) * np.asarray(scale, np.float64)
    q = ScaledArray(jnp.asarray(data), jnp.asarray(scale))

    @jax.jit
    def run(lhs, q):
        product = lambda lhs, q, sink: observed_ragged_dot(
            lhs, q, jnp.array(sizes), Options(Float8CurrentScaling()), State(sink=sink)
        )
        y, vjp, observed = jax.vjp(product, lhs, q, init_sink(), has_aux=True)
        return y, vjp(dy), observed

    y, (d_lhs, d_q, d_sink), observed = run(lhs, q)
    xs = groups_of(quantized(lhs[: sum(sizes)]), sizes)
    dys = groups_of(quantized(dy[: sum(sizes)], E5M2), sizes)
    expected = np.concatenate([x @ w for x, w in zip(xs, values, strict=True)])
    d_expected = np.concatenate([g @ w.T for g, w in zip(dys, values, strict=True)])
    assert relative_error(y[: sum(sizes)], expected) < 1e-6
    assert relative_error(d_lhs[: sum(sizes)], d_expected) < 1e-6
    assert not np.any(np.asarray(d_q.data, np.float32))
    assert scales == "e8m0" or not np.any(d_q.scale)  # a format without zero
    largest_value = np.max(np.abs(values))
    assert float(observed.rhs) == pytest.approx(largest_value, rel=1e-6)
    assert float(decode_amax(d_sink[1])[0]) == pytest.approx(largest_value, rel=1e-6)


def test_stored_matrices_of_one_block_each_keep_their_scales():
    """They were scaled by two different numbers where the largest codes of groups differ."""
    lhs, _, dy = operands(m=48, groups=3)
    sizes = np.array([64, 32, 40]).reshape(3, 1, 1)
    codes = (np.random.default_rng(1).integers(-7, 8, (3, K, N)) * sizes).astype(E4M3)
    scales = 2.0 ** np.array([-6, -3, -9]).reshape(3, 1, 1)
    q = ScaledArray(jnp.asarray(codes), jnp.asarray(scales, jnp.float32))
    y, d_lhs = value_and_gradient_by_lhs(lhs, q, (16, 16, 16), dy, recipe="block")
    block = per_block(E4M3, 128, 1, "power_of_two")
    groups = zip(
        *(np.split(block(x[None], 2)[0], 3) for x in (lhs, dy)), codes.astype(float) * scales
    )
    exact = [(x @ w, g @ w.T) for x, g, w in groups]
    for found, parts in zip((y, d_lhs), zip(*exact)):
        np.testing.assert_allclose(found, np.concatenate(parts), rtol=1e-6, atol=1e-6)


def test_high_precision_operands():
    """Products with one operand or none quantized."""
    lhs, rhs, dy = operands(m=64, groups=3)
    sizes = (10, 31, 20)
    q = quantizers.Current(jfp8.E4M3FN)
    recipe = PerOperand(Product(q, None), Product(None, q), Product(None, None))
    xs, dys = groups_of(lhs, sizes), groups_of(dy, sizes)
    q_x = groups_of(quantized(lhs[: sum(sizes)]), sizes)
    q_w = [quantized(w) for w in rhs]
    expected = (
        np.concatenate([x @ w for x, w in zip(q_x, rhs, strict=True)]),
        np.concatenate([g @ w.T for g, w in zip(dys, q_w, strict=True)]),
        np.stack([x.T @ g for x, g in zip(xs, dys, strict=True)]),
    )
    for implementation in ("emulate", "xla"):
        y, d_lhs, d_rhs = value_and_gradients(
            lhs, rhs, sizes, dy, recipe=recipe, implementation=implementation
        )
        assert relative_error(y[:61], expected[0]) < 1e-6
        assert relative_error(d_lhs[:61], expected[1]) < 1e-6
        assert relative_error(d_rhs, expected[2]) < 1e-6


@pytest.mark.slow
def test_dtypes():
    lhs, rhs, dy = operands(m=48, groups=3)
    sizes = (10, 20, 9)
    lhs16, rhs16 = lhs.astype(jnp.bfloat16), rhs.astype(np.float16)
    found = value_and_gradients(lhs16, rhs16, np.uint8(sizes), dy)
    assert [x.dtype for x in found] == [jnp.float32, jnp.bfloat16, jnp.float16]
    wide = value_and_gradients(lhs16.astype(np.float32), rhs16.astype(np.float32), sizes, dy)
    for a, b in zip(found, wide, strict=True):  # one rounding, of the same f32 sums
        np.testing.assert_array_equal(a, b.astype(a.dtype))


@pytest.mark.slow
def test_vmap_equals_loop():
    batches = [operands(m=40, groups=3, seed=seed) for seed in range(2)]
    sizes = np.array([[10, 0, 25], [3, 37, 0]])
    run = functools.partial(value_and_gradients, recipe=recipes.MXFP8BlockScaling())
    lhs, rhs, dy = (np.stack(x) for x in zip(*batches, strict=True))
    together = jax.jit(jax.vmap(run))(lhs, rhs, sizes, dy)
    for i in range(2):
        alone = run(lhs[i], rhs[i], sizes[i], dy[i])
        for a, b in zip(together, alone, strict=True):
            assert relative_error(a[i], b) < 1e-6


def test_what_is_kept_for_the_backward_pass_is_bytes():
    lhs, rhs, _ = operands(m=4096, groups=2)
    product = lambda lhs, rhs: scaled_ragged_dot(lhs, rhs, jnp.array([2048, 2048]))
    _, vjp = jax.eval_shape(lambda a, b: jax.vjp(product, a, b), lhs, rhs)
    large = [x for x in jax.tree.leaves(vjp) if math.prod(x.shape) >= rhs.size]
    assert sorted(x.shape[-1] for x in large if x.dtype == jnp.uint8) == [N, K]
    assert all(x.dtype in (jnp.uint8, jnp.int32) for x in large)


def test_second_derivatives_are_refused():
    lhs, rhs, _ = operands(m=8, groups=2)
    loss = lambda lhs: jnp.sum(scaled_ragged_dot(lhs, rhs, jnp.array([3, 5])) ** 2)
    with pytest.raises(TypeError, match="Second derivatives"):
        jax.hessian(loss)(jnp.asarray(lhs))


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "words"),
    [
        ((4, 2, 3), (2, 3, 5), (2,), r"\[m, k\] and rhs of shape \[g, k, n\].*reshape"),
        ((4, 3), (3, 5), (2,), r"rhs of shape \[g, k, n\]"),
        ((4, 3), (2, 4, 5), (2,), "of size 3, and rhs along its dimension 1, of size 4"),
        ((4, 3), (2, 3, 5), (3,), r"must have shape \(2,\).*got \(3,\)"),
        ((4, 3), (0, 3, 5), (0,), "at least one"),
    ],
)
def test_shapes_that_do_not_fit(lhs, rhs, sizes, words):
    with pytest.raises(ValueError, match=words):
        scaled_ragged_dot(jnp.ones(lhs), jnp.ones(rhs), jnp.ones(sizes, jnp.int32))


def test_arguments_of_the_wrong_kind():
    x, w, sizes = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.array([2, 2])
    with pytest.raises(TypeError, match="group_sizes must be integers.*got float32"):
        scaled_ragged_dot(x, w, jnp.array([2.0, 2.0]))
    with pytest.raises(TypeError, match="lhs"):
        scaled_ragged_dot(jnp.ones((4, 3), jnp.int32), w, sizes)
    with pytest.raises(TypeError, match="recipe must be a recipe object"):
        scaled_ragged_dot(x, w, sizes, recipe=3)
    with pytest.raises(ValueError, match="implementation='triton' is unknown"):
        scaled_ragged_dot(x, w, sizes, implementation="triton")
    with pytest.raises(ValueError, match="sink must be float32 zeros"):
        scaled_ragged_dot(x, w, sizes, sink=jnp.zeros((3, 2)))
    recipe = Float8CurrentScaling(accumulation="hopper")
    with pytest.raises(NotImplementedError, match="'xla' does not support accumulation='hopper'"):
        scaled_ragged_dot(x, w, sizes, recipe=recipe, implementation="xla")
    q = ScaledArray(jfp8.quantize(w).data, jnp.ones((2,)))
    with pytest.raises(ValueError, match="cannot have a scale of shape"):
        scaled_ragged_dot(x, q, sizes)
