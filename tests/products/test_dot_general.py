"""`scaled_dot_general` against fake quantization by NumPy and ml_dtypes, and float64 sums."""

from functools import partial

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8 import recipes, scaled_dot_general
from jfp8.scaling.sink import decode_amax, init_sink
from support import fake_quantization
from support.fake_quantization import E4M3, E5M2

PLAIN = (((1,), (0,)), ((), ()))
FORMATS = {"HYBRID": (E4M3, E4M3, E5M2), "E4M3": (E4M3,) * 3, "E5M2": (E5M2,) * 3}  # lhs, rhs, grad
ROLES = ("lhs", "rhs", "grad")


def scale_for(amax, fmt, margin=0, scale_rounding=None):
    """``amax / max * 2^margin`` in f32; 1 where that says nothing; at least 2^-126."""
    amax = np.float32(amax)
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    scale = fake_quantization.scale_for(amax, fmt, scale_rounding) * np.float32(2.0**margin)
    return max(scale, np.float32(2.0**-126))


def amax_of(x):
    return np.max(np.abs(np.asarray(x, np.float32)), initial=0)


def oracle(operands, formats, scales):
    """y, d_lhs and d_rhs, each with its bound, from `scales` of lhs, rhs and dy."""

    def rule(fmt, scale):
        rounded = lambda x: fake_quantization.fake_quantized(x, scale, fmt)
        return lambda x, axis: np.where(np.isfinite(x), rounded(x), np.nan)

    rules = fake_quantization.uniform(*map(rule, formats, scales))
    found = fake_quantization.oracle(rules, *(np.asarray(x)[None] for x in operands))
    return [(exact[0], bound[0]) for exact, bound in found.values()]


def assert_matches(results, expected):
    """Each result lies within its bound; NaN where it should."""
    for name, result, (exact, bound) in zip(
        ("y", "d_lhs", "d_rhs"), results, expected, strict=True
    ):
        assert result.shape == exact.shape, name
        value = np.asarray(result, np.float64)
        np.testing.assert_array_equal(np.isnan(value), np.isnan(exact), err_msg=name)
        wrong = abs(value - exact) > bound  # NaN compares as false
        assert not wrong.any(), f"{name}: {np.argwhere(wrong)[:5]}, {value[wrong]}, {exact[wrong]}"


@partial(jax.jit, static_argnames="recipe")
def value_and_grads(lhs, rhs, dy, *, recipe, state=None, sink=None):
    """y, d_lhs, d_rhs and, if there is a sink, its cotangent; compiled."""

    def f(lhs, rhs, sink):
        return scaled_dot_general(lhs, rhs, PLAIN, recipe=recipe, state=state, sink=sink)

    y, vjp = jax.vjp(f, lhs, rhs, sink)
    d_lhs, d_rhs, d_sink = vjp(dy)
    return (y, d_lhs, d_rhs) if sink is None else (y, d_lhs, d_rhs, d_sink)


# Recipes without a history, and other dimension numbers, are drawn in tests/properties.
RECIPES = [
    recipes.DelayedScaling(amax_history_len=3),
    recipes.DelayedScaling(
        amax_history_len=2, amax_compute_algo="most_recent", margin=2, fp8_format="E4M3"
    ),
    recipes.DelayedScaling(amax_history_len=4, fp8_format="E5M2", scale_rounding="power_of_two"),
]


def random_operands(m=5, k=7, n=4, seed=0, sizes=(3.0, 0.02, 1e-6)):
    """lhs, rhs and dy of normal numbers: activations, weights, small gradients."""
    rng = np.random.default_rng(seed)
    shapes = (m, k), (k, n), (m, n)
    return [
        jnp.asarray(rng.normal(size=shape) * size, jnp.float32)
        for shape, size in zip(shapes, sizes, strict=True)
    ]


def random_state(recipe, operands, seed=0):
    """Full histories that predict the operands' amaxes to a factor of about two."""
    rng = np.random.default_rng(seed)
    state = {}
    for role, x in zip(ROLES, operands, strict=True):
        history = max(amax_of(x), 1e-8) * rng.uniform(0.5, 2, recipe.amax_history_len)
        state[role] = {"amax_history": jnp.float32(history), "amax": jnp.float32(0)}
    return state


def expected_scales(recipe, state):
    newest = recipe.amax_compute_algo == "most_recent"
    amaxes = [np.asarray(state[role]["amax_history"]) for role in ROLES]
    return [
        scale_for(a[0] if newest else a.max(), fmt, recipe.margin, recipe.scale_rounding)
        for a, fmt in zip(amaxes, FORMATS[recipe.fp8_format], strict=True)
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_delayed_scaling_is_fake_quantization_by_histories(recipe):
    operands = random_operands(9, 33, 17)
    state = random_state(recipe, operands)
    *results, d_sink = value_and_grads(*operands, recipe=recipe, state=state, sink=init_sink())
    scales = expected_scales(recipe, state)
    assert_matches(results, oracle(operands, FORMATS[recipe.fp8_format], scales))
    assert all(abs(result).max() > 0 for result in results)
    amaxes, overflow = decode_amax(d_sink)
    np.testing.assert_array_equal(amaxes, [amax_of(x) for x in operands])
    assert not overflow.any()


def test_state_without_sink_uses_current_scaling_for_gradients():
    """Nobody keeps the gradient's history up then; the state carries a poisonous one.

    An empty history still has the running maximum, so a later micro-batch scales no finer.
    """
    recipe = recipes.DelayedScaling(amax_history_len=3)
    operands = random_operands()
    state = random_state(recipe, operands)
    state["grad"]["amax_history"] = jnp.full((3,), 1e30)
    state["rhs"] = {"amax_history": jnp.zeros((3,)), "amax": jnp.float32(8)}
    results = value_and_grads(*operands, recipe=recipe, state=state)
    scales = expected_scales(recipe, state)[0], scale_for(8.0, E4M3)
    scales = *scales, scale_for(amax_of(operands[2]), E5M2)
    assert_matches(results, oracle(operands, FORMATS["HYBRID"], scales))


def test_state_may_be_in_any_mapping():
    """Flax hands out FrozenDicts in some places."""
    recipe = recipes.DelayedScaling(amax_history_len=1)
    state = jax.tree.map(lambda x: x + 7, recipe.init_state())
    x, w = jnp.full((1, 3), 2.0), jnp.ones((3, 1))
    frozen = flax.core.freeze(state)
    expected = scaled_dot_general(x, w, PLAIN, recipe=recipe, state=state)
    y = scaled_dot_general(x, w, PLAIN, recipe=recipe, state=frozen)
    np.testing.assert_array_equal(y, expected)
    assert float(y[0, 0]) == pytest.approx(6, rel=0.1)


class NumpyDelayed:
    """The rule of delayed scaling: scale from the amaxes of the steps before this one."""

    def __init__(self, length):
        self.history = [np.float32(0)] * length  # newest first

    def scale(self, x, fmt):
        seen = max(self.history)
        return scale_for(seen if seen > 0 else amax_of(x), fmt)

    def step(self, x):
        amax = amax_of(x)
        if 0 < amax < np.inf:
            self.history = [amax, *self.history[:-1]]


def make_step(recipe):
    """(lhs, rhs, dy, state) -> results and the next state; compiled once for all steps."""

    @jax.jit
    def step(lhs, rhs, dy, state):
        def f(lhs, rhs, sink):
            return scaled_dot_general(lhs, rhs, PLAIN, recipe=recipe, state=state, sink=sink)

        y, vjp = jax.vjp(f, lhs, rhs, init_sink())
        d_lhs, d_rhs, d_sink = vjp(dy)
        new = jfp8.advance({"product": state}, {"product": {"amax": d_sink}})["product"]
        return (y, d_lhs, d_rhs), new

    return step


def test_delayed_scaling_over_steps():
    """Growing, shrinking, vanishing and overflowing tensors, against the rule in numpy."""
    recipe = recipes.DelayedScaling(amax_history_len=3)
    step, state = make_step(recipe), recipe.init_state()
    model = {role: NumpyDelayed(3) for role in ROLES}
    base = random_operands(seed=12, sizes=(1.0, 0.1, 1e-6))
    factors = {
        "lhs": [1, 30, 0.1, 0.1, 0.1, 0, np.inf, 5, 1],
        "rhs": [1, 1, 1, 2, 2, 2, 2, 0.01, 0.01],
        "grad": [1, 1e3, 1, np.nan, 1, 1, 0, 1e-3, 1],
    }
    saturated = 0
    for i in range(len(factors["lhs"])):
        operands = []
        for role, x in zip(ROLES, base, strict=True):
            factor = factors[role][i]
            x = x * factor if np.isfinite(factor) else x.at[2, 1].set(factor)
            operands.append(jnp.asarray(x, jnp.float32))
        scales = [
            model[role].scale(x, fmt)
            for role, x, fmt in zip(ROLES, operands, FORMATS["HYBRID"], strict=True)
        ]
        results, state = step(*operands, state)
        assert_matches(results, oracle(operands, FORMATS["HYBRID"], scales))
        saturated += amax_of(operands[0]) > 448 * scales[0]
        for role, x in zip(ROLES, operands, strict=True):
            model[role].step(x)
            np.testing.assert_array_equal(state[role]["amax_history"], model[role].history)
            assert state[role]["amax"] == 0
    assert saturated == 3  # the scale is one step late: at 30, at Inf, and at 5 after 0.1


def test_policies_keep_the_bytes_of_products_by_their_names():
    """Bytes of activations under one name, of weights under another; without it, the inputs."""
    x, w = jnp.ones((32, 48)), jnp.ones((48, 16))
    f = lambda x, w: jnp.tanh(scaled_dot_general(jnp.tanh(x), jnp.tanh(w), PLAIN))

    def kept(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        g = jax.checkpoint(f, policy=policy)
        leaves = jax.tree.leaves(jax.jit(lambda x, w: jax.vjp(g, x, w)[1])(x, w))
        return {leaf.shape for leaf in leaves if leaf.dtype == jnp.uint8}

    assert kept() == kept("another") == set()
    assert kept("fp8_saved") == {x.shape}
    assert kept("fp8_saved_weight") == {w.shape}
    assert kept("fp8_saved", "fp8_saved_weight") == {x.shape, w.shape}


LHS, RHS = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize("which", ["lhs", "rhs"])
def test_error_operand_dtype(which):
    operands = {"lhs": LHS, "rhs": RHS}
    for dtype in (np.complex64, np.int32, np.bool_):
        wrong = operands | {which: operands[which].astype(dtype)}
        words = rf"{which} has dtype {np.dtype(dtype).name}.*real floating.*astype\(jnp\.float32\)"
        with pytest.raises(TypeError, match=words):
            scaled_dot_general(**wrong, dimension_numbers=PLAIN)
    with jax.enable_x64(True):
        operands[which] = jnp.asarray(operands[which], jnp.float64)
        with pytest.raises(TypeError, match=rf"{which} has dtype float64.*rounded twice.*astype"):
            scaled_dot_general(**operands, dimension_numbers=PLAIN)


def test_error_contracting_sizes_name_both():
    words = r"contracting dimension 1 of lhs has size 3, but dimension 0 of rhs.*size 5.*\(5, 4\)"
    with pytest.raises(ValueError, match=words):
        scaled_dot_general(LHS, np.ones((5, 4), np.float32), PLAIN)


def test_error_state_for_a_recipe_without():
    state = recipes.DelayedScaling().init_state()
    with pytest.raises(ValueError, match=r"Float8CurrentScaling.*keeps no state.*state=None"):
        scaled_dot_general(LHS, RHS, PLAIN, recipe=recipes.Float8CurrentScaling(), state=state)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {**s, "lhs": {**s["lhs"], "amax_history": jnp.zeros((4,))}},
        lambda s: {k: v for k, v in s.items() if k != "grad"},
        lambda s: {role: {"amax_history": v["amax_history"]} for role, v in s.items()},
        lambda s: jnp.zeros((16,)),
    ],
    ids=["other history length", "no grad", "no amax", "an array"],
)
def test_error_state_of_another_recipe(change):
    state = change(recipes.DelayedScaling(amax_history_len=16).init_state())
    with pytest.raises(ValueError, match=r"(?s)another recipe.*\(16,\).*recipe\.init_state\(\)"):
        scaled_dot_general(LHS, RHS, PLAIN, recipe=recipes.DelayedScaling(), state=state)


def test_error_sink():
    wrong = np.zeros((3, 256), np.float32), np.zeros(2050, np.float32), np.zeros((3, 2050), np.int8)
    for sink in wrong:
        words = rf"sink must be float32.*\(3, 2050\).*got {sink.dtype}.*{sink.shape[0]}"
        with pytest.raises(ValueError, match=words):
            scaled_dot_general(LHS, RHS, PLAIN, sink=sink)


def test_error_other_arguments():
    with pytest.raises(ValueError, match=r"'mosaic' is unknown.*'emulate', 'bf16', 'xla'.*None"):
        scaled_dot_general(LHS, RHS, PLAIN, implementation="mosaic")
    with pytest.raises(TypeError, match="preferred_element_type must be a floating dtype.*int32"):
        scaled_dot_general(LHS, RHS, PLAIN, preferred_element_type=jnp.int32)
    words = r'must be a recipe object.*recipes\.get\("delayed"\).*"current"'
    for recipe in (None, recipes.DelayedScaling):
        with pytest.raises(TypeError, match=words):
            scaled_dot_general(LHS, RHS, PLAIN, recipe=recipe)


def test_error_a_gradient_inside_of_what_is_differentiated():
    """JAX differentiates the rule of the inner gradient, also for the value; the cure is named."""
    product = partial(scaled_dot_general, rhs=RHS, dimension_numbers=PLAIN)

    def inner(lhs):
        y, _ = jax.vjp(product, lhs)
        return jnp.sum(y)

    with pytest.raises(TypeError, match=r"Second derivatives.*compute the value outside.*stop_gr"):
        jax.grad(inner)(LHS)

    def outside(lhs):
        _, pull = jax.vjp(product, jax.lax.stop_gradient(lhs))
        return jnp.sum(product(lhs)) + jnp.sum(pull(jnp.ones((2, 4)))[0])

    alone = lambda lhs: jnp.sum(product(lhs))
    both = jax.jit(lambda lhs: (jax.grad(outside)(lhs), jax.grad(alone)(lhs)))
    np.testing.assert_array_equal(*both(LHS))
