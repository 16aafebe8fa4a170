"""Products as lowered for an NVIDIA GPU that a mesh describes, and as its kernels compute them."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

import jfp8
from jfp8 import recipes
from jfp8.quantizers.quantizer import Current
from jfp8.recipes.product import Product
from jfp8.scaling.sink import decode_amax, init_sink
from support.devices import lowered_for, needs_mosaic

PLAIN = (((1,), (0,)), ((), ()))
LARGE = (2048, 1024, 1536)  # m, k, n: enough for FP8 to pay


def mesh_of(kind, *sizes):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    names = ("x", "y")[: len(sizes)]
    return AbstractMesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


def f8_products(text):
    """Contracting dimensions of all products of two f8 operands: ``["[1] x [1]", ...]``."""
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    f8 = [line for line in lines if len(re.findall(r"tensor<[\dx]*f8E\w+>", line)) == 2]
    return [re.search(r"contracting_dims = (\[\d\] x \[\d\])", line)[1] for line in f8]


def other_products(text):
    return text.count("stablehlo.dot") - len(f8_products(text))


def kernels(text):
    """How many kernels are called; functions that several callers share count for each."""
    bodies = dict(re.findall(r"func\.func \w+ @(\w+)\((?:.*?)\{\n(.*?)\n  \}", text, re.DOTALL))

    def count(body):
        calls = re.findall(r"call @(\w+)\(", body)
        return body.count("mosaic_gpu_v2") + sum(count(bodies.get(name, "")) for name in calls)

    return count(bodies["main"])


def product_and_gradients(recipe, shape=LARGE, dtype=jnp.bfloat16, implementation=None, state=None):
    m, k, n = shape

    def f(x, w, dy, state):
        def product(x, w):
            options = {"recipe": recipe, "state": state, "implementation": implementation}
            return jfp8.scaled_dot_general(x, w, PLAIN, **options)

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k, n), (m, n))]
    return f, (*shapes, recipe.init_state() if state is None else state)


CURRENT, ROUNDED = Current(jfp8.E4M3FN), Current(jfp8.E4M3FN, "power_of_two")
BOTH, OTHER_LHS = Product(CURRENT, CURRENT), Product(ROUNDED, CURRENT)
BY_TWO_SCALES = recipes.PerOperand(fprop=BOTH, dgrad=BOTH, wgrad=OTHER_LHS)


@pytest.mark.representative(2)
@needs_mosaic
@pytest.mark.parametrize(
    ("recipe", "in_xla", "ours"),
    [
        # Each tensor: its amax as long as there is no history, and q, q^T and amax in one read.
        # Without a sink the gradient has no history, and XLA finds its amax.
        (recipes.DelayedScaling(), 3, 5),
        (recipes.Float8CurrentScaling(), 3, 3),
        # The amaxes of rows and columns, q and q^T; and three products.
        (recipes.RowwiseScaling(), 0, 9),
        (recipes.Float8BlockScaling(), 0, 6),
        (recipes.Float8BlockScaling(scale_rounding=None, fp8_format="HYBRID"), 0, 6),
        (recipes.Float8BlockScaling(wgrad_tiles=True), 0, 7),  # lhs is read once for each
        # Two scales for lhs: XLA, so that devices need not exchange both.
        (BY_TWO_SCALES, 3, 2),
    ],
    ids=repr,
)
def test_kernels_and_products_on_hopper(recipe, in_xla, ours):
    f, args = product_and_gradients(recipe)
    text = lowered_for("NVIDIA H200", f, *args)
    assert f8_products(text) == ["[1] x [1]"] * in_xla
    assert (kernels(text), other_products(text)) == (ours, 0)
    assert not re.search(r"tensor<\d+x\d+x128xf32>", text)  # no scale of blocks is repeated


@needs_mosaic
def test_odd_sizes_are_padded_once():
    """Before quantizing: the f8 operands, and what the products give, are as large as they are."""
    f, args = product_and_gradients(recipes.DelayedScaling(), (2000, 1333, 777))
    text = lowered_for("NVIDIA H200", f, *args)
    assert f8_products(text) == ["[1] x [1]"] * 3
    pads = re.findall(r"stablehlo\.pad.*-> tensor<([\dx]+)x(\w+)>", text)
    grown = [("2048x1408", "bf16"), ("2048x896", "bf16"), ("1408x896", "bf16")]
    assert sorted(pads) == sorted(grown)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA L40S", "NVIDIA B200"])
@pytest.mark.parametrize("recipe", [recipes.DelayedScaling(), recipes.RowwiseScaling()], ids=repr)
def test_contraction_is_last_without_kernels_too(kind, recipe):
    f, args = product_and_gradients(recipe, implementation="xla")
    text = lowered_for(kind, f, *args)
    assert f8_products(text) == ["[1] x [1]"] * 3
    assert (kernels(text), other_products(text)) == (0, 0)


@pytest.mark.representative(1)
@needs_mosaic
@pytest.mark.filterwarnings("ignore:A loss is differentiated:UserWarning")
@pytest.mark.parametrize(
    "recipe", [recipes.DelayedScaling(), recipes.Float8BlockScaling()], ids=repr
)
def test_transformations(recipe):
    """The kernels stay under all of JAX's transformations."""
    layer = jfp8.Dense(1024, recipe=recipe, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(variables, x):
        return layer.apply(variables, x).astype(jnp.float32).sum()

    grad = jax.value_and_grad(loss, argnums=(0, 1))

    def scanned(variables, x):
        turn = lambda x, _: (layer.apply(variables, x), None)
        return jax.lax.scan(turn, x, length=3)[0].astype(jnp.float32).sum()

    stacked = jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
    plain = kernels(lowered_for("NVIDIA H200", grad, variables, x))
    assert plain >= 6
    assert kernels(lowered_for("NVIDIA H200", jax.checkpoint(grad), variables, x)) >= plain
    assert "mosaic_gpu_v2" in lowered_for("NVIDIA H200", jax.grad(scanned), variables, x)
    of_each = jax.vmap(grad, in_axes=(None, 0))
    assert kernels(lowered_for("NVIDIA H200", of_each, variables, stacked)) >= plain

    mesh = mesh_of("NVIDIA H200", 8)
    batch = PartitionSpec("x")
    mapped = jax.shard_map(
        lambda v, x: jax.lax.pmean(jax.grad(loss)(v, x), "x"),
        mesh=mesh,
        in_specs=(PartitionSpec(), batch),
        out_specs=PartitionSpec(),
    )
    many = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    with use_abstract_mesh(mesh):
        text = jax.jit(mapped).trace(variables, many).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in text


@needs_mosaic
@pytest.mark.filterwarnings("ignore:A loss is differentiated:UserWarning")
def test_layers_of_the_same_shapes_share_their_kernels():
    """In the program, that is: each of them takes a second to compile. (JAX copies a few.)"""

    class Layers(nn.Module):
        n: int

        @nn.compact
        def __call__(self, x):
            for _ in range(self.n):
                x = jfp8.Dense(1024, dtype=jnp.bfloat16)(x)
            return x

    def kernels_of(n):
        x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        variables = jax.eval_shape(Layers(n).init, jax.random.key(0), x)
        loss = lambda v, x: Layers(n).apply(v, x).astype(jnp.float32).sum()
        grad = jax.grad(loss, argnums=(0, 1))
        text = lowered_for("NVIDIA H200", grad, variables, x)
        return text.count("mosaic_gpu_v2"), kernels(text)

    assert kernels_of(1) == (5, 6)  # amaxes of tensors of one size share one
    written, called = kernels_of(4)
    assert called == 24
    assert written <= 12


@needs_mosaic
def test_a_compiler_divides_kernels_too():
    """Under a mesh of eight: cuBLASLt's products, and a kernel for each tensor."""
    f, args = product_and_gradients(recipes.Float8CurrentScaling(), (8192, 1024, 1536))
    with use_abstract_mesh(mesh_of("NVIDIA H200", 8)):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert (len(f8_products(text)), kernels(text), other_products(text)) == (3, 3, 0)


def operands(dtype, shape=(96, 160, 72)):
    m, k, n = shape
    rng = np.random.default_rng(0)
    rows = 2.0 ** rng.integers(-3, 4, size=(m, 1))
    arrays = rng.normal(size=(m, k)) * rows, rng.normal(size=(k, n)) / 8, rng.normal(size=(m, n))
    return [jnp.asarray(x, dtype) for x in arrays]


def of_history(recipe):
    state = recipe.init_state()
    # An amax of 3 lets some elements saturate.
    return state and jax.tree.map(lambda x: x + (3.0 if x.ndim else 0.0), state)


@pytest.mark.representative(1)
@needs_mosaic
@pytest.mark.parametrize(
    ("recipe", "history", "dtype"),
    [
        (recipes.DelayedScaling(amax_history_len=2), False, jnp.bfloat16),
        (recipes.DelayedScaling(amax_history_len=2), True, jnp.float32),
        (recipes.RowwiseScaling(scale_rounding=None, fp8_format="HYBRID"), False, jnp.bfloat16),
        (recipes.Float8BlockScaling(), False, jnp.bfloat16),
        (recipes.Float8BlockScaling(scale_rounding=None, wgrad_tiles=True), False, jnp.bfloat16),
    ],
    ids=repr,
)
def test_kernels_compute_what_the_reference_does(recipe, history, dtype):
    """Operands are the same bytes, so all that may differ is the order of f32 sums."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    state = of_history(recipe) if history else recipe.init_state()
    f, _ = product_and_gradients(recipe, state=state)
    reference = product_and_gradients(recipe, implementation="emulate")[0]
    kernels = product_and_gradients(recipe, implementation="mosaic_gpu")[0]
    arrays = operands(dtype)
    expected = jax.jit(reference)(*arrays, state)
    with plgpu.force_gpu_interpret_mode():
        found = jax.jit(kernels)(*arrays, state)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(b).max() > 1
        bound = 2**-7 * np.abs(b) if dtype == jnp.bfloat16 else 2**-20 * np.abs(b).max()
        assert (np.abs(a - b) <= bound).all()
        assert (a != b).mean() < (0.01 if dtype == jnp.bfloat16 else 1)


@needs_mosaic
def test_amaxes_of_parts_leave_through_the_sink():
    """Those of each operand are in other parts of it, and the gradient's is known."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    recipe = recipes.DelayedScaling(amax_history_len=2)
    x, w, dy = (jnp.ones((256, 256), jnp.bfloat16) for _ in range(3))
    x, w, dy = x.at[255, 255].set(3), w.at[0, 130].set(-5), dy.at[130, 1].set(-7)

    def f(x, w, sink):
        options = {"recipe": recipe, "state": recipe.init_state(), "sink": sink}
        return jfp8.scaled_dot_general(x, w, PLAIN, implementation="mosaic_gpu", **options)

    @jax.jit
    def gradient_of_sink(x, w, dy):
        return jax.vjp(f, x, w, init_sink())[1](dy)[2]

    with plgpu.force_gpu_interpret_mode():
        sink = gradient_of_sink(x, w, dy)
    amaxes, overflow = decode_amax(sink)
    np.testing.assert_array_equal(amaxes, [3, 5, 7])
    assert not overflow.any()


def test_named_on_another_platform():
    x = jfp8.quantize(jnp.ones((8, 8)))
    reason = "JAX 0.1" if jax.__version_info__ < (0, 11, 2) else "runs on CUDA"
    with pytest.raises(NotImplementedError, match=reason):
        jfp8.scaled_matmul(x, x, PLAIN, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=reason):
        jfp8.scaled_dot_general(
            jnp.ones((8, 8)), jnp.ones((8, 8)), PLAIN, implementation="mosaic_gpu"
        )


@needs_mosaic
def test_named_on_another_gpu():
    f, args = product_and_gradients(recipes.DelayedScaling(), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="NVIDIA B200.*for Hopper"):
        lowered_for("NVIDIA B200", f, *args)
    f, args = product_and_gradients(recipes.MXFP8BlockScaling(), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="does not support"):
        lowered_for("NVIDIA H200", f, *args)
