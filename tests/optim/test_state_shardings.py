"""Sharded optimizer states: where each leaf goes, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jfp8
from jfp8.optim.adam import PRESETS, adam, adamw
from jfp8.optim.block_storage import Blocks
from jfp8.optim.state_shardings import state_shardings
from jfp8.optim.storage import Float
from jfp8.optim.stored_state import store_state

P = PartitionSpec
SHAPES = {"in": (64, 512), "out": {"kernel": (256, 192), "bias": (256,)}}
SPECS = {"in": P("data", "model"), "out": {"kernel": P("model", "data"), "bias": P("model")}}


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"))


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(normal, SHAPES, is_leaf=lambda s: isinstance(s, tuple))


def shardings_on(mesh):
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda s: isinstance(s, P)
    )


def specs_of(tree):
    return jax.tree.map(lambda s: tuple(s.spec), tree)


def test_leaves_are_sharded_like_their_parameters(mesh):
    found = specs_of(state_shardings(adam(1e-3), parameters(), shardings_on(mesh)))
    assert found.count == ()
    moments, *_ = found.inner_state
    assert moments.count == ()
    for kept in (moments.mu["in"].data, moments.mu["in"].amax, moments.nu["in"].amax):
        assert kept == ("data", "model")  # 4 blocks for 2 devices
    assert moments.nu["out"]["kernel"].data == ("model", "data")
    assert moments.nu["out"]["kernel"].power == ("model", None)  # 2 blocks for 4 devices
    assert moments.mu["out"]["bias"] == ("model",)


def test_one_scale_for_an_array_is_everywhere(mesh):
    found = specs_of(
        state_shardings(adam(1e-3, preset="msamp_o2"), parameters(), shardings_on(mesh))
    )
    moments, *_ = found.inner_state
    assert moments.mu["in"].data == moments.nu["in"].data == ("data", "model")
    assert moments.mu["in"].scale == moments.nu["in"].scale == ()


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_sharded_and_whole_runs_agree_bit_for_bit(mesh_of, preset):
    """Stochastic rounding too: its bits go by the index in the whole array."""
    mesh = mesh_of((4, 2), ("data", "model"))
    tx = adamw(1e-2, preset=preset)
    shardings = shardings_on(mesh)
    of_state = state_shardings(tx, parameters(), shardings)

    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    whole = parameters(), jax.jit(tx.init)(parameters())
    parts = (
        jax.device_put(parameters(), shardings),
        jax.jit(tx.init, out_shardings=of_state)(parameters()),
    )
    sharded_step = jax.jit(step, out_shardings=(shardings, of_state))
    for seed in (1, 2, 3):
        whole = step(*whole, parameters(seed))
        parts = sharded_step(*parts, jax.device_put(parameters(seed), shardings))
    assert parts[1].inner_state[0].mu["in"].data.sharding.spec == P("data", "model")
    assert parts[1].inner_state[0].mu["in"].data.addressable_shards[0].data.shape == (16, 256)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for before, after in zip(*map(jax.tree.leaves, (parameters(), parts[0])), strict=True):
        assert np.any(before != after)


@pytest.mark.parametrize("storage", [Blocks(), Float(jnp.bfloat16)], ids=["blocks", "bf16"])
def test_small_shards_of_large_moments_stay_stored(storage):
    """In shard_map, with less than min_size in a shard; the oracle is the update of the whole."""
    tx, mesh = store_state(optax.adam(1e-2), {"mu": storage}), jax.make_mesh((8,), ("data",))
    params = jnp.zeros((64, 128))
    gradients = jax.random.normal(jax.random.key(0), params.shape)
    state = jax.jit(tx.init)(params)
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), state)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    given = place(gradients, P("data")), jax.tree.map(place, state, specs)
    update = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P("data"), specs)
    )
    updates, after = jax.jit(update)(*given)
    expected, whole = jax.jit(tx.update)(gradients, state)
    assert jax.tree.structure(after) == jax.tree.structure(whole)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(whole)]
    np.testing.assert_array_equal(updates, expected)


@pytest.mark.slow
def test_a_step_on_shards_gathers_no_moments(mesh):
    """Blocks that lie within a shard need nobody else."""
    tx = adam(1e-2)
    params = {"in": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
    shardings = {"in": NamedSharding(mesh, P("data", "model"))}
    of_state = state_shardings(tx, params, shardings)
    state = jax.eval_shape(tx.init, params)
    placed = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, of_state
    )
    gradient = {"in": jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=shardings["in"])}
    update = jax.jit(tx.update, out_shardings=(shardings, of_state))
    text = update.lower(gradient, placed).compile().as_text()
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert f" {name}(" not in text
        assert f" {name}-start(" not in text


def test_the_last_and_longest_path_counts(mesh):
    """A parameter may be called like a label, or like a part of another one's path."""
    params = {"a": jnp.zeros((8, 8)), "b": {"a": jnp.zeros((8, 8))}}
    shardings = {
        "a": NamedSharding(mesh, P("data")),
        "b": {"a": NamedSharding(mesh, P(None, "model"))},
    }
    tx = optax.multi_transform({"a": optax.adam(1.0)}, {"a": "a", "b": {"a": "a"}})
    moments = specs_of(state_shardings(tx, params, shardings)).inner_states["a"].inner_state[0]
    assert moments.mu["a"] == ("data", None)
    assert moments.mu["b"]["a"] == (None, "model")
    assert moments.count == ()


def test_other_shapes_and_a_single_array(mesh):
    sharding = NamedSharding(mesh, P("data", "model"))
    found = state_shardings(optax.adafactor(1e-3), jnp.zeros((256, 256)), sharding)
    by_shape = {}
    state = optax.adafactor(1e-3).init(jnp.zeros((256, 256)))
    for leaf, s in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        by_shape.setdefault(leaf.shape, set()).add(tuple(s.spec))
    assert by_shape[(256,)] == {()}
    tx = store_state(optax.lion(1e-3), {"mu": Blocks()})
    kept = state_shardings(tx, jax.ShapeDtypeStruct((256, 300), jnp.float32), sharding)
    assert tuple(kept.inner_state[0].mu.data.spec) == ("data", "model")
    assert tuple(kept.inner_state[0].mu.scale.spec) == ("data", None)  # 3 blocks


def test_memory_kind_is_kept(mesh):
    kind = "unpinned_host"
    sharding = NamedSharding(mesh, P("data"), memory_kind=kind)
    found = state_shardings(optax.adam(1e-3), {"w": jnp.zeros((8, 8))}, sharding)
    assert found[0].mu["w"].memory_kind == kind


def test_mistakes_are_told(mesh):
    one = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(TypeError, match=r"params\['w'\].*only a NamedSharding names the mesh axis"):
        state_shardings(optax.adam(1e-3), {"w": jnp.zeros((8, 8))}, {"w": one})
    with pytest.raises(ValueError, match="key"):
        state_shardings(optax.adam(1e-3), {"w": jnp.zeros((8, 8))}, {"v": NamedSharding(mesh, P())})
    with pytest.raises(TypeError, match="state_shardings wraps an optax transformation"):
        state_shardings(None, {}, {})


def kernels_of(recipe):
    plain = {"in": {"kernel": parameters()["in"]}, "out": parameters()["out"]}
    return jfp8.quantize_params(plain, recipe), {"in": {"kernel": SPECS["in"]}, "out": SPECS["out"]}


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block", "mxfp8", "nvfp4", "nvfp4_row"])
def test_arrays_in_fp8_are_placed_by_the_specs_of_plain_ones(mesh, recipe):
    """Codes are divided as told, scales where the axis divides them, and no bit changes."""
    quantized, specs = kernels_of(recipe)
    placed = jax.device_put(quantized, jfp8.shardings(quantized, mesh, specs))
    for name, (rows, columns) in {"in": ("data", "model"), "out": ("model", "data")}.items():
        q = placed[name]["kernel"]
        assert q.data.sharding.spec == P(rows, columns)
        scale = q.scale.data if jfp8.is_scaled_array(q.scale) else q.scale
        wanted = [
            axis if n % mesh.shape[axis] == 0 else None
            for n, axis in zip(scale.shape, (rows, columns)[: scale.ndim], strict=True)
        ]
        assert scale.sharding.spec == P(*wanted)
    assert placed["out"]["bias"].sharding.spec == P("model")
    for a, b in zip(*map(jax.tree.leaves, (quantized, placed)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "fp8"])
def test_a_whole_state_is_placed_by_the_specs_of_its_parameters(mesh, quantize):
    model = jfp8.Dense(512)
    variables = model.init(jax.random.key(0), jnp.ones((1, 64)))
    tx = jfp8.optim.adamw(1e-3)
    if quantize:
        variables["params"] = jfp8.quantize_params(variables["params"])
        tx = jfp8.optim.master_weights(tx, "bfloat16")
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)
    specs = {"kernel": P("data", "model"), "bias": None}
    placed = jax.device_put(state, jfp8.shardings(state, mesh, specs))
    split = [leaf for leaf in jax.tree.leaves(placed) if "data" in leaf.sharding.spec]
    # The kernel, codes and two arrays of scales for each moment, the master.
    assert len(split) == 1 + 2 * 3 + quantize
    assert all(leaf.addressable_shards[0].data.shape[0] == 16 for leaf in split)
    whole = jax.tree.leaves((placed.collections, placed.params["bias"]))
    assert whole
    assert all(leaf.sharding.is_fully_replicated for leaf in whole)


def test_variables_of_nnx_and_one_spec_for_all(mesh):
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    params = jfp8.quantize_params(nnx.state(model, nnx.Param), "block")
    of_state = jax.tree.map(lambda p: P(None, "model") if p.ndim == 2 else P(), nnx.state(model))
    for specs in (of_state, {"kernel": P(None, "model"), "bias": P()}):
        found = jfp8.shardings(params, mesh, specs)
        kernel = jax.device_put(params, found)["kernel"].get_value()
        assert kernel.data.sharding.spec == kernel.scale.sharding.spec == P(None, "model")
    same = jfp8.shardings(params, mesh, P("data"))["kernel"].get_value()
    assert same.data.spec == P("data", None)


def test_wrong_specs_are_told(mesh):
    quantized, specs = kernels_of("delayed")
    with pytest.raises(ValueError, match=r"nothing in the tree belongs: \['typo'\]"):
        jfp8.shardings(quantized, mesh, {**specs, "typo": P()})
    with pytest.raises(TypeError, match=r"specs\['in'\]\['kernel'\] is 'data'"):
        jfp8.shardings(quantized, mesh, {**specs, "in": {"kernel": "data"}})
