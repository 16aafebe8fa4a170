"""Exported checkpoints, opened and dequantized by the libraries whose formats they have.

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 \\
        nvidia-modelopt==0.47.0 accelerate==1.15.0 requests
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
