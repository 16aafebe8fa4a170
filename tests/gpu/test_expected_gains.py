"""Time saved by FP8: the report's cost model against the record of whole compiled steps."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import jfp8
from gpu_programs import device_of, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from support.devices import traced_for
from support.interpreter import cudnn_known
from support.scripts import imported
from support.whole_steps import PROGRAMS, TOKENS

RECORD = Path(__file__).parents[2] / "benchmarks/results/whole_steps.json"
STEPS = json.loads(RECORD.read_text())["programs"]
llama_nnx = imported("lm.llama_nnx", "examples")
SLOWER = "of its speed in bf16"


def expected_ms(name):
    """Return the milliseconds of all matmuls of a step, in FP8 and in bf16, and the warnings."""
    step, gpu = PROGRAMS[name], AbstractMesh((), (), abstract_device=device_of("h200"))
    create = lambda: step.model(step.width, step.width * 7 // 2, nnx.Rngs(0))
    with jax.sharding.use_abstract_mesh(gpu), cudnn_known():
        model = nnx.eval_shape(lambda: jfp8.convert(create(), "delayed", exempt=step.exempt))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            x = jax.ShapeDtypeStruct((4, TOKENS, step.width), jnp.bfloat16)
            rows = jfp8.report(model, x).rows
    timed = [row for row in rows if row.fp8]
    total = lambda us: sum(row.times * us(row) for row in timed) / 1e3
    in_fp8, in_bf16 = total(lambda row: row.expected_us), total(lambda row: row.bf16_us)
    return in_fp8, in_bf16, [str(each.message) for each in said]


@pytest.mark.parametrize("name", ["width 512", "width 1024", "one GPU"])
def test_the_report_expects_what_the_whole_step_saves(name):
    in_fp8, in_bf16, said = expected_ms(name)
    before, after = STEPS[name]["bf16"]["ms"], STEPS[name]["delayed"]["ms"]
    assert in_bf16 - in_fp8 == pytest.approx(before - after, abs=0.07 * before)
    assert (in_fp8 > in_bf16) == (after > before)
    assert in_fp8 <= in_bf16 or any(SLOWER in each for each in said)


@pytest.mark.parametrize("name", ["width 512", "width 1024"])
def test_a_step_without_slower_layers_is_not_slower(name):
    """With ``exempt="slower"``, to the precision of the record."""
    step = STEPS[f"{name}, exempt: slower"]
    assert step["delayed"]["ms"] <= step["bf16"]["ms"]
    in_fp8, in_bf16, said = expected_ms(f"{name}, exempt: slower")
    assert in_fp8 <= in_bf16
    assert not any(SLOWER in each for each in said)


MEASURED = json.loads((RECORD.parent / "gpu_h100.json").read_text())["runs"]["before-clusters"]


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_the_report_expects_the_step_that_an_h100_ran(monkeypatch, recipe):
    """A Transformer block of a 7B model with AdamW, without a head."""
    monkeypatch.setattr(llama_nnx, "by_sequence", lambda x: x)  # one GPU has no mesh
    size = llama_nnx.Size(4096, 1, 32, 32, 11008, TOKENS, 256)
    with traced_for("NVIDIA H100"), cudnn_known():
        block = lambda: llama_nnx.Layer(size, "cudnn", rngs=nnx.Rngs(0))
        model = nnx.eval_shape(lambda: jfp8.convert(block(), recipe, exempt=()))
        found = jfp8.report(model, jax.ShapeDtypeStruct((4, TOKENS, 4096), jnp.bfloat16))
    (measured,) = (
        record
        for record in MEASURED["records"]
        if record["section"] == "block" and record["name"] == recipe
    )
    assert found.step_gain == pytest.approx(measured["ratio"], rel=0.05)
