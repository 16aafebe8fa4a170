"""A converted model sees the parameters that it would see unconverted, wherever it looks."""

import functools
import pickle
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfp8
from support.arrays import assert_same, normal, relative_error
from support.models import Model, trained
from support.recorded import recorded

KEY = jax.random.key(0)
X = normal((4, 16))
SEEN: list[Any] = []  # what models saw of their parameters while they were traced


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


def seen_bf16(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), see(params))


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
        layer = nn.Dense(16)
        x = nn.relu(layer(x))
        see_all(self)
        see_all(layer)
        return x, None


SCAN = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}


class Scanned(nn.Module):
    """Blocks under ``nn.scan``."""

    block: Any = Block

    @nn.compact
    def __call__(self, x):
        x, _ = nn.scan(self.block, **SCAN)(name="blocks")(x, None)
        see_all(self)
        return x


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

    function: Any = seen_tanh

    @nn.compact
    def __call__(self, x, _=None):
        init = self.is_initializing()
        layer = nn.map_variables(nn.Dense, "params", self.function, init=init)(16)
        y = layer(x)
        see_all(self)
        see_all(layer)
        return y


class MappedBlock(Mapped):
    @nn.compact
    def __call__(self, x, _=None):
        return super().__call__(x), None


class MappedFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        def run(module, x):
            y = nn.Dense(16, name="layer")(x)
            see_all(module)
            return y

        y = nn.map_variables(run, "params", seen_tanh, see, init=True, mutable=True)(self, x)
        see_all(self)
        return nn.Dense(8)(y)


class MappedMethod(nn.Module):
    @functools.partial(
        nn.map_variables, mapped_collections="params", trans_in_fn=seen_tanh, init=True
    )
    @nn.compact
    def __call__(self, x, _=None):
        see_all(self)
        return nn.Dense(16)(x), None


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


scanned = functools.partial(nn.scan, **SCAN)


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


def custom_vjp(module, x):
    def forward(module, x):
        return nn.vjp(lambda module, x: module(x), module, x)

    def backward(vjp, cotangent):
        return tuple(vjp(cotangent))

    return nn.custom_vjp(lambda module, x: module(x), forward, backward)(nn.Dense(16), x)


def of_a_sequence(layer: Any) -> nn.Module:
    return Layers(lambda: nn.Sequential([lambda x: x[None], layer()]))


def lifted(lift: Any) -> nn.Module:
    return Model(lambda module, x: lift(Mapped)()(x))


stacked = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "axis_size": 2}
MODELS = {
    "attention": of_a_sequence(lambda: nn.MultiHeadDotProductAttention(2)),
    "scan": Scanned(),
    "map_variables": Mapped(),
    "map_variables in scan": Scanned(MappedBlock),
    "map_variables of scan": Model(lambda module, x: mapped(ScannedFunction, True)()(x)),
    "map_variables of a scanned class": LiftOfLift(lambda init: mapped(scanned(Block), init)),
    "scan of a mapped class": LiftOfLift(lambda init: scanned(mapped(Block, init))),
    "conv": of_a_sequence(lambda: nn.Conv(16, (3,))),
    "optimized lstm": of_a_sequence(lambda: nn.RNN(nn.OptimizedLSTMCell(16))),
    "scan of a function": ScannedFunction(),
    "weight norm": Layers(lambda: nn.WeightNorm(nn.Dense(16))),
    "share_scope": Layers(Lora),
    "map_variables to bf16": Mapped(seen_bf16),
    "map_variables of a function": MappedFunction(),
    "map_variables of a method": Model(lambda module, x: MappedMethod()(x)[0]),
    "map_variables in remat": lifted(nn.remat),
    "map_variables in vmap": lifted(functools.partial(nn.vmap, in_axes=None, **stacked)),
    "mutable map_variables of scan and remat": LiftOfLift(
        lambda _: nn.map_variables(
            scanned(nn.remat(Block)), "params", seen_tanh, see, init=True, mutable=True
        )
    ),
}


def seen_by(call: Any, *args: Any) -> tuple[Any, list[Any]]:
    """The result of ``jax.jit(call)``, and what the model saw while it was traced."""
    SEEN.clear()
    result = jax.jit(call)(*args)
    return result, list(SEEN)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.representative(7)
def test_a_model_sees_its_parameters_and_no_others(name):
    """And each history moves: not one is mapped like a parameter, or not lifted."""
    model = MODELS[name]
    converted = jfp8.convert(model, exempt=())
    stock, seen = seen_by(model.init, KEY, X)
    variables, seen_converted = seen_by(converted.init, KEY, X)
    assert_same(variables["params"], stock["params"])
    assert set(variables) == {"params", "fp8", "fp8_sink"}
    assert seen_converted[: len(seen)] == seen  # traced once more, for the states
    y, seen = seen_by(model.apply, stock, X)
    y_converted, seen_converted = seen_by(converted.apply, variables, X)
    assert seen_converted == seen
    assert relative_error(y_converted, y) < 0.15
    fp8 = stepped(converted, variables, 2).fp8
    for role in ("lhs", "rhs", "grad"):
        found = amaxes(fp8, role)
        assert found
        assert all(np.all(amax > 0) for amax in found)


def stepped(converted: nn.Module, variables: Any, n: int) -> jfp8.TrainState:
    loss_fn = lambda variables, x: jnp.sum(jnp.sin(converted.apply(variables, x)))
    return trained(loss_fn, variables, X, n, lr=0.0)


def amaxes(fp8: Any, role: str) -> list[np.ndarray]:
    """The largest entry of each history of a role."""
    flat = jax.tree_util.tree_flatten_with_path(fp8)[0]
    keys = (role, "amax_history")
    return [np.max(x, -1) for path, x in flat if tuple(key.key for key in path[-2:]) == keys]


def test_functions_of_all_collections_do_not_scale_histories():
    """`nn.map_variables` maps all collections unless told otherwise; by the stock model."""

    def quartered(module, x):
        quarter = lambda variables: jax.tree.map(lambda leaf: leaf / 4, variables)
        init = module.is_initializing()
        return nn.map_variables(nn.Dense, trans_in_fn=quarter, init=init)(16)(x)

    converted = jfp8.convert(Model(quartered), exempt=())
    state = stepped(converted, converted.init(KEY, X), 2)

    def loss(variables, x):
        y = converted.apply(variables, x)
        return jnp.sum(y), {}, y

    (_, found), _ = jfp8.value_and_grad(loss, has_aux=True)(state, X)
    assert relative_error(found, Model(quartered).apply({"params": state.params}, X)) < 0.05
    assert all(np.all(amax > 0) for amax in amaxes(state.fp8, "grad"))


def test_a_decorated_method_under_scan_keeps_its_state():
    """Its functions see the state there, but it must not get lost."""
    converted = jfp8.convert(Scanned(MappedMethod), exempt=())
    variables = converted.init(KEY, X)
    assert set(variables) == {"params", "fp8", "fp8_sink"}
    assert all(np.all(amax > 0) for amax in amaxes(stepped(converted, variables, 1).fp8, "lhs"))


@pytest.mark.parametrize("mutable", [False, True])
@pytest.mark.parametrize(
    "name", ["map_variables", "map_variables in scan", "scan of a mapped class"]
)
def test_histories_are_those_of_mapped_parameters(name, mutable):
    """Against NumPy, with `jfp8.TrainState` and in a loop without it."""
    converted = jfp8.convert(MODELS[name], exempt=())
    variables = jax.jit(converted.init)(KEY, X)
    variables["params"] = jax.tree.map(lambda leaf: leaf * 3, variables["params"])
    (kernel,) = (k for k in jax.tree.leaves(variables["params"]) if k.shape[-2:] == (16, 16))
    if mutable:
        variables.pop("fp8_sink")
        fp8 = recorded(converted, variables, X)["fp8"]
    else:
        fp8 = stepped(converted, variables, 1).fp8
    (found,) = amaxes(fp8, "rhs")
    np.testing.assert_allclose(found, np.abs(np.tanh(kernel)).max((-2, -1)), rtol=1e-6)
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


def test_pickled_models_are_converted_models():
    converted = jfp8.convert(Block(), {"Dense_0": "delayed", "*": "mxfp8"}, exempt=())
    loaded = pickle.loads(pickle.dumps(converted))
    assert loaded == converted
    assert type(loaded) is type(converted)
    variables = loaded.init(KEY, X)
    assert "fp8" in variables
    assert_same(loaded.apply(variables, X), converted.apply(variables, X))


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
        # What the warning advises.
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


def spectral(layer):
    return Model(lambda module, x: nn.SpectralNorm(layer(16))(x, update_stats=False))


@pytest.mark.slow
def test_spectral_norm_sees_no_state():
    """It normalizes every array of a layer."""
    converted = jfp8.convert(spectral(nn.Dense), exempt=())
    variables = converted.init(KEY, X)
    y = spectral(nn.Dense).apply({k: variables[k] for k in ("params", "batch_stats")}, X)
    assert 0 < relative_error(converted.apply(variables, X), y) < 0.1
