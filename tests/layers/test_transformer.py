"""`TransformerLayer`, against the same layer written out with fake-quantized products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.layers import norm_math, position_math, transformer_math
from jfp8.layers.linen.transformer import RelativePositionBiases, TransformerLayer
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.unscaled import Unscaled
from support import layers
from support.arrays import device_normal as normal
from support.arrays import relative_error
from support.layers import (
    KEY,
    apply,
    assert_of_rounded_operands,
    exact_product,
    fake_product,
    init,
    shapes_of,
)

# Parameters alone are enough for a formula.
pytestmark = pytest.mark.filterwarnings("ignore:A model with delayed scaling is trained without")
SIZES = {"hidden_size": 16, "mlp_hidden_size": 24, "num_attention_heads": 4}


def random_params(layer, *inputs):
    """Parameters of which none is zero or one."""
    layer = layer.clone(deterministic=True)
    return layers.random_params(layer, *inputs, scale=0.3, shift=0.05)


def written_out(layer, product, attention, params, x, encoded=None, mask=True, encoder_mask=True):
    """The layer, of a `product` with weights, an `attention`, and parts with tests of their own."""

    def project(equation, x, p):
        y, bias = product(equation, x, p["kernel"]), p.get("bias", jnp.zeros(()))
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)

    def normalized(x, p):
        options = {"epsilon": layer.layernorm_epsilon, "layernorm_type": layer.layernorm_type}
        options["zero_centered_gamma"] = layer.zero_centered_gamma
        return norm_math.normalize(x, p["scale"], p.get("ln_bias"), **options)

    def attend(x, encoded, p, mask, bias):
        if encoded is None:
            qkv = project("abi,igsd->abgsd", normalized(x, p["qkv"]), p["qkv"])
            query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        else:
            query = project("abi,igsd->abgsd", normalized(x, p["query"]), p["query"])
            kv = project("abi,igsd->abgsd", encoded, p["kv"])
            key, value = kv[..., 0, :], kv[..., 1, :]
        query = query.reshape(*x.shape[:2], 4, -1)
        if layer.enable_rotary_pos_emb and encoded is None:
            options = {"windows": layer.rotary_pos_emb_windows}
            options["group_method"] = layer.rotary_pos_emb_group_method
            query, key = (position_math.rotary_embedding(a, **options) for a in (query, key))
        return project("abhd,hdo->abo", attention(query, key, value, bias, mask), p["out"])

    n, bias = x.shape[1], None
    if "relpos_bias" in params:
        table = params["relpos_bias"]["rel_embedding"]
        bias = position_math.relative_position_bias(table, n, n, bidirectional=False)[None]
    causal = np.tril(np.ones((n, n), bool))[None, None]
    x = x + attend(x, None, params["self_attention"], causal & mask, bias)
    if encoded is not None:
        x = x + attend(x, encoded, params["encoder_decoder_attention"], encoder_mask, None)
    wi, wo = params["mlp"]["wi"], params["mlp"]["wo"]
    hidden = project("abi,inj->abnj", normalized(x, wi), wi)
    return x + project("abj,jo->abo", transformer_math.activate(hidden, layer.mlp_activation), wo)


X, ENCODED = normal((2, 6, 16)), normal((2, 5, 12), 1)
MASK = np.random.default_rng(3).random((2, 1, 6, 6)) > 0.3
MASK[..., 0] = True
ENCODER_MASK = np.random.default_rng(4).random((2, 4, 6, 5)) > 0.3
ENCODER_MASK[..., 2] = True

CASES = {
    "decoder-only": {
        "self_attn_mask_type": "causal",
        "num_gqa_groups": 2,
        "layernorm_type": "rmsnorm",
        "layernorm_epsilon": 0.01,
        "zero_centered_gamma": True,
        "mlp_activation": "swiglu",
        "enable_rotary_pos_emb": True,
        "rotary_pos_emb_windows": (2, 50.0),
        "rotary_pos_emb_group_method": "alternate",
        "use_bias": False,
    },
    "decoder, all products": {
        "layer_type": "decoder",
        "num_gqa_groups": 2,
        "mlp_activation": "relu",
        "enable_relative_embedding": True,
        "enable_rotary_pos_emb": True,  # self attention only
        "attention_products": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_are_those_of_rounded_operands(case):
    layer = TransformerLayer(**SIZES, **CASES[case])
    inputs = (X, ENCODED) if layer.layer_type == "decoder" else (X,)
    masks = {"attention_mask": MASK}
    if layer.layer_type == "decoder":
        masks = {"encoder_decoder_mask": ENCODER_MASK}
    params = random_params(layer, *inputs)
    dy = normal(X.shape, 9, 2.0**-10)

    def ours(params, *inputs):
        return layer.apply({"params": params}, *inputs, **masks)

    # Layers call these; tests/products/test_flash_attention.py compares them with sums of bytes.
    in_f32 = functools.partial(jfp8.scaled_dot_product_attention, recipe=None)
    fp8 = jfp8.scaled_dot_product_attention if layer.attention_products else in_f32
    renamed = {"mask": MASK} if len(inputs) == 1 else {"encoder_mask": ENCODER_MASK}
    oracle = functools.partial(written_out, layer, **renamed)
    oracles = [(fake_product, fp8), (exact_product, in_f32)]
    functions = ours, *(functools.partial(oracle, *parts) for parts in oracles)
    assert_of_rounded_operands(functions, params, inputs, dy, within=1e-2)


def test_parameters_of_an_encoder():
    layer = TransformerLayer(**SIZES, num_gqa_groups=2, enable_relative_embedding=True)
    variables = init(layer, X)
    norm = {"scale": (16,), "ln_bias": (16,)}
    assert shapes_of(variables["params"]) == {
        "relpos_bias": {"rel_embedding": (4, 32)},
        "self_attention": {
            "qkv": {**norm, "kernel": (16, 2, 4, 4), "bias": (2, 4, 4)},
            "out": {"kernel": (4, 4, 16), "bias": (16,)},
        },
        "mlp": {
            "wi": {**norm, "kernel": (16, 1, 24), "bias": (1, 24)},
            "wo": {"kernel": (24, 16), "bias": (16,)},
        },
    }
    # Fans count all of the input's features and all of the kernel's outputs: LeCun's rule.
    kernel = variables["params"]["self_attention"]["qkv"]["kernel"]
    assert np.std(kernel) == pytest.approx(1 / 4, rel=0.15)


DECODER_PRODUCTS = {
    "self_attention": ["out", "qkv"],
    "encoder_decoder_attention": ["kv", "out", "query"],
    "mlp": ["wi", "wo"],
}


def test_state_is_of_each_product():
    recipe = DelayedScaling(amax_history_len=2)
    layer = TransformerLayer(**SIZES, layer_type="decoder", attention_products=True, recipe=recipe)
    variables = jax.eval_shape(layer.init, KEY, X, ENCODED)
    for collection in ("fp8", "fp8_sink"):
        names = {name: sorted(tree) for name, tree in variables[collection].items()}
        assert names == {name: sorted(products) for name, products in DECODER_PRODUCTS.items()}
    history = variables["fp8"]["mlp"]["wi"]["DotGeneral_0"]["lhs"]["amax_history"]
    assert history.shape == (2,)


def test_fields_reach_every_product():
    layer = TransformerLayer(
        **SIZES,
        layer_type="decoder",
        recipe=Float8CurrentScaling(),
        param_dtype=jnp.bfloat16,
        use_bias=False,
        enable_relative_embedding=True,
    )
    variables = jax.eval_shape(layer.init, KEY, X, ENCODED)
    assert sorted(variables) == ["params"], "no state: the recipe keeps none"
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    assert {leaf.dtype.name for _, leaf in leaves} == {"bfloat16"}
    assert {path[-1].key for path, _ in leaves} == {"kernel", "scale", "ln_bias", "rel_embedding"}
    unknown = layer.clone(implementation="unknown")
    with pytest.raises(ValueError, match="implementation='unknown'"):
        jax.eval_shape(unknown.init, KEY, X, ENCODED)


def changed_at(x, *place):
    """`x` with other numbers there: adding a constant would be undone by the normalization."""
    return x.at[place].add(normal(x[place].shape, 8))


def test_the_future_has_no_influence():
    """Scales of their own couple all tokens of a tensor; without them the past is bit-identical."""
    layer = TransformerLayer(
        **SIZES, layer_type="decoder", enable_rotary_pos_emb=True, recipe=Unscaled()
    )
    params = {"params": random_params(layer, X, ENCODED)}
    y = apply(layer, params, X, ENCODED)
    changed = apply(layer, params, changed_at(X, slice(None), slice(4, None)), ENCODED)
    np.testing.assert_array_equal(changed[:, :4], y[:, :4])
    assert np.all(np.any(changed[:, 4:] != y[:, 4:], axis=-1))
    past = apply(layer, params, changed_at(X, slice(None), 0), ENCODED)
    assert np.all(np.any(past != y, axis=-1)), "but the past has"


@pytest.mark.slow
def test_a_relative_embedding_can_be_shared():
    """What T5 does: one table for all layers."""
    own = TransformerLayer(**SIZES, enable_relative_embedding=True)
    params = random_params(own, X)
    biases = RelativePositionBiases(4).apply({"params": params.pop("relpos_bias")}, 6, 6)
    assert biases.shape == (1, 4, 6, 6)
    shared = TransformerLayer(**SIZES)
    y = apply(shared, {"params": params}, X, attention_bias=biases)
    table = {"relpos_bias": random_params(own, X)["relpos_bias"]}
    with_table = {"params": {**params, **table}}
    np.testing.assert_array_equal(y, apply(own, with_table, X))
    twice = apply(own, with_table, X, attention_bias=biases)
    np.testing.assert_allclose(
        twice, apply(shared, {"params": params}, X, attention_bias=2 * biases)
    )
    assert relative_error(y, apply(shared, {"params": params}, X)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["hidden_dropout", "attention_dropout", "intermediate_dropout"])
def test_each_dropout_drops(rate):
    layer = TransformerLayer(**SIZES, **{rate: 0.5})
    params = {"params": random_params(layer, X)}

    @jax.jit
    def run(key):
        rngs = {"dropout": key}
        dropped = layer.apply(params, X, deterministic=False, rngs=rngs)
        kept = layer.apply(params, X, deterministic=True)
        return dropped, kept, TransformerLayer(**SIZES).apply(params, X)

    (first, kept, expected), (second, *_), (again, *_) = (run(jax.random.key(i)) for i in (0, 1, 0))
    np.testing.assert_array_equal(kept, expected)
    np.testing.assert_array_equal(first, again)
    assert relative_error(first, expected) > 0.02
    assert relative_error(first, second) > 0.02


def test_hidden_dropout_is_of_what_is_added():
    """All of it dropped, the input is left."""
    layer = TransformerLayer(**SIZES, hidden_dropout=1.0, layer_type="decoder")
    params = {"params": random_params(layer, X, ENCODED)}
    y = apply(layer, params, X, ENCODED, deterministic=False, rngs={"dropout": KEY})
    np.testing.assert_array_equal(y, X)


def test_with_dropout_the_layer_wants_to_be_told():
    with pytest.raises(ValueError, match="deterministic"):
        jax.eval_shape(TransformerLayer(**SIZES, attention_dropout=0.1).init, KEY, X)


@pytest.mark.parametrize(
    ("fields", "inputs", "words"),
    [
        (
            {"layer_type": "both"},
            (X,),
            "layer_type must be one of 'encoder', 'decoder'; got 'both'",
        ),
        ({"self_attn_mask_type": "padding"}, (X,), "one of 'causal', 'no_mask', None"),
        ({"layernorm_type": "batchnorm"}, (X,), "one of 'layernorm', 'rmsnorm'"),
        ({"mlp_activation": "tanh"}, (X,), "one of 'gelu'.*got 'tanh'"),
        (
            {"enable_rotary_pos_emb": True, "rotary_pos_emb_group_method": "half"},
            (X,),
            "group_method must be one of 'consecutive', 'alternate'",
        ),
        ({"num_attention_heads": 3}, (X,), "hidden_size=16 must be a multiple of.*heads=3"),
        ({"num_gqa_groups": 3}, (X,), "heads=4 must be a multiple of num_gqa_groups=3"),
        ({}, (X[0, 0],), r"hidden_size=16\]; got \(16,\)"),
        ({"layer_type": "decoder"}, (X,), "give `encoded` to the call.*decoder-only"),
        ({}, (X, ENCODED), '"encoder" and would ignore them'),
        ({}, (X, None, None, ENCODER_MASK), '"encoder" and would ignore them'),
    ],
)
def test_mistakes_are_explained(fields, inputs, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(TransformerLayer(**{**SIZES, **fields}).init, KEY, *inputs)


def test_relative_biases_are_computed_in_the_dtype_of_the_layer():
    layer = TransformerLayer(**SIZES, enable_relative_embedding=True, dtype=jnp.bfloat16)
    apply = lambda x: layer.init_with_output(KEY, x, capture_intermediates=True, mutable=True)
    _, variables = jax.eval_shape(apply, X)
    (biases,) = variables["intermediates"]["relpos_bias"]["__call__"]
    assert biases.dtype == jnp.bfloat16


def packed_layer(**options):
    layer = TransformerLayer(
        *(16, 32, 4),
        num_gqa_groups=2,
        self_attn_mask_type="causal",
        enable_rotary_pos_emb=True,
        attention_sinks=True,
        local_window_size=(5, 0),
        recipe="rowwise",
        **options,
    )
    variables = init(layer, jnp.ones((1, 3, 16)))
    sinks = jnp.array([-1.0, 0.0, 2.0, 5.0])
    variables["params"]["self_attention"]["sinks"] = sinks
    return layer, variables


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    "options", [{}, {"attention_products": True}, {"saved_activations": jfp8.E4M3FN}], ids=str
)
def test_packed_sequences_are_those_apart(options):
    """Three sequences in one row of 21 tokens, with a window, sinks and rotary embeddings."""
    layer, variables = packed_layer(**options)
    x = jax.random.normal(jax.random.key(1), (1, 21, 16))
    lengths = (7, 7, 7)
    ids = jnp.repeat(jnp.array([4, 0, 2]), jnp.array(lengths))[None]
    y = apply(layer, variables, x, segment_ids=ids)
    parts = jnp.split(x, np.cumsum(lengths)[:-1], axis=1)
    apart = jnp.concatenate([apply(layer, variables, part) for part in parts], axis=1)
    # Rotations by other angles are rounded differently, which moves some FP8 operands by a step.
    assert relative_error(y, apart) < (2.0**-5 if "attention_products" in options else 1e-3)
    assert relative_error(apply(layer, variables, x), apart) > 5e-2
    zero = jax.tree.map(lambda w: w, variables)
    zero["params"]["self_attention"]["sinks"] = jnp.full(4, -jnp.inf)
    assert relative_error(apply(layer, zero, x, segment_ids=ids), apart) > 5e-2


def test_decoding_sees_the_window():
    """Token by token, and all at once: the same layer, in which a token is seen by five others."""
    layer, variables = packed_layer(decode=True)
    x = jax.random.normal(jax.random.key(1), (1, 12, 16))
    cache = init(layer, x)["cache"]
    whole = apply(packed_layer()[0], variables, x)
    other = apply(packed_layer()[0], variables, changed_at(x, slice(None), 0))
    assert jnp.any(other != whole, axis=(0, 2)).tolist() == [True] * 6 + [False] * 6
    found = []
    for t in range(12):
        now = variables | {"cache": cache}
        y, mutated = apply(layer, now, x[:, t : t + 1], mutable="cache")
        cache = mutated["cache"]
        found.append(y)
    assert relative_error(jnp.concatenate(found, axis=1), whole) < 1e-3
    with pytest.raises(ValueError, match="packed sequences in training"):
        layer.apply(now, x[:, :1], segment_ids=jnp.zeros((1, 1), int), mutable=["cache"])
