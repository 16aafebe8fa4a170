"""The names of models in files of Hugging Face, and their parameters in libraries for JAX."""

import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import ScaledArray, checkpoint
from jfp8.checkpoint import Place
from jfp8.checkpoint.name_maps import tables
from support.arrays import assert_same
from support.checkpoints import dequantized, quantized

QWEN3 = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "num_experts": 3,
}
N, K, H, D = 4, 2, 8, 16


def shapes_for(names) -> dict[str, tuple[int, ...]]:
    ends = {
        "embed_tokens": (5, D),
        "lm_head": (5, D),
        "q_proj": (N * H, D),
        "k_proj": (K * H, D),
        "v_proj": (K * H, D),
        "o_proj": (D, N * H),
        "q_norm": (H,),
        "k_norm": (H,),
        "gate_proj": (24, D),
        "up_proj": (24, D),
        "down_proj": (D, 24),
        "gate": (3, D),
    }
    return {name: ends.get(name.split(".")[-2], (D,)) for name in names}


same, transposed = lambda w: w, lambda w: w.T
query, out = lambda w: w.T.reshape(D, N, H), lambda w: w.T.reshape(N, H, D)


def rotated_in_pairs(w: np.ndarray) -> np.ndarray:
    """MaxText's order of what RoPE rotates, where Hugging Face has halves; scores are divided."""
    first, second = np.split(query(w), 2, axis=-1)
    return np.stack([first, second], -1).reshape(D, N, H) * np.float32(1 / np.sqrt(H))


# The rules of the libraries, from their own files: a tensor at Hugging Face, and the parameter.
RULES = {
    "tunix/qwen3": [
        ("layers.1.self_attn.q_proj", "layers/1/attn/q_proj/w", query),
        ("layers.1.self_attn.o_proj", "layers/1/attn/o_proj/w", out),
        ("layers.0.mlp.down_proj", "layers/0/mlp/down_proj/kernel", transposed),
        ("norm", "final_norm/w", same),
    ],
    "tunix/llama3": [("lm_head", "lm_head/w", transposed)],
    "tunix/qwen3_moe": [
        ("layers.1.mlp.experts.2.up_proj", "layers/1/mlp/up_proj", transposed),
        ("layers.1.mlp.gate", "layers/1/mlp/router/kernel", transposed),
    ],
    "tunix/gemma3": [
        (
            "layers.1.self_attn.q_proj",
            "layers/1/attn/q_einsum/w",
            lambda w: query(w).swapaxes(0, 1),
        ),
        (
            "layers.1.self_attn.v_proj",
            "layers/1/attn/kv_einsum/w",
            lambda w: w.T.reshape(D, K, H).swapaxes(0, 1),
        ),
    ],
    "flax/gemma": [("layers.1.self_attn.o_proj", "layers/1/attn/attn_vec_einsum/kernel", out)],
    "bonsai/qwen3": [
        (
            "layers.1.self_attn.k_proj",
            "layers/1/attn/k_proj/kernel",
            lambda w: w.reshape(K, H, D).transpose(2, 0, 1),
        ),
        ("layers.0.self_attn.o_proj", "layers/0/attn/o_proj/kernel", out),
    ],
    "maxtext/qwen3": [
        ("layers.1.self_attn.q_proj", "decoder/layers/self_attention/query/kernel", query),
        ("layers.1.input_layernorm", "decoder/layers/pre_self_attention_layer_norm/scale", same),
    ],
    "maxtext/qwen3_moe": [
        ("layers.1.mlp.experts.2.down_proj", "decoder/layers/moe_block/wo", transposed)
    ],
    "maxtext/llama3": [
        (
            "layers.1.self_attn.q_proj",
            "decoder/layers/self_attention/query/kernel",
            rotated_in_pairs,
        )
    ],
    "maxtext/gemma3": [
        ("norm", "decoder/decoder_norm/scale", lambda w: w + 1),
        ("embed_tokens", "token_embedder/embedding", lambda w: w * np.float32(4)),
        ("layers.1.self_attn.o_proj", "decoder/layers_1/self_attention/out/kernel", out),
    ],
}
# Where a parameter holds several tensors, the index of the one above.
INDEX = {
    "layers/1/mlp/up_proj": np.s_[2],
    "layers/1/attn/kv_einsum/w": np.s_[1],
    "decoder/layers/self_attention/query/kernel": np.s_[:, 1],
    "decoder/layers/pre_self_attention_layer_norm/scale": np.s_[:, 1],
    "decoder/layers/moe_block/wo": np.s_[2, 1],
}


@pytest.mark.parametrize("table", sorted(tables()))
def test_names_and_shapes_of_models(table):
    names = checkpoint.names_for(table, QWEN3)
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes_for(names).items()}
    params = checkpoint.to_flax_params(tensors, names)
    for tensor, path, rule in RULES[table]:
        name = f"{'' if tensor == 'lm_head' else 'model.'}{tensor}.weight"
        found = params
        for key in path.split("/"):
            found = found[int(key) if key.isdigit() else key]
        found = np.asarray(found)[INDEX.get(path, ...)]
        np.testing.assert_array_equal(found, rule(tensors[name]), err_msg=name)
    back = checkpoint.from_flax_params(params, names)
    for name, x in tensors.items():
        np.testing.assert_allclose(back[name], x, rtol=1e-6, atol=1e-6 if "norm" in name else 0)


def test_a_table_of_your_own_and_an_unknown_one():
    table = {
        "lm_head.weight": "head/kernel",
        "h.{i}.q.weight": "h/q/kernel: (heads depth) in -> in layer={i} heads depth",
        "h.{i}.norm.weight": Place("h_{i}/norm/scale", plus=1.0),
    }
    names = checkpoint.names_for(table, QWEN3 | {"tie_word_embeddings": True})
    assert names["h.1.q.weight"].axes == "(heads=4 depth=8) in -> in layer=1 heads depth"
    assert names["h.1.norm.weight"] == Place("h_1/norm/scale", plus=1.0)
    assert len(names) == 4
    with pytest.raises(ValueError, match="table='qwen3' is unknown. Allowed: .*'tunix/qwen3'"):
        checkpoint.names_for("qwen3", QWEN3)


def test_a_quantized_model_goes_through_the_names_without_rounding(tmp_path):
    """MaxText's scanned layers, and NNX with numbers as names; then a file, and back."""
    config = QWEN3 | {"head_dim": 64, "hidden_size": 64}
    rng = np.random.default_rng(0)
    for table, recipe in (("maxtext/qwen3", "mxfp8"), ("tunix/qwen3", "nvfp4")):
        names = checkpoint.names_for(table, config)
        shapes = {
            n: tuple({H: 64, D: 64, 32: 256, 16: 128}.get(d, d) for d in s)
            for n, s in shapes_for(names).items()
        }
        shapes |= {n: (64, 256) for n in names if "o_proj" in n}
        shapes |= {n: (128, 64) for n in names if "gate_proj" in n or "up_proj" in n}
        shapes |= {n: (64, 128) for n in names if "down_proj" in n}
        tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
        tensors |= {n: quantized(recipe, x) for n, x in tensors.items() if "_proj" in n}
        params = checkpoint.to_flax_params(tensors, names)
        folder = tmp_path / recipe
        checkpoint.save_fp8_safetensors(folder, params, "compressed-tensors", names=names)
        again, _ = checkpoint.load_fp8_safetensors(folder)
        for name, x in tensors.items():
            if isinstance(x, ScaledArray):
                np.testing.assert_array_equal(dequantized(again[name]), dequantized(x))
                assert_same(again[name].data, np.asarray(x.data))
            else:
                np.testing.assert_array_equal(again[name], x)


def test_mistakes_in_axes():
    to, x = checkpoint.to_flax_params, np.ones((6, 4), np.float32)
    with pytest.raises(ValueError, match="axes='o i' of 'a' must name the same dimensions"):
        to({"x": x}, {"x": "a: o i"})
    with pytest.raises(ValueError, match="axes='o i -> i' of 'a' must name the same"):
        to({"x": x}, {"x": "a: o i -> i"})
    with pytest.raises(ValueError, match=r"a dimension of 6, of which axes makes \(h d\): give"):
        to({"x": x}, {"x": "a: (h d) i -> i h d"})
    with pytest.raises(ValueError, match=r"a dimension of 6, of which axes makes \(h d\): give"):
        to({"x": x}, {"x": "a: (h=4 d) i -> i h d"})
    with pytest.raises(ValueError, match="'x' of shape .6, 4. has not the 3 dimensions of axes"):
        to({"x": x}, {"x": "a: l o i -> l i o"})
    with pytest.raises(ValueError, match="a/0. occurs twice, or has entries below it"):
        to({"x": x, "y": x}, {"x": "a/0/b", "y": "a/0"})
    q = jfp8.quantize(jnp.ones((4, 32)), granularity=jfp8.Block((1, 32)), scale_rounding="rceil")
    with pytest.raises(ValueError, match="times 0.5 plus 0, which its scales cannot hold. Keep"):
        to({"x": q}, {"x": Place("kernel", times=0.5)})
