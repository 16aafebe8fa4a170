"""Whole steps of a block of today's language models, compiled for one H200 and for eight.

`examples/audit.py` counts what layers alone do not show: FLOPs, kernels, exchanges, operands that
are quantized more than once, and the time that compiling takes. Nothing is executed; elsewhere it
is skipped: see `test_compiled`.
"""

import functools
import runpy
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_programs import Program, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from support.whole_steps import PROGRAMS

CHECKOUT = Path(__file__).parents[2]
WIDTH, KEYS, MLP, TOKENS = 4096, 1024, 14336, 8192
KERNELS = 2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * MLP  # elements
FORWARD_AND_BACKWARD = 6 * TOKENS * KERNELS  # operations, without attention


@functools.cache
def compiled(name: str, recipe: str | None) -> tuple[Program, float]:
    """The program of a step, and the seconds of this process that tracing and compiling took."""
    began = time.process_time()
    program = PROGRAMS[name].compile(recipe)
    return program, time.process_time() - began


@dataclass(frozen=True)
class Bounds:
    """The most of what costs time besides matmuls and bytes.

    Attributes:
      small: kernels below 1 MB.
      transposes: transposes of f8 arrays. FSDP gathers parts of a weight one after the other that
        must lie side by side.
      exchanges: collectives below 1 MB.
      kernels: Pallas kernels that are compiled: one of each size and type for amaxes, and one of
        each shape and type that quantizes, with delayed scaling one more for SwiGLU.
      sent: bytes over those of bf16. Weights are gathered in one byte instead of two.
      compiling: CPU seconds relative to bf16: 15 percent more than measured.
    """

    small: int
    transposes: int = 0
    exchanges: int = 0
    kernels: int = 15
    sent: float = 1.0
    compiling: float = 4.5


BOUNDS = {
    ("one GPU", "delayed"): Bounds(29, kernels=16),
    ("one GPU, AdamW", "delayed"): Bounds(35, kernels=16),
    ("one GPU", "current"): Bounds(29, kernels=9),  # one looks at the loss
    ("4 micro-batches", "delayed"): Bounds(334, kernels=21),
    ("8 GPUs, FSDP", "delayed"): Bounds(
        64, transposes=7, exchanges=10, kernels=17, sent=0.76, compiling=6.0
    ),
    ("8 GPUs, FSDP×TP 2×4", "delayed"): Bounds(
        62, transposes=9, exchanges=10, kernels=22, sent=0.96, compiling=5.5
    ),
    # Activations are gathered as bytes, once for all layers; these are laid side by side.
    ("8 GPUs, FSDP×TP 2×4, parts of sequences", "delayed"): Bounds(
        72, transposes=21, exchanges=10, kernels=22, sent=0.68, compiling=5.5
    ),
    ("8 GPUs, FSDP×TP 2×4, parts of sequences", "current"): Bounds(
        77, transposes=21, exchanges=10, kernels=21, sent=0.68, compiling=5.5
    ),
}


@pytest.mark.parametrize(("name", "recipe"), BOUNDS)
def test_step(name, recipe, recorded):
    """All that bf16 multiplies is in FP8, no more is sent, and little is done besides."""
    plain, plain_seconds = compiled(name, None)
    program, seconds = compiled(name, recipe)
    recorded(f"{name}: converted NNX block, 4096→14336, seven `nnx.Linear`, {recipe}", program)
    bf16, audit, most = plain.audit, program.audit, BOUNDS[name, recipe]
    step = PROGRAMS[name]
    print(name, recipe, f"compiled in {seconds:.1f} s, bf16 in {plain_seconds:.1f} s")
    print(audit, f"kernels compiled: {len(program.hlo.mosaic_kernels)}", sep="\n")
    assert {m.kind: m.count for m in audit.matmuls} == {
        "FP8, cuBLASLt": 21 * step.micro_batches,
        "attention, cuDNN": 2 * step.micro_batches,
    }
    share = step.micro_batches / step.axes.get("tp", 1)
    assert audit.flops == pytest.approx(FORWARD_AND_BACKWARD * share)
    assert audit.flops == pytest.approx(bf16.flops)
    assert audit.is_exact
    assert audit.sent.total <= most.sent * bf16.sent.total
    assert audit.small_launches <= most.small
    assert audit.f8_transposes <= most.transposes
    assert audit.small_collectives <= most.exchanges
    assert 0 < len(program.hlo.mosaic_kernels) <= most.kernels
    assert audit.rounded_scales == step.trains  # AdamW rounds one of its own factors to bf16
    assert seconds <= most.compiling * plain_seconds
    assert audit.quantized_again == ()


def test_bytes_that_a_step_of_scanned_layers_holds():
    """The gradients of both in f32 are a quarter of what bf16 holds."""
    held = runpy.run_path(str(CHECKOUT / "benchmarks" / "held_bytes.py"))["held"]
    assert held(8, "delayed", "none") <= 0.6 * held(8, "bf16", "none")
