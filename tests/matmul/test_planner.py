"""The door to the chips: a made-up one is added with one class, and a misspelt name is an error."""

import importlib
import inspect
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jfp8
from jfp8.layers import transformer_math
from jfp8.matmul.planner import NAMED, Planner, planner_of
from jfp8.tracing.device import PLANNERS
from jfp8.tracing.devices import Chip, Gpu
from jfp8.training.model_histories import over_products
from support.devices import traced_for

X, W = jnp.linspace(-1, 1, 512).reshape(16, 32), jnp.linspace(-3, 2, 1024).reshape(32, 32)


class MadeUpChip(Planner):
    """Multiply as the reference does, then double."""

    def multiply(self, lhs, rhs, spec):
        return 2 * super().multiply(lhs, rhs, spec)

    def add(self, x, y):
        return x - y

    def over_stacked(self, function, arguments):
        return [self.device.platform, *super().over_stacked(function, arguments)]


@pytest.fixture(params=["named", "described"])
def on_the_chip(request, monkeypatch):
    """Return a context in which programs are traced for the made-up chip."""
    monkeypatch.setitem(PLANNERS, "made_up", "made_up_chip.MadeUpChip")
    monkeypatch.setitem(sys.modules, "made_up_chip", SimpleNamespace(MadeUpChip=MadeUpChip))
    chip = AbstractDevice(device_kind="", num_cores=None, platform="made_up")
    if request.param == "named":
        return jfp8.for_platforms("made_up")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=chip))


def test_another_chip_is_one_class(on_the_chip):
    product = lambda x, w: jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), recipe="current")
    gradient = jax.value_and_grad(lambda x, w: jnp.sum(product(x, w)), (0, 1))
    value, (dx, _) = gradient(X, W)
    with on_the_chip:
        traced = jax.make_jaxpr(gradient)(X, W)
        difference = transformer_math.residual_sum(X, 3 * X)
        listed = over_products(jnp.negative, [(X,)])
        attended = jfp8.scaled_dot_product_attention(*[X.reshape(1, 16, 2, 16)] * 3)
    doubled, dx_of_chip, _ = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, X, W)
    assert doubled == 2 * value != 0
    np.testing.assert_array_equal(dx_of_chip, 2 * dx)
    np.testing.assert_array_equal(difference, X - 3 * X)
    assert listed[0] == "made_up"
    # The reference computes all that it does not override.
    on_a_cpu = jfp8.scaled_dot_product_attention(*[X.reshape(1, 16, 2, 16)] * 3)
    np.testing.assert_array_equal(attended, on_a_cpu)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("over_staked", "over_stacked"), ("mutliply", "multiply"), ("rate", "rated")],
)
def test_a_misspelt_name_is_an_error(misspelt, meant):
    words = rf"^Chip\.{misspelt} overrides nothing of Planner. Did you mean '{meant}'\?"
    with pytest.raises(TypeError, match=words):
        type("Chip", (Planner,), {misspelt: None})
    assert type("Chip", (Planner,), {meant: None, "_helper": None})().device is None


@pytest.mark.parametrize("chip", sorted({*PLANNERS.values(), *filter(None, NAMED.values())}))
def test_methods_of_chips_have_the_arguments_of_the_reference(chip):
    module, _, name = chip.rpartition(".")
    planner = getattr(importlib.import_module(module), name)
    for method, _ in inspect.getmembers(Planner, inspect.isfunction):
        found, expected = (getattr(each, method) for each in (planner, Planner))
        names = [list(inspect.signature(each).parameters) for each in (found, expected)]
        assert names[0] == names[1], method


@pytest.mark.parametrize("device", [None, Chip("unheard"), Gpu("", None)])
def test_emulate_is_the_reference_everywhere(device):
    assert planner_of(device, "emulate") == Planner(device)
    assert (type(planner_of(device)) is Planner) is not isinstance(device, Gpu)


def test_times_are_expected_for_a_gpu_with_rates_alone():
    rated = planner_of(Gpu("NVIDIA H200", (9, 0)))
    others = planner_of(None), planner_of(Gpu("NVIDIA A100", (8, 0)))
    assert "H200" in rated.rated
    with traced_for("NVIDIA H200"):
        assert rated.expected_times((5e10, 1e8), "one").gain > 0
        assert [planner.expected_times((5e10, 1e8), "one") for planner in others] == [None, None]
