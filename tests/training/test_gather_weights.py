"""Weights gathered as bytes: the same numbers as without, a quarter of the traffic of float32."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import recipes
from jfp8.training.gather_weights import gather_weights
from support.arrays import keyed_normal as normal
from support.arrays import relative_error

CURRENT = recipes.get("current")
MATRICES = (((1,), (0,)), ((), ()))
SAVED_ONLY = jax.checkpoint_policies.save_only_these_names("fp8_saved")
N = 8


def mesh_of(kind: AxisType, shape=(N,), names=("fsdp",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def product(x, w, recipe=CURRENT):
    return jfp8.scaled_dot_general(x, w, MATRICES, recipe=recipe)


def loss_of(params, x, recipe=CURRENT):
    h = jnp.tanh(product(x, params["wi"]["kernel"], recipe) + params["wi"]["bias"][None])
    return jnp.mean(product(h, params["wo"]["kernel"], recipe) ** 2)


def make_params(dtype=jnp.float32):
    return {
        "wi": {"kernel": normal(1, (64, 128), dtype), "bias": normal(2, (128,), dtype)},
        "wo": {"kernel": normal(3, (128, 32), dtype)},
    }


SPECS = {"wi": {"kernel": P("fsdp", None), "bias": P("fsdp")}, "wo": {"kernel": P(None, "fsdp")}}


def gathers(compiled) -> list[tuple[str, int]]:
    """(dtype, elements) of each all-gather of a compiled program."""
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    return [(dtype, math.prod(map(int, dims.split(",")))) for dtype, dims in found]


def in_shard_map(check_vma, params, x, **options):
    """Loss and gradient of the mean over devices that all have the same rows of x."""

    def step(params, x):
        def mean_loss(params, x):
            return loss_of(gather_weights(params, "fsdp", SPECS, **options), x) / N

        loss, grads = jax.value_and_grad(mean_loss)(params, x)
        return lax.psum(loss, "fsdp"), grads

    mesh = mesh_of(AxisType.Auto)
    # The loss of every device adds to the gradient of every part; x is the same everywhere, but
    # must not be known to be, or JAX would count it once.
    return jax.jit(
        jax.shard_map(
            lambda params, x: step(params, x[0]),
            mesh=mesh,
            in_specs=(SPECS, P("fsdp")),
            out_specs=(P(), SPECS),
            check_vma=check_vma,
        )
    ), (params, jnp.stack([x] * N))


def under_jit(kind, params, x, **options):
    mesh = mesh_of(kind)
    specs = None if kind == AxisType.Explicit else SPECS
    spread = functools.partial(jax.tree.map, lambda s: NamedSharding(mesh, s))
    params = jax.device_put(params, spread(SPECS, is_leaf=lambda s: isinstance(s, P)))
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp")))

    def loss(params, x):
        return loss_of(gather_weights(params, "fsdp", specs, **options), x)

    return jax.jit(jax.value_and_grad(loss)), (params, x)


WAYS = {
    "shard_map": (AxisType.Auto, functools.partial(in_shard_map, True)),
    "shard_map, check_vma=False": (AxisType.Auto, functools.partial(in_shard_map, False)),
    "constraints": (AxisType.Auto, functools.partial(under_jit, AxisType.Auto)),
    "explicit axes": (AxisType.Explicit, functools.partial(under_jit, AxisType.Explicit)),
}
each_way = pytest.mark.parametrize("way", WAYS)


def run(way, *args, compiled=False, **options):
    kind, make = WAYS[way]
    with jax.set_mesh(mesh_of(kind)):
        function, operands = make(*args, **options)
        program = function.lower(*operands).compile()
        results = jax.device_get(program(*operands))
    return (*results, program) if compiled else results


@pytest.mark.representative(1)
@each_way
def test_the_same_loss_to_the_bit_and_one_byte_for_each_element(way):
    params, x = make_params(), normal(0, (16, 64))
    single = jax.jit(jax.value_and_grad(loss_of))(params, x)
    without = run(way, params, x, recipe=CURRENT, exempt="*")
    loss, grads, program = run(way, params, x, recipe=CURRENT, compiled=True)
    assert loss == without[0]
    for ours, theirs in zip(*map(jax.tree.leaves, (grads, without[1])), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # The order of sums moves a few gradients across the border of two f8 values.
    assert abs(loss - single[0]) < 1e-6 * single[0]
    for ours, theirs in zip(*map(jax.tree.leaves, (grads, single[1])), strict=True):
        assert relative_error(ours, theirs) < 1e-3
    kernels = {n for d, n in gathers(program) if d == "u8"}
    assert kernels == {64 * 128, 128 * 32}
    others = [n for d, n in gathers(program) if d != "u8"]
    assert sum(others) <= 128  # the bias


def test_the_parts_of_the_gradient_are_those_of_the_whole():
    """A plain product of the gathered values has a gradient without rounding to compare with."""
    w, x = normal(1, (64, 128)), normal(0, (N, 4, 64))
    specs = {"kernel": P("fsdp", None)}

    def loss(params, x):
        whole = gather_weights(params, "fsdp", specs, recipe=CURRENT)["kernel"]
        return jnp.sum(jnp.sin(x @ whole.dequantize()))

    f = jax.shard_map(
        lambda p, x: jax.grad(loss)(p, x[0]),
        mesh=mesh_of(AxisType.Auto), in_specs=(specs, P("fsdp")), out_specs=specs,
    )  # fmt: skip
    values = jfp8.quantize(w).dequantize()
    x64 = np.asarray(x, np.float64)
    expected = np.einsum("nmk,nmj->kj", x64, np.cos(x64 @ np.asarray(values, np.float64)))
    assert relative_error(jax.jit(f)({"kernel": w}, x)["kernel"], expected) < 3e-6  # f32


@pytest.mark.slow
@pytest.mark.parametrize("gradients_as", [jnp.bfloat16, jfp8.E5M2, jfp8.E4M3FN])
def test_gradients_in_fewer_bits(gradients_as):
    params, x = make_params(), normal(0, (16, 64))
    params["wi"]["kernel"] = normal(1, (64, 512))
    params["wi"]["bias"], params["wo"]["kernel"] = normal(2, (512,)), normal(3, (512, 32))
    _, exact = run("shard_map", params, x, recipe=CURRENT)
    _, grads, program = run(
        "shard_map", params, x, recipe=CURRENT, gradients_as=gradients_as, compiled=True
    )
    bound = {jnp.bfloat16: 2.0**-8, jfp8.E5M2: 2.0**-3, jfp8.E4M3FN: 2.0**-4}[gradients_as]
    for name in ("wi", "wo"):
        assert 0 < relative_error(grads[name]["kernel"], exact[name]["kernel"]) < bound
    if isinstance(gradients_as, jfp8.Format):
        in_f32 = re.findall(r"f32\[([\d,]*)\]\S* reduce-scatter\(", program.as_text())
        assert in_f32 == ["64"]  # the bias
        assert re.search(r"u8\[[\d,]*\]\S*.* all-to-all\(", program.as_text())


each_kind = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


@pytest.mark.slow
@each_kind
def test_once_forward_and_once_backward_in_a_scan_over_layers(kind):
    params = {"wi": {"kernel": normal(0, (3, 64, 128))}, "wo": {"kernel": normal(1, (3, 128, 64))}}
    x = normal(9, (16, 64))
    specs = {"wi": {"kernel": P("fsdp", None)}, "wo": {"kernel": P(None, "fsdp")}}

    def layer(x, params):
        given = None if kind == AxisType.Explicit else specs
        params = gather_weights(params, "fsdp", given, recipe=CURRENT)
        h = jnp.tanh(product(x, params["wi"]["kernel"]))
        return x + product(h, params["wo"]["kernel"]), None

    def loss(params, x):
        x, _ = lax.scan(jax.checkpoint(layer, policy=SAVED_ONLY, prevent_cse=False), x, params)
        return jnp.mean(x**2)

    in_stack = jax.tree.map(lambda s: P(None, *s), specs, is_leaf=lambda s: isinstance(s, P))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, jax.tree.map(
            lambda s: NamedSharding(mesh, s), in_stack, is_leaf=lambda s: isinstance(s, P)
        ))  # fmt: skip
        x = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        program = jax.jit(jax.grad(loss)).lower(params, x).compile()
    assert sorted(gathers(program)) == [("u8", 64 * 128)] * 4  # two weights in each of two loops


@pytest.mark.slow
@each_kind
def test_tensor_parallel_axes_stay(kind):
    mesh = mesh_of(kind, (4, 2), ("fsdp", "model"))
    spec = {"kernel": P("fsdp", "model")}
    w, x = normal(1, (64, 128)), normal(0, (16, 64))
    with jax.set_mesh(mesh):
        params = jax.device_put({"kernel": w}, {"kernel": NamedSharding(mesh, spec["kernel"])})
        x = jax.device_put(x, NamedSharding(mesh, P("fsdp", None)))
        f = jax.jit(lambda params, x: product(
            x, gather_weights(params, "fsdp", spec, recipe=CURRENT)["kernel"]
        ))  # fmt: skip
        program = f.lower(params, x).compile()
        y = jax.device_get(f(params, x))
    assert gathers(program) == [("u8", 64 * 128 // 2)]
    assert relative_error(y, product(normal(0, (16, 64)), w)) < 1e-6


@pytest.mark.representative(2)
@each_way
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nonfinite_weight_on_one_device_reaches_all(way, bad):
    """lax.pmax of floats drops NaN on CPUs; Inf must not become the largest finite value."""
    params, x = make_params(), normal(0, (16, 64))
    params["wi"]["kernel"] = params["wi"]["kernel"].at[40, 7].set(bad)
    loss, _ = run(way, params, x, recipe=CURRENT)
    assert not np.isfinite(loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "rowwise", "block", "mxfp8", "direct_e5m2", "hybrid"])
def test_recipes(name):
    """What is quantized a second time, in other blocks, moves by no more than a rounding."""
    recipe = recipes.get(name)
    params = {"kernel": normal(1, (1024, 128))}
    x, specs = normal(0, (16, 1024)), {"kernel": P("fsdp", None)}
    f = jax.shard_map(
        lambda p, x: product(x, gather_weights(p, "fsdp", specs, recipe=recipe)["kernel"], recipe),
        mesh=mesh_of(AxisType.Auto), in_specs=(specs, P()), out_specs=P(), check_vma=False,
    )  # fmt: skip
    ours, theirs = jax.jit(f)(params, x), product(x, params["kernel"], recipe)
    same = name in ("delayed", "hybrid", "direct_e5m2", "block", "mxfp8")
    assert relative_error(ours, theirs) <= (0 if same else 0.03)


@pytest.mark.slow
@each_kind
def test_weights_stored_in_fp8_travel_as_they_are(kind):
    w, x = normal(1, (64, 128)), normal(0, (16, 64))
    loss = lambda w, x: jnp.mean(product(x, w) ** 2)
    stored = dataclasses.replace(jfp8.quantize(w), carrier=jnp.zeros_like(w))
    expected = jax.grad(lambda c: loss(dataclasses.replace(stored, carrier=c), x))(stored.carrier)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, P("fsdp", None))
        data, carrier = jax.device_put((stored.data, stored.carrier), spread)

        def of_carrier(carrier, data, x):
            part = jfp8.ScaledArray(data, stored.scale, None, carrier)
            specs = {"kernel": P("fsdp", None)}
            whole = gather_weights({"kernel": part}, "fsdp", specs, recipe=CURRENT)["kernel"]
            return loss(whole, x)

        f = jax.jit(jax.grad(of_carrier))
        operands = carrier, data, jax.device_put(x, NamedSharding(mesh, P("fsdp", None)))
        program = f.lower(*operands).compile()
        grad = f(*operands)
        assert grad.sharding.spec == P("fsdp", None)
    assert gathers(program) == [("u8", 64 * 128)]
    assert relative_error(grad, expected) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("fsdp",), {}, "needs specs="),
        (("dp", SPECS), {}, "not an axis of the mesh.*jax.set_mesh"),
        (("fsdp", SPECS), {"recipe": recipes.get("nvfp4")}, "scales of scales.*mxfp8"),
        (("fsdp", SPECS), {"gradients_as": jfp8.E5M2}, "needs jax.shard_map.*bfloat16"),
        (("fsdp", SPECS), {"exempt": "head"}, "head"),
        (("fsdp", P("fsdp", "fsdp")), {}, "sharded over 'fsdp' along several"),
    ],
)
def test_errors(arguments, options, message):
    with jax.set_mesh(mesh_of(AxisType.Auto)), pytest.raises(ValueError, match=message):
        gather_weights(make_params(), *arguments, **options)


def test_one_spec_is_enough_for_the_parts_of_a_stored_weight():
    """Traced only: the bytes are gathered, and the values are those of the whole."""
    w = jnp.arange(8.0 * N).reshape(N, 8)
    stored = jfp8.quantize(w)

    def gathered(data):
        part = jfp8.ScaledArray(data, stored.scale)
        whole = gather_weights({"kernel": part}, "fsdp", {"kernel": P("fsdp")}, recipe=CURRENT)
        return whole["kernel"].data

    how = {"in_specs": P("fsdp"), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(gathered, mesh=mesh_of(AxisType.Auto), **how)
    whole = jax.jit(mapped)(stored.data)
    assert whole.dtype == stored.data.dtype
    np.testing.assert_array_equal(whole, stored.data)


@pytest.mark.parametrize("grid", ["rowwise", "nvfp4"])
@pytest.mark.representative(1)
def test_weights_that_will_be_deployed_keep_the_scales_of_the_whole(grid):
    """The parts of a row have other scales than the row, and no part knows the tensor's."""
    recipe = recipes.QuantizationAware(grid)
    make, arguments = WAYS["shard_map"][1], (make_params(), normal(4, (16, 64)))
    function, given = make(*arguments, recipe=recipe)
    gathered = re.findall(r"all_gather\[", str(jax.make_jaxpr(function)(*given)))
    assert len(gathered) == 3
    alone = jax.jit(loss_of)(*arguments)
    np.testing.assert_allclose(function(*given)[0], alone, rtol=1e-5)


def test_a_named_sharding_says_its_mesh():
    """No mesh is set, as in programs that place arrays alone."""
    sharding = NamedSharding(mesh_of(AxisType.Auto), P("fsdp", None))
    kernel = jax.device_put(normal(1, (64, 128)), sharding)
    gathered = lambda params: gather_weights(params, "fsdp", sharding, recipe=CURRENT)["kernel"]
    whole = jax.jit(gathered)({"kernel": kernel})
    np.testing.assert_array_equal(whole.dequantize(), jfp8.quantize(kernel).dequantize())
