"""Write the FP8 checkpoints beside this file with the libraries whose formats they have.

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 \\
        nvidia-modelopt==0.47.0 accelerate==1.15.0 requests
    python tests/data/fp8_checkpoints/make.py

The models have one tiny Qwen3 layer with random weights. checksums.json has, for each weight, the
sum of its values, dequantized by the library, times their places 1, 2, 3 ... in the tensor.
"""

import json
import shutil
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import FineGrainedFP8Config, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

HERE = Path(__file__).parent
CHECKSUMS = {}


def model(hidden=16, intermediate=24):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden // 2,
        vocab_size=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def note(name, dequantized):
    """Keep the checksums of the weights of a checkpoint, which a function of tensors gives."""
    folder, tensors = HERE / name, {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    found = CHECKSUMS[name] = {}
    for weight, x in tensors.items():
        if x.dtype == torch.float8_e4m3fn:
            values = dequantized(
                x, tensors.get(weight + "_scale", tensors.get(weight + "_scale_inv"))
            )
            places = torch.arange(1, values.numel() + 1, dtype=torch.float64)
            found[weight] = float((values.double().reshape(-1) * places).sum())
    (folder / "generation_config.json").unlink(missing_ok=True)


def by_transformers(name):
    class Quantizer:
        quantization_config = FineGrainedFP8Config(
            weight_block_size=(16, 16), modules_to_not_convert=["lm_head"]
        )

    tiny, convert, state = model(32, 48), Fp8Quantize(Quantizer).convert, {}
    for weight, x in tiny.state_dict().items():
        if weight != "lm_head.weight":
            state |= convert({weight: x}) if "proj" in weight else {weight: x}
    tiny.config.quantization_config = Quantizer.quantization_config.to_dict()
    tiny.save_pretrained(HERE / name, state_dict=state, max_shard_size="7KB")
    back = Fp8Dequantize(Quantizer)._dequantize_one
    note(name, lambda x, scale: back(x, scale, torch.float32))


def by_compressed_tensors(name, weights, activations):
    tiny = model()
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(tiny, config)
    for module in tiny.modules():
        if hasattr(module, "weight_scale"):
            scale, w = module.weight_scale, module.weight.float().abs()
            rows, columns = w.shape
            down, across = scale.shape if scale.ndim == 2 else (1, 1)
            b, c = weights.block_structure or (-(-rows // down), -(-columns // across))
            w = torch.nn.functional.pad(w, (0, -columns % c, 0, -rows % b))
            largest = w.reshape(down, b, across, c).amax((1, 3))
            scale.data.copy_((largest / 448).reshape(scale.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.0123)
    compressor = ModelCompressor.from_pretrained_model(tiny)
    compressor.compress_model(tiny)
    tiny.save_pretrained(HERE / name, state_dict=tiny.state_dict())
    compressor.update_config(str(HERE / name))
    note(
        name,
        lambda x, scale: dequantize(x, scale.float(), args=weights, dtype=torch.float32),
    )


def by_modelopt(name):
    tiny = mtq.quantize(model(), mtq.FP8_DEFAULT_CFG, lambda tiny: tiny(torch.arange(8)[None]))
    export_hf_checkpoint(tiny, export_dir=HERE / name)
    (HERE / name / "hf_quant_config.json").unlink()
    note(name, lambda x, scale: x.float() * scale)


def args(strategy, **more):
    return QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **more)


for folder in HERE.iterdir():
    if folder.is_dir():
        shutil.rmtree(folder)
by_transformers("transformers_block")
by_compressed_tensors("compressed_channel", args("channel"), args("token", dynamic=True))
by_compressed_tensors("compressed_tensor", args("tensor"), args("tensor", dynamic=False))
by_compressed_tensors(
    "compressed_block",
    args("block", block_structure=[16, 16]),
    args("group", group_size=8, dynamic=True),
)
by_modelopt("modelopt_tensor")
(HERE / "checksums.json").write_text(json.dumps(CHECKSUMS, indent=1) + "\n")
