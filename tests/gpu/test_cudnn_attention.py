"""Attention by cuDNN, compiled for an H200 and a B200: one call of cuDNN, no array of all scores.

And the reference, for a B200. As `test_compiled.py`: nothing is executed; elsewhere it is skipped.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from support.gpu_programs import F8, compile_divided, compile_for, why_not
from support.interpreter import cudnn_known

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import jfp8

T, BF16 = 4096, jnp.bfloat16
RECIPE = jfp8.recipes.DelayedScaling()
STATE = jax.eval_shape(lambda: {name: RECIPE.init_state() for name in ("scores", "context")})


def attend(state, *operands):
    how = {"is_causal": True, "recipe": RECIPE, "implementation": "cudnn"}
    return jfp8.scaled_dot_product_attention(*operands, state=state, **how)


def all_scores(program):
    """What holds an array of ``[T, T]``."""
    return [i for i, _ in program.hlo.launched for r in i.results if r.size >= T * T]


def arguments(size, heads=8, key_heads=4):
    return [jax.ShapeDtypeStruct((2, T, n, size), BF16) for n in (heads, key_heads, key_heads)]


def assert_by_cudnn(program, size):
    (call,) = program.hlo.attention_products
    assert program.hlo.other_products == []
    out = call.results[0]
    assert (out.dtype, out.shape[-2:]) == (F8[0], (T, size))
    assert not all_scores(program)


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("size", [64, 128])
def test_forward(target, size, compiled):
    name = f"attention by cuDNN, {T} tokens, 8 heads of {size}"
    name = name if target == "h200" else f"B200: {name}"
    assert_by_cudnn(compiled(name, target, attend, STATE, *arguments(size)), size)


def test_backward_on_hopper():
    """By the Pallas kernels: nothing is multiplied in another format."""

    def forward_and_backward(state, q, k, v, grad):
        out, vjp = jax.vjp(partial(attend, state), q, k, v)
        return out, vjp(grad)

    args = arguments(128)
    program = compile_for("h200", forward_and_backward, STATE, *args, args[0])
    assert len(program.hlo.attention_products) == 1
    assert len(program.hlo.pallas_products) == 2
    assert program.hlo.other_products == []
    assert not all_scores(program)


def test_it_is_divided_by_sequences_and_heads(compiled_for_eight):
    spec = P("x", None, "y")
    specs = (jax.tree.map(lambda _: P(), STATE), *(spec,) * 3)
    axes = {"x": 2, "y": 4}
    of = partial(compiled_for_eight, "8 GPUs, data x heads: attention by cuDNN", axes, attend)
    program = of((STATE, *arguments(128)), specs, spec)
    assert_by_cudnn(program, 128)
    assert program.exchanged.total < 1000  # amaxes


def test_the_reference_on_blackwell(compiled):
    """Forward and backward: products of blocks, in bf16, which holds what f8 stores."""

    def forward_and_backward(q, k, v, grad):
        how = {"is_causal": True, "recipe": "current", "implementation": "emulate"}
        attend = partial(jfp8.scaled_dot_product_attention, **how)
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(grad)

    args = arguments(128)
    name = f"B200: scaled_dot_product_attention by the reference, {T} tokens, 8 heads of 128"
    program = compiled(name, "b200", forward_and_backward, *args, args[0])
    assert program.hlo.fp8_products == []
    assert len(program.hlo.other_products) == 7
    for product in program.hlo.other_products:
        assert program.hlo.factors(product) <= {"bf16", *F8}
    assert not all_scores(program)


@pytest.mark.parametrize(
    "options",
    [{}, {"local_window_size": (512, 0), "num_gqa_groups": 4}, {"saved_activations": jfp8.E4M3FN}],
    ids=["as it comes", "window and groups", "saved in fp8"],
)
def test_a_transformer_layer_in_high_precision(options):
    """By cuDNN's flash attention in bf16, forward and backward: no array of all scores."""
    layer = jfp8.TransformerLayer(
        *(1024, 2048, 8),
        self_attn_mask_type="causal",
        dtype=BF16,
        param_dtype=BF16,
        enable_rotary_pos_emb=True,
        recipe="current",
        **options,
    )
    x = jax.ShapeDtypeStruct((1, T, 1024), BF16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]

    def step(params, x, grad):
        y, vjp = jax.vjp(lambda params, x: layer.apply({"params": params}, x), params, x)
        return y, vjp(grad)

    with cudnn_known():
        program = compile_for("h200", step, params, x, x)
    targets = [i.target for i in program.hlo.other_products]
    again = "saved_activations" in options
    assert sorted(targets) == sorted(
        ["__cudnn$fmhaSoftmax"] * (1 + again) + ["__cudnn$fmhaSoftmaxBackward"]
    )
    assert not all_scores(program)


def test_a_transformer_layer_in_high_precision_on_eight_gpus():
    """FSDP and tensor parallelism, with a number of tokens that no block divides."""
    layer = jfp8.TransformerLayer(
        *(1024, 2048, 8),
        num_gqa_groups=4,
        self_attn_mask_type="causal",
        use_bias=False,
        dtype=BF16,
        param_dtype=BF16,
        recipe="current",
    )
    x = jax.ShapeDtypeStruct((8, 2047, 1024), BF16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    specs = jax.tree.map(lambda w: P("x") if w.ndim > 1 else P(), params)
    specs["self_attention"]["qkv"]["kernel"] = P("x", "y")

    def step(params, x, grad):
        y, vjp = jax.vjp(lambda params, x: layer.apply({"params": params}, x), params, x)
        return y, vjp(grad)

    with cudnn_known():
        specs = specs, P("x"), P("x")
        program = compile_divided("h200", {"x": 2, "y": 4}, step, (params, x, x), specs)
    targets = [i.target for i in program.hlo.other_products]
    assert sorted(targets) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
