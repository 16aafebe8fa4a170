"""Attention in Pallas, interpreted, against its equations in float64; and what it must not see."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import jfp8
from jfp8 import recipes
from jfp8.matmul.hopper.attention import BLOCK, attention_forward, division
from support.interpreter import no_races

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def interpreted(*operands, **options):
    """The results of the kernel, after a check that none of its threads raced another."""
    with no_races() as params:
        return jax.block_until_ready(attention_forward(*operands, **options, interpret=params))


def f64(x):
    return np.asarray(x).astype(np.float64)


def operands_of(heads, groups, rows, keys, size, dtypes=(E4M3, E4M3, E4M3)):
    """Random ones, and a token of zeros; keys and values have scales of many magnitudes."""
    rng = np.random.default_rng(rows + keys + size)
    key_heads = heads // groups
    shapes = (heads, rows, size), (key_heads, keys, size), (key_heads, size, keys)
    data = [jnp.asarray(rng.standard_normal(s), d) for s, d in zip(shapes, dtypes, strict=True)]
    q_scale = rng.uniform(0.5, 2, (heads, rows))
    k_scale = 10 ** rng.uniform(-2.5, 0.5, (key_heads, keys))
    v_scale = 2.0 ** rng.integers(-6, 6, (key_heads, keys))
    # As tokens of zeros are quantized where scales move into weights.
    of_zeros = lambda x: jnp.asarray(x, F32).at[:, 5].set(2.0**-126)
    data = [data[0].at[:, 5].set(0), data[1].at[:, 5].set(0), data[2].at[:, :, 5].set(0)]
    return *data, *map(of_zeros, (q_scale, k_scale, v_scale))


def visible_keys(rows, keys, is_causal, window, length):
    """bool[rows, keys]."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    left, right = window or (rows + keys, rows + keys)
    seen = (j >= i - left) & (j <= i + right) & (j < length)
    return seen & (j <= i) if is_causal else seen


def e4m3(x):
    return x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def attention_in_f64(q, k, v_t, q_scale, k_scale, v_scale, scale, visible):
    """One head by the equations, block by block: o and lse, with a bound on the error of each.

    The kernel's logits are f32: they differ by at most a rounding for each of the H terms and for
    each factor. So does the maximum, and with exp2, off by 2^-22, that bounds how far a probability
    may be from ours. Where a rounding to e4m3fn lies in between, its two results are both right.
    """
    rows, size = q.shape
    factor = q_scale[:, None] * scale * np.log2(np.e)
    s = np.where(visible, q @ k.T * factor * k_scale, -np.inf)
    slack = (size + 6) * 2.0**-24 * (np.abs(q) @ np.abs(k).T * factor * k_scale + 8)
    m, l, acc, bound = np.full(rows, -np.inf), np.zeros(rows), 0.0, 0.0
    for start in range(0, len(k), BLOCK):
        block = slice(start, start + BLOCK)
        seen = visible[:, block]
        before, m = m, np.maximum(m, s[:, block].max(1))
        shift = np.where(np.isinf(m), 0, m)
        p, shrink = np.exp2(s[:, block] - shift[:, None]), np.exp2(before - shift)
        l = l * shrink + p.sum(1)
        unit = np.where(seen, v_scale[block], 0).max(1)
        unit = np.where(unit == 0, 1, unit)
        w = p * (v_scale[block] / unit[:, None]) * 2.0**8
        off = slack[:, block] + np.where(seen, slack[:, block], 0).max(1, keepdims=True) + 2.0**-22
        flips = e4m3(w * (1 + off)) - e4m3(w * (1 - off))
        unit = unit[:, None] * 2.0**-8
        acc = acc * shrink[:, None] + e4m3(w) @ v_t[:, block].T * unit
        bound = bound * shrink[:, None] + flips @ np.abs(v_t[:, block]).T * unit
        bound = bound + 2.0**-16 * (e4m3(w) @ np.abs(v_t[:, block]).T * unit)
    some = l > 0
    factor = np.where(some, 1 / np.where(some, l, 1), 0)
    off = np.where(visible, slack, 0).max(1) + 2.0**-20
    with np.errstate(divide="ignore"):
        lse = m * np.log(2) + np.log(l)
    return acc * factor[:, None], (bound + off[:, None] * np.abs(acc)) * factor[:, None], lse, off


def random_mask(*shape):
    """bool[shape]: most keys hidden; some queries see none, and some no key of a block."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
        mask[..., :40, :BLOCK] = False
    else:
        mask[..., -BLOCK:] = False
    return mask


def assert_attention(
    results, operands, groups, scale, is_causal, window, lengths, out_dtype, mask=True
):
    o, lse = results
    assert (o.dtype, lse.dtype, o.shape) == (out_dtype, F32, operands[0].shape)
    q, k, v_t, *scales = map(f64, operands)
    for head in range(len(q)):
        g = head // groups
        q_scale, k_scale, v_scale = (x[i] for x, i in zip(scales, (head, g, g), strict=True))
        length = k.shape[1] if lengths is None else lengths[g]
        visible = visible_keys(q.shape[1], k.shape[1], is_causal, window, length)
        visible = visible & np.broadcast_to(mask, (len(q), *visible.shape))[head]
        want, bound, want_lse, lse_bound = attention_in_f64(
            q[head], k[g], v_t[g], q_scale, k_scale, v_scale, scale, visible
        )
        bound = bound + float(jnp.finfo(out_dtype).eps) / 2 * (np.abs(want) + bound)
        assert (np.abs(f64(o[head]) - want) <= bound).all()
        none = ~visible.any(1)
        assert (f64(o[head])[none] == 0).all()
        assert (f64(lse[head])[none] == -np.inf).all()
        off = np.abs(f64(lse[head])[~none] - want_lse[~none])
        assert (off <= lse_bound[~none] + 2.0**-22 * np.abs(want_lse[~none])).all()
        # The bound is no excuse: it is small beside the values.
        if (~none).any():
            assert np.median(bound[~none]) < 0.02 * np.median(np.abs(want[~none])) + 1e-30


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("sizes", "options", "out_dtype"),
    [
        # heads, groups, rows, keys, size
        ((2, 2, 200, 300, 64), {"window": (150, 40), "key_lengths": [270]}, BF16),
        ((1, 1, 256, 256, 128), {"is_causal": True}, F32),
        ((4, 4, 100, 130, 256), {"is_causal": True}, F32),
        ((1, 1, 130, 256, 256), {"window": (30, 0)}, F16),
        ((8, 4, 64, 200, 64), {"key_lengths": [0, 77]}, F32),
        ((1, 1, 400, 130, 64), {"window": (100, 3), "is_causal": True}, F32),
        ((1, 1, 128, 640, 64), {"stages": 2}, F32),
        ((2, 2, 130, 300, 64), {"mask": (2, 130, 300)}, F32),
        ((1, 1, 140, 400, 128), {"mask": (1, 1, 400), "window": (300, 90)}, BF16),
        ((1, 1, 100, 150, 256), {"mask": (1, 100, 1), "is_causal": True}, F32),
    ],
    ids=[
        *("all", "causal", "causal-256", "window", "lengths", "beyond", "ring"),
        *("mask", "mask-of-keys", "mask-of-queries"),
    ],
)
def test_attention(sizes, options, out_dtype):
    heads, groups, rows, keys, size = sizes
    operands = operands_of(heads, groups, rows, keys, size)
    lengths = options.get("key_lengths")
    given = {"is_causal": False, "window": None} | options
    if lengths is not None:
        given["key_lengths"] = jnp.array(lengths, jnp.int32)
    mask = random_mask(*given["mask"]) if "mask" in given else np.array(True)
    if "mask" in given:
        given["mask"] = jnp.array(mask)
    results = interpreted(*operands, groups=groups, scale=size**-0.5, out_dtype=out_dtype, **given)
    is_causal, window = given["is_causal"], given["window"]
    how = is_causal, window, lengths, out_dtype, mask
    assert_attention(results, operands, groups, size**-0.5, *how)


@pytest.mark.slow
def test_e5m2_operands():
    operands = operands_of(1, 1, 128, 200, 64, (E5M2, E4M3, E5M2))
    o = interpreted(*operands, groups=1, scale=0.125, is_causal=True, window=None, out_dtype=F32)
    assert_attention(o, operands, 1, 0.125, True, None, None, F32)


@pytest.mark.parametrize(
    ("window", "by_mask"),
    [(None, False), ((64, 9), False), pytest.param(None, True, marks=pytest.mark.slow)],
    ids=["causal", "window", "mask"],
)
def test_later_tokens_change_nothing(window, by_mask):
    """Not a bit of an earlier one, whatever their keys, values and scales are."""
    seen, look_ahead = 170, window[1] if window else 0
    q, k, v_t, q_scale, k_scale, v_scale = operands_of(1, 1, 256, 256, 64)
    attend = partial(
        interpreted,
        mask=jnp.tri(256, dtype=bool)[None] if by_mask else None,
        groups=1,
        scale=0.125,
        is_causal=not (window or by_mask),
        window=window,
        out_dtype=F32,
    )
    before = attend(q, k, v_t, q_scale, k_scale, v_scale)
    after = attend(
        q.at[:, seen:].set(448.0),
        k.at[:, seen:].set(-448.0),
        v_t.at[:, :, seen:].set(448.0),
        q_scale.at[:, seen:].set(1e4),
        k_scale.at[:, seen:].set(1e4),
        v_scale.at[:, seen:].set(2.0**60),
    )
    earlier = seen - look_ahead
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:, :earlier], np.asarray(y)[:, :earlier])
        assert (np.asarray(x)[:, seen:] != np.asarray(y)[:, seen:]).any()


def test_what_is_refused():
    operands = operands_of(1, 1, 8, 8, 32)
    attend = partial(attention_forward, groups=1, is_causal=False, out_dtype=F32)
    with pytest.raises(ValueError, match="64, 128 or 256 numbers, not 32"):
        attend(*operands, scale=1.0, window=None)
    operands = operands_of(1, 1, 8, 8, 64)
    with pytest.raises(ValueError, match="negate the queries"):
        attend(*operands, scale=-1.0, window=None)
    with pytest.raises(ValueError, match="no negative numbers"):
        attend(*operands, scale=1.0, window=(3, -1))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": jnp.ones((8, 8))}, "a bias"),
        ({"scale": -1.0}, "negate the queries"),
        ({"recipe": "direct_e5m2"}, "P in E4M3FN"),
        ({}, "heads of 16 numbers"),
    ],
)
def test_when_the_reference_computes(options, reason):
    """What the kernels do not compute is refused where they are asked for, and only there."""
    size = 64 if options else 16
    x = jnp.ones((1, 8, 2, size))
    attend = partial(jfp8.scaled_dot_product_attention, **options)
    with pytest.raises(ValueError, match=reason):
        attend(x, x, x, implementation="mosaic_gpu")
    assert "mpmd_map" not in jaxpr_on_h200(attend, x, x, x)


@pytest.mark.parametrize("how", [{"is_causal": True}, {"mask": np.tri(8, dtype=bool)}])
def test_kernels_are_chosen_where_they_compute_the_same(how):
    x = jnp.ones((1, 8, 2, 64))
    attend = partial(jfp8.scaled_dot_product_attention, **how)
    assert "mpmd_map" in jaxpr_on_h200(attend, x, x, x)
    by_reference = partial(attend, implementation="emulate")
    assert "mpmd_map" not in jaxpr_on_h200(by_reference, x, x, x)
    assert "mpmd_map" not in str(jax.make_jaxpr(attend)(x, x, x))  # on a CPU


def jaxpr_on_h200(f, *args):
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(f)(*args))


def test_rules_of_division():
    rule = "b n T H, b n/4 S H, b n/4 H S, b n T, b n/4 S, b n/4 S, b n/4 -> b n T H, b n T"
    assert division(4, key_lengths=jnp.ones((2, 2), jnp.int32)) == rule
    rule = "b n T H, b n S H, b n H S, b n T, b n S, b n S -> b n T H, b n T"
    assert division(1) == rule
    each = lambda *shape: division(1, mask=jnp.ones(shape, bool))
    assert each(1, 1, 8, 9) == rule.replace(" ->", ", B N T S ->")
    assert each(2, 8, 1, 9) == rule.replace(" ->", ", b n Q S ->")
    assert each(2, 1, 8, 1) == rule.replace(" ->", ", b N T K ->")


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "query_seq_lengths": [150], "key_value_seq_lengths": [130]},
        pytest.param({"local_window_size": (100, 20)}, marks=pytest.mark.slow),
    ],
    ids=["lengths", "window"],
)
def test_it_computes_what_the_emulation_computes(options):
    """But for the last places of f32, which decide how a few weights are rounded."""
    options = {n: jnp.array(x) if "lengths" in n else x for n, x in options.items()}
    q, k, v = (normal(seed, (1, 170, heads, 64)) for seed, heads in enumerate((4, 2, 2)))
    recipe = recipes.DelayedScaling()
    states = {which: recipe.init_state() for which in ("scores", "context")}
    full = jax.tree.map(jnp.copy, states["context"]["rhs"]) | {"amax_history": jnp.full(16, 3.0)}
    states["context"] = states["context"] | {"rhs": full}  # V has been seen, Q and K have not
    grad = normal(3, q.shape)

    def results(implementation):
        attend = partial(
            jfp8.scaled_dot_product_attention,
            recipe=recipe,
            state=states,
            implementation=implementation,
            **options,
        )
        y, back = jax.vjp(attend, q, k, v)
        return [y, *back(grad)]

    with plgpu.force_gpu_interpret_mode():
        found = results("mosaic_gpu")
    for a, b in zip(found, results("emulate"), strict=True):
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
