"""Readers of compiled programs: formulas, programs compiled here, and the text of some for GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from support.compiled import Collective, Matmuls, audit, collective_bytes
from support.scripts import run_script

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
ALL = ("a", "b")


def program(*instructions: str, header: str = "num_partitions=8", rest: str = "") -> str:
    """The text of a compiled program with these instructions."""
    body = "\n".join(f"  %i{k} = {line}" for k, line in enumerate(instructions))
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return f"HloModule jit_f, is_scheduled=true, {header}\n{rest}\n{entry}"


def one(instruction: str, **where: str) -> Collective:
    (found,) = collective_bytes(program(instruction, **where)).collectives
    return found


def test_matmuls_in_loops_count_as_often_as_they_run():
    def f(x, w):
        outer = lambda x, _: (lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), None)
        return lax.scan(outer, x, length=5)[0] @ w[:, :8]

    found = audit(jax.jit(f).lower(jnp.ones((64, 32)), jnp.ones((32, 32))).compile())
    flops = 2 * 64 * 32 * (15 * 32 + 8)
    assert found.matmuls == (Matmuls("f32", 16, flops),)
    assert (found.flops, found.is_exact) == (flops, True)
    assert str(found).splitlines()[0].split() == ["matmuls,", "f32", "16", "1.999e-06", "TFLOP"]


def test_collectives_in_loops_count_their_trips():
    """One of unknown length counts one, and says so."""

    def body(x, _):
        turn = lambda _, x: x + lax.psum(x, "b")
        return lax.fori_loop(0, 3, turn, x + lax.psum(x, ALL)), None

    def f(x):
        x = lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: lax.pmean(x, ALL) / 2, x)
        return lax.scan(body, x, length=5)[0]

    specs = {"in_specs": P(ALL), "out_specs": P(ALL), "check_vma": False}
    run = jax.jit(jax.shard_map(f, mesh=MESH, **specs))
    found = collective_bytes(run.lower(jnp.zeros((8, 100))).compile())
    assert {(c.devices, c.times, c.bytes) for c in found.collectives if c.times} == {
        (8, 5, 5 * 2 * 7 / 8 * 400),
        (2, 15, 15 * 400),
    }
    (loop,) = (c for c in found.collectives if c.elements == 100 and c.times is None)
    assert loop.bytes == 2 * 7 / 8 * 400
    assert "per trip" in str(loop)
    assert "some loops do not say" in str(found)


# Compiled for H200 by JAX 0.11.2, with backend_config shortened.
GROUPS = "replica_groups=mesh['d'=8] {'d'}, dimensions={0}"
META = 'metadata={op_name="jit(f)/shard_map/all_to_all" stack_frame_id=173}'


@pytest.mark.parametrize(
    ("instruction", "op", "parts"),
    [
        (
            "((u8[8,64,132]{2,1,0}), u8[8,64,132]{2,1,0}) all-to-all-start(%x), channel_id=1, "
            f"{GROUPS}, {META}",
            "all-to-all",
            {"u8": (8 * 64 * 132, 7 / 8 * 8 * 64 * 132)},
        ),
        (
            f"((f32[65536]{{0}}), f32[8192]{{0}}) reduce-scatter-start(%x), {GROUPS}",
            "reduce-scatter",
            {"f32": (8192, 7 * 8192 * 4)},
        ),
        (  # with contexts, as older ones do
            "(f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, "
            "source_target_pairs={{0,1}}",
            "collective-permute",
            {"f32": (64, 64 * 4)},
        ),
        (
            "((u8[65,132]{1,0}, bf16[1024]{0}), (u8[520,132]{1,0}, /*index=1*/bf16[8192]{0})) "
            f"all-gather-start(%x, %y), {GROUPS}",
            "all-gather",
            {"u8": (520 * 132, 7 / 8 * 520 * 132), "bf16": (8192, 7 / 8 * 8192 * 2)},
        ),
        (
            f"(f32[100]{{0}}, bf16[50]{{0}}) all-reduce-start(%x, %y), {GROUPS}, to_apply=%add",
            "all-reduce",
            {"f32": (100, 2 * 7 / 8 * 400), "bf16": (50, 2 * 7 / 8 * 100)},
        ),
        (
            "(f8e4m3fn[512]{0}, f8e4m3fn[4096]{0:T(1024)(4,1)}) all-gather-start(%x), "
            f"channel_id=1, {GROUPS}",
            "all-gather",
            {"f8e4m3fn": (4096, 7 / 8 * 4096)},
        ),
        (f"u4[64]{{0:E(4)}} all-gather(%x), {GROUPS}", "all-gather", {"u4": (64, 7 / 8 * 32)}),
    ],
)
def test_forms_of_gpus(instruction, op, parts):
    found = collective_bytes(program(instruction)).collectives
    assert {c.dtype: (c.elements, c.bytes) for c in found} == parts
    assert {c.op for c in found} == {op}


def test_wrapped_asynchronous_collectives_count_once_and_calls_each_time():
    rest = (
        "%wrapped (p: f32[64]) -> f32[8] {\n"
        f"  ROOT %r = f32[8]{{0}} reduce-scatter(%p), {GROUPS}, to_apply=%add\n"
        "}\n"
    )
    wrapped = (
        "((f32[64]{0}), f32[8]{0}) async-start(%p), calls=%wrapped",
        "((f32[64]{0}), f32[8]{0}) async-update(%i0), calls=%wrapped",
        "f32[8]{0} async-done(%i1), calls=%wrapped",
    )
    assert collective_bytes(program(*wrapped, rest=rest)).total == 7 * 8 * 4
    call = "f32[8]{0} call(%p), to_apply=%wrapped"
    (found,) = collective_bytes(program(call, call, rest=rest)).collectives
    assert found.times == 2


DEVICES = {
    "{{0,1},{2,3},{4,5},{6,7}}": 2,
    "{{0,1,2,3,4,5,6,7}}": 8,
    "{{0},{1}}": 1,
    "{}": 16,
    "[4,2]<=[8]": 2,
    "[2,4]<=[4,2]T(1,0)": 4,
    "mesh['a'=4,'b'=2] {'a','b'}": 8,
    "mesh['a'=4,'b'=2] {'b'}": 2,
    "mesh['a'=4,'b'=2] {'a':(1)2}": 2,
    "mesh['data'=4,'b'=2], device_ids=([2,4]T(1,0)) {'data'}": 4,
}


def test_groups_of_devices():
    for groups, devices in DEVICES.items():
        gather = f"f32[64]{{0}} all-gather(%p), replica_groups={groups}, dimensions={{0}}"
        found = one(gather, header="replica_count=2, num_partitions=8")
        assert found.devices == devices, groups
        assert found.bytes == (devices - 1) / devices * 256


# Compiled for an H200 by JAX 0.11.2: a loop of two iterations over a weight and an activation.
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
    read_and_written += 2 * 2 * values + 4 + 2 * values + 4  # computed from two arrays
    assert found.bytes_beside_matmuls == 2 * read_and_written
    # The weight in each iteration, and the activation, which changes, twice in one.
    assert found.quantized_again == (("w", 2), ("x", 2))
    rows = [line.split("  ")[0] for line in str(found).splitlines()]
    assert rows[:2] == ["matmuls, FP8, Pallas", "matmuls, FP8, cuBLASLt"]
    assert "arrays quantized more than once" in rows


def test_the_script_prints_both(tmp_path):
    (tmp_path / "step.hlo").write_text(GPU)
    printed = run_script("examples/audit.py", "step.hlo", cwd=tmp_path)
    assert printed == f"{audit(GPU)}\n\n{collective_bytes(GPU)}\n"
    with pytest.raises(ValueError, match="only known after compiling"):
        audit(jax.jit(jnp.sin).lower(1.0))
