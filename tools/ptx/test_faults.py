"""Faults planted in the PTX of kernels that are right: the emulator must see each of them.

It sees one if under some schedule a result is wrong, or a `Fault` ends the run.
"""

import functools
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from gpu_programs import why_not
from ptx.exact import E4M3, Numbers, wide
from ptx.memory import Fault
from ptx.schedules import Ahead, Drawn, Turns

pytestmark = pytest.mark.skipif(why_not((0, 11, 2)) is not None, reason=str(why_not((0, 11, 2))))


@functools.cache
def kernel(name):
    """Return a kernel with rings of two slots that turn several times, and what it should give."""
    from jfp8.kernels.hopper.matmul import block_matmul, matmul
    from jfp8.kernels.hopper.quantize import quantize_rows_in_blocks
    from jfp8.kernels.hopper.tiles import Tiles
    from jfp8.scaling.formats import E4M3FN
    from ptx.emulate import Emulated

    draw = Numbers(3)
    if name == "quantize":
        x = draw.rng.normal(size=(256, 512)).astype(jnp.bfloat16)
        emulated = Emulated(lambda x: quantize_rows_in_blocks(x, E4M3FN, 128, None)[2], x)
        blocks = x.astype(np.float32).T.reshape(512, 2, 128)
        scale = np.abs(blocks).max(2, keepdims=True) / np.float32(448)
        want = (blocks * (np.float32(1) / scale)).reshape(512, 256).astype(E4M3)
        return emulated, want.view(np.uint8)
    m, n, k, tiles = 256, 256, 640, Tiles(64, 128, 2, 8, cluster=2 if name == "cluster" else 1)
    a, b, s, t = draw.matrix(m, k), draw.matrix(n, k), draw.scales(m), draw.scales(n)
    if name in ("block", "cluster"):
        s, t = draw.scales(k // 128, m), draw.scales(k // 128, n)
        want = (a * wide(s.T, a.shape)) @ (b * wide(t.T, b.shape)).T
        return Emulated(lambda *x: block_matmul(*x, jnp.float32, tiles=tiles), a, b, s, t), want
    f = lambda *x: matmul(*x, jnp.float32, promote=name == "promoted", tiles=tiles)
    return Emulated(f, a, b, s, t), a.astype(float) @ b.astype(float).T * s[:, None] * t


def seen(name, edit, collective=True, seeds=12):
    """Return what the first schedule shows that shows anything."""
    emulated, want = kernel(name)
    ahead = (Ahead(seed) for seed in range(seeds))
    for schedule in itertools.chain((Turns(False), Turns(True), Drawn(1)), ahead):
        try:
            got = emulated(schedule, edit=edit, collective=collective)
        except Fault as fault:
            return str(fault)
        got = got.view(np.uint8) if want.dtype == np.uint8 else got.astype(np.float64)
        if wrong := (got != want).sum():
            return f"{wrong} of {want.size} wrong"
    return None


def without(pattern, which=slice(None)):
    """Leave out the statements that match, or of these some."""
    return instead(pattern, "", which)


def instead(pattern, text, which=slice(None)):
    """Write `text` instead of what matches, or of some of these."""

    def edit(ptx):
        found = list(re.finditer(pattern, ptx))[which]
        assert found, pattern
        for m in reversed(found):
            ptx = ptx[: m.start()] + m.expand(text) + ptx[m.end() :]
        return ptx

    return edit


WAIT = r"mbarrier\.try_wait[^;]*;"
PASS = "setp.eq.b32 P1, 0, 0;"  # instead of a wait
ARRIVE = r"(mbarrier\.arrive\.release\.cta\.shared::cta\.b64 _, \[%r\d+\]), 1;"
STORE = r"cp\.async\.bulk\.wait_group\.read\s+1;"
FENCE, BARRIER = r"fence\.proxy\.async\.shared::cta;", r"bar\.sync\s+%r\d+, 128;"
FAULTS = {
    "wait_group too lax": ("fast", instead(r"(wgmma\.wait_group\S*) 1;", r"\1 2;")),
    "wait_group left out": ("promoted", without(r"wgmma\.wait_group\S* 0;")),
    "wgmma.fence left out": ("fast", without(r"wgmma\.fence\S*;")),
    "commit_group left out": ("promoted", without(r"wgmma\.commit_group\S*;")),
    "no proxy fence": ("fast", without(FENCE)),
    "no barrier after staging": ("fast", without(BARRIER, slice(1, None, 2))),
    "no barriers around codes": ("quantize", without(BARRIER)),
    "staged store not awaited": ("fast", without(STORE)),
    "last stores not awaited": ("promoted", without(r"cp\.async\.bulk\.wait_group\s+0;")),
    "too few arrivals": ("fast", without(ARRIVE, slice(1))),
    "too many arrivals": ("promoted", instead(ARRIVE, r"\1, 2;")),
    "arrives before it multiplies": ("promoted", lambda ptx: early_arrival(ptx)),
    "count of a barrier": ("fast", instead(r"(mbarrier\.init[^,]*), %r\d+;", r"\1, 128;")),
    "too few bytes": ("fast", instead(r"(expect_tx[^;]*), %r\d+;", r"\1, 64;")),
    "empty slots not awaited": ("fast", instead(WAIT, PASS, slice(1))),
    "full slots not awaited": ("fast", instead(WAIT, PASS, slice(-2, None))),
    "tiles not awaited": ("quantize", instead(WAIT, PASS)),
    "registers not given back": ("fast", without(r"setmaxnreg\.dec[^;]*;")),
    "cluster begins apart": ("cluster", without(r"barrier\.cluster\.\S*;")),
    "cluster ends apart": ("cluster", instead(WAIT, PASS, slice(-2, None))),
    "cluster frees one's slots": (
        "cluster",
        instead(r"(mapa\S* mapped_addr, %r\d+), %r\d+;", r"\1, 0;"),
    ),
    "wrong coordinates": ("fast", instead(r"(%r\d+),(%r\d+)(\} \], \[)", r"\2,\1\3")),
}


def early_arrival(ptx):
    """Free a slot before the product that reads it is awaited."""
    wait = re.search(r"wgmma\.wait_group\S* 0;", ptx)[0]
    return re.sub(ARRIVE, lambda m: m[0] + wait, ptx.replace(wait, "", 1), count=1)


def one_arrives(ptx):
    """Free a slot by one thread of a warpgroup, when its own warp's quarter is multiplied."""
    elected = re.search(r"@(%p\d+) cp\.async\.bulk\.tensor\S*global\.shared::cta", ptx)[1]
    return instead(ARRIVE, rf"@{elected} \1, 128;")(ptx)


@pytest.mark.parametrize("name", ["fast", "promoted", "block", "cluster", "quantize"])
def test_without_a_fault_nothing_is_seen(name):
    assert seen(name, lambda ptx: ptx, seeds=2) is None
    assert name == "quantize" or seen(name, lambda ptx: ptx, collective=False, seeds=2) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, record_property):
    name, edit = FAULTS[fault]
    found = seen(name, edit)
    record_property("seen", found)
    assert found


@pytest.mark.parametrize("name", ["fast", "promoted", "block"])
def test_one_thread_must_not_free_a_slot(name):
    """It knows of its own warp alone; if products end for a warpgroup together, that is enough."""
    assert seen(name, one_arrives, seeds=1) is None
    assert "has yet to read" in seen(name, one_arrives, collective=False)


def test_a_slot_of_a_cluster_is_free_when_all_warps_of_a_warpgroup_have_read_it():
    assert "has yet to read" in seen("cluster", without(BARRIER, slice(1)), collective=False)
