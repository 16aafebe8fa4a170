"""Scores, biases and losses of routing, against NumPy in float64; and the bias in training."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jfp8
from jfp8.layers import moe_math
from jfp8.layers.linen.moe import MoE, Router
from jfp8.products.ragged import routing
from support.arrays import normal

KEY = jax.random.key(2)
BY_SIGMOID = functools.partial(routing.route, scores="sigmoid")
ALL_SCORES = [pytest.param("softmax", marks=pytest.mark.slow), "sigmoid", "sqrtsoftplus"]
T, G, K, FEATURES = 24, 5, 2, 8


LOGITS = normal((T, G))
BIAS = np.float32([0.3, -0.2, 0.0, 0.5, -0.4])


# The oracle: one token at a time, in float64.


def scores64(logits, scores):
    z = np.asarray(logits, np.float64)
    if scores == "sigmoid":
        return 1 / (1 + np.exp(-z))
    if scores == "sqrtsoftplus":
        return np.sqrt(np.log1p(np.exp(z)))
    return np.exp(z) / np.sum(np.exp(z), axis=1, keepdims=True)


def best64(s):
    return [sorted(range(G), key=lambda e: -row[e])[:K] for row in s]


def weights64(logits, scores, chosen, renormalize):
    s = scores64(logits, scores)
    picked = np.array([[s[t, e] for e in chosen[t]] for t in range(len(s))])
    return picked / picked.sum(axis=1, keepdims=True) if renormalize else picked


def losses64(logits, scores, length):
    """``(sequence-wise balance loss, z-loss)``."""
    s = scores64(logits, scores)
    best, balance = best64(s), []
    for first in range(0, len(s), length):
        sequence = range(first, first + length)
        f = [G / (K * length) * sum(e in best[t] for t in sequence) for e in range(G)]
        p = np.mean([s[t] / s[t].sum() for t in sequence], axis=0)
        balance.append(np.dot(f, p))
    z = np.log(np.sum(np.exp(np.asarray(logits, np.float64)), axis=1))
    return np.mean(balance), np.mean(z**2)


def slope64(f, x, direction, step=1e-6):
    """How fast `f` grows along `direction`."""
    x = np.asarray(x, np.float64)
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


@pytest.mark.parametrize("scores", ALL_SCORES)
@pytest.mark.parametrize("bias", [None, BIAS])
def test_experts_are_chosen_by_score_and_bias_and_weighed_by_score(scores, bias):
    s = scores64(LOGITS, scores)
    chosen = best64(s if bias is None else s + bias)
    if bias is not None:
        assert chosen != best64(s)
    ct, direction = normal((T, K), 3), normal((T, G), 4)
    for renormalize in (False, True):
        run = functools.partial(
            routing.route, experts_per_token=K, renormalize=renormalize, scores=scores
        )

        @jax.jit
        def run_and_vjp(logits, bias, ct, run=run):
            _, vjp = jax.vjp(lambda *args: run(args[0], bias=args[1]).weights, logits, bias)
            return run(logits, bias=bias), vjp(ct)

        routed, (by_logits, by_bias) = run_and_vjp(LOGITS, bias, ct)
        assert routed.experts.tolist() == chosen
        assert routed.group_sizes.tolist() == [sum(e in c for c in chosen) for e in range(G)]
        expected = weights64(LOGITS, scores, chosen, renormalize)
        np.testing.assert_allclose(routed.weights, expected, rtol=1e-6)
        share = s / s.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(routed.probabilities, share, rtol=2e-6)
        weights = functools.partial(
            weights64, scores=scores, chosen=chosen, renormalize=renormalize
        )
        slope = slope64(lambda x, weights=weights: np.sum(weights(x) * ct), LOGITS, direction)
        assert np.sum(by_logits * direction) == pytest.approx(slope, rel=1e-4)
        assert bias is None or not np.any(by_bias)


def test_sigmoids_of_zero_have_weights():
    logits = jnp.float32([[-200.0, -201.0, -300.0]])
    route = functools.partial(routing.route, scores="sigmoid", renormalize=True)
    routed = jax.jit(route, static_argnums=1)(logits, 2)
    expected = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(routed.weights, [[expected, 1 - expected]], rtol=1e-5)
    np.testing.assert_allclose(routed.probabilities[0, :2], [expected, 1 - expected], rtol=1e-5)


@pytest.mark.parametrize("scores", [pytest.param("softmax", marks=pytest.mark.slow), "sigmoid"])
def test_losses_of_sequences_and_logits(scores):
    def losses(logits):
        # The bias changes what is chosen, but not what the loss counts.
        routed = routing.route(logits, K, renormalize=True, scores=scores, bias=BIAS)
        return moe_math.sequence_balance_loss(routed, 6), moe_math.router_z_loss(routed.logits)

    found, gradients = jax.jit(lambda x: (losses(x), jax.jacrev(losses)(x)))(LOGITS)
    np.testing.assert_allclose(found, losses64(LOGITS, scores, 6), rtol=1e-5)
    direction = normal((T, G), 4)
    for i in range(2):
        slope = slope64(lambda x, i=i: losses64(x, scores, 6)[i], LOGITS, direction)
        assert np.sum(gradients[i] * direction) == pytest.approx(slope, rel=1e-4)


def test_even_sequences_have_a_balance_loss_of_1():
    logits = np.tile(1e-3 * (np.eye(G) + np.roll(np.eye(G), 1, axis=1)), (2, 1))
    routed = jax.jit(lambda x: routing.route(x, K, renormalize=True))(jnp.float32(logits))
    assert float(moe_math.sequence_balance_loss(routed, G)) == pytest.approx(1.0, abs=1e-6)
    assert float(moe_math.sequence_balance_loss(routed, 1)) > 1.0
    for length in (0, 3):
        with pytest.raises(ValueError, match=f"sequence_length={length} must divide the 10 tokens"):
            moe_math.sequence_balance_loss(routed, length)


def test_bias_goes_up_where_the_load_is_below_the_mean():
    bias = routing.updated_bias(jnp.asarray(BIAS), jnp.int32([7, 0, 3, 2, 3]), 0.125)
    np.testing.assert_array_equal(bias, BIAS + np.float32([-0.125, 0.125, 0, 0.125, 0]))
    # 1 / 49 is no f32; loads of the mean leave their biases alone all the same.
    even = jnp.full((49,), 41, jnp.int32)
    assert not np.any(routing.updated_bias(jnp.zeros(49), even, 0.125))


class Routed(nn.Module):
    """A router, and a result that depends on its choices."""

    rate: float | None = 0.125

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        how = {"route": BY_SIGMOID, "bias_update_rate": self.rate}
        routed = Router(G, K, init, **how, name="router")(x)
        return jnp.sum(routed.weights * (1 + routed.experts), axis=-1)


X = normal((64, FEATURES), 1)


@functools.cache
def made(rate=0.125):
    model = Routed(rate)
    return model, jax.jit(model.init)(KEY, X)


def loads64(variables, x):
    """How many tokens of `x` choose each expert."""
    s = scores64(np.float64(x) @ np.float64(variables["params"]["router"]["kernel"]), "sigmoid")
    best = best64(s + np.float64(variables["router_bias"]["router"]["bias"]))
    return np.bincount(np.ravel(best), minlength=G)


def moved(variables, x, rate=0.125):
    """The bias that a call with `x` leaves."""
    loads = loads64(variables, x)
    step = np.float32(rate * np.sign(np.mean(loads) - loads))
    return variables["router_bias"]["router"]["bias"] + step


def with_bias(variables, bias):
    return {**variables, "router_bias": {"router": {"bias": bias}}}


def bias_of(collections):
    return np.asarray(collections["router_bias"]["router"]["bias"])


def test_bias_moves_where_its_collection_is_mutable():
    model, variables = made()
    assert bias_of(variables).tolist() == [0.0] * G
    _, mutated = model.apply(variables, X, mutable=["router_bias"])
    expected = moved(variables, X)
    assert np.any(expected)
    np.testing.assert_array_equal(bias_of(mutated), expected)
    # And is read where it is not.
    with_favorite = with_bias(variables, jnp.float32([0, 0, 0, 9, 0]))
    assert np.any(model.apply(with_favorite, X) != model.apply(variables, X))
    assert "router_bias" not in made(None)[1]


def test_a_gradient_without_a_mutable_bias_warns():
    model, variables = made()
    loss = lambda variables: jnp.sum(model.apply(variables, X))
    with pytest.warns(UserWarning, match="router 'router'.*mutable=.'router_bias'.") as seen:
        jax.grad(loss)(variables)
    assert seen[0].filename == __file__
    frozen, variables = made(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda variables: jnp.sum(frozen.apply(variables, X)))(variables)
        _, mutated = frozen.apply(variables, X, mutable=["router_bias"])
    assert not np.any(bias_of(mutated))


def test_a_missing_bias_raises():
    model, variables = made()
    with pytest.raises(ValueError, match="'router' has .*=0.125, but there is no 'router_bias'"):
        model.apply({"params": variables["params"]}, X)


def made_state():
    model, variables = made()
    return jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))


def loss_fn(variables, batch):
    y, mutated = Routed().apply(variables, batch["x"], mutable=["router_bias"])
    return jnp.mean(batch["factor"] * y**2), mutated


def stepped(compute, state, x, factor=1.0):
    batch = {"x": x, "factor": np.full((len(x),), factor, np.float32)}

    @jax.jit
    def step(state, batch):
        _, grads = compute(state, batch)
        return state.apply_gradients(grads)

    return step(state, batch)


def test_train_state_carries_the_bias_and_keeps_it_in_a_skipped_step():
    state = made_state()
    compute = jfp8.value_and_grad(loss_fn)
    after = stepped(compute, state, X)
    expected = moved(state.variables, X)
    np.testing.assert_array_equal(bias_of(after.collections), expected)
    skipped = stepped(compute, after, X, np.inf)
    assert int(skipped.step) == 2
    np.testing.assert_array_equal(bias_of(skipped.collections), expected)


def test_each_micro_batch_is_a_step_of_the_bias():
    state = made_state()
    after = stepped(jfp8.value_and_grad(loss_fn, micro_batches=2), state, X)
    first = moved(state.variables, X[:32])
    expected = moved(with_bias(state.variables, first), X[32:])
    np.testing.assert_array_equal(bias_of(after.collections), expected)


def test_devices_add_up_their_loads():
    state = made_state()
    devices = 4
    parts = np.split(X, devices)
    expected = moved(state.variables, X)
    each = [moved(state.variables, part) for part in parts]
    assert np.any(np.mean(each, axis=0) != expected)  # so that a mean of biases would be seen
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    compute = jfp8.data_parallel(jfp8.value_and_grad(loss_fn), "data", mesh=mesh)
    after = stepped(compute, state, X)
    np.testing.assert_array_equal(bias_of(after.collections), expected)


@pytest.mark.slow
def test_losses_of_a_block_are_sown():
    model = MoE(G, 12, route=BY_SIGMOID)
    x = normal((4, 6, FEATURES), 5)
    with jfp8.autocast(enabled=False):
        variables = model.init(KEY, x)
        _, mutated = model.apply(variables, x, mutable=["intermediates"])
    logits = x.reshape(-1, FEATURES) @ np.float64(variables["params"]["router"]["kernel"])
    balance, z = losses64(logits, "sigmoid", 6)
    assert float(mutated["intermediates"]["sequence_balance_loss"][0]) == pytest.approx(balance)
    assert float(mutated["intermediates"]["router_z_loss"][0]) == pytest.approx(z, rel=1e-5)


def test_errors():
    words = "scores must be one of 'softmax', 'sigmoid', 'sqrtsoftplus'; got 'relu'"
    with pytest.raises(ValueError, match=words):
        routing.route(LOGITS, K, scores="relu")
    with pytest.raises(ValueError, match=r"bias_update_rate=-0.1 must not be negative"):
        MoE(G, 12, bias_update_rate=-0.1).init(KEY, X)


def of_deepseek64(logits, bias, k, n_group, topk_group, factor):
    """Weights of all experts, 0 for those not chosen: of one token after the other, in float64."""
    found = np.zeros(logits.shape)
    for weights, z in zip(found, np.float64(logits), strict=True):
        s = 1 / (1 + np.exp(-z))
        groups = np.split(np.arange(len(z)), n_group)
        strength = [np.sort((s + bias)[g])[-2:].sum() for g in groups]
        best = sorted(range(n_group), key=lambda g: -strength[g])[:topk_group]
        allowed = [e for g in best for e in groups[g]]
        chosen = sorted(allowed, key=lambda e: -(s + bias)[e])[:k]
        weights[chosen] = factor * s[chosen] / s[chosen].sum()
    return found


def test_groups_of_experts_are_those_of_deepseek():
    logits, bias = normal((40, 12), 7), 0.3 * normal(12, 8)
    options = {"scores": "sigmoid", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    routed = jax.jit(lambda x, bias: routing.route(x, 3, bias=bias, **options))(logits, bias)
    found = np.zeros((40, 12))
    np.put_along_axis(found, np.asarray(routed.experts), np.asarray(routed.weights), axis=1)
    expected = of_deepseek64(logits, np.float64(bias), 3, 4, 2, 2.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    everywhere = of_deepseek64(logits, np.float64(bias), 3, 4, 4, 2.5)
    assert np.mean((everywhere > 0) != (expected > 0)) > 0.02, "the groups decide something"
    assert routed.group_sizes.tolist() == np.sum(expected > 0, axis=0).tolist()


def test_scores_of_very_small_logits_have_gradients():
    """``sqrt(softplus(-100)) = e^-50``, and its derivative is half of that."""
    z = jnp.array([[-100.0, -3.0, 1.0, 80.0]])
    weights = lambda z: routing.route(z, 4, scores="sqrtsoftplus", renormalize=False).weights
    found = jax.jit(jax.jacobian(weights))(z)[0, :, 0]
    order = [3, 2, 1, 0]
    sigmoid, s = 1 / (1 + np.exp(-np.float64(z[0]))), scores64(z, "sqrtsoftplus")[0]
    s[0] = np.exp(-50.0)
    expected = np.diag(np.where(np.float64(z[0]) < -50, s / 2, sigmoid / (2 * s)))[order]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_group": 3}, "n_group=3 must divide the 8 experts"),
        ({"n_group": 4, "topk_group": 5}, "topk_group=5 be from 1 to n_group"),
        ({"n_group": 4, "topk_group": 1}, "must have 3 experts for a token"),
    ],
)
def test_groups_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        routing.route(jnp.zeros((2, 8)), 3, **options)


def test_a_router_of_ones_own():
    """The last `k` experts, weighed by hand; with an expert that all tokens use."""

    def last(logits, k):
        t, g = logits.shape
        experts = jnp.broadcast_to(jnp.arange(g - k, g), (t, k))
        weights = jnp.broadcast_to(jnp.array([0.25, 0.5]), (t, k))
        return jfp8.linen.routing_of(weights, experts, jax.nn.softmax(logits), logits)

    activation = jfp8.linen.ClampedSwiglu(limit=1.5, alpha=1.2, offset=0.5)
    moe = MoE(4, 24, activation=activation, route=last, shared_intermediate_dim=32)
    x = normal((6, 16), 3)
    variables = jax.jit(moe.init)(KEY, x)
    params = jax.tree.map(lambda w: 3 * np.float64(w), variables["params"])

    def mlp(wi, wo):
        gate, up = np.split(np.float64(x) @ wi, 2, axis=1)
        gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
        assert (gate == 1.5).any()
        assert (np.abs(up) == 1.5).any()
        return gate / (1 + np.exp(-1.2 * gate)) * (up + 0.5) @ wo

    expected = mlp(params["shared_wi"]["kernel"], params["shared_wo"]["kernel"])
    for e, weight in ((2, 0.25), (3, 0.5)):
        expected = expected + weight * mlp(params["wi"]["kernel"][e], params["wo"]["kernel"][e])
    scaled = variables | {"params": jax.tree.map(lambda w: 3 * w, variables["params"])}
    with jfp8.autocast(enabled=False):
        np.testing.assert_allclose(jax.jit(moe.apply)(scaled, x), expected, rtol=0, atol=1e-4)
    y = jax.jit(moe.apply)(scaled, x)
    assert 1e-3 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.15
