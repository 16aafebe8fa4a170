"""Linen modules: drop-in for Flax's own, and the promises about the state they keep."""

import functools

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfp8
from jfp8.linen import DotGeneral
from jfp8.recipes.per_tensor import DelayedScaling, Float8CurrentScaling
from jfp8.recipes.unscaled import Unscaled
from support.amaxes import E4M3, E5M2, ROLES, amax, fake_quantize, only_product, peaking
from support.arrays import assert_same, relative_error
from support.recorded import recorded

KEY = jax.random.key(7)


def assert_is_product(y, equation, a, b, plus=0.0):
    """Sums in f32 in any order are off by n * 2^-24 of the magnitudes; add four roundings."""
    exact = np.einsum(equation, a, b)
    terms = np.einsum(equation, np.ones_like(a), np.ones_like(b)).max(initial=0)
    slack = (terms + 4) * 2.0**-24 * np.einsum(equation, np.abs(a), np.abs(b))
    roundings = 4 * float(jnp.finfo(y.dtype).eps) * (np.abs(exact) + np.abs(plus))
    assert y.shape == exact.shape
    assert np.all(np.abs(np.asarray(y, np.float64) - exact - plus) <= slack + roundings)


def history(fp8, role) -> np.ndarray:
    return np.asarray(only_product(fp8)[role]["amax_history"])


def in_sixteenths(shape, seed=0, scale=1.0) -> jax.Array:
    """Normal numbers in sixteenths, so that sums over a few of them are exact."""
    draw = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(np.round(draw * 16) / 16 * scale, jnp.float32)


X = in_sixteenths((8, 16))
DY = in_sixteenths((8, 4), 1, 2.0**-10)
MATRIX = "ai,ij->aj"


def test_dot_general_cls_is_the_same_layer():
    """Also with a recipe by name."""
    product = functools.partial(DotGeneral, recipe="delayed")
    layers = nn.Dense(4, dot_general_cls=product), jfp8.Dense(4)
    assert_same(*jax.jit(lambda x: [layer.init_with_output(KEY, x) for layer in layers])(X))


def test_einsum_equation_may_come_with_the_call():
    equation = "ab,bc->ac"
    late, early = jfp8.Einsum((16, 4)), jfp8.Einsum((16, 4), equation)
    variables = late.init(KEY, X, equation)
    assert_same(variables, early.init(KEY, X))
    assert_same(late.apply(variables, X, equation), early.apply(variables, X))
    with pytest.raises(ValueError, match="'a' does not name 2 dimensions"):
        late.init(KEY, X, "a,ab->b")


LAYERS = {
    "Dense": lambda **k: jfp8.Dense(4, **k),
    "DenseGeneral": lambda **k: jfp8.DenseGeneral(4, **k),
    "Einsum": lambda **k: jfp8.Einsum((16, 4), "ab,bc->ac", **k),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_clone_uses_the_new_recipe(layer):
    x = in_sixteenths((8, 16)) * 1000
    original = layer(recipe=Unscaled())
    clone = original.clone(recipe=DelayedScaling(amax_history_len=3, fp8_format="E5M2"))
    assert sorted(original.init(KEY, x)) == ["params"]
    variables = clone.init(KEY, x)
    assert history(variables["fp8"], "grad").shape == (3,)
    q_x, q_w = fake_quantize(x, E5M2), fake_quantize(variables["params"]["kernel"], E5M2)
    assert_is_product(clone.apply(variables, x), "ab,bc->ac", q_x, q_w)
    params = {"params": variables["params"]}
    clipped = original.apply(params, x)
    assert_same(clone.clone(recipe=Unscaled()).apply(params, x), clipped)
    assert relative_error(clipped, x @ variables["params"]["kernel"]) > 0.2


@pytest.mark.parametrize("layer", [jfp8.Dense, jfp8.DenseGeneral])
@pytest.mark.parametrize("argument", ["dot_general", "dot_general_cls"])
def test_a_product_of_the_users_own_is_refused(layer, argument):
    words = rf"jfp8.{layer.__name__} computes its matmul itself.*use flax.linen.{layer.__name__}"
    with pytest.raises(ValueError, match=words):
        layer(4, **{argument: jax.lax.dot_general})


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_recipe_by_name(layer):
    text = lambda recipe: str(jax.make_jaxpr(layer(recipe=recipe).init)(KEY, X))
    assert text("delayed") == text(DelayedScaling()) != text("current")
    with pytest.raises(ValueError, match="no recipe called 'delaid'.*\"delayed\""):
        layer(recipe="delaid").init(KEY, X)


def test_state_of_another_recipe_is_refused():
    x = in_sixteenths((8, 16))
    variables = jfp8.Dense(4).init(KEY, x)
    with pytest.raises(ValueError, match=r"belongs to another recipe.*\(16,\).*\(4,\)"):
        jfp8.Dense(4, recipe=DelayedScaling(amax_history_len=4)).apply(variables, x)
    with pytest.raises(ValueError, match="keeps no state.*leave the 'fp8' collection out"):
        jfp8.Dense(4, recipe=Float8CurrentScaling()).apply(variables, x)


def test_frozen_and_boxed_state_is_read_as_what_is_in_it():
    """Flax hands out FrozenDicts in some lifted loops; metadata of NNX or meshes comes in boxes."""
    x = in_sixteenths((8, 16))
    layer = jfp8.Dense(4)
    variables = layer.init(KEY, x)
    variables.pop("fp8_sink")
    variables |= recorded(layer, variables, x)
    apply = lambda variables, x: (layer.apply(variables, x), recorded(layer, variables, x))
    y, expected = apply(variables, 2 * x)
    assert amax(expected["fp8"]["DotGeneral_0"]["lhs"]["amax_history"]) == amax(2 * x)

    frozen_y, frozen = apply(flax.core.freeze(variables), 2 * x)
    np.testing.assert_array_equal(frozen_y, y)
    np.testing.assert_array_equal(*map(np.hstack, map(jax.tree.leaves, (frozen, expected))))
    boxed = jax.tree.map(lambda a: nn.Partitioned(a, (None,) * a.ndim), variables["fp8"])
    boxed_y, new = apply({**variables, "fp8": boxed}, 2 * x)
    np.testing.assert_array_equal(boxed_y, y)
    assert jax.tree.structure(new["fp8"]) == jax.tree.structure(boxed)  # for the next step
    np.testing.assert_array_equal(*map(np.hstack, map(jax.tree.leaves, (new, expected))))


def test_tabulate():
    table = nn.Sequential([jfp8.Dense(4)]).tabulate(KEY, X, console_kwargs={"width": 200})
    assert all(name in table for name in ("layers_0", "fp8_sink", "amax_history"))


def test_modules_are_values():
    """Equal modules compare and hash alike, which nn.jit's and jax.jit's caches need."""
    for layer in (
        functools.partial(jfp8.Dense, 4),
        functools.partial(jfp8.LayerNormMLP, 8),
        functools.partial(jfp8.MultiHeadDotProductAttention, 2, attention_products=True),
        functools.partial(jfp8.TransformerLayer, 16, 24, 4),
    ):
        make = functools.partial(layer, implementation="emulate")
        assert make() == make()
        assert hash(make()) == hash(make())
        assert make() != make(recipe=Float8CurrentScaling())
        assert make() != layer()


DENSE = jfp8.Dense(4, recipe=DelayedScaling(amax_history_len=4))


def dense_variables(model=DENSE):
    return model.init(KEY, X)


def with_history(variables, **amaxes):
    """`variables` with these entries, newest first, in the histories of the only product."""
    state = only_product(variables["fp8"])
    new = jax.tree.map(np.array, state)
    for role, entries in amaxes.items():
        new[role]["amax_history"][: len(entries)] = entries
    replace = lambda node: new if node is state else node
    is_state = lambda node: node is state
    return {**variables, "fp8": jax.tree.map(replace, variables["fp8"], is_leaf=is_state)}


def weighted_sum(model, variables, x=X, dy=DY):
    """A loss whose gradient by the output of the model is `dy`."""
    return jnp.sum(model.apply(variables, x) * dy)


class TestPromise1TwoCollections:
    def test_init_does_not_count_as_a_step(self):
        variables = DENSE.init(KEY, X * 1e6)
        assert not np.any(history(variables["fp8"], "lhs"))

    def test_histories_have_no_gradient(self):
        variables = with_history(dense_variables(), lhs=[9.0], rhs=[3.0], grad=[1.0])
        loss = lambda fp8: weighted_sum(DENSE, {**variables, "fp8": fp8})
        with pytest.warns(UserWarning, match="trains amax histories like weights"):
            gradients = jax.grad(loss)(variables["fp8"])
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))

    def test_the_sink_changes_no_value(self):
        variables = with_history(dense_variables(), lhs=[9.0], rhs=[3.0])
        without = {k: v for k, v in variables.items() if k != "fp8_sink"}
        assert_same(DENSE.apply(variables, X), DENSE.apply(without, X))


@pytest.mark.filterwarnings("ignore:A loss is differentiated with respect to a weight")
class TestPromise2CollectionsDecideWhatIsDelayed:
    """{params}: current; {params, fp8}: delayed x and w; and fp8_sink: delayed gradients too.

    Without a gradient, the scale of w follows from its own amax.
    """

    AMAX = {"lhs": 2.0, "rhs": 0.25, "grad": 3 * 2.0**-10}  # far from the amaxes at hand

    def check(self, collections, delayed, recipe=DENSE.recipe, fmts=(E4M3, E4M3, E5M2), factor=1.0):
        model, margin = jfp8.Dense(4, recipe=recipe), recipe.margin
        full = with_history(dense_variables(model), **{r: [a / 8, a] for r, a in self.AMAX.items()})
        variables = {name: full[name] for name in collections}

        def loss(params, x):
            return weighted_sum(model, {**variables, "params": params}, x)

        y = model.apply(variables, X)
        d_params, dx = jax.grad(loss, argnums=(0, 1))(variables["params"], X)
        q_x, q_w, q_dy = (
            fake_quantize(t, fmt, self.AMAX[role] * factor if role in delayed else None)
            for t, fmt, role in zip((X, variables["params"]["kernel"], DY), fmts, ROLES)
        )
        kernel = variables["params"]["kernel"]
        assert_is_product(y, MATRIX, q_x, fake_quantize(kernel, fmts[1], amax(kernel) * 2**margin))
        assert_is_product(dx, "aj,ij->ai", q_dy, q_w)
        assert_is_product(d_params["kernel"], "ai,aj->ij", q_x, q_dy)

    def test_with_fp8_activations_and_weights_are_delayed(self):
        self.check(["params", "fp8"], delayed=("lhs", "rhs"))

    @pytest.mark.slow
    def test_with_the_sink_gradients_are_delayed_too(self):
        self.check(["params", "fp8", "fp8_sink"], delayed=ROLES)

    @pytest.mark.skipif(
        jax.config.jax_remat3, reason="this option does not say what a gradient is with respect to"
    )
    @pytest.mark.parametrize("collections", [["params"], ["params", "fp8_sink"]])
    def test_without_histories_it_is_current_scaling(self, collections):
        with pytest.warns(UserWarning, match="trained without its 'fp8' collection"):
            self.check(collections, delayed=())


@jax.jit
def jitted_with_gradient(params, state, x):
    def loss(params):
        y, updates = DENSE.apply({"params": params, **state}, x, mutable=list(state.keys()))
        return jnp.sum(y * DY), (y, updates)

    (_, aux), _ = jax.value_and_grad(loss, has_aux=True)(params)
    return aux


class TestPromise3LikeBatchStats:
    PEAKS = (2.0, 3.0, 50.0, 4.0, 5.0, 1.5, 6.0, 2.5, 3.5)  # a spike; histories hold four entries

    @pytest.mark.slow
    def test_histories_fill_one_entry_per_apply_and_are_used(self):
        state, params = flax.core.pop(dense_variables(), "params")
        seen: tuple[list[float], list[float]] = ([], [])
        for step, peak in enumerate(self.PEAKS):
            x, kernel = peaking((8, 16), peak, step), params["kernel"] * (1 + step)
            y, state = jitted_with_gradient({**params, "kernel": kernel}, state, x)

            # The scale comes from the steps before, at most four of them.
            q = [fake_quantize(t, E4M3, max(s, default=None)) for t, s in zip((x, kernel), seen)]
            assert_is_product(y, MATRIX, *q)
            for role, t, entries in zip(ROLES, (x, kernel), seen):
                entries[:] = [float(amax(t)), *entries][:4]
                expected = np.float32(entries + [0.0] * (4 - len(entries)))
                np.testing.assert_array_equal(history(state["fp8"], role), expected)
            assert not np.any(history(state["fp8"], "grad"))
        assert max(seen[0]) == 6.0, "the spike is forgotten"

    def test_a_model_without_histories_starts_them(self):
        params = dense_variables()["params"]
        updates = recorded(DENSE, {"params": params}, X)
        np.testing.assert_array_equal(history(updates["fp8"], "lhs"), [amax(X), 0, 0, 0])

    def test_evaluation_uses_the_histories(self):
        state, params = flax.core.pop(dense_variables(), "params")
        _, state = jitted_with_gradient(params, state, X)
        y = DENSE.apply({"params": params, **state}, 8 * X)
        q_x, q_w = fake_quantize(8 * X, E4M3, amax(X)), fake_quantize(params["kernel"], E4M3)
        assert_is_product(y, MATRIX, q_x, q_w)  # saturated: evaluation does not look ahead

    def test_zeros_predict_nothing(self):
        state, params = flax.core.pop(dense_variables(), "params")
        _, state = jitted_with_gradient(params, state, X)
        y, after = jitted_with_gradient(params, state, jnp.zeros_like(X))
        assert not np.any(y)
        np.testing.assert_array_equal(history(after["fp8"], "lhs"), [amax(X), 0, 0, 0])
