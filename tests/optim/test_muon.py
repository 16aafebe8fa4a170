"""Muon with stored momentum, against `optax.contrib.muon` and NumPy's polar factors."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfp8
from jfp8.optim import Float, muon, state_shardings
from jfp8.optim.adam import DEFAULT
from support.arrays import assert_same
from support.compiled import collective_bytes
from support.scripts import imported

Numbers = optax.contrib.MuonDimensionNumbers
SHAPES = {
    "tall": (96, 48),
    "square": (64, 64),
    "bias": (64,),
    "stack": (3, 40, 64),
    "heads": (64, 4, 32),
    "table": (80, 64),
}
NUMBERS = {
    "tall": Numbers(),
    "square": Numbers(1, 0),
    "bias": None,
    "stack": Numbers(-2, -1),
    "heads": Numbers(0, (1, 2)),
    "table": None,
}
EXACT = {"mu": Float(), "nu": Float()}


def drawn(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def train(tx, steps=3, *, params=None, state=None, first=0):
    params = drawn(99) if params is None else params
    shapes = {name: p.shape for name, p in params.items()}
    state = jax.jit(tx.init)(params) if state is None else state
    update = jax.jit(tx.update)
    for step in range(first, first + steps):
        updates, state = update(drawn(step, shapes), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def momentum_of(state):
    return state.inner_state.inner_states["muon"].inner_state[0].mu


def test_arguments_are_those_of_optax():
    ours, theirs = (inspect.signature(f).parameters for f in (muon, optax.contrib.muon))
    assert [*ours][: len(theirs)] == [*theirs]
    assert [p.kind for p in ours.values()][: len(theirs)] == [p.kind for p in theirs.values()]
    changed = {name for name, p in theirs.items() if p.default != ours[name].default}
    assert changed == {"ns_coeffs"}  # whose default has the name "standard" here


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    "arguments",
    [
        {
            "muon_weight_dimension_numbers": lambda params: {**NUMBERS, "heads": None},
            "ns_coeffs": "dion",
            "adaptive": True,
            "consistent_rms": 0.2,
            "nesterov": False,
            "adam_learning_rate": 1e-3,
            "adam_weight_decay": 0.1,
            "preconditioning": "schatten",
        },
        {},
        {"muon_weight_dimension_numbers": NUMBERS, "preconditioning": "aol", "weight_decay": 0.1},
    ],
    ids=["options", "defaults", "numbers"],
)
def test_in_f32_parameters_are_bitwise_those_of_optax(arguments):
    rate = optax.linear_schedule(0.02, 0.01, 5)
    theirs, _ = train(optax.contrib.muon(rate, **arguments))
    ours, _ = train(muon(rate, **arguments, **EXACT))
    assert_same(ours, theirs)


def test_momentum_takes_one_byte():
    tx, params = muon(0.02), {"w": jnp.ones((256, 512))}
    compiled = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile()
    held = compiled.memory_analysis().argument_size_in_bytes / (256 * 512)
    assert 1 < held - 4 < 1.033  # gradients in f32 are arguments, and parameters are not read


@pytest.mark.slow
def test_updates_are_within_5_percent_of_exact_ones():
    """Measured: 3.1 %."""
    compared = imported("adam_under_stress", "benchmarks").compared
    found = compared(muon(-1.0), optax.contrib.muon(-1.0), 320)
    assert {name: s for name, s in found.items() if np.abs(s["bias"]).max() > 0.05} == {}
    assert len(found) == 8


@pytest.mark.parametrize(
    ("products", "error"), [(None, 1e-5), ("bf16", 0.02), ("current", 0.25)], ids=str
)
def test_polar_factors(products, error, monkeypatch):
    """Errors are root mean square singular values; the iteration's own is 0.2 to 0.3."""
    polar_factors = imported("polar_factors", "benchmarks")
    monkeypatch.setattr(polar_factors, "ROWS", 64)
    monkeypatch.setattr(polar_factors, "COLUMNS", 128)
    given = polar_factors.matrices()
    given = {name: given[name] for name in ("flat", "power law", "rank one and noise", "zero")}
    stack = jnp.asarray(np.stack([x.T for x in given.values()]), jnp.float32)
    tx = muon(-1.0, products=products, muon_weight_dimension_numbers=Numbers(1, 2))
    found = jax.jit(tx.update)(stack, jax.jit(tx.init)(stack), stack)[0]
    assert not np.asarray(found[3]).any()
    rms = lambda z: np.linalg.norm(z) / np.sqrt(min(z.shape))
    for x, y in zip(list(given.values())[:3], np.asarray(found, np.float64)):
        u, values, vt = np.linalg.svd(x, full_matrices=False)
        exact = u * polar_factors.exact_path(values)[-1] @ vt
        assert rms(y.T - exact) < error
        assert rms(y.T - u @ vt) < 0.33


@pytest.mark.parametrize("products", [None, "current"])
@pytest.mark.representative(1)
def test_nan_shows_and_is_skipped(products):
    tx = muon(0.02, products=products)
    params = drawn(0, {"w": (64, 64), "small": (8, 8)})
    bad = {**params, "w": params["w"].at[3, 5].set(jnp.nan)}
    before = jax.jit(tx.init)(params)
    updates, state = jax.jit(tx.update)(bad, before, params)
    assert np.isnan(updates["w"]).all()
    assert np.isfinite(updates["small"]).all()
    assert np.isnan(DEFAULT.mu.decode(momentum_of(state)["w"])).any()
    skipping = jfp8.skip_on_overflow(tx)
    updates, state = jax.jit(skipping.update)(bad, jax.jit(skipping.init)(params), params)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    assert_same(state, before)


@pytest.mark.parametrize("products", [None, "current"])
@pytest.mark.representative(1)
def test_each_device_takes_its_share(products, mesh_of):
    """Parts of matrices are exchanged, at most twice before the iteration, and once after it."""
    mesh = mesh_of((8,), ("fsdp",))
    rows, share = (NamedSharding(mesh, P(*spec)) for spec in [(None, "fsdp"), ("fsdp",)])
    shape = (8, 64, 128)
    params = {"w": jax.random.normal(jax.random.key(0), shape)}
    grads = {"w": jax.random.normal(jax.random.key(1), shape)}
    options = {"muon_weight_dimension_numbers": Numbers(1, 2), "products": products}

    def step(sharding):
        tx = muon(0.02, **options, sharding=sharding)
        shardings = rows, state_shardings(tx, params, rows)
        args = jax.device_put((grads, jax.jit(tx.init)(params), params), (*shardings, rows))
        return jax.jit(tx.update, out_shardings=shardings).lower(*args).compile(), args

    alone = muon(0.02, **options)
    expected, momentum = jax.jit(alone.update)(grads, jax.jit(alone.init)(params), params)
    compiled, args = step(share)
    updates, state = compiled(*args)
    np.testing.assert_allclose(updates["w"], expected["w"], atol=1e-3 if products else 1e-5)
    assert_same(momentum_of(state), momentum_of(momentum))
    sent = collective_bytes(compiled).total / params["w"].size
    # At most (4 + 4 + 4) / 8 * 7 / 8; on a GPU the last 4 are 2 with products.
    assert 0.8 < sent < 1.4
    left_alone = collective_bytes(step(None)[0]).total / params["w"].size
    assert left_alone > 20


def test_checkpoints_of_optax_and_of_other_devices(tmp_path):
    """A state goes on as if it had not been saved; one of optax is another storage's."""
    tx, start = muon(0.02), drawn(99, {"w": (64, 64)})
    whole, _ = train(tx, 4, params=start)
    params, state = train(tx, 2, params=start)
    mesh = jax.make_mesh((8,), ("fsdp",))
    shardings = state_shardings(tx, params, NamedSharding(mesh, P("fsdp")))
    file = tmp_path / "state"
    jfp8.checkpoint.save(file, jax.device_put(state, shardings))
    restored = jfp8.checkpoint.restore(file, state)
    assert_same(restored, state)
    params, _ = train(tx, 2, params=params, state=restored, first=2)
    assert_same(params, whole)

    _, theirs = train(optax.contrib.muon(0.02), 2, params=start)
    with pytest.raises(ValueError, match="with the same wrappers and storages"):
        jfp8.checkpoint.upgrade(theirs, state)


def test_o2_stores_the_momentum_of_optax():
    params = drawn(0, {"w": (64, 64)})
    _, tx = jfp8.initialize(nn.Dense(8), optax.contrib.muon(0.02), opt_level="O2")
    state = jax.eval_shape(tx.init, params)[1]
    assert momentum_of(state)["w"].data.dtype == jnp.float8_e4m3fn
    _, tx = jfp8.initialize(nn.Dense(8), muon(0.02), opt_level="O2")
    with pytest.raises(ValueError, match="Use O1"):
        jax.eval_shape(tx.init, params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preconditioning": "none"}, "allowed are .*'schatten'"),
        ({"products": "fp8"}, "no recipe called 'fp8'.*current"),
        ({"ns_coeffs": "fast"}, "fast"),
        ({"mu": jfp8.optim.Blocks(jfp8.E8M0FNU, transform="expand")}, "has no sign"),
    ],
    ids=str,
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        muon(0.02, **arguments)


def test_large_gradients_have_the_updates_of_small_ones():
    """The square of 1e18 is beyond f32: a norm of Inf made all updates zero."""
    params = {"w": jnp.zeros((24, 16))}
    small = drawn(1, {"w": (24, 16)})

    def update(grads):
        tx = muon(1.0, mu=Float())
        return tx.update(grads, tx.init(params), params)[0]["w"]

    large = update(jax.tree.map(lambda g: g * 2.0**60, small))
    np.testing.assert_allclose(large, update(small), rtol=1e-5, atol=1e-6)
    assert np.linalg.svd(large, compute_uv=False).min() > 0.5
