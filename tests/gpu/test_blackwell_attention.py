"""The attention kernels, compiled for a B200 as in `test_compiled.py`: FP8 in registers alone."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from support.compiled_layers import gradients_of
from support.gpu_programs import (
    assert_resources,
    compile_divided,
    compile_for,
    forward_and_backward,
    why_not,
)

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import jfp8
from jfp8 import E4M3FN, E5M2
from jfp8.kernels.blackwell import attention
from jfp8.kernels.flash.problem import Stored, Vectors

F8, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
T, HEADS = 4096, 8
ALL = {"is_causal": False, "window": None}
CAUSAL = {"is_causal": True, "window": None}
WINDOW = {"is_causal": False, "window": (1000, 64)}
CASES = {
    # groups, with lengths, dtype of the results, masks
    "all": (1, False, BF16, ALL),
    "causal": (1, False, BF16, CAUSAL),
    "window": (1, False, BF16, WINDOW),
    "grouped": (4, True, F32, CAUSAL),
}


each_case = pytest.mark.parametrize("case", CASES)


def products_of(size):
    """Of 32 numbers each: the scores, and dP, over `size`; sums over 128 keys or 64 queries."""
    wide = size // 32
    return {
        "jfp8_attention_blackwell": wide + 4,
        "jfp8_attention_dq_blackwell": 3 * wide + 4,  # dP of half the keys twice
        "jfp8_attention_dkv_blackwell": 2 * wide + 2 + 2,
    }


def assert_fp8_alone(program, size):
    """Tensor cores multiply f8 alone, nothing is spilled, and there is no array of all logits."""
    assert_resources(program)
    assert program.kernels
    for kernel in program.kernels:
        expected = {"jfp8_quantize_heads": 0} | products_of(size)
        assert len(kernel.qgmma) == expected[kernel.name]
        assert kernel.other_mma == ()
        assert kernel.registers <= 168
    assert program.hlo.other_products == []
    assert not [i for i, _ in program.hlo.launched for r in i.results if r.size >= T * T]


def arrays(groups, size):
    """Types of queries and keys, transposed ones, and of a number for each query and key."""
    of = lambda heads, *shape: jax.ShapeDtypeStruct((1, heads, *shape), F8)
    matrices = [of(n, *shape) for shape in ((T, size), (size, T)) for n in (HEADS, HEADS // groups)]
    return *matrices, *(jax.ShapeDtypeStruct(x.shape[:3], F32) for x in matrices[:2])


@each_case
@pytest.mark.parametrize("size", [64, 128])
def test_forward(size, case):
    groups, with_lengths, out_dtype, options = CASES[case]
    q, k, _, k_t, by_query, by_key = arrays(groups, size)
    args = [q, k, k_t, by_query, by_key, by_key]
    args += [jax.ShapeDtypeStruct(k.shape[:2], jnp.int32)] * with_lengths
    options = {"groups": groups, "scale": size**-0.5, "out_dtype": out_dtype, **options}
    f = partial(attention.attention_forward, **options)
    assert_fp8_alone(compile_for("b200", f, *args), size)


@each_case
@pytest.mark.parametrize("size", [64, 128])
def test_backward(size, case):
    groups, with_lengths, out_dtype, options = CASES[case]
    q, k, q_t, k_t, by_query, by_key = arrays(groups, size)
    args = [q, k, k, q, q_t, k_t, q_t, by_query, *[by_key] * 2, *[by_query] * 2, by_key]
    args += [by_query] * 3 + [jax.ShapeDtypeStruct(k.shape[:2], jnp.int32)] * with_lengths
    options = {"groups": groups, "scale": size**-0.5, "out_dtype": out_dtype, **options}

    def f(*args):
        stored, vectors, formats = Stored(*args[:7]), Vectors(*args[7:16]), (E5M2, E4M3FN)
        return attention.attention_backward(stored, vectors, *args[16:], formats=formats, **options)

    program = compile_for("b200", f, *args)
    assert_fp8_alone(program, size)
    assert len(program.kernels) == 2


@pytest.mark.parametrize("spec", [None, P("x", None, "y")], ids=["one", "eight"])
def test_public_function(spec, recorded):
    """`scaled_dot_product_attention` takes the kernels, and eight devices send nothing."""
    attend = partial(jfp8.scaled_dot_product_attention, is_causal=True, recipe="current")
    args = (jax.ShapeDtypeStruct((2, T, HEADS, 128), BF16),) * 4
    f = gradients_of(attend)
    name = f"B200: `scaled_dot_product_attention`, 2×{T}, 8 heads of 128, causal, current"
    if spec is None:
        program = recorded(name, compile_for("b200", f, *args))
        assert len(program.hlo.pallas_products) == 3
    else:
        specs = (spec,) * 4
        program = compile_divided("b200", {"x": 2, "y": 4}, f, args, specs, specs)
        assert program.exchanged.total == 0
    assert {kernel.name for kernel in program.kernels if kernel.qgmma} == {*products_of(128)}
    assert_fp8_alone(program, 128)


def test_transformer_layer(recorded):
    """A block of a model of seven billion parameters: no product is outside of FP8."""
    layer = jfp8.TransformerLayer(
        4096,
        11264,
        num_attention_heads=32,
        self_attn_mask_type="causal",
        attention_products=True,
        dtype=BF16,
    )
    f, args = forward_and_backward(layer, (2, 2048, 4096))
    name = "B200: `TransformerLayer`, 4096×4096, attention too, delayed"
    program = recorded(name, compile_for("b200", f, *args))
    assert len(program.hlo.f8_products) == 12
    assert {kernel.name for kernel in program.kernels if kernel.qgmma} == {*products_of(128)}
    assert program.hlo.other_products == []
