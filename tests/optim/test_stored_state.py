"""`store_state` around and inside optax's transformations, against the same without it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from jfp8.optim.adam import DEFAULT, adam, adamw
from jfp8.optim.block_storage import Blocks
from jfp8.optim.storage import Float
from jfp8.optim.stored_state import is_stored, store_state
from support.arrays import assert_same

SHAPES = {"w": (64, 200), "deep": {"w": (2, 32, 128), "bias": (5000,), "small": (8, 8)}}
MOMENTS = DEFAULT._asdict()


def drawn(seed: int, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), dtype),
        SHAPES,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def train(tx, steps=4, *, params=None, state=None, first=0):
    params = drawn(99) if params is None else params
    state = jax.jit(tx.init)(params) if state is None else state
    update = jax.jit(tx.update)
    for step in range(first, first + steps):
        updates, state = update(drawn(step, scale=1e-3), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def stored_leaves(state) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_stored) if is_stored(leaf)]


def test_updates_follow_from_moments_that_are_not_rounded():
    """Those of optax from the decoded state; what is rounded is stored, and nothing else."""
    inner = optax.adam(1e-2)
    storages = {"mu": Blocks(), "nu": DEFAULT.nu}
    tx = store_state(inner, storages)
    params, state = train(tx, 3)
    gradient = drawn(50, scale=1e-3)
    updates, after = jax.jit(tx.update)(gradient, state, params)

    (adam_state, *rest) = state.inner_state
    decoded = {
        name: jax.tree.map(
            lambda x, storage=storages[name]: jax.jit(storage.decode)(x) if is_stored(x) else x,
            getattr(adam_state, name),
            is_leaf=is_stored,
        )
        for name in ("mu", "nu")
    }
    wide = (adam_state._replace(**decoded), *rest)
    expected, wide_after = jax.jit(inner.update)(gradient, wide, params)
    for u, e in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(u, e, rtol=1e-4, atol=1e-9)
    m = wide_after[0].mu["w"]
    kept = after.inner_state[0].mu["w"]
    scale = np.repeat(np.asarray(kept.scale), 128, axis=1)[:, :200]
    error = np.abs(kept.dequantize() - m)
    assert np.all(error <= 1.001 * np.maximum(2.0**-4 * np.abs(m), 2.0**-10 * scale))


def assert_trained_alike(params, expected, most):
    """Relative to how far training went from `drawn(99)`."""
    for p, e, s in zip(*map(jax.tree.leaves, (params, expected, drawn(99))), strict=True):
        assert np.linalg.norm(p - e) < most * np.linalg.norm(e - s) + 1e-12


RATE = optax.linear_schedule(1e-3, 0, 9)
WRAPPED = {
    "chain": (lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx), 4),
    "masked": (lambda tx: optax.masked(tx, {"w": True, "deep": False}), 2),
    "multi": (
        lambda tx: optax.multi_transform(
            {"a": tx, "b": optax.sgd(1e-3), "nothing": tx}, {"w": "b", "deep": "a"}
        ),
        2,
    ),
    "inject": (
        lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(RATE),
        4,
    ),
    "steps": (lambda tx: optax.MultiSteps(tx, 2), 4),
    "loss_scale": (lambda tx: jfp8.loss_scale(tx, init_scale=1.0, max_scale=1.0), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "count"), WRAPPED.values(), ids=WRAPPED)
def test_inside_and_around_other_transformations(wrap, count):
    expected, _ = train(wrap(optax.adam(1e-3)), 6)
    for tx in (wrap(adam(1e-3, seed=2**40 + 1)), store_state(wrap(optax.adam(1e-3)), MOMENTS)):
        params, state = train(tx, 6)
        assert len(stored_leaves(state)) == count
        assert_trained_alike(params, expected, 0.1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Momentum:
    """State of a transformation that is no named tuple."""

    m: Any
    empty: Any = ()


@pytest.mark.slow
@pytest.mark.parametrize("huge", [1e25, 3e38])
@pytest.mark.parametrize("wrap", [jfp8.loss_scale, jfp8.skip_on_overflow])
@pytest.mark.parametrize("make", [adam, lambda rate: adam(rate, preset="msamp_o2")])
def test_trap_a_finite_gradient_leaves_no_infinite_moment(make, wrap, huge):
    """Its square is Inf in f32, and one Inf spoils all that share a scale with it."""
    tx, params = wrap(make(1e-3)), drawn(99)
    optax.tree.get_all_with_path(tx.init(params), "loss_scale")  # gradients are scaled by hand
    update = jax.jit(tx.update)
    _, state = update(drawn(0), tx.init(params), params)
    spoiled = jax.tree.map(lambda g: g.at[..., 0].set(huge), drawn(1))
    updates, after = update(spoiled, state, params)
    assert not any(np.any(leaf != 0) for leaf in jax.tree.leaves(updates))
    for new, old in zip(stored_leaves(after), stored_leaves(state), strict=True):
        assert_same(new, old)
    updates, _ = update(drawn(2), after, params)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(updates))


@pytest.mark.slow
def test_trap_bf16_parameters_get_f32_moments():
    """optax (and torchao) make moments of the dtype of the parameters."""
    params = drawn(99, jnp.bfloat16)
    tx = adamw(1e-2, mu=Float(), nu=Float(), weight_decay=0.1)
    gradient = drawn(1, jnp.bfloat16, 1e-3)
    updates, state = jax.jit(tx.update)(gradient, jax.jit(tx.init)(params), params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, gradient))
    plain = optax.adamw(1e-2, weight_decay=0.1)
    expected, expected_state = jax.jit(plain.update)(wide[1], plain.init(wide[0]), wide[0])
    assert_same(state.inner_state, expected_state)
    assert_same(updates, expected)
    after = optax.apply_updates(params, updates)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_tree_map_params_finds_the_moments():
    """It calls ``init`` with placeholders."""
    tx, params = optax.chain(optax.clip(1.0), adam(1e-3)), drawn(99)
    fits = lambda kept, param: kept.shape == param.shape
    options = {"transform_non_params": lambda _: None, "is_leaf": is_stored}
    found = optax.tree_utils.tree_map_params(tx, fits, tx.init(params), params, **options)
    assert jax.tree.leaves(found) == [True] * 8


def test_moments_leaves_steps_and_seeds_have_their_own_bits():
    """Errors of both moments that go together would bias ``m / sqrt(v)``."""
    same = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), jnp.float32)
    params = {"a": same, "b": same}
    inner = optax.GradientTransformation(
        lambda params: optax.ScaleByAdamState(jnp.zeros([]), params, params),
        lambda u, state, params=None: (u, state._replace(mu=u, nu=u)),
    )
    lot = Blocks(rounding="stochastic")
    codes = {}
    for seed in (0, 1, 2**32):
        tx = store_state(inner, {"mu": lot, "nu": lot}, seed=seed)
        state = tx.init(params)
        for step in (1, 2):
            _, state = tx.update(params, state)
            for i, kept in enumerate(stored_leaves(state)):
                codes[seed, step, i] = np.asarray(kept.data).view(np.uint8)
    assert len(codes) == 3 * 2 * 4
    for i, (a, x) in enumerate(codes.items()):
        for b, y in list(codes.items())[:i]:
            assert 0.1 < np.mean(x != y) < 0.9, (a, b)


@pytest.mark.parametrize(
    ("preset", "most"),
    [
        ("torchao", 0.1),
        (None, 4.3),  # one power of the first moment, which XLA:CPU does not compute twice
    ],
)
def test_trap_moments_do_not_stay_in_memory_in_f32(preset, most):
    """Bytes per element, beside the results; two moments in f32 would be 8."""
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    tx = adamw(1e-3, preset=preset)

    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    lowered = jax.jit(step).lower(params, state, params)
    assert lowered.compile().memory_analysis().temp_size_in_bytes / 1024**2 < most
    # XLA:GPU needs barriers too: without them it computes moments once, for both passes.
    # Gradient, parameter, and the codes of both moments:
    assert lowered.as_text().count("optimization_barrier") >= 4


def test_trap_scales_of_zeros_are_not_computed_by_the_compiler():
    """It took XLA:CPU ten seconds per array of a million elements."""
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    text = jax.jit(adam(1e-3).init).lower(params).as_text()
    assert text.count("optimization_barrier") >= 2


def test_extra_arguments_reach_inner():
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u: u * factor, updates), Momentum(updates)

    inner = optax.GradientTransformationExtraArgs(lambda params: Momentum(params), update)
    tx = store_state(inner, {"m": Blocks()})
    params = drawn(0)
    step = lambda params: tx.update(params, tx.init(params), params, factor=2.0)
    updates, state = jax.jit(step)(params)
    np.testing.assert_array_equal(updates["w"], 2 * params["w"])
    assert len(stored_leaves(state)) == 2  # the field of a dataclass is found by its name
    store_state(inner, {"empty": Blocks()}).init(params)  # a field without leaves is one


def test_mistakes_are_told():
    with pytest.raises(TypeError, match=r"store_state wraps an optax transformation"):
        store_state(1e-3, {"mu": Blocks()})
    with pytest.raises(TypeError, match=r"'mu': 'fp8'.*must be a Storage such as"):
        store_state(optax.adam(1e-3), {"mu": "fp8"})
    with pytest.raises(ValueError, match=r"names \['trace'\].*It has \['count', 'mu', 'nu'\]"):
        store_state(optax.adam(1e-3), {"mu": Blocks(), "trace": Blocks()}).init(drawn(0))
