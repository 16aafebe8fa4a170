"""Attention in Pallas for Blackwell, interpreted, against its equations in float64."""

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
from jfp8 import E4M3FN, E5M2
from jfp8.kernels.blackwell import attention
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
from support.interpreter import no_races

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
NAME = "mosaic_gpu_blackwell"


def interpreted(*operands, **options):
    """The results of the kernel, after a check that none of its threads raced another."""
    with no_races():
        found = attention.attention_forward(*operands, **options)
        return jax.block_until_ready(found)


FORWARD = {
    # heads, groups, rows, keys, size
    "all": ((2, 2, 200, 300, 64), {"window": (150, 40), "key_lengths": [270]}, BF16),
    "ring": ((1, 1, 128, 900, 64), {}, F32),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, F32),
    "lengths": ((8, 4, 64, 200, 64), {"key_lengths": [0, 77]}, F16),
    "beyond": ((1, 1, 400, 130, 64), {"window": (100, 3), "is_causal": True}, F32),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("case", FORWARD)
def test_attention(case):
    (heads, groups, *sizes), options, out_dtype = FORWARD[case]
    operands = operands_of(heads, groups, *sizes)
    lengths, scale = options.get("key_lengths"), sizes[-1] ** -0.5
    given = {"is_causal": False, "window": None} | options
    if lengths is not None:
        given["key_lengths"] = jnp.array(lengths, jnp.int32)
    results = interpreted(*operands, groups=groups, scale=scale, out_dtype=out_dtype, **given)
    is_causal, window = given["is_causal"], given["window"]
    assert_attention(results, operands, groups, scale, is_causal, window, lengths, out_dtype)


@pytest.mark.slow
def test_e5m2_operands():
    operands = operands_of(1, 1, 128, 200, 64, (E5M2, E4M3FN, E5M2))
    o = interpreted(*operands, groups=1, scale=0.125, is_causal=True, window=None, out_dtype=F32)
    assert_attention(o, operands, 1, 0.125, True, None, None, F32)


def test_later_tokens_change_nothing():
    """Not a bit of an earlier one, whatever their keys, values and scales are."""
    seen = 170
    operands = operands_of(1, 1, 256, 256, 64)
    attend = partial(interpreted, groups=1, scale=0.125, is_causal=True, window=None, out_dtype=F32)
    before = attend(*operands)
    after = attend(*with_other_tokens(operands, seen))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:, :seen], np.asarray(y)[:, :seen])
        assert (np.asarray(x)[:, seen:] != np.asarray(y)[:, seen:]).any()


BACKWARD = {
    # heads, groups, rows, keys, size
    "grouped": ((2, 2, 130, 100, 64), {"is_causal": True}, (E4M3FN, E5M2), F32),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, (E5M2, E5M2), F32),
    "all": (
        (4, 2, 200, 300, 64),
        {"window": (150, 110), "key_lengths": [270, 0]},
        (E5M2, E4M3FN),
        BF16,
    ),
    "rings": ((1, 1, 400, 700, 64), {}, (E4M3FN, E4M3FN), F32),
    "window": ((1, 1, 130, 256, 128), {"window": (30, 0)}, (E5M2, E5M2), BF16),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("case", BACKWARD)
def test_gradients(case):
    sizes, options, formats, out_dtype = BACKWARD[case]
    heads, groups, rows, keys, size = sizes
    options = {"is_causal": False, "window": None} | options
    lengths, scale = options.pop("key_lengths", None), 0.7 * size**-0.5
    of_head = lengths or [keys] * (heads // groups)
    seen = [visible_keys(rows, keys, *options.values(), length) for length in of_head]
    stored, vectors = backward_operands_of(sizes, seen, formats[0], scale)
    key_lengths = None if lengths is None else jnp.array(lengths, jnp.int32)
    how = {"groups": groups, "scale": scale, "formats": formats, "out_dtype": out_dtype, **options}
    with no_races():
        found = jax.block_until_ready(
            attention.attention_backward(stored, vectors, key_lengths, **how)
        )
    assert_gradients(found, stored, vectors, groups, scale, seen, formats, out_dtype)


# In `scaled_dot_product_attention`


def jaxpr_on(kind, f, *args):
    with traced_for(f"NVIDIA {kind}"):
        return str(jax.make_jaxpr(f)(*args))


def test_kernels_are_chosen_on_a_blackwell():
    x = jnp.ones((1, 8, 2, 64))
    attend = partial(jfp8.scaled_dot_product_attention, is_causal=True)
    both = jax.grad(lambda x: attend(x, x, x).sum())
    found = jaxpr_on("B200", both, x)
    for name in ("attention_blackwell", "attention_dq_blackwell", "attention_dkv_blackwell"):
        assert f"jfp8_{name}" in found
    assert "_blackwell" not in jaxpr_on("H200", both, x)
    assert "mpmd_map" not in str(jax.make_jaxpr(both)(x))  # on a CPU


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": jnp.ones((8, 8), bool)}, "mask: the kernels know is_causal"),
        ({"bias": jnp.ones((8, 8))}, "bias: the kernels know is_causal"),
        ({"scale": -1.0}, "negate the queries"),
        ({"recipe": "direct_e5m2"}, "P in E4M3FN"),
        ({}, "heads of 256 numbers"),
    ],
)
def test_when_the_reference_computes(options, reason):
    """What the kernels do not compute is refused where they are asked for, and only there."""
    x = jnp.ones((1, 8, 2, 64 if options else 256))
    attend = partial(jfp8.scaled_dot_product_attention, **options)
    with pytest.raises(ValueError, match=reason):
        attend(x, x, x, implementation=NAME)
    assert "mpmd_map" not in jaxpr_on("B200", attend, x, x, x)


def test_another_gpu_is_refused():
    x = jnp.ones((1, 8, 2, 64))
    attend = partial(jfp8.scaled_dot_product_attention, implementation=NAME)
    with pytest.raises(ValueError, match="NVIDIA H200: the Mosaic GPU kernels are for Blackwell"):
        jaxpr_on("H200", attend, x, x, x)
    with pytest.raises(Exception, match="compiled for another platform"):
        jax.jit(attend)(x, x, x)


def test_it_computes_what_the_emulation_computes():
    """But for the last places of f32, which decide how a few weights are rounded."""
    rng = np.random.default_rng(0)
    of = lambda heads: rng.normal(size=(1, 70, heads, 64)) * np.exp(rng.normal(size=(1, 70, 1, 1)))
    q, k, v, grad = (jnp.asarray(of(heads), F32) for heads in (2, 1, 1, 2))
    lengths = {"query_seq_lengths": jnp.array([60]), "key_value_seq_lengths": jnp.array([50])}

    def results(implementation):
        attend = partial(
            jfp8.scaled_dot_product_attention,
            is_causal=True,
            recipe="delayed",
            implementation=implementation,
            **lengths,
        )
        y, back = jax.vjp(attend, q, k, v)
        return [y, *back(grad)]

    with plgpu.force_gpu_interpret_mode():
        found = results(NAME)
    for a, b in zip(found, results("emulate"), strict=True):
        assert a.dtype == b.dtype
        assert float(jnp.abs(b).max()) > 0
        assert float(jnp.abs(a - b).max()) < 1e-3 * float(jnp.abs(b).max())
        assert np.linalg.norm(f64(a) - f64(b)) < 1e-4 * np.linalg.norm(f64(b))
