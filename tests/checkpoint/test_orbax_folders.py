"""Folders that Orbax wrote as its guides and Flax's guides show, and several processes together.

Each process runs this file.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jfp8
from jfp8 import checkpoint
from jfp8.optim.masters import master_weights
from support.arrays import assert_same
from support.checkpoints import in_two_processes, told

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


def net(linear: type[nnx.Module] = nnx.Linear, seed: int = 0) -> nnx.Module:
    """A model with a parameter that is called "value", as Orbax calls what it wraps."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.value = nnx.Param(rngs.params.normal((2,)))

    return Net(nnx.Rngs(seed))


def by_guides(ocp: Any, state: nnx.State, folder: Path) -> dict[str, Callable[[], Any]]:
    """Ways to save `state`, and where they leave it below `folder`."""
    v1 = importlib.import_module("orbax.checkpoint.experimental.v1")
    standard = ocp.StandardCheckpointer()

    def managed(name: str, args: Any) -> None:
        with ocp.CheckpointManager(folder / name) as manager:
            manager.save(3, args=args)

    pure, save = nnx.to_pure_dict(state), ocp.args.StandardSave(state)
    return {
        "standard": lambda: standard.save(folder / "standard", state),
        "pure": lambda: standard.save(folder / "pure", pure),
        "as_pure": lambda: standard.save(folder / "as_pure", nnx.as_pure(state)),
        "pytree": lambda: ocp.PyTreeCheckpointer().save(folder / "pytree", state),
        "manager/3/default": lambda: managed("manager", save),
        "items/3/model": lambda: managed("items", ocp.args.Composite(model=save)),
        "v1/state": lambda: v1.save(folder / "v1", state),
        "v1_items/model": lambda: v1.save_checkpointables(folder / "v1_items", {"model": state}),
        "ours": lambda: checkpoint.save(folder / "ours", state),
    }


TARGETS = {
    "plain": lambda: net(seed=1),
    "converted": lambda: jfp8.convert(net(seed=1), exempt=()),
    "jfp8": lambda: net(jfp8.nnx.Linear, seed=1),
}


def test_what_guides_save_is_restored_into_plain_converted_and_fp8_models(directory):
    ocp = pytest.importorskip("orbax.checkpoint")
    state = nnx.state(net())
    plain = dict(nnx.to_flat_state(state))
    ways = by_guides(ocp, state, directory)
    for save in ways.values():
        save()
    for name, make in TARGETS.items():
        for way in ways:
            model = make()
            new, messages = told(checkpoint.restore, directory / way, nnx.state(model))
            nnx.update(model, new)
            found = dict(nnx.to_flat_state(nnx.state(model)))
            assert all(jnp.all(found[path][...] == x[...]) for path, x in plain.items())
            assert len(messages) == (name != "plain"), messages
        shapes = nnx.state(nnx.eval_shape(make))
        new, _ = told(checkpoint.restore, directory / "standard", shapes)
        found = dict(nnx.to_flat_state(new))
        assert all(jnp.all(found[path][...] == x[...]) for path, x in plain.items())
    # The folder around the one that holds the tree.
    for way in ways:
        if "/" in way:
            message = f"Pass one of its folders, newest first: {re.escape(str(directory / way))}"
            with pytest.raises(ValueError, match=message):
                checkpoint.load(directory / way.split("/")[0])


def test_a_model_and_its_optimizer_in_flax_go_on_in_jfp8(directory):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = optax.adam(1e-3)
    model = net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "run", nnx.state((model, optimizer)))
    converted = jfp8.convert(net(seed=1), exempt=())
    ours = jfp8.nnx.Optimizer(converted, tx)
    new, _ = told(checkpoint.restore, directory / "run", nnx.state((converted, ours)))
    nnx.update((converted, ours), new)
    assert int(ours.step[...]) == 1
    assert int(ours.skipped_steps[...]) == 0
    moments = lambda optimizer: nnx.to_pure_dict(nnx.state(optimizer.opt_state))
    assert_same(moments(ours), moments(optimizer))
    # And back.
    checkpoint.save(directory / "back", nnx.state((converted, ours)))
    restored, _ = told(checkpoint.restore, directory / "back", nnx.state((model, optimizer)))
    assert_same(nnx.to_pure_dict(restored[1]), nnx.to_pure_dict(nnx.state(optimizer)))


def test_what_cannot_be_restored_is_told_what_to_type(directory):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "params", nnx.state(net(), nnx.Param))
        checkpointer.save(directory / "module", net())
    with pytest.raises(ValueError, match=r"(?s)dropout.*is missing.*nnx.state\(model, nnx.Param\)"):
        checkpoint.restore(directory / "params", nnx.state(net()))
    checkpoint.restore(directory / "params", nnx.state(net(), nnx.Param))
    with pytest.raises(ValueError, match=r"it holds an object.*Save nnx.state\(model\)"):
        checkpoint.load(directory / "module")
    (directory / "checkpoint_3").write_bytes(b"")
    with pytest.raises(ValueError, match="msgpack_restore"):
        checkpoint.load(directory / "checkpoint_3")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
