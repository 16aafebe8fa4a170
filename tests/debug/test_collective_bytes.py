"""Bytes between devices: formulas, programs compiled here, and the text of programs for GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jfp8.debug import Collective, CollectiveBytes, assert_collectives, collective_bytes

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
ALL = ("a", "b")


def compiled(f, *shapes, in_specs, out_specs):
    """`f` compiled for all devices, its arguments in f32."""
    run = jax.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(run).lower(*(jnp.zeros(shape) for shape in shapes)).compile()


def program(*instructions: str, header: str = "num_partitions=8", rest: str = "") -> str:
    """The text of a compiled program with these instructions."""
    body = "\n".join(f"  %i{k} = {line}" for k, line in enumerate(instructions))
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return f"HloModule jit_f, is_scheduled=true, {header}\n{rest}\n{entry}"


def one(instruction: str, **where: str) -> Collective:
    (found,) = collective_bytes(program(instruction, **where)).collectives
    return found


def test_loops_count_their_trips():
    """One of unknown length counts one, and says so."""

    def body(x, _):
        turn = lambda _, x: x + lax.psum(x, "b")
        return lax.fori_loop(0, 3, turn, x + lax.psum(x, ALL)), None

    def f(x):
        x = lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: lax.pmean(x, ALL) / 2, x)
        return lax.scan(body, x, length=5)[0]

    found = collective_bytes(compiled(f, (8, 100), in_specs=P(ALL), out_specs=P(ALL)))
    assert {(c.devices, c.times, c.bytes) for c in found.collectives if c.times} == {
        (8, 5, 5 * 2 * 7 / 8 * 400),
        (2, 15, 15 * 400),
    }
    (loop,) = (c for c in found.collectives if c.elements == 100 and c.times is None)
    assert loop.bytes == 2 * 7 / 8 * 400
    assert "per trip" in str(loop)
    assert "some loops do not say" in str(found)


def test_both_branches_of_a_conditional_count():
    def f(x):
        double = lambda x: lax.psum(x, ALL)
        gather = lambda x: lax.psum_scatter(lax.all_gather(x, ALL, tiled=True), ALL, tiled=True)
        return lax.cond(lax.axis_index("a") >= 0, double, gather, x) + lax.cond(
            x[0, 0] > 0, double, gather, x
        )

    found = collective_bytes(compiled(f, (8, 100), in_specs=P(ALL), out_specs=P(ALL)))
    assert {"all-reduce", "all-gather"} <= {c.op for c in found.collectives}


def test_trap_bytes_that_travel_as_something_else_are_seen():
    """XLA:CPU widens f8 to f16 on the wire; a program that asked for f8 does not send it."""

    def f(x):
        return lax.all_gather(x.astype(jnp.float8_e4m3fn), ALL).astype(jnp.float32)

    found = collective_bytes(compiled(f, (8, 100), in_specs=P(ALL), out_specs=P(None, ALL)))
    assert set(found.by_dtype()) == {"f16"}
    assert found.total == 7 * 100 * 2


# As compiled for H200 by JAX 0.11.2, with backend_config shortened.
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


def test_done_and_other_instructions_are_not_counted():
    found = collective_bytes(
        program(
            f"((u8[64]{{0}}), u8[512]{{0}}) all-gather-start(%p), {GROUPS}, {META}",
            f"u8[512]{{0}} all-gather-done(%i0), {META}",
            "f32[512]{0} fusion(%i1), kind=kLoop, calls=%all-gather_fusion",
            "f32[] partition-id()",
        )
    )
    assert found.total == 7 / 8 * 512


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


def test_where_a_collective_comes_from():
    tables = (
        'FileNames\n1 "model.py"\n2 "train.py"\n\nFunctionNames\n1 "f"\n2 "g"\n3 "h"\n\n'
        "FileLocations\n1 {file_name_id=2 function_name_id=3 line=14 end_line=14 column=8 "
        "end_column=8}\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
    )
    found = one(
        'f32[64]{0} all-gather(%p), metadata={op_name="jit(f)/gather" stack_frame_id=1}',
        rest=tables,
    )
    assert (found.name, found.source) == ("jit(f)/gather", "train.py:14")
    older = 'metadata={op_name="jit(f)/gather" source_file="a.py" source_line=7}'
    assert one(f"f32[64]{{0}} all-gather(%p), {older}").source == "a.py:7"
    assert one("f32[64]{0} all-gather(%p)").source == ""


def both(x):
    """A wide collective in f32, a narrow one in u8, and a mean of a scalar."""
    wide = lax.psum(x, ALL)
    narrow = lax.all_gather(x[0, :40].astype(jnp.uint8), ALL)
    return wide + jnp.sum(narrow) + lax.pmean(jnp.sum(x), ALL)


def test_assertions_name_the_widest_collective():
    f = compiled(both, (8, 5000), in_specs=P(ALL), out_specs=P(ALL))
    assert_collectives(f)
    total = collective_bytes(f).total
    assert collective_bytes(f) == collective_bytes(f.as_text())
    empty = collective_bytes(jax.jit(jnp.sin).lower(1.0).compile())
    assert (empty, empty.total, empty.widest) == (CollectiveBytes(()), 0, None)
    assert_collectives(f, max_bytes=total, dtypes={"u8", "f32"})
    assert_collectives(f, dtypes={"u8"}, exempt_bytes=10**6)
    with pytest.raises(
        AssertionError, match=r"more than max_bytes=1,000(.|\n)*all-reduce(.|\n)*psum"
    ):
        assert_collectives(f, max_bytes=1000)
    with pytest.raises(AssertionError, match=r"Only \['u8'\] may be sent(.|\n)*\['f32'\]") as error:
        assert_collectives(f, dtypes={"u8"})
    widest = str(error.value).splitlines()[1]
    assert "all-reduce" in widest
    assert "test_collective_bytes.py" in widest
    with pytest.raises(AssertionError, match=r"(?s)\['u8'\]\. The widest is\n.*all-gather"):
        assert_collectives(f, dtypes={"f32"}, exempt_bytes=0)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (jnp.zeros(3), TypeError, r"got ArrayImpl\. Pass jax.jit\(f\).lower"),
        (lambda x: x, TypeError, "got function"),
        ("module @jit_f {", ValueError, "starts with 'module @jit_f"),
        (jax.jit(jnp.sin).lower(1.0), ValueError, "only known after compiling"),
    ],
)
def test_errors_teach(given, error, words):
    with pytest.raises(error, match=words):
        collective_bytes(given)
