"""Attention's backward pass in Pallas, interpreted, against its equations in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the Pallas kernels need JAX 0.11.2", allow_module_level=True)

from jfp8 import E4M3FN, E5M2
from jfp8.kernels.hopper.attention import attention_backward
from jfp8.kernels.pallas_attention import backward_rule
from support.attention_in_f64 import (
    assert_gradients,
    backward_operands_of,
    visible_keys,
)
from support.interpreter import no_races

F32, BF16 = jnp.float32, jnp.bfloat16


def random_mask(*shape):
    """bool[shape]: most keys hidden; some queries see none, and some no key of a block."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
        mask[..., 64:, :128] = False
    else:
        mask[..., -128:] = False
    return mask


BOTH = (E5M2, E4M3FN), BF16
CASES = {
    # heads, groups, rows, keys, size
    "all": (
        (4, 2, 200, 300, 64),
        {"window": (150, 110), "key_lengths": [270, 0]},
        (E5M2, E4M3FN),
        BF16,
    ),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, (E5M2, E5M2), F32),
    "grouped": ((2, 2, 130, 100, 64), {"is_causal": True}, (E4M3FN, E5M2), F32),
    "rings": ((1, 1, 400, 700, 64), {}, (E4M3FN, E4M3FN), F32),
    "window": ((1, 1, 130, 256, 128), {"window": (30, 0)}, (E5M2, E5M2), BF16),
    "mask": ((2, 2, 200, 150, 64), {"mask": (2, 200, 150)}, (E5M2, E5M2), F32),
    "mask-of-keys": ((1, 1, 150, 200, 128), {"mask": (1, 1, 200), "is_causal": True}, *BOTH),
    "mask-of-queries": ((1, 1, 150, 200, 64), {"mask": (1, 150, 1), "window": (90, 30)}, *BOTH),
}


@pytest.mark.representative(2)
@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    sizes, options, formats, out_dtype = CASES[case]
    heads, groups, rows, keys, size = sizes
    options = {"is_causal": False, "window": None} | options
    lengths, scale = options.pop("key_lengths", None), 0.7 * size**-0.5
    of_head = np.repeat(lengths or [keys] * (heads // groups), groups)
    mask = random_mask(*options.pop("mask")) if "mask" in options else None
    seen = [visible_keys(rows, keys, *options.values(), length) for length in of_head]
    seen = np.array(seen) & (True if mask is None else mask)
    stored, vectors = backward_operands_of(sizes, seen, formats[0], scale)
    key_lengths = None if lengths is None else jnp.array(lengths, jnp.int32)
    how = {"groups": groups, "scale": scale, "formats": formats, "out_dtype": out_dtype}
    with no_races():
        found = jax.block_until_ready(
            attention_backward(
                *(stored, vectors, key_lengths, None if mask is None else jnp.array(mask)),
                **how,
                **options,
            )
        )
    assert_gradients(found, stored, vectors, groups, scale, seen, formats, out_dtype)


def test_rules_of_division():
    matrices = "b n T H, b n/4 S H, b n/4 S H, b n T H, b n H T, b n/4 H S, b n H T"
    vectors = "b n T, b n/4 S, b n/4 S, b n T, b n T, b n/4 S, b n T, b n T, b n T"
    results = "b n T H, b n/4 S H, b n/4 S H, b n T"
    lengths = jnp.ones((2, 2), jnp.int32)
    assert backward_rule(4, key_lengths=lengths) == f"{matrices}, {vectors}, b n/4 -> {results}"
    rule = backward_rule(1)
    assert rule == f"{matrices}, {vectors} -> {results}".replace("/4", "")
