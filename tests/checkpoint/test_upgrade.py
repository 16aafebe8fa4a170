"""Checkpoints of one model as the states of another that differs in its FP8 parts."""

import re
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState as FlaxTrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jfp8
from jfp8.checkpoint.upgrade import downgrade, upgrade
from jfp8.optim.masters import master_weights
from jfp8.recipes.per_tensor import DelayedScaling
from support.arrays import assert_same
from support.checkpoints import told

WIDTH = 64
RNG = np.random.default_rng(0)
X = RNG.normal(size=(128, WIDTH)).astype(np.float32)
Y = np.sin(X[:, ::-1])
PLAIN = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH)])
KERNELS = ("layers_0", "layers_2")
DELAYED = DelayedScaling()
E4M3 = ml_dtypes.float8_e4m3fn


# The same objects everywhere: a step is compiled once for each.
OPTIMIZERS = {
    "plain": optax.adamw(1e-2),
    "loss scale": optax.chain(jfp8.loss_scale(), optax.adamw(1e-2)),
    "O2": jfp8.initialize(PLAIN, optax.adamw(1e-2), recipe="hybrid", opt_level="O2")[1],
    "stored": jfp8.optim.adamw(1e-2),
    "masters": master_weights(optax.adamw(1e-2), "float32"),
    "loss scale around": jfp8.loss_scale(optax.adamw(1e-2)),
    "blocks": jfp8.optim.adamw(1e-2, mu=jfp8.optim.Blocks()),
    "f32 moment": jfp8.optim.adamw(1e-2, mu=jfp8.optim.Float()),
}


def kinds(messages):
    return [re.split(r" \(current| \(to keep|: |\.$", message)[0] for message in messages]


@cache
def model_of(recipe):
    return jfp8.convert(PLAIN, recipe, exempt=())


@cache
def apply_of(recipe):
    return PLAIN.apply if recipe is None else model_of(recipe).apply


@cache
def variables_of(recipe, seed=1):
    model = PLAIN if recipe is None else model_of(recipe)
    return jax.jit(model.init)(jax.random.key(seed), X)


@cache
def fresh(tx=OPTIMIZERS["plain"], recipe=DELAYED, *, quantized=False):
    """A new state of the FP8 model, with other parameters than all that is saved."""
    variables = variables_of(recipe)
    if quantized:
        variables = {**variables, "params": jfp8.quantize_params(variables["params"], recipe)}
    create = lambda v: jfp8.TrainState.create(apply_fn=apply_of(recipe), variables=v, tx=tx)
    return jax.jit(create)(variables)


@cache
def fresh_plain():
    params, tx = variables_of(None)["params"], OPTIMIZERS["plain"]
    return FlaxTrainState.create(apply_fn=apply_of(None), params=params, tx=tx)


@jax.jit
def step(state):
    """Return the next state, of jfp8 or of Flax."""
    if isinstance(state, FlaxTrainState):
        loss = lambda params: jnp.mean((state.apply_fn({"params": params}, X) - Y) ** 2)
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def loss_fn(variables, batch):
        return jnp.mean((state.apply_fn(variables, batch[0]) - batch[1]) ** 2), {}

    return state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, (X, Y))[1])


def trained(state, steps=3):
    for _ in range(steps):
        state = step(state)
    return state


@cache
def saved_of(name):
    """A trained state of each optimizer, and its state dict as numpy arrays."""
    quantized = name.startswith("masters")
    state = trained(fresh(OPTIMIZERS[name], quantized=quantized))
    return state, jax.tree.map(np.asarray, serialization.to_state_dict(state))


@cache
def saved_plain():
    state = trained(fresh_plain())
    return state, jax.tree.map(np.asarray, serialization.to_state_dict(state))


def test_downgrade_keeps_other_collections():
    state = fresh(optax.sgd(0.1)).replace(collections={"batch_stats": {"mean": jnp.ones(3)}})
    variables = {**state.variables, "fp8_sink": {}}
    for given in (state, serialization.to_state_dict(state), variables):
        assert set(downgrade(given)) == {"params", "batch_stats"}


def test_downgrade_tells_what_it_takes():
    with pytest.raises(ValueError, match=r"no 'params' among \['layers_0'\]"):
        downgrade({"layers_0": {}})
    with pytest.raises(TypeError, match="takes a jfp8.TrainState, variables, a state dict or an"):
        downgrade([1])


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (3, "Amax histories keep the newest 3 of 16 entries"),
        (40, "Amax histories of 16 entries get room for 40"),
    ],
)
def test_another_length_of_histories(length, message):
    state = trained(fresh(), 5)
    target = fresh(optax.adamw(1e-2), DelayedScaling(amax_history_len=length))
    changed, messages = told(upgrade, serialization.to_state_dict(state), target)
    assert kinds(messages) == [message]
    assert "and 2 more" in messages[0]
    for name in KERNELS:
        for role in ("lhs", "rhs", "grad"):
            old = np.asarray(state.fp8[name]["DotGeneral_0"][role]["amax_history"])
            new = np.asarray(changed.fp8[name]["DotGeneral_0"][role]["amax_history"])
            assert new.shape == (length,)
            kept = min(length, 16)
            assert np.count_nonzero(old) == 5
            np.testing.assert_array_equal(new[:kept], old[:kept])
            assert not new[kept:].any()
    if length == 40:
        back, _ = told(upgrade, changed, fresh())
        assert_same(back.fp8, state.fp8)
        trained(changed, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_step_under_way_is_kept(sign):
    """Also if its maxima, negative then, are entries already."""
    variables = variables_of(DELAYED)
    one = lambda path, x: x + (sign if path[-1].key == "amax" else 1)
    fp8 = jax.tree_util.tree_map_with_path(one, variables["fp8"])
    restored, _ = told(upgrade, {**variables, "fp8": fp8}, variables)
    assert_same(restored["fp8"], fp8)
    assert_same(restored["fp8_sink"], variables["fp8_sink"])


def test_histories_of_another_structure_start_empty():
    state, saved = saved_of("plain")
    stacked = {"amax_history": np.ones((2, 16), "f"), "amax": np.ones(2, "f")}
    ours = ("lhs", "rhs", "grad")
    others = ["histories", np.ones(3), {"lhs": np.ones(3)}, dict.fromkeys(ours, stacked)]
    others += [dict.fromkeys(ours, {"amax_history": "x", "amax": None})]
    for junk in (None, [], *others):
        histories = {**saved["fp8"], "layers_0": {"DotGeneral_0": junk}}
        restored, messages = told(upgrade, {**saved, "fp8": histories}, fresh())
        missing = junk is None or isinstance(junk, list)
        what = "that the checkpoint lacks" if missing else "of another structure"
        assert messages == [
            f"Amax histories {what} start empty (current scaling until they fill): "
            "fp8/layers_0/DotGeneral_0."
        ]
        assert not any(np.any(x) for x in jax.tree.leaves(restored.fp8["layers_0"]))
        assert_same(restored.fp8["layers_2"], state.fp8["layers_2"])


def test_what_is_no_amax_does_not_enter_a_history():
    """One Inf would freeze the scale for as long as it stays."""
    _, saved = saved_of("plain")
    state = saved["fp8"]["layers_0"]["DotGeneral_0"]
    bad = np.array([1, np.nan, 2, np.inf, 0, -3, 4] + [0] * 9, np.float32)
    state = {**state, "rhs": {"amax_history": bad, "amax": np.float32(np.nan)}}
    saved = {**saved, "fp8": {**saved["fp8"], "layers_0": {"DotGeneral_0": state}}}
    restored, messages = told(upgrade, saved, fresh())
    assert messages == [
        "Entries of amax histories that are no amax (NaN, Inf, negative) are left out: "
        "fp8/layers_0/DotGeneral_0/rhs."
    ]
    found = restored.fp8["layers_0"]["DotGeneral_0"]["rhs"]
    assert found["amax_history"].tolist() == [1, 2, 4] + [0] * 13
    assert found["amax"] == 0


RECIPES = {
    "delayed": DELAYED,
    "mxfp8": jfp8.recipes.MXFP8BlockScaling(),
    "float8_block": jfp8.recipes.Float8BlockScaling(),
    "rowwise": jfp8.recipes.RowwiseScaling(),
    "nvfp4": jfp8.recipes.NVFP4BlockScaling(),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("recipe", "dtype"), [*((recipe, np.float32) for recipe in RECIPES), ("delayed", jnp.bfloat16)]
)
def test_parameters_are_quantized_as_quantize_params_does(recipe, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), saved_plain()[0].params)
    target = jfp8.quantize_params(variables_of(None)["params"], RECIPES[recipe])
    if recipe == "delayed":  # whose scales are no powers of two, which shapes do not tell
        target = jax.eval_shape(lambda: target)
    expected = jfp8.quantize_params(params, RECIPES[recipe])
    new, messages = told(upgrade, {"params": params}, {"params": target})
    for name in KERNELS:
        assert_same(new["params"][name]["kernel"], expected[name]["kernel"])
        wide = np.asarray(params[name]["bias"]).astype(np.float32)
        np.testing.assert_array_equal(new["params"][name]["bias"], wide)
    stored = expected["layers_0"]["kernel"].data.dtype
    assert [re.sub(r" with.*", "", kind) for kind in kinds(messages)] == [
        f"Arrays saved as {np.dtype(dtype)} become {stored}"
    ]
    # And back: the values of the bytes.
    back, messages = told(upgrade, serialization.to_state_dict(new), variables_of(None))
    for name in KERNELS:
        values = expected[name]["kernel"].dequantize()
        np.testing.assert_array_equal(back["params"][name]["kernel"], values)
    assert len(messages) == 1
    assert "become float32: params/layers_0/kernel, params/layers_2/kernel." in messages[0]


def test_blocks_that_are_cut_short():
    """(2, 200) in blocks of 128: its scales would also fit blocks of 100."""
    x = RNG.normal(size=(2, 200)).astype(np.float32)
    x[:, 100:128] *= 100
    q = jfp8.quantize(x, granularity=jfp8.Block((1, 128)))
    assert q.block == (1, 128)
    state = serialization.to_state_dict(q)
    values, _ = told(upgrade, {"x": state}, {"x": x})
    np.testing.assert_array_equal(values["x"], q.dequantize())
    other = jfp8.quantize(x, granularity=jfp8.Block((1, 100)))
    again, messages = told(upgrade, {"x": state}, {"x": other})
    assert len(messages) == 1
    assert_same(again["x"], jfp8.quantize(q.dequantize(), granularity=jfp8.Block((1, 100))))
    del state["block"]
    state["scale"] = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"x: A ScaledArray with data of shape \(2, 200\)"):
        upgrade({"x": state}, {"x": x})
    with pytest.raises(ValueError, match=r"blocks of an array are .*not sizes above 0"):
        upgrade({"x": state | {"block": np.array([0, 4])}}, {"x": x})


REFUSED = [("plain", name) for name in ("loss scale", "O2", "stored", "masters")]
REFUSED += [("stored", "plain"), ("masters", "plain")]
REFUSED += [("blocks", "f32 moment"), ("f32 moment", "blocks")]  # structures differ in one form


@pytest.mark.representative(3)
@pytest.mark.parametrize(("before", "after"), REFUSED[::-1])
def test_an_optimizer_state_fits_the_optimizer_that_was_saved(before, after):
    """The state of another optimizer is refused, with a call that begins afresh, and works."""
    _, saved = saved_of(before)
    target = fresh(OPTIMIZERS[after], quantized=after == "masters")
    with pytest.raises(ValueError, match=r"(?s)does not fit.*  opt_state/.*is restored into") as e:
        upgrade(saved, target)
    assert 'from the parameters alone: upgrade({"params": saved["params"]}, target)' in str(e.value)
    new, _ = told(upgrade, {"params": saved["params"]}, target)
    assert jax.tree.structure(new) == jax.tree.structure(target)
    trained(new, 1)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("optimizer", ["loss scale", "masters"])
def test_parameters_alone_get_a_fresh_optimizer(bare, optimizer):
    params = jax.tree.map(np.asarray, saved_plain()[0].params)
    quantized = optimizer == "masters"
    used, _ = saved_of(optimizer)  # the target may have been used before
    state, messages = told(upgrade, params if bare else {"params": params}, used)
    start = {**variables_of(DELAYED), "params": params}
    if quantized:
        start["params"] = jfp8.quantize_params(params)
    tx = OPTIMIZERS[optimizer]
    expected = jfp8.TrainState.create(apply_fn=apply_of(DELAYED), variables=start, tx=tx)
    if quantized:
        masters = jfp8.optim.init_masters(expected.opt_state, params)
        expected = expected.replace(opt_state=masters)
    assert_same(jax.tree.leaves(state), jax.tree.leaves(expected))
    assert "Parameters alone" in kinds(messages)
    plain, messages = told(upgrade, {"params": params}, saved_plain()[0])  # a state of Flax
    assert kinds(messages) == ["Parameters alone"]
    assert_same(plain.params, params)
    assert (plain.step, int(plain.opt_state[0].count)) == (0, 0)


def test_variables_are_taken_out_of_a_training_state():
    state, saved = saved_of("loss scale")
    variables, messages = told(upgrade, saved, variables_of(DELAYED))
    assert messages == []
    assert_same(variables["params"], state.params)
    assert_same(variables["fp8"], state.fp8)
    assert not any(np.any(x) for x in jax.tree.leaves(variables["fp8_sink"]))


def grad_histories(state):
    return [np.asarray(x[0]["grad"]["amax_history"]) for x in (
        list(state.fp8[name].values()) for name in KERNELS
    )]  # fmt: skip


def test_histories_of_gradients_need_their_loss_scale():
    """Of variables nobody knows what the loss was multiplied by."""
    state, _ = saved_of("plain")
    assert all(np.count_nonzero(x) == 3 for x in grad_histories(state))
    afresh, messages = told(upgrade, state.variables, fresh(OPTIMIZERS["loss scale"]))
    assert not any(x.any() for x in grad_histories(afresh))
    assert "Amax histories of gradients start empty" in kinds(messages)
    lhs = afresh.fp8["layers_0"]["DotGeneral_0"]["lhs"]
    assert_same(lhs, state.fp8["layers_0"]["DotGeneral_0"]["lhs"])


def test_strict_refuses_changes():
    _, saved = saved_plain()
    said = "strict=True.\n  Amax histories that the checkpoint lacks"
    with pytest.raises(ValueError, match=said):
        upgrade(saved, fresh(), strict=True)
    state, saved = saved_of("plain")
    upgrade(saved, fresh(), strict=True)
    # Parameters and histories fit; what the optimizer has learned is not there.
    alone = {"params": state.params, "fp8": state.fp8}
    with pytest.raises(ValueError, match="strict=True.\n  Parameters alone: the step is 0"):
        upgrade(alone, fresh(), strict=True)
    assert kinds(told(upgrade, alone, fresh())[1]) == ["Parameters alone"]


def changed_at(tree, path, value):
    if not path:
        return value
    inner = changed_at(tree.get(path[0], {}), path[1:], value)
    return {**tree, path[0]: inner}


ONES = np.ones(3)
KERNEL, MOMENTS = "params/layers_0/kernel", "opt_state/0/mu"
# A path, what is there, and how the message goes on after the path.
MISFITS = [
    (KERNEL, np.ones((3, 64), np.float32), r"\(64, 64\), the checkpoint \(3, 64"),
    (KERNEL, np.ones((64, 64), np.int32), r"float32\[64,64\], the.* int32"),
    (KERNEL, None, "is missing; the target has float32"),
    (KERNEL, {"x": ONES}, "an array here, the checkpoint a dict with 'x'"),
    (KERNEL, "x" * 10**6, "an object of Python's str"),
    (KERNEL, [1.0, 2.0], "a dict with '0', '1'"),
    (KERNEL, np.array([None]), "checkpoint object"),
    ("params/layers_0", ONES, "a dict with 'bias', 'kernel', the checkpoint float64"),
    ("params/layers_0/more", ONES, r"the checkpoint has float64\[3\], the target nothing"),
    ("params/layers_0/bias", np.full(64, 1e39), "saved as float64 with values that float32 does"),
    (f"{MOMENTS}/layers_0/bias", ONES, r"\(64,\), the checkpoint \(3,\)"),
    (f"{MOMENTS}/layers_0", None, r"bias: is missing; the target has float32\[64\]"),
    (MOMENTS, ONES, "the target has a dict with .*, the checkpoint float64"),
    ("opt_state/0/ema", ONES, r"the checkpoint has float64\[3\], the target nothing"),
    ("opt_state", {}, r"/0/count: is missing; the target has int32\[\]"),
    ("opt_state/3", {"trace": ONES}, r"trace: the checkpoint has float64\[3\], the target nothing"),
    ("step", np.float32(1), r"int32\[\], the checkpoint float32\[\]"),
    ("step", 2**40, "saved as int64 with values that int32 does not hold"),
    ("step", np.uint32(2**32 - 1), "saved as uint32 with values that int32 does not hold"),
    ("collections/batch_stats", {"mean": ONES}, "/mean: the checkpoint has"),
]


def test_what_does_not_fit_is_named():
    _, whole = saved_of("plain")
    for path, value, message in MISFITS:
        saved = changed_at(whole, path.split("/"), value)
        place = path.removesuffix("/3")
        with pytest.raises(ValueError, match=f"(?s)does not fit.*  {place}.*{message}") as error:
            upgrade(saved, fresh())
        assert len(str(error.value)) < 2000
        if path.startswith("opt_state"):
            assert 'upgrade({"params": saved["params"]}, target)' in str(error.value)


def test_too_deep_and_two_entries_of_one_name():
    for levels in (101, 5000):
        deep = np.ones(3)
        for _ in range(levels):
            deep = {"x": deep}
        with pytest.raises(ValueError, match="is nested deeper than 100 levels"):
            upgrade(deep, fresh())
    with pytest.raises(ValueError, match="unique string representation"):
        upgrade({"params": {"1": np.ones(3), 1: np.ones(3)}}, fresh())


JUNK = [None, [], {}, "x", b"x", 1.5, True, [np.ones(3)], np.ones(0), np.array("x"), object()]


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", ["plain", "stored", "O2", "masters"])
def test_junk_at_any_node_is_an_error_that_names_it_or_is_told(name):
    """Every node of the state dict in turn: never anything but a ValueError or a message."""
    state, saved = saved_of(name)
    target = fresh(OPTIMIZERS[name], quantized=name == "masters")
    for like in (target, jax.eval_shape(lambda x: x, target)):  # shapes are target enough
        whole, messages = told(upgrade, saved, like)
        assert messages == []
        assert jax.tree.structure(whole) == jax.tree.structure(target)
        assert_same(jax.tree.leaves(whole), jax.tree.leaves(state))
    paths = [("fp8", "layers_0")]
    stack = [((), saved)]
    while stack:
        path, node = stack.pop()
        paths.append(path)
        if isinstance(node, dict):
            stack += [((*path, key), child) for key, child in node.items()]
    was = [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
    outcomes = set()
    for i, path in enumerate(paths):
        for junk in JUNK[i % 3 :: 3]:
            problem = None
            try:
                restored, messages = told(upgrade, changed_at(saved, path, junk), target)
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                assert all(name in problem for name in path[:1]), (path, junk, problem)
                outcomes.add("error")
                continue
            found = [np.asarray(x).tobytes() for x in jax.tree.leaves(restored)]
            assert messages or found == was or junk in (True, 1.5), (path, junk)
            outcomes.add("told")
    assert outcomes == {"error", "told"}


def test_nnx_states():
    make = lambda seed: nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(seed)), nnx.Dropout(0.1, rngs=nnx.Rngs(seed + 1))
    )
    plain, model = make(0), jfp8.convert(make(3), exempt=())
    saved = nnx.to_pure_dict(nnx.state(plain))
    keys = saved["layers"][1]["rngs"]["key"]
    saved["layers"][1]["rngs"]["key"] = np.asarray(jax.random.key_data(keys))
    new, messages = told(upgrade, saved, nnx.state(model))
    assert kinds(messages) == ["Amax histories that the checkpoint lacks start empty"]
    nnx.update(model, new)
    kernel = model.layers[0].kernel.get_value()
    np.testing.assert_array_equal(kernel, plain.layers[0].kernel.get_value())
    assert model.layers[1].rngs.key.get_value() == plain.layers[1].rngs.key.get_value()
    model.eval()
    x = jnp.ones((2, 8))
    plain.eval()
    np.testing.assert_allclose(model(x), plain(x), rtol=0.2, atol=0.2)

    back = downgrade(new)
    assert "dot_general" not in back["layers"][0]
    nnx.update(plain, back)
    np.testing.assert_array_equal(plain.layers[0].kernel.get_value(), kernel)
    _, messages = told(upgrade, new, nnx.state(plain))
    assert kinds(messages) == ["Amax histories that the target has no place for are dropped"]


def test_states_inside_of_other_trees():
    state, saved = saved_of("plain")
    _, plain = saved_plain()
    target = {"epoch": 0, "name": "run", "model": fresh(), "list": [jnp.zeros(2), None]}
    new, messages = told(
        upgrade,
        {"epoch": np.int64(4), "name": "b", "model": plain, "list": {"0": np.ones(2, "f")}},
        target,
    )
    assert (new["epoch"], new["name"]) == (4, "b")
    assert_same(new["model"].params, saved_plain()[0].params)
    assert new["list"][0].tolist() == [1, 1]
    assert kinds(messages) == ["Amax histories that the checkpoint lacks start empty"]


def test_bfloat16_is_told():
    params = variables_of(None)["params"]
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    new, messages = told(upgrade, params, {"params": narrow})
    assert kinds(messages) == ["Arrays saved as float32 become bfloat16"]
    assert_same(new["params"], narrow)
    with pytest.raises(ValueError, match="strict=True.\n  Arrays saved as float32 become"):
        upgrade(params, {"params": narrow}, strict=True)
    wide, messages = told(upgrade, {"params": narrow}, {"params": params}, strict=True)
    assert messages == []
    assert wide["params"]["layers_0"]["kernel"].dtype == jnp.float32


# Collections of their own, in the places that each training state has for them. No model is needed.

WEIGHTS = {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}
STATISTICS = {"norm": {"mean": np.array([3.0, 5.0], np.float32)}}
COLLECTIONS = {"params": WEIGHTS, "batch_stats": STATISTICS}


def ours(variables, step=0):
    state = jfp8.TrainState.create(apply_fn=None, variables=variables, tx=optax.sgd(0.1))
    return state.replace(step=step)


def flaxs(variables, step=0):
    """All collections stand where the parameters do."""
    state = FlaxTrainState.create(apply_fn=None, params=variables, tx=optax.sgd(0.1))
    return state.replace(step=step)


@pytest.mark.parametrize("make", [ours, flaxs])
@pytest.mark.parametrize("into", [ours, flaxs, dict])
def test_collections_are_found_in_either_training_state(make, into):
    target = into(jax.tree.map(np.zeros_like, COLLECTIONS))
    restored, messages = told(upgrade, serialization.to_state_dict(make(COLLECTIONS, 7)), target)
    assert messages == []
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    found = restored
    if into is ours:
        found = {"params": restored.params, **restored.collections}
    elif into is flaxs:
        found = restored.params
    assert_same(found, COLLECTIONS)
    assert into is dict or restored.step == 7


def test_a_step_beside_parameters_is_no_training_state():
    """A dict of the user's own, in which "step" is a number like any other."""
    saved = {"params": WEIGHTS, "step": np.int32(7)}
    restored, messages = told(upgrade, saved, jax.tree.map(np.zeros_like, saved))
    assert messages == []
    assert_same(restored, saved)


def test_collections_without_parameters_are_no_parameters():
    with pytest.raises(ValueError, match="params/dense/kernel") as error:
        upgrade({"batch_stats": STATISTICS}, jax.tree.map(np.zeros_like, COLLECTIONS))
    assert "batch_stats" not in str(error.value)


def test_stored_parameters_become_values_also_as_dicts():
    """A power of two as scale: 1.5 and -448 are numbers of E4M3."""
    q = jfp8.quantize(jnp.array([[1.5, -448.0]]), scale_rounding="power_of_two")
    for kernel in (q, serialization.to_state_dict(q)):
        params = {"dense": {"kernel": kernel, "bias": jnp.ones(2)}}
        for dtype in (jnp.float32, jnp.bfloat16):
            plain = downgrade({"params": params}, dtype=dtype)["params"]["dense"]
            np.testing.assert_array_equal(plain["kernel"], [[1.5, -448.0]])
            assert (plain["kernel"].dtype, plain["bias"].dtype) == (dtype, jnp.float32)


def test_an_array_goes_to_the_devices_of_its_target():
    """Of a target that is on no device for good neither is the result."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    target = {
        "divided": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),
        "anywhere": jnp.zeros(8),
        "host": np.zeros(8, np.float32),
    }
    new, _ = told(upgrade, dict.fromkeys(target, np.arange(8, dtype=np.float32)), target)
    assert new["divided"].sharding == sharding
    assert not new["anywhere"].committed
    assert type(new["host"]) is np.ndarray


def test_shapes_that_were_made_under_a_mesh_are_a_target():
    """Their shardings have an abstract mesh: axes with names and sizes, and no devices."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    saved = {"whole": np.arange(4, dtype=np.float32), "divided": np.arange(8, dtype=np.float32)}
    with jax.set_mesh(mesh):
        place = lambda: {
            "whole": jnp.zeros(4),
            "divided": jax.sharding.reshard(jnp.zeros(8), PartitionSpec("data")),
        }
        target = jax.eval_shape(place)
        new, _ = told(upgrade, saved, target)
    assert new["divided"].sharding == sharded
    assert new["whole"].sharding.is_fully_replicated
    assert new["whole"].sharding.device_set == sharded.device_set
    assert_same(new, saved)
    whole = {"whole": saved["whole"]}
    assert_same(upgrade(whole, {"whole": target["whole"]}), whole)
    with pytest.raises(ValueError, match=r"divided: .*jax.set_mesh"):
        upgrade(saved, target)
