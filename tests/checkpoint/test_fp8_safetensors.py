"""FP8 checkpoints of other libraries (`tools/make_fp8_checkpoints.py`): read, and written again."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jfp8
from jfp8 import checkpoint
from jfp8.checkpoint.fp8_style import styles
from jfp8.checkpoint.torch_layout import Place
from jfp8.products import dot_general
from support.arrays import assert_same
from support.checkpoints import published, raw

FOLDER = Path(__file__).parents[1] / "data" / "fp8_checkpoints"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
UP, DOWN, QUERY, OUT, NORM = (
    "model.layers.0." + name
    for name in (
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
        "input_layernorm.weight",
    )
)


def test_kernels_are_transposed_reshaped_and_stacked_without_rounding():
    tensors, _ = checkpoint.load_fp8_safetensors(FOLDER / "transformers_block")
    tensors = {name: tensors[name] for name in (UP, DOWN, QUERY, OUT, NORM)}
    tensors["second.up"] = dataclasses.replace(tensors[UP], data=tensors[UP].data[::-1])
    names = {
        UP: "up/kernel: out in -> layer=0 in out",
        "second.up": Place("up/kernel", axes="out in -> layer=1 in out"),
        DOWN: "down/kernel",
        QUERY: "query/kernel: (heads=2 depth) in -> in heads depth",
        OUT: Place("out/kernel", axes="out (heads=2 depth) -> heads depth out"),
        NORM: "norm/scale",
    }
    params = checkpoint.to_flax_params(tensors, names)
    up, query, out = (params[name]["kernel"] for name in ("up", "query", "out"))
    assert (up.shape, up.scale.shape) == ((2, 32, 48), (2, 2, 3))
    assert (query.shape, query.scale.shape) == ((32, 2, 16), (2, 2, 1))
    assert (out.shape, out.scale.shape) == ((2, 16, 32), (2, 1, 2))
    np.testing.assert_array_equal(up[0], np.asarray(tensors[UP]).T)
    np.testing.assert_array_equal(up[1], np.asarray(tensors["second.up"]).T)
    np.testing.assert_array_equal(query, np.asarray(tensors[QUERY]).T.reshape(32, 2, 16))
    np.testing.assert_array_equal(out, np.asarray(tensors[OUT]).T.reshape(2, 16, 32))
    assert params["norm"]["scale"].dtype == jnp.bfloat16
    assert_same(dict(checkpoint.from_flax_params(params, names)), tensors)


def check_layer(weight, recipe):
    """The product of jfp8's layer is that of its quantized input and of the stored values."""
    values = np.asarray(weight, np.float64).T
    params = checkpoint.to_flax_params({"w": weight}, {"w": "kernel"})
    x = jax.random.normal(jax.random.key(0), (8, values.shape[0]))
    layer = jfp8.Dense(values.shape[1], use_bias=False, recipe=recipe)
    run = jax.jit(lambda params, x: layer.apply({"params": params}, x))
    quantizer = jfp8.recipes.get(recipe).products().fprop.lhs
    sizes = {"rowwise": (1, x.shape[1]), "block": (1, 128)}[recipe]
    q = jfp8.quantize(x, granularity=jfp8.Block(sizes), scale_rounding=quantizer.scale_rounding)
    exact = np.asarray(q, np.float64) @ values
    close = {"rtol": 0, "atol": 2e-6 * np.abs(exact).max()}
    np.testing.assert_allclose(run(params, x), exact, **close)
    if quantizer.scale_rounding:  # quantized again, by such scales, its values would be others
        again = run({"kernel": jnp.asarray(values, jnp.float32)}, x)
        assert np.abs(again - exact).max() > 1e-3 * np.abs(exact).max()


def test_a_layer_multiplies_the_stored_bytes_of_rows():
    tensors, _ = checkpoint.load_fp8_safetensors(FOLDER / "compressed_channel")
    check_layer(tensors[UP], "rowwise")


def test_a_layer_multiplies_the_stored_bytes_of_blocks_that_are_cut_short(tmp_path):
    """DeepSeek-V3's kv_a_proj has 576 rows, 4.5 blocks."""
    rng = np.random.default_rng(0)
    stored = {
        "a.weight": rng.normal(size=(200, 300)).astype(E4M3),
        "a.weight_scale_inv": rng.uniform(1, 2, (2, 3)).astype(np.float32),
    }
    checkpoint.save(tmp_path / "model.safetensors", stored)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors, style = checkpoint.load_fp8_safetensors(tmp_path)
    (layout,) = style.layouts
    assert (layout.block, layout.suffixes) == ((128, 128), ("", "_scale_inv"))
    q = tensors["a.weight"]
    assert (q.scale.shape, q.block) == ((2, 3), (128, 128))
    np.testing.assert_array_equal(q, published(stored, "a.weight", (128, 128)))
    check_layer(q, "block")
    checkpoint.save_fp8_safetensors(tmp_path / "again", tensors, "deepseek")
    assert_same(raw(tmp_path / "again"), stored)


def test_trap_scales_of_others_are_no_powers_of_two(monkeypatch):
    """The recipe's own are, and bf16 would hold their products exactly."""
    seen = []
    multiply = dot_general.multiply

    def watched(lhs, rhs, spec):
        seen.append(spec.powers_of_two)
        return multiply(lhs, rhs, spec)

    monkeypatch.setattr(dot_general, "multiply", watched)
    w = jax.random.normal(jax.random.key(0), (128, 128))
    q = jfp8.quantize(w, granularity=jfp8.Block((128, 128)))
    numbers = (((1,), (0,)), ((), ()))
    for kernel in (w, q):
        f = partial(jfp8.scaled_dot_general, recipe="block", dimension_numbers=numbers)
        jax.make_jaxpr(jax.grad(lambda x, kernel, f=f: f(x, kernel).sum()))(
            jnp.ones((3, 128)), kernel
        )
    assert seen == [True, True, True, False, False]  # frozen weights have no wgrad


def changed(folder: Path, **config) -> Path:
    """A copy of a checkpoint with another quantization_config."""
    shutil.copytree(FOLDER / "transformers_block", folder)
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


INTEGERS = {"a": {"weights": {"type": "int", "num_bits": 8}}}
MXFP6 = {"a": {"weights": {"type": "float", "num_bits": 6, "strategy": "group", "group_size": 32}}}
UNKNOWN = [
    (
        {"quant_method": "awq"},
        "quant_method='awq' in quantization_config is not read here. Known: .*'fp8', ",
    ),
    ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\] in quantization_config is not read"),
    ({"fmt": "e5m2fnuz"}, "fmt='e5m2fnuz' in quantization_config is not read"),
    ({"weight_block_size": [8]}, "weight_block_size=\\[8\\] .* not a list of two sizes"),
    ({"weight_block_size": [32, 32]}, "of 32 x 32 need .* Does config.json belong to"),
    ({"expert_dtype": "nf4"}, "expert_dtype='nf4' in quantization_config is not read"),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        "quant_algo='W4A16_AWQ'.*Known: .*'NVFP4'.*Deq",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": INTEGERS},
        "weights={'type': 'int', 'num_bits': 8} in quantization_config is not read here. Known",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": MXFP6},
        "weights=.*'num_bits': 6, .* Known",
    ),
]


def test_unknown_formats_raise(tmp_path):
    for i, (config, message) in enumerate(UNKNOWN):
        with pytest.raises(ValueError, match=message):
            checkpoint.load_fp8_safetensors(changed(tmp_path / str(i), **config))


def test_damaged_checkpoints(tmp_path):
    folder = changed(tmp_path / "copy")
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"]["other"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="'other' is not in model-00001"):
        checkpoint.load_fp8_safetensors(folder)
    tree["weight_map"]["other"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="names files elsewhere"):
        checkpoint.load_fp8_safetensors(folder)
    del tree["weight_map"]["other"], tree["weight_map"][UP + "_scale_inv"]
    index.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="up_proj.weight' needs its scales, .* '_scale_inv'"):
        checkpoint.load_fp8_safetensors(folder)
    (folder / "config.json").write_text("{}")
    tree["weight_map"].pop(UP)
    index.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="has no quantization_config"):
        checkpoint.load_fp8_safetensors(folder)
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        checkpoint.load_fp8_safetensors(tmp_path)
    single = shutil.copytree(FOLDER / "modelopt_tensor", tmp_path / "single") / "model.safetensors"
    single.write_bytes(single.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: .* its data is said to be in bytes"):
        checkpoint.load_fp8_safetensors(single.parent)


def test_what_a_style_cannot_hold(tmp_path):
    q = {"w": jfp8.quantize(jnp.ones((4, 6)), granularity=jfp8.PerAxis(0))}
    save = checkpoint.save_fp8_safetensors
    with pytest.raises(ValueError, match="fp8-block of 128 x 128. Save .*'compressed-tensors'"):
        save(tmp_path, q, "deepseek")
    with pytest.raises(ValueError, match="style='fp9' is unknown. Allowed: 'deepseek', "):
        save(tmp_path, q, "fp9")
    layout = dataclasses.replace(styles()["compressed-tensors"].layouts[1], scale_dtype="bfloat16")
    narrow = dataclasses.replace(styles()["compressed-tensors"], layouts=(layout,))
    with pytest.raises(ValueError, match="not numbers of bfloat16.*scale_dtype='float32'"):
        save(tmp_path, q, narrow)
    with pytest.raises(ValueError, match="'w_scale' is taken by the scale of 'w'"):
        save(tmp_path, q | {"w_scale": np.ones(1)}, "compressed-tensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["compressed_tensor", "modelopt_tensor"])
def test_trap_a_config_that_promises_scales_of_activations(name, tmp_path):
    """A server would take them from files that have none."""
    tensors, style = checkpoint.load_fp8_safetensors(FOLDER / name)
    weights = {name: x for name, x in tensors.items() if not name.endswith("input_scale")}
    with pytest.raises(ValueError, match=r"calibrated scales of activations \(input_scale\), but"):
        checkpoint.save_fp8_safetensors(tmp_path, weights, style)
    assert not list(tmp_path.iterdir())
    checkpoint.save_fp8_safetensors(tmp_path, weights, "per-tensor")


def test_mistakes_in_names():
    q = jfp8.quantize(jnp.ones((6, 4)), granularity=jfp8.Block((2, 2)))
    to = checkpoint.to_flax_params
    with pytest.raises(ValueError, match="tensors without a place in names: .'a'.*None leaves it"):
        to({"a": q}, {})
    with pytest.raises(ValueError, match="names without one of the tensors: .'b'"):
        to({"a": q}, {"a": None, "b": None})
    with pytest.raises(ValueError, match="'a': An array of shape .6, 4. .* cuts blocks"):
        to({"a": q}, {"a": Place("kernel", axes="(a=2 b) i -> i a b")})
    with pytest.raises(ValueError, match="gets two tensors; 'b' is the second"):
        to({"a": q, "b": q}, {"a": "kernel", "b": "kernel"})
    with pytest.raises(ValueError, match="'kernel' has no layer=0, but indices must count from 0"):
        to({"a": q}, {"a": "kernel: o i -> layer=1 i o"})
    short = jfp8.quantize(jnp.ones((5, 4)), granularity=jfp8.Block((2, 2)))
    with pytest.raises(ValueError, match="a stack cannot hold them. Use layers without nn.scan"):
        to({"a": short}, {"a": "kernel: o i -> layer=0 i o"})
    with pytest.raises(ValueError, match="parameters without a place in names: .'bias'"):
        checkpoint.from_flax_params({"bias": q}, {"a": None})
