"""Checkpoints opened and dequantized by compressed-tensors and transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT_OSS = CONFIG | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def different(ours: Any, theirs: Any) -> int:
    """How many values differ; NaN is equal to NaN."""
    a, b = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert a.shape == b.shape
    return int(np.sum(~((a == b) | (np.isnan(a) & np.isnan(b)))))


def opened_by_transformers(folder: Path, plain: Any) -> dict[str, Any]:
    import torch
    import transformers

    del plain
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    configs = {
        "fp8": transformers.FineGrainedFP8Config,
        "compressed-tensors": transformers.CompressedTensorsConfig,
        "mxfp4": transformers.Mxfp4Config,
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=configs[method](dequantize=True)
    )
    return {name: x.numpy() for name, x in model.state_dict().items()}


def dequantized_by_compressed_tensors(folder: Path, plain: Any) -> dict[str, Any]:
    """Let it choose the layers and their formats by config.json; transformers knows one format."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    model = copy.deepcopy(plain)
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    stored: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    found = {}
    for layer, module in model.named_modules():
        state = {
            n.rpartition(".")[2]: x for n, x in stored.items() if n.rpartition(".")[0] == layer
        }
        if scheme := getattr(module, "quantization_scheme", None):
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            found[layer + ".weight"] = (
                compressor.decompress(state, scheme)["weight"].float().numpy()
            )
        elif "weight" in state:
            found[layer + ".weight"] = state["weight"].numpy()
    return found
