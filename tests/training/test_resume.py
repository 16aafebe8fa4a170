"""Killed in a step and resumed, states go on with equal files; `main` is what is killed."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jfp8
from jfp8.optim.adam import adam
from jfp8.optim.masters import init_masters, master_weights
from jfp8.recipes.per_tensor import DelayedScaling

WIDTH, BATCH = 64, 2048
STEPS, SAVE_AFTER, OVERFLOW_IN = 6, 3, 1
# Each way of keeping weights beside another of keeping moments. All have amax histories.
FP8_WEIGHTS = {
    None: adam(1e-2),
    "bfloat16": adam(1e-2, preset="torchao"),
    "float16_scaled": adam(1e-2, preset="coat"),
    "float32": adam(1e-2, preset="msamp_o2"),
}


def create() -> dict[str, jfp8.TrainState]:
    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH)])
    o2, tx = jfp8.initialize(model, optax.adamw(1e-2), recipe="hybrid", opt_level="O2", exempt=())
    delayed = jfp8.convert(model, DelayedScaling(), exempt=())
    x = jnp.ones((1, WIDTH))
    variables = jax.jit(o2.init)(jax.random.key(0), x)
    make = jfp8.TrainState.create
    states = {"O2": make(apply_fn=o2.apply, variables=variables, tx=tx)}
    variables = jax.jit(delayed.init)(jax.random.key(0), x)
    params = variables["params"]
    working = {**variables, "params": jfp8.quantize_params(params, DelayedScaling())}
    for master, inner in FP8_WEIGHTS.items():
        tx = optax.chain(jfp8.loss_scale(), master_weights(inner, master))
        state = make(apply_fn=delayed.apply, variables=working, tx=tx)
        opt_state = init_masters(state.opt_state, params)
        states[f"master {master}"] = state.replace(opt_state=opt_state)
    return states


def batch_of(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    y = np.sin(x[:, ::-1])
    if step == OVERFLOW_IN:
        x[7, 7] = np.inf
    return {"x": x, "y": y}


@jax.jit
def train_step(states, batch):
    new, losses = {}, {}
    for name, state in states.items():

        def loss_fn(variables, batch, state=state):
            y = state.apply_fn(variables, batch["x"])
            return jnp.mean((y - batch["y"]) ** 2), {}

        losses[name], grads = jfp8.value_and_grad(loss_fn)(state, batch)
        new[name] = state.apply_gradients(grads)
    return new, losses


def place(tree, mesh):
    """Along the first dimension, where the devices divide it: batch, weights, moments, scales."""

    def placed(x):
        divides = x.ndim and x.shape[0] % mesh.size == 0
        spec = PartitionSpec("data") if divides else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree)


def die_in_the_middle_of_a_step(states, mesh) -> None:
    """Steps until one is still running when this line of Python is."""
    for step in range(1000):
        after = train_step(states, place(batch_of(step), mesh))
        if not all(leaf.is_ready() for leaf in jax.tree.leaves(after)):
            print("in the middle of a step", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        states, _ = after


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="where checkpoints and results go")
    parser.add_argument("--resume", type=Path, help="a checkpoint to begin with")
    parser.add_argument("--die", action="store_true", help="after the checkpoint")
    parser.add_argument("--compiled", help="directory of compiled programs")
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", arguments.compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    mesh, directory = Mesh(np.array(jax.devices()), ("data",)), arguments.directory
    directory.mkdir()
    states, start = place(create(), mesh), 0
    if arguments.resume:
        states = place(jfp8.checkpoint.restore(arguments.resume, states, strict=True), mesh)
        start = SAVE_AFTER
        jfp8.checkpoint.save(directory / "restored.safetensors", states)
    kernel = states["master None"].params["layers_0"]["kernel"].data
    assert kernel.sharding.num_devices == 8
    assert not kernel.sharding.is_fully_replicated
    for step in range(start, STEPS):
        states, losses = train_step(states, place(batch_of(step), mesh))
        print(json.dumps({name: float(loss) for name, loss in losses.items()}), flush=True)
        if step + 1 == SAVE_AFTER:
            for name in ("checkpoint.safetensors", "orbax"):
                jfp8.checkpoint.save(directory / name, states)
            if arguments.die:
                die_in_the_middle_of_a_step(states, mesh)
    jfp8.checkpoint.save(directory / "final.safetensors", states)


def run(tmp_path: Path, name: str, *arguments: str, code: int = 0):
    """A process of its own: the directory it wrote, and its losses, the steps before included."""
    flags = "--xla_force_host_platform_device_count=8"
    source = Path(jfp8.__file__).parents[1]
    program = [sys.executable, __file__, tmp_path / name, "--compiled", tmp_path / "compiled"]
    process = subprocess.run(
        [*program, *arguments],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == code, process.stderr
    lines = process.stdout.splitlines()
    if code:
        assert lines[-1] == "in the middle of a step"
    losses = [json.loads(line) for line in lines if line.startswith("{")]
    return tmp_path / name, losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run that nobody disturbed, and one that was killed."""
    path = tmp_path_factory.mktemp("runs")
    whole, losses = run(path, "whole")
    killed, _ = run(path, "killed", "--die", code=-signal.SIGKILL)
    return path, whole, losses, killed


@pytest.mark.slow
def test_the_run_has_all_that_a_checkpoint_must_hold(runs):
    """Losses fall; a skipped step; FP8 and 16-bit arrays; histories and counts that moved."""
    _, whole, losses, killed = runs
    assert all(np.isnan(loss) for loss in losses[OVERFLOW_IN].values())
    assert all(0 < losses[-1][name] < 0.6 * losses[0][name] for name in losses[0])
    saved = jfp8.checkpoint.load(whole / "checkpoint.safetensors")
    leaves = jax.tree.leaves(saved)
    dtypes = {str(leaf.dtype) for leaf in leaves if isinstance(leaf, np.ndarray)}
    assert {"float8_e4m3fn", "float16", "bfloat16", "float32", "uint32", "int32"} <= dtypes
    scales = [node["loss_scale"] for node in _dicts(saved) if "loss_scale" in node]
    assert len(scales) == 5
    assert all(scale == 2.0**14 for scale in scales)
    histories = [node["amax_history"] for node in _dicts(saved) if "amax_history" in node]
    assert all(np.count_nonzero(h) == SAVE_AFTER - 1 for h in histories)  # one step was skipped
    assert len(histories) == 4 * 2 * 3
    assert not (killed / "final.safetensors").exists()


def _dicts(tree) -> list[dict]:
    if not isinstance(tree, dict):
        return []
    return [tree, *(node for child in tree.values() for node in _dicts(child))]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["checkpoint.safetensors", "orbax"])
def test_killed_in_the_middle_of_a_step_and_resumed(runs, checkpoint):
    path, whole, losses, killed = runs
    resumed, rest = run(
        path, f"resumed from {Path(checkpoint).stem}", "--resume", killed / checkpoint
    )
    read = lambda folder, name: (folder / f"{name}.safetensors").read_bytes()
    assert read(resumed, "restored") == read(whole, "checkpoint")
    assert read(resumed, "final") == read(whole, "final")
    assert rest == losses[SAVE_AFTER:]


if __name__ == "__main__":
    main()
