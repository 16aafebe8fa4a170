"""Histories of Flax's own FP8 layers and of Transformer Engine, against lists of amaxes."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState as FlaxTrainState

import jfp8
from jfp8.checkpoint.flax_fp8_ops import from_flax_fp8_ops
from jfp8.checkpoint.transformer_engine import from_transformer_engine
from jfp8.checkpoint.upgrade import upgrade
from jfp8.recipes.per_tensor import DelayedScaling
from support.checkpoints import told

OWG = "_overwrite_with_gradient"
FLAX_NAMES = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
LARGEST = {"lhs": 448.0, "rhs": 448.0, "grad": 57344.0}
LENGTH, STEPS, WIDTH = 8, 11, 32
RNG = np.random.default_rng(0)
# One large batch, four steps before the end: histories matter, and show in which order they are.
BATCHES = [
    (40.0 if step == STEPS - 4 else 1.0 + 0.1 * step) * RNG.normal(size=(16, WIDTH))
    for step in range(STEPS + 1)
]
BATCHES = [x.astype(np.float32) for x in BATCHES]


def layers(dot_general_cls=None):
    return [nn.Dense(WIDTH, dot_general_cls=dot_general_cls), nn.tanh, nn.Dense(WIDTH)]


class FlaxDirectOp(fp8_ops.Fp8DirectDotGeneralOp):
    amax_history_length: int = LENGTH


def shapes(model):
    """What an import needs of the target: the structure and the shapes of its variables."""
    return jax.eval_shape(model.init, jax.random.key(1), BATCHES[0])


def jfp8_model():
    recipe = DelayedScaling(amax_history_len=LENGTH)
    return jfp8.convert(nn.Sequential(layers()), recipe, only=["layers_0"], exempt=())


def test_flax_train_state_becomes_ours():
    """After the loop of Flax's guide: its params hold the collections; moments and step go on."""
    flax_model = nn.Sequential(layers(FlaxDirectOp))
    variables = jax.jit(flax_model.init)(jax.random.key(0), BATCHES[0])

    @jax.jit
    def train(variables, x):
        loss = lambda v: jnp.mean((flax_model.apply(v, x) - jnp.flip(x, 1)) ** 2)
        grads = jax.grad(loss)(variables)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, variables["params"], grads["params"])
        return {"params": params, OWG: grads[OWG]}

    products = []
    for x in BATCHES:
        variables = train(variables, x)
        products += variables[OWG]["layers_0"].values()
    tx = optax.adamw(1e-3)
    saved = FlaxTrainState.create(apply_fn=flax_model.apply, params=variables, tx=tx)
    moved = jax.tree.map(lambda x: x + jnp.asarray(0.5, x.dtype), saved.opt_state)
    saved = saved.replace(step=7, opt_state=moved)
    model = jfp8_model()
    start = jax.jit(model.init)(jax.random.key(3), BATCHES[0])
    target = jfp8.TrainState.create(apply_fn=model.apply, variables=start, tx=tx)
    state, messages = told(upgrade, saved, target)
    assert messages == []
    assert int(state.step) == 7
    kernel = variables["params"]["layers_0"]["kernel"]
    np.testing.assert_array_equal(state.params["layers_0"]["kernel"], kernel)
    assert float(state.opt_state[0].nu["layers_2"]["bias"][0]) == 0.5
    for role, name in FLAX_NAMES.items():
        found = state.fp8["layers_0"]["DotGeneral_0"][role]
        amaxes = [product[f"{name}_amax_history"][0] for product in products]
        newest_first = np.float32(amaxes[::-1][:LENGTH])
        assert len(set(newest_first)) == LENGTH
        np.testing.assert_array_equal(found["amax_history"], newest_first)
        assert found["amax"] == 0


def test_flax_collections_that_are_none():
    target, rings = shapes(jfp8_model()), np.ones(LENGTH, np.float32)
    state = {f"{n}_amax_history": rings for n in FLAX_NAMES.values()}
    state |= {f"{n}_scale": np.ones(1, np.float32) for n in FLAX_NAMES.values()}
    others = [state | {"kernel_amax_history": bad} for bad in (rings.astype(int), rings[:4])]
    for variables, message in (
        ({"params": {}}, "no collection '_overwrite_with_gradient'.*a dict with 'params'"),
        ([1], "no collection '_overwrite_with_gradient'"),
        ({OWG: {"layers_0": np.ones(3)}}, "layers_0: float.*which is no state of Flax's"),
        ({OWG: {"layers_0": {"op": "x" * 10_000}}}, "layers_0/op: an object of Python's str"),
        ({OWG: {"layers_0": {"op": others[0]}}}, "int64.8.*not f32 arrays of one shape"),
        ({OWG: {"layers_0": {"op": others[1]}}}, "float32.4.*not f32 arrays of one shape"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            from_flax_fp8_ops(variables, target)
        assert len(str(error.value)) < 1000


class TransformerEngine:
    """Its rule for one tensor: write slot 0, take the scale from the maximum, roll by -1, clear.

    v2.18 does so in ``DelayedScaleQuantizer.update`` and in ``delayed_scaling.cu``; v1.13 and v1.0
    take the scale at the beginning of the next step instead.
    """

    def __init__(self, length: int, largest: float) -> None:
        self.ring, self.scale = np.zeros(length, np.float32), np.ones(1, np.float32)
        self.largest = largest

    def step(self, amax: float) -> None:
        self.ring[0] = amax
        self.scale = np.full(1, self.largest / self.ring.max(), np.float32)
        self.ring = np.roll(self.ring, -1)
        self.ring[0] = 0.0


def te_tensors(products: int, length: int = LENGTH):
    """State of `products` products after STEPS steps, and the amaxes of each of their tensors."""
    rng = np.random.default_rng(products)
    state, truth = [], []
    for _ in range(products):
        amaxes = {role: rng.uniform(1, 9, STEPS).astype(np.float32) for role in LARGEST}
        tensors = {r: TransformerEngine(length, LARGEST[r]) for r in LARGEST}
        for role, tensor in tensors.items():
            for amax in amaxes[role]:
                tensor.step(amax)
        state.append(tensors)
        truth.append(amaxes)
    return state, truth


def jax_new(products):
    names = {"lhs": "x", "rhs": "kernel", "grad": "grad"}
    many = len(products) > 1
    return {
        f"{names[role]}{f'_{i}' if many else ''}_{field}": value
        for i, tensors in enumerate(products)
        for role, tensor in tensors.items()
        for field, value in (("amax_history", tensor.ring), ("scale", tensor.scale))
    }


def jax_old(products):
    names = {"lhs": "i", "rhs": "w", "grad": "g"}
    return {
        f"{field}_{names[role]}_{i}": value
        for i, tensors in enumerate(products)
        for role, tensor in tensors.items()
        for field, value in (("amax", tensor.ring), ("scale", tensor.scale))
    }


def jax_oldest(products):
    tensors = [tensors[role] for tensors in products for role in LARGEST]
    scales = np.stack([t.scale for t in tensors])
    return {
        "fp8_max": np.tile([[448.0], [448.0], [57344.0]], (len(products), 1)).astype(np.float32),
        "fp8_meta_amax": np.stack([t.ring for t in tensors]),
        "fp8_meta_scale": scales,
        "fp8_meta_scale_inv": 1 / scales,
    }


def pytorch(products):
    unused = TransformerEngine(len(products[0]["lhs"].ring), 1.0)
    forward = [t for p in products for t in (p["lhs"], p["rhs"], unused)]
    backward = [t for p in products for t in (p["grad"], unused)]
    return {
        "amax_history_fwd": np.stack([t.ring for t in forward], axis=1),
        "scale_fwd": np.concatenate([t.scale for t in forward]),
        "amax_history_bwd": np.stack([t.ring for t in backward], axis=1),
        "scale_bwd": np.concatenate([t.scale for t in backward]),
        "extra_fp8_variables": {"num_gemms": len(products)},
    }


LAYOUTS = [jax_new, jax_old, jax_oldest, pytorch]


@pytest.fixture(scope="module")
def mlp():
    """Two products in the layer "mlp", one each in "out" and in "mlp"'s neighbor of that name."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jfp8.LayerNormMLP(2 * WIDTH, name="mlp")(x)
            return jfp8.Dense(WIDTH, name="out")(x)

    return shapes(Model())["fp8"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_te_histories_newest_first(layout, mlp):
    (two, two_truth), (one, one_truth) = te_tensors(2), te_tensors(1)
    fp8, messages = told(from_transformer_engine, {"mlp": layout(two), "out": layout(one)}, mlp)
    assert [m.split(":")[0] for m in messages] == ["Amax histories of 8 entries get room for 16"]
    found = [
        fp8["mlp"]["wi"]["DotGeneral_0"],
        fp8["mlp"]["wo"]["DotGeneral_0"],
        fp8["out"]["DotGeneral_0"],
    ]
    for product, amaxes in zip(found, two_truth + one_truth, strict=True):
        for role, values in amaxes.items():
            # Slot 0 is kept free for the step under way, so that one less is remembered.
            expected = values[::-1][: LENGTH - 1]
            history = np.asarray(product[role]["amax_history"])
            np.testing.assert_array_equal(history[: LENGTH - 1], expected)
            assert not history[LENGTH - 1 :].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_te_history_of_one_step_is_empty_between_steps(layout, mlp):
    """So that the next step uses current scaling, whatever TE's scale is."""
    fp8, _ = told(from_transformer_engine, {"out": layout(te_tensors(1, length=1)[0])}, mlp)
    assert not any(leaf.any() for leaf in jax.tree.leaves(fp8["out"]))


def test_te_names_joined_by_dots_and_extra_states(mlp):
    """As a state dict of PyTorch has them."""
    state, truth = te_tensors(1)
    meta = {"mlp.wo": {"_extra_state": pytorch(state)}, "out._extra_state": pytorch(state)}
    fp8, _ = told(from_transformer_engine, meta, mlp)
    for product in (fp8["mlp"]["wo"]["DotGeneral_0"], fp8["out"]["DotGeneral_0"]):
        assert product["rhs"]["amax_history"][0] == truth[0]["rhs"][-1]
    assert not fp8["mlp"]["wi"]["DotGeneral_0"]["rhs"]["amax_history"].any()


def test_te_modules_around_the_products_of_other_layers():
    """TE/JAX in MaxText: a module of TE's in each layer, called by TE."""
    model = nn.Sequential([jfp8.Dense(WIDTH), nn.tanh, jfp8.Dense(WIDTH)])
    target = shapes(model)["fp8"]
    state, truth = te_tensors(2)
    meta = {f"layers_{2 * i}": {"TEWrapper_0": jax_new([s])} for i, s in enumerate(state)}
    fp8, _ = told(from_transformer_engine, meta, target)
    for i, amaxes in enumerate(truth):
        found = fp8[f"layers_{2 * i}"]["DotGeneral_0"]["lhs"]["amax_history"][0]
        assert found == amaxes["lhs"][-1]


def test_te_stacked_layers_and_nnx():
    state, truth = te_tensors(1)
    stacked = {k: np.stack([v, v + 1]) for k, v in jax_new(state).items()}
    target = {"layer": {"DotGeneral_0": {
        role: {"amax_history": np.zeros((2, 16), np.float32), "amax": np.zeros(2, np.float32)}
        for role in LARGEST
    }}}  # fmt: skip
    fp8, _ = told(from_transformer_engine, {"layer": stacked}, target)
    history = fp8["layer"]["DotGeneral_0"]["grad"]["amax_history"]
    np.testing.assert_array_equal(history[0, : LENGTH - 1], truth[0]["grad"][::-1][: LENGTH - 1])
    assert isinstance(history, np.ndarray)

    class Model(nnx.Module):
        def __init__(self):
            self.out = jfp8.nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    filled, _ = told(from_transformer_engine, {"out": jax_new(state)}, nnx.state(Model()))
    found = filled["out"]["dot_general"]["fp8"]["lhs"].get_value()
    assert float(found[0]) == truth[0]["lhs"][-1]


def test_te_products_without_a_counterpart(mlp):
    state, _ = te_tensors(2)
    _, messages = told(from_transformer_engine, {"attention": jax_old(state)}, mlp)
    assert messages == [
        "Amax histories of products that the target does not have are dropped: "
        "attention0, attention1.",
        "Amax histories that the checkpoint lacks start empty (current scaling until they fill): "
        "fp8/mlp/wi/DotGeneral_0, fp8/mlp/wo/DotGeneral_0, fp8/out/DotGeneral_0.",
    ]


class Explosive:
    """Runs code when it is unpickled, as anybody's can."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_te_pickles_are_not_loaded(mlp):
    pickled = pickle.dumps({"amax_history_fwd": Explosive()})
    for bomb in (pickled, bytearray(pickled), np.frombuffer(pickled, np.uint8)):
        for meta in ({"out": {"_extra_state": bomb}}, {"out._extra_state": bomb}, {"out": bomb}):
            with pytest.raises(
                TypeError, match="out.* holds bytes.*is not read here.*numpy arrays"
            ):
                from_transformer_engine(meta, mlp)


def test_te_metas_that_are_none(mlp):
    forward = {"amax_history_fwd": np.ones((8, 3))}
    for state, message in (
        ({"x_amax_history": np.ones(4)}, "out: a product has three float histories of one shape"),
        ({"fp8_meta_amax": np.ones((4, 8))}, r"fp8_meta_amax is float64\[4,8\], not float32\[3n"),
        (
            {**forward, "amax_history_bwd": np.ones((8, 3))},
            r"float64\[8,3\] and float64\[8,3\], not float32\[H, 3n\]",
        ),
        (forward, r"float64\[8,3\] and .*NoneType, not"),
        ({"fp8_meta_amax": "amax" * 9999}, "fp8_meta_amax is an object of Python's str"),
        ([np.ones(3)], "out/0: float64.*which is no state of Transformer Engine"),
        ("x" * 99999, "out: an object of Python's str, which is no state"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            from_transformer_engine({"out": state}, mlp)
        assert len(str(error.value)) < 1000
    for nothing in (None, []):  # two spellings of a layer without a state
        _, messages = told(from_transformer_engine, {"out": nothing}, mlp)
        assert "fp8/out" in messages[0]
