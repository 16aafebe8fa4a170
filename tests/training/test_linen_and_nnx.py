"""Linen next to NNX: the table of docs/works_with.md, and tests of NNX of no other file."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from support.arrays import assert_same, relative_error

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs/works_with.md"


def rows() -> list[list[str]]:
    """The rows of the page's table: a task, and what is called for it in Linen and in NNX."""
    table = PAGE.read_text(encoding="utf-8").partition("| | Linen | NNX |\n|---|---|---|\n")[2]
    lines = table.partition("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_call_of_the_page_is_made_in_a_test():
    tests = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    called = {name for text in tests for name in re.findall(r"\.(\w+)\(", text)}
    assert len(rows()) >= 13
    for task, linen, of_nnx in rows():
        assert linen.count("`") >= 2, task
        assert of_nnx.count("`") >= 2 or of_nnx.startswith("the same"), task
        names = set(re.findall(r"[\w.]*\.(\w+)\(", linen + of_nnx))
        assert names, task
        assert names <= called, task


WIDTH = 72  # eight devices divide it, and three; FP8 moments have 4096 elements or more
X = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
BATCH = {"x": X, "y": jnp.roll(X, 1, axis=0)}
BAD = {**BATCH, "x": X.at[-1, 3].set(jnp.nan)}


class Plain(nnx.Module):
    """Two layers of Flax."""

    def __init__(self, activation=nnx.relu, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        return self.last(self.activation(self.first(x)))


def made(recipe="delayed", **options):
    return jfp8.convert(Plain(**options), recipe, exempt=())


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def stepped(f):
    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = jfp8.nnx.value_and_grad(f)(model, batch)
        optimizer.update(model, grads)
        return loss

    return step


step = stepped(loss_fn)


class InNnx:
    """A model and its optimizer, with the methods of a `TrainState` that tests need."""

    def __init__(self, seed=0):
        self.model = made(seed=seed)
        self.optimizer = jfp8.nnx.Optimizer(self.model, optax.adam(1e-2))

    @property
    def state(self):
        return nnx.state((self.model, self.optimizer))

    def put(self, state):
        nnx.update((self.model, self.optimizer), state)

    first, function = "first", staticmethod(step)

    @property
    def arguments(self):
        return self.model, self.optimizer

    def step(self, batch):
        return step(*self.arguments, batch)

    @property
    def kernel(self):
        return self.model.first.kernel[...]


LINEN = jfp8.convert(nn.Sequential([nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH)]), exempt=())


@jax.jit
def linen_step(state, batch):
    apply = lambda variables, batch: loss_fn(lambda x: LINEN.apply(variables, x), batch)
    loss, grads = jfp8.value_and_grad(apply)(state, batch)
    return state.apply_gradients(grads), loss


class InLinen:
    """The same in Linen."""

    def __init__(self, seed=0):
        variables = LINEN.init(jax.random.key(seed), X)
        self.state = jfp8.TrainState.create(
            apply_fn=LINEN.apply, variables=variables, tx=optax.adam(1e-2)
        )

    def put(self, state):
        self.state = state

    first, function = "layers_0", staticmethod(linen_step)

    @property
    def arguments(self):
        return (self.state,)

    def step(self, batch):
        self.state, loss = linen_step(self.state, batch)
        return loss

    @property
    def kernel(self):
        return self.state.params["layers_0"]["kernel"]


each_kind = pytest.mark.parametrize("kind", [InNnx, InLinen])


def spread(tree, mesh):
    """Every matrix along its rows, and the batch."""
    spec = lambda x: P(mesh.axis_names[0]) if x.ndim == 2 else P()
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


@pytest.mark.representative(1)
@each_kind
def test_fsdp_is_the_step_of_one_device(kind, mesh_of):
    single, sharded = kind(), kind()
    mesh = mesh_of((8,), ("fsdp",))
    with jax.set_mesh(mesh):
        sharded.put(spread(sharded.state, mesh))
        losses = [float(sharded.step(spread(BATCH, mesh))) for _ in range(3)]
    np.testing.assert_allclose(losses, [single.step(BATCH) for _ in range(3)], rtol=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    shards = sharded.kernel.addressable_shards
    assert [shard.data.shape for shard in shards] == [(WIDTH // 8, WIDTH)] * 8


@each_kind
@pytest.mark.representative(1)
def test_resumed_on_another_number_of_devices(kind, tmp_path):
    """On eight devices, then on three: the same bits, and the same next step."""
    pytest.importorskip("orbax.checkpoint")
    first, then = kind(), kind(seed=1)
    first.put(spread(first.state, Mesh(jax.devices()[:8], ("data",))))
    for _ in range(2):
        first.step(BATCH)
    jfp8.checkpoint.save(tmp_path / "step_2", first.state)
    target = spread(then.state, Mesh(jax.devices()[:3], ("data",)))
    then.put(jfp8.checkpoint.restore(tmp_path / "step_2", target, strict=True))
    assert len(then.kernel.addressable_shards) == 3
    assert_same(jax.device_get(then.kernel), jax.device_get(first.kernel))
    found, expected = (jax.tree.leaves(jax.device_get(each.state)) for each in (then, first))
    assert_same(found, expected)
    np.testing.assert_allclose(then.step(BATCH), first.step(BATCH), rtol=1e-5)


@pytest.mark.parametrize("stored", ["moments", "parameters"])
@pytest.mark.representative(1)
def test_state_in_fp8_trains_and_is_skipped(stored):
    plain, model = InNnx(), made()
    params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    if stored == "moments":
        optimizer = jfp8.nnx.Optimizer(model, jfp8.optim.adamw(1e-2))
    else:
        nnx.update(model, jfp8.quantize_params(params))
        tx = jfp8.optim.master_weights(optax.adam(1e-2), "bfloat16")
        optimizer = jfp8.nnx.Optimizer(model, tx)
        start = jfp8.optim.init_masters(nnx.as_pure(optimizer.opt_state), nnx.as_pure(params))
        nnx.update(optimizer.opt_state, nnx.state(start))
    losses = [float(step(model, optimizer, BATCH)) for _ in range(3)]
    state = lambda: jax.device_get(nnx.as_pure(nnx.state((model, optimizer.opt_state))))
    before = state()
    step(model, optimizer, BAD)
    assert_same(state(), before)
    assert int(optimizer.skipped_steps[...]) == 1
    losses.append(float(step(model, optimizer, BATCH)))
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, [plain.step(BATCH) for _ in range(4)], rtol=0.03)
    of = optimizer.opt_state if stored == "moments" else model
    dtypes = [x.dtype.name for x in jax.tree.leaves(nnx.as_pure(nnx.state(of)))]
    assert dtypes.count("float8_e4m3fn") == 2


@pytest.mark.slow
def test_gradients_by_parameters_in_fp8_are_those_by_their_values():
    stored, wide = made("mxfp8"), made("mxfp8")
    params = jfp8.quantize_params(nnx.state(wide, nnx.Param), "mxfp8")
    nnx.update(stored, params)
    nnx.update(wide, jfp8.checkpoint.downgrade(params))
    compute = nnx.jit(jfp8.nnx.value_and_grad(loss_fn, micro_batches=4))
    (found, grads), (loss, expected) = (compute(model, BATCH) for model in (stored, wide))
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert relative_error(nnx.as_pure(grads), nnx.as_pure(expected)) < 1e-6
    assert_same(stored.first.kernel[...], params["first"]["kernel"][...])
    assert isinstance(stored.first.kernel[...], jfp8.ScaledArray)
