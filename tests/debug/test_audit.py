"""Counts of compiled programs: formulas, programs compiled here, and the text of one for a GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jfp8.debug import Matmuls, audit


def compiled(f, *shapes, dtype=jnp.float32):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).compile()


def test_matmuls_in_loops_count_as_often_as_they_run():
    def f(x, w):
        outer = lambda x, _: (lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), None)
        return lax.scan(outer, x, length=5)[0] @ w[:, :8]

    found = audit(compiled(f, (64, 32), (32, 32)))
    flops = 2 * 64 * 32 * (15 * 32 + 8)
    assert found.matmuls == (Matmuls("f32", 16, flops),)
    assert (found.flops, found.is_exact) == (flops, True)
    assert str(found).splitlines()[0].split() == ["matmuls,", "f32", "16", "1.999e-06", "TFLOP"]


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def f(x):
        batched = lambda x: jnp.einsum("bij,bkj->bik", x, x)
        return lax.while_loop(lambda x: jnp.sum(x) > 1, batched, x)

    found = audit(compiled(f, (4, 32, 32)))
    assert (found.flops, found.is_exact) == (2 * 4 * 32**3, False)
    assert "do not say how often" in str(found)


def test_exchanges():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def f(x):
        return lax.psum(x, "x"), lax.pmax(jnp.max(x), "x")

    run = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=(P(), P()), check_vma=False)
    found = audit(compiled(run, (8, 2**19)))
    assert found.sent.total == pytest.approx(2 * 7 / 8 * 4 * (2**19 + 1))
    assert found.small_collectives == 1
    assert "all-reduce, f32" in str(found)


# As compiled for an H200 by JAX 0.11.2: a loop of two iterations over a weight and an activation.
ROWS = "[512,512]{1,0}"
QUANTIZED = f"(f8e4m3fn{ROWS}, f8e4m3fn{ROWS}, f32[1]{{0}})"
QUANTIZE, MULTIPLY = (
    f'custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(step)/{name}"}}, '
    f'backend_config={{kernel_hash = "1", module = "ML, custom_call_target=\\"(("}}'
    for name in ("jfp8_quantize_tensor/mpmd_map", "jfp8_matmul/custom_partitioning")
)
CUBLASLT = (
    'custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":'
    '["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
LOOP = 'condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}'
GPU = f"""HloModule jit_step, is_scheduled=true, num_partitions=1

%rounding (p: f32[]) -> bf16[] {{
  %p = f32[] parameter(0)
  ROOT %convert = bf16[] convert(%p)
}}

%body (state: (s32[], bf16[512,512], bf16[512,512])) -> (s32[], bf16[512,512], bf16[512,512]) {{
  %state = (s32[], bf16{ROWS}, bf16{ROWS}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %w = bf16{ROWS} get-tuple-element(%state), index=1
  %x = bf16{ROWS} get-tuple-element(%state), index=2
  %view = bf16{ROWS} bitcast(%x)
  %one = f32[1]{{0}} constant({{1}})
  %of_w = {QUANTIZED} custom-call(%w, %one), {QUANTIZE}
  %of_x = {QUANTIZED} custom-call(%x, %one), {QUANTIZE}
  %again = {QUANTIZED} custom-call(%view, %one), {QUANTIZE}
  %q = f8e4m3fn{ROWS} get-tuple-element(%of_x), index=0
  %q_w = f8e4m3fn{ROWS} get-tuple-element(%of_w), index=1
  %scale = f32[1]{{0}} get-tuple-element(%of_w), index=2
  %number = f32[] bitcast(%scale)
  %rounded = bf16[] fusion(%number), kind=kLoop, calls=%rounding
  %turned = f8e4m3fn{ROWS} transpose(%q_w), dimensions={{1,0}}
  %y = (bf16{ROWS}, s8[4194304]{{0}}) custom-call(%q, %turned, %number, %number), {CUBLASLT}
  %new = bf16{ROWS} get-tuple-element(%y), index=0
  %z = bf16{ROWS} custom-call(%q, %q_w, %one), {MULTIPLY}
  %gradient = {QUANTIZED} custom-call(%x, %new, %one), {QUANTIZE}
  ROOT %next = (s32[], bf16{ROWS}, bf16{ROWS}) tuple(%count, %w, %new)
}}

%condition (state: (s32[], bf16[512,512], bf16[512,512])) -> pred[] {{
  %state.1 = (s32[], bf16{ROWS}, bf16{ROWS}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (w: bf16[512,512], x: bf16[512,512]) -> bf16[512,512] {{
  %w.1 = bf16{ROWS} parameter(0)
  %x.1 = bf16{ROWS} parameter(1)
  %zero = s32[] constant(0)
  %all = (s32[], bf16{ROWS}, bf16{ROWS}) tuple(%zero, %w.1, %x.1)
  %loop = (s32[], bf16{ROWS}, bf16{ROWS}) while(%all), {LOOP}
  ROOT %result = bf16{ROWS} get-tuple-element(%loop), index=2
}}
"""


def test_a_program_for_a_gpu():
    found = audit(GPU)
    of_one = 2 * 512**3
    assert found.matmuls == (
        Matmuls("FP8, Pallas", 2, 2 * of_one),
        Matmuls("FP8, cuBLASLt", 2, 2 * of_one),
    )
    assert found.launches == 2 * 8
    assert found.small_launches == 2 * 2  # the rounding, and the transpose
    assert found.rounded_scales == found.f8_transposes == 2
    values = 512 * 512
    read_and_written = 3 * (2 * values + 4 + 2 * values + 4) + 4 + 2 + 2 * values
    read_and_written += 2 * 2 * values + 4 + 2 * values + 4  # what is computed from two arrays
    assert found.bytes_beside_matmuls == 2 * read_and_written
    # The weight in each iteration, and the activation, which changes, twice in one.
    assert found.quantized_again == (("w", 2), ("x", 2))
    rows = [line.split("  ")[0] for line in str(found).splitlines()]
    assert rows[:2] == ["matmuls, FP8, Pallas", "matmuls, FP8, cuBLASLt"]
    assert "arrays quantized more than once" in rows


# As compiled for an H200 by JAX 0.11.2: a loop over layers whose matmul reads its weight from a
# stack and writes its result into another, and copies that other work may overlap.
STACK = "[3,512,512]{2,1,0}"
STATE = f"(s32[], u8{STACK}, bf16{STACK}, f8e4m3fn{ROWS})"
TYPES = "p0: u8[3,512,512], p1: f8e4m3fn[512,512], p2: bf16[3,512,512], p3: s32[]"
COPIED = f"((f8e4m3fn{ROWS}), f8e4m3fn{ROWS}, u32[])"
SLICES = f"""HloModule jit_step, is_scheduled=true, num_partitions=1

%dynamic-slice-fusion ({TYPES}) -> bf16[3,512,512] {{
  %p2 = bf16{STACK} parameter(2)
  %p0 = u8{STACK} parameter(0)
  %p3 = s32[] parameter(3)
  %zero = s32[] constant(0)
  %slice = u8[1,512,512]{{2,1,0}} dynamic-slice(%p0, %p3, %zero, %zero)
  %weight = f8e4m3fn{ROWS} bitcast(%slice)
  %p1 = f8e4m3fn{ROWS} parameter(1)
  %call = bf16{ROWS} custom-call(%p1, %weight), {MULTIPLY}
  %layer = bf16[1,512,512]{{2,1,0}} bitcast(%call)
  ROOT %update = bf16{STACK} dynamic-update-slice(%p2, %layer, %p3, %zero, %zero)
}}

%copying (p4: f8e4m3fn[512,512]) -> f8e4m3fn[512,512] {{
  %p4 = f8e4m3fn{ROWS} parameter(0)
  ROOT %copy = f8e4m3fn{ROWS} copy(%p4)
}}

%body (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %weights = u8{STACK} get-tuple-element(%state), index=1
  %results = bf16{STACK} get-tuple-element(%state), index=2
  %q = f8e4m3fn{ROWS} get-tuple-element(%state), index=3
  %fusion-start = {COPIED} fusion-start(%q), kind=kLoop, calls=%copying
  %written = bf16{STACK} fusion(%weights, %q, %results, %count), calls=%dynamic-slice-fusion
  %fusion-done = f8e4m3fn{ROWS} fusion-done(%fusion-start)
  %copy-start = (f8e4m3fn{ROWS}, f8e4m3fn{ROWS}, u32[]) copy-start(%fusion-done)
  %copy-done = f8e4m3fn{ROWS} copy-done(%copy-start)
  ROOT %next = {STATE} tuple(%count, %weights, %written, %copy-done)
}}

%condition (state: {STATE}) -> pred[] {{
  %state.1 = {STATE} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (w: u8[3,512,512], y: bf16[3,512,512], x: f8e4m3fn[512,512]) -> bf16[3,512,512] {{
  %w = u8{STACK} parameter(0)
  %y = bf16{STACK} parameter(1)
  %x = f8e4m3fn{ROWS} parameter(2)
  %none = s32[] constant(0)
  %all = {STATE} tuple(%none, %w, %y, %x)
  %loop = {STATE} while(%all), {LOOP.replace('"2"', '"3"')}
  ROOT %result = bf16{STACK} get-tuple-element(%loop), index=2
}}
"""


def test_matmuls_with_slices_and_kernels_that_start_and_end_apart():
    found = audit(SLICES)
    assert found.matmuls == (Matmuls("FP8, Pallas", 3, 3 * 2 * 512**3),)
    assert found.launches == 3 * 3  # in each iteration the matmul and two copies
    assert found.bytes_beside_matmuls == 3 * 2 * (512 * 512 + 512 * 512)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (jnp.zeros(3), TypeError, r"audit takes .* got ArrayImpl\. Pass jax.jit\(f\).lower"),
        (jax.jit(jnp.sin).lower(1.0), ValueError, "only known after compiling"),
    ],
)
def test_errors_teach(given, error, words):
    with pytest.raises(error, match=words):
        audit(given)
