"""Exported checkpoints, also of trained models, opened by the libraries whose formats they have.

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 \\
        nvidia-modelopt==0.47.0 accelerate==1.15.0 requests
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfp8
from jfp8 import ScaledArray, checkpoint
from support import other_libraries as others
from support.checkpoints import quantized

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs
# A weight with a zero block, blocks far apart, and a NaN.
EXTREMES = "model.layers.1.mlp.up_proj.weight"
F32_SCALES = jfp8.recipes.Float8BlockScaling(scale_rounding=None)
MIXED = {"*/attn": "rowwise", "layers/0/mlp/*": "mxfp4", "*/down_proj": "nvfp4", "*": "mxfp8"}
RECIPES: dict[str, tuple[str, Any]] = {
    "deepseek": ("deepseek", F32_SCALES),
    "deepseek, powers of two": ("deepseek", "block"),
    "one scale": ("compressed-tensors", "current"),
    "channels": ("compressed-tensors", "rowwise"),
    "blocks": ("compressed-tensors", F32_SCALES),
    "MXFP8, rceil": ("compressed-tensors", "mxfp8"),
    "MXFP8, floor": ("compressed-tensors", jfp8.recipes.MXFP8BlockScaling(scale_rounding="floor")),
    "MXFP4": ("compressed-tensors", "mxfp4"),
    "NVFP4": ("compressed-tensors", "nvfp4"),
    "mixed": ("compressed-tensors", MIXED),
}


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    w = tensors[EXTREMES]
    w[:128] *= np.exp2(rng.integers(-30, 30, size=(128, 1)))
    w[128:] = 0
    w[3, 5] = np.nan
    return tensors


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """The names of tunix's Qwen3, its parameters, and that model of transformers."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**others.CONFIG))
    tensors = weights_of({name: tuple(x.shape) for name, x in plain.state_dict().items()})
    names = checkpoint.names_for("tunix/qwen3", others.CONFIG)
    return names, checkpoint.to_flax_params(tensors, names), plain


@pytest.mark.parametrize("case", RECIPES)
def test_a_model_that_others_open_has_our_values(case, qwen3, tmp_path):
    names, params, plain = qwen3
    style, recipe = RECIPES[case]
    recipe = {"lm_head": None, **(recipe if isinstance(recipe, dict) else {"*": recipe})}
    (tmp_path / "config.json").write_text(json.dumps(others.CONFIG | {"dtype": "float32"}))
    checkpoint.save_fp8_safetensors(
        tmp_path, params, style, names=names, recipe=recipe, max_shard_size=200_000
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, _ = checkpoint.load_fp8_safetensors(tmp_path)
    quantized = {name for name, x in ours.items() if isinstance(x, ScaledArray)}
    assert quantized == {name for name in names if "_proj" in name}
    opened = (
        others.dequantized_by_compressed_tensors
        if case == "mixed"
        else others.opened_by_transformers
    )
    theirs = opened(tmp_path, plain)
    assert names.keys() <= theirs.keys()
    for name in names:
        x = ours[name]
        if name in quantized and isinstance(x.scale, ScaledArray):  # it gives bf16
            x = x.dequantize(jnp.bfloat16)
        assert others.different(x, theirs[name]) == 0, name
        assert np.count_nonzero(theirs[name]) > (1000 if name == EXTREMES else np.size(x) / 2)


def test_deepseek_v4(tmp_path):
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from safetensors.torch import load_file

    w = weights_of({"attn.wq_a.weight": (256, 128), EXTREMES: (256, 128)})
    recipe = {"attn/*": "block", "*": "mxfp4"}
    checkpoint.save_fp8_safetensors(tmp_path, w, "deepseek-v4", recipe=recipe)
    ours, _ = checkpoint.load_fp8_safetensors(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    dequantize = fp8.Fp8Dequantize(None)._dequantize_one
    for name in w:
        scale = stored[name.replace("weight", "scale")]
        assert others.different(ours[name], dequantize(stored[name], scale, torch.float32)) == 0
        assert np.count_nonzero(ours[name]) > 1000


def test_nvfp4_of_compressed_tensors_is_exact_where_the_outer_scale_is_a_power_of_two(tmp_path):
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from safetensors.torch import load_file

    w = jax.random.normal(jax.random.key(0), (64, 96))
    counts = []
    for factor in (1.0, 4 / 3):
        q = quantized("nvfp4", w)
        outer = jnp.exp2(jnp.round(jnp.log2(q.scale.scale))) * np.float32(factor)
        q = dataclasses.replace(q, scale=dataclasses.replace(q.scale, scale=outer))
        checkpoint.save_fp8_safetensors(tmp_path, {"a.weight": q}, "compressed-tensors")
        stored = load_file(tmp_path / "model.safetensors")
        theirs = dequantize(
            unpack_fp4_from_uint8(stored["a.weight_packed"], *w.shape, torch.float32),
            stored["a.weight_scale"].float(),
            args=quantization.quant_scheme.NVFP4A16["weights"],
            dtype=torch.float32,
            global_scale=stored["a.weight_global_scale"],
        ).numpy()
        np.testing.assert_allclose(theirs, q, rtol=2.0**-22)
        counts.append(others.different(q, theirs))
    assert counts[0] == 0 < counts[1] < w.size


TOKENS = jnp.arange(32).reshape(8, 4).T.reshape(-1)  # the tokens of each of 4 experts in a row


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any, recipe: Any) -> None:
        linear = functools.partial(jfp8.nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate_proj, self.up_proj = (linear(128, 256, recipe=recipe) for _ in range(2))
        self.down_proj = linear(256, 128, recipe=recipe)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any, recipe: Any) -> None:
        dense = functools.partial(jfp8.nnx.ExpertDense, dtype=dtype, recipe=recipe, rngs=rngs)
        self.gate_up_proj, self.down_proj = dense(4, 128, 256), dense(4, 128, 128)

    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = jnp.full(4, 8)
        y = self.gate_up_proj(x, sizes)
        return self.down_proj(nnx.silu(y[:, ::2]) * y[:, 1::2], sizes)


class Model(nnx.Module):
    """Tells what follows a token."""

    def __init__(self, kind: Any, dtype: Any, recipe: Any, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(32, 128, rngs=rngs)
        self.layers = nnx.List([kind(rngs, dtype, recipe) for _ in range(2)])
        self.head = nnx.Linear(128, 32, use_bias=False, rngs=rngs)

    def __call__(self) -> jax.Array:
        x = self.embed(TOKENS)
        for layer in self.layers:
            x = x + layer(x)
        return jax.nn.log_softmax(self.head(x))[jnp.arange(32), jnp.roll(TOKENS, 5)]


@functools.cache
def trained(kind: Any, grid: str, dtype: Any = None) -> Model:
    model = Model(kind, dtype, jfp8.recipes.QuantizationAware(grid))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def steps(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: -jnp.mean(model()))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(steps(model, optimizer)) for _ in range(200)]
    assert losses[-1] < 0.1 * losses[0]
    return model


def multiplied(layer: nnx.Module) -> np.ndarray:
    """The weights that the forward pass multiplies, ``[out, in]``, by unit vectors."""
    if isinstance(layer, jfp8.nnx.ExpertDense):
        units = jnp.tile(jnp.eye(128), (4, 1))
        y = nnx.jit(lambda layer, x: layer(x, jnp.full(4, 128)))(layer, units)
        return np.asarray(y.reshape(4, 128, -1).mT)
    return np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, jnp.eye(layer.in_features)).T)


def dequantized_by_modelopt(folder: Path, plain: Any) -> dict[str, Any]:
    import torch
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    del plain
    stored, f32 = load_file(folder / "model.safetensors"), torch.float32
    found = {}
    for name, x in stored.items():
        scale, outer = (stored.get(name + end) for end in ("_scale", "_scale_2"))
        if scale is None:
            found[name] = x
        elif outer is not None:
            q = NVFP4QTensor((len(x), 2 * x.shape[1]), f32, x)
            sizes = {"double_scale": outer, "block_sizes": {-1: 16}}
            found[name] = q.dequantize(f32, scale=scale, **sizes)
        elif scale.dtype == torch.uint8:
            found[name] = MXFP8QTensor(x.shape, f32, x).dequantize(f32, scale=scale)
        else:
            found[name] = FP8QTensor(x.shape, f32, x).dequantize(f32, scale=scale[:, None])
    return found


def model_of(kind: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind is Mlp:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**others.CONFIG))
    config = others.GPT_OSS | {"intermediate_size": 128}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**config))


TRAINED = {
    "FP8 blocks of deepseek, transformers": ("deepseek", "block", others.opened_by_transformers),
    "FP8 blocks": ("compressed-tensors", "block", others.dequantized_by_compressed_tensors),
    "FP8 channels": ("compressed-tensors", "rowwise", others.dequantized_by_compressed_tensors),
    "FP8 channels, transformers": ("compressed-tensors", "rowwise", others.opened_by_transformers),
    "FP8 channels, modelopt": ("modelopt", "rowwise", dequantized_by_modelopt),
    "MXFP8": ("compressed-tensors", "mxfp8", others.dequantized_by_compressed_tensors),
    "MXFP8, modelopt": ("modelopt", "mxfp8", dequantized_by_modelopt),
    "MXFP4": ("compressed-tensors", "mxfp4", others.dequantized_by_compressed_tensors),
    "MXFP4 of gpt-oss, transformers": ("gpt-oss", "mxfp4", others.opened_by_transformers),
    "NVFP4 in bf16": ("compressed-tensors", "nvfp4", others.dequantized_by_compressed_tensors),
    "NVFP4, modelopt": ("modelopt", "nvfp4", dequantized_by_modelopt),
}


@pytest.mark.parametrize("case", TRAINED)
def test_what_was_trained_is_what_others_dequantize(case, tmp_path):
    """And what jfp8 reads and writes again; the model that was served computes the same bits."""
    pytest.importorskip("torch")
    style, grid, opened = TRAINED[case]
    kind, dtype = Experts if style == "gpt-oss" else Mlp, jnp.bfloat16 if "bf16" in case else None
    model, plain = trained(kind, grid, dtype), model_of(kind)
    place = "expert out in -> expert in out" if kind is Experts else "out in -> in out"
    path = "experts.{0}" if kind is Experts else "{0}.weight"
    table = {"model.embed_tokens.weight": "embed/embedding", "lm_head.weight": "head/kernel"} | {
        f"model.layers.{{i}}.mlp.{path.format(n)}": f"layers/{{i}}/{n}/kernel: {place}"
        for n in vars(model.layers[0])
        if n.endswith("_proj")
    }
    names = checkpoint.names_for(table, others.CONFIG)
    recipe = {"layers/*": jfp8.recipes.QuantizationAware(grid)}
    params = jfp8.quantize_params(
        nnx.state(model, nnx.Param),
        recipe,
        exempt="head",
        stacked="layers/*" if kind is Experts else (),
        dtype=dtype,
    )
    rest = {n: np.asarray(x) for n, x in plain.state_dict().items() if n not in names}
    (tmp_path / "config.json").write_text(json.dumps(plain.config.to_dict() | {"dtype": "float32"}))
    tensors = checkpoint.from_flax_params(params, names) | rest
    checkpoint.save_fp8_safetensors(tmp_path, tensors, style)

    theirs = opened(tmp_path, plain)
    layers = {
        f"model.layers.{i}.mlp.{path.format(n)}": layer
        for i, mlp in enumerate(model.layers)
        for n, layer in vars(mlp).items()
        if n.endswith("_proj")
    }
    assert len(layers) == len(names) - 2
    for name, layer in layers.items():
        w = multiplied(layer)
        assert np.count_nonzero(w) > w.size / 2
        assert others.different(w.mT if kind is Experts else w, theirs[name]) == 0, name
        assert others.different(layer.kernel.get_value().mT, w) > w.size / 2

    again, found = checkpoint.load_fp8_safetensors(tmp_path)
    served = Model(kind, dtype, jfp8.recipes.QuantizationAware(grid), seed=1)
    params = checkpoint.to_flax_params({name: again[name] for name in names}, names)
    nnx.update(served, params)
    found_again = checkpoint.from_flax_params(nnx.state(served, nnx.Param), names)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    checkpoint.save_fp8_safetensors(tmp_path / "again", again | found_again, found)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()
    ask = nnx.jit(lambda model: model())
    assert jfp8.debug.mismatch(ask(model), ask(served)).max == 0
