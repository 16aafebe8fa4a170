"""The attention kernel, compiled for an H200: FP8 products alone, in registers alone.

As `test_compiled.py`: nothing is executed. Elsewhere all are skipped.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from support.gpu_programs import compile_for, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import jfp8
from jfp8.matmul.hopper.attention import attention_forward, division
from jfp8.tracing.divided import divided

F8, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
T = 4096
CAUSAL = {"is_causal": True, "window": None}
ALL = {"is_causal": False, "window": None}
WINDOW = {"is_causal": False, "window": (1000, 64)}


def program_of(size, groups, by_token, with_lengths, out_dtype=BF16, heads=(1, 8), **options):
    """Attention of `heads`, with scales for each token or one number, as function and arguments."""
    batch, heads = heads
    key_heads = heads // groups
    of = lambda shape, dtype: jax.ShapeDtypeStruct((batch, *shape), dtype)
    number = jax.ShapeDtypeStruct((), F32)
    scale = lambda heads: of((heads, T), F32) if by_token else number
    args = [of((heads, T, size), F8), of((key_heads, T, size), F8), of((key_heads, size, T), F8)]
    args += [scale(heads), scale(key_heads), scale(key_heads)]
    args += [of((key_heads,), jnp.int32)] * with_lengths
    rule = division(groups, *args[3:6], with_lengths=with_lengths)
    options |= {"groups": groups, "scale": size**-0.5, "out_dtype": out_dtype}
    return divided("attention", partial(attention_forward, **options), rule), args


def assert_fp8_alone(program, size):
    """One kernel, whose tensor cores multiply f8, and no array of all logits."""
    (kernel,) = program.kernels
    # Of 32 numbers each: q.k over `size`, and p.v over 128 keys for each 128 columns.
    assert len(kernel.qgmma) == size // 32 + 4 * max(1, size // 128)
    assert kernel.other_mma == ()
    assert kernel.registers <= 168
    assert len(program.hlo.pallas_products) == 1
    assert program.hlo.other_products == []
    assert not [i for i, _ in program.hlo.launched for r in i.results if r.size >= T * T]


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("options", [ALL, CAUSAL, WINDOW], ids=["all", "causal", "window"])
@pytest.mark.parametrize("size", [64, 128])
def test_attention(size, options, by_token, compiled):
    f, args = program_of(size, 1, by_token, with_lengths=False, **options)
    scales = "scales by token" if by_token else "one scale"
    name = f"attention kernel, {T} tokens, 8 heads of {size}, {scales}"
    assert_fp8_alone(compiled(f"{name}, {options}", "h200", f, *args), size)


@pytest.mark.parametrize("size", [64, 128])
def test_grouped_queries_with_lengths(size, compiled):
    f, args = program_of(size, 4, True, with_lengths=True, out_dtype=F32, **ALL)
    name = f"attention kernel, {T} tokens, 8 heads of {size}, 2 of keys, lengths, f32"
    assert_fp8_alone(compiled(name, "h200", f, *args), size)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("options", [ALL, CAUSAL, WINDOW], ids=["all", "causal", "window"])
def test_heads_of_256(options, by_token):
    """Sums and logits take 192 of 240 registers. Masks with scales by token spill a few numbers
    that stay the same in the loop: stored once, loaded in each step.
    """
    f, args = program_of(256, 1, by_token, with_lengths=False, **options)
    program = compile_for("h200", f, *args)
    assert_fp8_alone(program, 256)
    (kernel,) = program.kernels
    assert kernel.spilled <= (100 if by_token and options is not ALL else 0)


def test_heads_are_divided(compiled_for_eight):
    """Each of eight devices has its heads, and sends nothing."""
    f, args = program_of(128, 4, True, with_lengths=True, heads=(2, 32), **CAUSAL)
    program = compiled_for_eight(
        "8 GPUs, heads: attention kernel",
        {"x": 2, "y": 4},
        f,
        tuple(args),
        (P("x", "y"),) * len(args),
    )
    assert_fp8_alone(program, 128)
    assert program.exchanged.total == 0


@pytest.mark.parametrize("spec", [None, P("x", None, "y")], ids=["one", "eight"])
def test_public_function(spec, compiled, compiled_for_eight):
    """`scaled_dot_product_attention` of bf16 arrays takes the kernel, and divides it."""
    attend = partial(jfp8.scaled_dot_product_attention, is_causal=True, recipe="current")
    of = lambda heads: jax.ShapeDtypeStruct((2, T, heads, 128), BF16)
    args = of(8), of(4), of(4)
    if spec is None:
        program = compiled(f"scaled_dot_product_attention, {T} tokens", "h200", attend, *args)
    else:
        name = "8 GPUs, data x heads: scaled_dot_product_attention"
        program = compiled_for_eight(name, {"x": 2, "y": 4}, attend, args, (spec,) * 3, spec)
        assert program.exchanged.total == 0
    assert_fp8_alone(program, 128)
