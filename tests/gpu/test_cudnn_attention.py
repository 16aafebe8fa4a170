"""Attention in high precision, compiled for an H200 (see `test_compiled.py`): by cuDNN."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from gpu_programs import compile_divided, compile_for, why_not
from support.compiled_layers import gradients_of
from support.interpreter import cudnn_known
from support.scripts import imported

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import jfp8

T, BF16 = 4096, jnp.bfloat16


def all_scores(program):
    """What holds an array of ``[T, T]``."""
    return [i for i, _ in program.hlo.launched for r in i.results if r.size >= T * T]


def gradients_of_layer(layer):
    return gradients_of(lambda params, x: layer.apply({"params": params}, x))


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

    with cudnn_known():
        program = compile_for("h200", gradients_of_layer(layer), params, x, x)
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

    with cudnn_known():
        specs = specs, P("x"), P("x")
        step = gradients_of_layer(layer)
        program = compile_divided("h200", {"x": 2, "y": 4}, step, (params, x, x), specs)
    targets = [i.target for i in program.hlo.other_products]
    assert sorted(targets) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


def test_the_benchmark_in_fp8():
    """By cuDNN's attention in FP8, forward and backward, with grouped queries."""
    attention = imported("on_gpu.attention", "benchmarks")
    q, k = (jax.ShapeDtypeStruct((4, 2048, heads, 128), jnp.float8_e4m3fn) for heads in (32, 8))
    one = jax.ShapeDtypeStruct((), jnp.float32)
    amaxes = dict.fromkeys((*attention.OPERANDS, *attention.RESULTS, "s", "dP"), one)

    with cudnn_known():
        program = compile_for("h200", attention.by_cudnn, q, k, k, q, amaxes)
    targets = [i.target for i in program.hlo.other_products]
    assert sorted(targets) == ["__cudnn$fmhaSoftmaxBackwardF8", "__cudnn$fmhaSoftmaxF8"]
