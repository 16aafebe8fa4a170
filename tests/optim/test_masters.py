"""Weights stored in FP8 or 16 bits: what arrives, what is lost, and what must not change."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jfp8
from jfp8 import ScaledArray
from jfp8.optim.fp8_params import StoredUpdate, apply_updates, carriers, with_carriers
from jfp8.optim.masters import init_masters, master_weights
from jfp8.optim.wrapping import MasterWeightsState
from jfp8.recipes.per_tensor import Float8CurrentScaling
from support.arrays import assert_same, normal, on_host, spread

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
MASTERS = (None, "bfloat16", "float16_scaled", "float32")
GRANULARITIES = {
    "tensor": jfp8.PerTensor(),
    "axis": jfp8.PerAxis(0),
    "blocks": jfp8.Block((1, 16)),
    "short blocks": jfp8.Block((4, 20)),
}
all_masters = pytest.mark.parametrize("master", MASTERS)


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def requantized(value, old) -> tuple[np.ndarray, np.ndarray]:
    """Data and scales nearest to `value`: the scales of `old` times 2^k, the least that does."""
    old_scale = np.asarray(old.scale)
    where = spread(np.arange(old_scale.size).reshape(old_scale.shape), old.shape, old.block)
    scale = old_scale.copy().reshape(-1)
    for i in range(scale.size):
        inverse = np.float32(1) / scale[i]
        largest = np.abs(value[where == i] * inverse).max()
        k = -60
        while largest > 448 * 2.0**k:
            k += 1
        scale[i] *= np.float32(2.0**k)
    scale = scale.reshape(old_scale.shape)
    inverse = np.float32(1) / spread(scale, old.shape, old.block)
    return (value * inverse).astype(E4M3), scale


def quantized(w, granularity=GRANULARITIES["tensor"]):
    return jfp8.quantize(jnp.asarray(w), granularity=granularity)


def stepping(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    return step


def run(tx, params, grads):
    state, step = tx.init(params), stepping(tx)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


class TestWhatArrives:
    SHAPE, STEPS, RATE = (128, 512), 500, 1e-5

    @pytest.mark.parametrize("master", [None, "bfloat16", "float32"])
    @pytest.mark.representative(1)
    def test_500_updates_of_1e_5_on_e4m3_only_weights(self, master):
        """By lot, or with a master, all of 5e-3 arrives; rounded to nearest, nothing."""
        w = jnp.asarray(normal(self.SHAPE))
        params = {"w": quantized(w)}
        tx = master_weights(optax.sgd(self.RATE), master)
        # Beside a master it matters where between two codes a weight begins.
        state = init_masters(tx.init(params), {"w": w})
        body = lambda _, carry: stepping(tx)(*carry, {"w": -jnp.ones(self.SHAPE)})
        loop = jax.jit(lambda carry: jax.lax.fori_loop(0, self.STEPS, body, carry))
        after, _ = loop((params, state))
        gained = on_host(after["w"]).astype(np.float64) - on_host(params["w"])
        error_of_mean = gained.std() / np.sqrt(gained.size)
        assert error_of_mean < 2e-4
        assert abs(gained.mean() - self.STEPS * self.RATE) < 5 * error_of_mean

    def test_no_master_is_16_bit_stochastic_rounding_for_16_bit_arrays(self):
        params = {"a": jnp.asarray(normal((32, 8)), jnp.bfloat16), "b": jnp.ones(5, jnp.float16)}
        params["c"] = jnp.ones(3)
        grads = [jax.tree.map(lambda p: jnp.full(p.shape, 1e-2), params)] * 3
        theirs = jfp8.optim.stochastic_rounding(optax.adam(1e-3), seed=7)
        for master in (None, "bfloat16"):
            ours, state = run(master_weights(optax.adam(1e-3), master, seed=7), params, grads)
            expected, their_state = run(theirs, params, grads)
            assert_same(ours, expected)
            assert_same(state.inner_state, their_state.inner_state)
            assert not jax.tree.leaves(state.masters)


class TestMasters:
    """Each of the wider masters, and the copy of it that the model works with."""

    GRADS = [{"w": jnp.asarray(normal((24, 50), seed))} for seed in range(1, 5)]

    @pytest.mark.parametrize("name", GRANULARITIES)
    def test_float32_is_the_exact_sum_and_the_copy_its_nearest(self, name):
        q = quantized(normal((24, 50)) * np.float32(0.1), GRANULARITIES[name])
        tx = master_weights(optax.sgd(0.5), "float32")
        params, state, step = {"w": q}, tx.init({"w": q}), stepping(tx)
        m = on_host(q)
        np.testing.assert_array_equal(state.masters["w"], m)
        scales = []
        for g in self.GRADS:  # the weights grow tenfold
            data, scale = requantized(m + np.float32(-0.5) * np.asarray(g["w"]), params["w"])
            m = m + np.float32(-0.5) * np.asarray(g["w"])
            params, state = step(params, state, g)
            np.testing.assert_array_equal(state.masters["w"], m)
            np.testing.assert_array_equal(params["w"].scale, scale)
            np.testing.assert_array_equal(bits(params["w"].data), bits(data))
            scales.append(scale)
        assert np.all(scales[-1] > np.asarray(q.scale))
        assert params["w"].block == q.block

    @pytest.mark.slow
    def test_float16_scaled_is_msamp_s(self):
        """f16(m * s) with s = 2^floor(log2(65504 / max|m|)), to nearest."""
        q = quantized(normal((24, 50)))
        tx = master_weights(optax.sgd(2.0**-10), "float16_scaled")
        state, step, params = tx.init({"w": q}), stepping(tx), {"w": q}

        def stored(m):
            s = np.float32(2.0 ** np.floor(np.log2(65504 / np.abs(m).max())))
            return (m * s).astype(np.float16), np.float32(1) / s

        data, scale = stored(on_host(q))
        for g in self.GRADS:
            m = data.astype(np.float32) * scale - np.float32(2.0**-10) * np.asarray(g["w"])
            data, scale = stored(m)
            params, state = step(params, state, g)
            np.testing.assert_array_equal(state.masters["w"].data, data)
            np.testing.assert_array_equal(state.masters["w"].scale, scale)
        expected, _ = requantized(data.astype(np.float32) * scale, params["w"])
        np.testing.assert_array_equal(bits(params["w"].data), bits(expected))

    def test_bfloat16_is_rounded_by_lot_and_the_copy_is_its_nearest(self):
        q = quantized(normal((24, 50)))
        tx = master_weights(optax.sgd(0.125), "bfloat16")
        params, state = run(tx, {"w": q}, self.GRADS[:1])
        m = state.masters["w"]
        assert m.dtype == jnp.bfloat16
        exact = on_host(q).astype(BF16).astype(np.float64) - np.asarray(self.GRADS[0]["w"]) / 8
        ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
        error = np.asarray(m, np.float64) - exact
        assert np.all(np.abs(error) < ulp)
        assert np.abs(error / ulp).max() > 0.75  # to nearest it would be half at the most
        assert abs((error / ulp).mean()) < 5 * 0.5 / np.sqrt(error.size)
        data, scale = requantized(np.asarray(m, np.float32), q)
        np.testing.assert_array_equal(bits(params["w"].data), bits(data))
        assert params["w"].scale == scale

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_16_bit_copies_of_a_float32_master(self, dtype):
        """The classic: the master trains as f32 does alone, and the copy is what it rounds to."""
        w = normal((24, 50))
        params = {"w": jnp.asarray(w, dtype), "b": jnp.ones((24, 50))}
        grads = [{"w": g["w"], "b": g["w"]} for g in self.GRADS]
        ours, state = run(master_weights(optax.adamw(1e-3), "float32"), params, grads)
        full = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        expected, _ = run(optax.adamw(1e-3), full, grads)
        np.testing.assert_array_equal(state.masters["w"], expected["w"])
        np.testing.assert_array_equal(ours["b"], expected["b"])
        numpy_dtype = BF16 if dtype == jnp.bfloat16 else np.float16
        np.testing.assert_array_equal(ours["w"], np.asarray(expected["w"]).astype(numpy_dtype))
        assert isinstance(state.masters["b"], optax.MaskedNode)  # f32 is its own master

    @pytest.mark.parametrize("value", [6.0e-8, 3.3e-6, -5.9e-5])
    def test_subnormal_copies_in_f16(self, value):
        params = {"w": jnp.zeros(3, jnp.float16)}
        grads = {"w": jnp.full(3, -value, jnp.float32)}
        ours, _ = run(master_weights(optax.sgd(1.0), "float32"), params, [grads])
        assert np.all(np.asarray(ours["w"]) == np.float16(np.float32(value)))
        assert np.all(ours["w"] != 0)

    @pytest.mark.representative(1)
    @pytest.mark.parametrize("master", ["bfloat16", "float16_scaled", "float32"])
    def test_masters_start_from_what_was_there_before_rounding(self, master):
        w = {"w": jnp.asarray(normal((32, 16))), "b": jnp.zeros(16)}
        working = {**w, "w": quantized(w["w"])}
        tx = optax.chain(jfp8.loss_scale(), master_weights(optax.adam(1e-3), master))
        rounded = tx.init(working)
        state = init_masters(rounded, w)
        assert jax.tree.structure(state) == jax.tree.structure(rounded)
        m = state[1].masters["w"]
        m = np.asarray(getattr(m, "data", m), np.float32) * np.float32(getattr(m, "scale", 1))
        spacing = {"bfloat16": 2.0**-8, "float16_scaled": 2.0**-11, "float32": 0}[master]
        assert np.abs(m / np.asarray(w["w"]) - 1).max() <= spacing  # FP8 has lost 2^-5
        assert_same(state[1].inner_state, rounded[1].inner_state)

    def test_starting_without_masters(self):
        working = {"w": quantized(normal((32, 16)))}
        state = master_weights(optax.sgd(1.0)).init(working)
        assert_same(init_masters(state, {"w": jnp.ones((32, 16))}), state)
        with pytest.raises(ValueError, match="holds 0 master_weights; init_masters needs exactly"):
            init_masters(optax.adam(1.0).init({"w": jnp.ones(3)}), {"w": jnp.ones(3)})


class TestScales:
    @pytest.mark.slow
    def test_a_weight_that_is_not_updated_keeps_its_byte_while_others_move(self):
        """Scales of the newest amax would round all weights again in every step."""
        w = normal((64, 128))
        w[0, 0] = 4.0  # the largest, and it moves
        for granularity in GRANULARITIES.values():
            q = quantized(w, granularity)
            grads = np.zeros(w.shape, np.float32)
            grads[0, 0] = 1.0
            tx = master_weights(optax.sgd(0.01))
            params, _ = run(tx, {"w": q}, [{"w": jnp.asarray(grads)}] * 20)
            changed = on_host(params["w"]) != on_host(q)
            assert changed[0, 0]
            assert not np.any(changed.reshape(-1)[1:])

    @pytest.mark.parametrize(("target", "factor"), [(4.5, 2.0), (1.9, 0.5), (0.2, 2.0**-4)])
    def test_scales_follow_by_powers_of_two(self, target, factor):
        """With amax 4 as 448: above it the scale doubles, at or below 2 it halves."""
        w = np.linspace(0.001, 0.19, 64, dtype=np.float32)
        w[-1] = 4.0
        q = quantized(w)
        grads = np.zeros(64, np.float32)
        grads[-1] = target - 4
        for master in (None, "float32"):
            params, _ = run(
                master_weights(optax.sgd(-1.0), master), {"w": q}, [{"w": jnp.asarray(grads)}]
            )
            assert params["w"].scale == q.scale * np.float32(factor)
            ours = on_host(params["w"])
            np.testing.assert_allclose(ours[-1], target, rtol=2.0**-3 if master is None else 2**-4)
            if factor < 1:  # finer subnormals: what was held is held
                np.testing.assert_array_equal(ours[:-1], on_host(q)[:-1])

    def test_the_least_normal_scale_is_not_halved(self):
        q = dataclasses.replace(quantized(np.float32([1, 4])), scale=jnp.float32(2**-126))
        update = {"w": np.float32([0, -250]) * np.float32(2**-126)}  # the largest code is 448
        params, _ = run(master_weights(optax.sgd(-1.0), None), {"w": q}, [update])
        assert params["w"].scale == q.scale
        assert 150 < params["w"].data[1] < 250

    @pytest.mark.slow
    def test_weights_that_begin_as_zeros_take_the_scale_of_the_first_update(self):
        q = quantized(np.zeros((8, 8)))
        grads = {"w": jnp.asarray(normal((8, 8)))}
        for master in (None, "float32"):
            params, _ = run(master_weights(optax.sgd(2.0**-20), master), {"w": q}, [grads])
            exact = -np.float32(2.0**-20) * np.asarray(grads["w"])
            rounding = 2.0**-3 if master is None else 2.0**-4
            big = np.abs(exact) > np.abs(exact).max() / 1000
            np.testing.assert_allclose(on_host(params["w"])[big], exact[big], rtol=rounding)

    @pytest.mark.slow
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @all_masters
    def test_what_is_not_finite_stays_visible(self, bad, master):
        q = quantized(normal((16, 256)))
        grads = np.zeros((16, 256), np.float32)
        grads[3, 5] = bad
        params, _ = run(master_weights(optax.sgd(1.0), master), {"w": q}, [{"w": grads}])
        assert not np.isfinite(on_host(params["w"])[3, 5])


class TestUpdates:
    @pytest.mark.slow
    def test_are_differences_of_bits_and_zeros_change_nothing(self):
        """Also codes of NaN and -0, and scales that no arithmetic survives."""
        codes = np.arange(256, dtype=np.uint8)
        data = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
        for scale in (1.0, np.nan, np.inf, 1e-40):
            q = ScaledArray(data, jnp.float32(scale))
            update = StoredUpdate(jnp.zeros(256, jnp.uint8), jnp.zeros((), jnp.uint32))
            assert_same(jax.jit(apply_updates)({"w": q}, {"w": update}), {"w": q})
        update = StoredUpdate(jnp.full(256, 3, jnp.uint8), jnp.ones((), jnp.uint32))
        new = apply_updates(ScaledArray(data, jnp.float32(1)), update)
        np.testing.assert_array_equal(bits(new.data), codes + np.uint8(3))
        assert new.scale == np.nextafter(np.float32(1), np.float32(2))

    def test_plain_parameters_are_optax_s(self):
        params = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16), "c": None}
        updates = {"a": jnp.full(3, 0.1), "b": jnp.full(2, 0.1), "c": None}
        assert_same(apply_updates(params, updates), optax.apply_updates(params, updates))

    def test_an_fp8_parameter_refuses_other_updates(self):
        q = quantized(normal((4, 4)))
        with pytest.raises(TypeError, match=r"of shape \(4, 4\).*FP8.*master_weights\(tx\)"):
            apply_updates({"w": q}, {"w": jnp.zeros((4, 4))})

    def test_frozen_parameters_stay(self):
        q = quantized(normal((4, 4)))
        assert_same(apply_updates({"w": q}, {"w": optax.MaskedNode()}), {"w": q})


def working(master_dtype=jnp.float32):
    return {"w": quantized(normal((64, 32))), "b": jnp.zeros(32, master_dtype)}


class TestComposition:
    WRAPPED = {
        "loss_scale(inner)": lambda tx: jfp8.loss_scale(tx),
        "skip_on_overflow": jfp8.skip_on_overflow,
        "skip_on_overflow(chain)": lambda tx: jfp8.skip_on_overflow(
            optax.chain(jfp8.loss_scale(), optax.clip_by_global_norm(1.0), tx)
        ),
    }

    @pytest.mark.slow
    @pytest.mark.parametrize("name", WRAPPED)
    @pytest.mark.parametrize("master", [None, "float16_scaled"])
    def test_a_skipped_step_leaves_every_bit(self, name, master):
        tx = self.WRAPPED[name](master_weights(optax.adam(1e-2), master))
        params = working()
        optax.tree.get_all_with_path(tx.init(params), "loss_scale")  # gradients are scaled by hand
        good = {"w": jnp.asarray(normal((64, 32), 5)), "b": jnp.ones(32)}
        params, state = run(tx, params, [good])
        bad = {**good, "w": good["w"].at[1, 1].set(jnp.inf)}
        after, new_state = stepping(tx)(params, state, bad)
        assert_same(after, params)
        is_ours = lambda s: isinstance(s, MasterWeightsState)
        find = lambda s: list(filter(is_ours, jax.tree.leaves(s, is_leaf=is_ours)))
        assert_same(find(new_state), find(state))
        assert len(find(state)) == 1
        moved, _ = stepping(tx)(after, new_state, good)
        assert np.any(on_host(moved["w"]) != on_host(params["w"]))

    def test_loss_scale_around_wider_masters_of_16_bits_is_refused(self):
        tx = jfp8.loss_scale(master_weights(optax.sgd(1.0), "float32"))
        params = {"w": jnp.ones(3, jnp.bfloat16)}
        state = tx.init(params)
        grads = {"w": jfp8.scale_loss(1.0, state) * jnp.ones(3)}
        with pytest.raises(ValueError, match=r"bfloat16 array of shape \(3,\).*skip_on_overflow"):
            tx.update(grads, state, params)

    @pytest.mark.representative(2)
    @all_masters
    def test_weight_decay_and_clipping_inside_see_values_in_f32(self, master):
        seen = []

        def look(updates, state, params):
            seen.append(jax.tree.map(lambda p: (p.shape, p.dtype), params))
            return updates, state

        spy = optax.GradientTransformation(lambda _: optax.EmptyState(), look)
        tx = master_weights(optax.chain(spy, optax.adamw(1e-3, weight_decay=0.1)), master)
        params = working(jnp.bfloat16)
        run(tx, params, [{"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}])
        f32 = np.dtype(np.float32)
        assert seen[0] == {"w": ((64, 32), f32), "b": ((32,), f32)}

    def test_inside_masked(self):
        params = {"a": quantized(normal((8, 8))), "b": jnp.ones(4, jnp.bfloat16), "c": jnp.ones(2)}
        mask = {"a": True, "b": True, "c": False}
        tx = optax.masked(master_weights(optax.sgd(1.0), "float32"), mask)
        grads = {"a": jnp.ones((8, 8)), "b": jnp.ones(4), "c": jnp.ones(2)}
        after, _ = run(tx, params, [grads])
        assert np.all(on_host(after["a"]) != on_host(params["a"]))
        np.testing.assert_array_equal(after["b"], np.zeros(4))
        np.testing.assert_array_equal(after["c"], np.full(2, 2.0))  # optax.masked passes it on

    @pytest.mark.slow
    def test_sharded_weights_move_as_on_one_device(self, mesh_of):
        """Bit for bit: random bits belong to elements, and maxima do not depend on their order."""
        mesh = mesh_of((8,), ("d",))
        params = {
            "w": quantized(normal((64, 32))),
            "v": quantized(normal((64, 32)), jfp8.PerAxis(0)),
        }
        grads = [jax.tree.map(lambda q: jnp.asarray(normal(q.shape, 3)), carriers(params))] * 2
        rows = lambda x: NamedSharding(mesh, PartitionSpec("d") if x.ndim else PartitionSpec())
        place = lambda tree: jax.tree.map(lambda x: jax.device_put(x, rows(x)), tree)
        for master in (None, "float16_scaled"):
            tx = master_weights(optax.sgd(1e-2), master)
            alone, _ = run(tx, params, grads)
            sharded, state = run(tx, place(params), [place(g) for g in grads])
            assert_same(alone, sharded)
            assert sharded["w"].data.sharding.num_devices == 8

    def test_carriers_vary_over_devices_as_the_bytes_do(self):
        """Else shard_map would sum what are to be local gradients over the devices."""
        mesh = Mesh(np.array(jax.devices()), ("d",))
        x, q = normal((8, 4, 6)), quantized(normal((4, 6), 1))

        def local(q, x):
            q = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "d", to="varying"), q)
            f = lambda c: jnp.sum(with_carriers(q, c).dequantize() * x[0])
            return jax.grad(f)(carriers(q))[None]

        specs = (PartitionSpec(), PartitionSpec("d"))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"))
        np.testing.assert_array_equal(jax.jit(run)(q, x), x)

    @pytest.mark.slow
    def test_errors(self):
        with pytest.raises(TypeError, match="master_weights wraps an optax transformation"):
            master_weights(1e-3)
        with pytest.raises(TypeError, match=r"master_weights\(seed=None\)"):
            master_weights(optax.sgd(1.0), seed=None)
        allowed = "master='f32'.*None, 'bfloat16', 'float16_scaled', 'float32'"
        with pytest.raises(ValueError, match=allowed):
            master_weights(optax.sgd(1.0), "f32")
        tx = master_weights(optax.sgd(1.0))
        with pytest.raises(ValueError, match=r"tx.update\(grads, state, params\)"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
        w = jnp.asarray(normal((32, 32)))
        mx = jfp8.quantize(w, granularity=jfp8.Block((1, 32)), scale_rounding="floor")
        with pytest.raises(TypeError, match=r"shape \(32, 32\) has float8_e8m0fnu scales"):
            tx.init({"w": mx})
        nv = jfp8.quantize_params({"l": {"kernel": w}}, jfp8.recipes.get("nvfp4"))
        with pytest.raises(TypeError, match="has two-level scales"):
            tx.init(nv)


CURRENT = Float8CurrentScaling()
X = jnp.asarray(normal((32, 16), 20))
Y = jnp.sin(X[:, :4])


@functools.cache
def model_and_variables():
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)])
    model = jfp8.convert(model, CURRENT, exempt=())
    return model, jax.jit(model.init)(jax.random.key(0), X)


def squared_error(model):
    return lambda variables, batch: (
        jnp.mean((model.apply(variables, batch[0]) - batch[1]) ** 2),
        {},
    )


def trained(tx, steps):
    model, variables = model_and_variables()
    params = jfp8.quantize_params(variables["params"], CURRENT)
    variables = {**variables, "params": params}
    state = jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)

    @jax.jit
    def step(state):
        loss, grads = jfp8.value_and_grad(squared_error(model))(state, (X, Y))
        return state.apply_gradients(grads), loss

    losses = []
    for _ in range(steps):
        state, loss = step(state)
        losses.append(float(loss))
    return state, losses


class TestTrainState:
    @pytest.mark.slow
    def test_frozen_without_master_weights(self):
        """Adam's 0 / (0 + eps) in FP8 is NaN: the bytes must not reach it."""
        tx = jfp8.loss_scale(optax.adamw(1e-2, weight_decay=0.1))
        state, losses = trained(tx, 20)
        before, _ = trained(tx, 0)
        for layer in ("layers_0", "layers_2"):
            assert_same(state.params[layer]["kernel"], before.params[layer]["kernel"])
        assert np.any(state.params["layers_0"]["bias"])
        assert losses[-1] < 0.95 * losses[0]

    @pytest.mark.slow
    def test_by_hand_with_carriers(self):
        """A loop of one's own takes the same steps."""
        tx = master_weights(optax.adam(1e-2), "bfloat16")
        state, _ = trained(tx, 3)
        model, variables = model_and_variables()
        params = jfp8.quantize_params(variables["params"], CURRENT)
        loss = squared_error(model)

        @jax.jit
        def step(params, opt_state):
            by = lambda c: loss({"params": with_carriers(params, c)}, (X, Y))[0]
            grads = jax.grad(by)(carriers(params))
            updates, opt_state = tx.update(grads, opt_state, params)
            return apply_updates(params, updates), opt_state

        opt_state = tx.init(params)
        for _ in range(3):
            params, opt_state = step(params, opt_state)
        for (path, a), b in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(state.params)):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            off = np.linalg.norm(a - b) / np.linalg.norm(b)
            # Two programs: an ulp of a gradient may turn a rounding here and there.
            assert off < 2e-2, jax.tree_util.keystr(path)
