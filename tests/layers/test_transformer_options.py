"""Options of layers are written once, and mean the same in Linen and in NNX."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.layers.options import check_names, check_option
from jfp8.layers.transformer_options import OPTIONS, Architecture


def test_linen_takes_its_fields_in_their_order_by_position():
    fields = dataclasses.fields(jfp8.TransformerLayer)
    names = [field.name for field in fields if not field.kw_only]
    by_name = {field.name for field in fields if field.kw_only}
    assert by_name == {"state_collection", "decode", "cache_dtype"}
    architecture = [field.name for field in dataclasses.fields(Architecture)]
    own = ["attention_products", "saved_activations", "recipe", "implementation"]
    assert names == [*architecture, "deterministic", *own, "parent", "name"]
    assert list(OPTIONS) == [*architecture, *own]


def test_both_frameworks_have_the_same_defaults_and_derived_values():
    options = {"layer_type": "decoder", "num_gqa_groups": 1, "enable_rotary_pos_emb": True}
    linen = jfp8.TransformerLayer(8, 16, 2, **options)
    ours = jfp8.nnx.TransformerLayer(8, 16, 2, **options, rngs=nnx.Rngs(0))
    for name in OPTIONS:
        assert getattr(linen, name) == getattr(ours, name), name
    for layer in (linen, ours):
        assert layer.is_causal
        assert layer.rotary() == ((1, 10_000), "consecutive")
        assert layer.attention_options()["num_gqa_groups"] == 1
        assert layer.self_attention_mask(None, 3) == (None, True)


def test_nnx_constructors_are_short_and_their_modules_compare_by_value():
    for layer in (jfp8.nnx.TransformerLayer, jfp8.nnx.LayerNormMLP, jfp8.nnx.LayerNormLinear):
        assert len(inspect.signature(layer.__init__).parameters) - 1 <= 15
    one, other = (jfp8.nnx.TransformerLayer(8, 16, 2, rngs=nnx.Rngs(i)) for i in (0, 1))
    assert nnx.graphdef(one) == nnx.graphdef(other)
    assert hash(nnx.graphdef(one)) == hash(nnx.graphdef(other))


class Layer:
    def __init__(self, size, *, rate=0.0, **options):
        check_names(Layer, options, ("use_bias", "recipe"))


def test_unknown_names_are_refused_with_the_closest_one():
    Layer(3, rate=0.5, use_bias=False)
    known = "Options: size, rate, use_bias, recipe."
    with pytest.raises(TypeError, match=f"no option 'use_bais'. Did you mean 'use_bias'. {known}"):
        Layer(3, use_bais=False)
    with pytest.raises(TypeError, match=f"Layer has no option 'xyz'. {known}"):
        Layer(3, xyz=1)
    with pytest.raises(ValueError, match="kind must be one of 'a', None; got 'b'"):
        check_option("kind", "b", ("a", None))
