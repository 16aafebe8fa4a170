"""Programs compiled by libtpu (see `.ci/compile_for_tpus`), not executed: products in f8."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jfp8
from gpu_programs import forward_and_backward
from tpu_programs import (
    KINDS,
    WAYS,
    compile_for,
    compile_on,
    dense,
    devices_of,
    row,
    why_not,
)

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

ONE, FSDP, TENSOR = WAYS
IN_F8 = ("delayed", "current", "rowwise")
RECIPES = (*IN_F8, "block", "mxfp8")
PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
# The other recipes are close to these, tensor parallelism to FSDP, and bf16 is 1 by definition.
ROWS = {
    (ONE, "–"): "one core",
    (FSDP, "explicit"): "FSDP over 8 cores, explicit",
    (FSDP, "auto"): "FSDP over 8 cores, auto",
}


def on_the_page() -> dict[tuple[str, str, str], str]:
    """Return the times of a TPU7x relative to bf16."""
    found = {}
    for key, name in ROWS.items():
        row = rf"^- {name}: delayed (\S+), block (\S+)$"
        (times,) = re.findall(row, PAGE, re.MULTILINE)
        found |= {(*key, "delayed"): times[0], (*key, "block"): times[1]}
    return found


@pytest.fixture
def counted(add_row):
    """Adds a row to the table; the rows of a TPU7x on the page must be the same."""

    def count(kind, way, recipe, *axes):
        found = row(kind, way, recipe, *axes)
        add_row(found)
        shown = on_the_page().get((way, found["axes"], recipe))
        assert kind != "TPU7x" or shown in (None, found["time / bf16"]), found
        return dense(kind, way, recipe, *axes)

    return count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_flax(counted, kind, way):
    """What the others are compared with."""
    assert counted(kind, way, "bf16").products() == {"bf16 XLA": 3}


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_core_of_a_tpu7x(counted, recipe):
    program, bf16 = counted("TPU7x", ONE, recipe), dense("TPU7x", ONE, "bf16")
    in_blocks = recipe in ("block", "mxfp8")
    assert program.products() == {"blocks Pallas" if in_blocks else "f8 Pallas": 3}
    if in_blocks:
        assert program.megabytes < 1.35 * bf16.megabytes
        assert program.microseconds < 1.15 * bf16.microseconds
    else:
        assert program.microseconds < 0.75 * bf16.microseconds


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_core_of_a_v6e(counted, recipe):
    """It has no units for f8: nothing to gain, and little to lose."""
    program, bf16 = counted("v6e", ONE, recipe), dense("v6e", ONE, "bf16")
    assert program.microseconds < 1.12 * bf16.microseconds
    assert program.megabytes < 1.1 * bf16.megabytes


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", [FSDP, TENSOR])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_cores_with_explicit_axes(counted, kind, way, recipe):
    """Each runs the kernels on its part."""
    program, bf16 = counted(kind, way, recipe, "explicit"), dense(kind, way, "bf16")
    in_blocks = recipe in ("block", "mxfp8")
    assert program.products() == {"blocks Pallas" if in_blocks else "f8 Pallas": 3}
    assert program.weights_sent() == ({"f8e4m3fn"} if way == FSDP else set())
    assert program.sent.by_dtype().get("f32", 0) < 2**20
    assert program.megabytes < 1.5 * bf16.megabytes
    longest = 1.1 if kind == "v6e" or in_blocks else 0.75
    assert program.microseconds < longest * bf16.microseconds


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", [FSDP, TENSOR])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_cores_among_which_the_compiler_divides(counted, kind, way, recipe):
    """XLA does it all: blocks as values in bf16, all else in f8."""
    program, bf16 = counted(kind, way, recipe, "auto"), dense(kind, way, "bf16")
    in_f8 = recipe in IN_F8
    assert program.products() == {"f8 XLA" if in_f8 else "bf16 XLA": 3}
    if way == FSDP:
        assert program.weights_sent() == {"f8e4m3fn" if in_f8 else "bf16"}
    assert program.sent.by_dtype().get("f32", 0) < 2**20
    assert program.megabytes < (1.6 if in_f8 else 3.1) * bf16.megabytes


def test_transformations():
    """Kernels are batched by vmap, and repeated by loops and remat."""
    axes = {"params": 0, "fp8": 0, "fp8_sink": 0}
    lifted = {"variable_axes": axes, "split_rngs": {"params": True}}
    stacked = nn.vmap(jfp8.Dense, in_axes=0, **lifted)(256, dtype=jnp.bfloat16, recipe="delayed")
    found = compile_for("TPU7x", *split(forward_and_backward(stacked, (2, 256, 256))))
    assert found.products() == {"f8 Pallas": 3}

    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = lambda layer, x, _: (layer(x), None)
            layer = nn.remat(jfp8.Dense)(256, dtype=jnp.bfloat16, recipe="mxfp8")
            return nn.scan(body, **lifted, length=3)(layer, x, None)[0]

    found = compile_for("TPU7x", *split(forward_and_backward(Loop(), (256, 256))))
    assert set(found.products()) == {"blocks Pallas"}


@pytest.mark.filterwarnings("ignore:A loss is differentiated:UserWarning")
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_in_a_shard_map_each_core_runs_the_kernels(recipe):
    """Also where JAX tracks over which axes arrays vary."""
    layer = jfp8.Dense(256, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, recipe=recipe)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def gradient(variables, x):
        def loss(params):
            y = layer.apply({**variables, "params": params}, x)
            return jax.lax.pmean(jnp.mean(y.astype(jnp.float32) ** 2), "x")

        return jax.grad(loss)(variables["params"])

    mesh = Mesh(np.array(devices_of("TPU7x")), ("x",))
    whole, rows = PartitionSpec(), PartitionSpec("x")
    f = jax.shard_map(gradient, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
    specs = jax.tree.map(lambda _: whole, variables), rows
    found = compile_on(mesh, f, (variables, x), specs).products()
    assert sum(found.values()) == 2  # the gradient of x is not asked for
    assert all("Pallas" in kind for kind in found)


def test_sizes_that_kernels_do_not_take():
    layer = jfp8.Dense(777, dtype=jnp.bfloat16, recipe="current")
    found = compile_for("TPU7x", *split(forward_and_backward(layer, (2000, 1333))))
    assert found.products() == {"f8 XLA": 3}


def split(function_and_arguments):
    function, arguments = function_and_arguments
    return (function, *arguments)
