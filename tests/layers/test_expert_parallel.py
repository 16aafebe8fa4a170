"""A mixture of experts divided over eight devices against the same one on one device."""

import contextlib
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.layers.linen.moe import MoE
from jfp8.products.ragged.exchange import plan_exchange
from jfp8.products.ragged.expert_mesh import ExpertMesh
from jfp8.products.ragged.expert_rows import ToExperts
from jfp8.training.hoist import split
from support.arrays import normal
from support.compiled import collective_bytes

EXPERTS, FEATURES = 8, 128
MESHES = {
    "fsdp, expert, tensor": {"fsdp": 2, "expert": 2, "tensor": 2},
    "data and expert": {"data": 2, "expert": 4},
    "expert": {"expert": 8},
    "sizes of 1": {"data": 1, "expert": 4, "tensor": 1},
}


@pytest.fixture
def mesh_with(mesh_of):
    return lambda sizes: mesh_of(tuple(sizes.values()), tuple(sizes))


def layouts(sizes, variables):
    """Of the variables, and of tokens."""
    fsdp, tensor = (axis if axis in sizes else None for axis in ("fsdp", "tensor"))
    of_kernel = {"wi": P("expert", fsdp, tensor), "wo": P("expert", tensor, fsdp)}

    def spec(path, leaf):
        layer = path[1].key
        return of_kernel[layer] if path[0].key == "params" and layer in of_kernel else P()

    specs = jax.tree_util.tree_map_with_path(spec, variables)
    return specs, P(tuple(axis for axis in sizes if axis != "tensor"))


def step(model, variables, x, dy):
    """The result; the gradients of parameters, sinks (the amaxes) and tokens."""
    trained = {name: variables[name] for name in ("params", "fp8_sink") if name in variables}
    y, back = jax.vjp(lambda v, x: model.apply({**variables, **v}, x), trained, x)
    return y, *back(dy)


@functools.cache
def made(recipe, hidden):
    model = MoE(EXPERTS, hidden, recipe=recipe, expert_axis="expert")
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, FEATURES)))
    return model, variables, jax.jit(functools.partial(step, model))


def assert_same(found, expected, tolerance):
    """Relative to the largest value of each array."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), jax.tree_util.keystr(path)


def compiled_on(mesh, recipe, hidden, tokens):
    """The step on a mesh, compiled, with its arguments."""
    model, variables, _ = made(recipe, hidden)
    specs, rows = layouts(mesh.shape, variables)
    rows = rows if tokens % 8 == 0 else P()
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    x, dy = (place(normal((tokens, FEATURES), seed), rows) for seed in (1, 2))
    args = (jax.tree.map(place, variables, specs), x, dy)
    with jax.set_mesh(mesh):
        return jax.jit(functools.partial(step, model)).lower(*args).compile(), args


# Sums over tokens are added up in another order. Tokens that came as bytes are quantized once more
# for the gradient of a matrix, with other tokens: by powers of two, so that only values far below
# the largest of their block are rounded again.
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("recipe", "hidden"),
    [("rowwise", 64), ("delayed", 64), ("current", 64), ("mxfp8", 64), ("block", 256)],
)
@pytest.mark.representative(1)
def test_many_devices_compute_what_one_does(recipe, hidden, mesh, mesh_with):
    variables, run = made(recipe, hidden)[1:]
    f, args = compiled_on(mesh_with(MESHES[mesh]), recipe, hidden, 64)
    sent = collective_bytes(f).collectives
    assert "u8" in {collective.dtype for collective in sent if collective.op == "all-to-all"}
    expected = run(variables, *args[1:])
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0
    assert_same(f(*args), expected, 1e-5)


@pytest.mark.slow
def test_fewer_tokens_than_devices(mesh_with):
    variables, run = made("current", 64)[1:]
    f, args = compiled_on(mesh_with(MESHES["expert"]), "current", 64, 3)
    assert_same(f(*args), run(variables, *args[1:]), 1e-5)


@pytest.mark.representative(1)
def test_gradients_of_the_layer_for_nnx(mesh_with):
    """Batch and sequence are sharded over other axes than tokens will be."""
    options = {"expert_axis": "expert", "shared_intermediate_dim": 16, "bias_update_rate": 0.0}
    model = jfp8.nnx.MoE(FEATURES, EXPERTS, 32, recipe="current", rngs=nnx.Rngs(0), **options)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    x = normal((4, 16, FEATURES), 1)

    def loss(params, rest, x):
        return jnp.sum(nnx.merge(graph, params, rest)(x) ** 2)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 2)))
    expected = gradients(params, rest, x)
    mesh = mesh_with(MESHES["data and expert"])
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data", "expert")))
        program = gradients.lower(params, rest, x)
        assert_same(program.compile()(params, rest, x), expected, 1e-5)
    assert "all_to_all" in program.as_text()


def exchanged(experts, count, n, capacity_factor=None):
    """On `n` devices: tiles of numbered tokens, what comes back, and the plan."""
    tokens = len(experts)
    devices = jax.make_mesh((n,), ("expert",), axis_types=(AxisType.Auto,))
    mesh = ExpertMesh(devices.abstract_mesh, "expert")

    def run(experts, numbers):
        plan = plan_exchange(experts, count, mesh, lambda rows, groups: 4, capacity_factor)

        def there_and_back(plan, numbers):
            tiles = plan.here.send(numbers)
            return tiles, plan.here.back(tiles)

        return *mesh.run(there_and_back, (mesh.rows, mesh.rows), mesh.rows)(plan, numbers), plan

    with jax.set_mesh(devices):
        return jax.jit(run)(jnp.asarray(experts, jnp.int32), jnp.arange(1, tokens + 1)[:, None])


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_copies_arrive_sorted_by_expert_and_return(capacity_factor):
    n, count, tokens, k = 4, 8, 16, 2
    experts = np.argsort(np.random.default_rng(0).random((tokens, count)) ** 4, axis=1)[:, :k]
    experts[5] = count  # a token without an expert
    tiles, back, plan = exchanged(experts, count, n, capacity_factor)
    tiles = np.asarray(tiles).reshape(n, -1, 4)
    capacity = tokens * k if capacity_factor is None else tokens * k // count
    expected_back = np.zeros((tokens, k), int)
    for expert in range(count):
        device, own = divmod(expert, count // n)
        rows, choices = np.nonzero(experts == expert)
        kept = rows[:capacity] + 1
        expected_back[rows[:capacity], choices[:capacity]] = kept
        found = tiles[device][np.asarray(plan.group)[device] == own].ravel()
        mine = int(np.asarray(plan.padded_sizes)[device, own])
        assert int(np.asarray(plan.sizes)[device, own]) == len(kept)
        assert found[:mine][found[:mine] > 0].tolist() == kept.tolist()
    assert np.asarray(back)[:, 0].reshape(tokens, k).tolist() == expected_back.tolist()

    # The chunks that GPUs exchange bring the same, as ``jax.lax.ragged_all_to_all`` is documented.
    order, places = np.asarray(plan.order), np.asarray(plan.places)
    copies = np.repeat(np.arange(1, tokens + 1), k).reshape(n, -1)
    by_expert = np.take_along_axis(copies, order, 1)
    arrived = ragged_all_to_all(by_expert, tiles[0].size, plan.chunks)
    assert arrived.tolist() == tiles.reshape(n, -1).tolist()
    returned = ragged_all_to_all(arrived, copies.shape[1], plan.chunks_back)
    returned = np.take_along_axis(returned, places, 1).reshape(tokens, k)
    assert returned.tolist() == expected_back.tolist()


def ragged_all_to_all(rows, length, chunks):
    """What each device has received, if all begin with zeros: [devices, length]."""
    starts, sizes, ends, arrive = map(np.asarray, chunks)
    n, slices = starts.shape[0], starts.shape[1] // starts.shape[0]
    result = np.zeros((n, length), rows.dtype)
    for sender in range(n):
        for i in range(n * slices):
            to, size = i // slices, sizes[sender, i]
            assert arrive[to, sender * slices + i % slices] == size
            sent = rows[sender, starts[sender, i] :][:size]
            result[to, ends[sender, i] :][:size] = sent
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "hidden"), [("delayed", 64), ("block", 256), ("mxfp8", 64)])
def test_tokens_travel_as_bytes(recipe, hidden, mesh_with):
    """Of the dispatch, forward and backward: at most 0.27 of the bytes of f32."""
    f, _ = compiled_on(mesh_with(MESHES["expert"]), recipe, hidden, 64)
    sent = {"u8": 0, "f32": 0}
    for collective in collective_bytes(f).collectives:
        if collective.op == "all-to-all":
            sent[collective.dtype] += collective.bytes
    # The same number of elements comes back in f32.
    assert 0.25 <= sent["u8"] / sent["f32"] <= 0.27


@pytest.mark.parametrize("mesh", ["fsdp, expert, tensor", "data and expert"])
@pytest.mark.representative(1)
def test_gradients_of_kernels_are_scattered(mesh, mesh_with):
    """As they are added up. Who wants all of one gathers it: no more than an all-reduce sends."""
    sizes = MESHES[mesh]
    model, variables, _ = made("delayed", 64)
    specs, rows = layouts(sizes, variables)
    devices = mesh_with(sizes)
    lie = lambda specs: jax.tree.map(functools.partial(NamedSharding, devices), specs)
    args = variables, *(jnp.zeros((64, FEATURES)),) * 2

    def gradients(variables, x, dy):
        return step(model, variables, x, dy)[1]["params"]

    with jax.set_mesh(devices):
        jitted = jax.jit(
            gradients,
            in_shardings=(lie(specs), *[NamedSharding(devices, rows)] * 2),
            out_shardings=lie(specs["params"]),
        )
        sent = collective_bytes(jitted.lower(*args).compile()).collectives
    kernels = {name: variables["params"][name]["kernel"].size for name in ("wi", "wo")}
    scattered = sorted(c.elements for c in sent if c.op == "reduce-scatter")
    assert scattered == sorted(size // 8 for size in kernels.values())
    # All other sums are the tokens' and the router's.
    added = [c.elements for c in sent if c.op == "all-reduce"]
    assert max(added) < sum(kernels.values()) * sizes.get("data", sizes.get("fsdp")) // 8


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_weights_are_quantized_once_for_all_micro_batches(recipe):
    """One byte for each element, or one for each of its two directions, is kept beside scales."""
    model, variables, _ = made(recipe, 64)
    variables = {name: tree for name, tree in variables.items() if name != "fp8_sink"}

    def gradient(params, x):
        loss = lambda p: jnp.sum(model.apply({**variables, "params": p}, x) ** 2)
        return jax.grad(loss)(params)

    x = jax.ShapeDtypeStruct((64, FEATURES), jnp.float32)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        kept = jax.eval_shape(lambda p, x: split(gradient, p, x)[0], variables["params"], x)
    directions = {"delayed": 1, "mxfp8": 2}[recipe]
    weights = sum(variables["params"][name]["kernel"].size for name in ("wi", "wo"))
    in_bytes = sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.uint8)
    assert in_bytes == directions * weights


def test_columns_are_sorted_with_their_scales():
    q = jfp8.quantize(normal((1, 4, 8), 0), granularity=jfp8.Block((1, 1, 2)))
    exchange = SimpleNamespace(mesh=SimpleNamespace(tensor=2))
    rows = ToExperts(exchange, divided=True, projections=2)
    expected = np.asarray(q.dequantize())[..., [0, 1, 4, 5, 2, 3, 6, 7]]
    np.testing.assert_array_equal(rows.sort_columns(q), expected)


def test_errors():
    x, model = jnp.ones((8, FEATURES)), MoE(EXPERTS, 16, expert_axis="expert")
    with (
        jax.set_mesh(jax.make_mesh((8,), ("data",))),
        pytest.raises(ValueError, match=r"'expert' is not an axis of the mesh .* \('data',\)"),
    ):
        jax.eval_shape(model.init, jax.random.key(0), x)
    with (
        jax.set_mesh(jax.make_mesh((8,), ("expert",))),
        pytest.raises(ValueError, match="12 experts cannot be divided evenly among the 8"),
    ):
        jax.eval_shape(model.clone(num_experts=12).init, jax.random.key(0), x)


@pytest.mark.parametrize(
    ("factor", "axes"), [(0.5, None), (0.5, AxisType.Explicit), (8.0, AxisType.Auto)]
)
def test_the_share_that_a_capacity_drops_is_sown(factor, axes):
    """The oracle counts choices in NumPy: each part of the data has a capacity of its own."""
    # Not divided evenly: the rows that are added choose no expert.
    x = jax.random.normal(jax.random.key(5), (61, FEATURES))
    options = {"recipe": "current", "expert_axis": "expert", "capacity_factor": factor}
    module = jfp8.nnx.MoE(FEATURES, EXPERTS, 16, rngs=nnx.Rngs(0), **options)
    linen = MoE(EXPERTS, 16, **options)
    kernels = {n: {"kernel": getattr(module, n).kernel[...]} for n in ("router", "wi", "wo")}
    parts, whole = (2, 64) if axes else (1, 61)
    logits = x @ np.asarray(kernels["router"]["kernel"], np.float64)
    chosen = np.argsort(-logits, axis=1)[:, :2]
    capacity = max(1, int(np.ceil(factor * whole // parts * 2 / EXPERTS)))
    rows = np.array_split(np.concatenate([chosen, np.full((whole - 61, 2), -1)]), parts)
    counts = [np.bincount(each[each >= 0], minlength=EXPERTS) for each in rows]
    dropped = sum(np.maximum(each - capacity, 0).sum() for each in counts) / chosen.size

    mesh = axes and jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axes,) * 2)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        # Only a call outside of jit can know how many.
        apply = functools.partial(linen.apply, mutable="intermediates")
        apply = jax.jit(apply) if mesh else apply
        with contextlib.nullcontext() if mesh else pytest.warns(UserWarning, match="drops"):
            _, sown = apply({"params": kernels}, x)
        _, captured = nnx.jit(nnx.capture(nnx.Intermediate)(lambda model, x: model(x)))(module, x)
    assert (dropped > 0.3) == (factor < 1)
    for found in (sown["intermediates"], nnx.to_pure_dict(captured)):
        np.testing.assert_allclose(found["dropped"][0], dropped, atol=1e-6)
