"""A converted model sees the parameters that it would see unconverted, wherever it looks."""

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import InvalidRngError

import jfp8
from support.arrays import assert_same, normal, relative_error

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
    def __call__(self, x):
        see_all(self)
        return nn.Dense(16)(x)


class MappedMethodBlock(nn.Module):
    @functools.partial(
        nn.map_variables, mapped_collections="params", trans_in_fn=seen_tanh, init=True
    )
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(16)(x), None


class MappedScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.map_variables(ScannedFunction, "params", seen_tanh, init=True)()(x)


class Lifted(nn.Module):
    """``lift(Mapped)``."""

    lift: Any

    @nn.compact
    def __call__(self, x):
        return self.lift(Mapped)()(x)


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


class Penalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(8)(nn.relu(nn.Dense(12)(x)))
        leaves = jax.tree.leaves(self.variables["params"])
        return y, sum(jnp.linalg.norm(leaf) for leaf in leaves), sum(leaf.size for leaf in leaves)


class CustomVjp(nn.Module):
    @nn.compact
    def __call__(self, x):
        def forward(module, x):
            return nn.vjp(lambda module, x: module(x), module, x)

        def backward(vjp, cotangent):
            return tuple(vjp(cotangent))

        return nn.custom_vjp(lambda module, x: module(x), forward, backward)(nn.Dense(16), x)


sequence = lambda x: x[None]
MODELS = {
    "dense": Layers(lambda: nn.Dense(16)),
    "conv": Layers(lambda: nn.Sequential([sequence, nn.Conv(16, (3,))])),
    "attention": Layers(lambda: nn.Sequential([sequence, nn.MultiHeadDotProductAttention(2)])),
    "lstm": Layers(lambda: nn.Sequential([sequence, nn.RNN(nn.LSTMCell(16))])),
    "optimized lstm": Layers(lambda: nn.Sequential([sequence, nn.RNN(nn.OptimizedLSTMCell(16))])),
    "scan": Scanned(),
    "scan of remat": Scanned(nn.remat(Block)),
    "scan of a function": ScannedFunction(),
    "weight norm": Layers(lambda: nn.WeightNorm(nn.Dense(16))),
    "share_scope": Layers(Lora),
    "map_variables": Mapped(),
    "map_variables to bf16": Mapped(seen_bf16),
    "map_variables of a function": MappedFunction(),
    "map_variables of a method": MappedMethod(),
    "map_variables in scan": Scanned(MappedBlock),
    "map_variables of scan": MappedScan(),
    "map_variables in remat": Lifted(nn.remat),
    "map_variables in jit": Lifted(nn.jit),
    "map_variables in vmap": Lifted(
        functools.partial(
            nn.vmap,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            axis_size=2,
            in_axes=None,
        )
    ),
    "custom_vjp": CustomVjp(),
    "map_variables of a scanned class": LiftOfLift(lambda init: mapped(scanned(Block), init)),
    "scan of a mapped class": LiftOfLift(lambda init: scanned(mapped(Block, init))),
    "remat of a mapped class": LiftOfLift(lambda init: nn.remat(mapped(Block, init))),
    "mutable map_variables of scan and remat": LiftOfLift(
        lambda _: nn.map_variables(
            scanned(nn.remat(Block)), "params", seen_tanh, see, init=True, mutable=True
        )
    ),
}


DAILY = ("scan", "map_variables", "map_variables in scan", "map_variables of scan")
DAILY += ("map_variables of a scanned class", "scan of a mapped class")


def seen_by(call: Any, *args: Any) -> tuple[Any, list[Any]]:
    """The result of ``jax.jit(call)``, and what the model saw while it was traced."""
    SEEN.clear()
    result = jax.jit(call)(*args)
    return result, list(SEEN)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.representative(8)
def test_a_model_sees_its_parameters_and_no_others(name):
    model = MODELS[name]
    converted = jfp8.convert(model, exempt=())
    stock, seen = seen_by(model.init, KEY, X)
    variables, seen_converted = seen_by(converted.init, KEY, X)
    assert_same(variables["params"], stock["params"])
    assert set(variables) == {"params", "fp8", "fp8_sink"}
    assert seen_converted == seen
    y, seen = seen_by(model.apply, stock, X)
    y_converted, seen_converted = seen_by(converted.apply, variables, X)
    assert seen_converted == seen
    assert relative_error(y_converted, y) < 0.15


def stepped(converted: nn.Module, variables: Any, n: int) -> jfp8.TrainState:
    state = jfp8.TrainState.create(apply_fn=converted.apply, variables=variables, tx=optax.sgd(0.0))

    @jax.jit
    def step(state):
        loss = lambda variables, x: jnp.sum(jnp.sin(converted.apply(variables, x)))
        return state.apply_gradients(jfp8.value_and_grad(loss)(state, X)[1])

    for _ in range(n):
        state = step(state)
    return state


def amaxes(fp8: Any, role: str) -> list[np.ndarray]:
    """The largest entry of each history of a role."""
    flat = jax.tree_util.tree_flatten_with_path(fp8)[0]
    keys = (role, "amax_history")
    return [np.max(x, -1) for path, x in flat if tuple(key.key for key in path[-2:]) == keys]


@pytest.mark.parametrize(
    "name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_every_history_moves(name):
    """What was not lifted, or was mapped like a parameter, stays zero or holds something else."""
    converted = jfp8.convert(MODELS[name], exempt=())
    fp8 = stepped(converted, jax.jit(converted.init)(KEY, X), 2).fp8
    for role in ("lhs", "rhs", "grad"):
        found = amaxes(fp8, role)
        assert found
        assert all(np.all(amax > 0) for amax in found)


@pytest.mark.parametrize(
    "name", ["map_variables", "map_variables in scan", "scan of a mapped class"]
)
def test_mutable_histories_of_mapped_parameters_are_recorded(name):
    """In a loop without `jfp8.TrainState`; by NumPy."""
    converted = jfp8.convert(MODELS[name], exempt=())
    variables = jax.jit(converted.init)(KEY, X)
    variables.pop("fp8_sink")
    (kernel,) = (k for k in jax.tree.leaves(variables["params"]) if k.shape[-2:] == (16, 16))
    _, mutated = jax.jit(functools.partial(converted.apply, mutable=["fp8"]))(variables, X)
    (found,) = amaxes(mutated["fp8"], "rhs")
    np.testing.assert_allclose(found, np.abs(np.tanh(kernel)).max((-2, -1)), rtol=1e-6)
    (found,) = amaxes(mutated["fp8"], "lhs")
    np.testing.assert_allclose(np.ravel(found)[0], np.abs(X).max(), rtol=1e-6)


def test_functions_of_all_collections_do_not_scale_histories():
    """`nn.map_variables` maps all collections unless told otherwise; by the stock model."""

    class Quartered(nn.Module):
        @nn.compact
        def __call__(self, x):
            quarter = lambda variables: jax.tree.map(lambda leaf: leaf / 4, variables)
            init = self.is_initializing()
            return nn.map_variables(nn.Dense, trans_in_fn=quarter, init=init)(16)(x)

    converted = jfp8.convert(Quartered(), exempt=())
    state = stepped(converted, converted.init(KEY, X), 2)

    def loss(variables, x):
        y = converted.apply(variables, x)
        return jnp.sum(y), {}, y

    (_, found), _ = jfp8.value_and_grad(loss, has_aux=True)(state, X)
    assert relative_error(found, Quartered().apply({"params": state.params}, X)) < 0.05
    assert all(np.all(amax > 0) for amax in amaxes(state.fp8, "grad"))


def test_a_decorated_method_under_scan_keeps_its_state():
    """Its functions see the state there, but it must not get lost."""
    converted = jfp8.convert(Scanned(MappedMethodBlock), exempt=())
    variables = converted.init(KEY, X)
    assert set(variables) == {"params", "fp8", "fp8_sink"}
    assert all(np.all(amax > 0) for amax in amaxes(stepped(converted, variables, 1).fp8, "lhs"))


@pytest.mark.parametrize("cast", [seen_tanh, seen_bf16])
@pytest.mark.parametrize("name", ["map_variables", "map_variables in scan"])
def test_histories_are_those_of_mapped_parameters(name, cast):
    """By NumPy: the amax of a weight is that of the mapped one, of the input that of the input."""
    model = (
        Mapped(cast) if name == "map_variables" else Scanned(functools.partial(MappedBlock, cast))
    )
    converted = jfp8.convert(model, exempt=())
    variables = jax.jit(converted.init)(KEY, X)
    variables["params"] = jax.tree.map(lambda leaf: leaf * 3, variables["params"])
    state = stepped(converted, variables, 1)
    (kernel,) = (
        leaf
        for leaf in jax.tree.leaves(variables["params"])
        if leaf.ndim >= 2 and leaf.shape[-2:] == (16, 16)
    )
    mapped = np.asarray(
        cast(np.asarray(kernel)) if cast is seen_bf16 else np.tanh(kernel), np.float32
    )
    (found,) = amaxes(state.fp8, "rhs")
    np.testing.assert_allclose(found, np.abs(mapped).max((-2, -1)), rtol=1e-6)
    (found,) = amaxes(state.fp8, "lhs")
    np.testing.assert_allclose(np.ravel(found)[0], np.abs(X).max(), rtol=1e-2)


@pytest.mark.slow
def test_norms_and_counts_are_those_of_the_model():
    """The norm of a sink, zeros, has a gradient that is NaN: every step was skipped."""
    model = Penalized()
    converted = jfp8.convert(model, exempt=())
    variables = converted.init(KEY, X)
    _, penalty, n = model.apply({"params": variables["params"]}, X)
    _, found, n_found = jax.jit(converted.apply)(variables, X)
    assert (found, n_found) == (penalty, n)
    variables["params"] = jax.tree.map(lambda leaf: leaf + 0.1, variables["params"])
    state = jfp8.TrainState.create(apply_fn=converted.apply, variables=variables, tx=optax.sgd(0.1))
    loss = lambda variables, x: sum(map(jnp.sum, converted.apply(variables, x)[:2]))
    after = state.apply_gradients(jfp8.value_and_grad(loss)(state, X)[1])
    assert after.step == 1
    assert not np.array_equal(after.params["Dense_0"]["kernel"], state.params["Dense_0"]["kernel"])


def test_gradients_that_a_model_takes_are_those_of_parameters():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y, vjp = nn.vjp(lambda layer, x: layer(x), nn.Dense(16), x)
            see(vjp(jnp.ones_like(y))[0])
            return y

    converted = jfp8.convert(Model(), exempt=())
    variables = converted.init(KEY, X)
    assert variables.pop("fp8_sink")  # with it a model would be told that none is differentiated
    _, expected = seen_by(Model().apply, {"params": variables["params"]}, X)
    _, seen = seen_by(converted.apply, variables, X)
    assert seen == expected


@pytest.mark.slow
def test_an_optimized_cell_is_converted_like_the_cell_that_it_optimizes():
    make = {
        kind: jfp8.convert(nn.RNN(kind(16, name="cell")), "current", exempt=())
        for kind in (nn.LSTMCell, nn.OptimizedLSTMCell)
    }
    variables = make[nn.LSTMCell].init(KEY, X[None])
    assert_same(make[nn.OptimizedLSTMCell].init(KEY, X[None]), variables)
    y, expected = (
        make[kind].apply(variables, X[None]) for kind in (nn.OptimizedLSTMCell, nn.LSTMCell)
    )
    assert_same(y, expected)
    assert jfp8.report(make[nn.OptimizedLSTMCell], variables, X[None]).fp8_fraction == 1


class Named(nn.Module):
    """Has a parameter ``q``, and a module whose name is that of the state of its product."""

    parameter_first: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(16, name="DotGeneral_q")
        x = x if self.parameter_first else layer(x)
        x = x @ self.param("q", nn.initializers.normal(), (16, 16))
        return layer(x) if self.parameter_first else x


@pytest.mark.parametrize("parameter_first", [True, False])
def test_a_module_with_the_name_of_a_state_is_refused(parameter_first):
    model = Named(parameter_first)
    with pytest.raises(ValueError, match="'DotGeneral_q' is called like the state of a product"):
        jfp8.convert(model, exempt=()).init(KEY, X)
    assert "fp8" in jfp8.convert(model, exempt="q").init(KEY, X)


class Plain(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.Dense(self.features)(x))


def test_pickled_models_are_converted_models():
    converted = jfp8.convert(Plain(12), {"Dense_0": "mxfp8", "*": "delayed"}, exempt=())
    loaded = pickle.loads(pickle.dumps(converted))
    assert loaded == converted
    assert type(loaded) is type(converted)
    variables = loaded.init(KEY, X)
    assert "fp8" in variables
    assert_same(loaded.apply(variables, X), converted.apply(variables, X))


class Bridged(nn.Module):
    make: Any

    @nn.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(self.make, 16, 8, name="inside")(nn.Dense(16)(x))


@pytest.mark.slow
def test_nnx_modules_in_linen_models_are_told():
    converted = jfp8.convert(Bridged(nnx.Linear), "current", exempt=())
    with pytest.warns(UserWarning, match=r"Linear at 'inside'.*where they are made") as told:
        variables = converted.init(KEY, X)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted.apply(variables, X)  # was told once
        jfp8.convert(Bridged(nnx.Linear), "current", exempt="inside").init(KEY, X)
        # What the warning advises.
        make = lambda *args, **kwargs: jfp8.convert(
            nnx.Linear(*args, **kwargs), "current", exempt=()
        )
        advised = jfp8.convert(Bridged(make), "current", exempt=())
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


class Spectral(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(self.layer(16))(x, update_stats=False)


@pytest.mark.slow
def test_spectral_norm_of_a_converted_layer_is_told_the_way():
    """Its own error is that it needs a random key."""
    converted = jfp8.convert(Spectral(nn.Dense), exempt=())
    variables = converted.init(KEY, X)
    with pytest.raises(InvalidRngError, match='needs PRNG for "params"') as error:
        converted.apply(variables, X)
    assert "Inside it use jfp8.Dense" in "".join(error.value.__notes__)
    for way in (
        jfp8.convert(Spectral(jfp8.Dense), exempt=()),
        jfp8.convert(Spectral(nn.Dense), exempt="Dense_0"),
        jfp8.convert(Spectral(nn.Dense), "current", exempt=()),
    ):
        way.apply(way.init(KEY, X), X)
