"""What a CUDA compiler is given, read from StableHLO on a machine without a GPU."""

import functools
import re
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from gpu_programs import forward_and_backward
from jfp8 import recipes
from jfp8.linen import DotGeneral
from jfp8.scaling.sink import init_sink
from support.compiled_layers import gradients_of

E4M3, E5M2 = "f8E4M3FN", "f8E5M2"
PLAIN, BATCHED = (((1,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
implementations = pytest.mark.parametrize("implementation", [None, "xla"])


@dataclass(frozen=True)
class Dot:
    """One ``stablehlo.dot_general``."""

    lhs: str
    rhs: str
    out: str
    algorithm: str | None
    precision: str | None

    @property
    def fast(self) -> bool:
        found = re.search(r"allow_imprecise_accumulation = (true|false)", self.algorithm)
        return found[1] == "true"


def dots(text):
    """Every product in the text."""
    found = []
    for line in text.splitlines():
        if "stablehlo.dot" not in line:
            continue
        types = re.search(
            r": \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\) -> tensor<(?:\d+x)*(\w+)>", line
        )
        algorithm = re.search(r"algorithm = <([^>]*)>", line)
        precision = re.search(r"precision = \[([^\]]*)\]", line)
        found.append(Dot(*types.groups(), algorithm and algorithm[1], precision and precision[1]))
    assert "convolution" not in text  # the other way to write a product
    return found


def lowered(f, *args, platform="cuda"):
    with jfp8.for_platforms(platform):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def product_and_gradients(dtype=jnp.float32, numbers=PLAIN, **options):
    """A function of (x, w, sink) with its arguments: value, and gradients by all three."""
    shapes = ((16, 32), (32, 64)) if numbers == PLAIN else ((4, 16, 32), (4, 32, 64))
    state = options.get("recipe", recipes.DelayedScaling()).init_state()

    def loss(x, w, sink):
        y = jfp8.scaled_dot_general(x, w, numbers, state=state, sink=sink, **options)
        return y.astype(jnp.float32).sum()

    args = (jnp.ones(shapes[0], dtype), jnp.ones(shapes[1], dtype))
    sink = None if state is None else init_sink()
    return jax.value_and_grad(loss, argnums=(0, 1) if sink is None else (0, 1, 2)), (*args, sink)


def assert_three_f8_products(found, forward=E4M3, backward=E5M2, out="f32", of_wgrad=None):
    """fprop may accumulate fast; dgrad and wgrad may not. All accumulate in f32."""
    assert len(found) == 3
    fprop, dgrad, wgrad = found
    assert (fprop.lhs, fprop.rhs, fprop.fast) == (forward, forward, True)
    assert (dgrad.lhs, dgrad.rhs, dgrad.fast) == (backward, forward, False)
    assert (wgrad.lhs, wgrad.rhs, wgrad.fast) == (forward, backward, False)
    assert [dot.out for dot in found] == [out, out, of_wgrad or out]
    for dot in found:
        assert f"lhs_precision_type = {dot.lhs}" in dot.algorithm
        assert f"rhs_precision_type = {dot.rhs}" in dot.algorithm
        assert "accumulation_type = f32" in dot.algorithm


@pytest.mark.slow
@implementations
@pytest.mark.parametrize("numbers", [PLAIN, BATCHED], ids=["matrices", "batches"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_three_f8_products(dtype, numbers, implementation):
    """No f32 or bf16 product is left; f16 could overflow before the scale is multiplied."""
    f, args = product_and_gradients(dtype, numbers, implementation=implementation)
    out = "bf16" if dtype == jnp.bfloat16 else "f32"
    assert_three_f8_products(dots(lowered(f, *args)), out=out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        (recipes.Float8CurrentScaling(), E4M3, E5M2),
        (recipes.DelayedScaling(fp8_format="E4M3", scale_rounding="power_of_two"), E4M3, E4M3),
        (recipes.RowwiseScaling(), E4M3, E4M3),
        (recipes.Hybrid(), E4M3, E5M2),
        (recipes.Unscaled(), E4M3, E5M2),
    ],
    ids=repr,
)
def test_recipes(recipe, forward, backward):
    f, args = product_and_gradients(recipe=recipe)
    assert_three_f8_products(dots(lowered(f, *args)), forward, backward)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [recipes.DirectE5M2(), recipes.DelayedScaling(fp8_format="E5M2")], ids=repr
)
def test_trap_e5m2_by_e5m2_runs_in_bf16(recipe):
    """No tensor core multiplies the two, and XLA refuses the algorithm; bf16 holds their values."""
    f, args = product_and_gradients(recipe=recipe)
    products = dots(lowered(f, *args))
    assert len(products) == 3
    assert {(d.lhs, d.rhs, d.out, d.algorithm) for d in products} == {("bf16", "bf16", "f32", None)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()],
    ids=lambda recipe: recipe.name,
)
def test_blocks_on_a_gpu_that_is_not_known(recipe):
    """Where scales vary along the sum, values are multiplied: in bf16, which holds them all."""

    f = gradients_of(lambda x, w: jfp8.scaled_dot_general(x, w, PLAIN, recipe=recipe))
    products = dots(lowered(f, *(jnp.ones((256, 256)),) * 3))
    products = [d for d in products if d.precision != "HIGHEST, HIGHEST"]  # rotations
    assert {(d.lhs, d.rhs, d.out) for d in products} == {("bf16", "bf16", "f32")}
    assert len(products) == 3


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
@implementations
def test_scaled_matmul(implementation, fast):
    """Also scales per row, which multiply the result, leave the operands in f8."""

    def f(x, w):
        q_x = jfp8.quantize(x, granularity=jfp8.PerAxis(0))
        q_w = jfp8.quantize(w, jfp8.E5M2)
        options = {"implementation": implementation, "fast_accumulation": fast}
        return jfp8.scaled_matmul(q_x, q_w, PLAIN, preferred_element_type=jnp.bfloat16, **options)

    (dot,) = dots(lowered(f, jnp.ones((16, 32)), jnp.ones((32, 64))))
    assert (dot.lhs, dot.rhs, dot.out, dot.fast) == (E4M3, E5M2, "bf16", fast)


@pytest.mark.parametrize(
    ("chosen", "fast"),
    [((), [False] * 3), (("fprop", "wgrad"), [True, False, True]), (None, [True, False, False])],
)
def test_a_recipe_chooses_where_sums_may_be_fast(chosen, fast):
    f, args = product_and_gradients(recipe=recipes.DelayedScaling(fast_accumulation=chosen))
    assert [dot.fast for dot in dots(lowered(f, *args))] == fast


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("recipe", [recipes.DelayedScaling(), recipes.RowwiseScaling()], ids=repr)
def test_other_accelerators_are_given_f8_and_no_algorithm(recipe, platform):
    """Their compilers multiply f8 arrays as well as the chip can."""
    f, args = product_and_gradients(recipe=recipe)
    found = dots(lowered(f, *args, platform=platform))
    assert len(found) == 3
    for dot in found:
        assert (dot.lhs[:2], dot.rhs[:2], dot.out, dot.algorithm) == ("f8", "f8", "f32", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        jfp8.Dense(8, dtype=jnp.bfloat16),
        jfp8.Einsum((32, 8), "ab,bc->ac", dtype=jnp.bfloat16),
        nn.Dense(8, dot_general_cls=DotGeneral, dtype=jnp.bfloat16),
        nn.Dense(8, dot_general_cls=functools.partial(DotGeneral, implementation="xla")),
    ],
    ids=["Dense", "Einsum", "nn.Dense", "nn.Dense with partial"],
)
def test_layers(layer):
    f, args = forward_and_backward(layer, (16, 32), jnp.bfloat16)
    out = "f32" if layer.dtype is None else "bf16"  # promoted with parameters in f32
    # Flax's own layers cast a kernel before the product, so that its gradient is cast, too.
    of_wgrad = out if type(layer) is nn.Dense else "f32"
    assert_three_f8_products(dots(lowered(f, *args)), out=out, of_wgrad=of_wgrad)


# The other direction: where the presets may not or must not be


def test_trap_presets_are_refused_on_cpu():
    """``ANY_F8_ANY_F8_F32`` is an error at CPU lowering; so is what a library forgets to guard."""
    x = jnp.ones((4, 4), jfp8.E4M3FN.dtype)

    def f(x):
        preset = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
        how = {"precision": preset, "preferred_element_type": jnp.float32}
        return jax.lax.dot_general(x, x, PLAIN, **how)

    with pytest.raises(Exception, match="not supported"):
        lowered(f, x, platform="cpu")
    assert len(dots(lowered(f, x))) == 1  # and this is how CUDA sees it


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla", "emulate"])
def test_cpu_lowering_names_no_algorithm_and_runs(implementation):
    f, args = product_and_gradients(implementation=implementation)
    found = dots(lowered(f, *args, platform="cpu"))
    assert len(found) == 3
    operand = "f8" if implementation == "xla" else "f32"
    for dot in found:
        assert dot.algorithm is None
        assert dot.lhs.startswith(operand)
        assert dot.rhs.startswith(operand)
        assert dot.out == "f32"
    value, (dx, dw, _) = jax.jit(f)(*args)
    np.testing.assert_allclose(value, 16 * 32 * 64, rtol=1e-5)
    np.testing.assert_allclose(dx, np.full((16, 32), 64), rtol=1e-5)
    np.testing.assert_allclose(dw, np.full((32, 64), 16), rtol=1e-5)


def test_trap_emulation_on_a_gpu_keeps_f32():
    """The default precision would let a GPU round the operands to TF32, and sum in fewer bits."""
    f, args = product_and_gradients(implementation="emulate")
    found = dots(lowered(f, *args))
    assert found == [Dot("f32", "f32", "f32", None, "HIGHEST, HIGHEST")] * 3


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_trap_scales_along_the_contraction(platform):
    """No f8 product can take them, and bf16 rounds values that any f32 scale may make: three do."""

    def f(x, w):
        q_x = jfp8.quantize(x, granularity=jfp8.Block((1, 8)))
        return jfp8.scaled_matmul(q_x, jfp8.quantize(w), PLAIN)

    (dot,) = dots(lowered(f, jnp.ones((16, 32)), jnp.ones((32, 64)), platform=platform))
    assert (dot.lhs, dot.rhs, dot.out) == ("f32", "f32", "f32")
    if platform == "rocm":  # the reference
        assert (dot.algorithm, dot.precision) == (None, "HIGHEST, HIGHEST")
    else:
        assert "num_primitive_operations = 3" in dot.algorithm
        assert "lhs_precision_type = bf16" in dot.algorithm


def test_trap_quantize_dequantize_is_not_what_the_compiler_sees():
    """XLA:GPU compiles it to bf16 or TF32 products: the control for what this file looks for."""

    def f(x, w):
        return jfp8.quantize(x).dequantize() @ jfp8.quantize(w).dequantize()

    (dot,) = dots(lowered(f, jnp.ones((16, 32)), jnp.ones((32, 64))))
    assert (dot.lhs, dot.rhs, dot.algorithm) == ("f32", "f32", None)


@pytest.mark.slow
def test_one_trace_lowers_to_either_platform():
    """If it is said for which: the choice is made at lowering, by one switch for each product."""
    f, args = product_and_gradients()
    with jfp8.for_platforms("cpu", "cuda"):
        traced = jax.jit(f).trace(*args)
    assert str(traced.jaxpr).count("platform_index") == 3
    cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert {(dot.lhs, dot.rhs, dot.out) for dot in dots(cuda)} == {("bf16", "bf16", "f32")}
    assert all(dot.algorithm is None for dot in dots(cpu))
