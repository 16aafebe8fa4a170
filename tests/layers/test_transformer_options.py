"""Options of layers are written once, and mean the same in Linen and in NNX."""

from __future__ import annotations

import dataclasses

import pytest
from flax import nnx

import jfp8
import jfp8.nnx
from jfp8.layers.options import check_option
from jfp8.layers.transformer_options import Architecture, TransformerOptions

OPTIONS = [field.name for field in dataclasses.fields(TransformerOptions)]


def test_linen_takes_its_fields_in_their_order_by_position():
    fields = dataclasses.fields(jfp8.TransformerLayer)
    names = [field.name for field in fields if not field.kw_only]
    by_name = {field.name for field in fields if field.kw_only}
    packed = ["local_window_size", "attention_sinks"]
    assert by_name == {"state_collection", "decode", "cache_dtype", *packed}
    architecture = [field.name for field in dataclasses.fields(Architecture)]
    own = ["attention_products", "saved_activations", "recipe", "implementation"]
    assert names == [*architecture, "deterministic", *own, "parent", "name"]
    assert [*architecture, *own, *packed] == OPTIONS


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
        seen = layer._seen_keys(None, None, 3, None)
        names = "mask", "is_causal", "local_window_size", "tokens"
        assert seen == dict(zip(names, (None, True, None, (None,) * 4), strict=True))


def test_nnx_modules_compare_by_value():
    one, other = (jfp8.nnx.TransformerLayer(8, 16, 2, rngs=nnx.Rngs(i)) for i in (0, 1))
    assert nnx.graphdef(one) == nnx.graphdef(other)
    assert hash(nnx.graphdef(one)) == hash(nnx.graphdef(other))


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="kind must be one of 'a', None; got 'b'"):
        check_option("kind", "b", ("a", None))
