"""Folders of Orbax that several processes write together, each of which runs this file."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jfp8
from jfp8 import checkpoint
from jfp8.optim.masters import master_weights
from support.checkpoints import assert_same, in_two_processes

WIDTH = 64


def create() -> jfp8.TrainState:
    """A state with FP8 weights and moments, histories, a loss scale, and numbers in all of them."""
    model = jfp8.Dense(WIDTH)
    variables = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    variables = {**variables, "params": jfp8.quantize_params(variables["params"])}
    tx = optax.chain(jfp8.loss_scale(), master_weights(jfp8.optim.adamw(1e-3), "float32"))
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
    numbered = lambda x: (jnp.arange(x.size).reshape(x.shape) % 7 + 1).astype(x.dtype)
    return jax.tree.map(numbered, state)


def sharded_state() -> jfp8.TrainState:
    """The state of `create`, with large arrays sharded over all devices of all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    specs = lambda x: PartitionSpec("data") if x.ndim == 2 else PartitionSpec()
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, specs(x)), jax.eval_shape(create))
    return jax.jit(create, out_shardings=shardings)()


def assert_same_parts(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.sharding == y.sharding
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()


def main(directory: Path, address: str, process: int) -> None:
    import orbax.checkpoint as ocp

    jax.distributed.initialize(address, 2, process)
    state = sharded_state()
    stored = state.params["kernel"].data
    assert not stored.is_fully_addressable
    checkpoint.save(directory / "together", {"state": state, "epoch": 3, "host": np.ones(3)})
    target = {"state": state, "epoch": 0, "host": np.zeros(3)}
    restored = checkpoint.restore(directory / "together", target, strict=True)
    assert_same_parts(restored["state"], state)
    assert (restored["epoch"], restored["host"].tolist()) == (3, [1, 1, 1])
    with pytest.raises(ValueError, match="sharded over several processes.*folder of Orbax"):
        checkpoint.save(directory / "x.safetensors", state)
    with ocp.CheckpointManager(directory / "run") as manager:
        manager.save(7, args=ocp.args.StandardSave(state))  # returns while Orbax writes
        manager.wait_until_finished()
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored = manager.restore(7, args=ocp.args.StandardRestore(target))
    assert_same_parts(restored, state)
    print("all is there", flush=True)


@pytest.mark.slow
def test_several_processes_save_and_restore_together(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    in_two_processes(__file__, tmp_path, devices=2)
    # One process with other devices.
    state = jax.jit(create)()
    for saved in (
        checkpoint.restore(tmp_path / "together", {"state": state, "epoch": 0, "host": np.ones(3)}),
        {"state": checkpoint.restore(tmp_path / "run/7/default", state, strict=True)},
    ):
        assert_same(saved["state"], state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
