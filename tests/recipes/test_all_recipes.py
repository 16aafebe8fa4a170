"""Every recipe and variant in one suite, against fake quantization and products in float64."""

import math
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import recipes, scaled_dot_general
from support.arrays import assert_same, f64
from support.fake_quantization import VARIANTS, mixed_recipe, oracle

PLAIN = (((1,), (0,)), ((), ()))
NAMES = ("y", "d_lhs", "d_rhs")

variants = pytest.mark.parametrize("variant", VARIANTS)
MAIN = (
    "current",
    "rowwise, high-precision wgrad",
    "block, f32 scales, hybrid",
    "mxfp8, 2d, hybrid",
    "nvfp4, nearest",
    "hybrid, nearest",
    "per operand",
)
# All recipes as they come, stochastic rounding included, and what takes other paths than those.
ALL = {cls.name: cls() for cls in recipes.RECIPES} | {
    "rowwise, high-precision wgrad": recipes.RowwiseScaling(high_precision_wgrad=True),
    "per operand": mixed_recipe(),
}
every_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
# One of each path through the code: without a history delayed is current scaling, and so on.
EACH_PATH = ("current", "rowwise, high-precision wgrad", "block", "mxfp8", "nvfp4", "hybrid")
each_path = pytest.mark.parametrize("recipe", [ALL[name] for name in EACH_PATH], ids=EACH_PATH)


def test_the_suite_covers_every_recipe():
    for cls in recipes.RECIPES:
        assert any(type(recipe) is cls for recipe, _ in VARIANTS.values())


def integers(shape, seed) -> np.ndarray:
    """From -56 to 56, with 56 or -56 in each row and column of each matrix.

    56 = 7 * 8 makes the scales of all recipes but NVFP4 powers of two, so that all sums are exact
    in f32; above 16 (8) the integers are rounded in e4m3 (e5m2).
    """
    rng = np.random.default_rng(seed)
    x = rng.integers(-56, 57, shape)
    rows, columns = shape[-2:]
    for i in range(max(rows, columns) if math.prod(shape) else 0):
        x[..., i % rows, i % columns] = rng.choice([-56, 56], shape[:-2])
    return x.astype(np.float32)


def layer_operands(examples=None):
    """A square product; with `examples` a stack of them, each with magnitudes of its own."""
    lhs, rhs, dy = (integers((examples or 1, 40, 40), i) for i in range(3))
    sizes = np.exp2(np.arange(examples or 1)).astype(np.float32).reshape(-1, 1, 1)
    stacked = (lhs / sizes, rhs, dy * sizes)
    return stacked if examples else tuple(x[0] for x in stacked)


@partial(jax.jit, static_argnames=("numbers", "recipe", "implementation"))
def value_and_grads(lhs, rhs, dy, numbers=PLAIN, *, recipe, implementation=None, key=None):
    """y, d_lhs, d_rhs."""

    def f(lhs, rhs):
        return scaled_dot_general(
            lhs, rhs, numbers, recipe=recipe, implementation=implementation, key=key
        )

    y, vjp = jax.vjp(f, lhs, rhs)
    return y, *vjp(dy)


def assert_agree(results, expected, recipe):
    """Bitwise if the sums of `integers` are exact; else 1e-5, far below one other value."""
    if not all(p.powers_of_two for p in vars(recipe.resolved()).values()):
        for result, other in zip(results, expected, strict=True):
            other = f64(other)
            np.testing.assert_allclose(f64(result), other, rtol=0, atol=1e-5 * abs(other).max())
    else:
        assert_same([*results], [*expected])
    for result in results:
        assert abs(f64(result)).max() > 0


@pytest.mark.parametrize(
    "variant", [name for name, (_, rules) in VARIANTS.items() if rules.outputs is not None]
)
def test_results_that_are_rounded(variant):
    """Other recipes, in any dtype and layout, are in tests/properties."""
    recipe, rules = VARIANTS[variant]
    arrays = [integers(shape, i) for i, shape in enumerate(((50, 200), (200, 91), (50, 91)))]
    results = value_and_grads(*arrays, recipe=recipe)
    expected = oracle(rules, *(x[None] for x in arrays))
    for name, result, output in zip(NAMES, results, rules.outputs, strict=True):
        exact = expected[name][0].astype(np.float32)
        assert (exact == expected[name][0]).all()  # f32 sums are exact
        rounded = output(exact, 2).astype(np.float32)
        np.testing.assert_array_equal(result, rounded[0], err_msg=name)
        assert len(np.unique(rounded)) > 20


@pytest.mark.slow
@each_path
def test_vmap_equals_loop(recipe):
    """Each example has its own scales, and its own random bits."""
    lhs, rhs, dy = layer_operands(3)
    f = partial(value_and_grads, recipe=recipe)
    batched = jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(lhs, rhs[0], dy)
    loop = [f(lhs[i], rhs[0], dy[i]) for i in range(3)]
    assert_agree(batched, [jnp.stack(parts) for parts in zip(*loop)], recipe)


# How the three arrays of a layer lie on devices. JAX asks for the sharding of a sum over explicit
# axes that shard both operands, and takes an axis once.
FSDP = (P("data"), P("data"), P("data"))
COLUMNS = (P(), P(None, "data"), P(None, "data"))
WAYS = {
    AxisType.Explicit: (FSDP, COLUMNS),
    AxisType.Auto: (
        (P("data"), P(), P("data")),
        FSDP,
        (P(None, "data"), P("data"), P()),
        (P("data"), P(None, "data"), P("data")),
    ),
}


@pytest.mark.slow
@every_recipe
def test_sharded_jit_equals_unsharded(recipe):
    arrays = layer_operands()
    expected = value_and_grads(*arrays, recipe=recipe)
    for kind, ways in WAYS.items():
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        for specs in ways:
            lie = [NamedSharding(mesh, spec) for spec in specs]
            found = value_and_grads(*map(jax.device_put, arrays, lie), recipe=recipe)
            assert_agree(found, expected, recipe)


def block_of_weights(variant, index, size):
    """Which rows or columns of rhs share their scales."""
    free = {"mxfp8, 2d, hybrid": 32, "nvfp4, nearest": 16}.get(variant, 1)
    free = 128 if variant.startswith("block") else free
    start = index // free * free
    return slice(start, min(start + free, size))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("tensor", ["lhs", "rhs", "grad"])
@pytest.mark.parametrize("variant", [*MAIN, "rowwise", "mxfp8", "direct_e5m2, nearest", "unscaled"])
def test_non_finite_elements_show_where_they_count(variant, tensor, bad):
    """The rows and columns of results that the element, or its block, is part of; no others."""
    recipe, _ = VARIANTS[variant]
    m, k, n = 140, 150, 160
    operands = {"lhs": integers((m, k), 0), "rhs": integers((k, n), 1), "grad": integers((m, n), 2)}
    i, j = 135, 141
    operands[tensor][i, j] = bad
    results = value_and_grads(*operands.values(), recipe=recipe)
    shapes = ((m, n), (m, k), (k, n))
    expected = dict(zip(NAMES, (np.zeros(shape, bool) for shape in shapes)))
    if tensor == "lhs":
        expected["y"][i] = True
        expected["d_rhs"][j] = True
    elif tensor == "rhs":
        expected["y"][:, block_of_weights(variant, j, n)] = True
        expected["d_lhs"][:, block_of_weights(variant, i, k)] = True
    else:
        expected["d_lhs"][i] = True
        expected["d_rhs"][:, j] = True
    for result, (name, where) in zip(results, expected.items(), strict=True):
        np.testing.assert_array_equal(~np.isfinite(f64(result)), where, err_msg=name)


QUANTIZATIONS = {  # arrays quantized for lhs, rhs and grad, and results stored in FP8
    **dict.fromkeys(("delayed", "current", "unscaled", "hybrid, nearest, operands only"), 3),
    **dict.fromkeys(("rowwise", "rowwise, f32 scales, hybrid", "mxfp8", "mxfp4, options off"), 6),
    **dict.fromkeys(("mxfp8, floor", "mxfp8, ceil", "mxfp8, even"), 6),
    **dict.fromkeys(("block", "block, f32 scales, hybrid", "mxfp8, 2d, hybrid"), 5),
    "block, tiles in wgrad": 5,
    "nvfp4, options off": 6,
    **dict.fromkeys(("nvfp4, nearest", "nvfp4_4over6, nearest", "nvfp4_row, nearest"), 5),
    "rowwise, high-precision wgrad": 4,
    "direct_e5m2, nearest": 6,
    "hybrid, nearest": 6,
    "per operand": 4,
    **dict.fromkeys(("qat", "qat, high-precision backward"), 1),
    **dict.fromkeys(("qat, mxfp4 by mxfp8", "qat, nvfp4", "qat, rowwise", "qat, block"), 2),
    "qat, fp8 backward": 5,
}


@pytest.mark.representative(13)
@variants
def test_quantized_once_where_once_will_do(variant):
    recipe, _ = VARIANTS[variant]
    program = jax.make_jaxpr(partial(value_and_grads.__wrapped__, recipe=recipe))(*layer_operands())
    assert len(re.findall(r"name=quantized\b", str(program))) == QUANTIZATIONS[variant]


@pytest.mark.slow
@variants
def test_residuals_are_bytes_but_for_what_stays_in_high_precision(variant):
    recipe, _ = VARIANTS[variant]
    lhs, rhs = jnp.zeros((256, 128)), jnp.zeros((128, 64))
    f = partial(scaled_dot_general, dimension_numbers=PLAIN, recipe=recipe)
    kept = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(f, *x)[1], lhs, rhs))
    of_lhs = [leaf for leaf in kept if leaf.size >= lhs.size]
    of_rhs = [leaf for leaf in kept if rhs.size <= leaf.size < lhs.size]
    only_lhs = ("rowwise, high-precision wgrad", "per operand", "qat")
    both = variant == "qat, high-precision backward"
    assert [leaf.dtype.itemsize for leaf in of_lhs] == [4 if both or variant in only_lhs else 1]
    assert [leaf.dtype.itemsize for leaf in of_rhs] == [4 if both else 1]
    rest = sum(leaf.size * leaf.dtype.itemsize for leaf in kept if leaf.size < rhs.size)
    assert rest <= (lhs.size + rhs.size) / 16 + 16  # scales


class Fused(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("hidden", "head"):
            recipe = recipes.Hybrid(fused=("*_0/head",))
            x = jfp8.Dense(64, use_bias=False, recipe=recipe, name=name)(x)
            self.sow("intermediates", f"after_{name}", x)
        return x


def test_fused_layers_keep_their_outputs():
    """Only layers whose path fits a pattern; a quantized output has few values."""
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model = nn.Sequential([Fused()])
    variables = model.init(jax.random.key(0), x)
    _, seen = model.apply(variables, x, mutable="intermediates")
    seen = seen["intermediates"]["layers_0"]
    assert len(np.unique(seen["after_hidden"][0])) < 256
    assert len(np.unique(seen["after_head"][0])) > 64 * 64 / 2
