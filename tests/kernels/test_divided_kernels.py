"""Kernels keep their partitioning rules: cut by hand along a name, the halves give the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import recipes
from jfp8.kernels import grouped_kernels as by_kernels
from jfp8.kernels import partitioning as divided_functions
from jfp8.kernels import quantize_and_transpose as both_ways
from jfp8.kernels.hopper import backend as hopper
from jfp8.kernels.partitioning import Rule
from jfp8.kernels.quantize_and_transpose import Gradient, Made
from jfp8.matmul.spec import MatmulSpec
from jfp8.quantizers.blocks import Blockwise
from jfp8.quantizers.quantizer import Current, Delayed
from jfp8.quantizers.rowwise import Rowwise
from jfp8.scaling.formats import E4M3FN
from support.devices import needs_mosaic, traced_for

pytestmark = needs_mosaic
HALVES = 2


def cut(x, dims, name):
    """Both halves of `x` along a name, or `x` twice."""
    found = [axis for axis, dim in enumerate(dims) if dim.name == name]
    return jnp.split(x, HALVES, found[0]) if found else [x] * HALVES


def joined(parts, dims, name, combine):
    found = [axis for axis, dim in enumerate(dims) if dim.name == name]
    if found:
        return np.concatenate(parts, found[0])
    if combine == "alike":
        np.testing.assert_array_equal(*parts)
        return parts[0]
    ways = {"sum": np.add, "max": np.maximum, "max later": np.maximum}
    return ways[combine](*parts)


@pytest.fixture
def divided_by_hand(monkeypatch):
    """Puts a function in the place of `divided` that checks each name; lists what was checked."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    checked = []

    def divided(name, function, rule, combine=None, of_parts=None):
        del of_parts
        name, rule = name.partition(",")[0], Rule.parse(rule)

        def called(*operands):
            whole = function(*operands)
            expected = [np.asarray(x) for x in jax.tree.leaves(whole)]
            for letter in rule.units([x.shape for x in operands]):
                halves = zip(
                    *(cut(x, d, letter) for x, d in zip(operands, rule.operands, strict=True)),
                    strict=True,
                )
                parts = [list(map(np.asarray, jax.tree.leaves(function(*h)))) for h in halves]
                ways = [combine] * len(expected) if isinstance(combine, str | None) else combine
                for found, dims, way, wanted in zip(
                    zip(*parts, strict=True), rule.results, ways, expected, strict=True
                ):
                    bits = joined(found, dims, letter, way)
                    if way in ("max", "max later"):  # the parts of halves are others
                        bits, wanted = bits.max(), wanted.max()
                    np.testing.assert_array_equal(
                        bits.astype(np.float32), wanted.astype(np.float32), f"{name} by {letter}"
                    )
                checked.append((name, letter))
            assert all(np.abs(x.astype(np.float32)).max() > 0 for x in expected)
            return whole

        return called

    for module in (both_ways, by_kernels, divided_functions):  # the last has `divided_sum`
        monkeypatch.setattr(module, "divided", divided)
    # Under jit, halves would have no values to compare.
    monkeypatch.setattr(both_ways, "found_in", both_ways.found_in.__wrapped__)
    # Sweeps start some blocks for each multiprocessor, which interpreted take as long as the rest.
    with traced_for(multiprocessors=1), plgpu.force_gpu_interpret_mode():
        yield checked


def numbers(*shape, seed=0):
    """Of many magnitudes, rows and columns unlike each other."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-6, 7, shape[:1] + (1,))
    return jnp.asarray(x * 2.0 ** rng.integers(-3, 4, shape[1:]), jnp.bfloat16)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("quantizer", "kernels"),
    [
        (Delayed(E4M3FN), ["tensor_amax", "quantize_tensor"]),
        (Rowwise(E4M3FN), ["row_and_column_amax", "quantize_lines"]),
        (Current(E4M3FN), ["quantize_tensor"]),
        (Blockwise(E4M3FN, (128, 1)), ["quantize_rows_in_blocks_128"]),
        (Blockwise(E4M3FN, (128, 128)), ["quantize_tiles"]),
        (Blockwise(E4M3FN, (32, 1), "rceil"), ["quantize_rows_in_blocks_32"]),
    ],
    ids=repr,
)
def test_quantizing(quantizer, kernels, divided_by_hand):
    kernel = both_ways._KERNELS[type(quantizer)]
    state = recipes.DelayedScaling(amax_history_len=2).init_state()[
        "lhs"
    ]  # without an amax; others do not read it
    one_scale = isinstance(quantizer, Current | Delayed)
    x = numbers(128, 128).reshape(2, 64, 128) if one_scale else numbers(256, 256)
    kernel(quantizer, both_ways._read(x, None), state, (jnp.float32(3.0), None))
    letters = ("i", "ii", "j") if one_scale else ("i", "j")
    assert set(divided_by_hand) == {(name, letter) for name in kernels for letter in letters}


def product_of_two(x0, x1):
    return x0 * x1


@pytest.mark.representative(1)
@pytest.mark.parametrize("make", [Gradient(product_of_two), product_of_two])
@pytest.mark.parametrize(
    ("quantizer", "kernels"),
    [
        (Delayed(E4M3FN), ["tensor_amax", "quantize_tensor"]),
        (Blockwise(E4M3FN, (128, 1)), ["quantize_rows_in_blocks_128"]),
    ],
    ids=repr,
)
def test_quantizing_what_is_made(quantizer, kernels, make, divided_by_hand):
    """Each device makes its part, of all projections; no device has a part of one block."""
    x, dy = numbers(256, 512).reshape(256, 2, 256), numbers(256, 256, seed=1)
    gradient = isinstance(make, Gradient)
    shape = (256, 512) if gradient else (256, 256)
    made = Made(jnp.zeros(shape, x.dtype), [x, dy] if gradient else [x], make)
    state = recipes.DelayedScaling(amax_history_len=2).init_state()["grad"]
    kernel = both_ways._KERNELS[type(quantizer)]
    found = kernel(quantizer, both_ways._read(made, None), state, (None, None))
    assert set(divided_by_hand) == {(name, letter) for name in kernels for letter in "ij"}
    assert (found.straight.shape, found.transposed.shape) == (shape, shape[::-1])


WHOLE = {"scale_rounding": "power_of_two"}  # so that sums of integers stay exact


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("granularities", "name"),
    [
        ((jfp8.PerAxis(0), jfp8.PerAxis(0)), "matmul"),
        ((jfp8.Block((1, 128)), jfp8.Block((128, 128))), "block_matmul"),
        ((jfp8.PerTensor(), jfp8.PerTensor()), "matmul"),
        ((jfp8.Block((1, 128)), jfp8.Block((1, 128))), "block_matmul"),
        ((jfp8.Block((128, 128)), jfp8.Block((1, 128))), "block_matmul"),
        ((jfp8.Block((128, 128)), jfp8.Block((128, 128))), "block_matmul"),
    ],
    ids=repr,
)
def test_products(granularities, name, divided_by_hand):
    rng = np.random.default_rng(0)
    integers = lambda *shape: jnp.asarray(rng.integers(-8, 9, shape), jnp.float32)
    tiles_of_a = granularities == (jfp8.Block((128, 128)), jfp8.Block((1, 128)))
    uncut = [((192, 128), "nk")]  # 192 rows are no two parts of whole tiles
    for sizes, letters in [((256, 128), "mnk"), *uncut] if tiles_of_a else [((128, 256), "mnk")]:
        a, b = (
            jfp8.quantize(integers(size, 256), granularity=granularity, **WHOLE)
            for size, granularity in zip(sizes, granularities, strict=True)
        )
        job = MatmulSpec((((1,), (1,)), ((), ())), np.dtype(np.float32), "f32", False, False)
        divided_by_hand.clear()
        y = hopper.by_mosaic(a, b, job)
        np.testing.assert_array_equal(y, np.asarray(a.dequantize()) @ np.asarray(b.dequantize()).T)
        assert set(divided_by_hand) == {(name, letter) for letter in letters}


@pytest.mark.representative(1)
@pytest.mark.parametrize("in_blocks", [True, False])
def test_grouped_products(in_blocks, divided_by_hand):
    """Four tiles of three groups, the last of them of none: half of the tiles have other groups."""
    rng = np.random.default_rng(0)
    integers = lambda *shape: jnp.asarray(rng.integers(-8, 9, shape), jnp.float32)
    rows = jfp8.Block((1, 128)) if in_blocks else jfp8.PerTensor()
    quantized = lambda x, granularity: jfp8.quantize(x, granularity=granularity, **WHOLE)
    group = jnp.array([0, 0, 2, -1], jnp.int32)
    x = quantized(integers(512, 256), rows)
    w = jnp.stack([integers(256, 256) for _ in range(3)])
    w = quantized(w, jfp8.Block((1, 128, 128)) if in_blocks else jfp8.PerAxis(0))
    a, b = quantized(integers(128, 512), rows), quantized(integers(128, 512), rows)
    y = by_kernels._matmul(x, w, group, np.dtype(np.float32))
    outer = by_kernels._outer(a, b, group, 3, np.dtype(np.float32), None)
    x, w, a, b = (np.asarray(q.dequantize()) for q in (x, w, a, b))
    for tile, of_tile in enumerate(group):
        part = slice(128 * tile, 128 * (tile + 1))
        expected = x[part] @ w[of_tile].T if of_tile >= 0 else 0 * y[part]
        np.testing.assert_array_equal(y[part], expected)
    expected = a[:, :256] @ b[:, :256].T, np.zeros((128, 128)), a[:, 256:384] @ b[:, 256:384].T
    np.testing.assert_array_equal(outer, np.stack(expected))
    letters = {"grouped_matmul": "mnk", "grouped_outer": "mij"}
    assert set(divided_by_hand) == {(name, x) for name in letters for x in letters[name]}
