"""What CUDA is asked to do, read from the program lowered for it on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

import jfp8

TENSOR = r"tensor<(?:\d+x)*(?P<{}>[a-z]\w*)>"
DOT = re.compile(
    r"stablehlo\.dot_general .*?(?:algorithm = <(?P<algorithm>[^>]*)>)?"
    rf" : \({TENSOR.format('lhs')}, {TENSOR.format('rhs')}\) -> {TENSOR.format('out')}"
)
E4M3, E5M2 = "f8E4M3FN", "f8E5M2"


def products(function, *args, platform: str) -> list[re.Match]:
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
    lines = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    found = [DOT.search(line) for line in lines]
    assert all(found), lines
    return found


def forward_and_backward(layer, dtype, lead):
    x = jnp.ones((*lead, 64), dtype)
    variables = layer.init(jax.random.key(0), x)

    def loss(params, sink, x):
        y = layer.apply({**variables, "params": params, "fp8_sink": sink}, x)
        return (y.astype(jnp.float32) ** 2).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    return step, (variables["params"], variables["fp8_sink"], x)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("lead", [(32,), (4, 8), (3, 5)], ids=str)
def test_a_dense_layer_is_three_f8_products(implementation, dtype, lead):
    """fprop may accumulate fast; dgrad and wgrad, whose errors add up, may not."""
    layer = jfp8.Dense(48, dtype=dtype, implementation=implementation)
    step, args = forward_and_backward(layer, dtype, lead)
    found = products(step, *args, platform="cuda")
    assert [(p["lhs"], p["rhs"], p["out"]) for p in found] == [
        (E4M3, E4M3, "f32"),
        (E5M2, E4M3, "f32"),
        (E4M3, E5M2, "f32"),
    ]
    for p, imprecise in zip(found, ("true", "false", "false"), strict=True):
        assert f"lhs_precision_type = {p['lhs']}" in p["algorithm"]
        assert f"rhs_precision_type = {p['rhs']}" in p["algorithm"]
        assert "accumulation_type = f32" in p["algorithm"]
        assert f"allow_imprecise_accumulation = {imprecise}" in p["algorithm"]


def test_e4m3_gradients_are_asked_for_as_such():
    recipe = jfp8.recipes.Float8CurrentScaling(fp8_format="E4M3")

    def loss(x, w):
        return jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe).sum()

    step, args = jax.grad(loss, argnums=(0, 1)), (jnp.ones((32, 64)), jnp.ones((64, 48)))
    assert {(p["lhs"], p["rhs"]) for p in products(step, *args, platform="cuda")} == {(E4M3, E4M3)}


@pytest.mark.parametrize(
    "dimension_numbers",
    [(((2,), (1,)), ((0,), (0,))), (((1, 2), (2, 1)), ((), ())), (((), ()), ((0,), (0,)))],
    ids=str,
)
def test_any_dimension_numbers_stay_f8(dimension_numbers):
    """Batched, with several contracting dimensions, and without any."""

    def loss(x, w):
        return jfp8.scaled_dot_general(x, w, dimension_numbers).sum()

    args = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
    found = products(jax.value_and_grad(loss, argnums=(0, 1)), *args, platform="cuda")
    assert len(found) == 3
    assert all(p["lhs"].startswith("f8") and p["rhs"].startswith("f8") for p in found)


@pytest.mark.parametrize("implementation", [None, "emulate"])
def test_on_cpu_the_reference_multiplies_f32(implementation):
    """CPU refuses named dot algorithms, so none may appear."""
    layer = jfp8.Dense(48, implementation=implementation)
    step, args = forward_and_backward(layer, jnp.float32, (32,))
    found = products(step, *args, platform="cpu")
    assert [(p["lhs"], p["rhs"], p["algorithm"]) for p in found] == [("f32", "f32", None)] * 3


def test_on_cpu_xla_multiplies_f8_without_naming_an_algorithm():
    step, args = forward_and_backward(jfp8.Dense(48, implementation="xla"), jnp.float32, (32,))
    found = products(step, *args, platform="cpu")
    assert [p["algorithm"] for p in found] == [None] * 3
    assert all(p["lhs"].startswith("f8") and p["rhs"].startswith("f8") for p in found)
    value, _ = jax.jit(step)(*args)
    assert value > 0


def test_the_reference_lowers_for_cuda_too():
    step, args = forward_and_backward(jfp8.Dense(48, implementation="emulate"), jnp.float32, (32,))
    found = products(step, *args, platform="cuda")
    assert [(p["lhs"], p["rhs"]) for p in found] == [("f32", "f32")] * 3
