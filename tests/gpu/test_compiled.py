"""What the compilers for an H200 make of jfp8: FP8 products, and little beside them.

No GPU is needed, but the CUDA plugin of JAX in an environment of its own: ``.ci/compile_for_gpus``
makes it, runs these tests, and prints the counts that they leave in the report. Elsewhere all are
skipped. Nothing is executed or timed, and the autotuner, which needs a device, does not run.
"""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jfp8
from gpu_programs import (
    assert_resources,
    compile_divided,
    compile_for,
    forward_and_backward,
    why_not,
)
from jfp8 import recipes
from jfp8.kernels.cost_model import ON_HOPPER
from jfp8.kernels.quantize_and_transpose import Gradient
from jfp8.layers.transformer_math import ACTIVATIONS, Activation, projections_of
from jfp8.scaling.formats import E4M3FN, E5M2
from support.compiled_layers import (
    BF16,
    F8,
    F8_GRAD,
    F32,
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
from support.interpreter import cudnn_known

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from jfp8.kernels.hopper.grouped import grouped_matmul, grouped_outer
from jfp8.kernels.hopper.matmul import block_matmul, matmul
from jfp8.kernels.hopper.quantize import (
    quantize_lines,
    quantize_rows_in_blocks,
    quantize_tensor,
    quantize_tiles,
    row_and_column_amax,
    tensor_amax,
)
from jfp8.kernels.scales_in_kernels import scale_and_inverse

ROWS = (((1,), (1,)), ((), ()))  # both operands are rows: lhs @ rhs.T


# The reader itself: programs that are known to be bad


def scaled(q, k, scale, out=BF16, precision=lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32):
    y = lax.dot_general(q, k, ROWS, precision=precision, preferred_element_type=out)
    return y * scale.astype(out)


SQUARE = (of((4096, 4096), F8), of((4096, 4096), F8), of((), F32))
SIZE = 4096 * 4096


def converted(q, k, scale):
    return scaled(q, k, scale, out=F32).astype(BF16)


def transposed(q, k, scale):
    return scaled(q, k.T, scale)


def dequantized(q, k, scale):
    decode = lambda q: q.astype(BF16) * scale.astype(BF16)
    return lax.dot_general(decode(q), decode(k), ROWS)


# FP8 products, others, passes over outputs, transposes; bytes beside products, about.
CONTROLS = {
    scaled: (1, 0, 0, 0, 0),
    converted: (1, 0, 1, 0, SIZE * (4 + 2)),
    transposed: (1, 0, 0, 1, 2 * SIZE),  # on Hopper the contraction must be the last dimension
    dequantized: (0, 1, 0, 0, None),
}


@pytest.mark.parametrize("f", CONTROLS, ids=lambda f: f.__name__)
def test_controls(f):
    """Programs that are known to be bad, and a good one."""
    hlo = compile_for("h200", f, *SQUARE).hlo
    found = hlo.f8_products, hlo.other_products, hlo.passes_over_outputs, hlo.f8_transposes
    *expected, moved = CONTROLS[f]
    assert [*map(len, found)] == expected
    assert hlo.f32_written(SIZE) == (hlo.f8_products if f is converted else [])
    assert moved is None or hlo.bytes_beside_products == pytest.approx(moved, abs=100)


# One scale per tensor: three calls of cuBLASLt. Only from f8 to bf16 does it add a bias.

DENSE = {f"bias, {name}": ({"recipe": r}, (8192, 4096)) for name, r in PER_TENSOR.items()} | {
    "no bias, delayed": ({"use_bias": False}, (8192, 4096)),
    "bias, delayed, leading dimensions": ({}, (4, 2048, 4096)),
    "no bias, delayed, float32": ({"use_bias": False, "dtype": F32}, (8192, 4096)),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name, compiled):
    options, shape = DENSE[name]
    options = {"param_dtype": options.get("dtype", BF16)} | options
    f, args = forward_and_backward(Dense(4096, **options), shape, options["param_dtype"])
    program = compiled(f"`Dense`, {'×'.join(map(str, shape))}→4096, {name}", "h200", f, *args)
    dtype = "f32" if options["param_dtype"] == F32 else "bf16"
    assert_by_cublaslt(program, 3, 4096 * 4096, dtype=dtype)
    assert program.hlo.f8_transposes == []


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_dense_with_f32_params(name, compiled):
    """The product writes the gradient of the kernel in f32."""
    layer = jfp8.Dense(4096, dtype=BF16, use_bias=False, recipe=recipes.get(name))
    f, args = forward_and_backward(layer, (8192, 4096))
    program = compiled(f"`Dense`, 8192×4096→4096, {name}, f32 params", "h200", f, *args)
    hlo = program.hlo
    assert len(hlo.fp8_products) == 3
    assert hlo.other_products == hlo.passes_over_outputs == []
    (wgrad,) = hlo.f32_written(4096 * 4096)
    assert wgrad in hlo.fp8_products


def step_of_linen(tx, recipe):
    """A training step of a layer with f32 parameters, and its arguments."""
    model = jfp8.Dense(4096, dtype=BF16, use_bias=False, recipe=recipe)

    def make(x):
        variables = model.init(jax.random.key(0), x)
        return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    def f(state, x):
        loss = lambda variables, x: jnp.mean(model.apply(variables, x).astype(F32) ** 2)
        value, grads = jfp8.value_and_grad(loss)(state, x)
        return state.apply_gradients(grads), value

    x = of((8192, 4096), BF16)
    return f, (jax.eval_shape(make, x), x)


def step_of_nnx(tx, recipe):
    def make():
        how = {"dtype": BF16, "use_bias": False, "rngs": nnx.Rngs(0), "recipe": recipe}
        model = jfp8.nnx.Linear(4096, 4096, **how)
        return model, jfp8.nnx.Optimizer(model, tx)

    graph, state = nnx.split(nnx.eval_shape(make))

    def f(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = lambda model, x: jnp.mean(model(x).astype(F32) ** 2)
        value, grads = jfp8.nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return f, (state, of((8192, 4096), BF16))


@pytest.mark.parametrize("step", [step_of_linen, step_of_nnx])
def test_gradients_are_read_once_before_the_optimizer(step):
    """The check for Inf and NaN shares that read with clipping, and bf16 halves it."""
    size, adamw = 4096 * 4096, optax.adamw(1e-3)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def moved(tx, dtype=None):
        recipe = recipes.Float8CurrentScaling(wgrad_dtype=dtype)
        f, args = step(tx, recipe)
        specs = jax.tree.map(lambda _: PartitionSpec(), args)
        program = compile_divided("h200", {"x": 1}, f, args, specs, donated=(0,), dumped=False)
        return sum(n for _, n in program.hlo.kernels)

    assert moved(clipped) == pytest.approx(moved(adamw), abs=0.01 * size)
    # The matmul writes it, the check and the optimizer read it.
    assert moved(clipped) - moved(clipped, "bfloat16") == pytest.approx(3 * 2 * size, rel=0.01)


def moments(tx, arrays, axes, *specs):
    """Compile one update of `tx`, for arrays of one shape that are sharded by `specs` in turn."""
    params = {f"{i}": of((1024, 4096), F32) for i in range(arrays)}

    def f(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def spec(path, x):
        name = next((str(each.key) for each in path[::-1] if hasattr(each, "key")), "0")
        return specs[int(name) % len(specs)] if x.ndim else PartitionSpec()

    args = params, jax.eval_shape(tx.init, params), params
    found = jax.tree.map_with_path(spec, args)
    return compile_divided("h200", axes, f, args, found, found[:2], donated=(0, 1), dumped=False)


def test_moments_in_8_bits_move_fewer_bytes_than_in_f32():
    """In many arrays of one shape, too: a pass measures each, and one rounds it."""
    arrays, size = 16, 1024 * 4096
    one_gpu = arrays, {"x": 1}, PartitionSpec()
    wide, narrow = moments(optax.adamw(1e-3), *one_gpu), moments(jfp8.optim.adamw(1e-3), *one_gpu)
    moved = lambda p: sum(n for _, n in p.hlo.kernels) / (arrays * size)
    # Gradient, parameter and moments; then also the gradient and codes of the pass that measures.
    assert moved(wide) == pytest.approx(4 + 3 * 8, abs=0.1)
    assert moved(narrow) < 4 + 8 + 2 * 2 + 4 + 2 + 1.4  # and scales
    large = [i for i, n in narrow.hlo.kernels if n > 4 * size]
    assert len(large) == 2 * arrays
    assert not any(r.dtype == "f32" for i in large for r in i.results[1:])
    assert len(narrow.hlo.kernels) <= 2 * arrays + 12


def test_scales_of_moments_are_computed_where_they_are():
    """Two launches for an array, a few for all shards of one shape, and nothing is exchanged."""
    arrays, axes = 8, {"data": 2, "tp": 4}
    both = PartitionSpec("data", "tp"), PartitionSpec("tp", "data")
    program = moments(jfp8.optim.adamw(1e-3), arrays, axes, *both)
    assert program.audit.sent.total == 0
    assert len(program.hlo.kernels) <= 2 * arrays + 2 * 12


def test_micro_batches(compiled):
    """Products add gradients to the sums of micro-batches, in place."""
    model = jfp8.Dense(4096, dtype=BF16, use_bias=False, recipe="current")
    x = of((8192, 4096), BF16)

    def make(x):
        variables = model.init(jax.random.key(0), x)
        return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))

    def f(state, x):
        loss = lambda variables, x: jnp.mean(model.apply(variables, x).astype(F32) ** 2)
        return jfp8.value_and_grad(loss, micro_batches=4)(state, x)

    args = (jax.eval_shape(make, x), of((4 * 8192, 4096), BF16))
    name = "`Dense`, 4 micro-batches of 8192×4096→4096, current, f32 params"
    hlo = compiled(name, "h200", f, *args).hlo
    fprop, wgrad = sorted(hlo.f8_products, key=lambda call: '"beta":1' in call.attributes)
    assert '"beta":0' in fprop.attributes
    assert '"beta":1' in wgrad.attributes
    assert "output_to_operand_aliasing" in wgrad.attributes
    sums = [i for i in hlo.f32_written(4096 * 4096) if i is not wgrad]
    assert len(sums) == 2  # zeros before the loop, and the mean after it


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_statistics_leave_products_in_fp8(recipe):
    """Tensors are quantized without fused kernels for them, and multiplied as ever."""
    f, args = forward_and_backward(Dense(4096, recipe=jfp8.recipes.get(recipe)), (8192, 4096))
    program = compile_for("h200", jfp8.debug.stats(f), *args)
    assert program.hlo.other_products == []
    if recipe == "block":
        assert len(program.hlo.pallas_products) == 3
    else:
        assert len(program.hlo.f8_products) == 3


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_odd_sizes(name, compiled):
    """Padded inside. What is cut off a result is a pass over it, which also adds what was split."""
    layer = Dense(777, recipe=PER_TENSOR[name])
    f, args = forward_and_backward(layer, (2000, 1333))
    hlo = compiled(f"`Dense`, 2000×1333→777, bias, {name}", "h200", f, *args).hlo
    assert len(hlo.f8_products) == 3
    assert hlo.other_products == []
    assert len(hlo.f32_written(1333 * 777)) == 1
    assert len(hlo.passes_over_outputs) <= 3


def test_batched_product(compiled):
    numbers = (((2,), (1,)), ((0,), (0,)))
    f = gradients_of(lambda x, w: jfp8.scaled_dot_general(x, w, numbers))
    args = (of((8, 2048, 1024), BF16), of((8, 1024, 512), BF16), of((8, 2048, 512), BF16))
    program = compiled("`scaled_dot_general`, 8 of 2048×1024×512, current", "h200", f, *args)
    assert_by_cublaslt(program, 3, 8 * 1024 * 512)


def test_loop_over_layers(compiled):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Dense(4096)(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = dict.fromkeys(("params", "fp8", "fp8_sink"), 0)
            layers = nn.scan(Block, axes, split_rngs={"params": True}, length=4)
            return layers()(x, None)[0]

    f, args = forward_and_backward(Model(), (4096, 4096))
    program = compiled("`nn.scan` over `Dense`, 4096×4096→4096, delayed", "h200", f, *args)
    assert len(program.hlo.f8_products) == 3
    assert program.hlo.other_products == []
    assert {call.results[0].dtype for call in program.hlo.f8_products} == {"bf16"}
    assert program.hlo.f32_written(4096 * 4096) == []


def test_loop_over_layers_runs_no_kernel_twice(compiled):
    """XLA copies a kernel whose result is saved into the loop's stack, if others use it, too."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            options = {"use_bias": False, "recipe": "block", "dtype": BF16}
            inner, outer = (jfp8.Dense(2048, **options) for _ in range(2))
            x = inner(x)
            return x * outer(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=2)
            return layers()(x, None)[0]

    f, args = forward_and_backward(Model(), (2048, 2048))
    program = compiled("`nn.scan` over two `Dense`, 2048×2048→2048, block", "h200", f, *args)
    products = program.hlo.pallas_products
    assert [i.kernel for i in products] == ["jfp8_block_matmul"] * 6
    # The kernels of weights' gradients write into their stacks themselves.
    assert sum("dynamic-update-slice" in program.hlo.opcodes(i) for i in products) == 2


def test_attention_projections(compiled):
    """Four FP8 projections; attention's own matmuls stay in bf16. Evaluations save no operand."""
    layer = nn.MultiHeadDotProductAttention(16, dtype=BF16, param_dtype=BF16)
    layer = jfp8.convert(layer, recipes.DelayedScaling(), exempt=())
    f, args = forward_and_backward(layer, (4, 1024, 2048))
    name = "converted `nn.MultiHeadDotProductAttention`, 4×1024×2048, delayed"
    hlo = compiled(name, "h200", f, *args).hlo
    assert len(hlo.f8_products) == 4 * 3
    assert {call.results[0].dtype for call in hlo.f8_products} == {"bf16"}
    assert len(hlo.other_products) == 2 * 3
    assert hlo.mosaic_kernels
    evaluated = compiled(f"{name}, evaluated", "h200", layer.apply, *args[:2]).hlo
    assert (len(evaluated.f8_products), len(evaluated.mosaic_kernels)) == (4, 0)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_1x1_convolution(name, compiled):
    """A product of matrices in another shape. The gradient of the kernel is one long sum."""
    layer = jfp8.Conv(512, (1, 1), dtype=BF16, param_dtype=BF16, recipe=PER_TENSOR[name])
    f, args = forward_and_backward(layer, (32, 32, 32, 512))
    hlo = compiled(f"`Conv`, 1×1, 32×32×32×512→512, {name}", "h200", f, *args).hlo
    assert len(hlo.f8_products) == 3
    assert hlo.other_products == []
    assert hlo.f32_written(512 * 512) == hlo.split_products
    assert len(hlo.split_products) <= 1
    assert len(hlo.passes_over_outputs) <= 1


LAUNCHES = {"delayed": (12, 3), "current": (13, 4), "block": (7, 1)}


@pytest.mark.parametrize("recipe", LAUNCHES)
def test_launches(recipe, compiled):
    """Three that quantize and three products. The former make scales, and what products take."""
    layer = Dense(4096, use_bias=False, recipe=recipes.get(recipe))
    f, args = forward_and_backward(layer, (4096, 4096))
    hlo = compiled(f"`Dense`, 4096³, {recipe}", "h200", f, *args).hlo
    assert (len(hlo.kernels), len(hlo.small_kernels)) == LAUNCHES[recipe]


def test_transformer_layer(compiled):
    layer = jfp8.linen.TransformerLayer(
        4096, 11264, num_attention_heads=32, self_attn_mask_type="causal",
        layernorm_type="rmsnorm", use_bias=False, dtype=BF16, param_dtype=BF16,
    )  # fmt: skip
    f, args = forward_and_backward(layer, (1, 4096, 4096))
    with cudnn_known():
        hlo = compiled("`TransformerLayer`, 4096×4096, delayed", "h200", f, *args).hlo
    assert len(hlo.f8_products) == 4 * 3
    assert {call.results[0].dtype for call in hlo.f8_products} == {"bf16"}
    targets = [call.target for call in hlo.other_products]
    assert sorted(targets) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert len(hlo.kernels) <= 65
    assert_one_pass_of_rmsnorm(hlo)
    written = [r.size for made, _ in hlo.launched for r in made.results]
    assert max(written) < 32 * 4096**2  # no scores of all heads


def assert_one_pass_of_rmsnorm(hlo):
    """No kernel passes an output on, but the one that adds the gradient of RMSNorm to ``dy``."""
    (passing,) = hlo.passes_over_outputs
    assert re.search(r"wi\._normalize/add_any$", passing.op_name)
    of_rows = [i for i in hlo.hlo.inside(passing) if i.results[0].shape == (1, 4096, 1)]
    assert len(of_rows) == 2  # 1 / rms(x), and the mean over the row


MLP_MOVES = {"delayed": 2610e6, "block": 1815e6}  # all made by XLA, 3138e6 and 2528e6


@pytest.mark.parametrize("recipe", MLP_MOVES)
def test_mlp_makes_its_activation_where_it_is_quantized(recipe, compiled):
    """No kernel writes 16 bits of that size, or of its gradient's, but products."""
    layer = jfp8.LayerNormMLP(
        11264, activation="swiglu", layernorm_type="rmsnorm", use_bias=False, recipe=recipe,
        dtype=BF16, param_dtype=BF16,
    )  # fmt: skip
    f, args = forward_and_backward(layer, (4096, 4096))
    name = f"`LayerNormMLP`, 4096×4096→11264→4096, swiglu, {recipe}"
    hlo = compiled(name, "h200", f, *args).hlo
    assert len(hlo.fp8_products) == 2 * 3
    assert hlo.other_products == []
    hidden = [
        made
        for made, _ in hlo.launched
        if any(r.dtype == "bf16" and r.size >= 4096 * 11264 for r in made.results)
    ]
    assert len(hidden) == 4  # fprop and wgrad of ``wi``, dgrad and wgrad of ``wo``
    assert all(made in hlo.fp8_products for made in hidden)
    assert hlo.bytes_beside_products < MLP_MOVES[recipe]
    assert hlo.passes_over_outputs == []


COSTS = {"one": ["delayed", "current"], "rows": ["rowwise"], "blocks": ["block"]}


@pytest.mark.parametrize("scales", COSTS)
def test_costs_in_the_model_of_time(scales):
    assert_costs("h200", COSTS[scales], 1024, ON_HOPPER[scales])


@pytest.mark.parametrize("name", ["rowwise", "block", "wgrad_tiles"])
@pytest.mark.parametrize("shape", [(8192, 4096, 4096), (2000, 1333, 777)], ids=str)
def test_scales_by_row_and_block(name, shape, compiled):
    m, k, n = shape
    tiles = recipes.Float8BlockScaling(wgrad_tiles=True)
    recipe = tiles if name == "wgrad_tiles" else recipes.get(name)
    f, args = forward_and_backward(Dense(n, recipe=recipe), (m, k))
    program = compiled(f"`Dense`, {m}×{k}→{n}, bias, {name}", "h200", f, *args)
    assert len(program.hlo.fp8_products) == 3
    assert program.hlo.other_products == []
    assert not any(kernel.other_mma for kernel in program.kernels)
    if m % 128 == 0:
        assert program.hlo.f32_written(k * n) == []


@pytest.mark.parametrize("name", ["direct_e5m2", "mxfp8", "nvfp4"])
def test_other_recipes(name, compiled):
    """Where there is no FP8 product, it is one in 16 bits, which holds all values; never in f32."""
    f, args = forward_and_backward(Dense(4096, recipe=recipes.get(name)), (8192, 4096))
    program = compiled(f"`Dense`, 8192×4096→4096, bias, {name}", "h200", f, *args)
    products = [p for p in program.hlo.other_products if not is_rotation(p)]
    assert len(program.hlo.fp8_products) + len(products) == 3
    for product in products:
        assert program.hlo.factors(product) <= {"bf16", "f16", "f8e4m3fn", "f8e5m2"}


@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_experts(name, compiled):
    """By kernels for groups; by rows, a tile of each group at a time."""
    f = gradients_of_groups(name)
    args = (of((8192, 2048), BF16), of((8, 2048, 1024), BF16), of((8,), jnp.int32))
    args = (*args, of((8192, 1024), BF16))
    program = compiled(f"`scaled_ragged_dot`, 8192×2048→1024, 8 groups, {name}", "h200", f, *args)
    assert len(program.hlo.fp8_products) == 3
    assert program.hlo.other_products == []


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_mixture_of_experts(name, compiled):
    """Tokens are sorted as bytes, activations and their gradients made as they are quantized."""
    layer = jfp8.linen.MoE(8, 1024, recipe=recipes.get(name), dtype=BF16, param_dtype=BF16)
    f, args = forward_and_backward(layer, (8192, 2048))
    program = compiled(f"`MoE`, 8192×2048, 2 of 8 experts of 1024, {name}", "h200", f, *args)
    assert len(program.hlo.fp8_products) == 6
    assert len(program.hlo.other_products) == 3  # the router's, in f32
    assert program.hlo.passes_over_outputs == []
    assert program.hlo.bytes_beside_products < MOE_MOVES[name]


MOE_MOVES = {"delayed": 1510e6, "block": 1350e6}  # all made by XLA, 1573e6 and 1554e6


def assert_tensor_cores(program, products=1):
    """`products` of the kernels multiply, on FP8 tensor cores only."""
    assert sum(bool(kernel.qgmma) for kernel in program.kernels) == products
    assert len(program.hlo.fp8_products) == products
    assert not any(kernel.other_mma for kernel in program.kernels)
    assert program.hlo.other_products == []
    # Two for each part of a tile that is stored, of which there are up to 6, one where scales came
    # with the operands, and some at the start and the end: none at a copy of operands. With those
    # that Pallas adds there are 20 and more.
    assert all(kernel.barriers <= 15 for kernel in program.kernels if kernel.qgmma)


ALL_PAIRS = PAIRS | {"e5m2×e5m2": (F8_GRAD, F8_GRAD)}


@pytest.mark.parametrize(
    ("pair", "promote"), [(pair, False) for pair in ALL_PAIRS] + [(pair, True) for pair in PAIRS]
)
def test_matmul(pair, promote, compiled):
    m, n, k = 8192, 4096, 2048
    f = lambda a, b, s, t: matmul(a, b, s, t, BF16, promote=promote)
    a, b = ALL_PAIRS[pair]
    args = (of((m, k), a), of((n, k), b), of((m,), F32), of((n,), F32))
    sums = "promoted sums" if promote else "fast sums"
    program = compiled(f"kernel `matmul`, {pair}, {sums}", "h200", f, *args)
    assert_tensor_cores(program)
    types = pair.upper().split("×")
    assert all(op.split(".")[3:5] == types for op in program.kernels[0].qgmma)
    assert program.hlo.f32_written(m * n) == []
    assert program.hlo.bytes_beside_products < 1e6


@pytest.mark.parametrize("out", [BF16, F32], ids=lambda out: np.dtype(out).name)
@pytest.mark.parametrize("blocks", ["128×128 of b", "1×128", "128×128 of a"])
def test_block_matmul(blocks, out, compiled):
    m, n, k = 8192, 4096, 2048
    f = lambda a, b, s, t: block_matmul(a, b, s, t, out)
    rows_or_tiles = [(m, "a"), (n, "b")]
    counts = [size // 128 if blocks.endswith(name) else size for size, name in rows_or_tiles]
    scales = [of((k // 128, count), F32) for count in counts]
    args = (of((m, k), F8), of((n, k), F8), *scales)
    name = f"kernel `block_matmul`, {blocks}, {np.dtype(out).name}"
    assert_tensor_cores(compiled(name, "h200", f, *args))


@pytest.mark.parametrize("promote", [False, True])
def test_matmul_of_ragged_shapes(promote):
    f = lambda a, b, s, t: matmul(a, b, s, t, BF16, promote=promote)
    args = (of((1000, 333), F8), of((777, 333), F8), of((), F32), of((777,), F32))
    assert_tensor_cores(compile_for("h200", f, *args))


@pytest.mark.parametrize("with_scales", [False, True])
def test_grouped_kernels(with_scales, compiled):
    tiles, groups, n, k = 64, 8, 4096, 2048
    f = lambda a, b, group, s, t: grouped_matmul(a, b, group, s, t, BF16)
    args = (of((tiles * 128, k), F8), of((groups, n, k), F8), of((tiles,), jnp.int32))
    scales = of((k // 128, tiles * 128), F32) if with_scales else None
    args = (*args, scales, of((groups, k // 128, n // 128), F32))
    how = "1×128 and 128×128" if with_scales else "scales of matrices"
    assert_tensor_cores(compiled(f"kernel `grouped_matmul`, {how}", "h200", f, *args))

    f = lambda a, b, first, count, s, t: grouped_outer(a, b, first, count, s, t, BF16)
    args = (of((k, tiles * 128), F8), of((n, tiles * 128), F8_GRAD))
    args = (*args, of((groups,), jnp.int32), of((groups,), jnp.int32), of((tiles, k), F32))
    assert_tensor_cores(compile_for("h200", f, *args, of((tiles, n), F32) if with_scales else None))


def in_one_read(program, *arrays, written):
    """One kernel of ours reads `arrays` and writes so many bytes; what else there is, is small."""
    assert len(program.kernels) == 1
    assert program.kernels[0].qgmma == ()
    assert program.hlo.other_products == []
    least = sum(x.size * x.dtype.itemsize for x in arrays) + written
    assert (
        least <= program.hlo.bytes_beside_products < 1.07 * least
    )  # partial results, among others


def with_scale(fmt, **how):
    scale_of = lambda known: scale_and_inverse(known[0], fmt, None)
    return partial(quantize_tensor, fmt=fmt, scale_of=scale_of, with_amax=True, **how)


# Function, shape of the array, shapes of f32 vectors, bytes written for each element.
QUANTIZING = {
    "quantize_tensor": (with_scale(E5M2), (8192, 4096), [(1,)], 2),
    "quantize_lines": (
        lambda *args: quantize_lines(*args, E5M2),
        (8192, 4096),
        [(8192,), (4096,)],
        2,
    ),
    "tensor_amax": (tensor_amax, (8192, 4096), [(1,)], 0),
    "row_and_column_amax": (row_and_column_amax, (8192, 4096), [], 0),
}


@pytest.mark.parametrize("dtype", [BF16, jnp.float16, F32], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", QUANTIZING)
def test_kernels_that_quantize(name, dtype, compiled):
    f, shape, vectors, written = QUANTIZING[name]
    x = of(shape, dtype)
    more = [of(each, F32) for each in vectors]
    program = compiled(f"kernel `{name}`, {x.dtype.name}", "h200", f, x, *more)
    in_one_read(program, x, written=written * x.size)


BLOCKS = {
    "1×128, exact": (BF16, 128, None),
    "1×128, powers of two": (BF16, 128, "power_of_two"),
    "1×128, exact, from float32": (F32, 128, None),
    "1×32, E8M0": (BF16, 32, "rceil"),
    "1×32, E8M0, from float32": (F32, 32, "even"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_quantize_rows_in_blocks(name, compiled):
    dtype, block, rounding = BLOCKS[name]
    x = of((8192, 4096), dtype)
    f = lambda x: quantize_rows_in_blocks(x, E4M3FN, block, rounding)
    program = compiled(f"kernel `quantize_rows_in_blocks`, {name}", "h200", f, x)
    scales = 2 * (x.size // block) * (4 if block == 128 else 1)
    in_one_read(program, x, written=2 * x.size + scales)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("rounding", [None, "power_of_two"])
def test_quantize_tiles(rounding, dtype, compiled):
    x = of((4096, 8192), dtype)
    name = f"kernel `quantize_tiles`, {x.dtype.name}, {rounding or 'exact'}"
    program = compiled(name, "h200", lambda x: quantize_tiles(x, E4M3FN, rounding), x)
    in_one_read(program, x, written=2 * x.size)


def activation_and_input(name, gradient, m=4096, n=8192):
    """What makes an activation, or its gradient, for a kernel; and the kernel's input in bf16."""
    make, x = Activation(name), of((m, projections_of(name), n), BF16)
    return (Gradient(make), (x, of((m, n), BF16))) if gradient else (make, (x,))


@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_that_make_what_they_quantize(activation, gradient, compiled):
    """The lowering of kernels knows all that activations and their gradients consist of."""
    make, x = activation_and_input(activation, gradient)
    made = x[0].size if gradient else 4096 * 8192
    f = lambda known, *x: with_scale(E4M3FN, make=make)(x, known)
    name = f"kernel `quantize_tensor`, {'gradient of ' * gradient}{activation}, bfloat16"
    program = compiled(name, "h200", f, of((1,), F32), *x)
    in_one_read(program, *x, written=2 * made)
    find = lambda known, *x: tensor_amax(x, known, make=make)
    program = compile_for("h200", find, of((1,), F32), *x)
    assert_resources(program)
    in_one_read(program, *x, written=0)


@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("block", [128, 32])
def test_kernels_that_make_what_they_quantize_in_blocks(block, gradient, compiled):
    rounding = "power_of_two" if block == 128 else "rceil"
    make, x = activation_and_input("swiglu", gradient)
    f = lambda *x: quantize_rows_in_blocks(x, E4M3FN, block, rounding, make=make)
    name = f"1×{block}, {'gradient of ' * gradient}swiglu"
    program = compiled(f"kernel `quantize_rows_in_blocks`, {name}", "h200", f, *x)
    made = x[0].size if gradient else 4096 * 8192
    scales = 2 * made // block * (4 if block == 128 else 1)
    in_one_read(program, *x, written=2 * made + scales)


@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
def test_kernels_that_make_what_they_quantize_in_tiles(gradient, compiled):
    make, x = activation_and_input("swiglu", gradient)
    f = lambda *x: quantize_tiles(x, E4M3FN, "power_of_two", make=make)
    name = f"kernel `quantize_tiles`, {'gradient of ' * gradient}swiglu"
    made = x[0].size if gradient else 4096 * 8192
    in_one_read(compiled(name, "h200", f, *x), *x, written=2 * made + made // 4096)


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "unscaled"])
def test_xla_quantizes_without_masks(name):
    layer = Dense(4096, use_bias=False, recipe=recipes.get(name), implementation="xla")
    f, args = forward_and_backward(layer, (4096, 4096))
    hlo = compile_for("h200", f, *args).hlo
    assert len(hlo.f8_products) == 3
    assert hlo.masks(4096 * 4096) == hlo.f32_written(4096 * 4096) == []
    if name in ("delayed", "current"):
        assert hlo.bytes_beside_products < 360e6


@pytest.mark.parametrize(
    ("recipe", "scales"), [("block", (32, 32)), ("rowwise", (1, 4096))], ids=["block", "rowwise"]
)
def test_stored_weights_are_multiplied_as_they_are(recipe, scales):
    """A checkpoint of others: only the activation and the gradient are quantized."""
    layer = Dense(4096, use_bias=False, recipe=recipe)
    stored = jfp8.ScaledArray(of((4096, 4096), F8), of(scales, F32))

    def f(x, kernel, dy):
        y, back = jax.vjp(lambda x: layer.apply({"params": {"kernel": kernel}}, x), x)
        return y, back(dy)

    program = compile_for("h200", f, of((8192, 4096), BF16), stored, of((8192, 4096), BF16))
    assert len(program.hlo.pallas_products) == 2  # fprop, dgrad
    assert program.hlo.other_products == []
    assert_resources(program)
