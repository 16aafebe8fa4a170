"""Loops that people write; where a layer is used again, inputs are 100 times as large."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jfp8

X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
LARGEST = np.float32(100) * np.max(np.abs(X))
KEY = jax.random.key(0)
N = 8
MESH = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))


class Twice(nn.Module):
    """Two uses of one layer.

    Attributes:
      how: ``"remat"``, ``"cond"``: the transformation around the layer.
    """

    how: str = "calls"

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(jfp8.Dense) if self.how == "remat" else jfp8.Dense
        dense = layer(16, use_bias=False, name="dense")
        first = dense(x)
        if self.how == "cond" and not self.is_initializing():
            second = nn.cond(
                x[0, 0] < 1e9, lambda mdl, x: mdl(100 * x), lambda mdl, x: mdl(x), dense, x
            )
        else:
            second = dense(100 * x)
        return first, second


class TwiceInNnx(nnx.Module):
    """The same in NNX."""

    def __init__(self):
        self.dense = jfp8.nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        second = self.dense(100 * x)
        return self.dense(x), second


def ratio(outputs):
    """The norm of the second use over that of the first: 100, up to the rounding of FP8."""
    first, second = map(np.linalg.norm, outputs)
    return second / first


def lhs(fp8, n=4):
    return np.asarray(fp8["dense"]["DotGeneral_0"]["lhs"]["amax_history"][:n])


def state_of(model, tx=None):
    tx = optax.sgd(0.0) if tx is None else tx
    return jfp8.TrainState.create(apply_fn=None, variables=model.init(KEY, X), tx=tx)


def squares(outputs):
    return sum(jnp.mean(y**2) for y in outputs)


def recording(model):
    """The loss of a loop that keeps the mutated collection, and what the model returned."""

    def loss(params, fp8, x, sink=None):
        variables = {"params": params, "fp8": fp8} | ({} if sink is None else {"fp8_sink": sink})
        y, mutated = model.apply(variables, x, mutable=["fp8"])
        return squares(jax.tree.leaves(y)), (y, mutated)

    return loss


def entries(newest, n, length=4):
    return [newest] * n + [0] * (length - n)


class TestOneEntryForAllUses:
    @pytest.mark.parametrize("ends", [False, True])
    @pytest.mark.parametrize("how", ["calls", "remat", "cond"])
    @pytest.mark.representative(3)
    def test_trap_a_mutable_collection(self, how, ends):
        """Was 2.07 in the first step. If all uses are inside of nn.remat, nobody ends a step."""
        model = Twice(how)
        variables = model.init(KEY, X)
        params, fp8 = variables["params"], variables["fp8"]
        gradient = jax.jit(jax.grad(recording(model), has_aux=True))
        for step in (1, 2, 3):
            _, (outputs, mutated) = gradient(params, fp8, X)
            fp8 = jfp8.advance(mutated["fp8"]) if ends else mutated["fp8"]
            assert ratio(outputs) == pytest.approx(100, rel=0.02)
            rolls = ends or how != "remat"
            np.testing.assert_allclose(lhs(fp8), entries(LARGEST, step if rolls else 1), rtol=1e-6)

    @pytest.mark.representative(1)
    @pytest.mark.parametrize("around", [jax.checkpoint, jax.vmap, jax.jit, lambda f: f])
    def test_a_sink_that_is_a_constant_of_a_loop_is_told(self, around):
        """The history of gradients never moved."""
        variables = jfp8.Dense(16).init(KEY, X)

        def loss(params, sink):
            both = {"params": params, "fp8": variables["fp8"], "fp8_sink": sink}
            return squares([around(lambda x: jfp8.Dense(16).apply(both, x))(X[None])])

        params, sink = variables["params"], variables["fp8_sink"]
        with pytest.warns(UserWarning, match=r"but not to its sink.*argnums=\(0, 1\)"):
            jax.grad(loss)(params, sink)
        _, cotangent = jax.grad(loss, argnums=(0, 1))(params, sink)  # the warning's advice
        found = jfp8.advance(variables["fp8"], cotangent)["DotGeneral_0"]
        assert np.count_nonzero(found["grad"]["amax_history"]) == 1
        jax.grad(lambda x: squares([jfp8.Dense(16).apply(variables, x)]))(X)  # trains no weight

    def test_trap_more_uses_than_the_history_is_long(self):
        """18 uses pushed the largest out of a window of 16, for ever."""
        model = nn.Sequential([jfp8.Dense(16, use_bias=False)] * 18)
        variables = model.init(KEY, X)
        gradient = jax.grad(recording(model), has_aux=True)
        _, (_, mutated) = gradient(variables["params"], variables["fp8"], X)
        (product,) = jax.tree.leaves(mutated["fp8"], is_leaf=lambda node: "lhs" in node)
        assert np.count_nonzero(product["lhs"]["amax_history"]) == 1

    def test_an_open_step_is_read_as_a_running_maximum(self):
        """Micro-batches of one step, with sinks: the scale covers those before."""
        variables = Twice().init(KEY, X)
        fp8, sink = variables["fp8"], variables["fp8_sink"]
        gradient = jax.grad(recording(Twice()), argnums=(0, 3), has_aux=True)
        for scale in (1, 0.5):
            _, (_, mutated) = gradient(variables["params"], fp8, scale * X, sink)
            fp8 = mutated["fp8"]
            assert not np.any(lhs(fp8))
        np.testing.assert_allclose(lhs(jfp8.advance(fp8)), entries(LARGEST, 1))

    def test_trap_nnx(self):
        model = TwiceInNnx()
        loss = lambda model, x: (squares(outputs := model(x)), outputs)
        step = nnx.jit(jfp8.nnx.value_and_grad(loss, has_aux=True))
        for i in (1, 2):
            assert ratio(step(model, X)[0][1]) == pytest.approx(100, rel=0.02)
            found = model.dense.dot_general.histories()["lhs"][:4]
            assert np.count_nonzero(found) == i
            assert np.all((found[:i] >= LARGEST * (1 - 1e-6)) & (found[:i] <= LARGEST * 9 / 8))

    def test_trap_multi_steps_are_one_step(self):
        """Was one entry for each micro-step: a window of 16 was 4 steps."""
        model = jfp8.Dense(4)
        tx = optax.MultiSteps(optax.sgd(0.1), 3)
        state = state_of(model, tx)
        loss_fn = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)

        @jax.jit
        def step(state, x):
            return state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, x)[1])

        for i, factor in enumerate((1, 4, 2, 3, 1, 1)):
            state = step(state, factor * X)
            found = state.fp8["DotGeneral_0"]["lhs"]["amax_history"][:2] / np.max(np.abs(X))
            expected = ([0, 0], [4, 0], [3, 4])[(i + 1) // 3]
            np.testing.assert_allclose(found, expected, rtol=1e-6)


class TestUsesThatAreNotDifferentiatedThrough:
    @pytest.mark.parametrize("mutable", [False, True])
    def test_they_record_in_a_mutable_collection(self, mutable):
        """Else histories stay empty, so that scales are those of the data."""
        layers = jfp8.Dense(16, use_bias=False), jax.lax.stop_gradient, jfp8.Dense(4)
        model = nn.Sequential(layers)
        state = state_of(model)

        def loss_fn(variables, x):
            y, mutated = model.apply(variables, x, mutable=["fp8"] if mutable else [])
            return jnp.mean(y**2), mutated

        for scale in (1.0, 100.0):
            state = state.apply_gradients(jfp8.value_and_grad(loss_fn)(state, scale * X)[1])
        stopped, trained = (state.fp8[name]["DotGeneral_0"] for name in ("layers_0", "layers_2"))
        found = stopped["lhs"]["amax_history"][:2]
        np.testing.assert_allclose(found, [LARGEST, LARGEST / 100] if mutable else [0, 0])
        assert np.count_nonzero(trained["lhs"]["amax_history"]) == 2

    @pytest.mark.parametrize("how", ["calls", "remat", "cond"])
    def test_where_there_are_none_nothing_is_said_and_nothing_is_added(self, how):
        model = Twice(how)
        state = state_of(model)
        loss = lambda variables, x: squares(model.apply(variables, x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = jax.make_jaxpr(jfp8.value_and_grad(loss))(state, X)
        by_hand = lambda params, sink: loss(
            {"params": params, "fp8": state.fp8, "fp8_sink": sink}, X
        )
        sinks = model.init(KEY, X)["fp8_sink"]
        plain = jax.make_jaxpr(jax.value_and_grad(by_hand, argnums=(0, 1)))(state.params, sinks)
        count = lambda closed: str(closed).count("name=encode_amax")
        assert count(ours) == count(plain) > 0


class TestStateIsNoParameter:
    def test_trap_the_train_state_of_flax(self):
        """All variables as parameters train as the parameters alone: loss 0.617 for 0.03 once."""
        model = nn.Sequential([jfp8.Dense(16), nn.relu, jfp8.Dense(4)])
        variables = model.init(KEY, X)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3))
        loss = lambda params, x: jnp.mean((model.apply(params, x) - 1) ** 2)

        @jax.jit
        def step(state, x):
            value, grads = jax.value_and_grad(loss)(state.params, x)
            return state.apply_gradients(grads=grads), value

        losses, told = {}, {"all": "trains amax histories", "alone": "without its 'fp8'"}
        for given, message in told.items():
            params = variables if given == "all" else {"params": variables["params"]}
            state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
            with pytest.warns(UserWarning, match=message):
                state, value = step(state, X)
            for _ in range(19):
                state, value = step(state, X)
            losses[given] = float(value)
        assert losses["alone"] < 0.2
        assert losses["all"] == pytest.approx(losses["alone"], rel=1e-3)

    @pytest.mark.slow
    def test_trap_a_clip_by_a_norm_of_nan(self):
        """Histories had 3.4e38 as an entry, and all else was flushed for 16 steps."""
        model = jfp8.Dense(4)
        variables = model.init(KEY, X)
        fp8, trained = variables.pop("fp8"), dict(variables)
        gradient = jax.jit(jax.grad(lambda v, fp8, x: jnp.sum(model.apply({**v, "fp8": fp8}, x))))
        clip = optax.clip_by_global_norm(1.0)
        for x in (X, np.nan * X, X):
            clipped, _ = clip.update(gradient(trained, fp8, x), clip.init(trained))
            fp8 = jfp8.advance(fp8, clipped["fp8_sink"])
        expected = [np.max(np.abs(X))] * 2 + [0, 0]
        for role in ("lhs", "grad"):
            found = fp8["DotGeneral_0"][role]["amax_history"][:4]
            np.testing.assert_array_equal(found, expected if role == "lhs" else [1, 1, 0, 0])

    def test_trap_noise_is_no_amax(self):
        """Histories stay empty, so that scales are those of the data; an overflow was read."""
        model = jfp8.Dense(4)
        state = state_of(model, optax.sgd(0.1))
        _, grads = jfp8.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2))(state, X)
        noisy = jax.tree.map(lambda g: g + jax.random.normal(KEY, g.shape), grads)
        after = state.apply_gradients(noisy)
        assert not np.any(after.fp8["DotGeneral_0"]["lhs"]["amax_history"])
        assert not np.array_equal(after.params["kernel"], state.params["kernel"])


# Every device sees a part of the batch that is 10 times as large as that of the one before.
PARTS = np.concatenate([X[:2] * np.float32(10) ** i for i in range(N)])


class TestDevicesAgree:
    """They had eight different histories, of which a checkpoint sees the first."""

    @staticmethod
    def assert_agree(history):
        shards = [np.asarray(shard.data).ravel()[0] for shard in history.addressable_shards]
        np.testing.assert_array_equal(shards, np.max(np.abs(PARTS)))

    @pytest.mark.parametrize("divide", ["shard_map", "unchecked shard_map", "pmap"])
    def test_trap_a_loop_of_your_own(self, divide):
        model = jfp8.Dense(4)
        variables = model.init(KEY, X)

        def gradient(params, fp8, x):
            def loss(params):
                y, mutated = model.apply({"params": params, "fp8": fp8}, x, mutable=["fp8"])
                return jnp.mean(y**2), mutated["fp8"]

            grads, fp8 = jax.grad(loss, has_aux=True)(params)
            return jax.lax.pmean(grads, "data"), fp8

        if divide == "pmap":
            run = jax.pmap(gradient, "data", in_axes=(None, None, 0))
            x = PARTS.reshape(N, 2, 16)
        else:
            how = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
            checked = divide == "shard_map"
            run = jax.jit(jax.shard_map(gradient, mesh=MESH, check_vma=checked, **how))
            x = PARTS
        _, fp8 = run(variables["params"], variables["fp8"], x)
        self.assert_agree(fp8["DotGeneral_0"]["lhs"]["amax_history"])

    @pytest.mark.parametrize("checked", [False, True])
    def test_a_layer_for_each_device_keeps_its_own(self, checked):
        """State that is divided over the axis is not shared over it; unchecked, JAX cannot know."""
        model = jfp8.Dense(4)
        variables = jax.vmap(lambda key: model.init(key, X))(jax.random.split(KEY, N))

        def apply(variables, x):
            variables = jax.tree.map(lambda a: a[0], variables)
            gradient = jax.grad(recording(model), has_aux=True)
            _, (_, mutated) = gradient(variables["params"], variables["fp8"], x)
            return jax.tree.map(lambda a: a[None], mutated["fp8"])

        how = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
        fp8 = jax.jit(jax.shard_map(apply, mesh=MESH, check_vma=checked, **how))(variables, PARTS)
        found = np.asarray(fp8["DotGeneral_0"]["lhs"]["amax_history"][:, 0])
        own = np.max(np.abs(PARTS.reshape(N, -1)), axis=1)
        np.testing.assert_array_equal(found, own if checked else [own.max()] * N)

    @pytest.mark.representative(2)
    @pytest.mark.parametrize("gradient", [jfp8.nnx.value_and_grad, nnx.value_and_grad])
    @pytest.mark.parametrize("checked", [False, True])
    def test_trap_nnx(self, gradient, checked):
        model = jfp8.nnx.Linear(16, 4, rngs=nnx.Rngs(0))

        def step(model, x):
            loss, grads = gradient(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
            return jax.lax.pmean(loss, "data"), jax.lax.pmean(nnx.to_pure_dict(grads), "data")

        how = {"in_specs": (P(), P("data")), "out_specs": P()}
        nnx.jit(nnx.shard_map(step, mesh=MESH, check_vma=checked, **how))(model, PARTS)
        history = model.dot_general.fp8["lhs"].get_value()
        if gradient is nnx.value_and_grad or not checked:
            self.assert_agree(history)
        else:  # JAX sums the sinks of all devices
            found = {float(s.data.ravel()[0]) for s in history.addressable_shards}
            (found,) = found
            assert np.max(np.abs(PARTS)) <= found <= np.max(np.abs(PARTS)) * 9 / 8
