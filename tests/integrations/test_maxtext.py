"""`jfp8.integrations.maxtext` in MaxText itself: see `benchmarks/clients/maxtext_client.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("maxtext", reason="MaxText is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import jax
from jax.extend import core
import numpy as np
from flax import nnx
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
import maxtext_client as t
from jfp8.linen import histories_in
from jfp8.scaling.sink import ROLES

def told(run):
    state = run.state if isinstance(run.state, nnx.State) else nnx.state(run.state)
    histories = {}
    for path, variable in nnx.to_flat_state(state):
        if variable.type.__name__ == "_overwrite_with_gradient":
            of = histories_in({"state": variable.get_value()})
            histories["/".join(map(str, path))] = {
                role: np.asarray(of[role]["amax_history"]).tolist() for role in ROLES
            }
    return {"losses": run.losses, "histories": histories, "products": t.counted(run)}

SMALL = {"base_num_decoder_layers": 2, "base_emb_dim": 64, "head_dim": 16, "base_mlp_dim": 128,
         "base_moe_mlp_dim": 128, "max_target_length": 32, "steps": 3,
         "learning_rate_schedule_steps": 6}
runs = [t.train(SMALL | {k: v for k, v in o.items() if k not in ("data", "fp8")},
                data=t.MarkovChain if o.get("data", True) else None, fp8=o.get("fp8", True))
        for o in json.loads(sys.argv[2])]
print("TOLD", json.dumps([told(run) for run in runs]))
"""
DELAYED = {"quantization": "jfp8_delayed"}
MIXTURE = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = MIXTURE | {  # latent attention, a dense layer before experts of which one is shared
    "decoder_block": "deepseek",
    "attention_type": "mla",
    **{f"{name}_lora_rank": 32 for name in ("q", "kv")},
    **{f"{name}_head_dim": 16 for name in ("qk_nope", "qk_rope", "v")},
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "ici_fsdp_parallelism": 8,
    "ici_tensor_parallelism": 1,
}


def run(program, *words):
    """Run a Python program in a process of its own, and return the finished process."""
    paths = [str(ROOT / "benchmarks" / "clients"), str(ROOT)]
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": flags}
    environment = os.environ | environment | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def trained(*options, devices=8):
    """Losses, histories and products of a run with each of the `options`, in one process."""
    done = run(PROGRAM, str(devices), json.dumps(options))
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("TOLD "))


def newest_first(histories, role):
    """f32[products, layers, H]."""
    return np.array([of[role] for _, of in sorted(histories.items())])


@pytest.fixture(scope="module")
def eight():
    """A run in float32 and one with delayed scaling, on 8 devices, fsdp 4 x tensor 2."""
    return trained(DELAYED | {"fp8": False}, DELAYED)


def test_all_projections_are_fp8_and_histories_move(eight):
    exact, run = eight
    assert exact["products"]["fp8"] == 0
    # Seven projections; forward, again in the backward pass (but for the last), and two gradients.
    assert run["products"]["fp8"] == 7 * 4 - 1
    others = sum(run["products"]["others"].values())
    assert others + 27 == sum(exact["products"]["others"].values())
    assert len(run["histories"]) == 7
    for role in ("lhs", "rhs", "grad"):
        found = newest_first(run["histories"], role)
        assert found.shape == (7, 2, 16)
        assert (found[..., :3] > 0).all()
        assert not found[..., 3:].any()
    np.testing.assert_allclose(run["losses"], exact["losses"], rtol=0.01)
    assert run["losses"] != exact["losses"]


def test_one_device_records_the_same(eight):
    one = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 1, "per_device_batch_size": 16}
    (alone,) = trained(DELAYED | one, devices=1)
    for role in ("lhs", "rhs", "grad"):
        first = newest_first(alone["histories"], role)[..., 2]
        np.testing.assert_allclose(
            newest_first(eight[1]["histories"], role)[..., 2],
            first,
            rtol=0.02 if role == "grad" else 1e-6,
        )
    np.testing.assert_allclose(alone["losses"], eight[1]["losses"], rtol=1e-3)


def test_accumulated_gradients_make_one_entry(eight):
    two = {"gradient_accumulation_steps": 2, "per_device_batch_size": 1}
    (run,) = trained(DELAYED | two)
    np.testing.assert_allclose(run["losses"], eight[1]["losses"], rtol=2e-3)
    for role in ("lhs", "rhs", "grad"):
        found = newest_first(run["histories"], role)
        assert ((found > 0).sum(axis=-1) == 3).all()
    ratio = newest_first(run["histories"], "rhs")[..., 2]
    ratio /= newest_first(eight[1]["histories"], "rhs")[..., 2]
    np.testing.assert_allclose(ratio, 1, rtol=1e-6)  # the same weights in both


def saved_in(folder):
    kept = {"base_output_directory": str(folder), "enable_checkpointing": True}
    return kept | {"async_checkpointing": False, "checkpoint_period": 1}


@pytest.mark.parametrize(
    ("model", "products"), [({}, 27), (DEEPSEEK | {"shard_mode": "explicit"}, 74)]
)
def test_resuming_changes_no_bit(tmp_path, model, products):
    model = DELAYED | model
    kept = model | saved_in(tmp_path) | {"data": False}
    whole, begun, resumed, automatic = trained(
        kept | {"run_name": "whole", "steps": 4},
        kept | {"run_name": "parts", "steps": 2},
        kept | {"run_name": "parts", "steps": 4},
        model | {"data": False, "shard_mode": "auto", "steps": 4},
    )
    assert begun["losses"] + resumed["losses"] == whole["losses"] == automatic["losses"]
    assert resumed["histories"] == whole["histories"] == automatic["histories"]
    assert whole["products"]["fp8"] == automatic["products"]["fp8"] == products
    assert len(set(whole["losses"])) == 4


def test_a_run_without_fp8_goes_on_with_it(tmp_path):
    kept = saved_in(tmp_path)
    before, after = trained(kept | {"steps": 2}, DELAYED | kept | {"steps": 3})
    assert len(before["losses"]) == 2
    assert len(after["losses"]) == 1
    assert after["losses"][0] < before["losses"][0]
    assert (newest_first(after["histories"], "grad") > 0).sum(axis=-1).max() == 1


def test_mixtures_of_experts():
    dense, mixed, grouped = trained(
        DELAYED | MIXTURE | {"sparse_matmul": False},
        {"quantization": "jfp8_mxfp8"} | MIXTURE | {"sparse_matmul": False, "capacity_factor": 1.5},
        {"quantization": "jfp8_current"} | MIXTURE,
    )
    for run in (dense, mixed, grouped):
        assert run["products"]["fp8"] >= 7 * 4 - 1
        assert not any("(4, 64, 128)" in shapes for shapes in run["products"]["others"])
        assert np.isfinite(run["losses"]).all()
    experts = [path for path in dense["histories"] if "quant_einsums" in path]
    assert len(experts) == 3
    assert not any("gate" in path for path in dense["histories"])
    assert all(np.array(dense["histories"][p]["grad"])[..., 0].all() for p in experts)


COMMAND = """
import runpy, sys
import jax, maxtext_stand_ins
jax.config.update("jax_num_cpu_devices", 8)
sys.argv[0] = "maxtext"
runpy.run_module("jfp8.integrations.maxtext", run_name="__main__", alter_sys=True)
"""


def test_the_command_trains(tmp_path):
    """The same as ``python -m``, but for the stand-ins."""
    options = {
        "run_name": "run",
        "quantization": "jfp8_delayed",
        "base_output_directory": tmp_path,
        "jax_cache_dir": tmp_path,
        "metrics_file": tmp_path / "metrics",
        "dataset_type": "synthetic",
        "steps": 2,
        "enable_checkpointing": False,
        "base_emb_dim": 64,
        "base_mlp_dim": 128,
        "base_num_decoder_layers": 1,
        "vocab_size": 128,
        "max_target_length": 32,
        "attention": "dot_product",
    }
    done = run(COMMAND, *[f"{name}={value}" for name, value in options.items()])
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "metrics").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "jfp8_delaid"}, "jfp8_delayed"),
        (DELAYED | {"use_qwix_quantization": True}, "Set use_qwix_quantization=False"),
        (DELAYED | MIXTURE | {"megablox": False}, "megablox=True use_tokamax_gmm=False"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(AssertionError, match=message):
        trained(options)
