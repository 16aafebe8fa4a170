"""The one-line entry: `jfp8.initialize`."""

from __future__ import annotations

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfp8
from jfp8 import recipes

X = jnp.ones((2, 8))
MODEL = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8), nn.relu, nn.Dense(4)])


def recipe_of(model):
    return type(model).jfp8_selection.recipe


def test_the_model_is_converted_and_the_optimizer_left_alone():
    tx = optax.adam(1e-3)
    model, same = jfp8.initialize(MODEL, tx)
    assert same is tx
    assert recipe_of(model) == recipes.DelayedScaling()
    assert sorted(model.init(jax.random.key(0), X)["fp8"]) == ["layers_0", "layers_2"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("mxfp8", recipes.MXFP8BlockScaling()),
        ({"name": "delayed", "amax_history_len": 4}, recipes.DelayedScaling(amax_history_len=4)),
        (recipes.Float8CurrentScaling(), recipes.Float8CurrentScaling()),
    ],
)
def test_recipes_by_name_and_fields(given, expected):
    assert recipe_of(jfp8.initialize(MODEL, optax.sgd(1), recipe=given)[0]) == expected
    config = {"mixed_precision": "fp8", "recipe": given}
    assert recipe_of(jfp8.initialize(MODEL, optax.sgd(1), config)[0]) == expected


CONFIG = {"mixed_precision": "fp8", "recipe": "current", "exempt": ["layers_2", "layers_4"]}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        json.dumps(CONFIG),
        "mixed_precision: fp8\nrecipe: current\nexempt: [layers_2, layers_4]\n",
    ],
    ids=["dict", "json", "yaml"],
)
def test_configs(config):
    if isinstance(config, str) and not config.startswith("{"):
        pytest.importorskip("yaml")
    model, _ = jfp8.initialize(MODEL, optax.sgd(1), config)
    rows = jfp8.report(model, model.init(jax.random.key(0), X), X).rows
    assert {row.path for row in rows if row.fp8} == {"layers_0"}


def test_mixed_precision_no_changes_nothing():
    tx = optax.sgd(1)
    assert jfp8.initialize(MODEL, tx, {"mixed_precision": "no"}) == (MODEL, tx)


def test_recipes_without_gradient_scales_get_a_loss_scale():
    for name, needs in (("hybrid", True), ("direct_e5m2", True), ("current", False)):
        _, tx = jfp8.initialize(MODEL, optax.sgd(1), recipe=name)
        scale = optax.tree.get(tx.init({"w": jnp.ones(2)}), "loss_scale")
        assert (scale is not None) is needs


def test_output_fused_keeps_results_in_high_precision():
    model, _ = jfp8.initialize(
        MODEL, optax.sgd(1), recipe="hybrid", output_fused=["layers_2"], exempt=()
    )
    assert recipe_of(model) == recipes.Hybrid(fused=("layers_2",))


def test_verbose_prints_the_report_when_shapes_are_known(capsys):
    model, _ = jfp8.initialize(MODEL, optax.sgd(1), verbose=True)
    assert capsys.readouterr().out == ""
    variables = model.init(jax.random.key(0), X)
    assert capsys.readouterr().out.strip() == str(jfp8.report(model, variables, X))


def test_verbose_lists_nnx_layers_at_once(capsys):
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    converted, _ = jfp8.initialize(model, optax.sgd(1), recipe="current", verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["layers/0", "layers/1"]
    assert "Float8CurrentScaling" in lines[0]
    assert "logits" in lines[1]
    assert isinstance(converted.layers[0].dot_general, jfp8.nnx.DotGeneral)
    assert not isinstance(model.layers[0].dot_general, jfp8.nnx.DotGeneral)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt_level": "O1"}, NotImplementedError, "needs FP8 gradients.*Use opt_level='O0'"),
        ({"opt_level": "O3"}, ValueError, "allowed are 'O0', 'O1' and 'O2'"),
        ({"config": {"recipi": "x"}}, ValueError, "no key 'recipi'. Did you mean 'recipe'"),
        (
            {"config": {"recipe": "mxfp8"}, "recipe": "current"},
            ValueError,
            "recipe is given twice",
        ),
        ({"config": {"mixed_precision": "fp16"}}, ValueError, "allowed are 'fp8' and 'no'"),
        ({"config": "[1, 2]"}, TypeError, "config must be a dict"),
        ({"recipe": "delay"}, ValueError, "no recipe called 'delay'"),
        ({"recipe": {"margin": 1}}, ValueError, "A recipe in a config is a name"),
        ({"output_fused": "x"}, ValueError, "does not quantize results"),
        ({"exempt": 3}, TypeError, "exempt=3: must be patterns"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        jfp8.initialize(MODEL, optax.sgd(1), **arguments)
