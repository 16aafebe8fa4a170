"""Attention in Pallas, interpreted, against its equations in float64; and what it must not see."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import jfp8
from jfp8 import recipes
from jfp8.kernels.flash.problem import BLOCK
from jfp8.kernels.hopper.attention import attention_forward
from jfp8.kernels.pallas_attention import forward_rule
from support.attention_in_f64 import assert_attention, f64, operands_of, with_other_tokens
from support.devices import traced_for
from support.interpreter import no_races

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def interpreted(*operands, **options):
    """The results of the kernel, after a check that none of its threads raced another."""
    with no_races():
        return jax.block_until_ready(attention_forward(*operands, **options))


def random_mask(*shape):
    """bool[shape]: most keys hidden; some queries see none, and some no key of a block."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
        mask[..., :40, :BLOCK] = False
    else:
        mask[..., -BLOCK:] = False
    return mask


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
        ((1, 1, 128, 900, 64), {}, F32),
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
    operands = operands_of(1, 1, 256, 256, 64)
    attend = partial(
        interpreted,
        mask=jnp.tri(256, dtype=bool)[None] if by_mask else None,
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": jnp.ones((8, 8))}, "bias: the kernels know masks"),
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
    with traced_for():
        return str(jax.make_jaxpr(f)(*args))


def test_rules_of_division():
    rule = "b n T H, b n/4 S H, b n/4 H S, b n T, b n/4 S, b n/4 S, b n/4 -> b n T H, b n T"
    assert forward_rule(4, key_lengths=jnp.ones((2, 2), jnp.int32)) == rule
    rule = "b n T H, b n S H, b n H S, b n T, b n S, b n S -> b n T H, b n T"
    assert forward_rule(1) == rule
    each = lambda *shape: forward_rule(1, mask=jnp.ones(shape, bool))
    assert each(1, 1, 8, 9) == rule.replace(" ->", ", B N T S ->")
    assert each(2, 8, 1, 9) == rule.replace(" ->", ", b n Q S ->")
    assert each(2, 1, 8, 1) == rule.replace(" ->", ", b N T K ->")


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "query_seq_lengths": [150], "key_value_seq_lengths": [130]},
        pytest.param({"local_window_size": (100, 20)}, marks=pytest.mark.slow),
        {"is_causal": True, "segments": [50, 90, 30], "sinks": [-1.0, 3.0, 0.5, 0.0]},
    ],
    ids=["lengths", "window", "segments and sinks"],
)
def test_it_computes_what_the_emulation_computes(options):
    """But for the last places of f32, which decide how a few weights are rounded."""
    arrays = {n: jnp.array(x) for n, x in options.items() if "lengths" in n or n == "sinks"}
    options = options | arrays
    if packed := "segments" in options:
        ids = jnp.repeat(jnp.arange(3), jnp.array(options.pop("segments")))[None]
        options |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
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
    expected = results("emulate")
    if packed:  # of which the reference rounds P for dV by the queries of one sequence
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
