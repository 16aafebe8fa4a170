"""Attention by cuDNN, compiled for an H200 and a B200: one call of cuDNN, no array of all scores.

As `test_compiled.py`: nothing is executed. Elsewhere all are skipped.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from support.gpu_programs import F8, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import jfp8

T, BF16 = 4096, jnp.bfloat16
RECIPE = jfp8.recipes.DelayedScaling()
STATE = jax.eval_shape(lambda: {name: RECIPE.init_state() for name in ("scores", "context")})


def attend(state, *operands):
    how = {"is_causal": True, "recipe": RECIPE, "implementation": "cudnn"}
    return jfp8.scaled_dot_product_attention(*operands, state=state, **how)


def arguments(size, heads=8, key_heads=4):
    return [jax.ShapeDtypeStruct((2, T, n, size), BF16) for n in (heads, key_heads, key_heads)]


def assert_by_cudnn(program, size):
    (call,) = program.hlo.attention_products
    assert program.hlo.other_products == []
    out = call.results[0]
    assert (out.dtype, out.shape[-2:]) == (F8[0], (T, size))
    assert not [i for i, _ in program.hlo.launched for r in i.results if r.size >= T * T]


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("size", [64, 128])
def test_forward(target, size, compiled):
    name = f"attention by cuDNN, {T} tokens, 8 heads of {size}"
    name = name if target == "h200" else f"B200: {name}"
    assert_by_cudnn(compiled(name, target, attend, STATE, *arguments(size)), size)


def test_it_is_divided_by_sequences_and_heads(compiled_for_eight):
    spec = P("x", None, "y")
    specs = (jax.tree.map(lambda _: P(), STATE), *(spec,) * 3)
    axes = {"x": 2, "y": 4}
    of = partial(compiled_for_eight, "8 GPUs, data x heads: attention by cuDNN", axes, attend)
    program = of((STATE, *arguments(128)), specs, spec)
    assert_by_cudnn(program, 128)
    assert program.exchanged.total < 1000  # amaxes
