"""Products on TPUs: what is chosen for them, and that interpreted kernels give the same numbers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import jfp8
import jfp8.linen
from jfp8 import recipes
from jfp8.kernels.backend import facts_of
from jfp8.kernels.tpu.backend import choose_on_tpu
from jfp8.kernels.tpu.quantize_operand import quantized_for_both
from jfp8.kernels.tpu.sharded import Shardings, matrix_shardings
from jfp8.matmul.spec import MatmulSpec
from jfp8.products.explicit_sharding import Specs
from jfp8.products.operation import Use
from jfp8.quantizers.quantizer import Context, Current
from jfp8.quantizers.rotations import Hadamard
from jfp8.tracing.device import current_tpu
from jfp8.tracing.devices import Tpu
from support.arrays import relative_error
from support.devices import pretend

BF16 = jnp.bfloat16
ROWS = (((1,), (0,)), ((), ()))


def operands(m=128, k=256, n=128):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    return tuple(jnp.asarray(draw(*s), BF16) for s in ((m, k), (k, n), (m, n)))


def results(recipe, implementation, x, w, dy, state, **how):
    """y, both gradients, and the amaxes that leave by the sink."""
    sink = jfp8.scaling.init_sink()

    def f(x, w, sink):
        how.update(recipe=recipe, state=state, sink=sink, implementation=implementation)
        return jfp8.scaled_dot_general(x, w, ROWS, **how)

    y, back = jax.vjp(f, x, w, None if state is None else sink)
    return y, back(dy)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize(
    "name", ["delayed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("current", "unscaled"))]
)
@pytest.mark.representative(1)
def test_one_scale_gives_the_numbers_of_the_reference(interpreted, name, filled):
    recipe = recipes.get(name)
    state = recipe.init_state()
    if filled and state is not None:
        state = jax.tree.map(lambda x: x.at[..., 3].set(5.0) if x.ndim else x, state)
    x, w, dy = operands()
    expected = results(recipe, "emulate", x, w, dy, state)
    found = results(recipe, "mosaic_tpu", x, w, dy, state)
    assert float(jnp.abs(expected[0].astype(jnp.float32)).max()) > 1
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("rowwise", "mxfp8", "block")]
)
def test_several_scales_give_the_numbers_of_the_reference(interpreted, name):
    """To the order of sums: a bf16 result may be rounded to the other side."""
    recipe = recipes.get(name)
    arrays = operands()
    expected = results(recipe, "emulate", *arrays, None)
    found = results(recipe, "mosaic_tpu", *arrays, None)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert (a != b).mean() < 0.002, name
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-6 * np.abs(b).max())


def test_by_xla_the_same_codes_as_by_kernels(interpreted):
    """Where the compiler divides arrays no kernel runs."""
    x, _, _ = operands()
    x = x.at[3, 4].set(jnp.inf)
    for name in ("current", "rowwise"):
        fprop = recipes.get(name).resolved().fprop
        use = Use("fprop", fprop, fprop.lhs, (1,)), Use("wgrad", fprop, fprop.lhs, (0,))
        by_kernels, by_xla = (
            quantized_for_both(x, *use, None, None, kernels=kernels) for kernels in (True, False)
        )
        for q, expected in zip(by_kernels[:2], by_xla[:2], strict=True):
            np.testing.assert_array_equal(q.scale, expected.scale)
            codes = (np.asarray(a.data.astype(jnp.float32)) for a in (q, expected))
            np.testing.assert_array_equal(*codes)
            assert np.isnan(np.asarray(q.data.astype(jnp.float32))).sum() == 1


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("name", "rounding", "filled"),
    [
        ("block", "power_of_two", False),
        ("block", "power_of_two", True),
        ("mxfp8", "rceil", True),
        ("mxfp8", "floor", False),
    ],
)
def test_blocks_by_xla_have_the_values_of_the_reference(name, rounding, filled):
    """In both directions; a NaN stays in its block, and the amax of all is found."""
    x, _, _ = operands()
    x = x.at[5].multiply(2.0**100).at[:, 7].multiply(2.0**-100).at[8].set(0)
    if filled:
        x = x.at[3, 140].set(jnp.inf).at[70, 2].set(jnp.nan)
    product = recipes.get(name).resolved().wgrad
    quantizer = dataclasses.replace(product.lhs, scale_rounding=rounding)
    product = dataclasses.replace(product, lhs=quantizer)
    use = Use("fprop", product, quantizer, (1,)), Use("wgrad", product, quantizer, (0,))
    by_xla = jax.jit(lambda x: quantized_for_both(x, *use, None, None, kernels=False))
    by_reference = jax.jit(
        lambda x: [quantizer(x, Context(u.contracting, jnp.nan)).dequantize(BF16) for u in use]
    )
    for array in (x, x.astype(jnp.float32) * np.float32(1.0001)):
        *found, largest = by_xla(array)
        np.testing.assert_array_equal(largest, jnp.nan if filled else jnp.abs(array).max())
        for values, expected in zip(found, by_reference(array), strict=True):
            assert values.dtype == BF16
            np.testing.assert_array_equal(values.astype(np.float32), expected.astype(np.float32))
            assert 100 < jnp.sum(values != 0) < values.size or not filled


def test_tiles_by_xla_have_the_values_of_the_reference():
    _, w, _ = operands()
    w = w.at[3, 100].set(jnp.nan)
    product = recipes.get("block").resolved().fprop
    use = Use("fprop", product, product.rhs, (0,)), Use("dgrad", product, product.rhs, (1,))
    values, again, _ = jax.jit(lambda w: quantized_for_both(w, *use, None, None, kernels=False))(w)
    expected = jax.jit(lambda w: product.rhs(w, Context((0,), jnp.nan)).dequantize(BF16))(w)
    for each in (values, again):
        np.testing.assert_array_equal(each.astype(np.float32), expected.astype(np.float32))
    assert jnp.isnan(values).sum() == 128 * 128


def test_values_serve_both_products_or_neither():
    """Of two matmuls one has scales that bf16 does not hold: the reference quantizes for both."""
    _, w, _ = operands()
    exact = recipes.get("block").resolved().fprop
    scales = dataclasses.replace(exact.lhs, scale_rounding=None)
    rounded = dataclasses.replace(exact, lhs=scales)
    both = [Use("fprop", exact, exact.rhs, (0,)), Use("dgrad", rounded, exact.rhs, (1,))]
    for first, second in (both, both[::-1]):
        assert quantized_for_both(w, first, second, None, None, kernels=False) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "rowwise", "block", "mxfp8"])
def test_products_that_are_divided_have_the_numbers_of_the_reference(monkeypatch, name):
    recipe = recipes.get(name)
    arrays = operands()
    state = recipe.init_state()
    expected = results(recipe, None, *arrays, state)
    pretend(monkeypatch, Tpu("TPU7x", divides=True))
    found = results(recipe, None, *arrays, state)
    # From JAX 0.11 on, sums under one scale are rounded to bf16 before they are scaled, too.
    most = 0.5 if name == "delayed" else 0.002
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert (a != b).mean() < most, name
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-6 * np.abs(b).max())


def with_fprop(product):
    return recipes.PerOperand(fprop=product, dgrad="current", wgrad="current")


E4M3 = Current(jfp8.E4M3FN)


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    "recipe",
    [
        "current",
        with_fprop(recipes.Product(E4M3, None)),
        with_fprop(recipes.Product(E4M3, E4M3, output=E4M3)),
    ],
    ids=["current", "high precision", "rounded"],
)
def test_dense_gives_its_bias_to_the_product(interpreted, monkeypatch, recipe):
    """Flax would add it in a pass of its own. Rounded twice, as Flax does."""
    x, _, _ = operands()
    dense = partial(jfp8.Dense, 128, dtype=BF16, recipe=recipe)
    named = "mosaic_tpu" if recipe == "current" else None
    layer, plain = dense(implementation=named), dense(implementation="emulate")
    variables = layer.init(jax.random.key(0), x)
    variables["params"]["bias"] = jnp.linspace(-3, 3, 128)

    def run(layer):
        y, back = jax.vjp(layer.apply, variables, x)
        return y, back(jnp.ones_like(y) * x[:, :128])

    expected = run(plain)
    pretend(monkeypatch, Tpu("TPU7x"))
    found = run(layer)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_name_is_never_replaced():
    x, w, _ = operands()
    named = partial(jfp8.scaled_dot_general, recipe="current", implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="runs on TPUs"):
        named(x, w, ROWS)
    with pytest.raises(NotImplementedError, match=r"\(128, 100, 256\).*multiples of 128"):
        named(x, w[:, :100], ROWS)


def on(kind, platform="tpu", sizes=(), types=()):
    names = tuple("abc"[: len(sizes)])
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return use_abstract_mesh(AbstractMesh(sizes, names, types, abstract_device=device))


def test_the_tpu_that_is_described():
    for kind, f8 in (("TPU7x", True), ("TPU v6 lite", False), ("TPU v5 lite", False)):
        with on(kind):
            assert current_tpu() == Tpu(kind)
            assert current_tpu().multiplies_f8 == f8
    with on("NVIDIA H200", "gpu"):
        assert current_tpu() is None
    assert current_tpu() is None  # this machine has none
    auto, manual = AxisType.Auto, AxisType.Manual
    for types, divides in (((auto, auto), True), ((manual, auto), True), ((manual,) * 2, False)):
        with on("TPU7x", sizes=(4, 2), types=types):
            assert current_tpu().divides is divides
    with on("TPU7x", sizes=(4, 1), types=(manual, auto)):
        assert not current_tpu().divides


def chosen(q, r, device, **how):
    job = MatmulSpec(ROWS, np.dtype(BF16), "f32", False, **{"powers_of_two": True} | how)
    return choose_on_tpu(facts_of(q, r, job), device)


def test_what_is_chosen_and_why():
    x, w, _ = operands()
    q, r = jfp8.quantize(x), jfp8.quantize(w)
    one, many = Tpu("TPU7x"), Tpu("TPU7x", divides=True)
    assert chosen(q, r, one).backend.name == "mosaic_tpu"
    assert chosen(q, r, None).backend.name == "xla"
    assert chosen(q, r, many).backend.name == "xla"
    assert "shard_map" in str(chosen(q, r, many))
    cut = jfp8.quantize(w[:, :100])
    assert str(chosen(q, cut, one)) == (
        "xla: sizes m, n, k = (128, 100, 256) that are not multiples of 128"
    )
    blocks = [
        jfp8.quantize(a, granularity=jfp8.Block(b), scale_rounding="power_of_two")
        for a, b in ((x, (1, 128)), (w, (128, 128)))
    ]
    assert chosen(*blocks, one).backend.name == "mosaic_tpu"
    found = chosen(*blocks, one, powers_of_two=False)
    assert found.backend.name == "bf16"
    assert "powers of two" in str(found)


def test_report_says_what_a_tpu_computes():
    """Traced for one that is described: by whom, and why not."""
    x = jnp.ones((128, 256), BF16)
    layer = jfp8.Dense(128, dtype=BF16, recipe="current")
    variables = layer.init(jax.random.key(0), x)
    with on("TPU7x"):
        rows = jfp8.report(layer, variables, x).rows
        cut = jfp8.report(layer, variables, x[:100])
    with on("TPU7x", sizes=(8,), types=(AxisType.Explicit,)):
        of_each = jfp8.report(layer, variables, x).rows
    for found in (rows, of_each):
        by = {row.kind: row.implementation for row in found}
        assert by == dict.fromkeys(("fprop", "wgrad"), "mosaic_tpu")
    assert {row.implementation.partition(":")[0] for row in cut.rows} == {"xla"}
    assert "not multiples of 128" in cut.verbose()
    assert "CUDA" not in cut.verbose()


@pytest.mark.parametrize(("dtype", "precise"), [(BF16, False), (jnp.float32, True)])
def test_beside_an_operand_in_high_precision(monkeypatch, dtype, precise):
    """Values of blocks are exact in bf16; what is in f32 must not be rounded to it."""
    pretend(monkeypatch, Tpu("TPU7x"))
    x, w, _ = (a.astype(dtype) for a in operands())
    recipe = with_fprop(recipes.Product(recipes.get("mxfp8").resolved().fprop.lhs, None))
    product = partial(jfp8.scaled_dot_general, dimension_numbers=ROWS, recipe=recipe)
    assert ("HIGHEST" in str(jax.make_jaxpr(product)(x, w))) is precise


def test_what_is_quantized_in_another_way_is_left_to_it():
    """Rotations, f16, other sizes, stochastic rounding: none may be dropped in silence."""
    x, _, _ = operands()
    fprop = recipes.get("current").resolved().fprop
    both = lambda product: (
        Use("fprop", product, product.lhs, (1,)),
        Use("wgrad", product, product.lhs, (0,)),
    )
    found = partial(quantized_for_both, state=None, dtype=None, kernels=False)
    assert found(x, *both(fprop)) is not None
    rotated = dataclasses.replace(fprop, rotation=Hadamard((1,) * 16))
    stochastic = dataclasses.replace(
        fprop, lhs=dataclasses.replace(fprop.lhs, rounding="stochastic")
    )
    for other in (rotated, stochastic):
        assert found(x, *both(other)) is None
    assert found(x.astype(jnp.float16), *both(fprop)) is None
    assert found(x[:100], *both(fprop)) is None


# Layouts of x[m, k], w[k, n] and y[m, n] on a mesh of axes a and b.
LAYOUTS = {
    "data": (P("a"), P(), P("a")),
    "fsdp": (P("a"), P("a"), P("a")),
    "columns": (P(), P(None, "a"), P(None, "a")),
    "rows": (P(None, "a"), P("a"), P()),
    "fsdp and columns": (P("a"), P("a", "b"), P("a", "b")),
    "sequence": (P("a"), P("b", "a"), P("b", "a")),
    "fsdp over both": (P("a"), P(("a", "b")), P("a")),
    "fsdp over the others first": (P("a"), P(("b", "a")), P("a")),
}


# How matrices lie on several TPUs, by the types of what they are made of.
A, B, NONE = ("a",), ("b",), ()
SHAPES = (4, 256, 1024), (1024, 512)
NUMBERS = ((2,), (0,)), ((), ())
MESH = AbstractMesh((2, 4), ("a", "b"))
SPECS = Specs(P("a"), P("a", "b"), P("a", None, "b"))


def test_dimensions_that_make_up_rows():
    with use_abstract_mesh(MESH):
        found = matrix_shardings(SPECS, SHAPES, NUMBERS)
        assert found == Shardings((A, NONE), (A, B), (A, B))
        over_both = SPECS._replace(rhs=P(("a", "b")))
        assert matrix_shardings(over_both, SHAPES, NUMBERS).rhs == (A + B, NONE)
        one = (1, 256, 1024), SHAPES[1]  # a dimension of 1 is not in the way
        specs = Specs(P(None, "a"), P(), P(None, "a"))
        assert matrix_shardings(specs, one, NUMBERS) == Shardings((A, NONE), (NONE,) * 2, (A, NONE))


@pytest.mark.parametrize(
    "changed",
    [
        {"lhs": P(None, "a")},  # every fourth of the rows in two parts
        {"lhs": P("a", "b")},
        {"y": P("a", "b")},
        {"rhs": P(None, ("a", "b"))},  # 64 columns each
    ],
)
def test_parts_that_kernels_do_not_take(changed):
    with use_abstract_mesh(MESH):
        assert matrix_shardings(SPECS._replace(**changed), SHAPES, NUMBERS) is None


SEVERAL = [
    *((name, "fsdp and columns") for name in ("rowwise", "current", "block", "mxfp8")),
    *((name, "rows") for name in ("rowwise", "current", "block", "mxfp8")),
    *(("delayed", layout) for layout in LAYOUTS),
]


@pytest.mark.representative(1)
@pytest.mark.parametrize(("name", "layout"), SEVERAL)
def test_each_of_several_tpus_runs_the_kernels(interpreted, monkeypatch, name, layout):
    """On meshes with explicit axes: with the numbers of the reference, to the order of f32 sums."""
    pretend(monkeypatch, Tpu("TPU7x", divides=True))
    recipe = recipes.get(name)
    state = recipe.init_state()
    arrays = [x.astype(jnp.float32) for x in operands(256, 512, 256)]
    expected = results(recipe, "emulate", *arrays, state)
    types, devices = (AxisType.Explicit,) * 2, jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=types, devices=devices)
    specs = LAYOUTS[layout]
    with jax.set_mesh(mesh):
        parts = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)
        ]
        f = jax.jit(partial(results, recipe, "mosaic_tpu", out_sharding=specs[2]))
        traced = f.trace(*parts, state)
        assert str(traced.jaxpr).count("shard_map") >= 6  # for operands and products
        found = traced.lower().compile()(*parts, state)
    _, (dx, dw, _) = found
    for gradient, x in zip((dx, dw), parts, strict=False):
        assert gradient.sharding.is_equivalent_to(x.sharding, 2)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("of_x", "of_kernel", "of_bias"),
    [(P(None, "a"), P("a"), P()), (P(), P(None, "a"), P("a"))],
    ids=["rows", "columns"],
)
def test_the_bias_is_added_once(interpreted, monkeypatch, of_x, of_kernel, of_bias):
    """Each of several TPUs adds its part of it, after the sum over them if there is one."""
    x, kernel, _ = operands(128, 256, 256)
    bias = jnp.linspace(-90, 90, 256, dtype=BF16)

    def run(implementation, x, *params, **how):
        product = jfp8.linen.DotGeneral(recipe="rowwise", implementation=implementation)
        call = lambda kernel, bias: product.apply({}, x, kernel, ROWS, bias=bias, **how)
        y, back = jax.vjp(call, *params)
        return y, *back(jnp.ones_like(y))

    expected = run("emulate", x, kernel, bias)
    pretend(monkeypatch, Tpu("TPU7x", divides=True))
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        on = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        found = jax.jit(partial(run, "mosaic_tpu", out_sharding=P(None, *of_bias)))(
            on(x, of_x), on(kernel, of_kernel), on(bias, of_bias)
        )
    for a, b in zip(found, expected, strict=True):  # sums are rounded to bf16 before the bias
        assert relative_error(a, b) < 2**-7
