"""The planning calculator, against arrays and compiled programs at small sizes."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.command_line import plan
from jfp8.command_line.parser import main
from jfp8.optim import Blocks, ScaledFloat16, adam, muon, state_shardings
from support.scripts import imported

ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH = 16, 64


lm = imported("lm.model", "examples")
# Two layers of width 128: every array is a multiple of the blocks of 128.
SIZE = plan.Model(width=128, layers=2, vocabulary=256, sequence=LENGTH, batch=BATCH)


def transformer(size, **options):
    return lm.Transformer(size.width, size.layers, 8, size.sequence, **options)


def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))


def loss_of(model, variables, tokens):
    logits = model.apply(variables, tokens)
    targets = jax.nn.one_hot(tokens, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, targets).mean()


def mesh_of(**sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


@pytest.mark.slow
def test_parameters_are_those_of_the_model():
    for s in (SIZE, plan.Model(96, 3, 256, 40, 4)):
        params = shapes_of(transformer(s))["params"]
        assert sum(p.size for p in jax.tree.leaves(params)) == s.parameters


def kernels_of_blocks(params):
    numbers = optax.contrib.MuonDimensionNumbers()
    is_one = lambda path: re.search("(qkv|out|up|down).*kernel", jax.tree_util.keystr(path))
    found = lambda path, _: numbers if is_one(path) else None
    return jax.tree_util.tree_map_with_path(found, params)


def held_by_one_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("BF16", optax.adam(1e-3)),
        ("ADAM", adam(1e-3)),
        ("O2", adam(1e-3, mu=Blocks(), nu=ScaledFloat16())),
        ("MUON", muon(1e-3, muon_weight_dimension_numbers=kernels_of_blocks)),
    ],
    ids=["f32 moments", "jfp8.optim.adam", "O2", "jfp8.optim.muon"],
)
def test_weights_and_moments_of_one_device(name, optimizer):
    """Of real arrays on 8 devices. Small arrays keep f32 moments: here they are 0.3 % of all."""
    s = plan.Model(width=512, layers=1, vocabulary=256, sequence=LENGTH, batch=1)
    mesh = mesh_of(fsdp=4, tensor=2)

    def sharding(path, p):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        if re.search("(qkv|up|head)/kernel", path):
            return NamedSharding(mesh, P("fsdp", "tensor"))
        return NamedSharding(mesh, P("tensor", "fsdp") if "kernel" in path else P("fsdp"))

    model = transformer(s)
    shapes = shapes_of(model)["params"]
    shardings = jax.tree_util.tree_map_with_path(sharding, shapes)
    zeros = lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), shapes)
    params = jax.jit(zeros, out_shardings=shardings)()
    of_state = state_shardings(optimizer, shapes, shardings)
    state = jax.jit(optimizer.init, out_shardings=of_state)(params)

    memory = plan.memory(s, plan.Devices(fsdp=4, tensor=2), getattr(plan, name))
    assert held_by_one_device(params) == memory["weights"] == memory["gradients"]
    assert held_by_one_device(state) == pytest.approx(memory["moments"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PRODUCTS", "SAVED"])
def test_activations_kept_for_the_backward_pass(name):
    """Of a layer in bf16: all arrays that `jax.vjp` holds, except for parameters and constants."""
    saved = jfp8.E4M3FN if name == "SAVED" else None
    s = plan.Model(width=256, layers=1, vocabulary=256, sequence=48, batch=3, head_size=32)
    layer = jfp8.TransformerLayer(
        hidden_size=s.width,
        mlp_hidden_size=s.mlp * s.width,
        num_attention_heads=8,
        self_attn_mask_type="causal",
        use_bias=False,
        dtype=jnp.bfloat16,
        saved_activations=saved,
    )
    x = jax.ShapeDtypeStruct((s.batch, s.sequence, s.width), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    params, _ = variables.pop("params"), variables.pop("fp8_sink")

    def residuals(params, x, state):
        forward = lambda params, x: layer.apply({"params": params, **state}, x)
        return jax.tree.leaves(jax.vjp(forward, params, x)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, x, variables).jaxpr
    parameters = jaxpr.invars[: len(jax.tree.leaves(params))]
    computed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    of_literals = (e for e in jaxpr.eqns if all(isinstance(v, Literal) for v in e.invars))
    constants = {v for equation in of_literals for v in equation.outvars}
    kept = [v.aval for v in computed - set(parameters) - constants]
    counted = sum(a.size * a.dtype.itemsize for a in kept)
    precision = getattr(plan, name)
    saved = plan.saved_per_layer(s, plan.Devices(), precision)
    assert counted == pytest.approx(saved + s.kernels * precision.kernels, rel=1e-3)


def sent(compiled, dtypes=None):
    """Bytes that a device sends, as `jfp8.debug.collective_bytes` finds them in the program."""
    found = jfp8.debug.collective_bytes(compiled).by_dtype()
    return sum(n for dtype, n in found.items() if dtypes is None or dtype in dtypes)


def f32_where(precision, *fields):
    """Return `precision` with four bytes for an element in these places."""
    return dataclasses.replace(precision, **dict.fromkeys(fields, 4))


def planned(precision, **axes):
    return plan.wire(SIZE, plan.Devices(**axes), precision)


F32 = f32_where(plan.BF16, "reduced")


@pytest.mark.slow
def test_data_parallel():
    """One all-reduce of every gradient, and of the loss: in f32, or as bytes in blocks."""
    model, mesh = transformer(SIZE), mesh_of(data=8)
    gradient = jax.value_and_grad(partial(loss_of, model))
    whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = jax.jit(gradient, in_shardings=(whole, divided), out_shardings=whole)
    in_f32 = step.lower(shapes_of(model), TOKENS).compile()
    assert planned(F32, data=8)["fsdp"] == planned(F32, data=8)["tensor"] == 0
    assert sent(in_f32) == pytest.approx(planned(F32, data=8)["data"], rel=1e-3)

    step = jax.jit(jfp8.data_parallel(gradient, "data", mesh=mesh))
    in_fp8 = step.lower(shapes_of(model), TOKENS).compile()
    expected = planned(plan.O1, data=8)["data"]
    assert sent(in_fp8, {"u8"}) == pytest.approx(expected, rel=5e-3)
    assert sent(in_fp8) == pytest.approx(expected, rel=5e-3)
    assert expected < 0.27 * planned(F32, data=8)["data"]


def fsdp_program(gather):
    """Every parameter lies in 8 parts; `gather` makes those of a layer whole in the loop."""
    recipe = jfp8.recipes.Float8CurrentScaling()
    model = transformer(SIZE, recipe=recipe, scan_layers=True, gather=gather)
    params = shapes_of(model)["params"]
    specs = {name: jax.tree.map(lambda _: P("fsdp"), tree) for name, tree in params.items()}
    specs["blocks"] = jax.tree.map(lambda _: P(None, "fsdp"), params["blocks"])

    def loss(parts, tokens):
        whole = {name: gather_f32(part) for name, part in parts.items() if name != "blocks"}
        return loss_of(model, {"params": {**whole, "blocks": parts["blocks"]}}, tokens)

    how = {"mesh": mesh_of(fsdp=8), "in_specs": (specs, P("fsdp")), "out_specs": specs}
    step = jax.shard_map(jax.grad(loss), check_vma=False, **how)
    return jax.jit(step).lower(params, TOKENS).compile()


def gather_f32(parts):
    return jax.tree.map(lambda p: jax.lax.all_gather(p, "fsdp", tiled=True), parts)


def gather_fp8(parts, gradients_as=None):
    specs = jax.tree.map(lambda _: P("fsdp"), parts)
    recipe = jfp8.recipes.Float8CurrentScaling()
    return jfp8.gather_weights(parts, "fsdp", specs, recipe=recipe, gradients_as=gradients_as)


OTHERS = ("gathered_others", "scattered_others")  # than kernels: in f32 here


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "precision", "codes"),
    [
        (gather_f32, f32_where(plan.BF16, "gathered", "scattered", *OTHERS), 0),
        (gather_fp8, f32_where(plan.GATHER, "scattered", *OTHERS), 2),
        (
            partial(gather_fp8, gradients_as=jfp8.E4M3FN),
            f32_where(plan.SCATTER, *OTHERS),
            3 + 4 / 128,
        ),
    ],
    ids=["f32", "weights in FP8", "gradients too"],
)
def test_fsdp(gather, precision, codes):
    """Of kernels `codes` bytes per element: gathered forward and backward, and scattered."""
    compiled = fsdp_program(gather)
    assert sent(compiled, {"u8"}) == codes * 7 / 8 * SIZE.kernels
    assert sent(compiled) == pytest.approx(planned(precision, fsdp=8)["fsdp"], rel=0.01)


@pytest.mark.slow
def test_tensor_parallel():
    """Sums of partial products: activations of the batch, (4 layers + 1) times."""
    model, mesh = transformer(SIZE), mesh_of(tensor=8)

    def spec(path, p):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if re.search("(qkv|up|head)/kernel", name):
            return NamedSharding(mesh, P(None, "tensor"))
        return NamedSharding(mesh, P("tensor") if re.search("(out|down)/kernel", name) else P())

    variables = shapes_of(model)
    shardings = jax.tree_util.tree_map_with_path(spec, variables)
    whole = NamedSharding(mesh, P())
    step = jax.jit(
        jax.value_and_grad(partial(loss_of, model)),
        in_shardings=(shardings, whole),
        out_shardings=(whole, shardings),
    )
    counted = sent(step.lower(variables, TOKENS).compile())
    expected = planned(f32_where(plan.BF16, "exchanged"), tensor=8)
    assert expected["data"] == expected["fsdp"] == 0
    assert counted == pytest.approx(expected["tensor"], rel=0.01)


def test_times_by_hand():
    """Round numbers: 48 k elements of kernels, 1024 tokens, everything at one unit per second."""
    model = plan.Model(width=64, layers=1, vocabulary=100, sequence=32, batch=32)
    assert model.kernels == 12 * 64**2 == 49152
    unit = {"data": 1.0, "fsdp": 1.0, "tensor": 1.0}
    devices = plan.Devices(data=2, fsdp=2, tensor=2)
    bf16 = plan.seconds(model, devices, plan.BF16, plan.Rates(1.0, 2.0, 1.0, unit))
    fp8 = plan.seconds(model, devices, plan.PRODUCTS, plan.Rates(1.0, 2.0, 1.0, unit))
    layers, logits, attention = 6 * 49152 * 1024, 6 * 6400 * 1024, 6 * 1024 * 32 * 64
    assert bf16["products"] == (layers + logits + attention) / 8
    assert fp8["products"] == (layers / 2 + logits + attention) / 8

    # Per device: kernels and logits in quarters, tables in halves; f32 and 16 bits.
    tables = (100 + 32) * 64 + 3 * 2 * 64
    share = (49152 + 6400) / 4 + tables / 2
    assert bf16["optimizer"] == share * (2 * 4 + 4 + 2 * 8)
    assert bf16["data"] == 2 * 1 / 2 * share * 2
    whole = (49152 + 6400) / 2 + tables
    assert bf16["fsdp"] == 1 / 2 * 2 * (2 * 49152 / 2 + 6400 / 2 + tables + whole)
    assert bf16["tensor"] == 5 * 2 * 1 / 2 * (1024 / 4 * 64) * 2

    sent = bf16["data"] + bf16["fsdp"] + bf16["tensor"]
    assert bf16["in_turn"] == bf16["products"] + sent + bf16["optimizer"]
    assert bf16["overlapped"] == bf16["products"] + bf16["tensor"] + bf16["optimizer"]
    slow = plan.Rates(1.0, 2.0, 1.0, {**unit, "data": 1e-5})
    waiting = plan.seconds(model, devices, plan.BF16, slow)
    assert waiting["overlapped"] == pytest.approx(
        bf16["data"] * 1e5 + bf16["fsdp"] + bf16["tensor"] + bf16["optimizer"]
    )


def test_the_command_line(capsys):
    sizes = "--width 4096 --layers 32 --vocabulary 32768 --sequence 4096 --batch 256 --fsdp 8"
    main(["plan", *sizes.split(), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["parameters"] == 12 * 4096**2 * 32 + (2 * 32768 + 4096 + 65 * 2) * 4096
    assert [row["precision"] for row in printed["plan"]] == [p.name for p in plan.PRECISIONS]
    main(["plan", *sizes.split()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("6.73 G parameters, 1,048,576 tokens in a step, 8 devices")
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(plan.PRECISIONS)
    assert len({line.count("|") for line in table}) == 1
    bf16, *others = [row["memory"] for row in printed["plan"]]
    assert f"{sum(bf16.values()) / 1e9:.1f} " in table[2]
    assert all(sum(o.values()) < sum(bf16.values()) for o in others)


def test_the_table_of_the_page_is_what_the_command_prints(capsys):
    page = (ROOT / "docs/scaling_out.md").read_text()
    (command,) = re.findall(r"\$ python -m jfp8 plan ((?:.*\\\n)*.*)\n", page)
    main(["plan", *command.replace("\\\n", " ").split()])
    head, table = capsys.readouterr().out.strip().split("\n\n")
    assert head in page
    heading, _, *printed = table.splitlines()
    shown = page[page.index(heading) :].split("\n\n")[0].splitlines()
    assert set(shown) <= set(table.splitlines())
    assert len(shown) > 2 + len(printed) // 2
