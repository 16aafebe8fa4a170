"""Programs for other platforms than this host's."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.tracing.device import current_device
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
