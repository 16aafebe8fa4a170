"""Activations and norms of converted models save their inputs, and kernels compute some of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import jfp8
from jfp8.conversion.groups import Elementwise, elementwise, grouped
from jfp8.kernels.quantize_and_transpose import Made, quantize_both_ways
from jfp8.quantizers.quantizer import Delayed
from jfp8.tracing.devices import Gpu
from support.devices import needs_mosaic, pretend

BF16 = jnp.bfloat16
X = jax.random.normal(jax.random.key(0), (8, 64), BF16)
GATED = {"swiglu": nn.silu, "geglu": nn.gelu}
ALONE = {
    "gelu": nn.gelu,
    "exact gelu": lambda h: nn.gelu(h, approximate=False),
    "written": lambda h: h * (1 + jnp.tanh(0.8 * (h + 0.04 * h**3))) / 2,
    "leaky": lambda h: jnp.where(h > 0, h, h / 8),
    "named": lambda h: checkpoint_name(nn.silu(h), "mine") * h,
}


class Block(nn.Module):
    """A norm, and a feed-forward block, none of which has a name that says so."""

    activation: str = "swiglu"
    dtype: jnp.dtype = BF16

    @nn.compact
    def __call__(self, x):
        a, b, c = (
            nn.Dense(n, name=name, dtype=self.dtype, use_bias=False)
            for n, name in ((256, "a"), (256, "b"), (64, "c"))
        )
        y = nn.RMSNorm(dtype=self.dtype)(x)
        if self.activation in GATED:
            return x + c(GATED[self.activation](a(y)) * b(y))
        return x + c(ALONE[self.activation](a(y)))


@pytest.fixture
def saved(capsys):
    """Dtypes and shapes of what is saved in high precision for the backward pass of a model."""

    def found(model):
        variables = model.init(jax.random.key(1), X)
        loss = lambda v, x: model.apply(v, x).astype(jnp.float32).sum()
        capsys.readouterr()
        print_saved_residuals(loss, variables, X)
        lines = [line.split(" ", 1)[0] for line in capsys.readouterr().out.splitlines()]
        return sorted(x for x in lines if not x.startswith(("u8", "f32[]", "bf16[]")))

    return found


# The inputs of the norm are x, saved as a part of `variables` or x, and its scale.
NORM = ["bf16[8,64]", "f32[64]"]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("swiglu", ["bf16[8,256]"] * 2),
        ("geglu", ["bf16[8,256]"] * 2),
        ("gelu", ["bf16[8,256]"]),
        ("exact gelu", ["bf16[8,256]"]),
        ("written", ["bf16[8,256]"]),
        ("leaky", ["bool[8,256]"]),  # JAX's mask has fewer bytes than the input
    ],
)
def test_what_is_between_matmuls_saves_its_inputs(activation, expected, saved):
    model = jfp8.convert(Block(activation), "current", exempt=())
    assert saved(model) == sorted([*expected, *NORM])


def test_what_has_no_fp8_matmul_after_it_is_left_alone(saved):
    plain = saved(Block())
    assert saved(jfp8.convert(Block(), "current", exempt=("a", "b", "c"))) == plain
    assert len(plain) > 9


@pytest.mark.skipif(
    jax.config.jax_remat3, reason="this checkpoint saves float32 results inside FP8 matmuls, too"
)
@pytest.mark.parametrize("name", ["dots_saveable", "everything_saveable", "nothing_saveable"])
def test_policies_of_jax_see_the_matmuls_of_a_converted_model(name, saved):
    """They save of it what they save of bf16 matmuls; operands in FP8 do not count."""
    policy = getattr(jax.checkpoint_policies, name)
    found = saved(jfp8.convert(Wrapped(policy), "current", exempt=()))
    assert not [x for x in found if x.startswith("f32[8,256")]
    if name != "everything_saveable":  # bf16 saves operands, too
        assert found == saved(Wrapped(policy))
        assert found.count("bf16[8,256]") == 2 * (name == "dots_saveable")


def test_a_policy_that_asks_for_a_name(saved):
    policy = jax.checkpoint_policies.save_only_these_names("mine")
    for activation in ("named", "gelu"):
        found = saved(jfp8.convert(Wrapped(policy, activation), "current", exempt=()))
        assert found.count("bf16[8,256]") == (activation == "named")


class Wrapped(nn.Module):
    """A block in a checkpoint with a policy."""

    policy: object
    activation: str = "swiglu"

    @nn.compact
    def __call__(self, x):
        return nn.remat(Block, policy=self.policy)(self.activation)(x)


@pytest.mark.parametrize("activation", [*GATED, *ALONE])
def test_gradients_are_those_of_layers_that_save_all(activation):
    """In f32, where no rounding depends on what XLA fuses."""

    class Written(Block):
        @nn.compact
        def __call__(self, x):
            with pytest.MonkeyPatch.context() as patch:
                dense = lambda *args, **how: jfp8.Dense(*args, **how, recipe="current")
                patch.setattr(nn, "Dense", dense)
                return super().__call__(x)

    x = X.astype(jnp.float32)
    converted = jfp8.convert(Block(activation, jnp.float32), "current", exempt=())
    written = Written(activation, jnp.float32)
    params = {"params": converted.init(jax.random.key(1), x)["params"]}
    loss = lambda model: lambda p, x: jnp.sum(jnp.sin(model.apply(p, x)))
    gradients = lambda model: jax.jit(jax.grad(loss(model), argnums=(0, 1)))(params, x)
    for a, b in zip(*map(jax.tree.leaves, map(gradients, (converted, written))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("f", "by_numpy"),
    [
        (lambda a, b: nn.silu(a) * b, lambda a, b: a / (1 + np.exp(-a)) * b),
        (lambda a, b: nn.gelu(a) * jnp.clip(b, -1, 1), lambda a, b: gelu(a) * np.clip(b, -1, 1)),
        (
            lambda a, b: jnp.where(a > b, nn.relu(a), 0.5) - b,
            lambda a, b: np.where(a > b, np.maximum(a, 0), 0.5) - b,
        ),
    ],
    ids=["swiglu", "geglu", "where"],
)
def test_a_group_for_kernels(f, by_numpy):
    """In f32, of tiles of another shape."""
    a, b = jax.random.normal(jax.random.key(2), (2, 8, 8), BF16)
    jaxpr = jax.make_jaxpr(lambda a, b, w: f(a, b) @ w)(a, b, b).jaxpr
    (call,) = [x for x in grouped(jaxpr.eqns, jaxpr.outvars) if x.primitive.name != "dot_general"]
    make = elementwise(call)
    assert {make, elementwise(call)} == {make}
    x, y = (np.asarray(v, np.float64)[:2, :3] for v in (a, b))
    found = make(jnp.float32(x), jnp.float32(y))
    assert found.dtype == jnp.float32
    # The constants of GELU are numbers in bf16.
    np.testing.assert_allclose(found, by_numpy(x, y), rtol=2e-3, atol=5e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: nn.silu(a) * b[:1],
        lambda a, b: nn.softmax(a) * b,
        lambda a, b: jnp.cbrt(a) * b,
        lambda a, b: nn.silu(a.astype(jnp.float32)).astype(a.dtype) * b.T,
        lambda a, b: nn.silu(a).astype(jnp.float8_e4m3fn).astype(a.dtype) * b,
        lambda a, b: nn.silu(a).astype(jnp.float16).astype(a.dtype) * b,
    ],
    ids=["rows", "reduction", "not in kernels", "transposed", "rounded to f8", "rounded to f16"],
)
def test_groups_that_kernels_leave_to_xla(f):
    a = b = jnp.ones((8, 8), BF16)
    jaxpr = jax.make_jaxpr(lambda a, b, w: f(a, b) @ w)(a, b, b).jaxpr
    calls = [x for x in grouped(jaxpr.eqns, jaxpr.outvars) if "call" in str(x.params.keys())]
    assert calls
    assert not any(map(elementwise, calls))


@needs_mosaic
@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_kernels_make_the_lhs_of_a_converted_model(recipe, activation, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    makes = []

    def quantize(quantizer, dtype, x, *args):
        makes.extend([x] if isinstance(x, Made) else [])
        return quantize_both_ways(quantizer, dtype, x, *args)

    pretend(monkeypatch, Gpu("NVIDIA H200", (9, 0)))
    monkeypatch.setattr("jfp8.kernels.k_major.quantize_both_ways", quantize)
    states = {"state_collection": "_overwrite_with_gradient"}
    model = jfp8.convert(Block(activation), recipe, exempt=(), **states)
    x = jax.ShapeDtypeStruct((128, 64), BF16)
    loss = lambda v, x: jnp.sum(model.apply(v, x).astype(jnp.float32))
    with plgpu.force_gpu_interpret_mode():
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        makes.clear()
        jax.eval_shape(jax.grad(loss), variables, x)
    (made,) = makes
    assert isinstance(made.make, Elementwise)
    assert [x.shape for x in made.parts] == [(128, 1, 256)] * (2 if activation == "swiglu" else 1)


@needs_mosaic
def test_a_kernel_is_given_the_inputs_of_the_group(monkeypatch):
    """The function that it computes, of these inputs, is the array that XLA computes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    class Seen(Exception):
        pass

    def quantize(quantizer, dtype, x, *args):
        if not isinstance(x, Made):
            return quantize_both_ways(quantizer, dtype, x, *args)
        assert np.std(np.asarray(x.array, np.float32)) > 0.1
        found = x.make(*(part[:, 0].astype(jnp.float32) for part in x.parts))
        np.testing.assert_allclose(found, np.asarray(x.array, np.float32), rtol=0.02, atol=1e-3)
        raise Seen

    x = jax.random.normal(jax.random.key(5), (128, 64), BF16)
    states = {"state_collection": "_overwrite_with_gradient"}
    model = jfp8.convert(Block("swiglu"), "delayed", exempt=(), **states)
    variables = model.init(jax.random.key(0), x)
    pretend(monkeypatch, Gpu("NVIDIA H200", (9, 0)))
    monkeypatch.setattr("jfp8.kernels.k_major.quantize_both_ways", quantize)
    with plgpu.force_gpu_interpret_mode(), pytest.raises(Seen):
        model.apply(variables, x)


@needs_mosaic
def test_a_kernel_makes_a_matrix_of_several_arrays():
    """The same bytes, scales and amax, without a look at the matrix."""
    from support.interpreter import no_races

    a, b = jax.random.normal(jax.random.key(3), (2, 100, 150), BF16)
    jaxpr = jax.make_jaxpr(lambda a, b, w: (nn.silu(a) * b) @ w)(a, b, b.T).jaxpr
    make = elementwise(grouped(jaxpr.eqns, jaxpr.outvars)[0])
    y = jax.jit(make)(*(x.astype(jnp.float32) for x in (a, b))).astype(BF16)
    quantizer = Delayed(jfp8.E4M3FN, length=4)
    state = {"amax_history": jnp.array([3.0, 0.5, 0.0, 0.0]), "amax": jnp.array(7.0)}
    unknown = Made(jnp.full_like(y, jnp.nan), [a[:, None], b[:, None]], make)
    with no_races():
        found = quantize_both_ways(quantizer, None, unknown, state)
    assert found.straight.scale == np.float32(7.0) / 448
    want = (y.astype(jnp.float32) / found.straight.scale).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(
        np.asarray(found.straight.data, np.float32), np.asarray(want, np.float32)
    )
    np.testing.assert_array_equal(
        np.asarray(found.transposed.data, np.float32), np.asarray(want.T, np.float32)
    )
    assert jnp.max(found.amax) == np.abs(np.asarray(y, np.float32)).max()
