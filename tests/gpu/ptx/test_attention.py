"""The compiled kernels for attention, executed: against their equations in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jfp8 import E4M3FN, E5M2
from support.attention_in_f64 import (
    assert_attention,
    assert_gradients,
    backward_operands_of,
    operands_of,
    visible_keys,
)

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def random_mask(*shape):
    """bool[shape]: most keys hidden; some queries see none, and some no key of a block."""
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
        mask[..., :40, :128] = False
    else:
        mask[..., -128:] = False
    return mask


def given_of(options):
    """Return the arrays among options, and the others."""
    given = {}
    if "key_lengths" in options:
        given["key_lengths"] = np.array(options["key_lengths"], np.int32)
    if "mask" in options:
        given["mask"] = random_mask(*options["mask"])
    if "segments" in options:
        ids = np.repeat(np.arange(len(options["segments"])), options["segments"])
        given["mask"] = (ids[:, None] == ids)[None]
    return given, {"is_causal": False, "window": None} | {
        name: value for name, value in options.items() if name in ("is_causal", "window")
    }


FORWARD = {
    # heads, groups, rows, keys, size
    "all": ((2, 2, 200, 300, 64), {"window": (150, 40), "key_lengths": [270]}, BF16),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, F32),
    "causal-256": ((1, 1, 100, 130, 256), {"is_causal": True}, F32),
    "window-256": ((1, 1, 130, 256, 256), {"window": (30, 0)}, F16),
    "lengths": ((4, 2, 64, 200, 64), {"key_lengths": [0, 77]}, F32),
    "ring": ((1, 1, 128, 900, 64), {}, F32),
    "mask": ((2, 2, 130, 300, 64), {"mask": (2, 130, 300)}, F32),
    "mask-of-keys": ((1, 1, 140, 400, 128), {"mask": (1, 1, 400), "window": (300, 90)}, BF16),
    "segments": ((2, 1, 200, 200, 128), {"segments": (70, 100, 30), "is_causal": True}, BF16),
    "mask-256": ((1, 1, 100, 150, 256), {"mask": (1, 100, 1), "is_causal": True}, F32),
}


@pytest.mark.parametrize("case", FORWARD)
def test_forward(case, executed):
    from jfp8.kernels.hopper.attention import attention_forward

    sizes, options, out_dtype = FORWARD[case]
    operands, (given, fixed) = operands_of(*sizes), given_of(options)
    how = {"groups": sizes[1], "scale": sizes[-1] ** -0.5, "out_dtype": out_dtype, **fixed}

    def f(operands, given):
        return attention_forward(*operands, **given, **how)

    def check(results):
        seen = *fixed.values(), options.get("key_lengths"), out_dtype, given.get("mask", True)
        assert_attention(results, operands, sizes[1], how["scale"], *seen)

    executed(check, f, operands, given)


FOUR, FIVE = E4M3FN, E5M2
BACKWARD = {
    "all": ((2, 2, 130, 300, 64), {"window": (150, 110), "key_lengths": [270]}, (FIVE, FOUR), BF16),
    "causal": ((1, 1, 256, 256, 128), {"is_causal": True}, (FIVE, FIVE), F32),
    "grouped": ((2, 2, 130, 100, 64), {"is_causal": True}, (FOUR, FIVE), F32),
    "rings": ((1, 1, 400, 700, 64), {}, (FOUR, FOUR), F32),
    "window": ((1, 1, 130, 256, 128), {"window": (30, 0)}, (FIVE, FIVE), BF16),
    "mask": ((2, 2, 130, 150, 64), {"mask": (2, 130, 150)}, (FIVE, FIVE), F32),
    "segments": ((2, 2, 200, 200, 128), {"segments": (70, 100, 30)}, (FOUR, FOUR), BF16),
    "keys": ((1, 1, 150, 200, 128), {"mask": (1, 1, 200), "is_causal": True}, (FIVE, FOUR), BF16),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_backward(case, executed):
    from jfp8.kernels.hopper.attention import attention_backward

    sizes, options, formats, out_dtype = BACKWARD[case]
    heads, groups, rows, keys, size = sizes
    given, fixed = given_of(options)
    lengths = np.repeat(options.get("key_lengths", [keys] * (heads // groups)), groups)
    seen = np.array([visible_keys(rows, keys, *fixed.values(), n) for n in lengths])
    seen = seen & given.get("mask", True)
    scale = 0.7 * size**-0.5
    stored, vectors = backward_operands_of(sizes, seen, formats[0], scale)
    how = {"groups": groups, "scale": scale, "formats": formats, "out_dtype": out_dtype, **fixed}

    def f(stored, vectors, given):
        return attention_backward(stored, vectors, **given, **how)

    def check(results):
        assert_gradients(results, stored, vectors, groups, scale, seen, formats, out_dtype)

    executed(check, f, stored, vectors, given)
