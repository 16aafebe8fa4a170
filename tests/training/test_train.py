"""TrainState, value_and_grad and advance; with ``sum(y * c)``, whose gradient is known: ``c``."""

import dataclasses
import functools

import flax.core
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jfp8
from jfp8.training.state import Gradients
from support.amaxes import E4M3, E5M2, ROLES, amax, fake_quantize, peaking
from support.arrays import assert_same
from support.arrays import device_normal as normal
from support.recorded import recorded

KEY = jax.random.key(3)


def differ(a, b) -> bool:
    return any(np.any(x != y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def products(fp8) -> list:
    """The states of all products in a collection, wherever they are."""
    if "lhs" in fp8:
        return [fp8]
    return [product for child in fp8.values() for product in products(child)]


def history(fp8, role, product=0) -> np.ndarray:
    return np.asarray(products(fp8)[product][role]["amax_history"])


DENSE = jfp8.Dense(4)


class Mlp(nn.Module):
    dense: type[nn.Module] = jfp8.Dense
    normed: bool = False

    @nn.compact
    def __call__(self, x):
        x = self.dense(16)(x)
        if self.normed:
            x = nn.BatchNorm(use_running_average=False)(x)
        return self.dense(4)(nn.relu(x))


def linear_loss(variables, batch):
    return jnp.sum(DENSE.apply(variables, batch["x"]) * batch["c"]), {}


def squared_error(model):
    def loss_fn(variables, batch):
        mutable = ["batch_stats"] if "batch_stats" in variables else False
        returned = model.apply(variables, batch["x"], mutable=mutable)
        y, mutated = returned if mutable else (returned, {})
        return jnp.mean((y - batch["y"]) ** 2), mutated

    return loss_fn


def batch_of(step=0):
    return {"x": normal((8, 16), step), "y": normal((8, 4), step + 100)}


def linear_batch(x_peaks=(3.0,), c_peaks=(0.5,), rows=8):
    """`rows` rows for each peak; one element of x and c is the peak, the others are below 1."""
    x = [peaking((rows, 16), p, i) for i, p in enumerate(x_peaks)]
    c = [peaking((rows, 4), 1.0, i) * np.float32(p) for i, p in enumerate(c_peaks)]
    return {"x": jnp.concatenate(x), "c": jnp.concatenate(c)}


SGD = optax.sgd(2.0**-4)


@functools.cache
def initial(model):
    return jax.jit(model.init)(KEY, normal((8, 16)))


def create(model=DENSE, tx=SGD):
    variables = jax.tree.map(jnp.copy, initial(model))
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def step_with(loss_fn, jit=False, **options):
    """One optimizer step: (state, batch) -> (state, loss)."""

    def step(state, batch):
        loss, grads = jfp8.value_and_grad(loss_fn, **options)(state, batch)
        return state.apply_gradients(grads), loss

    return jax.jit(step) if jit else step


# Not jitted: small steps of equal shapes cost nothing that way, and compiling each a second.
linear_step = step_with(linear_loss)


def scale_of(state) -> float:
    return float(optax.tree.get(state.opt_state, "loss_scale"))


NORMED = Mlp(normed=True)
NORMED_TX = jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(), optax.adam(1e-2)))
normed_step = step_with(squared_error(NORMED), jit=True)


class TestCreate:
    @pytest.mark.parametrize("given", [{"params": {"w": np.ones(2)}}, {}])
    def test_parameters_alone_are_no_variables(self, given):
        """As Flax's TrainState takes them: histories would be missing from the start."""
        words = r"got (params|no variables).*create\(apply_fn=model\.apply, variables=model\.init"
        with pytest.raises(TypeError, match=words):
            jfp8.TrainState.create(apply_fn=None, tx=SGD, **given)

    @pytest.mark.slow
    def test_frozen_dicts_and_a_missing_sink_are_fine(self):
        variables = dict(initial(DENSE))
        without = {name: c for name, c in variables.items() if name != "fp8_sink"}
        for given in (flax.core.freeze(variables), without):
            state = jfp8.TrainState.create(apply_fn=DENSE.apply, variables=given, tx=SGD)
            assert_same(state, create())

    def test_a_sink_of_another_model_is_refused(self):
        variables = dict(initial(DENSE))
        variables["fp8_sink"] = initial(Mlp())["fp8_sink"]
        with pytest.raises(ValueError, match="'fp8_sink' collection does not belong to the 'fp8'"):
            jfp8.TrainState.create(apply_fn=DENSE.apply, variables=variables, tx=optax.sgd(1.0))


def with_grad_histories_divided(fp8, divisor):
    is_product = lambda node: "lhs" in node
    divided = lambda p: {**p, "grad": jax.tree.map(lambda a: a / divisor, p["grad"])}
    return jax.tree.map(divided, fp8, is_leaf=is_product)


def without_checks(fp8):
    return [{role: product[role] for role in ROLES} for product in products(fp8)]


class TestValueAndGrad:
    @pytest.mark.slow
    def test_micro_batches_see_their_part_of_every_array(self):
        """Labels and random keys are split along with the rest."""

        def loss_fn(variables, batch):
            loss, mutated = linear_loss(variables, {"x": batch["x"], "c": batch["c"]})
            return loss, mutated, (batch["label"], jax.random.uniform(batch["key"][0]))

        keys = jax.random.split(KEY, 8)
        batch = {**linear_batch(rows=8), "label": jnp.arange(8), "key": keys}
        options = {"has_aux": True, "micro_batches": 4}
        (_, (labels, draws)), _ = jfp8.value_and_grad(loss_fn, **options)(create(), batch)
        np.testing.assert_array_equal(labels, np.arange(8).reshape(2, 4).T)
        np.testing.assert_array_equal(draws, [jax.random.uniform(key) for key in keys[:4]])

    @pytest.mark.parametrize(
        ("returned", "has_aux", "words"),
        [
            (lambda loss: loss, True, r"must return \(loss, mutated, aux\) when has_aux=True"),
            (lambda loss: (loss, {}, 1), False, "but returned a tuple of 3"),
            (lambda loss: (loss, {}), True, r"\(loss, mutated, aux\).*a tuple of 2"),
            (lambda loss: [loss, {}], False, "but returned list"),
            (lambda loss: (loss, None), False, "dict of collections.*but mutated is NoneType"),
            (lambda loss: (loss, loss), False, "dict of collections as mutated"),
        ],
    )
    def test_what_loss_fn_returns_is_checked(self, returned, has_aux, words):
        loss_fn = lambda variables, batch: returned(linear_loss(variables, batch)[0])
        with pytest.raises(ValueError, match=words):
            jfp8.value_and_grad(loss_fn, has_aux=has_aux)(create(), linear_batch())

    def test_a_loss_alone_and_several_arguments(self):
        """As people write it: ``value_and_grad(loss_fn)(state, x, y)``."""
        state, batch = create(), linear_batch()
        loss_fn = lambda variables, x, c: linear_loss(variables, {"x": x, "c": c})[0]

        @jax.jit
        def both(state, batch):
            compute = jfp8.value_and_grad(loss_fn, micro_batches=2)
            together = jfp8.value_and_grad(linear_loss, micro_batches=2)
            return compute(state, batch["x"], c=batch["c"]), together(state, batch)

        assert_same(*both(state, batch))

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"kernel": np.ones((16, 4))}, r"jfp8.TrainState first, got dict.*(.|\n)*\.create\("),
            (nnx.Linear(16, 4, rngs=nnx.Rngs(0)), r"NNX model, Linear. Use jfp8\.nnx\.value_and"),
        ],
    )
    def test_something_else_than_a_state_is_refused(self, given, words):
        with pytest.raises(TypeError, match=words):
            jfp8.value_and_grad(linear_loss)(given, linear_batch())

    @pytest.mark.parametrize("mutable", [True, ["fp8", "fp8_sink"]])
    def test_a_mutable_sink_is_refused(self, mutable):
        """Nobody differentiates by what is mutable: no gradient amax would ever arrive."""

        def loss_fn(variables, batch):
            y, mutated = DENSE.apply(variables, batch["x"], mutable=mutable)
            return jnp.sum(y), mutated

        with pytest.raises(ValueError, match="'fp8_sink' collection mutable.*not mutable=True"):
            jfp8.value_and_grad(loss_fn)(create(), linear_batch())

    @pytest.mark.parametrize("micro_batches", [0, -1, True, 2.0, "4", None])
    def test_micro_batches_is_checked(self, micro_batches):
        with pytest.raises(ValueError, match="micro_batches must be an int of at least 1, got"):
            jfp8.value_and_grad(linear_loss, micro_batches=micro_batches)

    def test_micro_batches_must_divide_the_batch(self):
        compute = jfp8.value_and_grad(linear_loss, micro_batches=3)
        with pytest.raises(ValueError, match="micro_batches=3. splits a batch of 8, which is no m"):
            compute(create(), {"x": normal((8, 16))})


class TestApplyGradients:
    def test_trap_gradients_of_a_loss_that_nobody_scaled(self):
        """A loop of Flax's, without histories: parameters moved 2.7e-6 instead of 0.0875."""
        params = {"not scaled": jnp.ones(3)}
        tx = optax.chain(jfp8.loss_scale(), optax.sgd(0.5))
        state = jfp8.TrainState.create(apply_fn=None, variables={"params": params}, tx=tx)
        with pytest.warns(UserWarning, match="nothing has multiplied the loss by S"):
            state.apply_gradients(params)
        scaled = jax.tree.map(lambda g: jfp8.scale_loss(1.0, state.opt_state) * g, params)
        after = state.apply_gradients(scaled)
        np.testing.assert_array_equal(after.params["not scaled"], np.full(3, 0.5))

    def test_raw_gradients_are_those_of_the_scaled_loss(self):
        """By hand: ``scale_loss``, ``jax.grad``, and the loss scale in tx divides again."""
        model, batch = Mlp(nn.Dense), batch_of()
        loss_fn, state = squared_error(model), create(model, jfp8.loss_scale(optax.adam(1e-2)))
        scaled = lambda p: jfp8.scale_loss(loss_fn({"params": p}, batch)[0], state.opt_state)
        apply = jax.jit(lambda state, grads: state.apply_gradients(grads))
        by_hand = apply(state, jax.jit(jax.grad(scaled))(state.params))
        _, grads = jax.jit(jfp8.value_and_grad(loss_fn))(state, batch)
        assert_same(by_hand, apply(state, grads))
        assert differ(by_hand.params, state.params)

    def test_raw_gradients_are_refused_when_there_are_histories(self):
        state = create()
        words = "amaxes that belong to the gradients.*got dict.*jfp8.value_and_grad"
        with pytest.raises(TypeError, match=words):
            state.apply_gradients(jax.tree.map(jnp.zeros_like, state.params))

    def test_the_update_is_that_of_the_optimizer(self):
        """dw of a linear loss is q(x)^T q(dy), and sgd subtracts a sixteenth of it."""
        state, batch = create(tx=optax.chain(jfp8.loss_scale(), optax.sgd(2.0**-4))), linear_batch()
        after, loss = linear_step(state, batch)
        dw = fake_quantize(batch["x"], E4M3).T @ fake_quantize(batch["c"], E5M2)
        expected = np.asarray(state.params["kernel"], np.float64) - dw / 16
        np.testing.assert_allclose(after.params["kernel"], expected, rtol=0, atol=2e-6)
        y = fake_quantize(batch["x"], E4M3) @ fake_quantize(state.params["kernel"], E4M3)
        np.testing.assert_allclose(loss, np.sum(y * np.asarray(batch["c"])), rtol=1e-5)
        assert amax(dw) > 1


class TestPromise4OneEntryAndOneScalePerStep:
    def test_micro_batches_are_the_same_step(self):
        """With histories all parts share the scales of the step, so only roundings differ."""
        batch = linear_batch((2.0, 3.0, 4.1, 7.9), (0.5,) * 4, rows=2)
        tx = optax.chain(jfp8.loss_scale(init_scale=2.0**10), optax.sgd(2.0**-8))
        mean_loss = lambda variables, batch: (
            linear_loss(variables, batch)[0] / len(batch["x"]),
            {},
        )
        state, _ = step_with(mean_loss, jit=True, micro_batches=4)(create(tx=tx), batch)
        loss, grads = jfp8.value_and_grad(mean_loss)(state, batch)
        split = jax.jit(jfp8.value_and_grad(mean_loss, micro_batches=4))
        split_loss, split_grads = split(state, batch)
        np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(split_grads.params), jax.tree.leaves(grads.params)):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * amax(b))
            assert amax(b) > 0.01


BAD_STEPS = {
    "Inf in x": lambda s, b: (s, {**b, "x": b["x"].at[1, 2].set(jnp.inf)}),
    "NaN in x": lambda s, b: (s, {**b, "x": b["x"].at[1, 2].set(jnp.nan)}),
    "NaN in a weight": lambda s, b: (
        s.replace(params={**s.params, "kernel": s.params["kernel"].at[0, 0].set(jnp.nan)}),
        b,
    ),
    "Inf in the gradient": lambda s, b: (s, {**b, "c": b["c"].at[1, 2].set(jnp.inf)}),
    "NaN in the gradient": lambda s, b: (s, {**b, "c": b["c"].at[1, 2].set(jnp.nan)}),
}

adam = functools.partial(optax.adam, 2.0**-6)
OPTIMIZERS = {
    "adam": adam(),
    "chain(loss_scale, adam)": optax.chain(jfp8.loss_scale(), adam()),
    "skip_on_overflow(chain(loss_scale, clip, adamw))": jfp8.skip_on_overflow(
        optax.chain(
            jfp8.loss_scale(), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)
        )
    ),
    "chain(loss_scale('pass'), apply_if_finite(adam))": optax.chain(
        jfp8.loss_scale(on_overflow="pass"), optax.apply_if_finite(adam(), 1000)
    ),
    "chain(loss_scale('pass'), MultiSteps)": optax.chain(
        jfp8.loss_scale(on_overflow="pass"),
        optax.MultiSteps(adam(), 2, should_skip_update_fn=optax.skip_not_finite),
    ),
}


def without_loss_scale(opt_state):
    """An optimizer's state, the loss scale's own numbers replaced by zeros."""
    is_scale = lambda node: isinstance(node, jfp8.LossScaleState)

    def blank(node):
        if not is_scale(node):
            return node
        zeros = [jnp.zeros_like(field) for field in node[:4]]
        return jfp8.LossScaleState(*zeros, without_loss_scale(node.inner_state))

    return jax.tree.map(blank, opt_state, is_leaf=is_scale)


class TestPromise5NonFiniteNumbers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.representative(3)
    def test_a_bad_step_is_skipped_exactly(self, name):
        state, scaled = create(tx=OPTIMIZERS[name]), "loss_scale" in name
        # These two hold a lax.cond, which is compiled on every call outside of jit.
        jit = "apply_if_finite" in name or "MultiSteps" in name
        linear_step = step_with(linear_loss, jit=jit)
        batch = linear_batch(c_peaks=(2.0**-8,))
        for _ in range(3):
            before, (state, _) = state, linear_step(state, batch)
        assert differ(before.params, state.params) or "MultiSteps" in name
        for what, spoil in BAD_STEPS.items():
            given, bad_batch = spoil(state, batch)
            after, _ = linear_step(given, bad_batch)
            assert_same(after.params, given.params)
            assert_same(without_loss_scale(after.opt_state), without_loss_scale(given.opt_state))
            for role in ("lhs", "rhs"):
                assert_same(products(after.fp8)[0][role], products(given.fp8)[0][role])
            # The histories of gradients follow the loss scale and are otherwise the same.
            followed = with_grad_histories_divided(given.fp8, 2.0 if scaled else 1.0)
            assert_same(without_checks(after.fp8), without_checks(followed))
            assert after.step == given.step + 1
            if scaled:
                assert scale_of(after) == scale_of(given) / 2, what
                assert optax.tree.get(after.opt_state, "overflow_count") == 1
                assert not optax.tree.get(after.opt_state, "grads_finite")

        # A bad batch changes nothing else: the scale is exact, and everything else was kept.
        after, _ = linear_step(linear_step(state, bad_batch)[0], batch)
        expected, _ = linear_step(state, batch)
        assert_same(after.params, expected.params)
        assert_same(without_loss_scale(after.opt_state), without_loss_scale(expected.opt_state))
        for role in ROLES:
            ratio = scale_of(expected) / scale_of(after) if scaled and role == "grad" else 1.0
            ours, theirs = history(after.fp8, role), history(expected.fp8, role)
            np.testing.assert_array_equal(ours * ratio, theirs)
            assert np.all(np.isfinite(ours))

    @pytest.mark.parametrize("huge", [2.0**62 * (1 + 2.0**-23), -1e20, 3e38])
    def test_trap_a_gradient_without_a_finite_square_is_an_overflow(self, huge):
        """Adam's second moment of it would be Inf, and would never come back."""
        state = create(tx=optax.chain(jfp8.loss_scale(), optax.adam(1e-3)))
        _, grads = jfp8.value_and_grad(linear_loss)(state, linear_batch(c_peaks=(2.0**-8,)))
        kernel = grads.params["kernel"]
        with_largest = {**grads.params, "kernel": kernel.at[0, 0].set(2.0**62)}
        taken = state.apply_gradients(dataclasses.replace(grads, params=with_largest))
        assert differ(state.params, taken.params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(taken.opt_state))
        with_huge = {**grads.params, "kernel": kernel.at[0, 0].set(huge)}
        skipped = state.apply_gradients(dataclasses.replace(grads, params=with_huge))
        assert_same(skipped.params, state.params)
        assert_same(without_loss_scale(skipped.opt_state), without_loss_scale(state.opt_state))
        assert optax.tree.get(skipped.opt_state, "overflow_count") == 1

    def test_batch_stats_are_not_updated_on_a_skipped_step(self):
        state, _ = normed_step(create(NORMED, NORMED_TX), batch_of())
        bad = batch_of(1)
        bad["y"] = bad["y"].at[0, 0].set(jnp.inf)  # only the loss and the gradient see it
        after, _ = normed_step(state, bad)
        assert_same(after.collections, state.collections)
        assert_same(after.params, state.params)
        good, _ = normed_step(state, batch_of(1))
        assert differ(good.collections, state.collections)

    def test_a_gradient_that_overflows_only_when_scaled_is_an_overflow(self):
        """1e35 times 2^15: the loss is finite, and so would be the gradient without loss scale."""
        state, batch = create(tx=jfp8.loss_scale(adam())), linear_batch(c_peaks=(1e35,))
        loss, grads = jfp8.value_and_grad(linear_loss)(state, batch)
        assert np.isfinite(loss)
        after = state.apply_gradients(grads)
        assert_same((after.params, after.fp8), (state.params, state.fp8))
        assert scale_of(after) == scale_of(state) / 2

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_a_saturating_cast_does_not_hide_an_infinite_gradient(self, bad):
        """Saturated, +-Inf would be the largest number of e5m2 and every gradient finite."""
        c = linear_batch()["c"].at[3, 1].set(bad)
        grads = jfp8.value_and_grad(linear_loss)(create(), {**linear_batch(), "c": c})[1]
        assert np.isnan(np.asarray(grads.params["kernel"])[:, 1]).all()
        assert np.isfinite(np.asarray(grads.params["kernel"])[:, 0]).all()

    def test_an_overflow_that_only_the_sink_sees_is_one(self):
        """The layer's weights are frozen and its input is data: every gradient is finite."""

        class Frozen(nn.Module):
            @nn.compact
            def __call__(self, x):
                y = nn.map_variables(jfp8.Dense, "params", lax.stop_gradient, init=True)(4)(x)
                return y, self.param("bias", nn.initializers.zeros, (4,))

        def loss_fn(variables, batch):
            y, bias = Frozen().apply(variables, batch["x"])
            return jnp.sum(y * batch["c"]) + jnp.sum(bias), {}

        state = create(Frozen(), optax.chain(jfp8.loss_scale(), optax.sgd(1.0)))
        batch, step = linear_batch(), step_with(loss_fn, jit=True, micro_batches=2)
        good, _ = step(state, batch)
        assert differ(good.params, state.params)
        bad = {**batch, "c": batch["c"].at[3, 1].set(jnp.inf)}
        _, grads = jfp8.value_and_grad(loss_fn, micro_batches=2)(state, bad)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads.params))
        after, _ = step(state, bad)
        assert_same(after.params, state.params)
        assert_same(after.fp8, state.fp8)
        assert scale_of(after) == scale_of(state) / 2

    @pytest.mark.parametrize("factor", [2.0, 0.5])
    def test_gradient_histories_follow_the_loss_scale_exactly(self, factor):
        """Growth after the third step, or a fall in it; in both the maximum stays representable."""
        tx = optax.chain(jfp8.loss_scale(growth_interval=3), optax.sgd(0.0))
        state, steady = create(tx=tx), create(tx=optax.sgd(0.0))
        peaks = (0.75, 1.5, 0.5)
        for i, peak in enumerate(peaks):
            batch = linear_batch(c_peaks=(peak,))
            assert scale_of(state) == 2.0**15
            bad = factor < 1 and i == 2
            poisoned = {**batch, "x": batch["x"] * jnp.nan} if bad else batch
            state, _ = linear_step(state, poisoned)
            if not bad:
                steady, _ = linear_step(steady, batch)
        assert scale_of(state) == 2.0**15 * factor
        for role in ROLES:
            ratio = 2.0**15 * factor if role == "grad" else 1.0
            ours, unscaled = history(state.fp8, role), history(steady.fp8, role)
            np.testing.assert_array_equal(ours, unscaled * np.float32(ratio))
        assert np.count_nonzero(history(state.fp8, "grad")) == (3 if factor > 1 else 2)

        # The largest gradient of the history still maps onto the largest number, as without it.
        batch = linear_batch(c_peaks=(1.5,))
        grads = jfp8.value_and_grad(linear_loss)(state, batch)[1]
        expected = jfp8.value_and_grad(linear_loss)(steady, batch)[1]
        assert_same(grads.params, expected.params)


class TestPromise7OptimizersNeverSeeState:
    def test_clipping_counts_the_parameters_only(self):
        batch = linear_batch((1000.0,), (1000.0,))  # huge amaxes beside the gradient
        state = create(
            tx=optax.chain(jfp8.loss_scale(), optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        )
        grads = jfp8.value_and_grad(linear_loss)(state, batch)[1].params
        norm = np.sqrt(sum(np.sum(np.square(np.float64(g))) for g in grads.values()))
        after, _ = linear_step(state, batch)
        for name, g in grads.items():
            moved = np.asarray(state.params[name], np.float64) - after.params[name]
            np.testing.assert_allclose(moved, np.asarray(g, np.float64) / norm, atol=3e-7)


class TestAdvance:
    """The explicit form of the same step."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mutable", [False, True])
    def test_a_hand_written_loop_is_the_train_state(self, mutable):
        tx, model = optax.adam(1e-2), Mlp()
        loss_fn = squared_error(model)
        state, sinks = create(model, tx), initial(model)["fp8_sink"]
        params, fp8, opt_state = state.params, state.fp8, state.opt_state

        def loss(params, sinks, fp8, batch):
            variables = {"params": params, "fp8": fp8, "fp8_sink": sinks}
            if not mutable:
                return loss_fn(variables, batch)[0], fp8
            y, updates = model.apply(variables, batch["x"], mutable=["fp8"])
            return jnp.mean((y - batch["y"]) ** 2), updates["fp8"]

        for i in range(3):
            gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
            (grads, cotangent), fp8 = gradient(params, sinks, fp8, batch_of(i))
            updates, opt_state = tx.update(grads, opt_state, params)
            params, fp8 = optax.apply_updates(params, updates), jfp8.advance(fp8, cotangent)
            state, _ = step_with(loss_fn)(state, batch_of(i))
            assert_same((params, fp8, opt_state), (state.params, state.fp8, state.opt_state))
        assert np.count_nonzero(history(fp8, "grad", 1)) == 3

    def cotangent(self, model=DENSE):
        variables = dict(initial(model))
        loss = lambda sink: jnp.sum(model.apply({**variables, "fp8_sink": sink}, normal((8, 16))))
        return variables, jax.grad(loss)(variables["fp8_sink"])

    def test_it_takes_frozen_dicts(self):
        variables, cotangent = self.cotangent()
        new = jfp8.advance(variables["fp8"], cotangent)
        frozen = jfp8.advance(flax.core.freeze(variables["fp8"]), flax.core.freeze(cotangent))
        assert_same(frozen, new)
        assert history(new, "grad")[0] == 1.0

    def test_trap_a_changed_loss_scale_does_not_saturate(self):
        """Entries of the gradient are S times its amax, for the S of the next step."""
        tx = optax.chain(
            jfp8.loss_scale(init_scale=2.0**9, growth_interval=2), optax.sgd(0.0, momentum=0.5)
        )
        variables, dy = dict(initial(DENSE)), jnp.asarray(peaking((8, 4), 3.0))
        params, fp8 = variables["params"], variables["fp8"]

        @jax.jit
        def step(fp8, opt_state, x):
            def loss(params, sink):
                y = DENSE.apply({"params": params, "fp8": fp8, "fp8_sink": sink}, x)
                return jfp8.scale_loss(jnp.vdot(y, dy), opt_state)

            grads, cotangent = jax.grad(loss, argnums=(0, 1))(params, variables["fp8_sink"])
            _, new = tx.update(grads, opt_state, params)
            fp8 = jfp8.advance(fp8, cotangent, opt_states=(opt_state, new))
            return fp8, new

        x, opt_state = normal((8, 16)), tx.init(params)
        for exponent, entries, x_now in [
            (9, 1, x),
            (10, 2, x),
            (9, 2, x * jnp.inf),  # a skipped step: S falls, and nothing enters
            (9, 3, x),
            (10, 4, x),
        ]:
            fp8, opt_state = step(fp8, opt_state, x_now)
            expected = [3.0 * 2.0**exponent] * entries + [0.0] * (16 - entries)
            np.testing.assert_array_equal(history(fp8, "grad"), expected)
            assert np.count_nonzero(history(fp8, "lhs")) == entries

    def test_states_without_a_loss_scale_make_no_difference(self):
        variables, cotangent = self.cotangent()
        plain, scaled = (tx.init(variables["params"]) for tx in (SGD, jfp8.loss_scale()))
        expected = jfp8.advance(variables["fp8"], cotangent)
        assert_same(jfp8.advance(variables["fp8"], cotangent, opt_states=(plain, plain)), expected)
        with pytest.raises(ValueError, match="only one of the two states has a loss scale"):
            jfp8.advance(variables["fp8"], cotangent, opt_states=(plain, scaled))

    def test_products_without_a_cotangent_keep_what_was_recorded(self):
        variables, cotangent = self.cotangent(Mlp())
        del cotangent["Dense_0"]
        fp8 = jfp8.advance(variables["fp8"], cotangent)
        assert_same(fp8["Dense_0"], variables["fp8"]["Dense_0"])
        assert history(fp8["Dense_1"], "grad")[0] == 1.0

        # A layer without a sink records by itself when fp8 is mutable; advance keeps that.
        partial = {**variables, "fp8_sink": {"Dense_1": variables["fp8_sink"]["Dense_1"]}}
        with pytest.warns(UserWarning, match="not to its sink"):  # the other layer's
            updates = recorded(Mlp(), partial, normal((8, 16)))
        fp8 = jfp8.advance(updates["fp8"], cotangent)
        assert history(fp8["Dense_0"], "lhs")[0] == amax(normal((8, 16)))
        assert np.count_nonzero(history(fp8["Dense_0"], "lhs")) == 1

    def test_a_cotangent_of_another_model_is_refused(self):
        variables, _ = self.cotangent(Mlp())
        _, other = self.cotangent()
        with pytest.raises(
            ValueError, match=r"\['DotGeneral_0'\] at the top.*'Dense_0', 'Dense_1'"
        ):
            jfp8.advance(variables["fp8"], other)
        with pytest.raises(ValueError, match=r"\['other'\] at Dense_0"):
            jfp8.advance(variables["fp8"], {"Dense_0": {"other": {}}})


def test_states_and_gradients_print_what_is_in_them():
    """By size: four bytes for each number, and one for a flag of the loss scale."""
    dense = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    products = {role: {"amax_history": jnp.zeros((2, 3, 16))} for role in ("lhs", "rhs", "grad")}
    variables = {"params": {"dense": dense}, "batch_stats": {"mean": jnp.zeros(5)}}
    create = functools.partial(jfp8.TrainState.create, apply_fn=None)
    state = create(variables={**variables, "fp8": {"stacked": products}}, tx=optax.adam(0.1))
    assert repr(state) == (
        "TrainState(\n"
        "  step=0,\n"
        "  params=(9 parameters in 2 arrays, 36 B),\n"
        "  fp8=(6 products with amax histories of 16 steps),\n"
        "  opt_state=(ScaleByAdamState: 5 arrays, 76 B),\n"
        "  collections=(batch_stats: 1 array, 20 B),\n"
        ")"
    )
    stored = jax.jit(jfp8.quantize)(jnp.ones((2, 3)))
    params = {"a": stored, "b": jnp.ones(3)}
    state = create(variables={"params": params}, tx=jfp8.loss_scale(init_scale=8.0))
    assert "params=(9 parameters in 3 arrays, 22 B, 1 array in FP8)" in repr(state)
    assert "; loss scale 8)" in repr(state)
    grads = Gradients(dense, {"d": jnp.ones((3, 2050))}, {"batch_stats": jnp.ones(3)})
    assert repr(grads) == (
        "Gradients(params=(2 arrays, 36 B), fp8_sink=(1 array, 24.6 kB), "
        "collections=(batch_stats: 1 array, 12 B))"
    )
