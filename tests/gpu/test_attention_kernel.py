"""The attention kernels, compiled for an H200 as in `test_compiled.py`: FP8 in registers alone."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from support.compiled_layers import gradients_of
from support.gpu_programs import compile_divided, compile_for, forward_and_backward, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import jfp8
from jfp8 import E4M3FN, E5M2, recipes
from jfp8.kernels.attention import backward_rule, forward_rule
from jfp8.kernels.flash.problem import Stored, Vectors
from jfp8.kernels.hopper.attention import attention_backward, attention_forward
from jfp8.kernels.partitioning import divided

F8, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
T = 4096
CAUSAL = {"is_causal": True, "window": None}
ALL = {"is_causal": False, "window": None}
WINDOW = {"is_causal": False, "window": (1000, 64)}


def program_of(size, groups, with_lengths, out_dtype=BF16, mask=None, **options):
    """Attention of eight heads, as function and arguments."""
    key_heads = 8 // groups
    of = lambda shape, dtype: jax.ShapeDtypeStruct((1, *shape), dtype)
    args = [of((8, T, size), F8), of((key_heads, T, size), F8), of((key_heads, size, T), F8)]
    args += [of((n, T), F32) for n in (8, key_heads, key_heads)]
    hidden = {"key_lengths": of((key_heads,), jnp.int32)} if with_lengths else {}
    hidden |= {} if mask is None else {"mask": jax.ShapeDtypeStruct(mask, jnp.bool_)}
    options |= {"groups": groups, "scale": size**-0.5, "out_dtype": out_dtype}

    def f(*args):
        more = dict(zip(hidden, args[6:], strict=True))
        return attention_forward(*args[:6], **more, **options)

    return divided("attention", f, forward_rule(groups, **hidden)), [*args, *hidden.values()]


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


FORWARD = {
    # Heads of keys for one of queries, with lengths, dtype, mask; options.
    "all": (1, False, BF16, None, ALL),
    "causal": (1, False, BF16, None, CAUSAL),
    "window": (1, False, BF16, None, WINDOW),
    "grouped, lengths, f32": (4, True, F32, None, ALL),
    "mask": (1, False, BF16, (1, 1, T, T), ALL),
}


@pytest.mark.parametrize("case", FORWARD)
@pytest.mark.parametrize("size", [64, 128])
def test_attention(size, case, compiled):
    groups, with_lengths, out_dtype, mask, options = FORWARD[case]
    f, args = program_of(size, groups, with_lengths, out_dtype, mask, **options)
    name = f"attention kernel, {T} tokens, 8 heads of {size}, {case}"
    program = compiled(name, "h200", f, *args)
    assert_fp8_alone(program, size)
    if mask is not None:  # is read once; its bits are written, and read once for the spans
        dtypes = lambda i: {r.dtype for r in i.results}
        packing = sum(n for i, n in program.hlo.kernels if dtypes(i) <= {"s32", "pred"})
        assert packing < T * T * 1.3


@pytest.mark.parametrize("options", [ALL, CAUSAL, WINDOW], ids=["all", "causal", "window"])
def test_heads_of_256(options):
    """Sums and logits take 192 of 240 registers; masks spill a few numbers, stored once."""
    f, args = program_of(256, 1, False, **options)
    program = compile_for("h200", f, *args)
    assert_fp8_alone(program, 256)
    (kernel,) = program.kernels
    assert kernel.spilled <= (0 if options is ALL else 100)


# Two at a time of 32 numbers each: the scores and dP over `size`; dQ over 128 keys; dV and dK over
# 64 queries.
def products_backward(size):
    return {"jfp8_attention_dq": 2 * size // 32 + 4, "jfp8_attention_dkv": 2 * size // 32 + 4}


def assert_fp8_backward(program, size, forward=0, spilled=0):
    """Two kernels besides those of the forward pass, as above."""
    assert all(k.spilled <= spilled for k in program.kernels), [
        (k.name, k.spilled) for k in program.kernels
    ]
    qgmma = {k.name: len(k.qgmma) for k in program.kernels if k.qgmma}
    assert (qgmma.pop("jfp8_attention", None) is not None) == bool(forward)
    assert qgmma == products_backward(size)
    assert all(k.other_mma == () and k.registers <= 168 for k in program.kernels)
    calls = program.hlo.calls_of("mosaic_gpu_v2")  # but those that quantize, which write f8
    assert sum(not call.results[0].dtype.startswith("f8") for call in calls) == 2 + forward
    assert program.hlo.other_products == []
    assert not [i for i, _ in program.hlo.launched for r in i.results if r.size >= T * T]


def program_backward(size, groups, with_lengths, out_dtype=BF16, **options):
    """As `program_of`."""
    of = lambda heads, *shape: jax.ShapeDtypeStruct((1, heads, *shape), F8)
    q, k, q_t, k_t = (of(n, *shape) for shape in ((T, size), (size, T)) for n in (8, 8 // groups))
    by_query, by_key = (jax.ShapeDtypeStruct(x.shape[:3], F32) for x in (q, k))
    args = [q, k, k, q, q_t, k_t, q_t, by_query, *[by_key] * 2, *[by_query] * 2, by_key]
    lengths = jax.ShapeDtypeStruct(k.shape[:2], jnp.int32) if with_lengths else None
    args += [by_query] * 3 + [lengths] * with_lengths
    options |= {"groups": groups, "scale": size**-0.5, "out_dtype": out_dtype}

    def f(*args):
        stored, vectors = Stored(*args[:7]), Vectors(*args[7:16])
        return attention_backward(stored, vectors, *args[16:], formats=(E5M2, E4M3FN), **options)

    rule = backward_rule(groups, key_lengths=lengths)
    return divided("attention_backward", f, rule), args


# Windows, heads that share keys, and lengths: a few numbers are spilled, as above.
BACKWARD = {
    "all": (1, False, BF16, ALL, 0),
    "causal": (1, False, BF16, CAUSAL, 0),
    "window": (1, False, BF16, WINDOW, 64),
    "grouped": (4, True, F32, CAUSAL, 64),
}


@pytest.mark.parametrize(
    ("size", "case"), [(128, case) for case in BACKWARD] + [(64, "all"), (64, "causal")]
)
def test_backward(size, case, compiled):
    *how, options, spilled = BACKWARD[case]
    f, args = program_backward(size, *how, **options)
    name = f"attention's backward kernels, {T} tokens, 8 heads of {size}, {case}"
    assert_fp8_backward(compiled(name, "h200", f, *args, spilled=spilled), size, spilled=spilled)


@pytest.mark.parametrize("spec", [None, P("x", None, "y")], ids=["one", "eight"])
def test_public_function(spec, compiled, compiled_for_eight):
    """`scaled_dot_product_attention` of bf16 arrays, forward and backward, takes the kernels."""
    attend = partial(jfp8.scaled_dot_product_attention, is_causal=True, recipe="current")
    of = lambda heads: jax.ShapeDtypeStruct((2, T, heads, 128), BF16)
    args = (of(8),) * 4
    f = gradients_of(attend)
    name = f"`scaled_dot_product_attention`, 2×{T}, 8 heads of 128, causal, current"
    if spec is None:
        program = compiled(name, "h200", f, *args)
    else:
        name = f"8 GPUs, data x heads: {name}"
        specs = (spec,) * 4
        program = compiled_for_eight(name, {"x": 2, "y": 4}, f, args, specs, specs)
        assert program.exchanged.total == 0
    assert {k.name for k in program.kernels if k.qgmma} == {
        "jfp8_attention",
        *products_backward(128),
    }
    assert "jfp8_quantize_heads" in {k.name for k in program.kernels}
    assert_fp8_backward(program, 128, forward=1)


@pytest.mark.parametrize("shape", [(1, 1, T, T), (2, 1, T, T), (2, 1, 1, T)])
def test_masks_are_divided(shape, compiled_for_eight):
    """Each device packs what its batches see, and exchanges nothing. A few numbers are spilled."""
    of = lambda heads: jax.ShapeDtypeStruct((2, T, heads, 128), BF16)
    specs = [P("x", None, "y")] * 4 + [P("x" if shape[0] > 1 else None)]

    def f(q, k, v, grad, mask):
        attend = partial(jfp8.scaled_dot_product_attention, mask=mask, recipe="current")
        return gradients_of(attend)(q, k, v, grad)

    name = "8 GPUs, data x heads: `scaled_dot_product_attention`, 2×{0}, 8 heads of 128, mask {1}"
    args = (of(8), of(4), of(4), of(8), jax.ShapeDtypeStruct(shape, jnp.bool_))
    program = compiled_for_eight(
        name.format(T, "×".join(map(str, shape))), {"x": 2, "y": 4},
        f, args, tuple(specs), tuple(specs[:4]), spilled=128,
    )  # fmt: skip
    assert program.exchanged.total == 0
    assert_fp8_backward(program, 128, forward=1, spilled=128)


@pytest.mark.parametrize("axes", [{"x": 1, "y": 1}, {"x": 2, "y": 4}], ids=["one", "eight"])
def test_packed_sequences_with_sinks(axes):
    """Segments become bits: no truth value of every score is written. Devices exchange amaxes."""
    of = lambda heads: jax.ShapeDtypeStruct((2, T, heads, 128), BF16)
    ids, sinks = jax.ShapeDtypeStruct((2, T), jnp.int32), jax.ShapeDtypeStruct((8,), F32)

    def f(q, k, v, grad, ids, sinks):
        options = {"query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": True}
        attend = partial(jfp8.scaled_dot_product_attention, recipe="current", **options)
        return gradients_of(lambda *x: attend(*x[:3], sinks=x[3]))(q, k, v, sinks, grad)

    args = (of(8), of(4), of(4), of(8), ids, sinks)
    specs = *[P("x", None, "y")] * 4, P("x"), P("y")
    program = compile_divided("h200", axes, f, args, specs)
    assert_fp8_backward(program, 128, forward=1, spilled=128)
    written = [r for i, _ in program.hlo.launched for r in i.results]
    assert not [r for r in written if r.dtype in ("pred", "s32", "u32") and r.size >= T * T / 4]
    assert program.exchanged.total < 1000


class Causal(nn.Module):
    """Flax's own attention with its own causal mask, as models of others have it."""

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(16, dtype=BF16, param_dtype=BF16)
        return attention(x, mask=nn.make_causal_mask(x[..., 0]))


def test_attention_of_flax_with_its_mask(compiled):
    """All products in FP8, and `jfp8.report` says so. No mask of truth values is written."""
    model = jfp8.convert(Causal(), recipes.DelayedScaling(), exempt=(), attention=True)
    f, args = forward_and_backward(model, (2, T, 2048))
    name = f"`nn.MultiHeadDotProductAttention` with `make_causal_mask`, 2×{T}×2048, attention too"
    program = compiled(name, "h200", f, *args, spilled=128)
    assert {k.name for k in program.kernels if k.qgmma} == {
        "jfp8_attention",
        *products_backward(128),
    }
    assert len(program.hlo.fp8_products) == 4 * 3 + 3
    assert program.hlo.other_products == []
    written = [r for i, _ in program.hlo.launched for r in i.results]
    assert not [r for r in written if r.dtype in ("pred", "s32", "u32") and r.size >= T * T]
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    described = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(described), pytest.warns(match="of the speed of bf16"):
        found = jfp8.report(model, *args[:2])
    assert "15 of 15 products" in found.summary()  # x needs no gradient
    inside = [row for row in found.rows if row.path.endswith("/attention")]
    assert {row.cuda for row in inside} == {"mosaic_gpu"}
