"""Under ``jit`` with shardings over eight H200 every product is FP8: see `test_compiled.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from gpu_programs import compile_divided, forward_and_backward, why_not
from jfp8 import recipes
from jfp8.linen import MoE
from support.compiled_layers import gradients_of, gradients_of_groups
from support.interpreter import cudnn_known

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


BF16, F32 = jnp.bfloat16, jnp.float32
N = 4096
RECIPES = ["delayed", "current", "rowwise", "block"]
layer_options = {"dtype": BF16, "param_dtype": BF16, "use_bias": False}

# On eight devices: rows of x, layout of x, of the weight, and of the result; bytes that a device
# sends, in units of N * N, where a ring takes (8 - 1) / 8 of an array.
WAYS = {
    "data": ((8 * N, N, N), P("x"), P(), P("x"), 2 * 2),  # gradients in bf16, added up
    "FSDP": ((8 * N, N, N), P("x"), P("x"), P("x"), 1 + 2),  # a gather of bytes, and one scatter
    "by columns": ((N, N, 8 * N), P(), P(None, "x"), P(None, "x"), 2 * 2),  # gradients of x
    "by rows": ((N, 8 * N, N), P(None, "x"), P("x"), P(), 2 * 2),  # results
}


def times(x, w, recipe):
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return jfp8.scaled_dot_general(x, w, numbers, recipe=recipe)


def layer_on_devices(layer, shape, kernel, x, y):
    """Arguments of `compile_divided` for a layer; `kernel` gives the layout of a path's weight."""

    def spec(path, leaf):
        return kernel(jax.tree_util.keystr(path)) if path[-1].key == "kernel" else P()

    f, args = forward_and_backward(layer, shape)
    variables = jax.tree_util.tree_map_with_path(spec, args[0])
    gradients = {name: tree for name, tree in variables.items() if name != "fp8"}
    return f, args, (variables, x, y), (y, (gradients, x))


def bound_on_bytes(recipe):
    """What quantizing three tensors of N x N takes: bytes read and written for each element."""
    # A read in bf16 and two writes in f8, after a pass that only reads: for amaxes of now, or none
    # once there is a history. With scales of rows, blocks and histories 3 percent more.
    return 1.03 * 3 * N * N * (4 if recipe == "block" else 6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dense(recipe, way, compiled_for_eight):
    (m, k, n), x, w, y, sent = WAYS[way]
    layer = jfp8.Dense(n, recipe=recipes.get(recipe), **layer_options)
    if way == "FSDP" and recipe in ("rowwise", "block"):
        sent += 1  # bytes that are scaled for each direction, or multiplied by our kernels
    program = compiled_for_eight(
        f"8 GPUs, {way}: `Dense`, {N}³ for each, {recipe}",
        {"x": 8},
        *layer_on_devices(layer, (m, k), lambda _: w, x, y),
    )
    hlo = program.hlo
    assert len(hlo.fp8_products) == 3
    assert hlo.other_products == []
    assert hlo.passes_over_outputs == hlo.rounded_scales == []
    assert hlo.masks(N * N) == []
    # FSDP divides a weight along the sum of the forward product. There its parts must lie side by
    # side, but arrive one after the other; or bytes that the backward pass needs are transposed.
    assert len(hlo.f8_transposes) == (1 if way == "FSDP" else 0)
    assert hlo.bytes_beside_products <= bound_on_bytes(recipe)
    assert program.exchanged.total == pytest.approx(sent * N * N * 7 / 8, rel=0.01)


@pytest.mark.parametrize("way", ["data", "FSDP"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_gradients_of_f32_params_travel_in_bf16(recipe, way):
    """Half as many bytes as in f32; what arrives is cast."""
    (m, k, n), x, w, y, sent = WAYS[way]
    layer = jfp8.Dense(n, dtype=BF16, use_bias=False, recipe=recipes.get(recipe))
    program = layer_on_devices(layer, (m, k), lambda _: w, x, y)
    program = compile_divided("h200", {"x": 8}, *program)
    sent += way == "FSDP" and recipe == "block"
    assert len(program.hlo.fp8_products) == 3
    assert program.hlo.other_products == []
    assert program.exchanged.total == pytest.approx(sent * N * N * 7 / 8, rel=0.01)


def test_a_dimension_may_be_one_block():
    """Shardy takes no factor of size 1 for the number of blocks."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    args = of(8 * 512, 128), of(128, 512), of(8 * 512, 512)
    f = gradients_of(partial(times, recipe="block"))
    program = compile_divided("h200", {"x": 8}, f, args, (P("x"), P(), P("x")))
    assert len(program.hlo.fp8_products) == 3
    assert program.hlo.other_products == []


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_explicit_axes(recipe):
    """Where shardings are part of types; data by two, columns by four."""
    f = gradients_of(partial(times, recipe=recipe))
    of = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    args = of(8, 2048, N), of(N, 2 * N), of(8, 2048, 2 * N)
    specs = P("x"), P(None, "y"), P("x", None, "y")
    program = compile_divided("h200", {"x": 2, "y": 4}, f, args, specs, None, AxisType.Explicit)
    assert len(program.hlo.fp8_products) == 3
    assert program.hlo.other_products == program.hlo.f8_transposes == []


@pytest.mark.parametrize("way", ["data", "FSDP", "by columns", "experts"])
def test_explicit_axes_send_what_automatic_ones_do(way):
    """The same matmuls in FP8, and the same collectives of everything large."""
    if way == "experts":
        layer = MoE(8, 1024, expert_axis="x", capacity_factor=1.25, dtype=BF16, param_dtype=BF16)
        where = lambda path: P("x") if "router" not in path else P()
        program = layer_on_devices(layer, (8 * 8192, 2048), where, P("x"), P("x"))
    else:
        (m, k, n), x, w, y, _ = WAYS[way]
        program = layer_on_devices(jfp8.Dense(n, **layer_options), (m, k), lambda _: w, x, y)

    def counts(kind):
        found = compile_divided("h200", {"x": 8}, *program, kind)
        large = [c for c in found.exchanged.collectives if c.elements > 2**14]
        sent = sorted((c.op, c.dtype, c.elements) for c in large)
        return len(found.hlo.fp8_products), len(found.hlo.other_products), sent

    assert counts(AxisType.Explicit) == counts(AxisType.Auto)


def test_muon_orthogonalizes_its_share_in_fp8():
    """Eight stacked matrices with sharded rows: 15 matmuls, and parts are exchanged three times."""
    shape = jax.ShapeDtypeStruct((8, N // 2, N), F32)
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)

    options = {"muon_weight_dimension_numbers": numbers, "products": "current"}

    def update(grads, state, params):
        share = NamedSharding(jax.sharding.get_abstract_mesh(), P("x"))
        return jfp8.optim.muon(0.02, **options, sharding=share).update(grads, state, params)

    state, rows = jax.eval_shape(jfp8.optim.muon(0.02, **options).init, shape), P(None, "x")
    specs = jax.tree.map(lambda leaf: rows if len(leaf.shape) == 3 else P(), state)
    args, places = (shape, state, shape), (rows, specs, rows)
    program = compile_divided("h200", {"x": 8}, update, args, places, (rows, specs))
    assert len(program.hlo.fp8_products) == 15
    assert program.hlo.other_products == []
    sent = (4 + 4 + 2) * 8 * N * N / 2 / 8 * 7 / 8  # two summands of the momentum, and the result
    assert program.exchanged.total == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(("recipe", "n"), [("current", 512), ("rowwise", 512), ("block", 1024)])
def test_sequences_of_odd_length_stay_on_their_devices(recipe, n):
    """Zeros after their rows shift no shards, so JAX's attention finds q, k and v sharded alike.

    Blocks of tokens reach over the ends of sequences: devices exchange the rows of these blocks.
    """

    def attend(params, x):
        product = lambda x, name: times(x, params[name], recipe)
        heads = lambda y: jnp.pad(y, ((0, 0), (0, 1), (0, 0))).reshape(8, 2048, -1, 128)
        q, k, v = (heads(product(x, name)) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.mean(product(y[:, :2047].reshape(x.shape), "o").astype(F32) ** 2)

    of = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    params = {"q": of(n, n), "k": of(n, 128), "v": of(n, 128), "o": of(n, n)}
    specs = jax.tree.map(lambda _: P("x"), params)
    with cudnn_known():
        args = {"x": 8}, jax.grad(attend), (params, of(8, 2047, n)), (specs, P("x")), specs
        program = compile_divided("h200", *args)
    assert len(program.hlo.fp8_products) == 4 + 1 + 4  # x has no gradient
    large = {c.op: c.elements for c in program.exchanged.collectives if c.elements > 2**14}
    assert large.pop("collective-permute", 0) <= (3 * 8 * n if recipe == "block" else 0)
    assert set(large) == {"all-gather", "reduce-scatter"}  # weights and their gradients


def test_results_are_scattered_to_parts_of_sequences():
    """As with sequence parallelism: partial sums are not added up on devices that need a part."""
    layer = jfp8.Dense(N, recipe="current", **layer_options)
    forward, args = lambda variables, x: layer.apply(variables, x), (4, 2048, N)
    _, (variables, x, _) = forward_and_backward(layer, args)
    specs = jax.tree.map(lambda leaf: P("model") if leaf.size == N * N else P(), variables)
    specs = (specs, P("data", None, "model")), P("data", "model")
    axes = {"data": 2, "model": 4}
    program = compile_divided("h200", axes, forward, (variables, x), *specs)
    assert len(program.hlo.fp8_products) == 1
    large = [(c.op, c.dtype) for c in program.exchanged.collectives if c.elements > 2**14]
    assert large == [("reduce-scatter", "bf16")]


@pytest.mark.parametrize(("recipe", "fp8"), [("current", 3), ("rowwise", 3), ("block", 0)])
def test_inside_of_shard_map_over_one_axis(recipe, fp8):
    """The compiler divides columns by four; it has no rules for kernels there."""
    f, rows = gradients_of(partial(times, recipe=recipe)), P("data")
    mapped = jax.shard_map(
        f, in_specs=(rows, P(), rows), out_specs=(rows, rows, P()), axis_names={"data"}
    )
    of = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    args = of(2 * N, N), of(N, 4 * N), of(2 * N, 4 * N)
    specs = rows, P(None, "model"), P("data", "model")
    with pytest.warns(UserWarning, match="Make all axes manual, or none"):
        hlo = compile_divided("h200", {"data": 2, "model": 4}, mapped, args, specs).hlo
    assert (len(hlo.fp8_products), len(hlo.other_products)) == (fp8, 3 - fp8)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_grouped_products(recipe, compiled_for_eight):
    """Tokens that are sorted over all devices change places first, in bf16."""
    f, of = gradients_of_groups(recipe), jax.ShapeDtypeStruct
    args = of((8 * 8192, 2048), BF16), of((8, 2048, 1024), BF16), of((8,), jnp.int32)
    program = compiled_for_eight(
        f"8 GPUs, data: `scaled_ragged_dot`, 8192×2048→1024 for each, 8 groups, {recipe}",
        {"x": 8},
        f,
        (*args, of((8 * 8192, 1024), BF16)),
        (P("x"), P(), P(), P("x")),
        (P("x"), P("x"), P()),
    )
    assert len(program.hlo.fp8_products) == 3
    assert program.hlo.other_products == []


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_experts(recipe, compiled_for_eight):
    """One of eight experts on each: tokens arrive in f8, results return in bf16."""
    of_recipe = {"recipe": recipes.get(recipe), "dtype": BF16, "param_dtype": BF16}
    layer = MoE(8, 1024, expert_axis="expert", capacity_factor=1.25, **of_recipe)
    where = lambda path: P("expert") if "router" not in path else P()
    program = compiled_for_eight(
        f"8 GPUs, experts: `MoE`, 8192×2048 for each, 8 experts of 1024, {recipe}",
        {"expert": 8},
        *layer_on_devices(layer, (8 * 8192, 2048), where, P("expert"), P("expert")),
    )
    assert len(program.hlo.fp8_products) == 6
    assert len(program.hlo.other_products) == 3  # the router's, in f32
    assert program.hlo.passes_over_outputs == []
    sent = [c for c in program.exchanged.collectives if c.op == "ragged-all-to-all"]
    codes, results = ([c for c in sent if c.dtype.startswith(t)] for t in ("f8", "bf16"))
    assert len(codes) == len(results) == 2
    # Scales of blocks, where there are some, are bytes.
    scales = [c for c in sent if c.dtype == "u8"]
    assert len(sent) == 4 + len(scales) == (6 if recipe == "block" else 4)
    assert sum(c.bytes for c in codes + scales) <= 0.27 * 4 * sum(c.elements for c in codes) * 7 / 8


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_transformer_layer(recipe, compiled_for_eight):
    """FSDP by two and tensor parallel by four, at the width of a model of 7B."""
    layer = jfp8.TransformerLayer(
        hidden_size=N,
        mlp_hidden_size=11264,
        num_attention_heads=32,
        recipe=recipes.get(recipe),
        **layer_options,
    )

    def split(path):
        if "out" in path or "wo" in path:
            return P("tp", None, "fsdp") if "out" in path else P("tp", "fsdp")
        return P("fsdp", "tp") if "qkv" in path else P("fsdp", None, "tp")

    with cudnn_known():
        program = compiled_for_eight(
            f"8 GPUs, FSDP×TP 2×4: `TransformerLayer`, 2×2048×{N}, {recipe}",
            {"fsdp": 2, "tp": 4},
            *layer_on_devices(layer, (2, 2048, N), split, P("fsdp"), P("fsdp")),
        )
    assert len(program.hlo.fp8_products) == 12
    targets = [call.target for call in program.hlo.other_products]
    assert sorted(targets) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    gathered = [c for c in program.exchanged.collectives if c.op == "all-gather"]
    assert {c.dtype for c in gathered if c.elements > 2**20} == {"f8e4m3fn"}


def test_weights_of_eight_gpus_are_gathered_as_bytes():
    """Under plain jit: one byte for each element, once in either loop; gradients are scattered."""
    recipe, layers = "current", 4
    specs = {name: P("fsdp") for name in ("wi", "wo")}
    policy = jax.checkpoint_policies.save_only_these_names("fp8_saved")

    def layer(x, params):
        tree = {name: {"kernel": w} for name, w in params.items()}
        whole = jfp8.gather_weights(tree, "fsdp", specs, recipe=recipe)
        product = lambda x, name: times(x, whole[name]["kernel"], recipe)
        return x + product(jnp.tanh(product(x, "wi")), "wo"), None

    def loss(params, x):
        x, _ = lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, params)
        return jnp.mean(x.astype(F32) ** 2)

    params = {
        "wi": jax.ShapeDtypeStruct((layers, 2048, 4096), F32),
        "wo": jax.ShapeDtypeStruct((layers, 4096, 2048), F32),
    }
    layout = {"wi": P(None, "fsdp"), "wo": P(None, "fsdp")}
    x = jax.ShapeDtypeStruct((16384, 2048), BF16)
    program = compile_divided(
        "h200", {"fsdp": 8}, jax.grad(loss), (params, x), (layout, P("fsdp")), layout
    )
    collectives = program.exchanged.collectives
    elements = lambda op, dtype: sum(
        c.elements for c in collectives if (c.op, c.dtype) == (op, dtype)
    )
    assert elements("all-gather", "u8") == 4 * 2048 * 4096
    assert elements("all-gather", "f32") == elements("all-gather", "bf16") == 0
    assert elements("reduce-scatter", "f32") == 2 * 2048 * 4096 // 8
    assert elements("all-reduce", "f32") <= 1  # the loss
