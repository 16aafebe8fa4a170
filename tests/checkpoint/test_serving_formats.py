"""Files that engines read: MXFP8, MXFP4 and NVFP4, against values that their libraries give."""

import dataclasses
import json
import shutil
import sys
import weakref
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jfp8
from jfp8 import ScaledArray, checkpoint
from jfp8.checkpoint.torch_layout import Tensors
from support.arrays import assert_same
from support.checkpoints import (
    dequantized,
    in_two_processes,
    published,
    quantized,
    raw,
)

FOLDER = Path(__file__).parents[1] / "data" / "fp8_checkpoints"
CRC32 = json.loads((FOLDER / "crc32.json").read_text())
CHECKSUMS = json.loads((FOLDER / "checksums.json").read_text())


@pytest.mark.parametrize("name", CRC32 | CHECKSUMS)
def test_values_are_those_of_the_library_that_wrote_them(name):
    tensors, _ = checkpoint.load_fp8_safetensors(FOLDER / name)
    stored, noted = raw(FOLDER / name), CRC32.get(name) or CHECKSUMS[name]
    block = (16, 16) if name == "compressed_block" else None
    assert {n for n, x in tensors.items() if isinstance(x, ScaledArray)} == noted.keys()
    for weight, note in noted.items():
        expected = published(stored, weight, block)
        if name in CRC32:
            assert zlib.crc32(expected.tobytes()) == note
        else:
            places = np.arange(1, expected.size + 1, dtype=np.float64)
            assert np.sum(expected.reshape(-1) * places) == pytest.approx(note, rel=1e-9)
        assert np.count_nonzero(expected) > expected.size / 2
        values = np.asarray(dequantized(tensors[weight]))
        if weight + "_global_scale" in stored:  # its f32 values are quotients, ours are products
            ulps = values.view(np.int32).astype(np.int64) - expected.view(np.int32)
            assert np.abs(ulps).max() <= 2
            values, expected = (x.astype(ml_dtypes.bfloat16) for x in (values, expected))
        np.testing.assert_array_equal(values, expected)
        if weight + "_scale_2" not in stored:
            np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))
    others = {n for n in stored if not n.startswith(tuple(noted))}
    assert others == tensors.keys() - noted.keys()
    for other in others:
        assert_same(np.asarray(tensors[other]), stored[other])


@pytest.mark.parametrize("name", CRC32 | CHECKSUMS)
def test_what_was_read_is_written_byte_for_byte(name, tmp_path):
    tensors, style = checkpoint.load_fp8_safetensors(FOLDER / name)
    shutil.copy(FOLDER / name / "config.json", tmp_path)
    checkpoint.save_fp8_safetensors(tmp_path, tensors, style)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path, FOLDER / name))
    assert ours == theirs
    single = FOLDER / name / "model.safetensors"
    if single.exists():
        assert (tmp_path / "model.safetensors").read_bytes() == single.read_bytes()
    assert_same(raw(tmp_path), raw(FOLDER / name))


def test_what_went_through_a_model_is_written_byte_for_byte(tmp_path):
    """An outer scale too that its reciprocal, which is in memory, would not give back."""
    stored = np.float32(1.9)
    while np.float32(1) / (np.float32(1) / stored) == stored:
        stored = np.nextafter(stored, np.float32(1))
    theirs = shutil.copytree(FOLDER / "compressed_mixed", tmp_path / "theirs") / "model.safetensors"
    content = bytearray(theirs.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    name = "model.layers.0.mlp.down_proj.weight_global_scale"
    begin, end = json.loads(content[8:start])[name]["data_offsets"]
    content[start + begin : start + end] = stored.tobytes()
    theirs.write_bytes(content)
    tensors, style = checkpoint.load_fp8_safetensors(theirs.parent)
    names = {name: name.replace(".", "/").replace("proj/weight", "proj/kernel") for name in tensors}
    params = checkpoint.to_flax_params(tensors, names)
    assert params["model"]["layers"][0]["mlp"]["down_proj"]["kernel"].shape == (64, 32)
    checkpoint.save_fp8_safetensors(tmp_path / "ours", params, style, names=names)
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == theirs.read_bytes()


def extreme(shape=(256, 128)) -> np.ndarray:
    """Blocks far apart, one of zeros, and one with a NaN."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=shape).astype(np.float32)
    w[:128] *= np.exp2(rng.integers(-40, 40, size=(128, 1)))
    w[128:] = 0
    w[130, 3] = np.nan
    return w


F32_SCALES = jfp8.recipes.Float8BlockScaling(scale_rounding=None)
WRITTEN = {
    "deepseek": {"fp8-block": F32_SCALES},
    "deepseek-v4": {"fp8-block": "block", "mxfp4": "mxfp4"},
    "per-tensor": {"fp8-tensor": "current"},
    "modelopt": {"fp8-channel": "rowwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"},
    "compressed-tensors": {
        "fp8-tensor": "current",
        "fp8-channel": "rowwise",
        "fp8-block": F32_SCALES,
        "mxfp8": jfp8.recipes.MXFP8BlockScaling(two_dimensional_weights=True),
        "mxfp4": "mxfp4",
        "nvfp4": "nvfp4",
    },
}


@pytest.mark.parametrize(("style", "kind"), [(s, k) for s, kinds in WRITTEN.items() for k in kinds])
def test_every_format_by_the_published_rule(style, kind, tmp_path):
    q = quantized(WRITTEN[style][kind], extreme())
    checkpoint.save_fp8_safetensors(tmp_path, {"up.weight": q}, style)
    expected, values = published(raw(tmp_path), "up.weight"), np.asarray(dequantized(q))
    assert 1000 < np.count_nonzero(np.isfinite(expected)) < expected.size
    if style == "compressed-tensors" and kind == "nvfp4":
        np.testing.assert_allclose(values, expected, rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(values, expected)
    again, found = checkpoint.load_fp8_safetensors(tmp_path)
    assert [layout.kind for layout in found.layouts] == [kind]
    assert_same(dequantized(again["up.weight"]), values)
    checkpoint.save_fp8_safetensors(tmp_path / "again", again, found)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()


def test_experts_of_gpt_oss_by_the_published_rule(tmp_path):
    """[experts, out, in]; the exponent of a block with a NaN is 255, which stands for NaN."""
    w = np.stack([extreme(), np.roll(extreme(), 7, 1)])
    q = jfp8.quantize(w, "e2m1", granularity=jfp8.Block((1, 32)), scale_rounding="rceil")
    checkpoint.save_fp8_safetensors(tmp_path, {"mlp.experts.up_proj": q}, "gpt-oss")
    stored = raw(tmp_path)
    assert stored["mlp.experts.up_proj_blocks"].shape == (2, 256, 4, 16)
    assert stored["mlp.experts.up_proj_scales"].shape == (2, 256, 4)
    assert np.count_nonzero(stored["mlp.experts.up_proj_scales"] == 255) == 2
    expected = published(stored, "mlp.experts.up_proj")
    assert np.count_nonzero(np.isnan(expected)) == 64
    np.testing.assert_array_equal(expected, dequantized(q))
    again, _ = checkpoint.load_fp8_safetensors(tmp_path)
    assert_same(again["mlp.experts.up_proj"], jax.tree.map(np.asarray, q))


def test_f32_scales_of_blocks_do_not_pass_through_bf16(tmp_path):
    q = quantized(F32_SCALES, np.random.default_rng(0).normal(size=(512, 512)))
    assert np.mean(q.scale != q.scale.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9
    checkpoint.save_fp8_safetensors(tmp_path, {"a.weight": q}, "deepseek")
    assert_same(raw(tmp_path)["a.weight_scale_inv"], np.asarray(q.scale))
    tensors, _ = checkpoint.load_fp8_safetensors(tmp_path)
    assert_same(tensors["a.weight"].scale, np.asarray(q.scale))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x)))


def test_the_forward_pass_of_the_file_is_that_of_training(tmp_path):
    recipe = {"*/up": "nvfp4", "*": "mxfp8"}
    convert = lambda model: jfp8.convert(model, recipe=recipe, exempt=())
    make = lambda seed: nnx.Sequential(*(Block(nnx.Rngs(seed + i)) for i in range(2)))
    table = {f"h.{{i}}.{x}.weight": f"layers/{{i}}/{x}/kernel" for x in ("up", "down")}
    names = checkpoint.names_for(table, {"num_hidden_layers": 2, "num_attention_heads": 1})
    model, served = make(0), convert(make(7))
    params = nnx.state(model, nnx.Param)
    checkpoint.save_fp8_safetensors(
        tmp_path, params, "compressed-tensors", names=names, recipe=recipe
    )
    tensors, _ = checkpoint.load_fp8_safetensors(tmp_path)
    x = jax.random.normal(jax.random.key(0), (4, 64))
    run = nnx.jit(lambda model: model(x))
    before = run(served)
    nnx.update(served, checkpoint.to_flax_params(tensors, names))
    trained = run(convert(model))
    assert jnp.any(before != trained)
    assert jnp.any(run(model) != trained)
    np.testing.assert_array_equal(run(served), trained)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


LAYERS = {
    "model.embed_tokens.weight": (32, 128),
    "model.layers.0.self_attn.q_proj.weight": (128, 128),
    "model.layers.0.mlp.gate.weight": (8, 128),
    "model.layers.0.mlp.up_proj.weight": (256, 128),
    "model.norm.weight": (128,),
}
KEPT = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]


def layers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in LAYERS.items()}


@pytest.mark.parametrize(
    ("style", "recipe", "key"),
    [
        ("deepseek", F32_SCALES, "modules_to_not_convert"),
        ("per-tensor", "current", "modules_to_not_convert"),
        ("compressed-tensors", "mxfp4", "ignore"),
        ("modelopt", "nvfp4", "ignore"),
    ],
)
def test_every_layer_in_high_precision_is_named(style, recipe, key, tmp_path):
    """The head too where it is the embedding: an engine has a layer for it."""
    recipe = {"model/embed_tokens": None, "*/gate": None, "*": recipe}
    checkpoint.save_fp8_safetensors(tmp_path, layers(), style, recipe=recipe)
    assert config_of(tmp_path)[key] == KEPT
    tensors, _ = checkpoint.load_fp8_safetensors(tmp_path)
    quantized = {name for name, x in tensors.items() if isinstance(x, ScaledArray)}
    assert quantized == {name for name in LAYERS if "_proj" in name}


def test_a_config_of_mixed_formats(tmp_path):
    """Groups of compressed-tensors name their layers; modelopt has an entry for each."""
    recipe = {"model/embed_tokens": None, "*/gate": None, "*/self_attn/*": "rowwise", "*": "nvfp4"}
    tensors = layers() | {"model.layers.0.mlp.up_proj.input_global_scale": np.ones(1, np.float32)}
    checkpoint.save_fp8_safetensors(tmp_path / "a", tensors, "compressed-tensors", recipe=recipe)
    config = config_of(tmp_path / "a")
    assert (config["format"], config["ignore"]) == ("mixed-precision", KEPT)
    groups = {group["targets"][0]: group for group in config["config_groups"].values()}
    q, up = (groups[f"model.layers.0.{n}"] for n in ("self_attn.q_proj", "mlp.up_proj"))
    assert (q["format"], up["format"]) == ("float-quantized", "nvfp4-pack-quantized")
    assert (q["weights"]["strategy"], q["input_activations"]["strategy"]) == ("channel", "token")
    assert (up["weights"]["group_size"], up["input_activations"]["dynamic"]) == (16, "local")
    checkpoint.save_fp8_safetensors(tmp_path / "b", layers(), "modelopt", recipe=recipe)
    config = config_of(tmp_path / "b")
    assert (config["quant_algo"], config["ignore"]) == ("MIXED_PRECISION", KEPT)
    assert {name: layer["quant_algo"] for name, layer in config["quantized_layers"].items()} == {
        "model.layers.0.self_attn.q_proj": "FP8_PER_CHANNEL_PER_TOKEN",
        "model.layers.0.mlp.up_proj": "W4A16_NVFP4",
    }


def test_experts_in_fp4_beside_layers_in_fp8_as_deepseek_has_them(tmp_path):
    tensors = {"layers.0.attn.wkv.weight": layers()["model.layers.0.self_attn.q_proj.weight"]}
    tensors["layers.0.ffn.experts.0.w1.weight"] = layers()["model.layers.0.mlp.up_proj.weight"]
    recipe = {"*/experts/*": "mxfp4", "*": "block"}
    checkpoint.save_fp8_safetensors(tmp_path, tensors, "deepseek-v4", recipe=recipe)
    config, stored = config_of(tmp_path), raw(tmp_path)
    assert (config["expert_dtype"], config["scale_fmt"]) == ("fp4", "ue8m0")
    assert config["weight_block_size"] == [128, 128]
    assert {name: (x.dtype.name, x.shape) for name, x in stored.items()} == {
        "layers.0.attn.wkv.weight": ("float8_e4m3fn", (128, 128)),
        "layers.0.attn.wkv.scale": ("float8_e8m0fnu", (1, 1)),
        "layers.0.ffn.experts.0.w1.weight": ("int8", (256, 64)),
        "layers.0.ffn.experts.0.w1.scale": ("float8_e8m0fnu", (256, 4)),
    }
    again, style = checkpoint.load_fp8_safetensors(tmp_path)
    assert [layout.kind for layout in style.layouts] == ["mxfp4", "fp8-block"]
    for name in tensors:
        np.testing.assert_array_equal(dequantized(again[name]), published(stored, name))
        assert np.any(published(stored, name))


def test_a_tensor_is_made_where_it_is_written(tmp_path):
    """Never more at once than fit into a file; each file has whole weights."""
    made: list[str] = []
    alive: list[int] = []

    def maker(name):
        def make():
            made.append(name)
            q = jfp8.quantize(jnp.full((32, 64), 3.0), granularity=jfp8.PerAxis(0))
            q = jax.tree.map(np.asarray, q)
            weakref.finalize(q.data, lambda: alive.remove(1))
            alive.append(1)
            assert len(alive) <= 3
            return q

        return make

    names = [f"layers.{i}.weight" for i in range(12)]
    tensors = Tensors({name: maker(name) for name in names})
    save = partial(checkpoint.save_fp8_safetensors, style="compressed-tensors")
    save(tmp_path, tensors, max_shard_size=5000)
    assert made == names
    assert len(list(tmp_path.glob("model-*-of-00006.safetensors"))) == 6
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(index[name] == index[name + "_scale"] for name in names)
    again, _ = checkpoint.load_fp8_safetensors(tmp_path)
    assert np.all(np.asarray(again["layers.7.weight"]) == 3)
    save(tmp_path, {names[0]: tensors[names[0]]})  # one file takes the place of an index
    assert len(checkpoint.load_fp8_safetensors(tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("style", "recipe"),
    [
        ("deepseek", F32_SCALES),
        ("compressed-tensors", {"h/0": "mxfp4", "h/1": "rowwise", "*": "nvfp4"}),
        ("modelopt", {"h/0": None, "*": "nvfp4"}),
    ],
)
def test_the_stream_is_the_file(style, recipe, tmp_path):
    """Array for array, without a second weight in memory; `config` is that of config.json."""
    alive: list[int] = []
    counts: list[int] = []

    def maker(i):
        def make():
            w = np.random.default_rng(i).normal(size=(64, 128)).astype(np.float32)
            weakref.finalize(w, alive.pop)
            alive.append(1)
            counts.append(len(alive))
            return w

        return make

    tensors = Tensors({f"h.{i}.weight": maker(i) for i in range(4)})
    stream, found = checkpoint.serving_tensors(tensors, style, recipe=recipe), {}
    for name, array in stream:
        assert name not in found
        found[name] = np.array(array)
        del array
    assert counts == [1, 1, 1, 1]
    checkpoint.save_fp8_safetensors(tmp_path, tensors, style, recipe=recipe, max_shard_size=20_000)
    assert_same(found, raw(tmp_path))
    assert all(any(x.tobytes()) for x in found.values())
    assert stream.config() == config_of(tmp_path)
    assert next(iter(stream))[0] == next(iter(found))  # it begins again


def main(directory: Path, address: str, process: int) -> None:
    """One of two processes, each with a part of each parameter."""
    jax.distributed.initialize(address, 2, process)
    mesh = jax.make_mesh((2,), ("data",))

    def create() -> dict[str, Any]:
        layers = {f"layers_{i}": {"kernel": jnp.asarray(x.T)} for i, x in enumerate(parts())}
        return jfp8.quantize_params(layers, "nvfp4")

    specs = lambda x: PartitionSpec("data") if x.ndim == 2 else PartitionSpec()
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, specs(x)), jax.eval_shape(create))
    params = jax.jit(create, out_shardings=shardings)()
    assert not params["layers_0"]["kernel"].data.is_fully_addressable
    names = {f"layers.{i}.weight": f"layers_{i}/kernel" for i in range(3)}
    checkpoint.save_fp8_safetensors(
        directory / "run", params, "modelopt", names=names, max_shard_size=1500
    )
    print("all is there", flush=True)


def parts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(32, 64)).astype(np.float32) for _ in range(3)]


@pytest.mark.slow
def test_several_processes_write_files_of_one_checkpoint(tmp_path):
    in_two_processes(__file__, tmp_path, devices=1)
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 3
    tensors, _ = checkpoint.load_fp8_safetensors(tmp_path / "run")
    for i, x in enumerate(parts()):
        q = quantized("nvfp4", x)
        assert_same(tensors[f"layers.{i}.weight"].data, np.asarray(q.data))
        np.testing.assert_array_equal(tensors[f"layers.{i}.weight"], q)


def test_what_a_style_has_not(tmp_path):
    save, w = partial(checkpoint.save_fp8_safetensors, tmp_path), jnp.ones((64, 64))
    tensors = {"a.weight": quantized("mxfp4", w)}
    with pytest.raises(
        ValueError, match=r"'deepseek-v4', 'gpt-oss', 'compressed-tensors'\), or quantize"
    ):
        save(tensors, "modelopt")
    with pytest.raises(ValueError, match="alone. mxfp4 of 1 x 32. Save it in"):
        save({"a.weight": quantized("rowwise", w)}, "gpt-oss")
    with pytest.raises(ValueError, match="'a' is fp8-tensor without a calibrated .*: add it, or"):
        save({"a.weight": quantized("current", w)}, "modelopt")
    with pytest.raises(ValueError, match="E5M2.*has .FP8 in E4M3 alone. fp8-tensor. Save"):
        save({"a.weight": jfp8.quantize(w, "e5m2")}, "per-tensor")
    taken = {"a.weight": quantized("nvfp4", 7 * w), "a.weight_global_scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match="'a.weight_global_scale' is taken by the scale of"):
        save(taken, "compressed-tensors")
    with pytest.raises(ValueError, match=r"'b/\*' matches no layer of the model"):
        save({"a.weight": w}, "compressed-tensors", recipe={"b/*": "mxfp8"})
    q = quantized("nvfp4", w)
    row = dataclasses.replace(q, scale=ScaledArray(q.scale.data, jnp.ones((64, 1))))
    with pytest.raises(ValueError, match="cannot be stored in this style"):
        save({"a.weight": row}, "compressed-tensors")
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
