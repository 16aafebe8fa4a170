"""Grouped products by kernels for Hopper: lowered for a GPU that is described, and interpreted."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import recipes
from jfp8.kernels import grouped_kernels as by_kernels
from jfp8.quantizers.quantizer import Current
from jfp8.recipes.product import Product
from support.devices import lowered_for, needs_mosaic


def value_and_gradients(recipe, implementation=None, state=None, sink=None):
    def f(x, w, dy, sizes):
        def product(x, w):
            return jfp8.scaled_ragged_dot(
                x, w, sizes, recipe=recipe, implementation=implementation, state=state
            )

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    return f


def operands(m, groups, k, n, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=s) for s in ((m, k), (groups, k, n), (m, n)))
    w *= 2.0 ** rng.integers(-2, 3, size=(groups, 1, 1))  # a scale of its own for each
    return [jnp.asarray(a, dtype) for a in (x, w, dy)]


@needs_mosaic
@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "recipe",
    [recipes.DelayedScaling(), recipes.Float8BlockScaling(), recipes.Float8CurrentScaling()],
    ids=lambda recipe: recipe.name,
)
def test_on_hopper_nothing_is_multiplied_outside_of_kernels(recipe):
    shapes = ((2048, 512), (4, 512, 384), (2048, 384))
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    text = lowered_for("NVIDIA H200", value_and_gradients(recipe), *args, sizes)
    assert "mosaic_gpu_v2" in text
    assert "dot_general" not in text
    assert "ragged_dot" not in text
    if recipe.name != "block":
        by_xla = value_and_gradients(recipe, "xla")
        assert "mosaic_gpu_v2" not in lowered_for("NVIDIA H200", by_xla, *args, sizes)


@needs_mosaic
@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        (recipes.Float8CurrentScaling(), [150, 0, 40]),
        (recipes.Float8BlockScaling(), [0, 130, 60]),
        # Powers of two of any size would round nearly all values alike.
        (recipes.Float8BlockScaling(scale_rounding=None, wgrad_tiles=True), [0, 130, 60]),
    ],
    ids=["current", "block", "tiles"],
)
def test_kernels_compute_what_the_reference_does(recipe, sizes):
    """Tiles that are cut short, an empty group, and rows of no group."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x, w, dy = operands(200, 3, 96, 72)
    sizes = jnp.array(sizes)
    expected = jax.jit(value_and_gradients(recipe, "emulate"))(x, w, dy, sizes)
    with plgpu.force_gpu_interpret_mode():
        found = jax.jit(value_and_gradients(recipe, "mosaic_gpu"))(x, w, dy, sizes)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(b).max() > 1
        assert (np.abs(a - b) <= 2**-7 * np.abs(b)).all()  # another order of f32 sums: one bf16 ulp
        assert (a != b).mean() < 0.01
    assert not np.asarray(found[0], np.float32)[190:].any()
    assert not np.asarray(found[2], np.float32)[list(sizes).index(0)].any()


@needs_mosaic
@pytest.mark.representative(1)
def test_on_a_cpu_they_are_refused_by_name():
    x, w, dy = operands(64, 2, 64, 64)
    f = value_and_gradients(recipes.Float8CurrentScaling(), "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="runs on CUDA"):
        jax.jit(f)(x, w, dy, jnp.array([32, 32]))


# The matmuls that kernels compute: asked as if this JAX had them.

CURRENT, ROUNDED = Current(jfp8.E4M3FN), Current(jfp8.E4M3FN, "power_of_two")
BOTH = Product(CURRENT, CURRENT)
RAW_IN_WGRAD, OTHER_IN_WGRAD = (
    recipes.PerOperand(fprop=BOTH, dgrad=BOTH, wgrad=Product(lhs, CURRENT))
    for lhs in (None, ROUNDED)
)


@pytest.fixture
def why_not(monkeypatch):
    """The question, as if every GPU were a Hopper; `on` says why it would be none."""

    def ask(recipe, rhs=None, on=None):
        backend = replace(by_kernels.mosaic.BACKEND, why_not_on=lambda gpu: on)
        monkeypatch.setattr(by_kernels, "mosaic", SimpleNamespace(BACKEND=backend))
        return by_kernels.why_not_grouped_kernels(recipe, rhs is not None, None)

    return ask


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.DelayedScaling(),
        recipes.Float8CurrentScaling(),
        recipes.Float8BlockScaling(),
        recipes.Float8BlockScaling(wgrad_tiles=True),
        recipes.Unscaled(),
    ],
    ids=repr,
)
def test_what_they_compute(why_not, recipe):
    assert why_not(recipe) is None
    assert why_not(recipe, on="a GPU of another kind") == "a GPU of another kind"
    stored = jfp8.quantize(jnp.ones((2, 4, 4)))
    assert "stored in FP8" in why_not(recipe, stored)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (recipes.RowwiseScaling(), "whose lhs is quantized as Rowwise"),
        (recipes.MXFP8BlockScaling(), "whose lhs is quantized as Blockwise"),
        (recipes.NVFP4BlockScaling(), "rotated"),
        (RAW_IN_WGRAD, "whose lhs is quantized as Current"),
        (OTHER_IN_WGRAD, "whose lhs is quantized as Current"),
        (recipes.DelayedScaling(accumulation="hopper"), "accumulation='hopper'"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_they_do_not_compute(why_not, recipe, reason):
    assert reason in why_not(recipe)
