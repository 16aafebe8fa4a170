"""Data parallelism under jit, against the same step on one device, and against `jax.lax.pmean`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import collectives
from jfp8.scaling.sink import decode_amax, encode_amax
from jfp8.training.data_parallel import _max_of_sinks, data_parallel
from jfp8.training.end_of_step import rescale_grad_histories
from support.arrays import decibels
from support.compiled import collective_bytes

N = 8
MESH = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
MESH_2D = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
in_fp8 = functools.partial(collectives.pmean, min_size=0)
in_f32 = lax.pmean


class Model(nn.Module):
    """Two layers, whose batch statistics are a collection of their own."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (64,))
        count = self.variable("batch_stats", "count", jnp.zeros, (), jnp.int32)
        y = nn.relu(jfp8.Dense(64)(x))
        mean.value, count.value = jnp.mean(y, axis=0), count.value + 1
        return jfp8.Dense(32)(y)


def make_batch(size: int = 64, seed: int = 0):
    rng = np.random.default_rng(seed)
    # Rows of different size, so that devices have different amaxes.
    x = rng.normal(size=(size, 128)) * np.linspace(0.2, 2, size)[:, None]
    return {"x": x.astype(np.float32), "y": rng.normal(size=(size, 32)).astype(np.float32)}


def loss_fn(variables, batch):
    y, mutated = Model().apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((y - batch["y"]) ** 2), mutated


@functools.cache
def on_one_device(micro_batches=1):
    return jax.jit(gradients(micro_batches))


@functools.cache
def trained():
    """A state whose histories have entries, as one device leaves them."""
    variables = jax.jit(Model().init)(jax.random.key(0), make_batch()["x"])
    tx = jfp8.loss_scale(optax.adam(1e-3), init_scale=2.0**10)
    state = jfp8.TrainState.create(apply_fn=Model().apply, variables=variables, tx=tx)
    for seed in range(2):
        _, grads = on_one_device()(state, make_batch(seed=seed))
        state = applied(state, grads)
    return state


@jax.jit
def applied(state, grads):
    return state.apply_gradients(grads)


@functools.cache
def gradients(micro_batches=1):
    return jfp8.value_and_grad(loss_fn, micro_batches=micro_batches)


def placed(tree, mesh, spec):
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, spec if jnp.ndim(x) else P())), tree
    )


@functools.cache
def parallel(grad_fn, mesh=MESH, mean=in_fp8):
    return jax.jit(data_parallel(grad_fn, "data", mesh=mesh, mean=mean))


def assert_close(actual, desired, rtol=1e-5):
    """To the order of sums: relative to the largest element of each array."""

    def check(path, a, d):
        a, d = np.asarray(a, np.float64), np.asarray(d, np.float64)
        error = np.abs(a - d).max(initial=0.0)
        assert error <= rtol * np.abs(d).max(initial=0.0), (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, actual, desired)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loss_gradients_and_histories_are_those_of_one_device(micro_batches, mesh_of):
    """Gradients of a device's mean are N times those of the mean; their histories are not."""
    state, single = trained(), on_one_device(micro_batches)
    batch, mesh = make_batch(seed=7), mesh_of((N,), ("data",))
    loss, grads_of_one = single(state, batch)
    expected = applied(state, grads_of_one).fp8
    compute = parallel(gradients(micro_batches), mesh, mean=in_f32)
    loss_of_all, grads = compute(state, placed(batch, mesh, P("data")))
    np.testing.assert_allclose(loss_of_all, loss, rtol=1e-6)
    assert_close(grads.params, grads_of_one.params)
    histories = applied(state, grads).fp8
    assert_close(histories, expected, rtol=1e-6)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), histories, state.fp8)
    assert all(moved["Dense_0"]["DotGeneral_0"][role]["amax_history"] for role in ("lhs", "grad"))


@pytest.mark.slow
def test_only_bytes_are_sent():
    state = trained()
    batch = placed(make_batch(), MESH, P("data"))
    in_bytes = parallel(gradients()).lower(state, batch).compile()
    in_floats = parallel(gradients(), mean=in_f32).lower(state, batch).compile()
    sent = collective_bytes(in_bytes).collectives
    assert {c.dtype for c in sent if c.bytes > 700} == {"u8"}
    records = 128 * 64 // 128 + 64 * 32 // 128 + 1  # the bias of 32 goes in f32
    records += -records % N
    assert collective_bytes(in_bytes).by_dtype()["u8"] == 2 * 7 / 8 * records * 132
    assert collective_bytes(in_floats).total > 3.4 * collective_bytes(in_bytes).total


@pytest.mark.slow
def test_overflow_on_one_device_skips_the_step_on_all():
    state = trained()
    batch = make_batch(seed=7)
    batch["x"][11, 5] = np.inf
    _, grads = parallel(gradients())(state, placed(batch, MESH, P("data")))
    after = applied(state, grads)
    # Only the histories of gradients follow the loss scale.
    fp8 = rescale_grad_histories(state.fp8, jnp.float32(0.5))
    expected = (state.params, fp8, state.collections)
    kept = (after.params, after.fp8, after.collections)
    jax.tree.map(np.testing.assert_array_equal, kept, expected)
    assert after.opt_state.loss_scale == state.opt_state.loss_scale / 2
    assert after.step == state.step + 1
    batch["x"][11, 5] = 0.0
    _, grads = parallel(gradients())(state, batch)
    assert applied(state, grads).opt_state.loss_scale == state.opt_state.loss_scale


def test_trap_an_overflow_that_only_a_sink_saw_reaches_all():
    """Casts saturate; the bin of NaN in the sink of one device is all that tells."""
    rng = np.random.default_rng(0)
    amax = rng.uniform(0.1, 10, (N, 2, 3)).astype(np.float32)
    sinks = {"a": encode_amax(jnp.asarray(amax)), "b": {"c": jnp.zeros((N, 3, 2050))}}
    sinks["a"] = sinks["a"].at[3, 0, 1].set(encode_amax(jnp.float32(np.inf)))

    @jax.jit
    @functools.partial(jax.vmap, axis_name="d")
    def merge(sinks):
        merged = _max_of_sinks(sinks, "d", N)
        return merged, *decode_amax(merged["a"])

    merged, found, overflow = merge(sinks)
    amax[3, 0, 1] = 0
    expected = amax.max(0) / np.float32([1, 1, N])
    ratio = np.asarray(found) / expected
    np.testing.assert_allclose(ratio.reshape(N, 6)[:, [0, 2, 3, 4, 5]], 1, rtol=1e-6)
    assert ((ratio >= 1 - 1e-6) & (ratio <= 9 / 8)).all()  # beside an Inf, a bound
    np.testing.assert_array_equal(overflow, np.tile([[False, True, False], [False] * 3], (N, 1, 1)))
    assert not merged["b"]["c"].any()  # took no part


@pytest.mark.parametrize(
    ("aux", "words"),
    [
        (lambda x: x, r"shape \(8, 128\), which looks like one entry for each of the \[8\]"),
        (lambda x: x.reshape(2, 4, 128), r"all_gather\(x, 'data', tiled=True\)"),
        (lambda x: {"n": (x > 0).sum()}, r"\['n'\] is int32(.|\n)*jax.lax.psum\(x, 'data'\)"),
        (lambda x: x[:, 0] > 0, "is bool, and a mean is not"),
    ],
    ids=["examples", "micro-batches", "count", "mask"],
)
def test_trap_an_aux_that_no_mean_is(aux, words):
    """Predictions of 64 examples came back as 8 blends of 8; counts as fractions."""
    loss = lambda params, batch: (jnp.mean(batch["x"] @ params), aux(batch["x"]))
    grad_fn = jfp8.data_parallel(jax.value_and_grad(loss, has_aux=True), "data", mesh=MESH)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(grad_fn, jnp.ones((128, 32)), make_batch())


def test_aux_is_averaged_and_what_every_device_has_alike_stays():
    def loss(params, batch):
        x = batch["x"]
        count = jax.lax.psum((x > 0).sum(), "data").astype(jnp.float32)
        rows = jax.lax.all_gather(x, "data", tiled=True)
        return jnp.mean(x @ params), (count, rows, len(x), jnp.max(x))

    grad_fn = jfp8.data_parallel(jax.value_and_grad(loss, has_aux=True), "data", mesh=MESH)
    batch = make_batch()
    (_, (count, x, rows, largest)), _ = jax.jit(grad_fn)(jnp.ones((128, 32)), batch)
    assert (count, rows) == ((batch["x"] > 0).sum(), 8)
    np.testing.assert_allclose(largest, batch["x"].reshape(N, -1).max(1).mean(), rtol=1e-6)
    np.testing.assert_allclose(x, batch["x"], rtol=1e-6)  # eight, divided by 8


def test_trap_states_inside_of_something_are_states():
    """Their histories of gradients were read in units of the whole batch: norms 0.41 to 0.71."""
    state, batch = trained(), make_batch(seed=3)
    grad_fn = gradients()
    _, expected = parallel(grad_fn, mean=in_f32)(state, batch)

    def inside(carry, batch):
        loss, grads = grad_fn(carry["states"][0], batch)
        return loss, {"of": grads, "norm": jnp.float32(1)}

    carry = {"states": (state, state), "key": jax.random.key(0)}
    _, actual = parallel(inside, mean=in_f32)(carry, batch)
    assert actual["norm"] == 1
    jax.tree.map(np.testing.assert_array_equal, actual["of"], expected)


@pytest.mark.slow
def test_other_axes_stay_automatic():
    """Tensor parallelism by XLA; every device sends its shards, and nothing else."""
    state, single = trained(), on_one_device()
    batch = make_batch(seed=7)
    loss, grads = single(state, batch)

    specs = jax.tree.map(lambda p: P(None, "model") if p.ndim == 2 else P("model"), state.params)
    shardings = jax.tree.map(lambda s: NamedSharding(MESH_2D, s), specs)
    state = placed(state, MESH_2D, P())
    state = state.replace(params=jax.device_put(state.params, shardings))
    compute = jax.jit(data_parallel(gradients(), "data", mesh=MESH_2D, specs=specs, mean=in_fp8))
    batch = placed(batch, MESH_2D, P("data"))
    loss_8, grads_8 = compute(state, batch)
    np.testing.assert_allclose(loss_8, loss, rtol=1e-6)
    for exact, mean in zip(
        jax.tree.leaves(grads.params), jax.tree.leaves(grads_8.params), strict=True
    ):
        assert decibels(exact, mean) >= 28
    assert_close(applied(state, grads_8).fp8, applied(state, grads).fp8, rtol=1e-6)
    found = collective_bytes(compute.lower(state, batch).compile())
    records = [c for c in found.collectives if c.dtype == "u8" and c.devices == 4]
    assert {c.op for c in records} == {"all-to-all", "all-gather"}
    count = (128 * 64 + 64 * 32) // 2 // 128
    assert sum(c.bytes for c in records) == 2 * 3 / 4 * count * 132


def test_specs_may_name_the_batch_axis(mesh_of):
    """Parameters that are stored in parts along the batch axis are whole in `grad_fn`."""
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    mesh, specs = mesh_of((4, 2), ("data", "model")), P("data", "model")
    w, x = jnp.ones((128, 64)), placed(make_batch()["x"], mesh, P("data"))
    w = jax.device_put(w, NamedSharding(mesh, specs))
    compute = jax.jit(
        data_parallel(jax.value_and_grad(loss), "data", mesh=mesh, specs=specs, mean=in_fp8)
    )
    _, grads = compute(w, x)
    assert decibels(jax.grad(loss)(jnp.ones((128, 64)), make_batch()["x"]), grads) >= 28


@pytest.mark.slow
def test_several_batch_axes_and_the_mesh_in_force():
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    w, x = jnp.ones((128, 64)), make_batch()["x"]
    compute = jax.jit(data_parallel(jax.value_and_grad(loss), ("data", "model"), mean=in_fp8))
    with jax.set_mesh(MESH_2D):
        value, grads = compute(w, x)
        devices = {c.devices for c in collective_bytes(compute.lower(w, x).compile()).collectives}
    np.testing.assert_allclose(value, loss(w, x), rtol=1e-6)
    assert decibels(jax.grad(loss)(w, x), grads) >= 28
    assert devices == {8}


@pytest.mark.parametrize(
    ("axis", "mesh", "given", "words"),
    [
        ("data", None, (1.0, 64), r"axes \('data',\), but the mesh has \(\), not.*jax.set_mesh"),
        ("batch", MESH, (1.0, 64), r"but the mesh has \('data',\), not \['batch'\]"),
        ("data", MESH, (1.0, 12), "splits a batch of 12, which is no multiple of 8"),
        ("data", MESH, (None, 64), "but got a tree with a Linear. Pass the model itself"),
    ],
    ids=["no mesh", "another axis", "batch", "tree"],
)
def test_errors_teach(axis, mesh, given, words):
    grad_fn = jax.value_and_grad(lambda w, batch: w * jnp.mean(batch["x"]))
    first, size = given
    first = {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))} if first is None else first
    with pytest.raises((TypeError, ValueError), match=words):
        data_parallel(grad_fn, axis, mesh=mesh)(first, make_batch(size))


def test_a_batch_that_explicit_axes_do_not_divide_is_told_how():
    """JAX spoke of in_specs, and of arguments by number."""
    loss = lambda w, batch: jnp.mean((batch["x"] * batch["scale"] * w) ** 2)
    batch, w = {"x": jnp.arange(8.0), "scale": 2.0}, jnp.float32(3)
    for names, sizes in (("data", (N,)), (("data", "fsdp"), (2, 4))):
        axes = names if isinstance(names, tuple) else (names,)
        mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Explicit,) * len(axes))
        grad_fn = jfp8.data_parallel(jax.value_and_grad(loss), names, mesh=mesh)
        with pytest.raises(ValueError, match=r"was given float32\[8\]. Place the batch") as error:
            grad_fn(w, batch)
        assert f"jax.NamedSharding(mesh, jax.P({names!r}))" in str(error.value)
        placed = {**batch, "x": jax.device_put(batch["x"], NamedSharding(mesh, P(names)))}
        expected = jax.value_and_grad(loss)(w, batch)
        np.testing.assert_allclose(jax.jit(grad_fn)(w, placed), expected, 1e-6)


def test_the_gradient_of_every_device_counts():
    """A linear loss: the gradient of the mean is the mean of the inputs. No product is in FP8."""

    def grad_fn(state, batch):
        loss = lambda variables, x: (jnp.mean(x @ variables["params"]["w"]), {})
        return jfp8.value_and_grad(loss)(state, batch)

    variables = {"params": {"w": jnp.ones(4)}}
    state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=optax.sgd(0.1))
    x = np.arange(4.0 * N, dtype=np.float32).reshape(N, 4)
    loss, grads = jax.jit(data_parallel(grad_fn, "data", mesh=MESH, mean=in_f32))(state, x)
    np.testing.assert_array_equal(grads.params["w"], x.mean(axis=0))
    assert loss == x.sum(axis=1).mean()
