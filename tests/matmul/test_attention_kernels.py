"""Attention in Pallas for Hopper and Blackwell, interpreted, against its equations in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import jfp8
from jfp8 import E4M3FN, E5M2, recipes
from jfp8.kernels.attention import backward_rule, forward_rule
from jfp8.kernels.blackwell import attention as blackwell
from jfp8.kernels.flash.launch import packed
from jfp8.kernels.flash.problem import BLOCK, WORD
from jfp8.kernels.hopper import attention as hopper
from support.attention_in_f64 import (
    assert_attention,
    assert_gradients,
    backward_operands_of,
    f64,
    operands_of,
    visible_keys,
    with_other_tokens,
)
from support.devices import traced_for
from support.interpreter import interpreted

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
KERNELS = {"H200": hopper, "B200": blackwell}
NAMES = {"H200": "mosaic_gpu", "B200": "mosaic_gpu_blackwell"}
gpus = pytest.mark.parametrize("gpu", KERNELS)


def on_each_gpu(cases):
    """Each case by each kernel that computes it: Blackwell's take no mask and no heads of 256."""
    known = lambda gpu, sizes, options: gpu == "H200" or sizes[4] < 256 and "mask" not in options
    pairs = [
        (gpu, name) for name, case in cases.items() for gpu in KERNELS if known(gpu, *case[:2])
    ]
    return pytest.mark.parametrize(("gpu", "case"), pairs)


def random_mask(*shape, backward=False):
    """bool[shape]: most keys hidden; some queries see none, and some no key of a block."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
        mask[..., slice(64, None) if backward else slice(40), :BLOCK] = False
    else:
        mask[..., -BLOCK:] = False
    return mask


FORWARD = {
    # heads, groups, rows, keys, size
    "all": ((2, 2, 200, 300, 64), {"window": (150, 40), "key_lengths": [270]}, BF16),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, F32),
    "causal-256": ((4, 4, 100, 130, 256), {"is_causal": True}, F32),
    "window": ((1, 1, 130, 256, 256), {"window": (30, 0)}, F16),
    "lengths": ((8, 4, 64, 200, 64), {"key_lengths": [0, 77]}, F16),
    "beyond": ((1, 1, 400, 130, 64), {"window": (100, 3), "is_causal": True}, F32),
    "ring": ((1, 1, 128, 900, 64), {}, F32),
    "e5m2": ((1, 1, 128, 200, 64), {"is_causal": True, "formats": (E5M2, E4M3FN, E5M2)}, F32),
    "mask": ((2, 2, 130, 300, 64), {"mask": (2, 130, 300)}, F32),
    "mask-of-keys": ((1, 1, 140, 400, 128), {"mask": (1, 1, 400), "window": (300, 90)}, BF16),
    "mask-of-queries": ((1, 1, 100, 150, 256), {"mask": (1, 100, 1), "is_causal": True}, F32),
}


@pytest.mark.representative(3)
@on_each_gpu(FORWARD)
def test_attention(gpu, case):
    sizes, options, out_dtype = FORWARD[case]
    given = {"is_causal": False, "window": None} | options
    operands = operands_of(*sizes, given.pop("formats", (E4M3FN,) * 3))
    groups, scale, lengths = sizes[1], sizes[-1] ** -0.5, options.get("key_lengths")
    if lengths is not None:
        given["key_lengths"] = jnp.array(lengths, jnp.int32)
    mask = random_mask(*given["mask"]) if "mask" in given else np.array(True)
    if "mask" in given:
        given["mask"] = jnp.array(mask)
    forward = KERNELS[gpu].attention_forward
    results = interpreted(
        forward, *operands, groups=groups, scale=scale, out_dtype=out_dtype, **given
    )
    how = given["is_causal"], given["window"], lengths, out_dtype, mask
    assert_attention(results, operands, groups, scale, *how)


BACKWARD = {
    # heads, groups, rows, keys, size
    "grouped": ((2, 2, 130, 100, 64), {"is_causal": True}, (E4M3FN, E5M2), F32),
    "all": (
        (4, 2, 200, 300, 64),
        {"window": (150, 110), "key_lengths": [270, 0]},
        (E5M2, E4M3FN),
        BF16,
    ),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, (E5M2, E5M2), F32),
    "rings": ((1, 1, 400, 700, 64), {}, (E4M3FN, E4M3FN), F32),
    "window": ((1, 1, 130, 256, 128), {"window": (30, 0)}, (E5M2, E5M2), BF16),
    "mask": ((2, 2, 200, 150, 64), {"mask": (2, 200, 150)}, (E5M2, E5M2), F32),
    "mask-of-keys": (
        (1, 1, 150, 200, 128),
        {"mask": (1, 1, 200), "is_causal": True},
        (E5M2, E4M3FN),
        BF16,
    ),
    "mask-of-queries": (
        (1, 1, 150, 200, 64),
        {"mask": (1, 150, 1), "window": (90, 30)},
        (E5M2, E4M3FN),
        BF16,
    ),
}


@pytest.mark.representative(2)
@on_each_gpu(BACKWARD)
def test_gradients(gpu, case):
    sizes, options, formats, out_dtype = BACKWARD[case]
    heads, groups, rows, keys, size = sizes
    options = {"is_causal": False, "window": None} | options
    lengths, scale = options.pop("key_lengths", None), 0.7 * size**-0.5
    of_head = np.repeat(lengths or [keys] * (heads // groups), groups)
    mask = random_mask(*options.pop("mask"), backward=True) if "mask" in options else None
    seen = [visible_keys(rows, keys, *options.values(), length) for length in of_head]
    seen = np.array(seen) & (True if mask is None else mask)
    stored, vectors = backward_operands_of(sizes, seen, formats[0], scale)
    key_lengths = None if lengths is None else jnp.array(lengths, jnp.int32)
    how = {"groups": groups, "scale": scale, "formats": formats, "out_dtype": out_dtype}
    operands = stored, vectors, key_lengths, *([] if mask is None else [jnp.array(mask)])
    found = interpreted(KERNELS[gpu].attention_backward, *operands, **how, **options)
    assert_gradients(found, stored, vectors, groups, scale, seen, formats, out_dtype)


@pytest.mark.parametrize(
    ("gpu", "window", "by_mask"),
    [
        ("H200", None, False),
        ("B200", None, False),
        ("H200", (64, 9), False),
        pytest.param("H200", None, True, marks=pytest.mark.slow),
    ],
)
def test_later_tokens_change_nothing(gpu, window, by_mask):
    """Not a bit of an earlier one, whatever their keys, values and scales are."""
    seen, look_ahead = 170, window[1] if window else 0
    operands = operands_of(1, 1, 256, 256, 64)
    attend = partial(
        *(interpreted, KERNELS[gpu].attention_forward),
        **({"mask": jnp.tri(256, dtype=bool)[None]} if by_mask else {}),
        groups=1,
        scale=0.125,
        is_causal=not (window or by_mask),
        window=window,
        out_dtype=F32,
    )
    before = attend(*operands)
    after = attend(*with_other_tokens(operands, seen))
    earlier = seen - look_ahead
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:, :earlier], np.asarray(y)[:, :earlier])
        assert (np.asarray(x)[:, seen:] != np.asarray(y)[:, seen:]).any()


MASKED = 200, 300  # queries and keys
OF_KEYS = 2  # heads of queries that share one of keys
ROWS = 128  # of a tile


@pytest.mark.parametrize("columns", ["queries", "keys"])
@pytest.mark.parametrize(
    "shape", [(2, 4, *MASKED), (1, 1, 200, 1), (2, 1, 1, 300)], ids=["all", "of-queries", "of-keys"]
)
def test_bits_and_spans(shape, columns):
    width = 64 if columns == "queries" else 128
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., :130, :] &= shape[2] == 1
    mask[..., 270:] &= shape[3] == 1
    mask[:, 0, :, 128:] &= shape[1] == 1  # heads of a group see different keys
    pack = jax.jit(packed, static_argnums=(1, 2, 3, 4))
    dimension = ["queries", "keys"].index(columns) + 2
    found = pack(jnp.array(mask), MASKED, dimension, (ROWS, width), OF_KEYS)
    bits, spans = (np.asarray(found[name]) for name in ("bits", "spans"))

    whole = np.broadcast_to(mask, (*shape[:2], *MASKED))
    whole = whole.swapaxes(2, 3) if columns == "queries" else whole  # of rows and columns
    (n_rows, n_columns), (words, rows) = whole.shape[2:], bits.shape[2:]
    row, column = np.arange(n_rows)[:, None], np.arange(n_columns)
    # One tile, or one block, where all are alike.
    row, column = row % rows, column % (words * WORD)
    np.testing.assert_array_equal(bits[:, :, column // WORD, row] >> (column % WORD) & 1, whole)
    of_rows, of_columns = shape[2:] if columns == "keys" else shape[:1:-1]
    assert (rows == ROWS) == (of_rows == 1)
    assert (words * WORD == width) == (of_columns == 1)

    heads = OF_KEYS if shape[1] > 1 else 1
    for b, head, tile in np.ndindex(shape[0], shape[1] // heads, -(-n_rows // ROWS)):
        seen = whole[b, head * heads : (head + 1) * heads, tile * ROWS : (tile + 1) * ROWS]
        blocks = np.flatnonzero(seen.any((0, 1))) // width
        first, end = spans[b, head, :, tile]
        assert (first, end) == ((blocks[0], blocks[-1] + 1) if len(blocks) else (first, 0))
        assert first >= end or len(blocks)


def jaxpr_on(gpu, f, *args):
    with traced_for(f"NVIDIA {gpu}"):
        return str(jax.make_jaxpr(f)(*args))


@gpus
@pytest.mark.parametrize("how", [{"is_causal": True}, {"mask": np.tri(8, dtype=bool)}])
def test_kernels_are_chosen_where_they_compute_the_same(gpu, how):
    x = jnp.ones((1, 8, 2, 64))
    attend = partial(jfp8.scaled_dot_product_attention, **how)
    both = jax.grad(lambda x, attend=attend: attend(x, x, x).sum())
    found = jaxpr_on(gpu, both, x)
    assert ("mpmd_map" in found) == (gpu == "H200" or "mask" not in how)
    assert ("jfp8_attention_dq_blackwell" in found) == (gpu == "B200" and "mask" not in how)
    assert "mpmd_map" not in jaxpr_on(gpu, partial(attend, implementation="emulate"), x, x, x)
    assert "mpmd_map" not in str(jax.make_jaxpr(both)(x))  # on a CPU


@gpus
@pytest.mark.parametrize(
    ("options", "size", "reason"),
    [
        ({"bias": jnp.ones((8, 8))}, 64, "bias: the kernels know"),
        ({"scale": -1.0}, 64, "negate the queries"),
        ({"recipe": "direct_e5m2"}, 64, "P in E4M3FN"),
        ({}, 16, "heads of 16 numbers"),
    ],
)
def test_when_the_reference_computes(gpu, options, size, reason):
    """Kernels refuse what they do not compute, but only if they are named."""
    x = jnp.ones((1, 8, 2, size))
    attend = partial(jfp8.scaled_dot_product_attention, **options)
    with pytest.raises(ValueError, match=reason):
        attend(x, x, x, implementation=NAMES[gpu])
    assert "mpmd_map" not in jaxpr_on(gpu, attend, x, x, x)


def test_another_gpu_is_refused():
    x = jnp.ones((1, 8, 2, 64))
    attend = partial(jfp8.scaled_dot_product_attention, implementation=NAMES["B200"])
    with pytest.raises(ValueError, match="NVIDIA H200: the Mosaic GPU kernels are for Blackwell"):
        jaxpr_on("H200", attend, x, x, x)
    with pytest.raises(Exception, match="compiled for another platform"):
        jax.jit(attend)(x, x, x)
    with pytest.raises(ValueError, match="mask: the kernels know is_causal"):
        attend(x, x, x, mask=jnp.ones((8, 8), bool))


def test_rules_of_division():
    rule = "b n T H, b n/4 S H, b n/4 H S, b n T, b n/4 S, b n/4 S, b n/4 -> b n T H, b n T"
    lengths = jnp.ones((2, 2), jnp.int32)
    assert forward_rule(4, key_lengths=lengths) == rule
    rule = "b n T H, b n S H, b n H S, b n T, b n S, b n S -> b n T H, b n T"
    assert forward_rule(1) == rule
    each = lambda *shape: forward_rule(1, mask=jnp.ones(shape, bool))
    assert each(1, 1, 8, 9) == rule.replace(" ->", ", B N T S ->")
    assert each(2, 8, 1, 9) == rule.replace(" ->", ", b n Q S ->")
    assert each(2, 1, 8, 1) == rule.replace(" ->", ", b N T K ->")
    matrices = "b n T H, b n/4 S H, b n/4 S H, b n T H, b n H T, b n/4 H S, b n H T"
    vectors = "b n T, b n/4 S, b n/4 S, b n T, b n T, b n/4 S, b n T, b n T, b n T"
    results = "b n T H, b n/4 S H, b n/4 S H, b n T"
    assert backward_rule(4, key_lengths=lengths) == f"{matrices}, {vectors}, b n/4 -> {results}"
    assert backward_rule(1) == f"{matrices}, {vectors} -> {results}".replace("/4", "")


LENGTHS = {"is_causal": True, "query_seq_lengths": [150], "key_value_seq_lengths": [130]}


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        ("H200", LENGTHS),
        ("B200", LENGTHS),
        pytest.param("H200", {"local_window_size": (100, 20)}, marks=pytest.mark.slow),
        ("H200", {"is_causal": True, "segments": [50, 90, 30], "sinks": [-1.0, 3.0, 0.5, 0.0]}),
    ],
    ids=["lengths", "lengths on Blackwell", "window", "segments and sinks"],
)
def test_it_computes_what_the_emulation_computes(gpu, options):
    """But for the last places of f32, which decide how a few weights are rounded."""
    arrays = {n: jnp.array(x) for n, x in options.items() if "lengths" in n or n == "sinks"}
    options = options | arrays
    if segmented := "segments" in options:
        ids = jnp.repeat(jnp.arange(3), jnp.array(options.pop("segments")))[None]
        options |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    q, k, v = (normal(seed, (1, 170, heads, 64)) for seed, heads in enumerate((4, 2, 2)))
    recipe = recipes.DelayedScaling()
    states = {which: recipe.init_state() for which in ("scores", "context")}
    full = jax.tree.map(jnp.copy, states["context"]["rhs"]) | {"amax_history": jnp.full(16, 3.0)}
    states["context"] = states["context"] | {"rhs": full}  # V has been seen, Q and K have not
    grad = normal(3, q.shape)

    def results(implementation):
        how = {"recipe": recipe, "state": states, "implementation": implementation}
        attend = partial(jfp8.scaled_dot_product_attention, **how, **options)
        y, back = jax.vjp(attend, q, k, v)
        return [y, *back(grad)]

    with plgpu.force_gpu_interpret_mode():
        found = results(NAMES[gpu])
    expected = results("emulate")
    if segmented:  # of which the reference rounds P for dV by the queries of one sequence
        assert distance(found.pop(), expected.pop()) < 0.03
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert float(jnp.abs(a - b).max()) < 1e-3 * float(jnp.abs(b).max())
        # One of 4e4 weights that rounds to its other neighbour, an eighth away, makes 6e-4.
        assert distance(a, b) < 6e-4


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4, 70, 140), (1, 1, 70, 140), (2, 1, 1, 140)])
def test_masks_of_batches_and_heads(shape):
    """Also heads that share keys, and a query that sees nothing: all of it is zero."""
    q, k, v = (normal(n, (2, t, h, 64)) for n, (t, h) in enumerate(((70, 4), (140, 2), (140, 2))))
    mask, grad = random_mask(*shape), normal(3, q.shape)

    def results(implementation):
        how = {"mask": jnp.array(mask), "recipe": "current", "implementation": implementation}
        y, back = jax.vjp(partial(jfp8.scaled_dot_product_attention, **how), q, k, v)
        return [y, *back(grad)]

    with plgpu.force_gpu_interpret_mode():
        found = results("mosaic_gpu")
    for a, b in zip(found, results("emulate"), strict=True):
        # A weight whose rounding the last place of f32 decides is a good part of its query's sum.
        assert distance(a, b) < 1e-3
        assert np.mean(np.abs(a - b) > 1e-5 * np.abs(b).max()) < 0.01
    unseen = ~np.broadcast_to(mask, (2, 4, 70, 140)).any(3).swapaxes(1, 2)
    assert unseen.any() == (shape[2] > 1)
    for x in found[:2]:
        assert (f64(x)[unseen] == 0).all()


def distance(a, b):
    a, b = f64(a), f64(b)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def normal(seed, shape):
    """Rows of many magnitudes."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1))), F32)
