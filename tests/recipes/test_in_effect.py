"""`jfp8.autocast`: regions of a program in which Linen layers compute FP8 products."""

import contextlib
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.recipes import in_effect as region
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.rowwise import RowwiseScaling

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 8))
DELAYED, CURRENT, ROWWISE = DelayedScaling(), Float8CurrentScaling(), RowwiseScaling()


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(8)(x)


MLP = Mlp()
VARIABLES = jax.jit(MLP.init)(KEY, X)


def recipes_of(model=MLP, variables=VARIABLES, x=X) -> dict[str, str]:
    """Which recipe the layers of the model use here; "" for none."""
    return {row.path: row.recipe for row in jfp8.report(model, variables, x).rows}


def both(recipe: str) -> dict[str, str]:
    return {"Dense_0": recipe, "Dense_1": recipe}


def differ(a, b) -> bool:
    """By as much as FP8 makes a difference."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b)) > 1e-3


@pytest.mark.slow
def test_trap_an_already_jitted_function_is_traced_again():
    """Elsewhere a context manager does nothing to an `apply` that was already jitted."""
    traces = []

    @jax.jit
    def apply(variables, x):
        traces.append(None)
        return MLP.apply(variables, x)

    outside = apply(VARIABLES, X)
    with jfp8.autocast(CURRENT):
        inside = apply(VARIABLES, X)
        assert len(traces) == 2
        apply(VARIABLES, X)
        assert len(traces) == 2  # and not each time
    assert differ(inside, outside)
    np.testing.assert_array_equal(apply(VARIABLES, X), outside)
    assert len(traces) == 2
    with jfp8.autocast(ROWWISE):
        other = apply(VARIABLES, X)
    assert len(traces) == 3
    assert differ(other, outside)
    assert np.any(other != inside)
    with jfp8.autocast(Float8CurrentScaling()):  # an equal recipe is the same region
        np.testing.assert_array_equal(apply(VARIABLES, X), inside)
    assert len(traces) == 3


def test_trap_functions_of_jax_are_not_patched():
    """A region changes what layers call, not JAX: products of one's own stay what they are."""
    before = jax.lax.dot_general, jnp.dot, jax.numpy.einsum, nn.Dense.__call__, nn.scan
    with jfp8.autocast(CURRENT):
        assert (jax.lax.dot_general, jnp.dot, jax.numpy.einsum, nn.Dense.__call__, nn.scan) == (
            before
        )
        w = VARIABLES["params"]["Dense_0"]["kernel"]
        np.testing.assert_array_equal(jax.jit(jnp.dot)(X, w), X @ w)
        assert "f8" not in str(jax.make_jaxpr(jnp.dot)(X, w))


def test_trap_unknown_recipes_are_refused():
    for bad, error in (("delaid", ValueError), (None, TypeError), (DelayedScaling, TypeError)):
        with pytest.raises(error, match="recipe"), jfp8.autocast(bad):
            pass
    assert region.current() is None


def test_nested_regions():
    """Also as a decorator, and with the default recipe."""
    assert jfp8.autocast()(region.current)() == region.Region(DELAYED, enabled=True)
    with jfp8.autocast(CURRENT):
        assert recipes_of() == both("current")
        assert jfp8.report(MLP, VARIABLES, X).fp8_fraction == 1  # the logits as well: no edges
        with jfp8.autocast(ROWWISE):
            assert recipes_of() == both("rowwise")
            with jfp8.autocast(CURRENT):
                assert recipes_of() == both("current")
            assert recipes_of() == both("rowwise")
        with jfp8.autocast(CURRENT):
            assert recipes_of() == both("current")
        assert recipes_of() == both("current")
    assert recipes_of() == both("")


def test_an_exception_ends_a_region():
    with contextlib.suppress(ZeroDivisionError), jfp8.autocast(CURRENT):
        1 / 0  # noqa: B018
    assert region.current() is None
    assert recipes_of() == both("")


@pytest.mark.slow
def test_each_thread_has_its_own_regions():
    found = {}
    entered, asked = threading.Event(), threading.Event()

    def work():
        found["before"] = recipes_of()
        with jfp8.autocast(ROWWISE):
            entered.set()
            assert asked.wait(60)
            found["inside"] = recipes_of()
        found["after"] = recipes_of()

    thread = threading.Thread(target=work)
    with jfp8.autocast(CURRENT):
        thread.start()
        assert entered.wait(60)
        found["here"] = recipes_of()
        asked.set()
        thread.join(120)
    assert found == {
        "before": both(""),
        "inside": both("rowwise"),
        "after": both(""),
        "here": both("current"),
    }


def test_layers_of_jfp8():
    """Without a recipe they use the region's, with one they keep it."""
    model = nn.Sequential(
        [
            jfp8.Dense(8),
            jfp8.Dense(8, recipe=CURRENT),
            jfp8.DenseGeneral(8),
            jfp8.Einsum((8, 8), "ab,bc->ac"),
            jfp8.Conv(8, (2,)),
            jfp8.ConvTranspose(8, (2,)),
        ]
    )
    shapes = jax.eval_shape(model.init, KEY, X)
    names = [f"layers_{i}" for i in range(6)]
    outside = dict.fromkeys(names, "delayed") | {"layers_1": "current"}
    assert recipes_of(model, shapes) == outside
    with jfp8.autocast(ROWWISE):
        inside = dict.fromkeys(names, "rowwise") | {"layers_1": "current"}
        assert recipes_of(model, shapes) == inside
        with jfp8.autocast(enabled=False):
            assert recipes_of(model, shapes) == dict.fromkeys(names, "")
    assert recipes_of(model, shapes) == outside


def test_layers_of_jfp8_keep_their_implementation():
    model = jfp8.Dense(8, implementation="xla")
    params = jax.eval_shape(nn.Dense(8).init, KEY, X)

    def operands(model):
        text = jax.jit(model.apply).lower(params, X).as_text()
        return {"f8E4M3FN" in t.split("->")[0] for t in text.splitlines() if "dot_general" in t}

    assert True in operands(model)
    with jfp8.autocast(CURRENT):
        assert True in operands(model)
        assert True not in operands(jfp8.Dense(8))


@pytest.mark.slow
def test_converted_models_keep_their_recipe():
    model = jfp8.convert(MLP, CURRENT, exempt="Dense_1")
    with jfp8.autocast(ROWWISE):
        assert recipes_of(model) == {"Dense_0": "current", "Dense_1": ""}
        with jfp8.autocast(ROWWISE, enabled=False):
            assert recipes_of(model) == both("")
    assert recipes_of(model) == {"Dense_0": "current", "Dense_1": ""}


def test_a_region_inside_of_a_converted_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            with jfp8.autocast(ROWWISE):
                x = nn.Dense(8)(x)
            with jfp8.autocast(enabled=False):
                x = nn.Dense(8)(x)
            return nn.Dense(8)(x)

    model = jfp8.convert(Model(), CURRENT, exempt=())
    shapes = jax.eval_shape(model.init, KEY, X)
    assert recipes_of(model, shapes) == {
        "Dense_0": "current",
        "Dense_1": "rowwise",
        "Dense_2": "",
        "Dense_3": "current",
    }
