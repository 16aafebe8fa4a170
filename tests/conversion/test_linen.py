"""Converted Linen models: parameters, collections and calls are the same as in the original."""

import pickle
import warnings
from collections import Counter
from functools import partial
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core.scope import in_filter
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.rowwise import RowwiseScaling
from support.arrays import assert_same, normal, relative_error
from support.models import Model, products_in, trained
from support.recorded import recorded

KEY = jax.random.key(0)
DELAYED, CURRENT = DelayedScaling(), Float8CurrentScaling()
X = normal((4, 16))
IMAGES = jax.random.normal(jax.random.key(2), (2, 6, 6, 3))
SEQUENCES = jax.random.normal(jax.random.key(3), (2, 5, 16))
SEEN: list[Any] = []  # Parameters that models saw while they were traced.


def collections_of(variables):
    return [name for name in variables if name not in ("params", "fp8", "fp8_sink")]


def loss_of(model):
    def loss(variables, batch):
        y, mutated = model.apply(variables, batch, mutable=collections_of(variables))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), mutated

    return loss


def products(model, x) -> Counter:
    """Products in ``model`` and in its gradient with respect to the parameters."""
    others = dict(jax.eval_shape(model.init, KEY, x))
    params, _ = others.pop("params"), others.pop("fp8_sink", None)
    loss = lambda params, others: loss_of(model)({"params": params, **others}, x)[0]
    closed = jax.make_jaxpr(jax.grad(loss))(params, others)
    needed = [True] * len(closed.jaxpr.outvars)
    return products_in(partial_eval.dce_jaxpr(closed.jaxpr, needed)[0])


def stepped(model, variables, n=1, x=X) -> jfp8.TrainState:
    return trained(loss_of(model), variables, x, n, lr=0.0)


def amaxes(fp8: Any, role: str) -> list[np.ndarray]:
    """The largest entry of each history of a role."""
    flat = jax.tree_util.tree_flatten_with_path(fp8)[0]
    keys = (role, "amax_history")
    return [np.max(x, -1) for path, x in flat if tuple(key.key for key in path[-2:]) == keys]


def assert_histories_move(model, variables, layers, x=X):
    """After two steps two entries of each history are positive, and all others empty."""
    fp8 = stepped(model, variables, 2, x).fp8
    flat = jax.tree_util.tree_flatten_with_path(fp8)[0]
    found = [np.asarray(x) for path, x in flat if path[-1].key == "amax_history"]
    assert len(found) == 3 * layers
    for history in found:
        assert np.all(history[..., :2] > 0)
        assert not history[..., 2:].any()


def see(params: Any) -> Any:
    """Note names, shapes and dtypes of `params`, and give them back."""
    SEEN.append(jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), params))
    return params


def see_all(module: nn.Module) -> None:
    """Note the parameters of `module` in each way in which Flax shows them."""
    params = see(module.variables.get("params", {}))
    see(module.scope.variables().get("params", {}))
    see(module.unbind()[1].get("params", {}))
    for name in params:
        see(module.get_variable("params", name))


def seen_tanh(params: Any) -> Any:
    return jax.tree.map(jnp.tanh, see(params))


class Layers(nn.Module):
    """A layer of Flax's, made by `make`."""

    make: Any

    @nn.compact
    def __call__(self, x):
        layer = self.make()
        see_all(self)
        y = layer(x)
        see_all(self)
        see_all(layer)
        return y[0] if isinstance(y, tuple) else y


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        up, down = nn.Dense(32, name="up"), nn.Dense(16, name="down")
        x = x + down(nn.gelu(up(x)))
        see_all(self)
        see_all(up)
        return x, None


class Own(nn.Module):
    """A block that multiplies by itself; with a recipe, by jfp8's product."""

    recipe: Any = None

    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", nn.initializers.normal(0.3), (16, 16))
        see_all(self)
        product = jfp8.linen.EinsumProduct(recipe=self.recipe) if self.recipe else jnp.einsum
        return x + jnp.tanh(product("...d,df->...f", x, w)), None


STACK = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SCAN = {**STACK, "length": 3}
SHARED = {"split_rngs": {"params": False}}
scanned = partial(nn.scan, **SCAN)
BROADCAST = {"variable_broadcast": "params", "length": 3, **SHARED}
MAPPED = {"in_axes": (0, None), "variable_axes": {"params": None}, **SHARED}


def lifted(block):
    """Blocks under a transformation of Flax's, and a head."""
    blocks = lambda x: block(name="blocks")(x, None)[0]
    return Model(lambda module, x: nn.Dense(3, name="head")(blocks(x)))


class ScannedFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(module, x, _):
            see_all(module)
            x = nn.Dense(16, name="layer")(x)
            see_all(module)
            return x, None

        x, _ = nn.scan(body, **SCAN)(self, x, None)
        see_all(self)
        return x


class Mapped(nn.Module):
    """A layer of mapped parameters, as in Flax's example of `nn.map_variables`."""

    @nn.compact
    def __call__(self, x, _=None):
        init = self.is_initializing()
        layer = nn.map_variables(nn.Dense, "params", seen_tanh, init=init)(16)
        y = layer(x)
        see_all(self)
        see_all(layer)
        return y


class MappedBlock(Mapped):
    @nn.compact
    def __call__(self, x, _=None):
        return super().__call__(x), None


class LiftOfLift(nn.Module):
    """Two lifts with no module between them, whose scopes nobody's method is called in."""

    make: Any

    @nn.compact
    def __call__(self, x):
        y, _ = self.make(self.is_initializing())(name="blocks")(x, None)
        see_all(self)
        return jnp.sum(y, 0) if y.ndim > x.ndim else y


def mapped(target: Any, init: bool) -> Any:
    # tanh is near 0.3 for weights, and 0.98 for the amax of x: a scale of it would saturate.
    return nn.map_variables(target, "params", seen_tanh, init=init)


class Lora(nn.Module):
    """Shares the scope of its layer, as in Flax's example of `nn.share_scope`."""

    def setup(self):
        self.child = nn.Dense(16)
        nn.share_scope(self, self.child)

    @nn.compact
    def __call__(self, x):
        a = self.param("A", nn.initializers.normal(), (16, 4))
        b = self.param("B", nn.initializers.normal(), (4, 16))
        see_all(self)
        y = self.child(x) + x @ a @ b
        see_all(self)
        return y


def of_a_sequence(layer: Any) -> nn.Module:
    return Layers(lambda: nn.Sequential([lambda x: x[None], layer()]))


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(inputs=x))
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(x)


class Setup(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(16), nn.Dense(8)]
        self.head = nn.Dense(3)

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        return x


def norms(module, x):
    """A residual network with BatchNorm."""
    norm = partial(nn.BatchNorm, use_running_average=False)
    x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
    h = nn.relu(norm()(nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)))
    h = norm()(nn.Conv(8, (1, 1), use_bias=False)(h)) + nn.avg_pool(x, (2, 2), (2, 2))
    return nn.Dense(3)(h.mean((1, 2)))


def kinds(module, x):
    """One of each layer of Flax's that has a product."""
    x = nn.DenseGeneral((2, 4))(x)
    x = nn.DenseGeneral(16, axis=(-2, -1))(x)
    x = nn.Einsum((16, 16), "bsf,fg->bsg")(x)
    x = nn.Conv(16, (3,))(x)
    x = nn.ConvTranspose(16, (3,))(x)
    x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=16)(x)
    x = nn.RNN(nn.SimpleCell(16))(x)
    return nn.Dense(3)(x)


def quartered(module, x):
    """All collections, which `nn.map_variables` maps unless told otherwise."""
    quarter = lambda variables: jax.tree.map(lambda leaf: leaf / 4, variables)
    init = module.is_initializing()
    return nn.map_variables(nn.Dense, trans_in_fn=quarter, init=init)(16)(x)


def scanned_in(block) -> nn.Module:
    return LiftOfLift(lambda _: scanned(block))


MODELS = {
    # By the number of layers.
    "attention": (of_a_sequence(lambda: nn.MultiHeadDotProductAttention(2)), 4),
    "own in remat, stacked": (scanned_in(nn.remat(Own)), 1),
    "map_variables in scan": (scanned_in(MappedBlock), 1),
    "map_variables of scan": (Model(lambda module, x: mapped(ScannedFunction, True)()(x)), 1),
    "scan of a mapped class": (LiftOfLift(lambda init: scanned(mapped(Block, init))), 2),
    "stacked remat": (lifted(scanned(nn.remat(Block))), 3),
    "own, vmap": (lifted(nn.vmap(Own, in_axes=(0, None), **STACK)), 2, SEQUENCES),
    "mutable map_variables of scan and remat": (
        LiftOfLift(
            lambda _: nn.map_variables(
                scanned(nn.remat(Block)), "params", seen_tanh, see, init=True, mutable=True
            )
        ),
        2,
    ),
    "map_variables of all collections": (Model(quartered), 1),
    "weight norm": (Layers(lambda: nn.WeightNorm(nn.Dense(16))), 1),
    "share_scope": (Layers(Lora), 3),
    "setup": (Setup(), 3),
    "shared": (lifted(nn.scan(Block, **BROADCAST)), 3),
    "vmap shared": (lifted(nn.vmap(Block, **MAPPED)), 3, SEQUENCES),
    "nested": (lifted(nn.jit(nn.remat(Block))), 3),
    "other axis": (
        lifted(nn.scan(Block, length=3, **{**STACK, "variable_axes": {"params": 1}})),
        3,
    ),
    "norms": (Model(norms), 4, IMAGES),
    "kinds": (Model(kinds), 12, SEQUENCES),
}


def seen_by(call: Any, *args: Any) -> tuple[Any, list[Any]]:
    """The result of ``jax.jit(call)``, and what the model saw while it was traced."""
    SEEN.clear()
    result = jax.jit(call)(*args)
    return result, list(SEEN)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.representative(5)
def test_a_model_sees_its_parameters_and_no_others(name):
    """And each history moves: not one is mapped like a parameter, or not lifted.

    Either checkpoint fits either model, and empty histories stand for current scaling.
    """
    model, layers, *x = MODELS[name]
    (x,) = x or [X]
    converted = jfp8.convert(model, DELAYED, exempt=())
    stock, seen = seen_by(model.init, KEY, x)
    variables, seen_converted = seen_by(converted.init, KEY, x)
    assert_same({k: variables[k] for k in stock}, stock)
    assert set(variables) == {*stock, "fp8", "fp8_sink"}
    assert seen_converted[: len(seen)] == seen  # traced once more, for the states
    apply = lambda model: partial(model.apply, mutable=collections_of(stock))
    (y, _), seen = seen_by(apply(model), stock, x)
    (ours, _), seen_converted = seen_by(apply(converted), variables, x)
    assert seen_converted == seen
    assert 1e-4 < relative_error(ours, y) < 0.2  # FP8 is this far from f32.
    without, _ = jax.jit(apply(converted))(stock, x)
    assert relative_error(without, ours) < 1e-5
    assert_histories_move(converted, variables, layers, x)


@pytest.mark.parametrize("mutable", [False, True])
@pytest.mark.parametrize(
    ("model", "function"),
    [
        (Mapped(), np.tanh),
        (scanned_in(MappedBlock), np.tanh),
        (LiftOfLift(lambda init: scanned(mapped(Own, init))), np.tanh),
        (Model(quartered), lambda w: w / 4),
    ],
    ids=["map_variables", "in scan", "scan of a mapped class", "of all collections"],
)
def test_histories_are_those_of_mapped_parameters(model, function, mutable):
    """Against NumPy, with `jfp8.TrainState` and in a loop without it."""
    converted = jfp8.convert(model, exempt=())
    variables = jax.jit(converted.init)(KEY, X)
    variables["params"] = jax.tree.map(lambda leaf: leaf * 3, variables["params"])
    (kernel,) = (k for k in jax.tree.leaves(variables["params"]) if k.shape[-2:] == (16, 16))
    if mutable:
        variables.pop("fp8_sink")
        fp8 = recorded(converted, variables, X)["fp8"]
    else:
        fp8 = stepped(converted, variables, 1).fp8
        assert all(np.all(amax > 0) for amax in amaxes(fp8, "grad"))
    (found,) = amaxes(fp8, "rhs")
    np.testing.assert_allclose(found, np.abs(function(kernel)).max((-2, -1)), rtol=1e-6)
    (found,) = amaxes(fp8, "lhs")
    np.testing.assert_allclose(np.ravel(found)[0], np.abs(X).max(), rtol=1e-6)


def test_gradients_that_a_model_takes_are_those_of_parameters():
    def differentiates(module, x):
        y, vjp = nn.vjp(lambda layer, x: layer(x), nn.Dense(16), x)
        see(vjp(jnp.ones_like(y))[0])
        return y

    converted = jfp8.convert(Model(differentiates), exempt=())
    variables = converted.init(KEY, X)
    assert variables.pop("fp8_sink")  # with it a model would be told that none is differentiated
    _, expected = seen_by(Model(differentiates).apply, {"params": variables["params"]}, X)
    _, seen = seen_by(converted.apply, variables, X)
    assert seen == expected


@pytest.mark.parametrize("parameter_first", [True, False])
def test_a_module_with_the_name_of_a_state_is_refused(parameter_first):
    def named(module, x):
        layer = nn.Dense(16, name="DotGeneral_q")
        x = x if parameter_first else layer(x)
        x = x @ module.param("q", nn.initializers.normal(), (16, 16))
        return layer(x) if parameter_first else x

    model = Model(named)
    with pytest.raises(ValueError, match="'DotGeneral_q' is called like the state of a product"):
        jfp8.convert(model, exempt=()).init(KEY, X)
    assert "fp8" in jfp8.convert(model, exempt="q").init(KEY, X)


def filled(variables, amax=20.0):
    """With histories that matter: scales that differ from current ones."""
    fp8 = jax.tree.map(lambda a: jnp.full_like(a, amax) if a.ndim else a, variables["fp8"])
    return {**variables, "fp8": fp8}


@pytest.fixture(scope="module")
def setup_model():
    model = jfp8.convert(Setup(), DELAYED)
    variables = filled(jax.jit(model.init)(KEY, X))
    y = model.apply(variables, X)
    assert relative_error(model.apply({"params": variables["params"]}, X), y) > 1e-4
    return model, variables


@pytest.mark.slow
def test_bound_models(setup_model):
    model, variables = setup_model
    bound = model.bind(variables)
    np.testing.assert_array_equal(bound(X), model.apply(variables, X))
    np.testing.assert_array_equal(bound.encode(X), model.apply(variables, X, method="encode"))
    unbound, again = bound.unbind()
    assert unbound == model
    np.testing.assert_array_equal(unbound.apply(again, X), bound(X))
    variables = {k: variables[k] for k in ("params", "fp8")}
    bound = model.bind(variables, mutable=["fp8"])
    y, mutated = model.apply(variables, X, mutable=["fp8"])
    np.testing.assert_array_equal(bound(X), y)
    assert_same(bound.variables["fp8"], mutated["fp8"])


@pytest.mark.slow
def test_methods(setup_model):
    """By name, by function, and of the original class; what a method returns is at the edge."""
    model, variables = setup_model
    h = model.apply(variables, X, method="encode")
    np.testing.assert_array_equal(model.apply(variables, X, method=Setup.encode), h)
    np.testing.assert_array_equal(model.apply(variables, X, method=type(model).encode), h)
    np.testing.assert_array_equal(model.apply(variables, X, method=lambda m, x: m.encode(x)), h)
    np.testing.assert_array_equal(nn.apply(lambda m, x: m.encode(x), model)(variables, X), h)
    assert 1e-4 < relative_error(h, Setup().apply(variables, X, method="encode")) < 0.2
    with jfp8.autocast(enabled=False):
        np.testing.assert_array_equal(
            model.apply(variables, X, method="encode"), Setup().apply(variables, X, method="encode")
        )


@pytest.mark.slow
def test_init_with_output(setup_model):
    model, _ = setup_model
    y, variables = model.init_with_output(KEY, X)
    assert_same(variables, model.init(KEY, X))
    np.testing.assert_array_equal(y, model.apply(variables, X))
    only_params = model.init(KEY, X, mutable=["params"])
    assert_same(only_params, Setup().init(KEY, X))
    h, variables = model.init_with_output(KEY, X, method="encode")
    assert set(variables["params"]) == {"layers_0", "layers_1"}
    assert h.shape == (4, 8)
    assert_same(variables["params"], Setup().init(KEY, X, method="encode")["params"])


@pytest.mark.slow
@pytest.mark.parametrize("mutable", [True, ["params"], "fp8", nn.DenyList("fp8"), []])
def test_mutable_is_obeyed(setup_model, mutable):
    model, variables = setup_model
    variables = {k: variables[k] for k in ("params", "fp8")}
    y, mutated = model.apply(variables, X, mutable=mutable)
    np.testing.assert_array_equal(y, model.apply(variables, X))
    assert set(mutated) == {c for c in ("params", "fp8") if in_filter(mutable, c)}
    if "params" in mutated:
        assert_same(mutated["params"], variables["params"])
    if "fp8" in mutated:  # nothing is recorded without a gradient
        assert_same(mutated["fp8"], variables["fp8"])
        loss = lambda params: model.apply(variables | {"params": params}, X, mutable=mutable)
        _, mutated = jax.grad(lambda p: (loss(p)[0].sum(), loss(p)[1]), has_aux=True)(
            variables["params"]
        )
        found = mutated["fp8"]["layers_0"]["DotGeneral_0"]
        assert found["lhs"]["amax_history"][0] == np.abs(X).max()
        assert (found["grad"]["amax_history"] == 20).all()  # The backward pass returns none.


def test_initial_variables_hold_nothing_sown():
    """Flax's ``init_with_output`` leaves that out, too."""

    def sowing(module, x):
        module.sow("intermediates", "x", x)
        return nn.Dense(2)(x)

    model = jfp8.convert(Model(sowing), "current", exempt=())
    _, variables = model.init_with_output(KEY, X)
    assert set(variables) == {"params"}


@pytest.mark.slow
def test_frozen_dicts_and_intermediates(setup_model):
    model, variables = setup_model
    y, mutated = model.apply(
        flax.core.freeze(variables), X, capture_intermediates=True, mutable=["intermediates"]
    )
    np.testing.assert_array_equal(y, model.apply(variables, X))
    assert list(mutated) == ["intermediates"]
    np.testing.assert_array_equal(mutated["intermediates"]["__call__"][0], y)
    assert "__call__" in mutated["intermediates"]["layers_0"]


@pytest.mark.slow
def test_part_of_a_model_that_is_not_converted():
    """A model of one's own with a converted part, at which patterns begin."""
    outer = lambda part: nn.Sequential([part, nn.Dense(3)])
    stock, model = outer(Compact()), outer(jfp8.convert(Compact(), DELAYED))
    variables = jax.jit(model.init)(KEY, X)
    assert_same(variables["params"], stock.init(KEY, X)["params"])
    assert set(variables["fp8"]) == {"layers_0"}
    assert set(variables["fp8"]["layers_0"]) == {"Dense_0", "Dense_1", "Dense_2"}  # no logits here
    assert products(model, X) == {"fprop": 3, "dgrad": 2, "wgrad": 3, "plain": 3}
    assert_histories_move(model, variables, 3)
    model = outer(jfp8.convert(Compact(), DELAYED, exempt="Dense_1"))
    assert set(jax.eval_shape(model.init, KEY, X)["fp8"]["layers_0"]) == {"Dense_0", "Dense_2"}
    # Both may be converted, each with a recipe of its own.
    model = nn.Sequential([jfp8.convert(nn.Dense(8), DELAYED, exempt=()), nn.Dense(8)])
    converted = jfp8.convert(model, RowwiseScaling(), exempt=())
    variables = jax.jit(converted.init)(KEY, X)
    assert set(variables["fp8"]) == {"layers_0"}
    recipes = {row.path: row.recipe for row in jfp8.report(converted, variables, X).rows}
    assert recipes == {"layers_0": "delayed", "layers_1": "rowwise"}
    assert_histories_move(converted, variables, 1)


def converted_layers(model, *inputs, **kwargs) -> set[str]:
    """The paths of layers with histories."""
    shapes = jax.eval_shape(jfp8.convert(model, DELAYED, **kwargs).init, KEY, *inputs)
    paths = jax.tree.leaves_with_path(shapes.get("fp8", {}))
    keys = ["/".join(k.key for k in path) for path, _ in paths]
    return {key.split("/DotGeneral")[0].split("/ConvGeneral")[0] for key in keys}


def own_dot_general(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"dot_general": own_dot_general}, {"dot_general_cls": lambda: own_dot_general}]
)
def test_a_layer_with_a_product_of_its_own_keeps_it(given):
    model = nn.Sequential([nn.Dense(8, **given), nn.Dense(8), nn.Dense(3)])
    model = jfp8.convert(model, CURRENT, exempt=())
    assert products(model, X) == {"fprop": 2, "dgrad": 2, "wgrad": 2, "plain": 2}
    rows = jfp8.report(model, jax.eval_shape(model.init, KEY, X), X).rows
    reasons = {row.reason for row in rows if row.path == "layers_0"}
    assert reasons == {"the layer was given its own dot_general"}
    alone = jfp8.convert(nn.Dense(8, **given), CURRENT, exempt=())
    variables = alone.init(KEY, X)
    np.testing.assert_array_equal(alone.apply(variables, X), 2 * nn.Dense(8).apply(variables, X))


@pytest.mark.slow
def test_layers_of_jfp8_keep_recipe_and_implementation():
    by_recipe, by_xla = jfp8.Dense(8, recipe=RowwiseScaling()), jfp8.Dense(8, implementation="xla")
    model = nn.Sequential([by_recipe, by_xla, jfp8.Einsum((8, 8), "ab,bc->ac"), nn.Dense(3)])
    converted = jfp8.convert(model, CURRENT)
    shapes = jax.eval_shape(converted.init, KEY, X)
    rows = jfp8.report(converted, shapes, X).rows
    recipes = {row.path: row.recipe for row in rows}
    assert list(recipes) == [f"layers_{i}" for i in range(4)]
    assert list(recipes.values()) == ["rowwise", "current", "current", ""]
    # XLA multiplies f8 x f8 on this device for ``implementation="xla"`` alone.
    text = jax.jit(converted.apply).lower(shapes, X).as_text()
    assert any("dot_general" in t and "f8E4M3FN>" in t.split("->")[0] for t in text.splitlines())


def test_names_and_attributes_that_flax_or_jfp8_have():
    """Modules named like operands; and one that looks up its attributes, as Gemma's does.

    Flax treats `__getattr__` as a method of the model.
    """

    class Gated(nn.Module):
        def setup(self):
            self.lhs, self.rhs, self.grad, self.amax = (nn.Dense(8) for _ in range(4))

        def __call__(self, x):
            return self.amax(self.lhs(x) * nn.sigmoid(self.rhs(x)) + self.grad(x))

    model = jfp8.convert(Gated(), DELAYED, exempt=())
    variables = jax.jit(model.init)(KEY, X)
    assert set(variables["fp8"]) == {"lhs", "rhs", "grad", "amax"}
    assert_histories_move(model, variables, 4)

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

        def __getattr__(self, name):
            return 4 if name == "features" else super().__getattr__(name)

    assert converted_layers(Looks(), X, exempt=()) == {"Dense_0"}


def test_subclasses_of_layers():
    class Scaled(nn.Dense):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Heir(nn.Dense):
        pass

    model = nn.Sequential([Scaled(8), nn.Dense(3)])
    assert converted_layers(model, X) == {"layers_0"}
    assert converted_layers(model, X, exempt=Scaled) == {"layers_1"}
    assert converted_layers(model, X, only=nn.Dense) == {"layers_0", "layers_1"}
    # Its product is not found once more where the layer gives the logits.
    assert converted_layers(nn.Sequential([nn.Dense(8), nn.relu, Heir(4)]), X) == {"layers_0"}


@pytest.mark.slow
def test_boxed_parameters():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Sequential([nn.Dense(8, kernel_init=init), nn.Dense(3)])
    converted = jfp8.convert(model, DELAYED)
    variables = jax.jit(converted.init)(KEY, X)
    assert_same(variables["params"], jax.jit(model.init)(KEY, X)["params"])
    assert nn.get_partition_spec(variables)["params"]["layers_0"]["kernel"] == P(None, "model")
    assert_histories_move(converted, nn.unbox(variables), 1)


def test_models_are_values():
    make = lambda name=None, **kwargs: jfp8.convert(Block(name=name), CURRENT, **kwargs)
    assert make() == make()
    assert hash(make()) == hash(make())
    others = [make("a"), make(exempt="up"), jfp8.convert(Block(), DELAYED), Block()]
    assert all(make() != other for other in others)
    assert make().clone(name="a") == make("a")
    assert make("a").name == "a"
    assert make().copy() == make()
    assert isinstance(make(), Block)
    assert type(make()).__name__ == "Block"
    converted = jfp8.convert(Block(), {"up": "delayed", "*": "mxfp8"}, exempt=())
    loaded = pickle.loads(pickle.dumps(converted))
    assert loaded == converted
    assert type(loaded) is type(converted)
    variables = loaded.init(KEY, X)
    assert set(variables["fp8"]) == {"up"}
    assert_same(loaded.apply(variables, X)[0], converted.apply(variables, X)[0])


own_derivative = jax.custom_jvp(jnp.dot)
own_derivative.defjvp(lambda xs, ts: (jnp.dot(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))


class OwnEinsum(nn.Module):
    """A home-made layer, whose product cannot be seen from outside."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (16, 16))
        return own_derivative(x, w)


JittedBlock = nn.jit(Block)


class Partly(nn.Module):
    """A part of it is home-made, the other is Flax's under ``nn.jit``."""

    @nn.compact
    def __call__(self, x):
        return OwnEinsum()(JittedBlock(name="block")(x)[0])

    @nn.compact
    def encode(self, x):
        return OwnEinsum(name="OwnEinsum_0")(x)


def test_who_has_fp8_or_calls_a_part_without_it_is_not_warned():
    partly = jfp8.convert(Partly(), CURRENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = nn.Sequential([jfp8.Dense(16, recipe="current"), nn.relu])
        for model in (jfp8.convert(ours, CURRENT), partly):
            for _ in range(2):  # A block under nn.jit is traced in the first alone.
                variables = jax.eval_shape(model.init, KEY, X)
                jax.eval_shape(model.apply, variables, X)
        jax.eval_shape(partial(partly.apply, method="encode"), variables, X)


def jitted(module, x):
    block = nn.jit(Block)  # Flax traces it once for both
    x, _ = block(name="one")(x)
    x, _ = block(name="two")(x)
    return nn.Dense(3)(x)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Compact(), Model(jitted)], ids=["compact", "nn.jit"])
def test_no_trace_of_another_recipe_is_used(model):
    """Conversions of one model in one process, in any order, and the model itself."""
    variables = jax.jit(model.init)(KEY, X)
    recipes = [CURRENT, RowwiseScaling(), Float8CurrentScaling(fp8_format="E5M2")]
    models = [model, *(jfp8.convert(model, recipe, exempt=()) for recipe in recipes)]
    first = [np.asarray(jax.jit(m.apply)(variables, X)) for m in models]
    again = [np.asarray(jax.jit(m.apply)(variables, X)) for m in reversed(models)][::-1]
    for i, y in enumerate(first):
        np.testing.assert_array_equal(again[i], y)
        for other in first[:i]:
            assert relative_error(y, other) > 1e-3


def test_layers_are_chosen_inside_of_jitted_blocks():
    """The same ones in every block of a class: Flax traces it once for all of them."""
    assert converted_layers(Model(jitted), X, exempt="*/down") == {"one/up", "two/up", "Dense_0"}
    one = Model(lambda module, x: nn.jit(Block)(name="one")(x)[0])
    for made in (one, Partly()):  # Flax traces the block of the second in the first call alone
        model = jfp8.convert(made, DELAYED, only=nn.Dense)
        assert jax.eval_shape(model.init, KEY, X) == jax.eval_shape(model.init, KEY, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jfp8.convert(Compact), "a Flax Linen or NNX module, got the class Compact"),
        (lambda: jfp8.convert({"params": {}}), "not its class or its parameters"),
        (lambda: jfp8.convert("delayed", Compact()), "a model, which comes first"),
        (lambda: jfp8.convert(Compact(), DelayedScaling), "recipe"),
        (lambda: jfp8.convert(Compact(), exempt=3), "exempt=3: must be patterns of paths"),
        (lambda: jfp8.convert(Compact(), only=[3]), r"only=\[3\]: must be patterns of paths"),
        (
            lambda: jfp8.convert(Compact().bind(Compact().init(KEY, X))),
            "bound to variables. Convert the model first, then call .bind or .apply",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_apply_tells_a_pattern_that_matches_nothing():
    model = jfp8.convert(Compact(), exempt="encoder/*")
    with pytest.raises(
        ValueError, match=r"'encoder/\*' matches no layer.*Dense_0, Dense_1, Dense_2"
    ):
        model.apply(Compact().init(KEY, X), X)


def test_an_exempt_layer_may_round_to_fp8_itself():
    rounds = nn.Dense(16, dtype=jnp.float8_e4m3fn)
    plain = nn.Sequential([rounds, lambda x: x.astype(jnp.float32), nn.Dense(16)])
    model = jfp8.convert(plain, "current", exempt="layers_0")
    assert model.init(KEY, X).keys() == {"params"}
    with pytest.raises(TypeError, match=r"(?s)float8_e4m3fn.*Leave dtype out"):
        jfp8.convert(plain, "current", exempt=()).init(KEY, X)


def test_a_region_without_fp8_is_the_model_with_its_random_keys():
    plain = nn.Sequential([nn.Dense(8), nn.Dropout(0.5, deterministic=False)])
    rngs = {"params": KEY, "dropout": jax.random.key(1)}
    model = jfp8.convert(plain, "current", exempt=())
    variables = model.init(rngs, X)
    with jfp8.autocast(enabled=False):
        y = model.apply(variables, X, rngs=rngs)
    np.testing.assert_array_equal(y, plain.apply(variables, X, rngs=rngs))
    assert np.any(y)


def test_a_region():
    """Nothing is left behind in the model, nor in JAX."""
    model = Model(lambda module, x: Own()(x)[0])
    variables = jax.eval_shape(model.init, KEY, X)
    is_fp8 = lambda: [row.fp8 for row in jfp8.report(model, variables, X).rows][0]
    with jfp8.autocast("current"):
        assert is_fp8()
    with jfp8.autocast("current", enabled=False):
        assert not is_fp8()
    assert not is_fp8()
    with jfp8.autocast("delayed"):
        made = jax.eval_shape(model.init, KEY, X)
    assert made["params"] == variables["params"]
    assert sorted(made["fp8"]["Own_0"]) == ["DotGeneral_w"]


@pytest.mark.parametrize(
    ("given", "said"),
    [(("fp8", "fp8_sink"), "but not to its sink"), ((), "without its 'fp8' collection")],
)
@pytest.mark.representative(1)
@pytest.mark.skipif(
    jax.config.jax_remat3, reason="this checkpoint does not say what a gradient is with respect to"
)
def test_histories_that_a_body_cannot_update_are_told(given, said):
    model = jfp8.convert(MODELS["own in remat, stacked"][0], "delayed", exempt=())
    variables = model.init(KEY, X)
    state = {name: variables[name] for name in given}
    with pytest.warns(UserWarning, match=said):
        jax.grad(lambda p: jnp.sum(model.apply({"params": p, **state}, X)))(variables["params"])


def bridged(make):
    inside = lambda x: nnx.bridge.to_linen(make, 16, 8, name="inside")(nn.Dense(16)(x))
    return Model(lambda module, x: inside(x))


@pytest.mark.slow
def test_nnx_modules_in_linen_models_are_told():
    converted = jfp8.convert(bridged(nnx.Linear), "current", exempt=())
    with pytest.warns(UserWarning, match=r"Linear at 'inside'.*where they are made") as told:
        variables = converted.init(KEY, X)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted.apply(variables, X)  # was told once
        jfp8.convert(bridged(nnx.Linear), "current", exempt="inside").init(KEY, X)
        # The advice of the warning.
        make = lambda *args, **kwargs: jfp8.convert(
            nnx.Linear(*args, **kwargs), "current", exempt=()
        )
        advised = jfp8.convert(bridged(make), "current", exempt=())
        assert jfp8.report(advised, advised.init(KEY, X), X).fp8_fraction == 1


def test_nnx_layers_in_the_place_of_linen_layers_are_told():
    """`init` returns no parameters of theirs."""
    rngs = nnx.Rngs(0)
    layer = lambda: nnx.Linear(X.shape[-1], X.shape[-1], rngs=rngs)

    class Holder(nn.Module):
        layer: nnx.Linear

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(self.layer(x))

    for model, place in (
        (nn.Sequential([nn.Dense(X.shape[-1]), layer(), nn.Dense(8)]), "layers_1"),
        (nn.Sequential([Holder(layer()), nn.Dense(8)]), "layers_0/layer"),
    ):
        converted = jfp8.convert(model, "current", exempt=())
        with pytest.warns(UserWarning, match=rf"Linear at '{place}'.*nnx\.bridge\.to_linen"):
            converted.init(KEY, X)
