"""Loss scaling: the state machine, exact unscaling, and what a skipped step leaves behind."""

import math

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from jfp8.optim.finite import all_finite
from jfp8.optim.loss_scale_state import find_loss_scale
from support.arrays import assert_same

PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.float32([0.5, -2.0])}
LEARNING_RATE = 0.1
BAD_STEP = 5
STEPS = 12


def make_params(dtype=jnp.float32):
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)


def make_gradients(count: int = STEPS, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Gradients of the unscaled loss."""
    rng = np.random.default_rng(seed)
    return [
        {name: rng.normal(size=p.shape).astype(np.float32) for name, p in PARAMS.items()}
        for _ in range(count)
    ]


def begin(tx, params):
    """State of `tx` for gradients that a test scales by itself: its loss scale counts as read."""
    state = tx.init(params)
    assert optax.tree.get_all_with_path(state, "loss_scale")
    return state


def train(tx, gradients, *, bad_steps=(), jit=False):
    """Params and state after steps by gradients times the scale, eager unless `jit`."""
    params = make_params()
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    history = []
    for step, gradient in enumerate(gradients):
        scaler = find_loss_scale(state)
        scale = np.float32(1) if scaler is None else np.asarray(scaler.loss_scale)
        if step in bad_steps:
            gradient = {name: g.copy() for name, g in gradient.items()}
            gradient["w"][1, 2], gradient["b"][0] = np.inf, np.nan
        scaled = jax.tree.map(lambda g, s=scale: jnp.asarray(g * s), gradient)
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
        history.append((params, state))
    return history


def without(sequence, index):
    return [item for i, item in enumerate(sequence) if i != index]


def adam_state(opt_state) -> optax.ScaleByAdamState:
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)
    (found,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
    return found


class Rule:
    """The rule of the libraries that jfp8 agrees with, in Python floats.

    torch.amp.GradScaler, Apex, TensorFlow's DynamicLossScale, Keras' LossScaleOptimizer and JMP
    grow on the N-th finite step in a row. (flax.training.dynamic_scale grows on the N+1-th: it
    compares its counter with growth_interval before counting the step at hand.)
    """

    def __init__(self, init, growth, backoff, interval, floor, ceiling):
        self.scale, self.tracker, self.overflows = init, 0, 0
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.floor, self.ceiling = floor, ceiling

    def step(self, finite):
        if not finite:
            self.overflows += 1
            self.scale, self.tracker = max(self.scale * self.backoff, self.floor), 0
        elif self.tracker + 1 == self.interval:
            self.scale, self.tracker = min(self.scale * self.growth, self.ceiling), 0
        else:
            self.tracker += 1
        return self.scale, self.tracker, self.overflows


def run_machine(tx, finite_flags):
    """States after each step of gradients that are finite or not, under jit and scan."""

    def step(state, finite):
        gradient = jnp.where(finite, state.loss_scale, jnp.inf)
        updates, state = tx.update(gradient, state)
        return state, (updates, state)

    return jax.jit(lambda flags: jax.lax.scan(step, tx.init(jnp.zeros(())), flags)[1])(
        jnp.asarray(finite_flags)
    )


MACHINES = {
    # init, growth, backoff, interval, floor, ceiling
    "defaults of jfp8, short interval": (2.0**15, 2.0, 0.5, 3, 1.0, 2.0**24),
    "grows on every step": (8.0, 2.0, 0.5, 1, 0.25, 64.0),
    "big factors overshoot both bounds": (2.0**4, 16.0, 0.125, 2, 2.0, 2.0**9),
    "fixed above": (4.0, 1.0, 0.5, 2, 2.0**-3, 4.0),
    "fixed below": (4.0, 2.0, 1.0, 4, 1.0, 2.0**6),
    "constant": (2.0**7, 2.0, 0.5, 2, 2.0**7, 2.0**7),
    "far from one": (2.0**-10, 4.0, 0.25, 5, 2.0**-20, 2.0**-2),
}


@pytest.mark.parametrize("share_finite", [0.5, 0.9])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_state_machine(machine, share_finite):
    init, growth, backoff, interval, floor, ceiling = machine
    rng = np.random.default_rng(interval)
    runs = [[True] * 40, [False] * 40, list(rng.random(200) < share_finite)]
    flags = sum((runs[i] for i in (0, 2, 1, 2)), [])  # up to the ceiling and down to the floor
    tx = jfp8.loss_scale(
        init_scale=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=floor,
        max_scale=ceiling,
    )
    updates, states = run_machine(tx, flags)

    rule = Rule(*machine)
    expected = [rule.step(flag) for flag in flags]
    scales, trackers, overflows = (np.array(column) for column in zip(*expected, strict=True))
    np.testing.assert_array_equal(states.loss_scale, scales)
    np.testing.assert_array_equal(states.growth_tracker, trackers)
    np.testing.assert_array_equal(states.overflow_count, overflows)
    np.testing.assert_array_equal(states.grads_finite, flags)
    np.testing.assert_array_equal(updates, np.asarray(flags, np.float32))  # S / S, or zero
    if growth > 1:
        assert max(scales) == ceiling
    if backoff < 1:
        assert min(scales) == floor


class DynamicGradScaler:
    """The rule of Megatron-LM's class of this name, which DeepSpeed has too, in Python floats."""

    def __init__(self, scale, hysteresis, interval):
        self.scale, self.hysteresis, self.interval = scale, hysteresis, interval
        self.finite_steps, self.left = 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self.finite_steps = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, 1.0)
        else:
            self.finite_steps += 1
            if self.finite_steps == self.interval:
                self.finite_steps, self.left = 0, self.hysteresis
                self.scale *= 2
        return self.scale


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("injected", [False, True])
def test_hysteresis_is_that_of_megatron(hysteresis, injected):
    """Of overflows since the last growth, all before the `hysteresis`-th leave the scale."""
    flags = np.random.default_rng(hysteresis).random(300) < 0.8
    how = {"init_scale": 2.0**9, "growth_interval": 4, "max_scale": 2.0**99}
    how["hysteresis"] = hysteresis
    oracle = DynamicGradScaler(2.0**9, hysteresis, interval=4)
    expected = [oracle.update(not finite) for finite in flags]
    assert len({*expected}) > 5
    if injected:  # the settings are arrays
        tx, scales = optax.inject_hyperparams(jfp8.loss_scale)(**how), []
        state = tx.init(jnp.zeros(()))
        jfp8.scale_loss(1.0, state)
        update = jax.jit(tx.update)
        for finite in flags:
            _, state = update(jnp.where(finite, 1.0, jnp.inf), state)
            scales.append(float(find_loss_scale(state).loss_scale))
    else:
        scales = run_machine(jfp8.loss_scale(**how), flags)[1].loss_scale
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.slow
def test_defaults():
    state = jfp8.loss_scale().init(make_params())
    assert (state.loss_scale, state.growth_tracker, state.overflow_count) == (2.0**15, 0, 0)
    assert state.grads_finite
    assert state.inner_state == ()
    _, states = run_machine(jfp8.loss_scale(), [True] * (2000 * 10))
    assert states.loss_scale[1998] == 2.0**15
    assert states.loss_scale[1999] == 2.0**16
    assert states.loss_scale[-1] == 2.0**24
    _, states = run_machine(jfp8.loss_scale(), [False] * 16)
    assert states.loss_scale.tolist() == [2.0 ** max(14 - i, 0) for i in range(16)]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("leaf", "index"), [("w", (1, 2)), ("b", (0,))])
def test_any_single_nonfinite_element_counts(leaf, index, dtype, bad):
    tx = jfp8.loss_scale()
    gradient = make_params(dtype)
    gradient[leaf] = gradient[leaf].at[index].set(bad)
    updates, state = tx.update(gradient, begin(tx, make_params()))
    assert not state.grads_finite
    assert_same(updates, jax.tree.map(np.zeros_like, PARAMS))


@pytest.mark.slow
@pytest.mark.parametrize("size", [4095, 4096, 100_000])
def test_trap_nan_in_a_large_array(size):
    """XLA:CPU's float maximum loses NaN from 4096 elements on; the finite check must not use it."""
    gradient = jnp.ones(size).at[size // 2].set(jnp.nan)
    for check in (all_finite, jax.jit(all_finite)):
        assert not check({"a": jnp.ones(3), "b": gradient})
        assert check({"a": jnp.ones(3), "b": jnp.ones(size)})


def test_a_loss_scale_that_is_not_called_says_so():
    with pytest.raises(TypeError, match=r"Call it: jfp8\.loss_scale\(\)"):
        optax.chain(jfp8.loss_scale, optax.sgd(1.0)).init({"w": jnp.ones(3)})


def test_all_finite_looks_past_integers_and_empty_trees():
    assert all_finite({})
    assert all_finite({"count": jnp.arange(3), "none": None, "flag": jnp.array(True)})
    assert not all_finite({"count": jnp.arange(3), "x": jnp.float16(np.inf)})


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0, 1, 15, 24, -20, 100, 126, -126])
@pytest.mark.parametrize("jit", [False, True])
def test_unscaling_is_exact(exponent, jit):
    """Every bit of an f32 gradient survives; 1 / S must be normal, since XLA may multiply by it."""
    scale = 2.0**exponent
    tx = jfp8.loss_scale(init_scale=scale, min_scale=min(scale, 1.0), max_scale=max(scale, 2.0**24))
    rng = np.random.default_rng(0)
    low, high = -126 + max(exponent, 0), 127 + min(exponent, 0)
    mantissas = 1 + rng.integers(0, 2**23, 4000) * 2.0**-23
    scaled = np.ldexp(mantissas * rng.choice([-1, 1], 4000), rng.integers(low, high, 4000))
    update = jax.jit(tx.update) if jit else tx.update
    updates, _ = update(jnp.asarray(scaled, jnp.float32), begin(tx, jnp.zeros(())))
    np.testing.assert_array_equal(updates, (scaled / scale).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("on_overflow", ["zero", "pass"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_updates_are_f32(dtype, on_overflow):
    """f16 gradients of a scaled loss hold values that f16 cannot hold after unscaling."""
    tx = jfp8.loss_scale(on_overflow=on_overflow)
    tiny = jnp.asarray([3 * 2.0**-12, -(2.0**-14), 0.0, 1.0], dtype)
    updates, _ = tx.update({"w": tiny}, begin(tx, {"w": tiny}))
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_array_equal(updates["w"], [3 * 2.0**-27, -(2.0**-29), 0.0, 2.0**-15])
    updates, _ = tx.update({"w": tiny * jnp.inf}, begin(tx, {"w": tiny}))
    assert updates["w"].dtype == jnp.float32


def test_pass_hands_nonfinite_updates_on():
    tx = jfp8.loss_scale(init_scale=4.0, on_overflow="pass")
    updates, state = tx.update(jnp.float32([8, np.inf, -np.inf, np.nan]), begin(tx, jnp.zeros(4)))
    np.testing.assert_array_equal(updates, [2, np.inf, -np.inf, np.nan])
    assert (state.loss_scale, state.overflow_count) == (2.0, 1)


def adam():
    return optax.adam(LEARNING_RATE)


SCALED_ADAM = optax.chain(jfp8.loss_scale(), adam())


def clipped_adam(*before):
    return optax.chain(*before, optax.clip_by_global_norm(1.0), adam())


def adamw(*before):
    return optax.chain(*before, optax.adamw(LEARNING_RATE, weight_decay=0.1))


def noisy(*before):
    return optax.chain(*before, optax.add_noise(0.1, 0.5, jax.random.key(0)), adam())


# Compositions that skip exactly, each with the plain optimizer that it must agree with.
EXACT = {
    "loss_scale(clip, adam)": (jfp8.loss_scale(clipped_adam()), clipped_adam()),
    "loss_scale(adamw)": (jfp8.loss_scale(adamw()), adamw()),
    "skip(chain(scale, clip, adam))": (
        jfp8.skip_on_overflow(clipped_adam(jfp8.loss_scale())),
        clipped_adam(),
    ),
    "skip(chain(scale, noise, adam))": (jfp8.skip_on_overflow(noisy(jfp8.loss_scale())), noisy()),
    "skip(chain(pass, adam))": (
        jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(on_overflow="pass"), adam())),
        adam(),
    ),
    "skip(chain(loss_scale(clip), adam))": (
        jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(optax.clip_by_global_norm(1.0)), adam())),
        clipped_adam(),
    ),
    "skip(adam), no loss scale": (jfp8.skip_on_overflow(adam()), adam()),
}


@pytest.mark.parametrize(("tx", "plain"), EXACT.values(), ids=EXACT.keys())
def test_a_skipped_step_is_exact(tx, plain):
    """Twelve steps with one overflow equal the eleven others of an optimizer that never saw it."""
    gradients = make_gradients()
    history = train(tx, gradients, bad_steps=[BAD_STEP])
    expected = train(plain, without(gradients, BAD_STEP))

    before, at, after = (history[BAD_STEP + i][0] for i in (-1, 0, 1))
    assert_same(at, before)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))
    for (params, _), (plain_params, _) in zip(without(history, BAD_STEP), expected, strict=True):
        assert_same(params, plain_params)
    final, plain_final = adam_state(history[-1][1]), adam_state(expected[-1][1])
    assert_same(final, plain_final)
    assert final.count == STEPS - 1

    scaler = find_loss_scale(history[-1][1])
    if scaler is not None:
        assert (scaler.loss_scale, scaler.overflow_count) == (2.0**14, 1)
        assert scaler.growth_tracker == STEPS - 1 - BAD_STEP


def test_chain_is_not_exact():
    """Documented: a chain's elements cannot stop one another, so Adam takes a step of zero."""
    gradients = make_gradients()
    history = train(SCALED_ADAM, gradients, bad_steps=[BAD_STEP])
    gradients[BAD_STEP] = jax.tree.map(np.zeros_like, gradients[BAD_STEP])
    for (params, _), (plain_params, _) in zip(history, train(adam(), gradients), strict=True):
        assert_same(params, plain_params)
    assert find_loss_scale(history[-1][1]).loss_scale == 2.0**14


def test_the_scale_falls_with_each_overflow_under_skip_on_overflow():
    _, state = train(jfp8.skip_on_overflow(SCALED_ADAM), make_gradients(), bad_steps=range(2, 8))[
        -1
    ]
    assert find_loss_scale(state).loss_scale == 2.0**9


# MultiSteps: gradients 0 .. 11, two to an optimizer step, and gradient 5 overflows. It is dropped,
# so the pairs are (0, 1), (2, 3), (4, 6), (7, 8), (9, 10), and 11 waits for the next.
MULTI_STEPS = {
    "chain(pass, MultiSteps(skip_not_finite))": optax.chain(
        jfp8.loss_scale(on_overflow="pass"),
        optax.MultiSteps(adam(), 2, should_skip_update_fn=optax.skip_not_finite),
    ),
    "loss_scale(MultiSteps)": jfp8.loss_scale(optax.MultiSteps(adam(), 2)),
    "skip(chain(scale, MultiSteps))": jfp8.skip_on_overflow(
        optax.chain(jfp8.loss_scale(), optax.MultiSteps(adam(), 2))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tx", MULTI_STEPS.values(), ids=MULTI_STEPS.keys())
def test_multi_steps_drops_the_bad_micro_step(tx):
    gradients = make_gradients()
    history = train(tx, gradients, bad_steps=[BAD_STEP], jit=True)
    good = without(gradients, BAD_STEP)
    pairs = [
        jax.tree.map(lambda a, b: (a + b) / 2, good[i], good[i + 1])
        for i in range(0, len(good) - 1, 2)
    ]
    expected = train(adam(), pairs)
    assert adam_state(history[-1][1]).count == len(pairs) == 5
    # MultiSteps averages as a + (b - a) / 2, which rounds otherwise than (a + b) / 2.
    for name in PARAMS:
        np.testing.assert_allclose(history[-1][0][name], expected[-1][0][name], atol=2e-6)
    scaler = find_loss_scale(history[-1][1])
    assert (scaler.loss_scale, scaler.overflow_count) == (2.0**14, 1)


def test_skipping_restores_what_a_loss_scale_inside_wraps():
    """A scaled gradient beyond 2^62 is within once it is unscaled."""
    tx, params = jfp8.skip_on_overflow(jfp8.loss_scale(adam())), make_params()
    state = begin(tx, params)
    huge = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**63), params)
    updates, after = tx.update(huge, state, params)
    assert_same(updates, jax.tree.map(jnp.zeros_like, params))
    assert_same(after.inner_state, state.inner_state)


def test_extra_arguments_reach_the_wrapped_transformation():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: g * value, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    gradient, params = jnp.float32([2.0**15]), jnp.zeros(1)
    for tx in (
        jfp8.loss_scale(inner),
        jfp8.skip_on_overflow(optax.chain(jfp8.loss_scale(), inner)),
        optax.chain(jfp8.loss_scale(), inner),
    ):
        updates, _ = tx.update(gradient, begin(tx, params), params, value=3.0)
        assert updates.tolist() == [3.0]


LABELS = {"w": "train", "b": "freeze"}
FROZEN = optax.set_to_zero()
CONTAINERS = {
    "alone": jfp8.loss_scale(),
    "named_chain": optax.named_chain(("scaler", jfp8.loss_scale()), ("adam", adam())),
    "wrapper": jfp8.loss_scale(adam()),
    "skip_on_overflow": jfp8.skip_on_overflow(SCALED_ADAM),
    "masked": optax.masked(SCALED_ADAM, {"w": True, "b": False}),
    "multi_transform": optax.multi_transform({"train": SCALED_ADAM, "freeze": FROZEN}, LABELS),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(jfp8.loss_scale(), optax.adam(learning_rate))
    )(learning_rate=LEARNING_RATE),
    "inject_hyperparams(loss_scale)": optax.inject_hyperparams(jfp8.loss_scale)(),
    "MultiSteps": MULTI_STEPS["loss_scale(MultiSteps)"],
}


@pytest.mark.parametrize("tx", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.filterwarnings("ignore:loss_scale.. is inside an optax.masked")
def test_the_state_is_found_by_optax_and_made_of_placeholders(tx):
    """`map_params` and `eval_shape` call init with them."""
    state = tx.init(make_params())
    doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
    assert find_loss_scale(doubled)[:4] == find_loss_scale(state)[:4]
    shapes = jax.eval_shape(tx.init, make_params())
    assert jax.tree.map(lambda s: s.dtype, shapes) == jax.tree.map(lambda a: a.dtype, state)
    assert optax.tree.get(state, "loss_scale") == 2.0**15
    assert optax.tree.get(state, "overflow_count") == 0
    assert jfp8.scale_loss(2.0, state) == 2.0**16
    state = optax.tree.set(state, loss_scale=jnp.float32(8.0))
    assert jfp8.scale_loss(2.0, state) == 16.0


def test_a_frozen_part_is_not_checked():
    """Inside `multi_transform` the scale sees only the gradients with its label."""
    tx = CONTAINERS["multi_transform"]
    gradient = make_params()
    gradient["b"] = gradient["b"] * jnp.nan
    _, state = tx.update(gradient, begin(tx, make_params()), make_params())
    assert find_loss_scale(state).grads_finite


def test_two_loss_scales_are_refused():
    for tx in (
        optax.chain(jfp8.loss_scale(), jfp8.loss_scale(), adam()),
        jfp8.loss_scale(jfp8.loss_scale(adam())),
        optax.multi_transform({"train": SCALED_ADAM, "freeze": SCALED_ADAM}, LABELS),
    ):
        state = tx.init(make_params())
        with pytest.raises(ValueError, match=r"holds 2 loss scales.*Put a single loss_scale\(\)"):
            jfp8.scale_loss(1.0, state)


def test_checkpoint_names_fields():
    """The names in files are an interface: renaming one would break old checkpoints."""
    names = "loss_scale growth_tracker grads_finite overflow_count inner_state"
    state = jfp8.loss_scale().init(make_params())
    assert list(flax.serialization.to_state_dict(state)) == names.split()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_scaled_loss_is_f32(dtype):
    """60 * 2^15 overflows f16."""
    state = SCALED_ADAM.init(make_params())
    for scale in (jfp8.scale_loss, jax.jit(jfp8.scale_loss)):
        scaled = scale(jnp.asarray(60.0, dtype), state)
        assert (scaled.dtype, scaled.shape, scaled.weak_type) == (jnp.float32, (), False)
        assert scaled == 60 * 2.0**15
    assert jfp8.scale_loss(3, state).dtype == jnp.float32


def test_without_a_loss_scale_the_loss_cannot_be_scaled():
    with pytest.raises(ValueError, match=r"no loss scale.*optax\.chain\(jfp8\.loss_scale\(\)"):
        jfp8.scale_loss(1.0, adam().init(make_params()))
    assert find_loss_scale(adam().init(make_params())) is None


@pytest.mark.parametrize(
    "name", ["init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"]
)
@pytest.mark.parametrize(
    "value", [3.0, 1.5, 0.0, -2.0, math.inf, math.nan, "2", None, True, 1000], ids=repr
)
def test_scales_and_factors_are_powers_of_two(name, value):
    message = rf"loss_scale\({name}=.*\): must be a power of two.*2\.0\*\*15"
    with pytest.raises(ValueError, match=message):
        jfp8.loss_scale(**{name: value})


@pytest.mark.parametrize("value", [4, 4.0, np.float32(4), np.int64(4)], ids=repr)
def test_any_kind_of_number_will_do(value):
    tx = jfp8.loss_scale(init_scale=value, growth_factor=value, min_scale=value, max_scale=value)
    state = tx.init(make_params())
    assert (state.loss_scale, state.loss_scale.dtype) == (4.0, jnp.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_scale": 0.5}, "min_scale must not exceed init_scale.*min_scale = 1.0.* = 0.5"),
        ({"min_scale": 2.0**16}, "min_scale must not exceed init_scale.*= 65536.*= 32768"),
        ({"init_scale": 2.0**25}, "init_scale must not exceed max_scale"),
        ({"max_scale": 4.0}, "init_scale must not exceed max_scale.*init_scale = 32768.*= 4.0"),
        ({"growth_factor": 0.5}, "1 must not exceed growth_factor.*growth_factor = 0.5"),
        ({"backoff_factor": 2.0}, "backoff_factor must not exceed 1.*backoff_factor = 2.0"),
        ({"growth_interval": 0}, "growth_interval.*=.*0"),
        ({"growth_interval": 2.5}, "growth_interval"),
        ({"growth_interval": None}, "growth_interval"),
        ({"hysteresis": 0}, r"loss_scale\(hysteresis=0\): must be an int of at least 1"),
        # 2^200 is Inf in f32, from which a scale never falls; 2^-150 is 0; 1 / 2^127 is subnormal.
        ({"max_scale": 2.0**127}, "max_scale"),
        ({"max_scale": 2.0**200}, "max_scale"),
        ({"min_scale": 2.0**-150}, "min_scale"),
        ({"on_overflow": "raise"}, "on_overflow='raise' is unknown. Allowed: 'zero', 'pass'"),
        ({"on_overflow": "Zero"}, "on_overflow='Zero' is unknown. Allowed: 'zero', 'pass'"),
        ({"inner": adam(), "on_overflow": "pass"}, "on_overflow='pass'.*inner=.*Drop one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_mistakes_are_told(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jfp8.loss_scale(**arguments)


@pytest.mark.parametrize("inner", [optax.adam, 2.0**15], ids=["optax.adam", "a number"])
@pytest.mark.parametrize("wrap", [jfp8.loss_scale, jfp8.skip_on_overflow])
def test_only_transformations_can_be_wrapped(wrap, inner):
    """`loss_scale(optax.adam)` for `loss_scale(optax.adam(1e-3))`, `loss_scale(2.0**15)`."""
    with pytest.raises(TypeError, match=r"optax\.adam\(1e-3\)"):
        wrap(inner)
