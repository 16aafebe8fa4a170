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

from support.interpreter import cudnn_known
from support.whole_steps import PROGRAMS, TOKENS

RECORD = Path(__file__).parents[2] / "benchmarks/results/whole_steps.json"
STEPS = json.loads(RECORD.read_text())["programs"]


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
    assert in_bf16 - in_fp8 == pytest.approx(before - after, abs=0.05 * before)
    assert (in_fp8 > in_bf16) == (after > before) == any("of the speed of bf16" in s for s in said)


@pytest.mark.parametrize("name", ["width 512", "width 1024"])
def test_a_step_without_slower_layers_is_not_slower(name):
    """With ``exempt="slower"``, to the precision of the record."""
    step = STEPS[f"{name}, exempt: slower"]
    assert step["delayed"]["ms"] <= step["bf16"]["ms"]
    in_fp8, in_bf16, said = expected_ms(f"{name}, exempt: slower")
    assert in_fp8 <= in_bf16
    assert not any("of the speed of bf16" in each for each in said)
