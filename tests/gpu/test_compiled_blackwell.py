"""What the compilers for a B200 make of jfp8. As `test_compiled`, which is about an H200."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jfp8
from gpu_programs import compile_divided, forward_and_backward, why_not
from jfp8 import recipes
from jfp8.kernels import verdicts
from jfp8.kernels.cost_model import ON_BLACKWELL
from support.compiled_layers import (
    BF16,
    PAIRS,
    PER_TENSOR,
    Dense,
    assert_by_cublaslt,
    assert_costs,
    gradients_of,
    gradients_of_groups,
    is_rotation,
    of,
)

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_dense(name, compiled):
    f, args = forward_and_backward(Dense(4096, recipe=PER_TENSOR[name]), (8192, 4096))
    program = compiled(f"B200: `Dense`, 8192×4096→4096, bias, {name}", "b200", f, *args)
    assert_by_cublaslt(program, 3, 4096 * 4096)
    assert program.kernels == ()  # cuBLASLt takes operands in any layout


@pytest.mark.parametrize("name", ["mxfp8", "block"])
def test_blocks(name, compiled):
    """Blocks of 128 are MX blocks, too: their scales are powers of two, repeated four times."""
    f, args = forward_and_backward(Dense(4096, recipe=recipes.get(name)), (8192, 4096))
    program = compiled(f"B200: `Dense`, 8192×4096→4096, bias, {name}", "b200", f, *args)
    hlo = program.hlo
    assert len(hlo.block_products) == 3
    assert hlo.other_products == hlo.f32_written(4096 * 4096) == []
    # Kernels quantize, each tensor in one read for both directions; their code is Hopper's.
    assert len(hlo.calls_of("mosaic_gpu_v2")) == 3
    assert all("quantize" in kernel.name and not kernel.qgmma for kernel in program.kernels)
    tensors, bias = 8192 * 4096 * 2 + 4096 * 4096, 3 * 2 * 8192 * 4096  # its sum, and its gradient
    assert hlo.bytes_beside_products <= 4.4 * tensors + bias


@pytest.mark.parametrize("is_proven", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_geforce_multiplies_by_mx_instructions_where_they_passed(
    name, is_proven, compiled, tmp_path, monkeypatch
):
    """Their tensor cores have twice the rate for MX operands: here with 1 as every scale."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.clear_caches()  # programs do not change with verdicts
    if is_proven:
        path = verdicts.verdict_file("NVIDIA GeForce RTX 5090")
        path.parent.mkdir(parents=True)
        path.write_text('{"kernels": {"cudnn_mx": {"task": "MX products", "failure": ""}}}')
    f, args = forward_and_backward(Dense(4096, recipe=recipes.get(name)), (8192, 4096))
    title = f"RTX 5090{', checked' if is_proven else ''}: `Dense`, 8192×4096→4096, bias, {name}"
    hlo = compiled(title, "rtx5090", f, *args).hlo
    expected = (3, 0, 0) if is_proven else (0, 0, 3) if name == "mxfp8" else (0, 3, 0)
    found = hlo.block_products, hlo.f8_products, hlo.other_products
    assert tuple(map(len, found)) == expected


def test_mlp_makes_its_activation_where_it_is_quantized(compiled):
    """As on an H200: no kernel writes 16 bits of that size or twice that, but products."""
    layer = jfp8.LayerNormMLP(
        11264, activation="swiglu", layernorm_type="rmsnorm", use_bias=False, recipe="mxfp8",
        dtype=BF16, param_dtype=BF16,
    )  # fmt: skip
    f, args = forward_and_backward(layer, (4096, 4096))
    name = "B200: `LayerNormMLP`, 4096×4096→11264→4096, swiglu, mxfp8"
    hlo = compiled(name, "b200", f, *args).hlo
    assert len(hlo.block_products) == 2 * 3
    written = [i for i, _ in hlo.launched for r in i.results if (r.dtype, r.size) in HIDDEN]
    assert len(written) == 4
    assert all(made in hlo.block_products for made in written)


HIDDEN = [("bf16", 4096 * 11264), ("bf16", 4096 * 2 * 11264)]


@pytest.mark.parametrize("name", ["mxfp8", "block"])
def test_mixture_of_experts(name, compiled):
    """A tile of each group at a time: the products of a round are cuDNN's."""
    layer = jfp8.linen.MoE(8, 1024, recipe=recipes.get(name), dtype=BF16, param_dtype=BF16)
    f, args = forward_and_backward(layer, (8192, 2048))
    program = compiled(f"B200: `MoE`, 8192×2048, 2 of 8 experts of 1024, {name}", "b200", f, *args)
    assert len(program.hlo.fp8_products) == 6
    assert len(program.hlo.other_products) == 3  # the router's, in f32


def test_nvfp4(compiled):
    """Operands of four bits; the tensors' scales and what follows are one pass over f32 sums."""
    f, args = forward_and_backward(Dense(4096, recipe=recipes.get("nvfp4")), (8192, 4096))
    program = compiled("B200: `Dense`, 8192×4096→4096, bias, nvfp4", "b200", f, *args)
    hlo = program.hlo
    assert len(hlo.block_products) == 3
    types = [[o.results[0].dtype for o in operands] for i, operands in hlo.launched if i.target]
    assert types == 3 * [["f4e2m1fn", "f4e2m1fn", "f8e4m3fn", "f8e4m3fn"]]
    assert {call.results[0].dtype for call in hlo.block_products} == {"f32"}
    assert len(hlo.other_products) == 2
    assert all(map(is_rotation, hlo.other_products))


@pytest.mark.parametrize("pair", PAIRS)
def test_scaled_matmul(pair, compiled):
    from jfp8.kernels.blackwell.backend import scaled_matmul

    m, n, k = 8192, 4096, 2048
    f = lambda a, b, s, t: scaled_matmul(a, b, s, t, BF16)
    e8m0 = jnp.float8_e8m0fnu
    a, b = PAIRS[pair]
    args = (of((m, k), a), of((n, k), b), of((m, k // 32), e8m0), of((n, k // 32), e8m0))
    hlo = compiled(f"B200: kernel `scaled_matmul`, MX, {pair}", "b200", f, *args).hlo
    assert len(hlo.block_products) == 1
    assert hlo.block_products[0].results[0].dtype == "bf16"
    assert hlo.other_products == []


OTHERS = {name: recipes.get(name) for name in ("rowwise", "direct_e5m2")}
OTHERS["block, f32 scales"] = recipes.Float8BlockScaling(scale_rounding=None)


@pytest.mark.parametrize("name", OTHERS)
def test_other_recipes(name, compiled):
    """They compile: no kernel that multiplies with Hopper's tensor cores is asked for."""
    f, args = forward_and_backward(Dense(4096, recipe=OTHERS[name]), (8192, 4096))
    program = compiled(f"B200: `Dense`, 8192×4096→4096, bias, {name}", "b200", f, *args)
    assert len(program.hlo.fp8_products) + len(program.hlo.other_products) == 3
    assert not any(kernel.qgmma for kernel in program.kernels)


def test_trap_small_products_stay_in_bf16(compiled):
    f, args = forward_and_backward(Dense(256), (256, 256))
    program = compiled("B200: `Dense`, 256×256→256, bias, delayed", "b200", f, *args)
    assert program.hlo.fp8_products == []
    assert len(program.hlo.other_products) == 3


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "mxfp8", "nvfp4"])
def test_experts(name, compiled):
    """A tile of each group at a time: no group is multiplied by the matrices of others."""
    f = gradients_of_groups(name)
    args = of((8192, 2048), BF16), of((8, 2048, 1024), BF16), of((8,), jnp.int32)
    title = f"B200: `scaled_ragged_dot`, 8192×2048→1024, 8 groups, {name}"
    hlo = compiled(title, "b200", f, *args, of((8192, 1024), BF16)).hlo
    assert len(hlo.fp8_products) == 3
    assert all(map(is_rotation, hlo.other_products))
    assert hlo.bytes_beside_products < 1.5e9  # the body of a loop counts once


N = 4096
# On eight devices: rows of x, layout of x, of the weight, and of the result.
WAYS = {"data": (P("x"), P(), P("x")), "FSDP": (P("x"), P("x"), P("x"))}


@pytest.mark.parametrize(
    ("recipe", "way"), [("mxfp8", "data"), ("block", "FSDP"), ("nvfp4", "data")], ids=str
)
def test_on_eight_gpus(recipe, way, recorded):
    """Kernels and products are divided; what travels for the weight is a byte for each element."""
    numbers = (((1,), (0,)), ((), ()))
    f = gradients_of(lambda x, w: jfp8.scaled_dot_general(x, w, numbers, recipe=recipe))
    x, w, y = WAYS[way]
    args = of((8 * N, N), BF16), of((N, N), BF16), of((8 * N, N), BF16)
    program = compile_divided("b200", {"x": 8}, f, args, (x, w, y), (y, x, w))
    name = f"8 B200, {way}: `scaled_dot_general`, {N}³ for each, {recipe}"
    hlo = recorded(name, program).hlo
    assert len(hlo.block_products) == 3
    assert all(map(is_rotation, hlo.other_products))
    assert len(hlo.other_products) == (2 if recipe == "nvfp4" else 0)
    # Two gathers of bytes and their scales, and a scatter in bf16; or gradients that are added up.
    sent = 2 * (1 + 2 / 32) + 2 if way == "FSDP" else 2 * 2
    assert program.exchanged.total <= sent * N * N * 7 / 8 * 1.01
    if recipe != "nvfp4":
        assert hlo.bytes_beside_products <= 1.02 * 4.3 * 3 * N * N


@pytest.mark.parametrize("way", ["data", "data, shard_map"])
def test_experts_on_eight_gpus(way, recorded):
    """Tokens sorted over all devices change places first; in shard_map devices sort their own."""
    f = gradients_of_groups("mxfp8")
    rows, groups, sizes = P("x"), 8, P()
    if way != "data":
        groups, sizes = 64, P("x")
        specs = (rows, P(), sizes, rows)
        f = jax.shard_map(f, in_specs=specs, out_specs=(rows, rows, P()))
    args = of((8 * 8192, 2048), BF16), of((8, 2048, 1024), BF16), of((groups,), jnp.int32)
    args = (*args, of((8 * 8192, 1024), BF16))
    specs = (rows, P(), sizes, rows)
    program = compile_divided("b200", {"x": 8}, f, args, specs, (rows, rows, P()))
    name = f"8 B200, {way}: `scaled_ragged_dot`, 8192×2048→1024 for each, 8 groups, mxfp8"
    hlo = recorded(name, program).hlo
    assert len(hlo.block_products) == 3
    assert hlo.other_products == []


COSTS = {
    "rows": ("rowwise", 2304),
    "blocks": ("block", 1536),
    "mx": ("mxfp8", 2304),
    "nvfp4": ("nvfp4", 4096),
}


@pytest.mark.parametrize("scales", COSTS)
def test_costs_in_the_model_of_time(scales):
    name, n = COSTS[scales]
    assert_costs("b200", [name], n, ON_BLACKWELL[scales])
