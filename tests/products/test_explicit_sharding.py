"""Meshes with explicit axes: products forward and backward, laid out as JAX lays out its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8 import recipes
from support.arrays import keyed_normal as normal

MATRICES = (((1,), (0,)), ((), ()))


def explicit():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    return jax.set_mesh(mesh)


def spread(x, spec):
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mxfp8", "direct_e5m2"])
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "y_spec"),
    [
        (P("data", None), P(None, None), P("data", None)),
        (P("data", None), P(None, "model"), P("data", "model")),
        (P("data", "model"), P("model", None), P("data", None)),
    ],
    ids=["data", "columns", "rows"],
)
def test_products_of_every_layout(name, x_spec, w_spec, y_spec):
    """The same bytes are multiplied, so only the order of f32 sums differs."""
    recipe = recipes.get(name)
    x, w = normal(0, (32, 64)), normal(1, (64, 128))

    def loss(x, w, out_sharding=None):
        y = jfp8.scaled_dot_general(x, w, MATRICES, recipe=recipe, out_sharding=out_sharding)
        return jnp.sum(y * y), y

    (dx_1, dw_1), y_1 = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    gradient = jax.jit(jax.grad(lambda x, w: loss(x, w, y_spec), argnums=(0, 1), has_aux=True))
    with explicit():
        (dx, dw), y = gradient(spread(x, x_spec), spread(w, w_spec))
        assert jax.typeof(y).sharding.spec == y_spec
        assert jax.typeof(dx).sharding.spec == x_spec
        assert jax.typeof(dw).sharding.spec == w_spec
    # dy is 2y: sums in another order may move it across the boundary of two f8 values, rarely.
    for ours, theirs, bound in ((y, y_1, 1e-6), (dx, dx_1, 1e-3), (dw, dw_1, 1e-3)):
        assert relative(ours, theirs) < bound


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_arrays_that_nobody_has_laid_out(wrap):
    """jax.make_mesh makes explicit axes unless it is told otherwise."""
    x, w = normal(0, (32, 64)), normal(1, (64, 16))
    loss = lambda x, w: jnp.sum(jfp8.scaled_dot_general(x, w, MATRICES) ** 2)
    expected = jax.grad(loss, argnums=(0, 1))(x, w)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        found = wrap(jax.grad(loss, argnums=(0, 1)))(x, w)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) < 1e-3


def test_a_mesh_that_only_arrays_name():
    """jax.jit compiles without jax.set_mesh, and Flax's layers have gradients there."""
    mesh = jax.make_mesh((8,), ("data",))
    x, kernel = normal(0, (32, 64)), normal(1, (64, 16))
    spread = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jfp8.scaled_dot_general(x, w, MATRICES) ** 2)))
    found = gradient(spread(kernel, P()), spread(x, P("data")))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P()), 2)
    assert relative(found, gradient(kernel, x)) < 1e-3


def test_an_ambiguous_layout_is_an_error_of_jax():
    with explicit():
        x = spread(normal(0, (32, 64)), P(None, "model"))
        w = spread(normal(1, (64, 16)), P("model", None))
        with pytest.raises(Exception, match="out_sharding"):
            jfp8.scaled_dot_general(x, w, MATRICES)


def test_a_convolution_is_laid_out_as_asked():
    convolve = jfp8.nnx.ConvGeneralDilated(recipe="current")
    x, w, spec = normal(0, (8, 4, 4, 3)), normal(1, (3, 3, 3, 8)), P("data", None, None, "model")
    how = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    expected = convolve(x, w, (1, 1), **how)
    with explicit():
        y = convolve(spread(x, P("data")), w, (1, 1), **how, out_sharding=spec)
        assert jax.typeof(y).sharding.spec == spec
    assert relative(y, expected) < 1e-6


CONV = ((1, 1), "SAME", (1, 1), (1, 1), ("NHWC", "HWIO", "NHWC"))
DENSE = jfp8.Dense(16, recipe="current", use_bias=False)
IN_SHARD_MAP = {  # ours, JAX's, shapes of x and w, and how w is sharded over other axes
    "matmul": (
        lambda x, w: jfp8.scaled_dot_general(x, w, MATRICES, recipe="current"),
        jnp.matmul,
        ((8, 64), (64, 16)),
        P("model", None),
    ),
    "convolution": (
        lambda x, w: jfp8.scaled_conv_general_dilated(x, w, *CONV, recipe="current"),
        lambda x, w: lax.conv_general_dilated(x, w, *CONV),
        ((8, 6, 6, 8), (3, 3, 8, 16)),
        P(),
    ),
    "attention": (
        lambda x, w: jfp8.scaled_dot_product_attention(x, x * w, w + x, recipe="current"),
        lambda x, w: jax.nn.dot_product_attention(x, x * w, w + x),
        ((8, 16, 2, 16), (1, 1, 2, 16)),
        P(None, None, "model"),
    ),
    "layer": (
        lambda x, w: DENSE.apply({"params": {"kernel": w}}, x),
        jnp.matmul,
        ((8, 64), (64, 16)),
        P(None, "model"),
    ),
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("name", IN_SHARD_MAP)
def test_shard_map_over_some_axes(name, kind):
    """The types, or the compiler, shard over the others. The oracle is JAX's, on one device."""
    ours, plain, shapes, spec = IN_SHARD_MAP[name]
    x, w = (normal(i, shape) for i, shape in enumerate(shapes))
    ct = normal(2, jax.eval_shape(plain, x, w).shape)
    expected = plain(x, w), *jax.grad(lambda x, w: jnp.vdot(plain(x, w), ct), argnums=(0, 1))(x, w)

    def losses(x, w, ct):
        y = ours(x, w)
        return y, jnp.sum(y * ct)[None]

    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)):
        batch = P("data")
        given = spread(x, batch), spread(w, spec), spread(ct, batch)
        mapped = jax.shard_map(
            losses, in_specs=(batch, P(), batch), out_specs=(batch, batch), axis_names={"data"}
        )
        y, _ = jax.jit(mapped)(*given)
        total = lambda x, w, ct: jnp.sum(mapped(x, w, ct)[1])
        dx, dw = jax.jit(jax.grad(total, argnums=(0, 1)))(*given)
        assert jax.typeof(dw) == jax.typeof(given[1])
    for found, right in zip((y, dx, dw), expected, strict=True):
        assert 1e-3 < relative(found, right) < 0.15


def quantized_in_blocks(x):
    both = lambda x: jfp8.quantize(x, granularity=jfp8.Block((128, 128)))
    gradient = jax.grad(lambda x: jnp.sum(both(x).dequantize() ** 2))
    return both(x), both(x).dequantize(), gradient(x), jfp8.quantize(x, granularity=jfp8.PerAxis(0))


def trained_with(tx, steps=1):
    def train(x):
        narrow = jnp.max(x.reshape(512, 128, 4), axis=2)  # 64 columns in each shard
        params = {"w": x, "narrow": narrow}
        updates, state = params, tx.init(params)
        for _ in range(steps):
            updates, state = tx.update(jax.tree.map(jnp.sin, updates), state, params)
        return updates, state

    return train


def grouped(x):
    kernel = jnp.reshape(jnp.sin(jnp.arange(2.0 * 512 * 64)), (2, 512, 64))
    sizes = jnp.array([300, 212])
    loss = lambda x: jnp.mean(jfp8.scaled_ragged_dot(x, kernel, sizes))
    return jax.grad(loss)(x), jfp8.scaled_ragged_dot(x, kernel, sizes)


COMPUTED = {
    "quantize": quantized_in_blocks,
    **{
        name: functools.partial(lambda name, x: jfp8.quantize_params({"kernel": x}, name), name)
        for name in ("block", "mxfp8", "nvfp4", "nvfp4_4over6")
    },
    "stacked": lambda x: jfp8.quantize_params(
        {"kernel": jnp.stack([x, 2 * x])}, "block", stacked="*"
    ),
    "adamw": trained_with(jfp8.optim.adamw(1e-3), steps=2),
    "torchao": trained_with(jfp8.optim.adamw(1e-3, preset="torchao")),
    "coat": trained_with(jfp8.optim.adamw(1e-3, preset="coat")),
    "muon": trained_with(jfp8.optim.muon(1e-3)),
    "ragged": grouped,
}


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_explicit_axes_change_no_bit(compute):
    """Axes of size 1, which configurations leave in the mesh, are no axes."""
    found = []
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((1, 4, 2), ("one", "data", "model"), axis_types=(kind,) * 3)
        with jax.set_mesh(mesh):
            x = spread(normal(0, (512, 512)), P(("one", "data"), "model"))
            found.append(jax.jit(compute)(x))
    for explicit, automatic in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(explicit, automatic, strict=True)


def test_without_jit_and_a_mesh_in_effect():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    x = normal(0, (512, 512))
    divided = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
    found, expected = (jfp8.quantize(x, granularity=jfp8.Block((128, 128))) for x in (divided, x))
    np.testing.assert_array_equal(found.scale, expected.scale, strict=True)
    np.testing.assert_array_equal(found.dequantize(), expected.dequantize(), strict=True)


def test_scales_have_the_sharding_of_their_blocks():
    x = normal(0, (512, 512))
    with explicit():
        q = jfp8.quantize(spread(x, P("data", "model")), granularity=jfp8.Block((128, 128)))
        rows = jfp8.quantize(spread(x, P("data", "model")), granularity=jfp8.PerAxis(0))
    assert jax.typeof(q.data).sharding.spec == jax.typeof(q.scale).sharding.spec
    assert jax.typeof(rows.scale).sharding.spec == P("data", None)


@pytest.mark.parametrize("granularity", [jfp8.Block((256, 1)), jfp8.Block((200, 1))])
def test_blocks_that_shards_cut_are_told(granularity):
    size = granularity.shape[0]
    with explicit(), pytest.raises(ValueError, match=f"blocks of {size}.*multiple of {4 * size}"):
        jfp8.quantize(spread(normal(0, (512, 8)), P("data")), granularity=granularity)
