"""`jfp8.initialize`, against optax's own optimizers fed with gradients that ml_dtypes rounds."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jfp8
from jfp8 import recipes
from jfp8.optim.adam import adam
from jfp8.optim.masters import master_weights
from support.amaxes import on_a_grid_of_power_of_two as rounded
from support.arrays import normal

X = jnp.ones((2, 8))
MODEL = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8), nn.relu, nn.Dense(4)])


def recipe_of(model):
    return type(model).jfp8_selection.recipe


def test_state_that_gradients_replace():
    where = "_overwrite_with_gradient"
    for how in ({"state_collection": where}, {"config": {"state_collection": where}}):
        model, _ = jfp8.initialize(MODEL, optax.sgd(1), **how)
        assert set(jax.eval_shape(model.init, jax.random.key(0), X)) == {"params", where}


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


def test_a_layer_that_a_config_leaves_in_high_precision():
    given = {"recipe": {"layers_2": None, "*": "delayed"}, "exempt": ()}
    model, _ = jfp8.initialize(MODEL, optax.sgd(1), given)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert set(variables["params"]) == {"layers_0", "layers_2", "layers_4"}
    assert set(variables["fp8"]) == {"layers_0", "layers_4"}


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
    assert [line.split(":")[0] for line in lines[:2]] == ["layers/0", "layers/1"]
    assert "Float8CurrentScaling" in lines[0]
    assert "the final logits" in lines[2]
    assert isinstance(converted.layers[0].dot_general, jfp8.nnx.DotGeneral)
    assert not isinstance(model.layers[0].dot_general, jfp8.nnx.DotGeneral)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt_level": "O3"}, ValueError, "allowed are 'O0', 'O1' and 'O2'"),
        ({"axis_name": "data"}, ValueError, "axis_name='data'.*Use opt_level='O1', or jax.lax.pm"),
        ({"config": {"axis_name": "d"}}, ValueError, "axis_name='d'"),
        ({"config": {"opt_level": "o2"}}, ValueError, "opt_level='o2': allowed are"),
        ({"config": {"recipi": "x"}}, ValueError, "no key 'recipi'. Did you mean 'recipe'"),
        ({"config": {"recipe": "mxfp8"}, "recipe": "current"}, ValueError, "recipe is given twice"),
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


E4M3 = ml_dtypes.float8_e4m3fn
PARAMS = {"w": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128), "b": jnp.zeros(128)}


def gradients(seed):
    return {"w": jnp.asarray(normal((64, 128), seed)), "b": jnp.asarray(normal(128, seed + 50))}


def steps(tx, grads, params=PARAMS):
    state, update = tx.init(params), jax.jit(tx.update)
    optax.tree.get_all_with_path(state, "loss_scale")  # gradients are scaled by hand
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def optimizer(level, tx, **options):
    return jfp8.initialize(MODEL, tx, opt_level=level, **options)[1]


@pytest.mark.representative(1)
@pytest.mark.parametrize("recipe", ["hybrid", "delayed"])  # with and without a loss scale
def test_o1_gives_the_optimizer_gradients_of_weights_in_fp8(recipe):
    """Unscaled, and those of the bias as they are."""
    tx = optimizer("O1", optax.sgd(2.0**-4, momentum=0.5), recipe=recipe)
    factor = 2.0**15 if recipe == "hybrid" else 1.0
    given = [jax.tree.map(lambda g: g * factor, gradients(seed)) for seed in range(3)]
    seen = [
        {**gradients(seed), "w": jnp.asarray(rounded(gradients(seed)["w"]))} for seed in range(3)
    ]
    ours, _ = steps(tx, given)
    expected, _ = steps(optax.sgd(2.0**-4, momentum=0.5), seen)
    for name in PARAMS:
        np.testing.assert_array_equal(ours[name], expected[name])
    assert np.any(seen[0]["w"] != gradients(0)["w"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "fields"),
    [
        (optax.adam(1e-3), {"mu": 1, "nu": 2}),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), {"mu": 1, "nu": 2}),
        (optax.sgd(1e-3, momentum=0.9), {"trace": 1}),
        (optax.rmsprop(1e-3), {"nu": 2}),
    ],
    ids=["adam", "chain", "momentum", "rmsprop"],
)
def test_o2_keeps_moments_of_any_optimizer_in_one_and_two_bytes(tx, fields):
    state = optimizer("O2", tx).init(PARAMS)
    for name in ("mu", "nu", "trace"):
        found = optax.tree.get_all_with_path(state, name)
        assert bool(found) == (name in fields)
        for _, moment in found:
            assert moment["w"].data.nbytes == fields[name] * PARAMS["w"].size
            assert moment["w"].data.shape == PARAMS["w"].shape
            assert moment["b"].dtype == jnp.float32
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / PARAMS["w"].size
    assert held < sum(fields.values()) + 0.2


def test_parameters_that_are_called_as_moments_are():
    params = {"nu": PARAMS["w"], "trace": PARAMS["b"]}
    state = jax.eval_shape(optimizer("O2", optax.lion(1e-3)).init, params)
    (mu,) = [mu for _, mu in optax.tree.get_all_with_path(state, "mu")]
    assert mu["nu"].data.dtype == E4M3


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.sgd(1.0), "it has none. Use O1, or an optimizer that has them.*It has"),
        (adam(1.0), "tx does that already. Use O1"),
        (master_weights(optax.adam(1.0)), r"and use O1: master_weights\(jfp8.optim.adamw"),
    ],
    ids=["sgd", "stored", "masters"],
)
def test_o2_says_what_it_cannot_keep(tx, message):
    with pytest.raises(ValueError, match=message):
        optimizer("O2", tx).init(PARAMS)


def test_levels_in_configs():
    for config in ({"opt_level": "O2"}, '{"opt_level": "O2"}', "opt_level: O2\n"):
        if config == "opt_level: O2\n":
            pytest.importorskip("yaml")
        _, tx = jfp8.initialize(MODEL, optax.adam(1e-3), config)
        state = jax.eval_shape(tx.init, PARAMS)
        (mu,) = [mu for _, mu in optax.tree.get_all_with_path(state, "mu")]
        assert mu["w"].data.dtype == E4M3


@pytest.mark.slow
def test_axis_name_averages_local_gradients_and_all_devices_skip_the_same_steps():
    """In shard_map: one overflowing device must not go its own way."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params = {"w": jnp.zeros((128, 256))}
    tx = optimizer("O1", optax.sgd(1.0), recipe="hybrid", axis_name="data")
    state = tx.init(params)
    factor = np.float32(optax.tree.get(state, "loss_scale"))

    def local(grads, state):
        updates, state = tx.update({"w": grads[0] * factor}, state, params)
        return updates["w"][None], jax.tree.map(lambda s: s[None], state)

    everywhere = PartitionSpec("data")
    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(everywhere, PartitionSpec()), out_specs=everywhere
        )
    )
    grads = normal((8, 128, 256), 0)
    updates, _ = step(jnp.asarray(grads), state)
    exact = -grads.mean(axis=0, dtype=np.float64)
    for update in np.asarray(updates):
        np.testing.assert_array_equal(update, updates[0])
    error = np.linalg.norm(updates[0] - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 10 ** (-28 / 20)  # 28 dB
    grads[5, 7, 7] = np.inf
    updates, after = step(jnp.asarray(grads), state)
    assert not np.any(updates)
    np.testing.assert_array_equal(optax.tree.get(after, "loss_scale"), np.full(8, factor / 2))
    text = step.lower(jnp.asarray(grads), state).compile().as_text()
    assert "u8[" in "".join(line for line in text.splitlines() if " all-to-all(" in line)
