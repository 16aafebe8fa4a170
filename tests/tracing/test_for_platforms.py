"""Programs for other platforms than this host's."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jfp8
from jfp8.matmul.emulate import emulated
from jfp8.tracing.device import PLANNERS, current_device
from jfp8.tracing.devices import Gpu, Several, Tpu


def product(x, w):
    return jfp8.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), recipe="current")


OPERANDS = (jnp.linspace(-1, 1, 512).reshape(16, 32), jnp.linspace(-3, 2, 1024).reshape(32, 32))


@pytest.mark.parametrize(
    ("platforms", "device"),
    [
        (("cpu",), None),
        (("cuda",), Gpu("", None)),
        (("rocm",), Gpu("", None, platform="rocm")),
        (("tpu",), Tpu("TPU")),
        (("cuda", "cpu"), Several(("cpu", "cuda"))),
    ],
)
def test_the_device_is_that_of_the_platforms(platforms, device):
    with jfp8.for_platforms(*platforms):
        assert current_device() == device
    assert current_device() is None


@pytest.mark.parametrize("platforms", [(), ("gpu",), ("cpu", "GPU")])
def test_unknown_platforms_are_refused(platforms):
    with pytest.raises(ValueError, match="for_platforms takes any of"):
        jfp8.for_platforms(*platforms)


def test_emulation_on_another_platform_is_not_silent():
    f = jax.jit(jax.grad(lambda x, w: product(x, w).sum()))
    with pytest.warns(UserWarning, match=r"emulated, and slow.*for_platforms\('cuda'\)"):
        f.trace(*OPERANDS).lower(lowering_platforms=("cuda",))
    with warnings.catch_warnings(), jfp8.for_platforms("cuda"):
        warnings.simplefilter("error")
        lowered = f.trace(*OPERANDS).lower(lowering_platforms=("cuda",))
    assert "f8E4M3FN" in lowered.as_text()


def test_a_program_for_a_gpu_computes_the_reference_elsewhere():
    with jfp8.for_platforms("cuda"):
        traced = jax.jit(product).trace(*OPERANDS)
    found = traced.lower(lowering_platforms=("cpu",)).compile()(*OPERANDS)
    np.testing.assert_array_equal(found, product(*OPERANDS))
    assert np.any(found)


def test_an_export_for_several_platforms_has_one_switch_for_a_product():
    with jfp8.for_platforms("cpu", "cuda"):
        assert str(jax.make_jaxpr(product)(*OPERANDS)).count("platform_index") == 1
        exported = jax.export.export(jax.jit(product), platforms=["cpu", "cuda"])(*OPERANDS)
    np.testing.assert_array_equal(exported.call(*OPERANDS), product(*OPERANDS))
    assert np.any(product(*OPERANDS))


class MadeUpChip:
    """Multiply as the reference does, then double."""

    multiply = staticmethod(lambda lhs, rhs, spec: 2 * emulated(lhs, rhs, spec))
    plan = staticmethod(lambda spec: None)


@pytest.mark.parametrize("how", ["named", "described"])
def test_another_chip_is_one_line_in_the_table_of_planners(how, monkeypatch):
    gradient = jax.value_and_grad(lambda x, w: jnp.sum(product(x, w)), (0, 1))
    value, (dx, _) = gradient(*OPERANDS)
    monkeypatch.setitem(PLANNERS, "made_up", "made_up_chip")
    monkeypatch.setitem(sys.modules, "made_up_chip", MadeUpChip)
    chip = AbstractDevice(device_kind="", num_cores=None, platform="made_up")
    described = use_abstract_mesh(AbstractMesh((), (), abstract_device=chip))
    with jfp8.for_platforms("made_up") if how == "named" else described:
        traced = jax.make_jaxpr(gradient)(*OPERANDS)
    doubled, dx_of_chip, _ = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *OPERANDS)
    assert doubled == 2 * value != 0
    np.testing.assert_array_equal(dx_of_chip, 2 * dx)
