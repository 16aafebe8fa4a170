"""Write the FP8 checkpoints of tests/data with the libraries whose formats they have.

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 \\
        nvidia-modelopt==0.47.0 accelerate==1.15.0 requests
    python tools/make_fp8_checkpoints.py

The models have one tiny Qwen3 layer with random weights. checksums.json has, for each weight, the
sum of its values, dequantized by the library, times their places 1, 2, 3 ... in the tensor. For
files with MX formats and NVFP4, crc32.json has the CRC-32 of these values in float32.
"""

import json
import shutil
import zlib
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Mxfp4Config, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parents[1] / "tests/data/fp8_checkpoints"
CHECKSUMS: dict[str, dict] = {}
CRC32: dict[str, dict] = {}


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


def note_exactly(name, values):
    """Keep the CRC-32 of the weights of a checkpoint, by name, dequantized to float32."""
    for x in values.values():
        assert x.dtype == torch.float32
    CRC32[name] = {w: zlib.crc32(x.contiguous().numpy().tobytes()) for w, x in values.items()}
    (HERE / name / "generation_config.json").unlink(missing_ok=True)


def mixed_by_compressed_tensors(name):
    tiny = model(32, 64)
    groups = {
        "group_0": preset_name_to_scheme("MXFP8", ["re:.*[qkv]_proj"]),
        "group_1": preset_name_to_scheme("FP8_DYNAMIC", ["re:.*o_proj"]),
        "group_2": preset_name_to_scheme("MXFP4", ["re:.*(gate|up)_proj"]),
        "group_3": preset_name_to_scheme("NVFP4A16", ["re:.*down_proj"]),
    }
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    apply_quantization_config(tiny, config)
    for module in tiny.modules():
        if getattr(module, "quantization_scheme", None):
            weights, w = module.quantization_scheme.weights, module.weight.float()
            size = weights.group_size or w.shape[1]
            largest = w.abs().reshape(len(w), -1, size).amax(2)
            outer = None
            if hasattr(module, "weight_global_scale"):
                outer = generate_gparam(w.min(), w.max())
                module.weight_global_scale.data.copy_(outer)
            scale, _ = calculate_qparams(-largest, largest, weights, outer)
            module.weight_scale.data = scale.to(torch.float32)
    compressor = ModelCompressor.from_pretrained_model(tiny)
    compressor.compress_model(tiny)
    tiny.save_pretrained(HERE / name, state_dict=tiny.state_dict())
    compressor.update_config(str(HERE / name))
    values = {}
    for layer, module in tiny.named_modules():
        if getattr(module, "quantization_scheme", None):
            weights, scale = module.quantization_scheme.weights, module.weight_scale.data
            data = getattr(module, "weight_packed", getattr(module, "weight", None)).data
            if data.dtype == torch.uint8:
                data = unpack_fp4_from_uint8(data, len(data), 2 * data.shape[1], torch.float32)
            scale = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
            outer = getattr(module, "weight_global_scale", None)
            values[layer + ".weight"] = dequantize(
                data, scale.float(), args=weights, dtype=torch.float32, global_scale=outer
            )
    note_exactly(name, values)


def by_tensors_of_modelopt(name, algorithm):
    """Write with modelopt's tensors: its quantizers need a GPU for these formats."""
    tiny, arrays, values = model(32, 64), {}, {}
    tiny.save_pretrained(HERE / name)
    for weight, x in tiny.state_dict().items():
        if "proj" not in weight:
            arrays[weight] = x
        elif algorithm == "MXFP8":
            q, scale = MXFP8QTensor.quantize(x.float())
            arrays |= {weight: q._quantized_data, weight + "_scale": scale}
            values[weight] = q.dequantize(torch.float32, scale=scale)
        else:
            q, scale, outer = NVFP4QTensor.quantize(x.float(), 16)
            arrays |= {weight: q._quantized_data, weight + "_scale": scale}
            arrays |= {weight + "_scale_2": outer.squeeze()}
            values[weight] = q.dequantize(
                torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16}
            )
    del arrays["lm_head.weight"]
    save_file(arrays, HERE / name / "model.safetensors", {"format": "pt"})
    details = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    config = json.loads((HERE / name / "config.json").read_text())
    config["quantization_config"] = convert_hf_quant_config_format({"quantization": details})
    (HERE / name / "config.json").write_text(json.dumps(config, indent=2))
    note_exactly(name, values)


def like_gpt_oss(name):
    """Write blocks and scales as gpt-oss has them; transformers can only read them on a CPU."""
    torch.manual_seed(1)
    arrays, values = {"model.layers.0.mlp.router.weight": torch.randn(2, 64).bfloat16()}, {}
    for proj, shape in {"gate_up_proj": (2, 24, 64), "down_proj": (2, 64, 32)}.items():
        weight = f"model.layers.0.mlp.experts.{proj}"
        q, scale = MXFP4QTensor.quantize(torch.randn(shape), 32)
        blocks = q._quantized_data.reshape(*shape[:2], -1, 16)
        scales = scale.reshape(*shape[:2], -1)
        arrays |= {weight + "_blocks": blocks, weight + "_scales": scales}
        values[weight] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    (HERE / name).mkdir()
    save_file(arrays, HERE / name / "model.safetensors", {"format": "pt"})
    kept = Mxfp4Config(modules_to_not_convert=["model.layers.*.mlp.router", "lm_head"]).to_dict()
    (HERE / name / "config.json").write_text(json.dumps({"quantization_config": kept}, indent=2))
    note_exactly(name, values)


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
mixed_by_compressed_tensors("compressed_mixed")
by_tensors_of_modelopt("modelopt_nvfp4", "NVFP4")
by_tensors_of_modelopt("modelopt_mxfp8", "MXFP8")
like_gpt_oss("gpt_oss")
(HERE / "crc32.json").write_text(json.dumps(CRC32, indent=1) + "\n")
(HERE / "checksums.json").write_text(json.dumps(CHECKSUMS, indent=1) + "\n")
